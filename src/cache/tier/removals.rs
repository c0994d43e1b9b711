//! Chunks that were deleted lately. Whoever began to bring one before that must not put it back.

use std::collections::{HashMap, VecDeque};

use foldhash::fast::RandomState;
use tokio::time::Instant;

use crate::format::ChunkId;

/// Chunks that were deleted of late: whoever began before that to bring one must not put it back.
#[derive(Default)]
pub(super) struct Removals {
    when: HashMap<ChunkId, Instant, RandomState>,
    order: VecDeque<ChunkId>,
}

/// How many are remembered: more than anybody deletes while one chunk is brought.
const MOST: usize = 1 << 16;

impl Removals {
    pub fn add(&mut self, key: ChunkId) {
        if self.when.insert(key, Instant::now()).is_none() {
            self.order.push_back(key);
        }
        if self.order.len() > MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.when.remove(&oldest);
        }
    }

    pub fn has(&self, key: &ChunkId) -> bool {
        self.when.contains_key(key)
    }

    pub fn has_since(&self, key: &ChunkId, since: Instant) -> bool {
        self.when.get(key).is_some_and(|removed| *removed >= since)
    }
}
