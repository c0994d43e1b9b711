//! The admission of a node's stores with its lock, and the chunks that S3 may lack and that were asked for: until a task
//! (`lower/admit.rs`) has offered them anew. Bounded: where too many wait, a chunk is offered the next time that it is
//! asked for.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use crate::cache::admission::{Admission, AdmissionOptions, Standing};
use crate::format::{ChunkHash, ChunkId, Space};
use crate::protocol::Tier;

/// Chunks that may wait to be offered again.
const ASKED_MAX: usize = 1 << 14;

/// See the [module](self).
pub struct Admitting {
    admission: Mutex<Admission<ChunkId>>,
    asked: Mutex<VecDeque<(Space, ChunkHash)>>,
    comes: Notify,
}

impl Admitting {
    pub fn new(options: AdmissionOptions) -> Self {
        Self {
            admission: Mutex::new(Admission::new(options)),
            asked: Mutex::default(),
            comes: Notify::new(),
        }
    }

    pub fn lock(&self) -> MutexGuard<'_, Admission<ChunkId>> {
        // No panic can leave it half-changed.
        self.admission.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An engine asked for a chunk, which was in that tier. `is_resting`: it is here, and not on its way to S3.
    pub fn asked_for(&self, space: &Space, chunk: &ChunkHash, tier: Tier, is_resting: impl FnOnce() -> bool) {
        let key = (space.key(), *chunk);
        let standing = {
            let mut admission = self.lock();
            let standing = admission.used(&key);
            if tier == Tier::S3 {
                return admission.is_there(&key);
            }
            standing
        };
        let is_left_out = match standing {
            Some(standing) => matches!(standing, Standing::Declined | Standing::Doubtful),
            None => is_resting() && self.lock().doubt(key),
        };
        if is_left_out {
            self.ask(space, chunk);
        }
    }

    /// The chunk is to be offered again.
    pub fn ask(&self, space: &Space, chunk: &ChunkHash) {
        let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
        if asked.len() < ASKED_MAX {
            asked.push_back((space.clone(), *chunk));
            self.comes.notify_one();
        }
    }

    /// A chunk that the configuration kept from S3 until now was asked for: it is offered as one that was declined.
    pub fn is_due(&self, key: &ChunkId, parent: Option<ChunkId>) {
        let mut admission = self.lock();
        if admission.standing(key).is_none() {
            admission.is_missing(*key, parent, false);
        }
    }

    /// The next chunk that is to be offered again.
    pub async fn next(&self) -> (Space, ChunkHash) {
        loop {
            let next = self
                .asked
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .pop_front();
            match next {
                Some(next) => return next,
                None => self.comes.notified().await,
            }
        }
    }
}
