//! Chunks that were deleted lately. A load that began before the delete must not put its chunk back.

use tokio::time::Instant;

use crate::cache::recent::Recent;
use crate::format::ChunkId;

/// See the [module](self).
pub(super) struct Removals(Recent<Instant>);

/// How many are remembered: more than anybody deletes while one chunk is brought.
const MOST: usize = 1 << 16;

impl Default for Removals {
    fn default() -> Self {
        Self(Recent::new(MOST))
    }
}

impl Removals {
    pub fn add(&mut self, key: ChunkId) {
        self.0.add(key, Instant::now());
    }

    /// It was stored again.
    pub fn forget(&mut self, key: &ChunkId) {
        self.0.remove(key);
    }

    pub fn has(&self, key: &ChunkId) -> bool {
        self.0.has(key)
    }

    pub fn has_since(&self, key: &ChunkId, since: Instant) -> bool {
        self.0.get(key).is_some_and(|removed| *removed >= since)
    }
}
