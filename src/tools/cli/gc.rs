//! `kvgate gc`: removes the chunks that are least worth keeping, down to a size or by the time since their last use. Tells
//! what would go, and removes it with `--yes`.

use std::cell::Cell;
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use serde_json::json;

use super::args::{ConnectArgs, SelectArgs};
use super::bucket::OpenBucket;
use super::error::CliError;
use super::interrupts::interrupts;
use super::logging;
use super::output::{Out, bytes, count, tell, time};
use super::progress::Progress;
use crate::config::units::{ByteSize, parse_duration, show_duration};
use crate::format::{KeyId, SpaceKey};
use crate::inventory::{Collected, Count, GcError, GcLimits, GcSpec, Parents, Plan, Step};

/// Removes the chunks that are least worth keeping: down to a size, or unused for a time.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate gc --bucket kv --size 10TiB                        what would go
  kvgate gc --bucket kv --size 10TiB --yes --resume gc.log  stopped? run it again, and it goes on
  kvgate gc --bucket kv --unused 30d --yes --rate 100
  kvgate gc --bucket kv --tenant-size 1TiB --yes            each tenant down to 1 TiB
  kvgate gc --bucket kv --tenant acme --size 500GiB --yes   this one alone
  kvgate gc --bucket kv --revision 62bd457 --yes            all of an old revision
  kvgate gc --bucket kv --key-id 53a1...c20e --yes          what a key wrote that is in wrong hands

Chunks that were not used for the longest time go first, and of a prompt its last chunks first: whole prefixes are left,
wherever it ends. A chunk counts as used when it, or one that needs it, was stored or refreshed ([refresh]). Chunks that are
stored or refreshed while this runs stay. Without a limit the whole selection goes (--space, --model, --revision, --tenant). What
a key wrote goes whatever is stored meanwhile, and all that follows it in its prompts, which was computed from it.")]
pub struct GcArgs {
    /// Bytes that may stay.
    #[arg(long, value_name = "SIZE")]
    size: Option<ByteSize>,
    /// Bytes of each tenant that may stay.
    #[arg(long, value_name = "SIZE")]
    tenant_size: Option<ByteSize>,
    /// Remove chunks that were not used for this time, such as 30d. It needs a unit.
    #[arg(long, value_name = "TIME", value_parser = unused)]
    unused: Option<Duration>,
    /// Remove what this key wrote, and all that follows it in its prompts; `kvgate rekey` shows the ids.
    #[arg(long, value_name = "ID", value_parser = key_id, conflicts_with_all = ["size", "tenant_size", "unused"])]
    key_id: Option<KeyId>,
    #[command(flatten)]
    select: SelectArgs,
    /// Objects to remove a second, at most.
    #[arg(long, value_name = "NUMBER", default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..))]
    rate: u32,
    /// File with what is known of the bucket: an interrupted run goes on from there, and the next one is faster.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Chunks that fit in memory; each takes some 250 bytes.
    #[arg(long, value_name = "NUMBER", default_value_t = 4_000_000)]
    chunks_max: usize,
    /// Remove it. Otherwise nothing is removed.
    #[arg(long, short)]
    yes: bool,
    /// Say what would be removed, and remove nothing: the same as without --yes.
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: ConnectArgs,
}

/// A number alone would be seconds, and who writes 30 means days.
fn unused(text: &str) -> Result<Duration, String> {
    let number = text.trim();
    if !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(format!("it has no unit: write {number}d, or {number}s"));
    }
    parse_duration(text).map_err(|error| error.to_string())
}

fn key_id(text: &str) -> Result<KeyId, String> {
    KeyId::from_hex(text).ok_or_else(|| "it is not 32 hex digits; `kvgate rekey` lists the ids".into())
}

impl From<GcError> for CliError {
    fn from(error: GcError) -> Self {
        match error {
            GcError::Object(error) => error.into(),
            _ => Self::Usage(error.to_string()),
        }
    }
}

pub async fn run(args: GcArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let config = args.connect.load(Vec::new())?.config;
    logging::init(&config.log, verbose);
    let spec = args.spec()?;
    let bucket = OpenBucket::open(config).await?;
    let mut parents = match &args.resume {
        Some(path) => Parents::open(path, &bucket.place())?,
        None => Parents::default(),
    };
    let inventory = &bucket.inventory;
    let began = match parents.began().filter(|_| args.yes) {
        Some(began) => began,
        None => inventory.begin_gc().await?,
    };
    let progress = Progress::spinner("listing");
    let show = |step| match step {
        Step::Listing(found) => progress.seen("listing", found.chunks, found.bytes),
        Step::Reading(done, total) => progress.say(format!("reading headers: {done} of {total}")),
        Step::Removing(..) => {}
    };
    let mut interrupts = interrupts()?;
    let plan = tokio::select! {
        plan = inventory.plan_gc(&spec, began, &mut parents, show) => Some(plan?),
        _ = interrupts.changed() => None,
    };
    drop(progress);
    let Some(plan) = plan else {
        parents.flush()?;
        return Err(args.stopped("nothing was removed"));
    };
    let under_way = match args.yes {
        true => Some(began),
        false => parents.began(),
    };
    parents.settle(|chunk| plan.has(chunk), under_way)?;
    let (mut collected, mut stopped) = (None, None);
    if args.yes {
        let progress = Progress::bar("removing", plan.planned.chunks);
        let gone = Cell::new(0);
        let step = |step| {
            if let Step::Removing(removed, _) = step {
                gone.set(removed.chunks);
                progress.set(removed.chunks, removed.bytes);
            }
        };
        let (goes_on, mut again) = (|| *interrupts.borrow() == 0, interrupts.clone());
        let removal = tokio::select! {
            removal = inventory.remove_planned(&plan, goes_on, step) => removal.map_err(CliError::from),
            _ = again.wait_for(|count| *count > 1) => Err(CliError::Failed("interrupted".into())),
        };
        drop(progress);
        let so_far = || {
            format!(
                "{} of {} removed",
                gone.get(),
                count(plan.planned.chunks, "object")
            )
        };
        let done = removal.inspect_err(|_| tell(args.stopped(&so_far())))?;
        match done.stopped {
            true => stopped = Some(args.stopped(&so_far())),
            false => parents.settle(|_| true, None)?,
        }
        collected = Some(done);
    }
    match args.json {
        true => json(&plan, collected, &spec, out)?,
        false => text(&plan, collected, &spec, out)?,
    }
    stopped.map_or(Ok(()), Err)
}

