//! The figures of `kvgate size`: bytes of a token, a chunk, a context, and a rank's share.

use serde_json::{Value, json};

use super::SizeArgs;
use crate::config::units::TIB;
use crate::format::Space;
use crate::tools::cli::error::CliError;
use crate::tools::cli::output::{Out, bytes};

/// All figures are bytes or numbers of chunks.
pub struct Sizes {
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
    pub fn of(space: Space, args: &SizeArgs) -> Result<Self, CliError> {
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

/// KV heads that each rank holds: a share of its own, or the same as other ranks'.
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

impl Sizes {
    pub fn json(&self) -> Value {
        let (space, layout) = (&self.space, self.space.layout());
        let context = |context: &Context| {
            json!({
                "tokens": context.tokens,
                "chunks": context.chunks,
                "bytes": context.objects_bytes,
                "rank_bytes": context.rank_bytes,
                "fit_in_tib": context.fit_in_tib,
            })
        };
        json!({
            "model": space.model(),
            "dtype": space.dtype().name(),
            "layers": space.planes().len(),
            "kv_heads": self.heads(),
            "chunk_tokens": space.chunk_tokens(),
            "token_bytes": space.row_bytes(),
            "payload_bytes": layout.payload_len(),
            "object_bytes": layout.object_len(),
            "tp": self.tp,
            "rank_token_bytes": self.rank_token,
            "rank_chunk_bytes": self.rank_chunk(),
            "contexts": self.contexts.iter().map(context).collect::<Vec<_>>(),
        })
    }

    fn heads(&self) -> u32 {
        self.space.planes().first().map_or(0, |plane| plane.heads)
    }

    pub fn show(&self, out: &mut Out) -> Result<(), CliError> {
        let (space, layout, heads) = (&self.space, self.space.layout(), self.heads());
        out.field("model", space.model())?;
        out.field(
            "geometry",
            format_args!(
                "{} layers, KV heads {heads}, {}",
                space.planes().len(),
                space.dtype().name()
            ),
        )?;
        out.field("token", bytes(space.row_bytes()))?;
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
        if self.tp > 1 {
            let shared = match self.rank_token * u64::from(self.tp) > space.row_bytes() {
                true => "; heads are replicated, and one rank's copy is stored",
                false => "",
            };
            out.field(
                "rank",
                format_args!(
                    "1 of {}: {} a token, {} a chunk{shared}",
                    self.tp,
                    bytes(self.rank_token),
                    bytes(self.rank_chunk())
                ),
            )?;
        }
        out.line("")?;
        let rows: Vec<Vec<String>> = self.contexts.iter().map(Context::cells).collect();
        let headings = [">context", ">objects", ">stored", ">a rank", ">fit in 1 TiB"];
        out.table(&headings, &rows)
    }
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
