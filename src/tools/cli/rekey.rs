//! `kvgate rekey`: which keys wrote the chunks of protected spaces; with `--yes` chunks of old keys are written anew with the
//! tenant's first key, so that an old one can be taken away.

use clap::Args;
use serde_json::json;

use super::args::{ConnectArgs, SelectArgs};
use super::bucket::OpenBucket;
use super::error::CliError;
use super::logging;
use super::output::{Out, bytes, count};
use super::progress::Progress;
use crate::config::units::{ByteSize, MIB};
use crate::format::KeyState;
use crate::inventory::{Count, RekeyError, RekeySpec, Rekeyed};

/// Writes chunks of a tenant's old keys anew with its first one, so that old keys can be taken away.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate rekey --config kvgate.toml                              which keys wrote what
  kvgate rekey --config kvgate.toml --yes                        killed? run it again, and it goes on
  kvgate rekey --config kvgate.toml --tenant acme --yes --rate 50MiB

It needs [keys] file, as the nodes have it. Each chunk of an old key is read and verified, and written anew only if nobody has
replaced it meanwhile. What does not verify is left as it is. A key in wrong hands is another matter: what it wrote may be
forged, and `kvgate gc --key-id` removes it.
Exit status: 1 if a chunk could not be read or written.")]
pub struct RekeyArgs {
    #[command(flatten)]
    select: SelectArgs,
    /// Bytes of chunks to write anew a second, at most; as many are read.
    #[arg(long, value_name = "SIZE", default_value_t = ByteSize(256 * MIB))]
    rate: ByteSize,
    /// Write them anew. Otherwise nothing is written.
    #[arg(long, short)]
    yes: bool,
    /// Say what would be written anew, and write nothing: the same as without --yes.
    #[arg(long, conflicts_with = "yes")]
    dry_run: bool,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: ConnectArgs,
}

impl From<RekeyError> for CliError {
    fn from(error: RekeyError) -> Self {
        match error {
            RekeyError::Object(error) => error.into(),
            RekeyError::Memory(_) => Self::Failed(error.to_string()),
            RekeyError::Unconditional | RekeyError::NothingSelected => Self::Usage(error.to_string()),
        }
    }
}

pub async fn run(args: RekeyArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let config = args.connect.load(Vec::new())?.config;
    logging::init(&config.log, verbose);
    let spec = RekeySpec {
        select: args.select.into(),
        rate: args.yes.then(|| args.rate.bytes()),
        buffers: usize::try_from(config.store.in_flight.bytes()).unwrap_or(usize::MAX),
    };
    let bucket = OpenBucket::open(config).await?;
    let progress = Progress::spinner("listing");
    let step = |rekeyed: &Rekeyed| match rekeyed.of(KeyState::Old).chunks {
        0 => progress.seen(
            "listing",
            rekeyed.of(KeyState::Newest).chunks,
            rekeyed.of(KeyState::Newest).bytes,
        ),
        old => progress.say(format!(
            "{} of {old} found so far, {}",
            rekeyed.rewritten.chunks,
            bytes(rekeyed.rewritten.bytes)
        )),
    };
    let rekeyed = bucket.inventory.rekey(&spec, step).await?;
    drop(progress);
    match args.json {
        true => json(&rekeyed, args.yes, out)?,
        false => text(&rekeyed, args.yes, out)?,
    }
    match rekeyed.failed.chunks {
        0 => Ok(()),
        _ => Err(CliError::Reported),
    }
}

fn json(rekeyed: &Rekeyed, has_written: bool, out: &mut Out) -> Result<(), CliError> {
    let of = |count: Count| json!({ "objects": count.chunks, "bytes": count.bytes });
    let keys = rekeyed.keys.iter().map(|((tenant, key), (state, count))| {
        json!({
            "tenant": tenant,
            "key_id": key.to_string(),
            "state": state.word(),
            "objects": count.chunks,
            "bytes": count.bytes,
        })
    });
    out.json(&json!({
        "dry_run": !has_written,
        "keys": keys.collect::<Vec<_>>(),
        "keyless": of(rekeyed.keyless),
        "unnamed": of(rekeyed.unnamed),
        "rewritten": of(rekeyed.rewritten),
        "refused": of(rekeyed.refused),
        "changed": of(rekeyed.changed),
        "failed": of(rekeyed.failed),
        "failure": (rekeyed.failed.chunks > 0).then_some(&rekeyed.failure),
    }))
}

fn text(rekeyed: &Rekeyed, has_written: bool, out: &mut Out) -> Result<(), CliError> {
    let what = |of: Count| format!("{}, {}", count(of.chunks, "object"), bytes(of.bytes));
    if rekeyed.keys.is_empty() {
        out.line("no chunk of a protected space names a key")?;
    } else {
        let rows: Vec<_> = rekeyed
            .keys
            .iter()
            .map(|((tenant, key), (state, of))| {
                let (tenant, state) = (tenant.clone(), state.word().to_owned());
                vec![
                    tenant,
                    key.to_string(),
                    state,
                    of.chunks.to_string(),
                    bytes(of.bytes),
                ]
            })
            .collect();
        out.table(&["tenant", "key", "here", ">objects", ">bytes"], &rows)?;
        out.line("")?;
    }
    match has_written {
        true => out.field("rewritten", what(rekeyed.rewritten))?,
        false => out.line("nothing was written: give --yes to write the chunks of old keys anew")?,
    }
    let left = [
        (
            "refused",
            rekeyed.refused,
            "damaged or forged, so never signed anew; `kvgate verify` names them",
        ),
        ("changed", rekeyed.changed, "replaced or removed meanwhile"),
        (
            "missing",
            rekeyed.of(KeyState::Missing),
            "of a key that is not here; `kvgate gc --key-id` removes them",
        ),
        (
            "keyless",
            rekeyed.keyless,
            "without a key, so no chunks of their space; `kvgate verify` names them",
        ),
        (
            "unnamed",
            rekeyed.unnamed,
            "in spaces without a space.json that can be read; `kvgate ls` shows them",
        ),
        ("failed", rekeyed.failed, &rekeyed.failure),
    ];
    for (name, of, why) in left.into_iter().filter(|(_, of, _)| of.chunks > 0) {
        out.field(name, format_args!("{}: {why}", what(of)))?;
    }
    if rekeyed.failed.chunks > 0 {
        out.line("run it again: it goes on with what is left")?;
    }
    Ok(())
}
