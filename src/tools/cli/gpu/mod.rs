//! `kvgate gpu`: checks and measurements on a real device.

mod bench;
mod check;

use std::sync::Arc;

use clap::{Args, Subcommand};

use super::args::ConnectArgs;
use super::error::CliError;
use super::logging;
use super::output::{Out, bytes};
use crate::config::Config;
use crate::engine::copy::cuda::{Gpu, Presence};
use crate::tools::gpu_check::GpuError;

/// Checks and measures the copies to and from the memory of a GPU.
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  kvgate gpu check
  kvgate gpu check --device 1 --json
  kvgate gpu bench --model llama-3-8b --block-tokens 16,64,256 --thread-blocks 8,16,32")]
pub enum GpuCommand {
    Check(check::GpuCheckArgs),
    Bench(bench::GpuBenchArgs),
}

/// The flags of both.
#[derive(Debug, Args)]
struct GpuArgs {
    /// Which GPU, as the driver counts them.
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    device: usize,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: ConnectArgs,
}

impl GpuArgs {
    fn open(&self, verbose: u8) -> Result<(Config, Arc<Gpu>, Presence), CliError> {
        let config = self.connect.load(Vec::new())?.config;
        logging::init(&config.log, verbose);
        let gpu = Gpu::open(self.device).map_err(GpuError::from)?;
        let presence = gpu.presence().map_err(GpuError::from)?;
        Ok((config, gpu, presence))
    }
}

pub async fn run(command: GpuCommand, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    match command {
        GpuCommand::Check(args) => check::run(&args, verbose, out),
        GpuCommand::Bench(args) => bench::run(&args, verbose, out).await,
    }
}

fn show(gpu: &Presence, out: &mut Out) -> Result<(), CliError> {
    out.field("GPU", format_args!("{}: {}", gpu.device, gpu.name))?;
    out.field("memory", bytes(gpu.memory_bytes as u64))?;
    out.field(
        "device",
        format_args!(
            "compute capability {}, {} multiprocessors",
            gpu.compute_capability, gpu.multiprocessors
        ),
    )?;
    out.field("driver", format_args!("CUDA {}", gpu.driver))
}

impl From<GpuError> for CliError {
    fn from(error: GpuError) -> Self {
        Self::Failed(error.to_string())
    }
}
