//! `kvgate gpu check`: loads and stores in every known layout, each byte compared with the CPU's result.

use clap::Args;
use serde_json::json;

use super::{GpuArgs, show};
use crate::engine::copy::CudaOptions;
use crate::tools::cli::error::CliError;
use crate::tools::cli::output::Out;
use crate::tools::cli::progress::Progress;
use crate::tools::gpu_check::{GpuError, LayoutsChecked, cases, check};

/// Loads and stores in every known layout, and compares every byte with what the CPU makes of the same.
#[derive(Debug, Args)]
#[command(after_help = "Exit status: 1 if there is no GPU that can be used, or if any byte is wrong.")]
pub struct GpuCheckArgs {
    #[command(flatten)]
    gpu: GpuArgs,
}

/// Smaller than by default, so that a chunk goes in pieces, over several registrations, and straight to the pages
/// where their runs are as long as a block.
const PIECE_BYTES: usize = 40 << 10;
const DIRECT_BYTES: usize = 4 << 10;
const PIN_BYTES: usize = 256 << 10;

pub fn run(args: &GpuCheckArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let (config, gpu, presence) = args.gpu.open(verbose)?;
    if !args.gpu.json {
        show(&presence, out)?;
        out.line("")?;
        out.flush()?;
    }
    let options = CudaOptions {
        piece_bytes: PIECE_BYTES,
        direct_bytes: DIRECT_BYTES,
        pin_bytes: PIN_BYTES,
        ..CudaOptions::from(&config.copy)
    };
    let cases = cases().map_err(GpuError::from)?;
    let progress = Progress::bar("checking", cases.len() as u64);
    let mut checked = Vec::new();
    for case in &cases {
        checked.push(check(&gpu, case, options)?);
        progress.set(checked.len() as u64, 0);
    }
    drop(progress);
    if args.gpu.json {
        return out.json(&json!({ "gpu": presence, "checked": checked, "right": true }));
    }
    let row = |checked: &LayoutsChecked| {
        let heads = checked
            .heads
            .map_or("all".into(), |(first, end)| format!("{first} to {end}"));
        let way = if checked.direct { "DMA" } else { "kernel" };
        vec![
            checked.layout.to_owned(),
            checked.model.to_owned(),
            heads,
            checked.block_tokens.to_string(),
            way.to_owned(),
            "right".to_owned(),
        ]
    };
    let rows: Vec<Vec<String>> = checked.iter().map(row).collect();
    out.table(
        &["layout", "rows", "heads", ">block tokens", "by", "load and store"],
        &rows,
    )?;
    out.line("")?;
    out.line(format_args!("all {} are right", rows.len()))
}
