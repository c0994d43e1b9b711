//! The bytes of slots that answers to peers hold. Peers get what the node's own loads leave: beyond this they use S3.

use std::sync::{Arc, Weak};

use dashmap::DashMap;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::format::ChunkId;

/// Counts a chunk once, however many answers send it: all of them send the same slot.
pub struct ServeBudget {
    kib: Arc<Semaphore>,
    most: u32,
    serving: DashMap<ChunkId, Weak<Serving>>,
}

/// A chunk that is being sent to peers, until the last answer is.
pub struct Serving {
    _kib: OwnedSemaphorePermit,
}

impl ServeBudget {
    pub fn new(bytes: usize) -> Self {
        let most = kib(bytes).max(1);
        Self {
            kib: Arc::new(Semaphore::new(most as usize)),
            most,
            serving: DashMap::new(),
        }
    }

    /// None: there is no room. A chunk that is larger than the whole budget goes alone.
    pub fn spend(&self, chunk: ChunkId, bytes: usize) -> Option<Arc<Serving>> {
        let mut entry = self.serving.entry(chunk).or_default();
        if let Some(serving) = entry.upgrade() {
            return Some(serving);
        }
        let kib = kib(bytes).clamp(1, self.most);
        let permit = Arc::clone(&self.kib).try_acquire_many_owned(kib).ok();
        let serving = permit.map(|permit| Arc::new(Serving { _kib: permit }));
        if let Some(serving) = &serving {
            *entry = Arc::downgrade(serving);
        }
        drop(entry);
        // As many entries as chunks that fit, and those that ended.
        if self.serving.len() > ENTRIES {
            self.serving.retain(|_, serving| serving.strong_count() > 0);
        }
        serving
    }

    pub fn used_bytes(&self) -> usize {
        (self.most as usize - self.kib.available_permits()) * 1024
    }
}

/// Entries from which those that ended are looked for.
const ENTRIES: usize = 4096;

fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}
