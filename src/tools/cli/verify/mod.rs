//! `kvgate verify`: reads each chunk of a bucket, checks key, header and digests, and removes damaged ones if told
//! to.

mod report;

use std::collections::BTreeMap;

use clap::Args;
use futures::{TryStreamExt, pin_mut};
use tokio::time::Instant;

use crate::arena::SLOT_ALIGN;
use crate::cache::gateway::Gateway;
use crate::format::Space;
use crate::inventory::{ObjectChecked, ObjectVerdict, SpaceJson, SpaceSummary};
use crate::tools::cli::args::{ConnectArgs, SpaceArgs, SpaceRef};
use crate::tools::cli::bucket::OpenBucket;
use crate::tools::cli::error::CliError;
use crate::tools::cli::logging;
use crate::tools::cli::output::{Out, bytes, count};
use crate::tools::cli::progress::Progress;
use report::{ObjectProblem, Totals, VerifyReport};

/// The code of a chunk whose key is not here.
const NO_KEY: &str = "no_key";

/// Reads every chunk and checks key, header and digests.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate verify --bucket kv                          all spaces in the bucket
  kvgate verify --bucket kv --space 5c2f0a3bd1e94f7786a0c1d2e3f4a5b6 --delete

Damaged chunks harm nobody: a load that meets one counts it as a miss, and the next store replaces it.
Exit status: 1 if anything is damaged, also if it was removed, or could not be checked.")]
pub struct VerifyArgs {
    /// Remove what is damaged, unless it has been replaced since.
    #[arg(long)]
    delete: bool,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    space: SpaceArgs,
}

pub async fn run(args: VerifyArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let config = args.connect.load(Vec::new())?.config;
    // The gateway warns of each damaged chunk, and the report has them too.
    logging::init_without(&config.log, verbose, Some("kvgate::cache::episode"));
    let given = args.space.given()?;
    let bucket = OpenBucket::open(config).await?;
    let progress = Progress::spinner("listing");
    let key = given.as_ref().map(SpaceRef::key);
    let summary = bucket.inventory.summary(key, |_| ()).await?;
    drop(progress);
    if let (Some(key), true) = (key, summary.spaces.is_empty()) {
        return Err(bucket.unknown_space(&key.to_string()));
    }
    let arena_bytes = usize::try_from(bucket.config.arena.size.bytes()).unwrap_or(usize::MAX);
    let objects = summary.spaces.iter().map(|space| space.chunks).sum();
    let started = Instant::now();
    let mut check = Check {
        gateway: bucket.reader(arena_bytes)?,
        progress: Progress::bar("verifying", objects),
        args: &args,
        bucket: &bucket,
        out,
        totals: Totals::default(),
        problems: Vec::new(),
        keyless: BTreeMap::new(),
    };
    // Checks all geometries first, so that a long run does not fail at the last one.
    let spaces: Vec<(&SpaceSummary, Option<Space>)> = summary
        .spaces
        .iter()
        .map(|found| (found, known(found, given.as_ref())))
        .collect();
    for space in spaces.iter().filter_map(|(_, space)| space.as_ref()) {
        check.fits(space)?;
    }
    // Results from before a failure are reported too.
    let outcome = check.spaces(&spaces).await;
    drop(check.progress);
    let report = VerifyReport {
        totals: check.totals,
        problems: check.problems,
        foreign: summary.foreign,
        spaces: summary.spaces.iter().map(|space| space.key).collect(),
        elapsed: started.elapsed(),
    };
    let found = report.write(args.json, check.out);
    outcome.and(found)
}

/// The space: as given, or as described in the bucket.
fn known(found: &SpaceSummary, given: Option<&SpaceRef>) -> Option<Space> {
    match (given, &found.json) {
        (Some(SpaceRef::Known(space)), _) | (_, SpaceJson::Good(space)) => Some(space.clone()),
        _ => None,
    }
}

struct Check<'a> {
    gateway: Gateway,
    progress: Progress,
    args: &'a VerifyArgs,
    bucket: &'a OpenBucket,
    out: &'a mut Out,
    totals: Totals,
    problems: Vec<ObjectProblem>,
    /// Of the space under way: chunks whose key is not here, by what is said of them.
    keyless: BTreeMap<String, u64>,
}

