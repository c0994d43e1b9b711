//! The memory tier: chunks that stay in their slots of the arena because they may be wanted again.
//!
//! Nothing is copied: a chunk that was loaded or committed is here with the slot it is in. A slot that anybody else has a
//! handle to is in use and stays; so does one that is pinned, or *dirty*: not yet on a lower tier. When the arena has no room,
//! it asks for the next one that may go ([`Arena::on_pressure`]), and the tier keeps its share below the watermark by itself.
//!
//! With several tenants the one that has the most gives first, and each may have its quota.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use super::policy::{EvictionPolicy, Queue};
use crate::arena::{Arena, Slot};
use crate::chunk::{ChunkHash, Space, SpaceKey};
use crate::existence::CacheKey;

/// What the tier may keep.
#[derive(Debug, Clone, Copy)]
pub struct MemoryOptions {
    pub policy: EvictionPolicy,
    /// How long a chunk stays after it came.
    pub ttl: Option<Duration>,
    /// Share of the arena that the tier keeps at most, unless more is in use.
    pub watermark_percent: u32,
    /// Bytes that one tenant may have.
    pub tenant_bytes: Option<usize>,
    /// Loads of a chunk after which it goes to the lower tiers; 0: at once.
    pub min_accesses: u32,
}

/// See the [module](self).
pub struct Memory {
    options: MemoryOptions,
    bytes_max: usize,
    arena: Arena,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    chunks: HashMap<CacheKey, Resident, foldhash::fast::RandomState>,
    tenants: HashMap<Arc<str>, Tenant>,
    bytes: usize,
    stats: MemoryStats,
}

struct Tenant {
    queue: Queue<CacheKey>,
    bytes: usize,
    /// For chunks that are about to come.
    reserved: usize,
}

/// See [`Memory::share`].
pub struct Share {
    memory: Arc<Memory>,
    tenant: Arc<str>,
    bytes: usize,
}

impl Drop for Share {
    fn drop(&mut self) {
        let mut state = self.memory.lock();
        if let Some(of) = state.tenants.get_mut(&self.tenant) {
            of.reserved -= self.bytes;
        }
        state.forget_empty(&self.tenant);
    }
}

struct Resident {
    tenant: Arc<str>,
    held: Held,
    bytes: usize,
    dirty: bool,
    pinned_until: Option<Instant>,
    accesses: u32,
    was_due: bool,
    since: Instant,
}

/// What is in the slot.
#[derive(Clone)]
enum Held {
    /// The header is not written yet.
    Payload(Slot),
    /// Header and payload.
    Object(Slot),
}

/// A chunk that is here.
pub struct Found {
    pub payload: Slot,
    /// Header and payload, where the header is written.
    pub object: Option<Slot>,
    /// This access was the one after which it goes to the lower tiers.
    pub is_due: bool,
}

/// Figures of the tier; totals since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct MemoryStats {
    pub chunks: u64,
    pub bytes: u64,
    pub dirty_bytes: u64,
    pub pinned_chunks: u64,
    pub hits: u64,
    pub misses: u64,
    pub inserted: u64,
    pub evicted: u64,
    pub expired: u64,
}

impl Memory {
    pub fn new(arena: &Arena, options: MemoryOptions) -> Arc<Self> {
        let memory = Arc::new(Self {
            options,
            bytes_max: share_of(arena.size(), options.watermark_percent),
            arena: arena.clone(),
            state: Mutex::default(),
        });
        let weak = Arc::downgrade(&memory);
        arena.on_pressure(move |before| weak.upgrade().is_some_and(|memory| memory.evict_one(before)));
        memory
    }

    /// Calls `found` with the position of each chunk that is here. Is no access.
    pub fn find(&self, space: SpaceKey, chunks: &[ChunkHash], mut found: impl FnMut(usize)) {
        let (now, state) = (Instant::now(), self.lock());
        for (i, chunk) in chunks.iter().enumerate() {
            if state
                .chunks
                .get(&(space, *chunk))
                .is_some_and(|resident| !self.is_expired(resident, now))
            {
                found(i);
            }
        }
    }

    pub fn has(&self, key: &CacheKey) -> bool {
        let mut has = false;
        self.find(key.0, &[key.1], |_| has = true);
        has
    }

