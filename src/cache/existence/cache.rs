//! Existence of chunks on S3: present with an ETag, or absent, each known for a time. Versions that this node can't use
//! are kept apart. The oldest entries leave first.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use dashmap::DashMap;
use dashmap::mapref::entry::Entry as MapEntry;
use tokio::time::Instant;

use crate::format::{ChunkId, HeaderError};
use crate::s3::object::Version;

/// The cache's limits.
#[derive(Debug, Clone, Copy)]
pub struct CacheLimits {
    pub present_ttl: Duration,
    pub absent_ttl: Duration,
    /// Memory for the entries, in bytes.
    pub bytes: usize,
}

/// A chunk's existence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Known {
    /// Present, with the ETag that was seen.
    Present(Arc<str>),
    Absent,
}

struct Entry {
    known: Known,
    learned: Instant,
}

/// Why a version is of no use to this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Useless {
    /// The next store replaces it.
    Damaged,
    /// Another node may read it, so it is left as it is.
    Left(HeaderError),
}

/// The bytes of an entry: in the map with its control byte and load factor, in the order of age, and its ETag's
/// text.
const ENTRY_BYTES: usize = 2 * (size_of::<(ChunkId, Entry)>() + 1)
    + size_of::<(ChunkId, Instant)>()
    + 16
    + "d41d8cd98f00b204e9800998ecf8427e".len();

/// Remembers answers and damage. Bounded: the oldest answers leave first, because they expire next anyway.
pub struct ExistenceCache {
    limits: CacheLimits,
    entries: DashMap<ChunkId, Entry>,
    /// Keys by the time of learning; an entry that was learned anew is here twice.
    order: Mutex<VecDeque<(ChunkId, Instant)>>,
    useless: DashMap<ChunkId, (Version, Useless)>,
    /// Length of `entries`; the map would have to lock every shard to count them.
    count: AtomicUsize,
    peak_entries: AtomicUsize,
}

impl ExistenceCache {
    pub fn new(limits: CacheLimits) -> Self {
        Self {
            limits,
            entries: DashMap::new(),
            order: Mutex::default(),
            useless: DashMap::new(),
            count: AtomicUsize::new(0),
            peak_entries: AtomicUsize::new(0),
        }
    }

    /// The existence at `now`; None when it is not known or has expired.
    pub fn get(&self, key: &ChunkId, now: Instant) -> Option<Known> {
        let entry = self.entries.get(key)?;
        self.fresh(&entry, now).then(|| entry.known.clone())
    }

    /// Whether the chunk is known to exist at `now`, without its ETag.
    pub fn is_present(&self, key: &ChunkId, now: Instant) -> Option<bool> {
        let entry = self.entries.get(key)?;
        self.fresh(&entry, now).then(|| entry.known != Known::Absent)
    }

