//! Which chunks were asked for lately: the second node that asks makes a chunk hot.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::cache::recent::Recent;
use crate::format::ChunkId;

/// A peer as it names itself, hashed; None: it does not.
pub type Asker = Option<u64>;

/// Chunks that peers asked for, with the last ask. Bounded.
pub struct HotChunks {
    within: Duration,
    asked: Mutex<Recent<(Instant, Asker)>>,
}

impl HotChunks {
    pub fn new(within: Duration, most: usize) -> Self {
        Self {
            within,
            asked: Mutex::new(Recent::new(most)),
        }
    }

    /// Notes an ask. Answers whether the last one was of another node, shortly before. Fetching for one node alone would
    /// only lead its bytes over two.
    pub fn asked(&self, chunk: ChunkId, asker: Asker, now: Instant) -> bool {
        // No panic can leave it half-changed.
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        let is_hot = asked
            .get(&chunk)
            .is_some_and(|(last, of)| now - *last <= self.within && (of.is_none() || *of != asker));
        asked.add(chunk, (now, asker));
        is_hot
    }
}