    /// The chunk, which is in use from now on for as long as the answer lives.
    pub fn get(&self, key: &CacheKey, space: &Space) -> Option<Found> {
        let now = Instant::now();
        let mut state = self.lock();
        let State {
            chunks,
            tenants,
            stats,
            ..
        } = &mut *state;
        let Some(resident) = chunks
            .get_mut(key)
            .filter(|resident| !self.is_expired(resident, now))
        else {
            stats.misses += 1;
            return None;
        };
        stats.hits += 1;
        resident.accesses = resident.accesses.saturating_add(1);
        if let Some(tenant) = tenants.get_mut(&resident.tenant) {
            tenant.queue.hit(key);
        }
        // One whose header is still to be written is due the next time.
        let is_whole = matches!(resident.held, Held::Object(_));
        let is_due = is_whole && !resident.was_due && resident.accesses >= self.options.min_accesses;
        resident.was_due |= is_due;
        Some(resident.found(space, is_due))
    }

    /// Keeps a chunk whose header is written. False if it is here already, or has no room.
    pub fn insert(&self, key: CacheKey, space: &Space, object: Slot) -> bool {
        self.keep(key, space, Held::Object(object), false)
    }

    /// Keeps a new chunk whose header is still to be written. A `dirty` one stays until it is [`clean`](Self::clean).
    pub fn insert_new(&self, key: CacheKey, space: &Space, payload: Slot, dirty: bool) -> bool {
        self.keep(key, space, Held::Payload(payload), dirty)
    }

    fn keep(&self, key: CacheKey, space: &Space, held: Held, dirty: bool) -> bool {
        let now = Instant::now();
        let is_from_below = matches!(held, Held::Object(_));
        let bytes = space.layout().object_len();
        let mut gone = Vec::new();
        let mut state = self.lock();
        if let Some(resident) = state.chunks.get(&key) {
            if !self.is_expired(resident, now) {
                return false;
            }
            gone.extend(state.take(&key).map(|resident| resident.held));
            state.stats.expired += 1;
        }
        if let Some(most) = self.options.tenant_bytes {
            while state.tenant_bytes(space.tenant()) + bytes > most {
                let Some(held) = state.evict_of(space.tenant(), now, usize::MAX) else {
                    break;
                };
                gone.push(held);
            }
            // What was committed stays until it is stored; reserve looked at the quota.
            if state.tenant_bytes(space.tenant()) + bytes > most && !dirty {
                drop(state);
                return false;
            }
        }
        let tenant = state.tenant(space.tenant(), self.options.policy);
        if let Some(of) = state.tenants.get_mut(&tenant) {
            of.queue.insert(key);
            of.bytes += bytes;
        }
        state.bytes += bytes;
        state.stats.inserted += 1;
        let resident = Resident {
            tenant,
            held,
            bytes,
            dirty,
            pinned_until: None,
            accesses: 0,
            // What came from below, or goes there at once, never is.
            was_due: self.options.min_accesses == 0 || is_from_below,
            since: now,
        };
        state.chunks.insert(key, resident);
        while state.bytes > self.bytes_max {
            let Some(held) = state.evict(now, usize::MAX) else {
                break;
            };
            gone.push(held);
        }
        // Slots are given back without the lock.
        drop(state);
        true
    }

    /// The header is in front of the payload now.
    pub fn sealed(&self, key: &CacheKey, object: Slot) {
        let mut state = self.lock();
        let before = state
            .chunks
            .get_mut(key)
            .filter(|resident| resident.held.slot().generation() == object.generation())
            .map(|resident| std::mem::replace(&mut resident.held, Held::Object(object)));
        drop(state);
        drop(before);
    }

    /// A lower tier has the chunk, or it was decided that none needs it.
    pub fn clean(&self, key: &CacheKey) {
        if let Some(resident) = self.lock().chunks.get_mut(key) {
            resident.dirty = false;
        }
        self.arena.nudge();
    }

    /// It is on its way to a lower tier.
    pub fn soil(&self, key: &CacheKey) {
        if let Some(resident) = self.lock().chunks.get_mut(key) {
            resident.dirty = true;
        }
    }

