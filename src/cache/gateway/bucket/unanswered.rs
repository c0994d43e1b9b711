//! Chunks that a lookup got no answer for, and those behind one that a load found gone. An engine computes and stores them,
//! though S3 may well have them. So S3 is asked for each before its body is sent. After an outage all nodes have such
//! chunks, so those of each node wait first, for a time of its own: up to as long as stores that failed, where S3 was out of
//! reach, and not long where it was only late.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::cache::recent::Recent;
use crate::format::{ChunkHash, ChunkId, SpaceKey};
use crate::s3::object::{ErrorKind, ObjectError};

/// The longest pause of any node where S3 was late.
const LATE_PAUSE_MAX: Duration = Duration::from_secs(1);

/// See the [module](self).
pub struct Unanswered {
    recent: Mutex<Recent<Duration>>,
    /// The longest pause of any node where S3 was out of reach.
    outage_pause_max: Duration,
    /// The part of the longest pause that this node waits. Chunks go in the order of their commits: if each lookup had a
    /// pause of its own, most would wait for the longest before them, and all nodes would ask late, together.
    part: f64,
}

impl Unanswered {
    /// Remembers so many chunks at most.
    pub fn new(chunks_max: usize, outage_pause_max: Duration) -> Self {
        Self {
            recent: Mutex::new(Recent::new(chunks_max)),
            outage_pause_max,
            part: fastrand::f64(),
        }
    }

    /// A lookup got no answer for these, because of the error or because its time was over.
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
        self.put(space, chunks, most.mul_f64(self.part));
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

    fn space() -> SpaceKey {
        SpaceKey::from_hex(&"0".repeat(32)).unwrap()
    }

    #[test]
    fn the_oldest_are_forgotten_and_those_that_s3_answered_for() {
        let unanswered = Unanswered::new(3, OUTAGE_PAUSE_MAX);
        let has = |chunk| unanswered.pause(&(space(), chunk)).is_some();
        let [a, b, c, d] = [0, 1, 2, 3].map(|i| ChunkHash([i; 32]));
        unanswered.add(space(), &[a, b, c], None);
        assert_eq!([a, b, c].map(has), [true; 3]);
        unanswered.add(space(), &[d], None);
        assert_eq!([a, b, c, d].map(has), [false, true, true, true]);
        unanswered.remove(&(space(), d));
        assert!(!has(d));
    }

    #[test]
    fn each_node_has_its_pause_longer_where_s3_was_out_of_reach_and_none_where_it_refused() {
        let pauses = || {
            let unanswered = Unanswered::new(10, OUTAGE_PAUSE_MAX);
            let after = |chunk, kind| {
                let chunk = ChunkHash([chunk; 32]);
                let error = Arc::new(ObjectError::new(Operation::Head, "key", kind, "no answer"));
                unanswered.add(space(), [&chunk], Some(&error));
                unanswered.pause(&(space(), chunk))
            };
            assert_eq!(after(0, ErrorKind::Denied), None);
            let late = [ErrorKind::Deadline, ErrorKind::Timeout, ErrorKind::Unavailable];
            let late = late.map(|kind| after(1, kind).unwrap());
            assert_eq!(late, [late[0]; 3]);
            let outage = [2, 3].map(|chunk| after(chunk, ErrorKind::Connect).unwrap());
            assert_eq!(outage, [outage[0]; 2], "the order of commits stays");
            [late[0], outage[0]].map(|pause| pause.as_secs_f64())
        };
        let nodes = [(); 40].map(|()| pauses());
        for [late, outage] in nodes {
            assert!(
                late < 1.0 && (outage - 30.0 * late).abs() < 1e-6,
                "{late} {outage}"
            );
        }
        let outages = nodes.map(|[_, outage]| outage);
        let (min, max) = (
            outages.into_iter().fold(30.0, f64::min),
            outages.into_iter().fold(0.0, f64::max),
        );
        assert!(min < 10.0 && max > 20.0, "{min} to {max}");
    }
}
