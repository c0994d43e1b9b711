//! The demo's workload: conversations of two turns that share a system prompt, and the bounds that it keeps.

use super::error::DemoError;
use super::paged::BLOCK_TOKENS;
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
    /// Fails if a flag must change.
    pub fn new(space: &Space, shape: Shape, arena: ByteSize) -> Result<Self, DemoError> {
        let object_bytes = space.layout().object_len();
        if object_bytes as u64 > arena.bytes() {
            return Err(DemoError::Arena { object_bytes, arena });
        }
        let chunk_tokens = space.chunk_tokens() as usize;
        if !chunk_tokens.is_multiple_of(BLOCK_TOKENS) {
            return Err(DemoError::Blocks {
                chunk_tokens,
                block_tokens: BLOCK_TOKENS,
            });
        }
        let chunks = shape.tokens / chunk_tokens;
        if chunks == 0 {
            return Err(DemoError::Tokens {
                tokens: shape.tokens,
                chunk_tokens,
            });
        }
        let bytes = (chunks as u64).saturating_mul(space.layout().payload_len() as u64);
        if bytes > CACHE_BYTES_MAX {
            return Err(DemoError::Cache {
                bytes,
                bytes_max: CACHE_BYTES_MAX,
            });
        }
        let hasher = ChunkHasher::new(space, None)?;
        let root = hasher.root(b"", b"")?;
        let shared_chunks = Shape::shared_chunks(chunks);
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
                turns: turns(shared_chunks, chunks),
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

    /// Blocks of a conversation, plus one chunk's blocks to spare: the spare ones must stay untouched.
    pub fn cache_blocks(&self) -> usize {
        let longest = self
            .conversations
            .iter()
            .map(|conversation| conversation.chunks.len())
            .max();
        (longest.unwrap_or(0) + 1) * self.chunk_blocks()
    }

    pub fn chunk_blocks(&self) -> usize {
        self.chunk_tokens / BLOCK_TOKENS
    }
}

impl Conversation {
    /// The hash of the chunk before, or the root.
    pub fn parent(&self, chunk: usize, root: ChunkHash) -> ChunkHash {
        chunk.checked_sub(1).map_or(root, |before| self.chunks[before])
    }

    /// The prefix states of a chunk's tokens.
    pub fn chunk_states(&self, chunk: usize) -> &[u64] {
        let chunk_tokens = self.states.len() / self.chunks.len();
        &self.states[chunk * chunk_tokens..][..chunk_tokens]
    }
}

/// Cuts the part after the system prompt into turns of about the same length.
fn turns(shared: usize, chunks: usize) -> Vec<usize> {
    let own = chunks - shared;
    let turns = TURNS.min(own);
    (1..=turns)
        .map(|turn| shared + (own * turn).div_ceil(turns))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::SpaceInput;

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
        Plan::new(&space(chunk_tokens), shape, ByteSize(1 << 20))
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
    fn an_impossible_plan_is_refused() {
        let shape = Shape {
            conversations: 1,
            tokens: 31,
            seed: 1,
        };
        assert!(matches!(planned(32, shape), Err(DemoError::Tokens { .. })));
        assert!(matches!(planned(24, shape), Err(DemoError::Blocks { .. })));
        let arena = Plan::new(&space(32), Shape { tokens: 32, ..shape }, ByteSize(4096)).unwrap_err();
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
