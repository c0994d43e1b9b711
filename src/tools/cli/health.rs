//! `kvgate health`: asks a daemon whether it answers, for a container's health check and for scripts.

use clap::Args;

use super::args::ConnectArgs;
use super::error::CliError;
use super::node::{self, NodeArgs};
use super::output::Out;

/// Asks a node whether it is alive (`/healthz`) or, with --ready, ready (`/readyz`).
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate health --socket /tmp/kvgate.sock
  kvgate health --ready

Exit status: 0 if it is, 1 if it is not or does not answer.")]
pub struct HealthArgs {
    /// Ask whether the node is ready: S3 has answered once, and the daemon is not ending.
    #[arg(long)]
    ready: bool,
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    connect: ConnectArgs,
}

pub async fn run(args: HealthArgs, out: &mut Out) -> Result<(), CliError> {
    let config = node::config(&args.connect)?;
    let path = if args.ready { "/readyz" } else { "/healthz" };
    let answer = args.node.client(&config).get(path).await;
    // Container engines keep status 2 for themselves.
    let answer = answer.map_err(|error| match error.into() {
        CliError::Usage(said) => CliError::Failed(said),
        error => error,
    })?;
    out.line(String::from_utf8_lossy(&answer).trim_end())
}
