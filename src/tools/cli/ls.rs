//! `kvgate ls`: the spaces of a bucket, or the chunks of one space.

use clap::Args;
use futures::{TryStreamExt, pin_mut};
use serde::Serialize;
use serde_json::json;

use super::args::{ConnectArgs, SpaceArgs};
use super::bucket::OpenBucket;
use super::error::CliError;
use super::logging;
use super::output::{Out, bytes, count, time};
use super::progress::Progress;
use crate::format::{Kind, ModelId, Protection, SpaceKey};
use crate::inventory::{Page, SpaceJson, SpaceSummary, StoredChunk};

/// Lists the spaces in the bucket, or the chunks of one.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate ls --endpoint http://rgw:8000 --bucket kv
  kvgate ls --bucket kv --space 5c2f0a3bd1e94f7786a0c1d2e3f4a5b6 --limit 20")]
pub struct LsArgs {
    /// Most spaces or chunks to show.
    #[arg(long, value_name = "NUMBER")]
    limit: Option<usize>,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    space: SpaceArgs,
}

pub async fn run(args: LsArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let config = args.connect.load(Vec::new())?.config;
    logging::init(&config.log, verbose);
    let space = args.space.given()?;
    let bucket = OpenBucket::open(config).await?;
    match space {
        Some(space) => chunks(&bucket, space.key(), &args, out).await,
        None => spaces(&bucket, &args, out).await,
    }
}

async fn spaces(bucket: &OpenBucket, args: &LsArgs, out: &mut Out) -> Result<(), CliError> {
    let progress = Progress::spinner("listing");
    let (mut objects, mut sum) = (0, 0);
    let seen = |page: &Page| {
        objects += page.chunks.len() as u64;
        sum += page.chunks.iter().map(|chunk| chunk.bytes).sum::<u64>();
        progress.seen("listing", objects, sum);
    };
    let summary = bucket.inventory.summary(None, seen).await?;
    drop(progress);
    let shown = &summary.spaces[..args.limit.unwrap_or(usize::MAX).min(summary.spaces.len())];
    if args.json {
        let spaces: Vec<SpaceRow> = shown.iter().map(SpaceRow::of).collect();
        return out.json(&json!({
            "spaces": spaces,
            "truncated": shown.len() < summary.spaces.len(),
            "chunks": objects,
            "bytes": sum,
            "foreign": { "objects": summary.foreign, "bytes": summary.foreign_bytes },
        }));
    }
    let rows: Vec<SpaceRow> = shown.iter().map(SpaceRow::of).collect();
    if !rows.is_empty() {
        // Spaces of one model differ by these.
        let is_shared = rows.iter().any(SpaceRow::is_a_tenants);
        let owner: &[_] = if is_shared { &["tenant", "protection"] } else { &[] };
        let headings = [
            &["space", "model", "revision"],
            owner,
            &["kind", "dtype", ">chunks", ">bytes"],
        ];
        let rows: Vec<_> = rows.into_iter().map(|row| row.cells(is_shared)).collect();
        out.table(&headings.concat(), &rows)?;
    }
    let spaces = count(summary.spaces.len() as u64, "space");
    out.line(format_args!(
        "{spaces}, {}, {}",
        count(objects, "chunk"),
        bytes(sum)
    ))?;
    foreign(summary.foreign, summary.foreign_bytes, out)
}

/// A space in the report; unreadable parts are empty, with the reason beside them.
#[derive(Serialize)]
struct SpaceRow {
    /// The whole id if known, else the half that keys have.
    space: String,
    #[serde(skip)]
    key: SpaceKey,
    model: String,
    revision: String,
    /// The same for all kinds of KV of a model.
    model_id: Option<ModelId>,
    kind: Option<Kind>,
    draft: String,
    tenant: String,
    protection: Option<Protection>,
    dtype: &'static str,
    chunk_tokens: u32,
    chunks: u64,
    bytes: u64,
    space_json: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    problem: Option<String>,
}

