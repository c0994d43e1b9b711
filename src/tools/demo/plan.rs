//! The demo's workload: conversations of two turns that share a system prompt, and the bounds that it keeps.

use super::error::DemoError;
use super::paged::block_rows;
use super::synthetic::{mix, prefix_states};
use crate::config::units::ByteSize;
use crate::format::{ChunkHash, ChunkHasher, Space};

/// The paged cache holds one conversation, so this bounds memory: 64 GiB is 512 Ki tokens of an 8B model.
const CACHE_BYTES_MAX: u64 = 64 << 30;
const VOCABULARY: u64 = 128_000;
/// Turns after the system prompt.
const TURNS: usize = 2;

/// The dimensions of a demo.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    pub conversations: usize,
    /// Tokens of each conversation, the system prompt included.
    pub tokens: usize,
    pub seed: u64,
}

/// The conversations, determined by the seed alone.
#[derive(Debug, Clone)]
pub struct Plan {
    pub shape: Shape,
    pub root: ChunkHash,
    pub conversations: Vec<Conversation>,
    pub chunk_tokens: usize,
    /// Chunks of the system prompt.
    pub shared_chunks: usize,
    /// Different chunks, over all conversations.
    pub unique_chunks: usize,
    /// For each kind, the chunks of a conversation whose KV of that kind is kept. All conversations are as long.
    pub kept: Vec<Vec<usize>>,
}

/// The tokens of one conversation, as far as they fill chunks.
#[derive(Debug, Clone)]
pub struct Conversation {
    pub tokens: Vec<u32>,
    pub chunks: Vec<ChunkHash>,
    /// One for each token: a hash of it and all tokens before it.
    pub states: Vec<u64>,
    /// Number of chunks in each turn's prompt.
    pub turns: Vec<usize>,
}

impl Shape {
    /// Chunks of the system prompt that conversations of `chunks` chunks share: about a quarter, and all but one at
    /// the most.
    pub fn shared_chunks(chunks: usize) -> usize {
        chunks.div_ceil(4).min(chunks.saturating_sub(1))
    }
}

impl Plan {
    /// `spaces`: the kinds of KV of a model. Fails if a flag must change.
    pub fn new(spaces: &[Space], shape: Shape, arena: ByteSize) -> Result<Self, DemoError> {
        let object_bytes = spaces.iter().map(|space| space.layout().object_len()).max();
        let object_bytes = object_bytes.unwrap_or_default();
        if object_bytes as u64 > arena.bytes() {
            return Err(DemoError::Arena { object_bytes, arena });
        }
        let chunk_tokens = spaces[0].chunk_tokens() as usize;
        if let Some(space) = spaces
            .iter()
            .find(|space| !space.chunk_rows().is_multiple_of(block_rows(space)))
        {
            return Err(DemoError::Blocks {
                chunk_tokens,
                block_tokens: block_rows(space) as usize,
            });
        }
        let chunks = shape.tokens / chunk_tokens;
        if chunks == 0 {
            return Err(DemoError::Tokens {
                tokens: shape.tokens,
                chunk_tokens,
            });
        }
        let shared_chunks = Shape::shared_chunks(chunks);
        let turns = turns(shared_chunks, chunks);
        // A full kind keeps every chunk: enough to know that it is too much.
        let bytes = spaces
            .iter()
            .filter(|space| space.kind().is_full())
            .map(|space| (chunks as u64).saturating_mul(space.layout().payload_len() as u64));
        let bytes = bytes.fold(0, u64::saturating_add);
        if bytes > CACHE_BYTES_MAX {
            return Err(DemoError::Cache {
                bytes,
                bytes_max: CACHE_BYTES_MAX,
            });
        }
        let kept = spaces
            .iter()
            .map(|space| kept_chunks(space, shared_chunks, &turns))
            .collect();
        let hasher = ChunkHasher::new(&spaces[0], None)?;
        let root = hasher.root(b"", b"")?;
        let conversation = |index: usize| -> Result<Conversation, DemoError> {
            let token = |at: usize| {
                let speaker = if at < shared_chunks * chunk_tokens {
                    0
                } else {
                    1 + index as u64
                };
                let drawn = mix(mix(shape.seed, speaker), at as u64) % VOCABULARY;
                u32::try_from(drawn).unwrap_or_default()
            };
            let tokens: Vec<u32> = (0..chunks * chunk_tokens).map(token).collect();
            Ok(Conversation {
                chunks: hasher.chain(&root, &tokens, &[])?,
                states: prefix_states(shape.seed, &tokens),
                turns: turns.clone(),
                tokens,
            })
        };
        Ok(Self {
            shape,
            root,
            conversations: (0..shape.conversations)
                .map(conversation)
                .collect::<Result<_, _>>()?,
            chunk_tokens,
            shared_chunks,
            kept,
            unique_chunks: shared_chunks + shape.conversations * (chunks - shared_chunks),
        })
    }

