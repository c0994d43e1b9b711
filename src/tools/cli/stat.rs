//! `kvgate stat`: the header of one chunk, or the status of a daemon.

use clap::Args;
use serde_json::{Value, json};

use super::args::{ConnectArgs, SpaceArgs, SpaceRef};
use super::bucket::OpenBucket;
use super::error::CliError;
use super::logging;
use super::node::{self, NodeArgs};
use super::output::{Out, bytes, time};
use crate::config::Config;
use crate::format::{ChunkHash, Header, Key, KeyPrefix, Space, SpaceKey};
use crate::inventory::{ChunkStat, HeaderState, SpaceJson};

/// Shows a daemon's state; or one chunk: its object, and what its header says. `verify` checks its payload too.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate stat --bucket kv --space 5c2f0a3bd1e94f7786a0c1d2e3f4a5b6 HASH
  kvgate stat --bucket kv 5c2f0a3bd1e94f7786a0c1d2e3f4a5b6/HASH
  kvgate stat                            the daemon of [api] socket
  kvgate stat --socket /tmp/kvgate.sock

Exit status: 1 if the chunk is missing or damaged.")]
pub struct StatArgs {
    /// A chunk's hash (64 hex digits), with a space; or an object's whole key.
    #[arg(value_name = "KEY|HASH")]
    chunk: Option<String>,
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

pub async fn run(args: StatArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let config = args.connect.load(Vec::new())?.config;
    logging::init(&config.log, verbose);
    if args.chunk.is_none() && args.space.given()?.is_some() {
        let message =
            "which chunk of the space? Give its hash (64 hex digits); `kvgate ls --space ID` lists hashes";
        return Err(CliError::usage(message));
    }
    if args.node.socket.is_some() || args.chunk.is_none() {
        return of_node(&args, &config, out).await;
    }
    let (given, hash) = target(&args, &config.s3.prefix)?;
    let bucket = OpenBucket::open(config).await?;
    let key = given.key();
    let space = match given {
        SpaceRef::Known(space) => Ok(space),
        SpaceRef::Id(..) => match bucket.inventory.read_space(key).await? {
            SpaceJson::Good(space) => Ok(space),
            json => Err(json),
        },
    };
    match bucket.inventory.stat(key, space.as_ref().ok(), &hash).await? {
        None => match space {
            Err(SpaceJson::Missing) => Err(bucket.unknown_space(&key.to_string())),
            _ => Err(missing(&bucket, key, &hash, args.json, out)?),
        },
        Some(stat) => {
            match args.json {
                true => out.json(&report(&stat, &hash, space.as_ref().ok()))?,
                false => show(&stat, space.as_ref().ok(), out)?,
            }
            match stat.is_good() {
                true => Ok(()),
                false => Err(CliError::Reported),
            }
        }
    }
}

/// Shows a node's state; or, with a chunk, the node's view of that.
async fn of_node(args: &StatArgs, config: &Config, out: &mut Out) -> Result<(), CliError> {
    let client = args.node.client(config);
    if args.chunk.is_some() {
        let (space, hash) = target(args, &config.s3.prefix)?;
        let space = node::declared(&client, &space).await?;
        let header = client.get(&format!("/v1/chunks/{space}/{hash}?header")).await?;
        let header: Value =
            serde_json::from_slice(&header).map_err(|error| CliError::Failed(error.to_string()))?;
        return out.json(&header);
    }
    let status = client.status().await?;
    if args.json {
        return out.json(&status);
    }
    let of = |path: &str| status.pointer(path).cloned().unwrap_or(Value::Null);
    let size = |path: &str| bytes(of(path).as_u64().unwrap_or(0));
    out.field("kvgate", of("/version").as_str().unwrap_or_default())?;
    out.field("ready", of("/not_ready").as_str().unwrap_or("yes"))?;
    for trouble in of("/troubles").as_array().into_iter().flatten() {
        let word = |name: &str| trouble[name].as_str().unwrap_or_default().to_owned();
        let name = if trouble["is_bad"] == true {
            "broken"
        } else {
            "look"
        };
        out.field(name, format_args!("{}. {}", word("what"), word("todo")))?;
    }
    out.field(
        "arena",
        format_args!("{} of {}", size("/arena/used_bytes"), size("/arena/size_bytes")),
    )?;
    out.field(
        "memory",
        format_args!(
            "{} chunks, {}",
            of("/tiers/memory/chunks"),
            size("/tiers/memory/bytes")
        ),
    )?;
    for disk in of("/tiers/disk/disks").as_array().into_iter().flatten() {
        let path = disk["path"].as_str().unwrap_or_default();
        let used = bytes(disk["bytes"].as_u64().unwrap_or(0));
        out.field("disk", format_args!("{path}: {} chunks, {used}", disk["chunks"]))?;
    }
    let behind = |name: &str| of(&format!("/tiers/write_behind/{name}"));
    out.field(
        "to store",
        format_args!(
            "{} chunks, {}; {} stored, {} dropped",
            behind("waiting_chunks"),
            size("/tiers/write_behind/waiting_bytes"),
            behind("stored"),
            behind("dropped")
        ),
    )?;
    let engines = of("/sessions").as_array().map_or(0, Vec::len);
    out.field(
        "engines",
        format_args!("{engines}; {} leases", of("/slots/leases")),
    )?;
    let endpoints = of("/s3/endpoints");
    let endpoints = endpoints.as_array().map(Vec::as_slice).unwrap_or_default();
    let closed = endpoints.iter().filter(|one| one["breaker"] == "closed").count();
    out.field(
        "endpoints",
        format_args!("{closed} of {} in use", endpoints.len()),
    )
}

/// The given chunk: by its hash and a space, or by its whole key.
fn target(args: &StatArgs, prefix: &str) -> Result<(SpaceRef, ChunkHash), CliError> {
    let chunk = args.chunk.as_deref().unwrap_or_default();
    if let Ok(hash) = chunk.parse() {
        return Ok((args.space.required()?, hash));
    }
    let given = args.space.given()?;
    let Some(Key::Chunk(space, hash)) = KeyPrefix::new(prefix).parse(chunk) else {
        return Err(CliError::usage(format!(
            "{chunk:?} is neither a chunk's hash (64 hex digits) nor a chunk's key under prefix {prefix:?} (such as \
             SPACE/HASH). `kvgate ls --space ID` lists hashes"
        )));
    };
    match given {
        Some(given) if given.key() != space => Err(CliError::usage(format!(
            "the key is of space {space}, but {} was given: leave the space out",
            given.key()
        ))),
        Some(given) => Ok((given, hash)),
        None => Ok((SpaceRef::Id(space, None), hash)),
    }
}

fn missing(
    bucket: &OpenBucket,
    space: SpaceKey,
    hash: &ChunkHash,
    as_json: bool,
    out: &mut Out,
) -> Result<CliError, CliError> {
    let key = bucket.inventory.keys().chunk(space, hash);
    if as_json {
        out.json(&json!({ "key": key, "hash": hash, "state": "missing" }))?;
        return Ok(CliError::Reported);
    }
    Ok(CliError::Failed(format!("missing: there is no object {key}")))
}

/// The state's stable word, and the reason where it is not good.
fn state(stat: &ChunkStat) -> (&'static str, Option<String>) {
    match (&stat.header, stat.expected_len) {
        (HeaderState::Damaged(error) | HeaderState::Wrong(_, error), _) => {
            ("damaged", Some(format!("header: {error}")))
        }
        (HeaderState::Good(_), Some(expected)) if expected != stat.meta.len => (
            "damaged",
            Some(format!("it has {} bytes, not {expected}", stat.meta.len)),
        ),
        (HeaderState::Good(_), _) => ("ok", None),
    }
}

fn header_of(stat: &ChunkStat) -> Option<&Header> {
    match &stat.header {
        HeaderState::Good(header) | HeaderState::Wrong(header, _) => Some(header),
        HeaderState::Damaged(_) => None,
    }
}

/// The digest of each plane, in its full width.
fn digests(header: &Header) -> impl Iterator<Item = String> {
    let digits = 2 * header.digest_kind.width();
    header.digests.iter().map(move |digest| {
        let hex = ChunkHash(*digest).to_string();
        hex[..digits].to_owned()
    })
}

fn report(stat: &ChunkStat, hash: &ChunkHash, space: Option<&Space>) -> Value {
    let (state, reason) = state(stat);
    let header = header_of(stat).map(|header| {
        json!({
            "space": header.space_id,
            "chunk": header.chunk,
            "parent": header.parent,
            "tokens": header.tokens,
            "kind": header.kind,
            "is_draft": header.is_draft,
            "payload_bytes": header.payload_len,
            "digest": header.digest_kind,
            "digests": digests(header).collect::<Vec<_>>(),
        })
    });
    json!({
        "key": stat.key,
        "hash": hash,
        "state": state,
        "reason": reason,
        "model": space.map(Space::model),
        "bytes": stat.meta.len,
        "expected_bytes": stat.expected_len,
        "etag": &*stat.meta.version.etag,
        "modified": stat.meta.version.modified,
        "header_ok": matches!(stat.header, HeaderState::Good(_)),
        "header": header,
    })
}

fn show(stat: &ChunkStat, space: Option<&Space>, out: &mut Out) -> Result<(), CliError> {
    out.field("key", &stat.key)?;
    let (state, reason) = state(stat);
    let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
    out.field("state", format_args!("{state}{reason}"))?;
    let model = space.map_or("unknown: the space's space.json can't be read", Space::model);
    out.field("model", model)?;
    out.field(
        "bytes",
        format_args!("{} ({})", stat.meta.len, bytes(stat.meta.len)),
    )?;
    out.field("etag", &stat.meta.version.etag)?;
    out.field("modified", time(stat.meta.version.modified))?;
    let Some(header) = header_of(stat) else {
        return Ok(());
    };
    out.field("space", header.space_id)?;
    out.field("chunk", header.chunk)?;
    out.field("parent", header.parent)?;
    out.field("tokens", header.tokens)?;
    let draft = if header.is_draft { " of a draft model" } else { "" };
    out.field("kind", format_args!("{}{draft}", header.kind))?;
    out.field("payload", header.payload_len)?;
    let kind = serde_json::to_value(header.digest_kind).unwrap_or_default();
    out.field("digest", kind.as_str().unwrap_or_default())?;
    let planes = space.map(Space::planes).unwrap_or_default();
    for (index, digest) in digests(header).enumerate() {
        match planes.get(index) {
            Some(plane) => out.field("", format_args!("{digest}  layer {} {}", plane.layer, plane.name))?,
            None => out.field("", format_args!("{digest}  plane {index}"))?,
        }
    }
    Ok(())
}
