//! The prompt that each chunk was last looked up for, and how many chunks that prompt added: an eviction policy is told
//! both with each use.
//!
//! A table of fixed size, by hash: a later chunk takes an earlier one's place, and an engine that looks nothing up is
//! served as well. It is read and written without a lock.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tokio::time::Instant;

use super::policy::Access;
use crate::format::ChunkHash;

/// Chunks that are remembered, at most: 512 KiB.
const PLACES: usize = 1 << 16;
/// Of a place, from the lowest: the prompt's number, the logarithm of the chunks that it added, bits of the hash.
const ADDED_SHIFT: u32 = 32;
const HASH_SHIFT: u32 = 37;

pub struct Prompts {
    began: Instant,
    numbers: AtomicU32,
    places: Box<[AtomicU64]>,
}

impl Default for Prompts {
    fn default() -> Self {
        Self {
            began: Instant::now(),
            numbers: AtomicU32::new(0),
            places: (0..PLACES).map(|_| AtomicU64::new(0)).collect(),
        }
    }
}

impl Prompts {
    /// A prompt was looked up: so many of its leading chunks were there already.
    pub fn looked_up(&self, chunks: &[ChunkHash], there: usize) {
        // Number 0 is that of no prompt.
        let number = self
            .numbers
            .fetch_add(1, Ordering::Relaxed)
            .wrapping_add(1)
            .max(1);
        let added = chunks.len().saturating_sub(there).max(1).ilog2().min(31);
        let value = u64::from(number) | u64::from(added) << ADDED_SHIFT;
        for chunk in chunks {
            let (place, bits) = place_of(chunk);
            self.places[place].store(value | bits << HASH_SHIFT, Ordering::Relaxed);
        }
    }

    /// A use of a chunk, now.
    pub fn access(&self, chunk: &ChunkHash) -> Access {
        let (place, bits) = place_of(chunk);
        let value = self.places[place].load(Ordering::Relaxed);
        let at_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        if value >> HASH_SHIFT != bits {
            return Access {
                at_ms,
                ..Access::default()
            };
        }
        #[expect(clippy::cast_possible_truncation, reason = "the lower half is the number")]
        let request = value as u32;
        let added = 1 << (value >> ADDED_SHIFT & 31);
        Access {
            at_ms,
            request,
            added,
        }
    }
}

/// The place of a chunk, and the bits that tell it from others there.
fn place_of(chunk: &ChunkHash) -> (usize, u64) {
    let mut first = [0; 8];
    first.copy_from_slice(&chunk.0[..8]);
    // An engine's own hashes may not be spread evenly.
    let spread = u64::from_le_bytes(first).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (
        (spread >> 48) as usize,
        spread >> 16 & ((1 << (64 - HASH_SHIFT)) - 1),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_use_knows_the_latest_prompt_that_looked_for_the_chunk() {
        let prompts = Prompts::default();
        let chunks: Vec<ChunkHash> = (0..12).map(|i| ChunkHash([i; 32])).collect();
        prompts.looked_up(&chunks[..8], 0);
        prompts.looked_up(&chunks[..10], 8);
        tokio::time::advance(std::time::Duration::from_millis(70)).await;
        let known = Access {
            at_ms: 70,
            request: 2,
            added: 2,
        };
        assert_eq!(prompts.access(&chunks[0]), known);
        assert_eq!(prompts.access(&chunks[9]), known);
        assert_eq!(
            prompts.access(&chunks[11]),
            Access {
                at_ms: 70,
                ..Access::default()
            }
        );
    }
}
