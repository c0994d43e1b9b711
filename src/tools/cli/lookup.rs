//! `kvgate lookup`: which chunks of a prompt exist, asked of the bucket, or of a daemon with `--socket`.

use std::time::Duration;

use clap::Args;
use serde::Serialize;
use tokio::time::Instant;

use super::args::{ConnectArgs, SpaceArgs, SpaceRef};
use super::bucket::OpenBucket;
use super::error::CliError;
use super::node::{self, NodeArgs};
use super::output::{Out, count};
use super::prompt::{PromptArgs, PromptInput};
use super::{logging, picture};
use crate::arena::SLOT_ALIGN;
use crate::cache::gateway::Lookup;
use crate::config::{Config, Override};
use crate::format::Space;
use crate::protocol::{LookupRequest, Strategy, TierRun};
use crate::s3::object::RequestCounts;

/// Says which chunks of a prompt are stored.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate lookup --bucket kv --model llama-3-8b --revision 62bd457 --tokens prompt.txt
  echo 1,2,3,4 | kvgate lookup --bucket kv --space space.json --strategy exact --json
  kvgate lookup --socket /tmp/kvgate.sock --model llama-3-8b --revision 62bd457 --tokens prompt.txt

Exit status: 0 also when nothing is found, 1 when something is unknown.")]
pub struct LookupArgs {
    #[command(flatten)]
    prompt: PromptArgs,
    /// Ask for every chunk, or search for the end of the stored prefix ([lookup] strategy).
    #[arg(long, value_parser = ["exact", "prefix"])]
    strategy: Option<String>,
    /// Time for the whole lookup, such as 2s ([lookup] deadline).
    #[arg(long, value_name = "TIME")]
    deadline: Option<String>,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    space: SpaceArgs,
}

#[derive(Serialize)]
struct Report {
    space: String,
    chunks: usize,
    prefix: usize,
    prefix_tokens: u64,
    mask: String,
    unknown: String,
    inferred: String,
    tiers: Vec<TierRun>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
    requests: RequestCounts,
    elapsed_ms: f64,
}

pub async fn run(args: LookupArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let flags = [
        ("lookup.strategy", "--strategy", &args.strategy),
        ("lookup.deadline", "--deadline", &args.deadline),
    ];
    let flags = flags.into_iter().filter_map(|(path, flag, value)| {
        let value = value.clone()?;
        Some(Override { path, value, flag })
    });
    let config = args.connect.load(flags.collect())?.config;
    logging::init(&config.log, verbose);
    let space = args.space.required()?;
    let prompt = args.prompt.read()?;
    if args.node.socket.is_some() {
        return of_node(&args, &config, &space, prompt, out).await;
    }
    let bucket = OpenBucket::open(config).await?;
    let space = bucket.space(space).await?;
    let tokens = prompt.tokens();
    let chunks = prompt.hashes(&space)?;

    let gateway = bucket.reader(SLOT_ALIGN)?;
    let before = gateway.requests();
    let started = Instant::now();
    let config = &bucket.config.lookup;
    let found = gateway
        .lookup(&space, &chunks, config.strategy, started + config.deadline)
        .await;
    let elapsed = started.elapsed();
    let requests = gateway.requests().since(&before);
    match args.json {
        true => out.json(&Report {
            space: space.id().to_string(),
            chunks: found.chunks,
            prefix: found.prefix,
            prefix_tokens: tokens_of(&space, found.prefix),
            mask: found.mask.to_hex(),
            unknown: found.unknown.to_hex(),
            inferred: found.inferred.to_hex(),
            tiers: found.tiers.clone(),
            error: found.error.as_ref().map(ToString::to_string),
            requests,
            elapsed_ms: elapsed.as_secs_f64() * 1e3,
        })?,
        false => show(&space, tokens, &found, requests, elapsed, out)?,
    }
    match found.unknown.count() {
        0 => Ok(()),
        _ => Err(CliError::Reported),
    }
}

