use clap::Args;
use serde_json::json;

use super::args::{CHUNK_TOKENS, find_preset};
use super::error::CliError;
use super::output::{Out, bytes};
use crate::chunk::{DType, Mha, Mla, PRESETS, Space, SpaceInput};
use crate::units::TIB;

/// Calculates what a model's KV takes; asks no server.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate size                                       all known models
  kvgate size --model qwen3-32b --tp 4 --context 8k,128k
  kvgate size --layers 48 --kv-heads 4 --head-dim 128 --dtype fp8_e4m3
  kvgate size --layers 61 --latent-dim 576")]
pub struct SizeArgs {
    /// A known model.
    #[arg(long, value_name = "PRESET", conflicts_with_all = ["layers", "kv_heads", "head_dim", "latent_dim"])]
    model: Option<String>,
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

/// Geometry alone needs no revision, but a space has one.
const ANY_REVISION: &str = "0";

pub fn run(args: &SizeArgs, out: &mut Out) -> Result<(), CliError> {
    let geometry = [args.layers, args.kv_heads, args.head_dim, args.latent_dim];
    if args.model.is_none() && geometry.iter().all(Option::is_none) {
        return all(args, out);
    }
    one(&Sizes::of(args.space()?, args)?, args.json, out)
}

impl SizeArgs {
    fn space(&self) -> Result<Space, CliError> {
        let Some(model) = &self.model else {
            return self.geometry();
        };
        let space = find_preset(model)?.space(ANY_REVISION, self.chunk_tokens)?;
        match self.dtype {
            Some(dtype) if dtype != space.dtype() => retyped(&space, dtype),
            _ => Ok(space),
        }
    }

    fn geometry(&self) -> Result<Space, CliError> {
        let mut input = input(
            "(as given)",
            self.dtype.unwrap_or(DType::BFloat16),
            self.chunk_tokens,
        );
        match (self.layers, self.kv_heads, self.head_dim, self.latent_dim) {
            (Some(layers), None, None, Some(latent_dim)) => input.mla = Some(Mla { layers, latent_dim }),
            (Some(layers), Some(heads), Some(head_dim), None) => {
                input.mha = Some(Mha {
                    layers,
                    heads,
                    head_dim,
                    v_head_dim: self.v_head_dim,
                });
            }
            _ => {
                return Err(CliError::usage(
                    "the geometry is not complete: give --layers, --kv-heads and --head-dim, or --layers and \
                     --latent-dim for MLA, or --model PRESET",
                ));
            }
        }
        Ok(Space::new(input)?)
    }
}

fn input(model: &str, dtype: DType, chunk_tokens: u32) -> SpaceInput {
    SpaceInput {
        model: model.into(),
        revision: ANY_REVISION.into(),
        dtype: Some(dtype),
        chunk_tokens: Some(chunk_tokens),
        ..SpaceInput::default()
    }
}

/// The same elements in another type.
fn retyped(space: &Space, dtype: DType) -> Result<Space, CliError> {
    let from = space.dtype();
    if from.fixed_row_bytes().is_some() {
        return Err(CliError::usage(format!(
            "this preset's rows are {} by definition: take the preset without it, such as deepseek-v3, for --dtype {}",
            from.name(),
            dtype.name()
        )));
    }
    let mut planes = space.planes().to_vec();
    for plane in &mut planes {
        let elements = plane.row_bytes / from.size();
        plane.row_bytes = dtype.fixed_row_bytes().unwrap_or(elements * dtype.size());
    }
    let mut input = input(space.model(), dtype, space.chunk_tokens());
    input.planes = Some(planes);
    Ok(Space::new(input)?)
}

/// All figures are bytes or numbers of chunks.
struct Sizes {
    space: Space,
    tp: u32,
    rank_token: u64,
    contexts: Vec<Context>,
}

struct Context {
    tokens: u64,
    chunks: u64,
    objects_bytes: u64,
    rank_bytes: u64,
    fit_in_tib: Option<u64>,
}

impl Sizes {
    fn of(space: Space, args: &SizeArgs) -> Result<Self, CliError> {
        let mut rank_token = 0;
        for plane in space.planes() {
            rank_token += u64::from(heads_of_rank(plane.heads, args.tp)?) * u64::from(plane.row_bytes);
        }
        let context = |tokens: u64| {
            let chunks = tokens / u64::from(space.chunk_tokens());
            // Saturates for prompts of absurd length.
            let objects_bytes = chunks.saturating_mul(space.layout().object_len() as u64);
            Context {
                tokens,
                chunks,
                objects_bytes,
                rank_bytes: chunks
                    .saturating_mul(u64::from(space.chunk_tokens()))
                    .saturating_mul(rank_token),
                fit_in_tib: TIB.checked_div(objects_bytes),
            }
        };
        Ok(Self {
            tp: args.tp,
            rank_token,
            contexts: args.context.iter().map(|&tokens| context(tokens)).collect(),
            space,
        })
    }

