//! The figures of `kvgate size`: bytes of a token, a snapshot, a chunk, a context, and a rank's share.

use serde_json::{Value, json};

use super::SizeArgs;
use crate::config::units::TIB;
use crate::format::{Kind, Plane, Space};
use crate::tools::cli::error::CliError;
use crate::tools::cli::output::{Out, bytes};

/// A model's kinds of KV, each with its figures. All are bytes or numbers of chunks.
pub struct Sizes {
    kinds: Vec<KindSizes>,
    tp: u32,
    contexts: Vec<Context>,
}

struct KindSizes {
    space: Space,
    /// Of a row that one rank holds: what a token or a snapshot takes there.
    rank_row: u64,
}

struct Context {
    tokens: u64,
    /// Of all kinds: what is stored of a prompt of this length, and what a load of it reads.
    objects: u64,
    bytes: u64,
    rank_bytes: u64,
    fit_in_tib: Option<u64>,
}

impl Sizes {
    pub fn of(spaces: Vec<Space>, args: &SizeArgs) -> Result<Self, CliError> {
        let kind = |space: Space| {
            let of_rank = |plane: &Plane| rank_bytes(space.kind(), plane, args.tp);
            let rank_row = space
                .planes()
                .iter()
                .map(of_rank)
                .sum::<Result<u64, CliError>>()?;
            Ok(KindSizes { space, rank_row })
        };
        let kinds: Vec<KindSizes> = spaces.into_iter().map(kind).collect::<Result<_, CliError>>()?;
        let contexts = args.context.iter().map(|&tokens| Context::of(&kinds, tokens));
        Ok(Self {
            contexts: contexts.collect(),
            tp: args.tp,
            kinds,
        })
    }

    /// Of all kinds that keep tokens.
    pub fn token_bytes(&self) -> u64 {
        self.row_bytes(false)
    }

    /// Of all states.
    pub fn snapshot_bytes(&self) -> u64 {
        self.row_bytes(true)
    }

    fn row_bytes(&self, of_states: bool) -> u64 {
        let kinds = self.kinds.iter().filter(|kind| kind.is_state() == of_states);
        kinds.map(|kind| kind.space.row_bytes()).sum()
    }

    pub fn stored(&self) -> impl Iterator<Item = u64> {
        self.contexts.iter().map(|context| context.bytes)
    }

    /// Such as `full, window 128`.
    pub fn kinds_text(&self) -> String {
        let names: Vec<String> = self.kinds.iter().map(KindSizes::name).collect();
        names.join(", ")
    }

    pub fn json(&self) -> Value {
        let context = |context: &Context| {
            json!({
                "tokens": context.tokens,
                "objects": context.objects,
                "bytes": context.bytes,
                "rank_bytes": context.rank_bytes,
                "fit_in_tib": context.fit_in_tib,
            })
        };
        let first = &self.kinds[0].space;
        json!({
            "model": first.model(),
            "chunk_tokens": first.chunk_tokens(),
            "token_bytes": self.token_bytes(),
            "snapshot_bytes": self.snapshot_bytes(),
            "tp": self.tp,
            "kinds": self.kinds.iter().map(KindSizes::json).collect::<Vec<_>>(),
            "contexts": self.contexts.iter().map(context).collect::<Vec<_>>(),
        })
    }

    pub fn show(&self, out: &mut Out) -> Result<(), CliError> {
        let first = &self.kinds[0].space;
        out.field("model", first.model())?;
        out.field("chunk", format_args!("{} tokens", first.chunk_tokens()))?;
        out.line("")?;
        let rank = format!(">a rank of {}", self.tp);
        let mut headings = vec![
            "kind",
            ">layers",
            ">KV heads",
            "type",
            ">a token",
            ">a snapshot",
            ">payload",
            ">object",
        ];
        if self.tp > 1 {
            headings.push(&rank);
        }
        let rows = self.kinds.iter().map(|kind| kind.cells(self.tp));
        out.table(&headings, &rows.collect::<Vec<_>>())?;
        let is_replicated = |kind: &KindSizes| {
            !kind.is_state() && kind.rank_row * u64::from(self.tp) > kind.space.row_bytes()
        };
        if self.kinds.iter().any(is_replicated) {
            out.line("Several ranks hold the same heads; one of them stores them.")?;
        }
        out.line("")?;
        let rows: Vec<Vec<String>> = self.contexts.iter().map(Context::cells).collect();
        let headings = [">context", ">objects", ">stored", ">a rank", ">fit in 1 TiB"];
        out.table(&headings, &rows)?;
        match self.kinds.iter().all(|kind| kind.space.kind().is_full()) {
            true => Ok(()),
            false => out.line("Of windows and states, what is needed at the prompt's end."),
        }
    }
}

