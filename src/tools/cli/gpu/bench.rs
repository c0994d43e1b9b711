//! `kvgate gpu bench`: copies into and out of a GPU's pages beside plain pinned copies, and the way from S3 into
//! pages.

use clap::Args;
use serde_json::json;

use super::{GpuArgs, show};
use crate::config::Config;
use crate::config::units::MIB;
use crate::engine::copy::CudaOptions;
use crate::engine::copy::known::{KNOWN, KnownLayout, Pages};
use crate::format::Space;
use crate::tools::cli::args::{find_preset, one_space};
use crate::tools::cli::error::CliError;
use crate::tools::cli::output::{Out, bytes, tell};
use crate::tools::gpu_check::{BenchPlan, BenchRow, PathPlan, PathReport, bench, path};
use crate::tools::s3_server::S3Server;

/// Measures loads into and stores out of a GPU's pages, beside plain copies of the same bytes, and the way from S3.
#[derive(Debug, Args)]
#[command(after_help = "\
Each figure is the median of --rounds; each ratio is to plain copies out of pinned memory in the same round. The S3
server is the configured one, or one inside this process, which then shares its cores.")]
pub struct GpuBenchArgs {
    /// Whose KV; `kvgate size` lists them.
    #[arg(long, value_name = "PRESET", default_value = "llama-3-8b")]
    model: String,
    #[arg(
        long,
        value_name = "TOKENS",
        default_value_t = 256,
        help = "Tokens in a chunk"
    )]
    chunk_tokens: u32,
    /// Layouts; without it vLLM's two and SGLang's, or MLA's.
    #[arg(long, value_name = "NAME,..", value_delimiter = ',')]
    layouts: Vec<String>,
    /// Tokens of the engine's blocks.
    #[arg(
        long,
        value_name = "TOKENS,..",
        value_delimiter = ',',
        default_value = "16,64,256"
    )]
    block_tokens: Vec<u32>,
    /// Thread blocks of a kernel.
    #[arg(
        long,
        value_name = "NUMBER,..",
        value_delimiter = ',',
        default_value = "4,8,16,32"
    )]
    thread_blocks: Vec<u32>,
    /// Chunks that are copied at a time.
    #[arg(long, value_name = "NUMBER", default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..))]
    chunks: u64,
    /// How often each is measured.
    #[arg(long, value_name = "NUMBER", default_value_t = 9, value_parser = clap::value_parser!(u64).range(1..))]
    rounds: u64,
    /// Leave out the way from S3.
    #[arg(long)]
    no_path: bool,
    #[command(flatten)]
    gpu: GpuArgs,
}

const DEFAULT_LAYOUTS: [&str; 5] = ["vllm LBNHC", "vllm LBHNC", "vllm BLHNC", "sglang", "mla BND"];

pub async fn run(args: &GpuBenchArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let preset = find_preset(&args.model)?;
    let space = one_space(preset, preset.spaces("bench-1", args.chunk_tokens)?)?;
    if args.block_tokens.contains(&0) || args.thread_blocks.contains(&0) {
        return Err(CliError::usage(
            "--block-tokens and --thread-blocks must be 1 or more",
        ));
    }
    let layouts = args.layouts(&space)?;
    let (config, gpu, presence) = args.gpu.open(verbose)?;
    if !args.gpu.json {
        show(&presence, out)?;
        let chunk = bytes(space.layout().payload_len() as u64);
        out.field(
            "chunk",
            format_args!("{} tokens of {}: {chunk}", args.chunk_tokens, args.model),
        )?;
        out.line("")?;
        out.flush()?;
    }
    let plan = BenchPlan {
        heads: None,
        layouts: layouts.clone(),
        block_tokens: args.block_tokens.clone(),
        thread_blocks: args.thread_blocks.clone(),
        chunks: to_usize(args.chunks),
        rounds: to_usize(args.rounds),
        element_bytes: space.dtype().size(),
        options: CudaOptions::from(&config.copy),
        space: space.clone(),
    };
    let rows = bench(&gpu, &plan, |row| {
        tell(format_args!(
            "{}, blocks of {}: {:.2} of plain",
            row.layout, row.block_tokens, row.load_ratio
        ));
    })?;
    let whole = match args.no_path {
        true => None,
        false => Some(args.whole_way(&gpu, &config, space, layouts[0]).await?),
    };
    if args.gpu.json {
        return out.json(&json!({ "gpu": presence, "model": args.model, "copies": rows, "path": whole }));
    }
    table(&rows, out)?;
    whole.map_or(Ok(()), |(report, place)| way(&report, &place, out))
}

