//! Which chunks were asked for lately: the second asker makes a chunk hot.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::cache::recent::Recent;
use crate::format::ChunkId;

/// Chunks that peers asked for, with the time of the last ask. Bounded.
pub struct HotChunks {
    within: Duration,
    asked: Mutex<Recent<Instant>>,
}

impl HotChunks {
    pub fn new(within: Duration, most: usize) -> Self {
        Self {
            within,
            asked: Mutex::new(Recent::new(most)),
        }
    }

    /// Notes an ask. Answers whether there was another one shortly before.
    pub fn asked(&self, chunk: ChunkId, now: Instant) -> bool {
        // No panic can leave it half-changed.
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let is_hot = asked.get(&chunk).is_some_and(|last| now - *last <= self.within);
        asked.add(chunk, now);
        is_hot
    }
}