    /// Whoever uses it goes on with its slot. False if it is not here.
    pub fn remove(&self, key: &CacheKey) -> bool {
        // Given back without the lock.
        let removed = self.lock().take(key);
        removed.is_some()
    }

    /// Keeps those that are here until `until`. Answers how many are.
    pub fn pin(&self, space: SpaceKey, chunks: &[ChunkHash], until: Instant) -> usize {
        let now = Instant::now();
        let mut state = self.lock();
        let mut pinned = 0;
        for chunk in chunks {
            if let Some(resident) = state.chunks.get_mut(&(space, *chunk))
                && !self.is_expired(resident, now)
            {
                resident.pinned_until = resident.pinned_until.max(Some(until));
                pinned += 1;
            }
        }
        pinned
    }

    pub fn unpin(&self, space: SpaceKey, chunks: &[ChunkHash]) -> usize {
        let mut state = self.lock();
        let mut unpinned = 0;
        for chunk in chunks {
            if let Some(resident) = state.chunks.get_mut(&(space, *chunk)) {
                unpinned += usize::from(resident.pinned_until.take().is_some());
            }
        }
        drop(state);
        self.arena.nudge();
        unpinned
    }

    /// Part of a tenant's quota for a chunk that is about to come; goes back when it is dropped. None if the tenant has no
    /// room, once those that may go have gone.
    pub fn share(self: &Arc<Self>, tenant: &str, bytes: usize) -> Option<Share> {
        let (now, mut gone) = (Instant::now(), Vec::new());
        let mut state = self.lock();
        if let Some(most) = self.options.tenant_bytes {
            while state.tenant_bytes(tenant) + bytes > most {
                gone.push(state.evict_of(tenant, now, usize::MAX)?);
            }
        }
        let tenant = state.tenant(tenant, self.options.policy);
        if let Some(of) = state.tenants.get_mut(&tenant) {
            of.reserved += bytes;
        }
        drop(state);
        Some(Share {
            memory: Arc::clone(self),
            tenant,
            bytes,
        })
    }

    /// Lets go of what is too old and may go.
    pub fn expire(&self) {
        let now = Instant::now();
        let mut state = self.lock();
        let old = |resident: &Resident| self.is_expired(resident, now) && resident.may_go(now);
        let old: Vec<CacheKey> = state
            .chunks
            .iter()
            .filter(|(_, resident)| old(resident))
            .map(|(key, _)| *key)
            .collect();
        let gone: Vec<Resident> = old.iter().filter_map(|key| state.take(key)).collect();
        state.stats.expired += gone.len() as u64;
        // Slots are given back without the lock.
        drop(state);
        drop(gone);
    }

    /// Makes the arena a slot freer that begins before that offset, if it can.
    pub fn evict_one(&self, before: usize) -> bool {
        let evicted = self.lock().evict(Instant::now(), before);
        evicted.is_some()
    }

    pub fn stats(&self) -> MemoryStats {
        let now = Instant::now();
        let state = self.lock();
        let of = |is: &dyn Fn(&Resident) -> bool| state.chunks.values().filter(|one| is(one)).count() as u64;
        let dirty = state.chunks.values().filter(|resident| resident.dirty);
        MemoryStats {
            chunks: state.chunks.len() as u64,
            bytes: state.bytes as u64,
            dirty_bytes: dirty.map(|resident| resident.bytes as u64).sum(),
            pinned_chunks: of(&|resident| resident.pinned_until > Some(now)),
            ..state.stats
        }
    }

    fn is_expired(&self, resident: &Resident, now: Instant) -> bool {
        !resident.dirty && self.options.ttl.is_some_and(|ttl| now - resident.since >= ttl)
    }

    /// No panic can leave the state half-changed, so a poisoned lock is as good.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn share_of(bytes: usize, percent: u32) -> usize {
    let percent = percent as usize;
    bytes / 100 * percent + bytes % 100 * percent / 100
}

impl State {
    fn tenant_bytes(&self, tenant: &str) -> usize {
        let tenant = self.tenants.get(tenant);
        tenant.map_or(0, |tenant| tenant.bytes + tenant.reserved)
    }