impl KindSizes {
    fn is_state(&self) -> bool {
        self.space.kind() == Kind::State
    }

    fn is_indexer(&self) -> bool {
        self.space.extra().contains_key("cache_role")
    }

    fn name(&self) -> String {
        match self.is_indexer() {
            true => format!("{} (indexer)", self.space.kind()),
            false => self.space.kind().to_string(),
        }
    }

    /// KV heads that all ranks hold together.
    fn heads(&self) -> u32 {
        self.space.planes().first().map_or(0, |plane| plane.heads)
    }

    fn json(&self) -> Value {
        let (space, layout) = (&self.space, self.space.layout());
        let by_token = (!self.is_state()).then(|| space.row_bytes());
        json!({
            "kind": space.kind(),
            "is_indexer": self.is_indexer(),
            "dtype": space.dtype().name(),
            "layers": layout.layers(),
            "kv_heads": self.heads(),
            "token_bytes": by_token,
            "snapshot_bytes": self.is_state().then(|| space.row_bytes()),
            "payload_bytes": layout.payload_len(),
            "object_bytes": layout.object_len(),
            "rank_token_bytes": by_token.map(|_| self.rank_row),
            "rank_chunk_bytes": self.rank_row * u64::from(space.chunk_rows()),
        })
    }

    fn cells(&self, tp: u32) -> Vec<String> {
        let (space, layout) = (&self.space, self.space.layout());
        let row = bytes(space.row_bytes());
        let (token, snapshot, heads) = match self.is_state() {
            true => ("-".to_owned(), row, "-".to_owned()),
            false => (row, "-".to_owned(), self.heads().to_string()),
        };
        let mut cells = vec![
            self.name(),
            layout.layers().to_string(),
            heads,
            space.dtype().name().to_owned(),
            token,
            snapshot,
            bytes(layout.payload_len() as u64),
            bytes(layout.object_len() as u64),
        ];
        if tp > 1 {
            cells.push(bytes(self.rank_row));
        }
        cells
    }
}

impl Context {
    fn of(kinds: &[KindSizes], tokens: u64) -> Self {
        let (mut objects, mut bytes, mut rank_bytes) = (0, 0_u64, 0_u64);
        for kind in kinds {
            let space = &kind.space;
            let chunks = tokens / u64::from(space.chunk_tokens());
            let chunks = usize::try_from(chunks).unwrap_or(usize::MAX);
            let needed = space.needed(chunks).len() as u64;
            objects += needed;
            // Saturates for prompts of absurd length.
            bytes = bytes.saturating_add(needed.saturating_mul(space.layout().object_len() as u64));
            let of_rank = kind.rank_row * u64::from(space.chunk_rows());
            rank_bytes = rank_bytes.saturating_add(needed.saturating_mul(of_rank));
        }
        Self {
            tokens,
            objects,
            bytes,
            rank_bytes,
            fit_in_tib: TIB.checked_div(bytes),
        }
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.tokens.to_string(),
            self.objects.to_string(),
            bytes(self.bytes),
            bytes(self.rank_bytes),
            self.fit_in_tib.map_or("-".into(), |fit| fit.to_string()),
        ]
    }
}

/// Bytes of a row of a plane that each of `tp` ranks holds: a share of its own, or the same heads as other ranks'.
fn rank_bytes(kind: Kind, plane: &Plane, tp: u32) -> Result<u64, CliError> {
    let heads = plane.heads;
    let row = u64::from(plane.row_bytes);
    if heads.is_multiple_of(tp) {
        Ok(u64::from(heads / tp) * row)
    } else if tp.is_multiple_of(heads) {
        Ok(row)
    } else if kind == Kind::State {
        Ok((u64::from(heads) * row).div_ceil(u64::from(tp)))
    } else {
        Err(CliError::usage(format!(
            "{heads} KV heads can't be shared by --tp {tp} ranks: give a divisor or a multiple of {heads}"
        )))
    }
}