impl Check<'_> {
    fn fits(&self, space: &Space) -> Result<(), CliError> {
        let object = space.layout().object_len().next_multiple_of(SLOT_ALIGN);
        let arena = self.gateway.arena().size();
        if object <= arena {
            return Ok(());
        }
        Err(CliError::usage(format!(
            "a chunk of {} takes {} of the arena, which has {}: raise [arena] size, such as with \
             KVGATE__ARENA__SIZE={object}",
            space.model(),
            bytes(object as u64),
            bytes(arena as u64)
        )))
    }

    async fn spaces(&mut self, spaces: &[(&SpaceSummary, Option<Space>)]) -> Result<(), CliError> {
        for (found, space) in spaces {
            let outcome = self.space(found, space.as_ref()).await;
            for (reason, chunks) in std::mem::take(&mut self.keyless) {
                let key = self.bucket.inventory.keys().space(found.key);
                let reason = format!("{}: {reason}", count(chunks, "chunk"));
                self.line(ObjectProblem {
                    key,
                    state: "unknown",
                    code: NO_KEY,
                    reason,
                    deleted: false,
                })?;
            }
            outcome?;
        }
        Ok(())
    }

    async fn space(&mut self, found: &SpaceSummary, space: Option<&Space>) -> Result<(), CliError> {
        self.space_json(found).await?;
        let Some(space) = space else {
            self.totals.unknown += found.chunks;
            self.totals.chunks += found.chunks;
            return Ok(());
        };
        let inventory = &self.bucket.inventory;
        let checks = inventory.verify(&self.gateway, space);
        pin_mut!(checks);
        while let Some(checked) = checks.try_next().await? {
            self.chunk(checked).await?;
            self.progress.set(self.totals.chunks, self.totals.bytes);
        }
        Ok(())
    }

    async fn space_json(&mut self, found: &SpaceSummary) -> Result<(), CliError> {
        let chunks = count(found.chunks, "chunk");
        let (state, reason) = match &found.json {
            SpaceJson::Good(_) => return Ok(()),
            SpaceJson::Missing => (
                "damaged",
                format!("it is missing; the next store of the space writes it ({chunks})"),
            ),
            SpaceJson::Damaged(reason) => ("damaged", format!("{reason} ({chunks})")),
            SpaceJson::Unreadable(reason) => ("unknown", format!("{reason} ({chunks})")),
        };
        let remove = self.args.delete && matches!(found.json, SpaceJson::Damaged(_));
        let removal = match remove {
            true => self
                .bucket
                .inventory
                .remove_space_json(found.key)
                .await
                .map(|()| true),
            false => Ok(false),
        };
        match state {
            "damaged" => self.totals.damaged += 1,
            _ => self.totals.unknown += 1,
        }
        self.problem(
            ObjectProblem {
                key: self.bucket.inventory.keys().space_json(found.key),
                state,
                code: found.json.code(),
                reason,
                deleted: false,
            }
            .removed(removal),
        )
    }

    async fn chunk(&mut self, checked: ObjectChecked) -> Result<(), CliError> {
        let ObjectChecked { chunk, verdict } = checked;
        self.totals.chunks += 1;
        self.totals.bytes += chunk.bytes;
        let code = verdict.code();
        let (state, miss, removal) = match verdict {
            ObjectVerdict::Good => {
                self.totals.ok += 1;
                return Ok(());
            }
            ObjectVerdict::Gone => {
                self.totals.gone += 1;
                return Ok(());
            }
            ObjectVerdict::Unknown(miss) => {
                self.totals.unknown += 1;
                ("unknown", miss, Ok(false))
            }
            ObjectVerdict::Damaged(miss) => {
                self.totals.damaged += 1;
                let removal = match self.args.delete {
                    true => self.bucket.inventory.remove_if_unchanged(&chunk).await,
                    false => Ok(false),
                };
                ("damaged", miss, removal)
            }
        };
        self.problem(
            ObjectProblem {
                key: self.bucket.inventory.keys().chunk(chunk.space, &chunk.hash),
                state,
                code,
                reason: miss.to_string(),
                deleted: false,
            }
            .removed(removal),
        )
    }

    /// Written at once, or kept for the JSON document. What lacks a key is the same for all chunks, and told at the end.
    fn problem(&mut self, problem: ObjectProblem) -> Result<(), CliError> {
        self.totals.deleted += u64::from(problem.deleted);
        if self.args.json {
            self.problems.push(problem);
            return Ok(());
        }
        if problem.code == NO_KEY {
            *self.keyless.entry(problem.reason).or_default() += 1;
            return Ok(());
        }
        self.line(problem)
    }

    fn line(&mut self, problem: ObjectProblem) -> Result<(), CliError> {
        let out = &mut *self.out;
        self.progress.pause(|| {
            out.line(problem)?;
            out.flush()
        })
    }
}
