//! Files that are of no use now, and may be again: of a key that is not here. They are no hits, and stay.

use std::collections::HashSet;
use std::sync::{PoisonError, RwLock};

use crate::format::ChunkId;

/// Files that are remembered, of 48 bytes and more each. Forgetting them costs a read each.
const MOST: usize = 1 << 16;

#[derive(Default)]
pub struct PassedOver(RwLock<HashSet<ChunkId>>);

impl PassedOver {
    pub fn has(&self, key: &ChunkId) -> bool {
        self.0
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .contains(key)
    }

    pub fn add(&self, key: ChunkId) {
        let mut keys = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if keys.len() >= MOST {
            keys.clear();
        }
        keys.insert(key);
    }

    /// Whether it was there.
    pub fn remove(&self, key: &ChunkId) -> bool {
        self.has(key) && self.0.write().unwrap_or_else(PoisonError::into_inner).remove(key)
    }

    pub fn clear(&self) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).clear();
    }
}
