//! What follows each chunk in the prompt that it was last looked up for. A chunk that is stored takes it along as its hint.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::cache::recent::Recent;
use crate::format::{ChunkHash, ChunkId, RUN_CHUNKS_MAX, Run, SpaceKey};

/// See the [module](self).
pub struct Runs {
    recent: Mutex<Recent<Next>>,
    chunks_max: usize,
}

/// The next chunk of the prompt; None after its last.
type Next = Option<ChunkHash>;

impl Runs {
    /// Remembers so many chunks at most.
    pub fn new(chunks_max: usize) -> Self {
        Self {
            recent: Mutex::new(Recent::new(chunks_max)),
            chunks_max,
        }
    }

    /// A prompt was looked up, and so many of its leading chunks were there: the others may be stored soon.
    pub fn looked_up(&self, space: SpaceKey, chunks: &[ChunkHash], there: usize) {
        let mut runs = self.lock();
        for (i, chunk) in chunks.iter().enumerate().skip(there).take(self.chunks_max) {
            runs.add((space, *chunk), chunks.get(i + 1).copied());
        }
    }

    /// None: nobody looked for the chunk lately. One that was made while an answer was computed has no such prompt.
    pub fn of(&self, key: &ChunkId) -> Option<Run> {
        let (runs, mut following) = (self.lock(), Vec::new());
        let mut next = *runs.get(key)?;
        while let Some(chunk) = next.filter(|_| following.len() < RUN_CHUNKS_MAX) {
            following.push(chunk);
            next = runs.get(&(key.0, chunk)).copied().flatten();
        }
        Some(Run::of(&following))
    }

    /// No panic can leave it half-changed.
    fn lock(&self) -> MutexGuard<'_, Recent<Next>> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chunk_takes_along_what_follows_in_the_prompt_that_lacked_it() {
        let (runs, space) = (Runs::new(100), SpaceKey::from_hex(&"0".repeat(32)).unwrap());
        let chunks: Vec<ChunkHash> = (0..6).map(|i| ChunkHash([i; 32])).collect();
        runs.looked_up(space, &chunks[..4], 2);
        assert_eq!(runs.of(&(space, chunks[1])), None, "it is stored already");
        assert_eq!(runs.of(&(space, chunks[2])), Some(Run::of(&chunks[3..4])));
        assert_eq!(runs.of(&(space, chunks[3])), Some(Run::of([])));
        // A longer prompt, before any of it is stored.
        runs.looked_up(space, &chunks, 2);
        assert_eq!(runs.of(&(space, chunks[2])), Some(Run::of(&chunks[3..])));
    }
}
