use clap::Args;

use super::args::{ConnectArgs, SpaceArgs, SpaceRef};
use super::error::CliError;
use super::node::{self, NodeArgs};
use super::output::{Out, count};
use super::{input, logging};
use crate::chunk::{ChunkHash, ChunkHasher};
use crate::units::{ByteSize, MIB};

const TOKENS_BYTES_MAX: ByteSize = ByteSize(256 * MIB);

/// Brings the chunks of a prompt up into a node's memory, in the background.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate prefetch --socket /tmp/kvgate.sock --model llama-3-8b --revision 62bd457 --tokens prompt.txt
  kvgate prefetch --space 5c2f0a3bd1e94f7786a0c1d2e3f4a5b6 --hashes hashes.txt")]
pub struct PrefetchArgs {
    /// Token ids: numbers with spaces, commas or line ends between, or a JSON array; `-` is the standard input.
    #[arg(long, value_name = "FILE|-", default_value = "-", conflicts_with = "hashes")]
    tokens: String,
    /// Chunk hashes in hex instead of tokens.
    #[arg(long, value_name = "FILE|-")]
    hashes: Option<String>,
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
    let hashes = args.read(&space)?;
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

impl PrefetchArgs {
    fn read(&self, space: &SpaceRef) -> Result<Vec<ChunkHash>, CliError> {
        if let Some(file) = &self.hashes {
            return input::hashes(&input::read(file, TOKENS_BYTES_MAX)?);
        }
        let SpaceRef::Known(space) = space else {
            return Err(CliError::usage(
                "tokens need the space itself: give --space FILE or --model PRESET, or --hashes FILE",
            ));
        };
        let tokens = input::tokens(&input::read(&self.tokens, TOKENS_BYTES_MAX)?)?;
        let hasher = ChunkHasher::new(space, None)?;
        let root = hasher.root(b"", b"")?;
        Ok(hasher.chain(&root, &tokens, &[])?)
    }
}
