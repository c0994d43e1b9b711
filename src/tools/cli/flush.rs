//! `kvgate flush`: waits until S3 has everything that the node had committed.

use clap::Args;

use super::args::ConnectArgs;
use super::error::CliError;
use super::logging;
use super::node::{self, NodeArgs};
use super::output::{Out, count};
use crate::config::units::parse_duration;
use crate::protocol::Flushed;

/// Waits until everything that this node's engines have committed is stored.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate flush --socket /tmp/kvgate.sock
  kvgate flush --deadline 30s --json

  kvgate flush --dropped 12

Exit status: 1 if something still waits when the time is over, or if chunks were dropped since the daemon's start,
other than as many as --dropped says.")]
pub struct FlushArgs {
    /// How long to wait, such as 30s [default: 10m].
    #[arg(long, value_name = "TIME")]
    deadline: Option<String>,
    /// Chunks that are known to have been dropped since the daemon's start.
    #[arg(long, value_name = "CHUNKS", default_value_t = 0)]
    dropped: u64,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    connect: ConnectArgs,
}

pub async fn run(args: FlushArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let config = node::config(&args.connect)?;
    logging::init(&config.log, verbose);
    let deadline = args.deadline.as_deref().map(parse_duration).transpose();
    let deadline = deadline.map_err(|error| CliError::usage(format!("--deadline: {error}")))?;
    let ms = deadline.map(|time| u64::try_from(time.as_millis()).unwrap_or(u64::MAX));
    let client = args.node.client(&config);
    let flushed = client.flush_but(ms, args.dropped).await?;
    match args.json {
        true => out.json(&flushed),
        false => out.line(said(&flushed)),
    }
}

fn said(flushed: &Flushed) -> String {
    let chunks = |number: u64, said: &dyn Fn(String) -> String| match number {
        0 => String::new(),
        some => said(count(some, "chunk")),
    };
    let kept_back = chunks(flushed.kept_back, &|some| {
        format!(", but for {some} that the configuration keeps from it")
    });
    let declined = chunks(flushed.declined, &|some| {
        format!(", but for {some} that [store] admit declined")
    });
    let forgotten = chunks(flushed.forgotten, &|some| {
        format!(", but for up to {some} that were declined before, and are not remembered any more")
    });
    let dropped = chunks(flushed.dropped, &|some| {
        format!("; {some} dropped since the start")
    });
    format!("everything committed is on S3{kept_back}{declined}{forgotten}{dropped}")
}
