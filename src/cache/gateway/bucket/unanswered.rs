//! Chunks that a lookup got no answer for, and those behind one that a load found gone. An engine computes and stores them,
//! though S3 may well have them. So S3 is asked for each before its body is sent. After an outage all nodes have such
//! chunks, so those of each lookup wait for a while of their own first.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cache::recent::Recent;
use crate::format::{ChunkHash, ChunkId, SpaceKey};
use crate::s3::object::ObjectError;

/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// See the [module](self).
pub struct Unanswered(Mutex<Recent<Duration>>);

impl Unanswered {
    /// Remembers so many chunks at most.
    pub fn new(chunks_max: usize) -> Self {
        Self(Mutex::new(Recent::new(chunks_max)))
    }

    /// A lookup got no answer for these, because of the error or because its time was over. All get the same pause, so that a
    /// child seldom overtakes its parent.
    pub fn add<'a>(
        &self,
        space: SpaceKey,
        chunks: impl IntoIterator<Item = &'a ChunkHash>,
        error: Option<&Arc<ObjectError>>,
    ) {
        if error.is_some_and(|error| !error.kind.may_pass()) {
            // S3 refused the lookup's questions, and will refuse those of a store.
            return;
        }
        self.put(space, chunks, PAUSE_MAX.mul_f64(fastrand::f64()));
    }

    /// They are behind one that a load found gone. That is no outage, so there is no pause.
    pub fn add_at_once(&self, space: SpaceKey, chunks: &[ChunkHash]) {
        self.put(space, chunks, Duration::ZERO);
    }

    fn put<'a>(&self, space: SpaceKey, chunks: impl IntoIterator<Item = &'a ChunkHash>, pause: Duration) {
        let mut recent = self.lock();
        for chunk in chunks {
            recent.add((space, *chunk), pause);
        }
    }

    /// S3 has answered.
    pub fn remove(&self, key: &ChunkId) {
        self.lock().remove(key);
    }

    /// The pause between a chunk's commit and the question. None: it needs none.
    pub fn pause(&self, key: &ChunkId) -> Option<Duration> {
        self.lock().get(key).copied()
    }

    /// No panic can leave it half-changed.
    fn lock(&self) -> MutexGuard<'_, Recent<Duration>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_of_a_lookup_have_the_same_pause_and_the_oldest_are_forgotten() {
        let space = SpaceKey::from_hex(&"0".repeat(32)).unwrap();
        let unanswered = Unanswered::new(3);
        let pause = |chunk| unanswered.pause(&(space, chunk));
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| ChunkHash([i; 32]));
        unanswered.add(space, &[a, b, c], None);
        assert!(pause(a).is_some_and(|pause| pause < PAUSE_MAX));
        assert_eq!([pause(b), pause(c)], [pause(a); 2]);
        unanswered.add(space, &[d], None);
        assert_eq!((pause(a), pause(b) == pause(d)), (None, false));
        unanswered.remove(&(space, d));
        assert_eq!(pause(d), None);
    }
}
