use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::kib;

/// Bytes of slots that a load may hold at a time, handed out and not yet released ones included. A load that has spent it
/// waits for its own client, and lets other loads have the arena meanwhile.
#[derive(Clone)]
pub struct Credit {
    kib: Arc<Semaphore>,
    most: u32,
}

/// Some of a load's credit; goes back when it is dropped.
pub(super) type Spent = Arc<OwnedSemaphorePermit>;

impl Credit {
    pub fn new(bytes: usize) -> Self {
        let most = kib(bytes).max(1);
        Self {
            kib: Arc::new(Semaphore::new(most as usize)),
            most,
        }
    }

    pub fn bytes(&self) -> usize {
        self.most as usize * 1024
    }

    /// Now, or not at all. A chunk that is larger than all of it goes alone.
    pub(super) fn try_spend(&self, bytes: usize) -> Option<Spent> {
        let kib = Arc::clone(&self.kib);
        kib.try_acquire_many_owned(self.kib_of(bytes)).ok().map(Arc::new)
    }

    pub(super) async fn spend(&self, bytes: usize) -> Option<Spent> {
        let kib = Arc::clone(&self.kib);
        kib.acquire_many_owned(self.kib_of(bytes))
            .await
            .ok()
            .map(Arc::new)
    }

    fn kib_of(&self, bytes: usize) -> u32 {
        kib(bytes).clamp(1, self.most)
    }
}