impl SpaceRow {
    fn of(summary: &SpaceSummary) -> Self {
        let mut row = Self {
            space: summary.key.to_string(),
            key: summary.key,
            model: String::new(),
            revision: String::new(),
            model_id: None,
            kind: None,
            draft: String::new(),
            tenant: String::new(),
            protection: None,
            dtype: "",
            chunk_tokens: 0,
            chunks: summary.chunks,
            bytes: summary.bytes,
            space_json: summary.json.code(),
            problem: None,
        };
        match &summary.json {
            SpaceJson::Good(space) => {
                row.space = space.id().to_string();
                space.model().clone_into(&mut row.model);
                space.revision().clone_into(&mut row.revision);
                row.model_id = Some(space.model_id());
                row.kind = Some(space.kind());
                space.draft().clone_into(&mut row.draft);
                space.tenant().clone_into(&mut row.tenant);
                row.protection = Some(space.protection());
                row.dtype = space.dtype().name();
                row.chunk_tokens = space.chunk_tokens();
            }
            SpaceJson::Missing => row.problem = Some("no space.json".into()),
            SpaceJson::Damaged(reason) => row.problem = Some(format!("damaged space.json: {reason}")),
            SpaceJson::Unreadable(reason) => row.problem = Some(format!("space.json: {reason}")),
        }
        row
    }

    fn is_a_tenants(&self) -> bool {
        !self.tenant.is_empty() || self.protection.is_some_and(|protection| !protection.is_none())
    }

    /// `is_shared`: with tenant and protection.
    fn cells(self, is_shared: bool) -> Vec<String> {
        let mut cells = vec![
            self.key.to_string(),
            self.problem.map_or(self.model, |problem| format!("({problem})")),
            self.revision,
        ];
        if is_shared {
            let protection = self.protection.map(|protection| protection.to_string());
            cells.extend([self.tenant, protection.unwrap_or_default()]);
        }
        cells.extend([
            match (self.kind, self.draft.is_empty()) {
                (Some(kind), true) => kind.to_string(),
                (Some(kind), false) => format!("{kind}, draft"),
                (None, _) => String::new(),
            },
            self.dtype.to_owned(),
            self.chunks.to_string(),
            bytes(self.bytes),
        ]);
        cells
    }
}

async fn chunks(bucket: &OpenBucket, space: SpaceKey, args: &LsArgs, out: &mut Out) -> Result<(), CliError> {
    let limit = args.limit.unwrap_or(usize::MAX);
    let (mut shown, mut sum, mut alien) = (0, 0, (0, 0));
    let (mut collected, mut known, mut more) = (Vec::<StoredChunk>::new(), false, false);
    let pages = bucket.inventory.pages(Some(space));
    pin_mut!(pages);
    let progress = Progress::spinner("listing");
    while let Some(page) = pages.try_next().await? {
        known |= !page.spaces.is_empty() || !page.chunks.is_empty();
        alien = (alien.0 + page.foreign, alien.1 + page.foreign_bytes);
        for chunk in page.chunks {
            if shown == limit {
                more = true;
                break;
            }
            shown += 1;
            sum += chunk.bytes;
            match args.json {
                true => collected.push(chunk),
                false => progress.pause(|| line(&chunk, out))?,
            }
        }
        if more {
            break;
        }
        progress.seen("listing", shown as u64, sum);
        out.flush()?;
    }
    drop(progress);
    if !known {
        return Err(bucket.unknown_space(&space.to_string()));
    }
    if args.json {
        return out.json(&json!({
            "space": space.to_string(),
            "chunks": collected,
            "truncated": more,
            "bytes": sum,
            "foreign": { "objects": alien.0, "bytes": alien.1 },
        }));
    }
    let rest = if more { "; there are more (--limit)" } else { "" };
    out.line(format_args!(
        "{}, {}{rest}",
        count(shown as u64, "chunk"),
        bytes(sum)
    ))?;
    foreign(alien.0, alien.1, out)
}

fn line(chunk: &StoredChunk, out: &mut Out) -> Result<(), CliError> {
    let size = bytes(chunk.bytes);
    out.line(format_args!(
        "{}  {size:>10}  {}  {}",
        chunk.hash,
        time(chunk.modified),
        chunk.etag
    ))
}

fn foreign(objects: u64, sum: u64, out: &mut Out) -> Result<(), CliError> {
    match objects {
        0 => Ok(()),
        _ => out.line(format_args!(
            "{}, {} that are no chunks under this prefix",
            count(objects, "other object"),
            bytes(sum)
        )),
    }
}