    fn rank_chunk(&self) -> u64 {
        self.rank_token * u64::from(self.space.chunk_tokens())
    }
}

/// KV heads that each rank holds: a share of its own, or the same ones as other ranks.
fn heads_of_rank(heads: u32, tp: u32) -> Result<u32, CliError> {
    if heads.is_multiple_of(tp) {
        Ok(heads / tp)
    } else if tp.is_multiple_of(heads) {
        Ok(1)
    } else {
        Err(CliError::usage(format!(
            "{heads} KV heads can't be shared by --tp {tp} ranks: give a divisor or a multiple of {heads}"
        )))
    }
}

fn one(sizes: &Sizes, as_json: bool, out: &mut Out) -> Result<(), CliError> {
    let (space, layout) = (&sizes.space, sizes.space.layout());
    let heads = space.planes().first().map_or(0, |plane| plane.heads);
    if as_json {
        let context = |context: &Context| {
            json!({
                "tokens": context.tokens,
                "chunks": context.chunks,
                "bytes": context.objects_bytes,
                "rank_bytes": context.rank_bytes,
                "fit_in_tib": context.fit_in_tib,
            })
        };
        return out.json(&json!({
            "model": space.model(),
            "dtype": space.dtype().name(),
            "layers": space.planes().len(),
            "kv_heads": heads,
            "chunk_tokens": space.chunk_tokens(),
            "token_bytes": space.token_bytes(),
            "payload_bytes": layout.payload_len(),
            "object_bytes": layout.object_len(),
            "tp": sizes.tp,
            "rank_token_bytes": sizes.rank_token,
            "rank_chunk_bytes": sizes.rank_chunk(),
            "contexts": sizes.contexts.iter().map(context).collect::<Vec<_>>(),
        }));
    }
    out.field("model", space.model())?;
    out.field(
        "geometry",
        format_args!(
            "{} layers, KV heads {heads}, {}",
            space.planes().len(),
            space.dtype().name()
        ),
    )?;
    out.field("token", bytes(space.token_bytes()))?;
    let (payload, header) = (layout.payload_len() as u64, layout.header_len() as u64);
    out.field(
        "chunk",
        format_args!(
            "{} tokens: {} payload + {} header = {} bytes an object",
            space.chunk_tokens(),
            bytes(payload),
            bytes(header),
            layout.object_len()
        ),
    )?;
    if sizes.tp > 1 {
        let shared = match sizes.rank_token * u64::from(sizes.tp) > space.token_bytes() {
            true => "; heads are replicated, and one rank's copy is stored",
            false => "",
        };
        out.field(
            "rank",
            format_args!(
                "1 of {}: {} a token, {} a chunk{shared}",
                sizes.tp,
                bytes(sizes.rank_token),
                bytes(sizes.rank_chunk())
            ),
        )?;
    }
    out.line("")?;
    let rows: Vec<Vec<String>> = sizes.contexts.iter().map(Context::cells).collect();
    let headings = [">context", ">objects", ">stored", ">a rank", ">fit in 1 TiB"];
    out.table(&headings, &rows)
}

impl Context {
    fn cells(&self) -> Vec<String> {
        vec![
            self.tokens.to_string(),
            self.chunks.to_string(),
            bytes(self.objects_bytes),
            bytes(self.rank_bytes),
            self.fit_in_tib.map_or("-".into(), |fit| fit.to_string()),
        ]
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
            bytes(space.token_bytes()),
            bytes(payload),
        ];
        row.extend(contexts.iter().map(|&sum| bytes(sum)));
        rows.push(row);
        objects.push(json!({
            "preset": preset.name,
            "model": preset.model,
            "dtype": preset.dtype.name(),
            "chunk_tokens": args.chunk_tokens,
            "token_bytes": space.token_bytes(),
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

fn dtype(name: &str) -> Result<DType, String> {
    serde_json::from_value(json!(name.to_ascii_lowercase())).map_err(|_| {
        "it is none of float32, float16, bfloat16, fp8_e4m3, fp8_e5m2, int8, fp8_ds_mla".to_owned()
    })
}

/// `8192`, `8k` = 8192, `1m`.
fn tokens(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let (digits, factor) = match lower.as_bytes().last() {
        Some(b'k') => (&lower[..lower.len() - 1], 1 << 10),
        Some(b'm') => (&lower[..lower.len() - 1], 1 << 20),
        _ => (lower.as_str(), 1),
    };
    let number: Option<u64> = digits.parse().ok();
    number
        .and_then(|number| number.checked_mul(factor))
        .filter(|&number| number > 0)
        .ok_or_else(|| "give a number of tokens such as 32768 or 128k".to_owned())
}