    /// Number of chunks over all conversations; shared ones count each time.
    pub fn chunks(&self) -> usize {
        self.conversations
            .iter()
            .map(|conversation| conversation.chunks.len())
            .sum()
    }

    /// The chunks from `from` to `to` whose KV of this kind is kept.
    pub fn kept_within(&self, kind: usize, from: usize, to: usize) -> &[usize] {
        let kept = &self.kept[kind];
        let at = |chunk| kept.partition_point(|&one| one < chunk);
        &kept[at(from)..at(to)]
    }

    /// The place of a chunk among those that are kept, and in the pages.
    pub fn place(&self, kind: usize, chunk: usize) -> usize {
        self.kept[kind].partition_point(|&one| one < chunk)
    }

    /// Chunks of this kind that a load of all conversations needs.
    pub fn needed(&self, space: &Space) -> usize {
        let ends = self.conversations.iter().map(|one| one.chunks.len());
        ends.map(|end| space.needed(end).len()).sum()
    }
}

impl Conversation {
    /// The hash of the chunk before, or the root.
    pub fn parent(&self, chunk: usize, root: ChunkHash) -> ChunkHash {
        chunk.checked_sub(1).map_or(root, |before| self.chunks[before])
    }

    /// The prefix states that a chunk's rows of this kind are made from: each token's, or the last one's for a state.
    pub fn row_states(&self, space: &Space, chunk: usize) -> &[u64] {
        let chunk_tokens = self.states.len() / self.chunks.len();
        let rows = space.chunk_rows() as usize;
        &self.states[(chunk + 1) * chunk_tokens - rows..][..rows]
    }
}

/// The chunks of a conversation whose KV of this kind is worth keeping: what a prompt needs that goes on after the system
/// prompt, or after a turn.
pub(super) fn kept_chunks(space: &Space, shared: usize, turns: &[usize]) -> Vec<usize> {
    let ends = turns.iter().copied().chain([shared]);
    let mut kept: Vec<usize> = ends.flat_map(|end| space.needed(end)).collect();
    kept.sort_unstable();
    kept.dedup();
    kept
}

/// Different chunks of these that all conversations store: the shared ones once.
pub(super) fn stored_chunks(kept: &[usize], shared: usize, conversations: usize) -> usize {
    let of_all = kept.iter().filter(|&&chunk| chunk < shared).count();
    of_all + conversations * (kept.len() - of_all)
}