    /// The tenant's name as it is kept; it is known from here on.
    fn tenant(&mut self, name: &str, policy: EvictionPolicy) -> Arc<str> {
        if let Some((name, _)) = self.tenants.get_key_value(name) {
            return Arc::clone(name);
        }
        let name: Arc<str> = name.into();
        let tenant = Tenant {
            queue: Queue::new(policy),
            bytes: 0,
            reserved: 0,
        };
        self.tenants.insert(Arc::clone(&name), tenant);
        name
    }

    fn forget_empty(&mut self, tenant: &Arc<str>) {
        let empty = |of: &Tenant| of.bytes + of.reserved == 0;
        if self.tenants.get(tenant).is_some_and(empty) {
            self.tenants.remove(tenant);
        }
    }

    /// The next that may go: of the tenant that has the most, else of any.
    fn evict(&mut self, now: Instant, before: usize) -> Option<Held> {
        let mut tenants: Vec<_> = self
            .tenants
            .iter()
            .map(|(name, tenant)| (tenant.bytes, Arc::clone(name)))
            .collect();
        tenants.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        tenants
            .iter()
            .find_map(|(_, name)| self.evict_of(name, now, before))
    }

    fn evict_of(&mut self, tenant: &str, now: Instant, before: usize) -> Option<Held> {
        let chunks = &self.chunks;
        let may_go = |key: &CacheKey| {
            let helps = |resident: &Resident| resident.held.slot().slot_offset() < before;
            chunks
                .get(key)
                .is_none_or(|resident| resident.may_go(now) && helps(resident))
        };
        let key = self.tenants.get_mut(tenant)?.queue.evict(may_go)?;
        self.stats.evicted += 1;
        self.take(&key).map(|resident| resident.held)
    }

    fn take(&mut self, key: &CacheKey) -> Option<Resident> {
        let resident = self.chunks.remove(key)?;
        self.bytes -= resident.bytes;
        if let Some(tenant) = self.tenants.get_mut(&resident.tenant) {
            tenant.queue.remove(key);
            tenant.bytes -= resident.bytes;
        }
        self.forget_empty(&resident.tenant);
        Some(resident)
    }
}

impl Resident {
    /// Nobody uses it. While the lock is held nobody can begin to.
    fn may_go(&self, now: Instant) -> bool {
        let pinned = self.pinned_until.is_some_and(|until| until > now);
        !self.dirty && !pinned && !self.held.slot().is_used_by_others(1)
    }

    fn found(&self, space: &Space, is_due: bool) -> Found {
        match &self.held {
            Held::Payload(payload) => Found {
                payload: payload.clone(),
                object: None,
                is_due,
            },
            Held::Object(object) => Found {
                payload: object.slice(space.layout().header_len()..object.len()),
                object: Some(object.clone()),
                is_due,
            },
        }
    }
}

