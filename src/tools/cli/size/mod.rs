//! `kvgate size`: how large a model's KV is. It needs no server.

mod figures;
mod geometry;
mod hf_config;

use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::json;

use crate::format::{DType, PRESETS};
use crate::tools::cli::args::CHUNK_TOKENS;
use crate::tools::cli::error::CliError;
use crate::tools::cli::output::{Out, bytes};
use figures::Sizes;
use geometry::{ANY_REVISION, dtype, tokens};
use hf_config::{HfModel, Kept};

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
    if let Some(path) = &args.config {
        return by_config(args, path, out);
    }
    let geometry = [args.layers, args.kv_heads, args.head_dim, args.latent_dim];
    if args.model.is_none() && geometry.iter().all(Option::is_none) {
        return all(args, out);
    }
    let sizes = Sizes::of(args.space()?, args)?;
    match args.json {
        true => out.json(&sizes.json()),
        false => sizes.show(out),
    }
}

fn by_config(args: &SizeArgs, path: &Path, out: &mut Out) -> Result<(), CliError> {
    let model = HfModel::read(path, args.dtype)?;
    let space = model.space(args.chunk_tokens)?;
    let sizes = space.map(|space| Sizes::of(space, args)).transpose()?;
    if args.json {
        let mut all = sizes.map_or_else(|| json!({}), |sizes| sizes.json());
        all["groups"] = model.json(&args.context);
        return out.json(&all);
    }
    let groups = model.groups();
    let contexts: Vec<String> = args
        .context
        .iter()
        .map(|tokens| format!(">of {tokens}"))
        .collect();
    let mut headings = vec!["kept", ">layers", ">a token", ">a snapshot"];
    headings.extend(contexts.iter().map(String::as_str));
    let rows = groups.iter().map(|group| {
        let (token, snapshot) = match group.kept {
            Kept::State => ("-".to_owned(), bytes(group.bytes)),
            _ => (bytes(group.bytes), "-".to_owned()),
        };
        let mut row = vec![group.kept.to_string(), group.layers.to_string(), token, snapshot];
        let needed = |tokens: &u64| bytes(group.kept.needed(*tokens).saturating_mul(group.bytes));
        row.extend(args.context.iter().map(needed));
        row
    });
    let rows: Vec<Vec<String>> = rows.collect();
    out.table(&headings, &rows)?;
    if groups.iter().any(|group| group.kept == Kept::State) {
        out.line("\nkvgate stores no states yet: its connectors refuse this model. By token it keeps:\n")?;
    } else if groups.len() > 1 {
        out.line("\nkvgate stores all tokens of all layers, also of those that attend to a window:\n")?;
    } else {
        out.line("")?;
    }
    match sizes {
        Some(sizes) => sizes.show(out),
        None => out.line("nothing"),
    }
}

fn all(args: &SizeArgs, out: &mut Out) -> Result<(), CliError> {
    let (mut rows, mut objects) = (Vec::new(), Vec::new());
    for preset in &PRESETS {
        let space = preset.space(ANY_REVISION, args.chunk_tokens)?;
        let payload = space.layout().payload_len() as u64;
        let contexts = args.context.iter().map(|tokens| {
            let chunks = tokens / u64::from(args.chunk_tokens);
            chunks.saturating_mul(space.layout().object_len() as u64)
        });
        let contexts: Vec<u64> = contexts.collect();
        let mut row = vec![
            preset.name.to_owned(),
            preset.model.to_owned(),
            preset.dtype.name().to_owned(),
            bytes(space.row_bytes()),
            bytes(payload),
        ];
        row.extend(contexts.iter().map(|&sum| bytes(sum)));
        rows.push(row);
        objects.push(json!({
            "preset": preset.name,
            "model": preset.model,
            "dtype": preset.dtype.name(),
            "chunk_tokens": args.chunk_tokens,
            "token_bytes": space.row_bytes(),
            "payload_bytes": payload,
            "object_bytes": space.layout().object_len(),
            "contexts": args.context.iter().zip(contexts)
                .map(|(tokens, sum)| json!({ "tokens": tokens, "bytes": sum })).collect::<Vec<_>>(),
        }));
    }
    if args.json {
        return out.json(&json!({ "presets": objects }));
    }
    let contexts: Vec<String> = args
        .context
        .iter()
        .map(|tokens| format!(">{tokens} tokens"))
        .collect();
    let mut headings = vec!["preset", "model", "dtype", ">token", ">chunk"];
    headings.extend(contexts.iter().map(String::as_str));
    out.table(&headings, &rows)?;
    out.line(format_args!(
        "\nChunks of {} tokens. More of one: kvgate size --model PRESET",
        args.chunk_tokens
    ))
}