/// Cuts the part after the system prompt into turns of about the same length.
pub(super) fn turns(shared: usize, chunks: usize) -> Vec<usize> {
    let own = chunks - shared;
    let turns = TURNS.min(own);
    (1..=turns)
        .map(|turn| shared + (own * turn).div_ceil(turns))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{Kind, SpaceInput};

    fn space(chunk_tokens: u32) -> Space {
        Space::new(SpaceInput {
            model: "tiny".into(),
            revision: "1".into(),
            chunk_tokens: Some(chunk_tokens),
            mha: Some(crate::format::Mha {
                layers: 2,
                heads: 2,
                head_dim: 4,
                v_head_dim: None,
            }),
            ..SpaceInput::default()
        })
        .unwrap()
    }

    fn planned(chunk_tokens: u32, shape: Shape) -> Result<Plan, DemoError> {
        Plan::new(&[space(chunk_tokens)], shape, ByteSize(1 << 20))
    }

    #[test]
    fn conversations_share_the_system_prompt_and_nothing_else() {
        let shape = Shape {
            conversations: 3,
            tokens: 7 * 32 + 5,
            seed: 1,
        };
        let plan = planned(32, shape).unwrap();
        assert_eq!(
            (plan.shared_chunks, plan.chunks(), plan.unique_chunks),
            (2, 21, 17)
        );
        let [a, b, _] = &plan.conversations[..] else {
            panic!()
        };
        assert_eq!(a.chunks[..2], b.chunks[..2]);
        assert!(a.chunks[2..].iter().all(|chunk| !b.chunks.contains(chunk)));
        assert_eq!(a.states[..64], b.states[..64]);
        assert!(a.states[64..].iter().zip(&b.states[64..]).all(|(a, b)| a != b));
        assert_eq!(a.turns, [5, 7]);
        assert_eq!(
            (a.parent(0, plan.root), a.parent(3, plan.root)),
            (plan.root, a.chunks[2])
        );
        let all: std::collections::HashSet<_> = plan.conversations.iter().flat_map(|c| &c.chunks).collect();
        assert_eq!(all.len(), plan.unique_chunks);
        let other = planned(32, Shape { seed: 2, ..shape }).unwrap();
        assert!(!all.contains(&other.conversations[0].chunks[0]));
    }

    #[test]
    fn every_length_has_turns_that_end_with_it() {
        for chunks in 1..100 {
            let turns = turns(Shape::shared_chunks(chunks), chunks);
            assert_eq!(turns.last(), Some(&chunks));
            assert!(turns.is_sorted_by(|a, b| a < b), "{chunks}: {turns:?}");
        }
    }

    #[test]
    fn windows_and_states_are_kept_where_a_prompt_may_go_on() {
        let of = |kind: Kind| {
            let space = space(32);
            let input = SpaceInput {
                model: "tiny".into(),
                revision: "1".into(),
                chunk_tokens: Some(32),
                kind: Some(kind),
                planes: Some(space.planes().to_vec()),
                ..SpaceInput::default()
            };
            Space::new(input).unwrap()
        };
        let shape = Shape {
            conversations: 2,
            tokens: 8 * 32,
            seed: 1,
        };
        let spaces = [of(Kind::Full), of(Kind::Window(34)), of(Kind::State)];
        let plan = Plan::new(&spaces, shape, ByteSize(1 << 20)).unwrap();
        assert_eq!(plan.conversations[0].turns, [5, 8]);
        // A window of 34 tokens reaches over a whole chunk and one token more.
        assert_eq!(
            plan.kept,
            [
                vec![0, 1, 2, 3, 4, 5, 6, 7],
                vec![0, 1, 3, 4, 6, 7],
                vec![1, 4, 7]
            ]
        );
        assert_eq!(plan.kept_within(2, 2, 8), [4, 7]);
        assert_eq!(plan.place(1, 6), 4);
        assert_eq!([0, 1, 2].map(|kind| plan.needed(&spaces[kind])), [16, 4, 2]);
    }

    #[test]
    fn an_impossible_plan_is_refused() {
        let shape = Shape {
            conversations: 1,
            tokens: 31,
            seed: 1,
        };
        assert!(matches!(planned(32, shape), Err(DemoError::Tokens { .. })));
        assert!(matches!(planned(24, shape), Err(DemoError::Blocks { .. })));
        let arena = Plan::new(&[space(32)], Shape { tokens: 32, ..shape }, ByteSize(4096)).unwrap_err();
        assert!(
            arena.is_usage() && arena.to_string().contains("raise [arena] size"),
            "{arena}"
        );
        let shape = Shape {
            tokens: usize::MAX / 2,
            ..shape
        };
        let error = planned(32, shape).unwrap_err();
        assert!(matches!(error, DemoError::Cache { .. }) && error.is_usage());
    }
}