impl GpuBenchArgs {
    fn layouts(&self, space: &Space) -> Result<Vec<KnownLayout>, CliError> {
        let fits = |layout: &KnownLayout| {
            let pages = Pages {
                blocks: 1,
                block_tokens: 1,
                heads: None,
                element_bytes: space.dtype().size(),
            };
            space.planes().iter().all(|plane| layout.fits(plane, &pages))
        };
        let find = |name: &str| KNOWN.into_iter().find(|layout| layout.name == name);
        let named = self.layouts.iter().map(|name| {
            find(name).filter(fits).ok_or_else(|| {
                let names: Vec<&str> = KNOWN
                    .iter()
                    .filter(|layout| fits(layout))
                    .map(|layout| layout.name)
                    .collect();
                CliError::usage(format!(
                    "no layout {name:?} for {}: there are {}",
                    self.model,
                    names.join(", ")
                ))
            })
        });
        match self.layouts.is_empty() {
            true => Ok(DEFAULT_LAYOUTS
                .into_iter()
                .filter_map(find)
                .filter(fits)
                .collect()),
            false => named.collect(),
        }
    }

    async fn whole_way(
        &self,
        gpu: &std::sync::Arc<crate::engine::copy::cuda::Gpu>,
        config: &Config,
        space: Space,
        layout: KnownLayout,
    ) -> Result<(PathReport, String), CliError> {
        tell("from S3 into the pages");
        let mut config = config.clone();
        // Twice the prompt, so that no load waits for slots.
        let arena = 2 * self.chunks * (space.layout().object_len() as u64 + 4096);
        config.arena.size.0 = config.arena.size.0.max(arena.next_multiple_of(MIB));
        let host = S3Server::start(&config, "kvgate-gpu", false)
            .await
            .map_err(|error| CliError::Failed(error.to_string()))?;
        let plan = PathPlan {
            element_bytes: space.dtype().size(),
            space,
            chunks: to_usize(self.chunks),
            layout,
            block_tokens: self.block_tokens[0],
            rounds: to_usize(self.rounds),
        };
        let report = path(gpu, std::sync::Arc::clone(&host.store), &config, &plan).await;
        Ok((report?, host.place))
    }
}

fn to_usize(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}

fn table(rows: &[BenchRow], out: &mut Out) -> Result<(), CliError> {
    let speed = |gib_s: f64, ratio: f64| format!("{gib_s:.1} ({ratio:.2})");
    let row = |row: &BenchRow| {
        vec![
            row.layout.to_owned(),
            row.block_tokens.to_string(),
            if row.direct {
                "DMA".to_owned()
            } else {
                row.thread_blocks.to_string()
            },
            speed(row.load_gib_s, row.load_ratio),
            speed(row.store_gib_s, row.store_ratio),
            speed(row.both_gib_s, row.both_ratio),
            format!("{:.1}", row.floor.load_gib_s),
            format!("{:.1}", row.floor.store_gib_s),
            format!("{:.1}", row.floor.both_gib_s),
        ]
    };
    let rows: Vec<Vec<String>> = rows.iter().map(row).collect();
    out.line("GiB/s, and the ratio to plain copies out of pinned memory:")?;
    out.table(
        &[
            "layout",
            ">block tokens",
            ">thread blocks",
            ">load",
            ">store",
            ">both at once",
            ">plain load",
            ">plain store",
            ">plain both",
        ],
        &rows,
    )
}

fn way(report: &PathReport, place: &str, out: &mut Out) -> Result<(), CliError> {
    out.line("")?;
    out.field("from S3", place)?;
    out.field(
        "prompt",
        format_args!("{} chunks, {}", report.chunks, bytes(report.bytes)),
    )?;
    out.field("to slots", format_args!("{:.2} GiB/s", report.slots_gib_s))?;
    out.field(
        "to pages",
        format_args!(
            "{:.2} GiB/s, the first chunk after {:.1} ms; every byte is right",
            report.pages_gib_s, report.first_chunk_ms
        ),
    )
}
