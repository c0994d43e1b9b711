//! `kvgate size`: how large a model's KV is. It needs no server.

mod figures;
mod geometry;

use std::path::PathBuf;

use clap::Args;
use serde_json::json;

use crate::format::DType;
use crate::tools::cli::args::CHUNK_TOKENS;
use crate::tools::cli::error::CliError;
use crate::tools::cli::output::{Out, bytes};
use crate::tools::model::PRESETS;
use figures::Sizes;
use geometry::{dtype, tokens};

/// Calculates what a model's KV takes; asks no server.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate size                                       all known models
  kvgate size --model qwen3-32b --tp 4 --context 8k,128k
  kvgate size --config ~/models/gpt-oss-20b         any model of Hugging Face
  kvgate size --layers 48 --kv-heads 4 --head-dim 128 --dtype fp8_e4m3
  kvgate size --layers 61 --latent-dim 576")]
pub struct SizeArgs {
    /// A known model.
    #[arg(long, value_name = "PRESET", conflicts_with_all = ["layers", "kv_heads", "head_dim", "latent_dim"])]
    model: Option<String>,
    /// A model's config.json as Hugging Face has it, or its folder.
    #[arg(long, value_name = "PATH", conflicts_with_all = ["model", "layers", "kv_heads", "head_dim", "latent_dim"])]
    config: Option<PathBuf>,
    /// Layers with full attention.
    #[arg(long, value_name = "NUMBER")]
    layers: Option<u32>,
    /// KV heads, not query heads.
    #[arg(long, value_name = "NUMBER", conflicts_with = "latent_dim")]
    kv_heads: Option<u32>,
    /// Elements of K of one token of one head.
    #[arg(long, value_name = "ELEMENTS", conflicts_with = "latent_dim")]
    head_dim: Option<u32>,
    /// Elements of V, where they are not as many as K's.
    #[arg(long, value_name = "ELEMENTS", requires = "head_dim")]
    v_head_dim: Option<u32>,
    /// Elements of the latent of one token, rotary part included (MLA).
    #[arg(long, value_name = "ELEMENTS")]
    latent_dim: Option<u32>,
    /// Element type: float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, int8 or fp8_ds_mla.
    #[arg(long, value_parser = dtype)]
    dtype: Option<DType>,
    /// Tokens in a chunk.
    #[arg(long, value_name = "TOKENS", default_value_t = CHUNK_TOKENS)]
    chunk_tokens: u32,
    /// Lengths of prompts, such as 8192 or 128k.
    #[arg(long, value_name = "TOKENS,..", value_delimiter = ',', value_parser = tokens, default_value = "4096,32768,131072")]
    context: Vec<u64>,
    /// Tensor-parallel ranks.
    #[arg(long, value_name = "RANKS", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    tp: u32,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
}

pub fn run(args: &SizeArgs, out: &mut Out) -> Result<(), CliError> {
    let geometry = [args.layers, args.kv_heads, args.head_dim, args.latent_dim];
    if args.config.is_none() && args.model.is_none() && geometry.iter().all(Option::is_none) {
        return all(args, out);
    }
    let sizes = Sizes::of(args.spaces()?, args)?;
    match args.json {
        true => out.json(&sizes.json()),
        false => sizes.show(out),
    }
}

fn all(args: &SizeArgs, out: &mut Out) -> Result<(), CliError> {
    let (mut rows, mut objects) = (Vec::new(), Vec::new());
    for preset in PRESETS.iter() {
        let sizes = Sizes::of(args.of_preset(preset)?, args)?;
        let mut row = vec![
            preset.name.clone(),
            preset.model.clone(),
            sizes.kinds_text(),
            bytes(sizes.token_bytes()),
            match sizes.snapshot_bytes() {
                0 => "-".to_owned(),
                snapshot => bytes(snapshot),
            },
        ];
        row.extend(sizes.stored().map(bytes));
        rows.push(row);
        let mut object = sizes.json();
        object["preset"] = json!(preset.name);
        objects.push(object);
    }
    if args.json {
        return out.json(&json!({ "presets": objects }));
    }
    let contexts: Vec<String> = args
        .context
        .iter()
        .map(|tokens| format!(">{tokens} tokens"))
        .collect();
    let mut headings = vec!["preset", "model", "kinds", ">a token", ">a snapshot"];
    headings.extend(contexts.iter().map(String::as_str));
    out.table(&headings, &rows)?;
    out.line(format_args!(
        "\nChunks of {} tokens; of windows and states, what a prompt of this length keeps at its end.\n\
         More of one: kvgate size --model PRESET",
        args.chunk_tokens
    ))
}