/// As it was understood.
fn words(limits: &GcLimits) -> String {
    let parts = [
        limits.bytes.map(|size| format!("down to {}", bytes(size))),
        limits
            .tenant_bytes
            .map(|size| format!("each tenant down to {}", bytes(size))),
        limits
            .unused
            .map(|time| format!("what was unused for {}", show_duration(time))),
    ];
    parts.into_iter().flatten().collect::<Vec<_>>().join("; ")
}

impl GcArgs {
    fn stopped(&self, done: &str) -> CliError {
        let next = match &self.resume {
            Some(path) => format!("run it again with --resume {} to go on", path.display()),
            None => "run it again to go on; --resume FILE would save it from reading all anew".to_owned(),
        };
        CliError::Failed(format!("stopped: {done}; {next}"))
    }

    fn spec(&self) -> Result<GcSpec, CliError> {
        let spec = GcSpec {
            select: self.select.clone().into(),
            limits: GcLimits {
                bytes: self.size.map(ByteSize::bytes),
                tenant_bytes: self.tenant_size.map(ByteSize::bytes),
                unused: self.unused,
            },
            key: self.key_id,
            rate: self.rate,
            chunks_max: self.chunks_max,
        };
        if spec.select.is_all() && spec.limits == GcLimits::default() && spec.key.is_none() {
            return Err(CliError::usage(
                "what may stay? Give --size SIZE, --tenant-size SIZE or --unused TIME; or what shall go: --space ID, \
                 --model NAME, --revision REVISION, --tenant NAME or --key-id ID",
            ));
        }
        Ok(spec)
    }
}

fn json(plan: &Plan, collected: Option<Collected>, spec: &GcSpec, out: &mut Out) -> Result<(), CliError> {
    let space = |(key, count): &(SpaceKey, Count)| json!({ "space": key.to_string(), "objects": count.chunks, "bytes": count.bytes });
    let spaces = |of: &[_]| of.iter().map(space).collect::<Vec<_>>();
    let removed = collected.map(|collected| collected.removed).unwrap_or_default();
    out.json(&json!({
        "dry_run": collected.is_none(),
        "began": plan.began,
        "limits": {
            "bytes": spec.limits.bytes,
            "tenant_bytes": spec.limits.tenant_bytes,
            "unused_seconds": spec.limits.unused.map(|time| time.as_secs_f64()),
        },
        "found": { "objects": plan.found.chunks, "bytes": plan.found.bytes },
        "planned": { "objects": plan.planned.chunks, "bytes": plan.planned.bytes },
        "of_key": { "objects": plan.of_key.chunks, "bytes": plan.of_key.bytes },
        "spaces": spaces(&plan.by_space),
        "unnamed": spaces(&plan.unnamed),
        "removed": { "objects": removed.chunks, "bytes": removed.bytes },
        "kept": collected.map_or(0, |collected| collected.kept),
        "stopped": collected.is_some_and(|collected| collected.stopped),
    }))
}

fn text(plan: &Plan, collected: Option<Collected>, spec: &GcSpec, out: &mut Out) -> Result<(), CliError> {
    let what = |count: crate::inventory::Count| {
        format!(
            "{}, {}",
            super::output::count(count.chunks, "object"),
            bytes(count.bytes)
        )
    };
    out.line(format_args!(
        "found    {}, stored by {}",
        what(plan.found),
        time(plan.began)
    ))?;
    if spec.limits != GcLimits::default() {
        out.line(format_args!("limit    {}", words(&spec.limits)))?;
    }
    if !plan.unnamed.is_empty() {
        let mut left = Count::default();
        plan.unnamed
            .iter()
            .for_each(|(_, of)| left.add(of.chunks, of.bytes));
        out.line(format_args!(
            "left     {} in {} without a space.json that can be read: `kvgate ls` shows them, and --space ID takes one",
            what(left),
            count(plan.unnamed.len() as u64, "space")
        ))?;
    }
    if spec.key.is_some() && plan.planned == Count::default() {
        return out.line("no chunk names this key: `kvgate rekey` lists the ids");
    }
    let Some(collected) = collected else {
        out.line(format_args!("would go {}", what(plan.planned)))?;
        if plan.of_key != Count::default() {
            out.line(format_args!(
                "of them  {} of the key; the rest follows them in their prompts",
                what(plan.of_key)
            ))?;
        }
        if !plan.by_space.is_empty() {
            let row =
                |(key, of): &(SpaceKey, Count)| vec![key.to_string(), of.chunks.to_string(), bytes(of.bytes)];
            let rows: Vec<_> = plan.by_space.iter().map(row).collect();
            out.line("")?;
            out.table(&["space", ">objects", ">bytes"], &rows)?;
            out.line("")?;
        }
        return out.line("nothing was removed: give --yes to remove it");
    };
    out.line(format_args!("removed  {}", what(collected.removed)))?;
    match collected.kept {
        0 => Ok(()),
        kept => out.line(format_args!(
            "stayed   {}: stored or used since, or needed by such",
            count(kept, "object")
        )),
    }
}
