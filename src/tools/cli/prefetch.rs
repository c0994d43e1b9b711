//! `kvgate prefetch`: asks a daemon to bring a prompt's chunks up to memory.

use clap::Args;

use super::args::{ConnectArgs, SpaceArgs};
use super::error::CliError;
use super::logging;
use super::node::{self, NodeArgs};
use super::output::{Out, count};
use super::prompt::PromptArgs;

/// Brings the chunks of a prompt up into a node's memory, in the background.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate prefetch --socket /tmp/kvgate.sock --model llama-3-8b --revision 62bd457 --tokens prompt.txt
  kvgate prefetch --space 5c2f0a3bd1e94f7786a0c1d2e3f4a5b6 --hashes hashes.txt")]
pub struct PrefetchArgs {
    #[command(flatten)]
    prompt: PromptArgs,
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

pub async fn run(args: PrefetchArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let config = node::config(&args.connect)?;
    logging::init(&config.log, verbose);
    let space = args.space.required()?;
    let hashes = args.prompt.read()?.hashes_in(&space)?;
    let client = args.node.client(&config);
    let name = node::declared(&client, &space).await?;
    let asked = client.prefetch(&name, &hashes).await?;
    match args.json {
        true => out.json(&asked),
        false => out.line(format_args!(
            "{} on their way",
            count(asked.chunks as u64, "chunk")
        )),
    }
}