impl Held {
    fn slot(&self) -> &Slot {
        let (Self::Payload(slot) | Self::Object(slot)) = self;
        slot
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::arena::ArenaOptions;

    const CHUNK: usize = 8192;

    /// Objects of two pages.
    fn space(tenant: &str) -> Space {
        Space::from_json(&format!(
            r#"{{"model": "m", "revision": "1", "dtype": "float16", "chunk_tokens": 16, "tenant": "{tenant}",
                "mha": {{"layers": 1, "heads": 1, "head_dim": 64}}}}"#
        ))
        .unwrap()
    }

    fn arena(chunks: usize) -> Arena {
        let size = chunks * CHUNK;
        Arena::new(&ArenaOptions {
            size,
            ..ArenaOptions::default()
        })
        .unwrap()
    }

    fn options() -> MemoryOptions {
        MemoryOptions {
            policy: EvictionPolicy::Lru,
            ttl: None,
            watermark_percent: 100,
            tenant_bytes: None,
            min_accesses: 0,
        }
    }

    fn key(space: &Space, i: u8) -> CacheKey {
        (space.key(), ChunkHash([i; 32]))
    }

    fn put(memory: &Arc<Memory>, arena: &Arena, space: &Space, i: u8) -> bool {
        assert_eq!(space.layout().object_len().next_multiple_of(4096), CHUNK);
        let slot = arena
            .try_reserve(space.layout().object_len())
            .expect("room")
            .freeze();
        memory.insert(key(space, i), space, slot)
    }

    fn here(memory: &Memory, space: &Space) -> Vec<u8> {
        (0..=u8::MAX).filter(|&i| memory.has(&key(space, i))).collect()
    }

    #[tokio::test(start_paused = true)]
    async fn the_arena_takes_what_nobody_uses() {
        let (arena, space) = (arena(4), space(""));
        let memory = Memory::new(&arena, options());
        for i in 0..4 {
            assert!(put(&memory, &arena, &space, i));
        }
        // 0 is in use, 1 is dirty, 2 is pinned.
        let used = memory.get(&key(&space, 0), &space).unwrap();
        memory.soil(&key(&space, 1));
        let soon = Instant::now() + Duration::from_secs(5);
        assert_eq!(memory.pin(space.key(), &[key(&space, 2).1], soon), 1);
        assert!(put(&memory, &arena, &space, 4));
        assert_eq!(here(&memory, &space), [0, 1, 2, 4]);
        assert!(put(&memory, &arena, &space, 5));
        assert_eq!(here(&memory, &space), [0, 1, 2, 5]);
        let slot = arena.try_reserve(CHUNK);
        assert!(
            slot.is_some() && arena.try_reserve(CHUNK).is_none(),
            "all others may not go"
        );
        drop(slot);
        drop(used);
        memory.clean(&key(&space, 1));
        tokio::time::advance(Duration::from_secs(6)).await;
        assert!(arena.try_reserve(4 * CHUNK).is_some());
        assert!(here(&memory, &space).is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn below_the_watermark_and_in_the_policy_s_order() {
        for (policy, left) in [(EvictionPolicy::Lru, [0, 3]), (EvictionPolicy::Fifo, [2, 3])] {
            let (arena, space) = (arena(10), space(""));
            let watermark_percent = 20;
            let options = MemoryOptions {
                policy,
                watermark_percent,
                ..options()
            };
            let memory = Memory::new(&arena, options);
            for i in 0..2 {
                put(&memory, &arena, &space, i);
            }
            memory.get(&key(&space, 0), &space).unwrap();
            put(&memory, &arena, &space, 2);
            memory.get(&key(&space, 0), &space);
            put(&memory, &arena, &space, 3);
            assert_eq!(here(&memory, &space), left, "{policy:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_too_old_is_not_there() {
        let (arena, space) = (arena(4), space(""));
        let ttl = Some(Duration::from_secs(10));
        let memory = Memory::new(&arena, MemoryOptions { ttl, ..options() });
        put(&memory, &arena, &space, 0);
        tokio::time::advance(Duration::from_secs(9)).await;
        put(&memory, &arena, &space, 1);
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(here(&memory, &space), [1]);
        assert!(memory.get(&key(&space, 0), &space).is_none());
        assert_eq!(arena.stats().slots, 2);
        memory.expire();
        assert_eq!((arena.stats().slots, memory.stats().expired), (1, 1));
        // Stored anew.
        assert!(put(&memory, &arena, &space, 0) && !put(&memory, &arena, &space, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_tenant_over_its_share_loses_its_own() {
        let arena = arena(10);
        let tenant_bytes = Some(3 * CHUNK);
        let memory = Memory::new(
            &arena,
            MemoryOptions {
                tenant_bytes,
                ..options()
            },
        );
        let (one, other) = (space("one"), space("other"));
        for i in 0..3 {
            assert!(put(&memory, &arena, &one, i) && put(&memory, &arena, &other, i));
        }
        assert!(put(&memory, &arena, &one, 3));
        assert_eq!(
            (here(&memory, &one), here(&memory, &other)),
            (vec![1, 2, 3], vec![0, 1, 2])
        );
        for i in 1..4 {
            memory.soil(&key(&one, i));
        }
        assert!(memory.share("one", CHUNK).is_none(), "none of its chunks may go");
        let shares: Vec<_> = (0..3)
            .map(|_| memory.share("other", one.layout().object_len()))
            .collect();
        assert!(shares.iter().all(Option::is_some) && here(&memory, &other).is_empty());
        assert!(
            memory.share("other", CHUNK).is_none(),
            "what is about to come counts"
        );
        drop(shares);
        assert!(memory.share("other", CHUNK).is_some());
    }
}
