//! Chunks that a lookup got no answer for. An engine computes and stores them, though S3 may well have them. So each is asked
//! for before its body is sent. After an outage a whole fleet has such chunks: they are asked for a little later, each
//! prompt's at another time.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

use crate::cache::recent::Recent;
use crate::format::{ChunkHash, ChunkId, SpaceKey};

/// The longest that the chunks of a prompt wait.
const SPREAD: Duration = Duration::from_secs(1);

/// See the [module](self).
pub struct Unanswered {
    recent: Mutex<Recent<Wait>>,
    ttl: Duration,
}

#[derive(Clone, Copy)]
struct Wait {
    /// Of the chunks of a prompt alike, so that a parent is not stored after its child.
    pause: Duration,
    /// The lookup counts until then.
    until: Instant,
}

impl Unanswered {
    /// Remembers so many chunks at most.
    pub fn new(chunks_max: usize, ttl: Duration) -> Self {
        Self {
            recent: Mutex::new(Recent::new(chunks_max)),
            ttl,
        }
    }

    /// They were in one lookup.
    pub fn add<'a>(&self, space: SpaceKey, chunks: impl IntoIterator<Item = &'a ChunkHash>) {
        let wait = Wait {
            pause: SPREAD.mul_f64(fastrand::f64()),
            until: Instant::now() + self.ttl,
        };
        let mut recent = self.lock();
        for chunk in chunks {
            recent.add((space, *chunk), wait);
        }
    }

    /// For how long to wait before S3 is asked for the chunk. None: it need not be.
    pub fn pause(&self, key: &ChunkId) -> Option<Duration> {
        let wait = self.lock().get(key).copied()?;
        (Instant::now() < wait.until).then_some(wait.pause)
    }

    /// No panic can leave it half-changed.
    fn lock(&self) -> MutexGuard<'_, Recent<Wait>> {
        self.recent.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn they_are_remembered_for_a_time() {
        let (ttl, space) = (
            Duration::from_mins(5),
            SpaceKey::from_hex(&"0".repeat(32)).unwrap(),
        );
        let unanswered = Unanswered::new(2, ttl);
        let chunks: Vec<ChunkHash> = (0..3).map(|i| ChunkHash([i; 32])).collect();
        let pauses = || {
            let pause = |chunk: &ChunkHash| unanswered.pause(&(space, *chunk));
            chunks.iter().map(pause).collect::<Vec<_>>()
        };
        unanswered.add(space, &chunks);
        let [first, second, third] = pauses()[..] else {
            panic!("three chunks")
        };
        assert_eq!(first, None, "the oldest makes room");
        assert!(second.is_some_and(|pause| pause < SPREAD) && second == third);
        tokio::time::advance(ttl).await;
        assert_eq!(pauses(), [None; 3]);
    }
}
