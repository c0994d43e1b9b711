//! Chunks that a lookup got no answer for, and those behind one that a load found gone. An engine computes and stores them,
//! though S3 may well have them. So S3 is asked for each before its body is sent. After an outage all nodes have such
//! chunks, so those of each lookup wait for a while of their own first: as long as stores that failed, where S3 was out of
//! reach, and not long where it was only late.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cache::recent::Recent;
use crate::format::{ChunkHash, ChunkId, SpaceKey};
use crate::s3::object::{ErrorKind, ObjectError};

/// The longest pause where S3 was late.
const LATE_PAUSE_MAX: Duration = Duration::from_secs(1);

/// See the [module](self).
pub struct Unanswered {
    recent: Mutex<Recent<Duration>>,
    /// The longest pause where S3 was out of reach.
    outage_pause_max: Duration,
}

impl Unanswered {
    /// Remembers so many chunks at most.
    pub fn new(chunks_max: usize, outage_pause_max: Duration) -> Self {
        Self {
            recent: Mutex::new(Recent::new(chunks_max)),
            outage_pause_max,
        }
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
        let most = match error.map(|error| error.kind) {
            Some(ErrorKind::Connect) => self.outage_pause_max,
            _ => self.outage_pause_max.min(LATE_PAUSE_MAX),
        };
        self.put(space, chunks, most.mul_f64(fastrand::f64()));
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
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::s3::object::Operation;

    const OUTAGE_PAUSE_MAX: Duration = Duration::from_secs(30);

    #[test]
    fn those_of_a_lookup_have_the_same_pause_and_the_oldest_are_forgotten() {
        let space = SpaceKey::from_hex(&"0".repeat(32)).unwrap();
        let unanswered = Unanswered::new(3, OUTAGE_PAUSE_MAX);
        let pause = |chunk| unanswered.pause(&(space, chunk));
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| ChunkHash([i; 32]));
        unanswered.add(space, &[a, b, c], None);
        assert!(pause(a).is_some_and(|pause| pause < LATE_PAUSE_MAX));
        assert_eq!([pause(b), pause(c)], [pause(a); 2]);
        unanswered.add(space, &[d], None);
        assert_eq!((pause(a), pause(b) == pause(d)), (None, false));
        unanswered.remove(&(space, d));
        assert_eq!(pause(d), None);
    }

    #[test]
    fn pauses_are_longer_where_s3_was_out_of_reach_and_there_are_none_where_it_refused() {
        let space = SpaceKey::from_hex(&"0".repeat(32)).unwrap();
        let unanswered = Unanswered::new(100, OUTAGE_PAUSE_MAX);
        let longest = |kind: ErrorKind| {
            let error = Arc::new(ObjectError::new(Operation::Head, "key", kind, "no answer"));
            let chunks: Vec<_> = (0..100).map(|i| ChunkHash([i; 32])).collect();
            for chunk in &chunks {
                unanswered.remove(&(space, *chunk));
                unanswered.add(space, [chunk], Some(&error));
            }
            chunks
                .iter()
                .filter_map(|chunk| unanswered.pause(&(space, *chunk)))
                .max()
        };
        let outage = longest(ErrorKind::Connect).unwrap();
        assert!(
            outage > OUTAGE_PAUSE_MAX / 2 && outage < OUTAGE_PAUSE_MAX,
            "{outage:?}"
        );
        for late in [ErrorKind::Deadline, ErrorKind::Timeout, ErrorKind::Unavailable] {
            assert!(longest(late).unwrap() < LATE_PAUSE_MAX);
        }
        assert_eq!(longest(ErrorKind::Denied), None);
    }
}