/// Looks up at a node, its own tiers included.
async fn of_node(
    args: &LookupArgs,
    config: &Config,
    space: &SpaceRef,
    prompt: PromptInput,
    out: &mut Out,
) -> Result<(), CliError> {
    let client = args.node.client(config);
    let name = node::declared(&client, space).await?;
    let hashes = prompt.hashes_in(space)?;
    let request = LookupRequest {
        space: name,
        hashes: Some(hashes),
        strategy: Some(match config.lookup.strategy {
            Strategy::Exact => Strategy::Exact,
            Strategy::Prefix => Strategy::Prefix,
        }),
        deadline_ms: Some(u64::try_from(config.lookup.deadline.as_millis()).unwrap_or(u64::MAX)),
        ..LookupRequest::default()
    };
    let found = client.lookup(&request).await?;
    if args.json {
        out.json(&found)?;
    } else {
        out.field("chunks", found.chunks)?;
        out.field("prefix", count(found.prefix as u64, "chunk"))?;
        for run in &found.tiers {
            let last = run.from + run.count - 1;
            out.field(run.tier.word(), format_args!("chunks {} to {last}", run.from))?;
        }
        out.field("mask", &found.mask)?;
        if let Some(error) = &found.error {
            out.field("unknown", error)?;
        }
    }
    match found.unknown.bytes().all(|digit| digit == b'0') {
        true => Ok(()),
        false => Err(CliError::Reported),
    }
}

fn tokens_of(space: &Space, chunks: usize) -> u64 {
    chunks as u64 * u64::from(space.chunk_tokens())
}

fn show(
    space: &Space,
    tokens: Option<u64>,
    found: &Lookup,
    requests: RequestCounts,
    elapsed: Duration,
    out: &mut Out,
) -> Result<(), CliError> {
    out.field("space", format_args!("{} {}", space.key(), space.model()))?;
    let each = space.chunk_tokens();
    let rest = match tokens {
        Some(tokens) => {
            let over = tokens - tokens_of(space, found.chunks);
            format!(" ({tokens} given, {over} after the last full chunk)")
        }
        None => String::new(),
    };
    out.field("chunks", format_args!("{} of {each} tokens{rest}", found.chunks))?;
    out.field(
        "prefix",
        format_args!(
            "{}, {}",
            count(found.prefix as u64, "chunk"),
            count(tokens_of(space, found.prefix), "token")
        ),
    )?;
    out.field("found", found.mask.count())?;
    out.field("inferred", found.inferred.count())?;
    let reason = match &found.error {
        Some(error) => format!(": {error}"),
        None if found.unknown.count() > 0 => ": the deadline passed".to_owned(),
        None => String::new(),
    };
    out.field("unknown", format_args!("{}{reason}", found.unknown.count()))?;
    if found.chunks > 0 {
        let (picture, each) = picture::picture(found);
        let lots = match each {
            1 => String::new(),
            each => format!("; each sign is {each} chunks, ~ a mixed lot"),
        };
        out.field("mask", found.mask.to_hex())?;
        out.field("picture", picture)?;
        out.field("", format_args!("({}{lots})", picture::LEGEND))?;
    }
    out.field("requests", words(requests))?;
    out.field("time", format_args!("{:.1} ms", elapsed.as_secs_f64() * 1e3))
}

/// The requests in words: `12 HEAD, 1 GET`.
fn words(requests: RequestCounts) -> String {
    let kinds = [
        (requests.head, "HEAD"),
        (requests.attributes, "ATTRIBUTES"),
        (requests.get, "GET"),
        (requests.list, "LIST"),
    ];
    let sent = kinds.iter().filter(|(number, _)| *number > 0);
    let sent: Vec<String> = sent.map(|(number, kind)| format!("{number} {kind}")).collect();
    match sent.is_empty() {
        true => "none".into(),
        false => sent.join(", "),
    }
}
