//! Chunks in use are written anew in place before a lifecycle rule takes them.
//!
//! A rule takes what was written longest ago, and the first chunks of a prompt are the oldest. A lookup that finds chunks,
//! in whatever tier, uses the whole prefix. So the whole prefix waits here, and one task goes through it from the start:
//! each chunk whose age on S3 is not known is asked for by HEAD, and one that is older than [`RefreshOptions::after`] is
//! copied onto itself. A lookup may begin in the middle of a prompt (an engine has the rest): the headers of its first chunk
//! and of those before it name their parents, up to one that S3 does not have. From the start, because a prefix without its end is still of use; an end without its start is not.
//!
//! A protected chunk of a key that does not write any more is left to the rule: else what an old key wrote would stay as
//! long as it is in use, and the key could never be taken away.
//!
//! What was found out is remembered for each chunk: when it is to be looked at again (`own`), and when that or any chunk
//! before it is (`chain`). So a lookup asks for its last chunk alone, and the common case costs one look into a map.
//!
//! Everything is bounded: chunks that wait, chunks that are remembered, requests a second. Uses beyond that are dropped,
//! and count the next time.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use foldhash::fast::RandomState;
use serde::Serialize;
use tokio::sync::Notify;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::Bucket;
use crate::cache::existence::Known;
use crate::format::{CHAIN_LEN, ChunkHash, ChunkId, KEY_LEN, Space, key_of, place_in_chain};
use crate::s3::object::{ErrorKind, ObjectError};

/// Time until a prefix is looked at again that waits here, or whose requests failed.
const AGAIN: Duration = Duration::from_secs(30);
/// Time for one request, its retries included.
const CALL: Duration = Duration::from_secs(60);

/// See the [module](self).
#[derive(Debug, Clone, Copy)]
pub struct RefreshOptions {
    /// Age on S3 from which a chunk in use is written anew.
    pub after: Duration,
    /// Requests a second.
    pub rate: u32,
    /// Chunks that wait.
    pub queue: usize,
    /// Chunks that are remembered.
    pub known: usize,
}

/// Figures since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct RefreshStats {
    /// Chunks whose age S3 was asked for.
    pub asked: u64,
    pub refreshed: u64,
    /// Chunks that S3 does not have.
    pub absent: u64,
    /// Requests that failed.
    pub failed: u64,
    /// Prefixes that found no room to wait.
    pub dropped: u64,
    /// Chunks that wait.
    pub waiting: u64,
}

/// When a chunk is to be looked at again.
#[derive(Debug, Clone, Copy)]
struct Due {
    own: Instant,
    /// The earliest of its own and of all before it.
    chain: Instant,
}

/// Leading chunks of a prompt that were used.
struct Used {
    space: Space,
    chunks: Vec<ChunkHash>,
}

#[derive(Default)]
struct State {
    /// None: nothing is refreshed.
    options: Option<RefreshOptions>,
    queue: VecDeque<Used>,
    waiting: usize,
    /// Two generations: when the young one is full, it is the old one, and that is forgotten.
    young: HashMap<ChunkId, Due, RandomState>,
    old: HashMap<ChunkId, Due, RandomState>,
}

#[derive(Default)]
pub struct Refresh {
    state: Mutex<State>,
    /// Something waits.
    comes: Notify,
    asked: AtomicU64,
    refreshed: AtomicU64,
    absent: AtomicU64,
    failed: AtomicU64,
    dropped: AtomicU64,
}

impl State {
    fn due(&self, key: &ChunkId) -> Option<Due> {
        self.young.get(key).or_else(|| self.old.get(key)).copied()
    }

    fn learn(&mut self, key: ChunkId, due: Due) {
        let known = self.options.map_or(0, |options| options.known);
        if self.young.len() >= known.div_ceil(2) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(key, due);
    }
}

impl Refresh {
    /// These leading chunks of a prompt were found. Never waits.
    pub fn used(&self, space: &Space, chunks: &[ChunkHash]) {
        let Some(last) = chunks.last() else { return };
        let (now, key) = (Instant::now(), (space.key(), *last));
        let mut state = self.lock();
        let Some(options) = state.options else { return };
        let due = state.due(&key);
        if due.is_some_and(|due| due.chain > now) {
            return;
        }
        if state.waiting + chunks.len() > options.queue {
            drop(state);
            self.dropped.fetch_add(1, Ordering::Relaxed);
            return;
        }
        state.waiting += chunks.len();
        let own = due.map_or(now, |due| due.own);
        let chain = now + AGAIN;
        state.learn(key, Due { own, chain });
        state.queue.push_back(Used {
            space: space.clone(),
            chunks: chunks.to_vec(),
        });
        drop(state);
        self.comes.notify_one();
    }

    pub fn stats(&self) -> RefreshStats {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        RefreshStats {
            asked: read(&self.asked),
            refreshed: read(&self.refreshed),
            absent: read(&self.absent),
            failed: read(&self.failed),
            dropped: read(&self.dropped),
            waiting: self.lock().waiting as u64,
        }
    }