    /// Remembers the answer to a question of the time `asked`; newer knowledge stays.
    pub fn learn(&self, key: ChunkId, known: Known, asked: Instant) {
        let learned = Instant::now();
        match self.entries.entry(key) {
            MapEntry::Occupied(entry) if entry.get().learned > asked => return,
            // The same answer again; a place in the order for each load would push other entries out.
            MapEntry::Occupied(entry) if entry.get().known == known && self.fresh(entry.get(), learned) => {
                return;
            }
            MapEntry::Occupied(mut entry) => drop(entry.insert(Entry { known, learned })),
            MapEntry::Vacant(entry) => {
                // Count before the entry can be removed.
                self.count.fetch_add(1, Ordering::Relaxed);
                drop(entry.insert(Entry { known, learned }));
            }
        }
        self.evict(key, learned);
        self.peak_entries
            .fetch_max(self.count.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    /// Notes a store that S3 acknowledged: it replaces a damaged object.
    pub fn stored(&self, key: ChunkId, etag: Arc<str>) {
        self.useless.remove(&key);
        self.learn(key, Known::Present(etag), Instant::now());
    }

    /// Forgets a chunk's existence.
    pub fn forget(&self, key: &ChunkId) {
        self.removed(self.entries.remove(key).is_some());
    }

    /// Forgets a chunk that was seen. That it is absent stays known.
    pub fn doubt(&self, key: &ChunkId) {
        let is_present = |_: &ChunkId, entry: &Entry| matches!(entry.known, Known::Present(_));
        self.removed(self.entries.remove_if(key, is_present).is_some());
    }

    /// Forgets the existence of all chunks; damage stays known.
    pub fn forget_all(&self) {
        // Locked throughout, so that no entry is learned without its place in the eviction order.
        let mut order = self.lock_order();
        self.entries.retain(|_, _| {
            self.removed(true);
            false
        });
        order.clear();
    }

    /// Notes that a read asked for at `asked` found this version of no use: the chunk counts as absent as long as S3 shows
    /// that version. Newer knowledge, from a store that replaced it, stays.
    pub fn pass_over(&self, key: ChunkId, version: Version, why: Useless, asked: Instant) {
        if self.entries.get(&key).is_some_and(|entry| entry.learned > asked) {
            return;
        }
        if self.useless.len() >= self.most_entries() {
            // Forgetting one, whichever, costs a load that fails again.
            let any = self.useless.iter().next().map(|entry| *entry.key());
            any.map(|key| self.useless.remove(&key));
        }
        self.useless.insert(key, (version, why));
        self.learn(key, Known::Absent, asked);
    }

    /// Notes that the object is gone that was of no use.
    pub fn is_gone(&self, key: &ChunkId) {
        self.useless.remove(key);
    }

    /// The version of the object that is of no use, if one was seen.
    pub fn useless(&self, key: &ChunkId) -> Option<(Version, Useless)> {
        self.useless.get(key).map(|useless| useless.clone())
    }

    /// Whether any object was of no use lately: nearly always, none was.
    pub fn has_useless(&self) -> bool {
        !self.useless.is_empty()
    }

    /// Whether a version of the object was of no use, when it was seen last.
    pub fn is_useless(&self, key: &ChunkId) -> bool {
        self.useless.contains_key(key)
    }

    /// Takes back what was left as it is: other keys are here now.
    pub fn keys_changed(&self) {
        self.useless.retain(|key, (_, why)| {
            let is_left = *why != Useless::Damaged;
            if is_left {
                self.forget(key);
            }
            !is_left
        });
    }

    /// The number of entries now, and its peak.
    pub fn entries(&self) -> (usize, usize) {
        (self.entries.len(), self.peak_entries.load(Ordering::Relaxed))
    }

    /// The number of entries that fit.
    pub fn most_entries(&self) -> usize {
        (self.limits.bytes / ENTRY_BYTES).max(1)
    }

    fn fresh(&self, entry: &Entry, now: Instant) -> bool {
        let ttl = match entry.known {
            Known::Present(_) => self.limits.present_ttl,
            Known::Absent => self.limits.absent_ttl,
        };
        now.saturating_duration_since(entry.learned) < ttl
    }

    fn evict(&self, key: ChunkId, learned: Instant) {
        let mut order = self.lock_order();
        order.push_back((key, learned));
        // `order` has at least one place an entry, so bounding it bounds the map.
        while order.len() > self.most_entries() {
            let Some((key, learned)) = order.pop_front() else {
                break;
            };
            let removed = self.entries.remove_if(&key, |_, entry| entry.learned == learned);
            self.removed(removed.is_some());
        }
    }

    fn removed(&self, removed: bool) {
        self.count.fetch_sub(removed.into(), Ordering::Relaxed);
    }

    fn lock_order(&self) -> std::sync::MutexGuard<'_, VecDeque<(ChunkId, Instant)>> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ChunkHash, KeyId, SpaceId, SpaceKey};

    fn key(i: u8) -> ChunkId {
        (SpaceKey::from(SpaceId([0; 32])), ChunkHash([i; 32]))
    }

    fn cache(bytes: usize) -> ExistenceCache {
        let (present_ttl, absent_ttl) = (Duration::from_mins(5), Duration::from_secs(2));
        ExistenceCache::new(CacheLimits {
            present_ttl,
            absent_ttl,
            bytes,
        })
    }

    fn version(etag: &str) -> Version {
        Version {
            etag: etag.into(),
            modified: 7,
        }
    }

    fn present() -> Known {
        Known::Present("etag".into())
    }

    #[tokio::test(start_paused = true)]
    async fn both_answers_expire() {
        let cache = cache(1 << 20);
        cache.learn(key(1), present(), Instant::now());
        cache.learn(key(2), Known::Absent, Instant::now());
        assert_eq!(cache.get(&key(1), Instant::now()), Some(present()));
        assert_eq!(cache.get(&key(2), Instant::now()), Some(Known::Absent));
        assert_eq!(cache.get(&key(3), Instant::now()), None);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(cache.get(&key(2), Instant::now()), None);
        assert_eq!(cache.is_present(&key(1), Instant::now()), Some(true));
        tokio::time::advance(Duration::from_secs(298)).await;
        assert_eq!(cache.get(&key(1), Instant::now()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn a_late_answer_does_not_undo_what_was_learned_since() {
        let cache = cache(1 << 20);
        let asked = Instant::now();
        tokio::time::advance(Duration::from_millis(1)).await;
        cache.stored(key(1), "new".into());
        cache.learn(key(1), Known::Absent, asked);
        cache.pass_over(key(1), version("old"), Useless::Damaged, asked);
        assert_eq!(cache.useless(&key(1)), None);
        assert_eq!(cache.is_present(&key(1), Instant::now()), Some(true));
    }

    #[tokio::test(start_paused = true)]
    async fn the_oldest_go_first_and_memory_is_bounded() {
        let cache = cache(10 * ENTRY_BYTES);
        for round in 0..3 {
            for i in 0..50 {
                cache.learn(key(i), present(), Instant::now());
                tokio::time::advance(Duration::from_millis(1)).await;
            }
            assert_eq!(cache.entries(), (10, 10), "round {round}");
        }
        assert_eq!(cache.is_present(&key(39), Instant::now()), None);
        assert_eq!(cache.is_present(&key(40), Instant::now()), Some(true));
    }

    #[tokio::test(start_paused = true)]
    async fn quarantine_holds_for_its_version_until_a_store() {
        let cache = cache(1 << 20);
        let bad = (version("bad"), Useless::Damaged);
        cache.pass_over(key(1), bad.0.clone(), bad.1.clone(), Instant::now());
        assert_eq!(cache.get(&key(1), Instant::now()), Some(Known::Absent));
        assert_eq!(cache.useless(&key(1)), Some(bad.clone()));
        cache.forget_all();
        cache.keys_changed();
        assert_eq!(cache.useless(&key(1)), Some(bad));
        cache.stored(key(1), "good".into());
        assert_eq!(cache.useless(&key(1)), None);
    }

    #[tokio::test(start_paused = true)]
    async fn what_lacks_a_key_is_passed_over_until_keys_change() {
        let cache = cache(1 << 20);
        let left = Useless::Left(HeaderError::NoKey {
            key: KeyId([7; 16]),
            tenant: "acme".into(),
        });
        cache.pass_over(key(1), version("old"), left.clone(), Instant::now());
        assert_eq!(cache.is_present(&key(1), Instant::now()), Some(false));
        assert_eq!(cache.useless(&key(1)), Some((version("old"), left)));
        cache.keys_changed();
        assert_eq!(cache.useless(&key(1)), None);
        assert_eq!(
            cache.is_present(&key(1), Instant::now()),
            None,
            "it is asked for anew"
        );
    }
}
