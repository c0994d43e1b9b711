//! Chunks that a lookup got no answer for, and those behind one that a load found gone. An engine computes and stores them,
//! though S3 may well have them. So S3 is asked for each before its body is sent. After an outage all nodes have such
//! chunks, so those of each lookup wait for a time of their own first: up to as long as stores that failed, where S3 was out
//! of reach, and not long where it was only late.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::cache::recent::Recent;
use crate::format::ChunkId;

/// The longest pause where S3 was late.
const LATE_PAUSE_MAX: Duration = Duration::from_secs(1);

/// See the [module](self).
pub struct Unanswered {
    /// When S3 may be asked for each.
    recent: Mutex<Recent<Instant>>,
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

    /// A lookup got no answer for these. All get the same pause: they are of use together.
    pub fn add(&self, keys: impl IntoIterator<Item = ChunkId>, is_outage: bool) {
        let most = match is_outage {
            true => self.outage_pause_max,
            false => self.outage_pause_max.min(LATE_PAUSE_MAX),
        };
        self.put(keys, most.mul_f64(fastrand::f64()));
    }

    /// They are behind one that a load found gone. That is no outage, so there is no pause.
    pub fn add_at_once(&self, keys: impl IntoIterator<Item = ChunkId>) {
        self.put(keys, Duration::ZERO);
    }

    fn put(&self, keys: impl IntoIterator<Item = ChunkId>, pause: Duration) {
        let until = Instant::now() + pause;
        let mut recent = self.lock();
        for key in keys {
            recent.add(key, until);
        }
    }

    /// S3 has answered.
    pub fn remove(&self, key: &ChunkId) {
        self.lock().remove(key);
    }

    /// When S3 may be asked for the chunk. None: it need not be.
    pub fn asks_at(&self, key: &ChunkId) -> Option<Instant> {
        self.lock().get(key).copied()
    }

    /// No panic can leave it half-changed.
    fn lock(&self) -> MutexGuard<'_, Recent<Instant>> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ChunkHash, SpaceKey};

    const OUTAGE_PAUSE_MAX: Duration = Duration::from_secs(30);

    fn key(chunk: u8) -> ChunkId {
        let space = SpaceKey::from_hex(&"0".repeat(32)).unwrap();
        (space, ChunkHash([chunk; 32]))
    }

    #[test]
    fn those_of_a_lookup_have_the_same_pause_and_the_oldest_are_forgotten() {
        let unanswered = Unanswered::new(3, OUTAGE_PAUSE_MAX);
        let at = |key| unanswered.asks_at(&key);
        let [a, b, c, d] = [0, 1, 2, 3].map(key);
        unanswered.add([a, b, c], true);
        assert!(at(a).is_some());
        assert_eq!([at(b), at(c)], [at(a); 2]);
        unanswered.add([d], true);
        assert_eq!((at(a), at(b) == at(d)), (None, false));
        unanswered.remove(&d);
        assert_eq!(at(d), None);
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_are_longer_where_s3_was_out_of_reach() {
        let unanswered = Unanswered::new(100, OUTAGE_PAUSE_MAX);
        let now = Instant::now();
        let longest = |is_outage| {
            let pauses = (0..100).map(key).map(|key| {
                unanswered.add([key], is_outage);
                unanswered.asks_at(&key).unwrap() - now
            });
            pauses.max().unwrap()
        };
        let (outage, late) = (longest(true), longest(false));
        assert!(
            outage > OUTAGE_PAUSE_MAX / 2 && outage < OUTAGE_PAUSE_MAX,
            "{outage:?}"
        );
        assert!(late < LATE_PAUSE_MAX, "{late:?}");
    }
}
