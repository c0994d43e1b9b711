//! `kvgate demo`: the command around `tools/demo`.

use clap::Args;

use super::args::ConnectArgs;
use super::error::CliError;
use super::logging;
use crate::tools::demo::{self, DemoError};

/// Stores a synthetic model's KV, forgets it, finds it, loads it back and compares every byte.
///
/// Needs nothing: without --endpoint and --bucket it starts an S3 server inside the process.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate demo
  kvgate demo --model qwen3-32b --tokens 2048
  kvgate demo --endpoint http://127.0.0.1:7480 --bucket kvgate-demo --keep")]
pub struct DemoCommand {
    #[command(flatten)]
    connect: ConnectArgs,
    #[command(flatten)]
    demo: demo::DemoArgs,
}

pub async fn run(args: DemoCommand, verbose: u8) -> Result<(), CliError> {
    let config = args.connect.load(Vec::new())?.config;
    logging::init(&config.log, verbose);
    match demo::run(&args.demo, config).await {
        Ok(true) => Ok(()),
        Ok(false) => Err(CliError::Reported),
        Err(DemoError::Output(error)) => Err(error.into()),
        Err(error) if error.is_usage() => Err(CliError::usage(error.to_string())),
        Err(error) => Err(CliError::Failed(error.to_string())),
    }
}