    async fn next(&self) -> Used {
        loop {
            let came = self.comes.notified();
            let next = {
                let mut state = self.lock();
                let next = state.queue.pop_front();
                if let Some(used) = &next {
                    state.waiting -= used.chunks.len();
                }
                next
            };
            match next {
                Some(used) => return used,
                None => came.await,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What became of one object.
enum Outcome {
    /// To be looked at again then.
    Due(Instant),
    Absent,
    Failed(ObjectError),
    /// The server copies, and the object is as old as before.
    Useless,
}

impl Bucket {
    /// Refreshes what is used, for as long as it is polled, or until the server turns out not to do it.
    pub async fn refresh_used(&self, options: RefreshOptions) {
        self.refresh.lock().options = Some(options);
        let mut ticks = interval(Duration::from_secs(1) / options.rate.max(1));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut worker = Worker {
            bucket: self,
            options,
            ticks,
            has_seen_it_work: false,
        };
        while worker.prefix(self.refresh.next().await).await {}
        *self.refresh.lock() = State::default();
    }
}

struct Worker<'a> {
    bucket: &'a Bucket,
    options: RefreshOptions,
    ticks: tokio::time::Interval,
    has_seen_it_work: bool,
}

impl Worker<'_> {
    /// False: it is of no use to go on.
    async fn prefix(&mut self, used: Used) -> bool {
        let Used { space, chunks } = used;
        // The readable form is as old as the first chunk. It is in no chain, and a chunk's hash is never zero.
        let json = (space.key(), ChunkHash([0; 32]));
        if self.is_due(&json) {
            let key = self.bucket.options.keys.space_json(space.key());
            match self.object(&key, None).await {
                Outcome::Due(own) => self.learn(json, Due { own, chain: own }),
                // The next store writes it.
                Outcome::Absent | Outcome::Failed(_) => {}
                Outcome::Useless => return false,
            }
        }
        let (before, mut chain) = match (space.kind().is_full(), chunks.first()) {
            (true, Some(first)) => match self.before(&space, *first).await {
                Ok(before) => before,
                Err(error) => return self.failed(&error),
            },
            _ => (Vec::new(), Instant::now() + self.options.after),
        };
        for chunk in before.into_iter().chain(chunks) {
            let key = (space.key(), chunk);
            let known = self.bucket.refresh.lock().due(&key);
            let asked = Instant::now();
            let own = match known.filter(|due| due.own > asked) {
                Some(due) => due.own,
                None => match self.object(&self.bucket.object_key(&key), Some(&space)).await {
                    Outcome::Due(own) => own,
                    Outcome::Absent => {
                        self.bucket.refresh.absent.fetch_add(1, Ordering::Relaxed);
                        self.bucket.cache.learn(key, Known::Absent, asked);
                        match space.kind().is_full() {
                            // Nobody finds what comes after it.
                            true => return true,
                            false => continue,
                        }
                    }
                    Outcome::Failed(error) => return self.failed(&error),
                    Outcome::Useless => return false,
                },
            };
            chain = chain.min(own);
            self.learn(key, Due { own, chain });
        }
        true
    }

    /// The next use tries again.
    fn failed(&self, error: &ObjectError) -> bool {
        self.bucket.refresh.failed.fetch_add(1, Ordering::Relaxed);
        self.bucket.warnings.not_refreshed.tell(error);
        true
    }

    /// The chunks before this one: from the start, or from one on before which none is due until the time that is
    /// returned.
    async fn before(
        &mut self,
        space: &Space,
        first: ChunkHash,
    ) -> Result<(Vec<ChunkHash>, Instant), ObjectError> {
        let (mut before, mut at) = (Vec::new(), first);
        let mut chain = Instant::now() + self.options.after;
        while before.len() < self.options.queue {
            self.ticks.tick().await;
            let now = Instant::now();
            let key = (space.key(), at);
            let name = self.bucket.object_key(&key);
            let front = match self.bucket.store.read_front(&name, CHAIN_LEN, now + CALL).await {
                Ok(front) => front,
                Err(error) if error.kind == ErrorKind::NotFound => {
                    // The root of a chain is no chunk. Other prompts have the same one.
                    if at != first {
                        let own = now + self.options.after;
                        self.learn(key, Due { own, chain: own });
                    }
                    break;
                }
                Err(error) => return Err(error),
            };
            if at != first {
                before.push(at);
            }
            let Some((_, parent)) = place_in_chain(&front) else {
                break;
            };
            let known = self.bucket.refresh.lock().due(&(space.key(), parent));
            if let Some(due) = known.filter(|due| due.chain > now) {
                chain = due.chain;
                break;
            }
            if parent == at {
                break;
            }
            at = parent;
        }
        before.reverse();
        Ok((before, chain))
    }

    /// `space`: of a chunk.
    async fn object(&mut self, key: &str, space: Option<&Space>) -> Outcome {
        self.ticks.tick().await;
        self.bucket.refresh.asked.fetch_add(1, Ordering::Relaxed);
        let store = &self.bucket.store;
        let meta = match store.head(key, Instant::now() + CALL).await {
            Ok(meta) => meta,
            Err(error) if error.kind == ErrorKind::NotFound => return Outcome::Absent,
            Err(error) => return Outcome::Failed(error),
        };
        let age = age_of(meta.version.modified);
        if age < self.options.after {
            return Outcome::Due(Instant::now() + self.options.after.saturating_sub(age));
        }
        if let Some(space) = space.filter(|space| !space.protection().is_none()) {
            self.ticks.tick().await;
            let front = match store.read_front(key, KEY_LEN, Instant::now() + CALL).await {
                Ok(front) => front,
                Err(error) if error.kind == ErrorKind::NotFound => return Outcome::Absent,
                Err(error) => return Outcome::Failed(error),
            };
            if !self.bucket.options.keyring.is_newest(space, key_of(&front)) {
                return Outcome::Due(Instant::now() + self.options.after);
            }
        }
        self.ticks.tick().await;
        match store.copy_in_place(key, &meta, Instant::now() + CALL).await {
            Ok(()) => {}
            // Another version took its place: a new one.
            Err(error) if error.kind == ErrorKind::Changed => {}
            Err(error) if error.kind == ErrorKind::NotFound => return Outcome::Absent,
            Err(error) if matches!(error.kind, ErrorKind::Unsupported | ErrorKind::Refused) => {
                tracing::error!(
                    %error,
                    "the S3 server does not copy objects in place: nothing is refreshed. Set [refresh] after back, and give \
                     the lifecycle rule more days"
                );
                return Outcome::Useless;
            }
            Err(error) => return Outcome::Failed(error),
        }
        if !self.has_seen_it_work {
            let after = store.head(key, Instant::now() + CALL).await;
            if after.is_ok_and(|after| after.version.modified <= meta.version.modified) {
                tracing::error!(
                    key,
                    "the S3 server copies an object in place and leaves it as old as before: nothing is refreshed. Set \
                     [refresh] after back, and give the lifecycle rule more days"
                );
                return Outcome::Useless;
            }
            self.has_seen_it_work = true;
        }
        self.bucket.refresh.refreshed.fetch_add(1, Ordering::Relaxed);
        Outcome::Due(Instant::now() + self.options.after)
    }

    fn is_due(&self, key: &ChunkId) -> bool {
        let due = self.bucket.refresh.lock().due(key);
        due.is_none_or(|due| due.own <= Instant::now())
    }

    fn learn(&self, key: ChunkId, due: Due) {
        self.bucket.refresh.lock().learn(key, due);
    }
}

/// By this machine's clock: requests are signed with it, so it is near the server's.
fn age_of(modified: i64) -> Duration {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    now.saturating_sub(Duration::from_secs(u64::try_from(modified).unwrap_or(0)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space() -> Space {
        let json = r#"{"model": "m", "revision": "1", "mha": {"layers": 1, "heads": 1, "head_dim": 8}}"#;
        Space::from_json(json).unwrap()
    }

    fn chunks(count: u8) -> Vec<ChunkHash> {
        (1..=count).map(|number| ChunkHash([number; 32])).collect()
    }

    fn refresh(queue: usize, known: usize) -> Refresh {
        let refresh = Refresh::default();
        refresh.lock().options = Some(RefreshOptions {
            after: Duration::from_secs(100),
            rate: 1,
            queue,
            known,
        });
        refresh
    }

    #[tokio::test(start_paused = true)]
    async fn a_prefix_waits_once_and_again_after_a_while() {
        let refresh = refresh(100, 100);
        refresh.used(&space(), &chunks(5));
        refresh.used(&space(), &chunks(5));
        assert_eq!(refresh.stats().waiting, 5);
        // A longer prompt is another use.
        refresh.used(&space(), &chunks(6));
        assert_eq!(refresh.stats().waiting, 11);
        tokio::time::advance(AGAIN + Duration::from_secs(1)).await;
        refresh.used(&space(), &chunks(5));
        assert_eq!((refresh.stats().waiting, refresh.stats().dropped), (16, 0));
        assert_eq!(refresh.next().await.chunks.len(), 5);
        assert_eq!(refresh.stats().waiting, 11);
    }

    #[tokio::test(start_paused = true)]
    async fn what_waits_and_what_is_known_is_bounded() {
        let refresh = refresh(10, 8);
        refresh.used(&space(), &chunks(8));
        refresh.used(&space(), &chunks(9));
        assert_eq!((refresh.stats().waiting, refresh.stats().dropped), (8, 1));
        let mut state = refresh.lock();
        let now = Instant::now();
        for chunk in chunks(200) {
            state.learn((space().key(), chunk), Due { own: now, chain: now });
        }
        assert!(state.young.len() + state.old.len() <= 8);
        let last = (space().key(), ChunkHash([200; 32]));
        assert!(state.due(&last).is_some(), "the latest is known");
    }

    #[test]
    fn nothing_waits_where_nothing_is_refreshed() {
        let refresh = Refresh::default();
        refresh.used(&space(), &chunks(5));
        assert_eq!(refresh.stats(), RefreshStats::default());
    }
}
