//! `kvgate rm`: removes chunks, or a whole space. It asks first, unless told `--yes`.

use std::io::{self, BufRead, IsTerminal, Write};

use clap::Args;
use serde_json::json;

use super::args::{ConnectArgs, SpaceArgs, SpaceRef};
use super::bucket::OpenBucket;
use super::error::CliError;
use super::logging;
use super::output::{Out, bytes, count, printable};
use super::progress::Progress;
use crate::format::{ChunkHash, SpaceKey};
use crate::inventory::{Page, SpaceJson, SpaceSummary};

/// Removes a whole space, or some of its chunks.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate rm --bucket kv --space 5c2f0a3bd1e94f7786a0c1d2e3f4a5b6 --dry-run
  kvgate rm --bucket kv --space 5c2f0a3bd1e94f7786a0c1d2e3f4a5b6 --yes
  kvgate rm --bucket kv --space 5c2f0a3bd1e94f7786a0c1d2e3f4a5b6 --chunk HASH HASH

Nodes that have seen a chunk count it as present for [lookup] present_ttl; meanwhile a load of it is a miss.")]
pub struct RmArgs {
    /// Only these chunks (64 hex digits each).
    #[arg(long, value_name = "HASH", num_args = 1.., value_delimiter = ',', value_parser = hash)]
    chunk: Vec<ChunkHash>,
    /// Don't ask before a whole space is removed.
    #[arg(long, short)]
    yes: bool,
    /// Say what would be removed, and remove nothing.
    #[arg(long)]
    dry_run: bool,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    space: SpaceArgs,
}

fn hash(text: &str) -> Result<ChunkHash, String> {
    text.parse::<ChunkHash>().map_err(|error| error.to_string())
}

pub async fn run(args: RmArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let config = args.connect.load(Vec::new())?.config;
    logging::init(&config.log, verbose);
    let space = args.space.required()?;
    let bucket = OpenBucket::open(config).await?;
    match args.chunk.is_empty() {
        true => whole(&bucket, &space, &args, out).await,
        false => chunks(&bucket, space.key(), &args, out).await,
    }
}

async fn chunks(bucket: &OpenBucket, space: SpaceKey, args: &RmArgs, out: &mut Out) -> Result<(), CliError> {
    if !bucket.inventory.has_space(space).await? {
        return Err(bucket.unknown_space(&space.to_string()));
    }
    let number = args.chunk.len() as u64;
    if !args.dry_run {
        bucket.inventory.remove_chunks(space, &args.chunk).await?;
    }
    if args.json {
        return out.json(&json!({
            "space": space.to_string(),
            "objects": number,
            "dry_run": args.dry_run,
        }));
    }
    let chunks = count(number, "chunk");
    match args.dry_run {
        true => out.line(format_args!("would remove {chunks}")),
        false => out.line(format_args!(
            "removed {chunks}; those that were not there count too"
        )),
    }
}

async fn whole(bucket: &OpenBucket, given: &SpaceRef, args: &RmArgs, out: &mut Out) -> Result<(), CliError> {
    let space = given.key();
    let progress = Progress::spinner("listing");
    let (mut objects, mut sum) = (0, 0);
    let seen = |page: &Page| {
        objects += (page.chunks.len() + page.spaces.len()) as u64;
        sum += page.chunks.iter().map(|chunk| chunk.bytes).sum::<u64>();
        progress.seen("listing", objects, sum);
    };
    let summary = bucket.inventory.summary(Some(space), seen).await?;
    drop(progress);
    let Some(found) = summary.spaces.first() else {
        return Err(bucket.unknown_space(&space.to_string()));
    };
    let what = format!("{}, {}", count(objects, "object"), bytes(sum));
    let name = name_of(found);
    if args.dry_run {
        return match args.json {
            true => out.json(&json!({
                "space": space.to_string(), "objects": objects, "bytes": sum, "dry_run": true,
                "foreign": summary.foreign,
            })),
            false => out.line(format_args!("would remove space {space} {name}: {what}")),
        };
    }
    if !args.yes {
        confirm(&format!("remove space {space} {name}: {what}?"))?;
    }
    let progress = Progress::bar("removing", objects);
    let removed = bucket
        .inventory
        .remove_space(space, |removed| progress.set(removed.objects, removed.bytes));
    let removed = removed.await?;
    drop(progress);
    if args.json {
        return out.json(&json!({
            "space": space.to_string(), "objects": removed.objects, "bytes": removed.bytes, "dry_run": false,
            "foreign": summary.foreign,
        }));
    }
    let left = match summary.foreign {
        0 => String::new(),
        foreign => format!("; not its chunks, so left: {}", count(foreign, "object")),
    };
    let what = format!("{}, {}", count(removed.objects, "object"), bytes(removed.bytes));
    out.line(format_args!("removed space {space} {name}: {what}{left}"))
}

/// Spaces of one model differ by tenant and protection.
fn name_of(space: &SpaceSummary) -> String {
    let SpaceJson::Good(known) = &space.json else {
        return format!("({})", space.json.code());
    };
    let mut words = vec![known.model().to_owned()];
    if !known.tenant().is_empty() {
        words.push(format!("tenant {}", known.tenant()));
    }
    if !known.protection().is_none() {
        words.push(known.protection().to_string());
    }
    format!("({})", printable(words.join(", ")))
}

/// Asks on the terminal.
fn confirm(question: &str) -> Result<(), CliError> {
    if !io::stdin().is_terminal() {
        return Err(CliError::usage(format!(
            "{question} Give --yes to remove it; there is no terminal to ask on. --dry-run removes nothing"
        )));
    }
    let _ = write!(io::stderr(), "{question} [y/N] ");
    let mut answer = String::new();
    io::stdin().lock().read_line(&mut answer)?;
    match answer.trim().to_ascii_lowercase().as_str() {
        "y" | "yes" => Ok(()),
        _ => Err(CliError::Failed("nothing was removed".into())),
    }
}
