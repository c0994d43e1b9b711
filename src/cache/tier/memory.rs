//! The memory tier: chunks that stay in their slots of the arena because they may be wanted again.
//!
//! Nothing is copied: a chunk that was loaded or committed is here with the slot it is in. A slot that anybody else has a
//! handle to is in use and stays; so does one that is *dirty*: not yet on a lower tier. When the arena has no room,
//! it asks for the next one that may go ([`Arena::on_pressure`]), and the tier keeps its share below the watermark by itself.
//! One that is pinned goes only for the oldest load, which must never wait for anybody.
//!
//! With several tenants the one that has the most gives first, and each may have its quota.

mod state;

use crate::protocol::EvictionPolicy;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

use self::state::{Going, MemoryState, ReaderHold, Resident, is_pinned};
use super::events::KvEvents;
use super::percent_of;
use super::policy::Access;
use super::prompts::Prompts;
use crate::arena::{Arena, Slot};
use crate::format::{ChunkHash, ChunkId, Space, SpaceKey};
use crate::protocol::Tier;

/// The tier's limits.
#[derive(Debug, Clone, Copy)]
pub struct MemoryOptions {
    pub policy: EvictionPolicy,
    /// How long a chunk stays after it came.
    pub ttl: Option<Duration>,
    /// Share of the arena that the tier keeps at most, unless more is in use. 0: it keeps nothing.
    pub watermark_percent: u32,
    /// Bytes that one tenant may have.
    pub tenant_bytes: Option<usize>,
    /// Loads of a chunk after which it goes to the lower tiers; 0: at once.
    pub min_accesses: u32,
}

/// See the [module](self).
pub struct Memory {
    options: MemoryOptions,
    bytes_max: u64,
    arena: Arena,
    state: Mutex<MemoryState>,
    prompts: Prompts,
}

/// See [`Memory::share`].
pub struct TenantShare {
    memory: Arc<Memory>,
    tenant: Arc<str>,
    bytes: usize,
}

impl Drop for TenantShare {
    fn drop(&mut self) {
        let mut state = self.memory.lock();
        if let Some(of) = state.tenants.get_mut(&self.tenant) {
            of.reserved -= self.bytes;
        }
        state.forget_empty(&self.tenant);
    }
}

/// What the tiers below are known to have of a chunk that comes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mark {
    /// They have it, or need not.
    Clean,
    /// Not yet.
    Dirty,
    /// A peer has it, and may never store it.
    Unproven,
}

/// A chunk that is here.
pub struct MemoryHit {
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
    /// Chunks that lookups and stores looked for.
    pub looked_up: u64,
    pub inserted: u64,
    pub evicted: u64,
    pub expired: u64,
}

impl Memory {
    pub fn new(arena: &Arena, options: MemoryOptions) -> Arc<Self> {
        let memory = Arc::new(Self {
            options,
            bytes_max: percent_of(arena.size() as u64, options.watermark_percent),
            arena: arena.clone(),
            state: Mutex::default(),
            prompts: Prompts::default(),
        });
        let weak = Arc::downgrade(&memory);
        arena.on_pressure(move |before| weak.upgrade().is_some_and(|memory| memory.evict_one(before)));
        memory
    }

    /// Tells them of what comes and goes from now on.
    pub fn tell(&self, events: &Arc<KvEvents>) {
        self.lock().events = Some(Arc::clone(events));
    }

    /// Tells of those that are here.
    pub fn tell_present(&self, space: SpaceKey, chunks: &[ChunkHash]) {
        let state = self.lock();
        for key in chunks.iter().map(|chunk| (space, *chunk)) {
            if let Some(events) = state.events.as_ref().filter(|_| state.chunks.contains_key(&key)) {
                events.stored(&key, Tier::Memory);
            }
        }
    }

    /// Calls `found` with the position of each chunk that is here. Is no access.
    pub fn find(&self, space: SpaceKey, chunks: &[ChunkHash], mut found: impl FnMut(usize)) {
        let (now, mut state) = (Instant::now(), self.lock());
        state.stats.looked_up += chunks.len() as u64;
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

    /// A prompt was looked up, and so many of its leading chunks were there: the policy learns of it with their uses.
    pub fn looked_up(&self, chunks: &[ChunkHash], there: usize) {
        self.prompts.looked_up(chunks, there);
    }

    /// When a chunk is used if it is now, and for which prompt.
    pub fn access(&self, chunk: &ChunkHash) -> Access {
        self.prompts.access(chunk)
    }

    /// Header and payload of a chunk, where the header is written. Is no access.
    pub fn object(&self, key: &ChunkId) -> Option<Slot> {
        match &self.lock().chunks.get(key)?.held {
            ReaderHold::Object(object) => Some(object.clone()),
            ReaderHold::Payload(_) => None,
        }
    }

    pub fn has(&self, key: &ChunkId) -> bool {
        let mut has = false;
        self.find(key.0, &[key.1], |_| has = true);
        has
    }

    /// Whether it is here, and need not wait for more loads before it goes lower. Is no access.
    pub fn has_due(&self, key: &ChunkId) -> bool {
        let (now, state) = (Instant::now(), self.lock());
        let resident = state.chunks.get(key);
        resident.is_some_and(|resident| resident.was_due && !self.is_expired(resident, now))
    }

    /// The chunk, which is in use from now on for as long as the answer lives.
    pub fn get(&self, key: &ChunkId, space: &Space) -> Option<MemoryHit> {
        let now = Instant::now();
        let mut state = self.lock();
        let MemoryState {
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
            tenant.queue.hit(key, self.prompts.access(&key.1));
        }
        // One whose header is still to be written is due the next time.
        let is_whole = matches!(resident.held, ReaderHold::Object(_));
        let is_due = is_whole && !resident.was_due && resident.accesses >= self.options.min_accesses;
        resident.was_due |= is_due;
        Some(resident.found(space, is_due))
    }

    /// Keeps a chunk that somebody began to bring at `since`. False if it is here already, has no room, or was deleted since.
    pub fn insert(&self, key: ChunkId, space: &Space, object: Slot, since: Instant) -> bool {
        self.keep(key, space, ReaderHold::Object(object), Mark::Clean, since)
    }

    /// The same of a chunk that came from a peer, where no lower tier is known to have it.
    pub fn insert_unproven(&self, key: ChunkId, space: &Space, object: Slot, since: Instant) -> bool {
        self.keep(key, space, ReaderHold::Object(object), Mark::Unproven, since)
    }

    pub fn is_unproven(&self, key: &ChunkId) -> bool {
        let state = self.lock();
        state.chunks.get(key).is_some_and(|resident| resident.unproven)
    }

    /// Keeps a new chunk whose header is still to be written, also in place of an unproven one. A `dirty` one stays until it is
    /// [`clean`](Self::clean).
    pub fn insert_new(&self, key: ChunkId, space: &Space, payload: Slot, dirty: bool) -> bool {
        let mark = if dirty { Mark::Dirty } else { Mark::Clean };
        self.keep(key, space, ReaderHold::Payload(payload), mark, Instant::now())
    }

    fn keep(&self, key: ChunkId, space: &Space, held: ReaderHold, mark: Mark, since: Instant) -> bool {
        if self.bytes_max == 0 {
            return false;
        }
        let now = Instant::now();
        let is_from_below = matches!(held, ReaderHold::Object(_));
        let bytes = space.layout().object_len();
        let mut gone = Vec::new();
        let mut state = self.lock();
        if is_from_below && state.removals.has_since(&key, since) {
            return false;
        }
        if let Some(resident) = state.chunks.get(&key) {
            let is_expired = self.is_expired(resident, now);
            if !is_expired && (is_from_below || !resident.unproven) {
                return false;
            }
            gone.extend(state.take(&key).map(|resident| resident.held));
            state.stats.expired += u64::from(is_expired);
        }
        if let Some(most) = self.options.tenant_bytes {
            while state.tenant_bytes(space.tenant()) + bytes > most {
                let Some(held) = state.evict_of(space.tenant(), Going::any(now)) else {
                    break;
                };
                gone.push(held);
            }
            // A committed chunk stays until it is stored; reserve looked at the quota.
            if state.tenant_bytes(space.tenant()) + bytes > most && mark != Mark::Dirty {
                drop(state);
                return false;
            }
        }
        let tenant = state.tenant(space.tenant(), self.options.policy);
        if let Some(of) = state.tenants.get_mut(&tenant) {
            of.queue.insert(key, self.prompts.access(&key.1));
            of.bytes += bytes;
        }
        state.stats.inserted += 1;
        let resident = Resident {
            tenant,
            held,
            bytes,
            dirty: mark == Mark::Dirty,
            unproven: mark == Mark::Unproven,
            accesses: 0,
            // A chunk that came from below, or goes there at once, never is.
            was_due: self.options.min_accesses == 0 || is_from_below,
            since: now,
        };
        state.stats.bytes += bytes as u64;
        state.stats.dirty_bytes += resident.dirty_bytes();
        state.chunks.insert(key, resident);
        if let Some(events) = &state.events {
            events.stored(&key, Tier::Memory);
        }
        while state.stats.bytes > self.bytes_max {
            let Some(held) = state.evict(Going::any(now)) else {
                break;
            };
            gone.push(held);
        }
        // Slots are given back without the lock.
        drop(state);
        true
    }

    /// The header is in front of the payload now.
    pub fn sealed(&self, key: &ChunkId, object: Slot) {
        let mut state = self.lock();
        let before = state
            .chunks
            .get_mut(key)
            .filter(|resident| resident.held.slot().generation() == object.generation())
            .map(|resident| std::mem::replace(&mut resident.held, ReaderHold::Object(object)));
        drop(state);
        drop(before);
    }

    /// A lower tier has the chunk, or it was decided that none needs it.
    pub fn clean(&self, key: &ChunkId) {
        self.lock().set_dirty(key, false);
        self.arena.nudge();
    }

    /// It is on its way to a lower tier.
    pub fn soil(&self, key: &ChunkId) {
        self.lock().set_dirty(key, true);
    }

    /// It was due and could not go lower: it is with the next access.
    pub fn put_off(&self, key: &ChunkId) {
        if let Some(resident) = self.lock().chunks.get_mut(key) {
            resident.was_due = false;
        }
    }

    /// Removes a chunk. A load that is bringing it already does not put it back. A reader that has it keeps its slot.
    pub fn delete(&self, key: &ChunkId) {
        let mut state = self.lock();
        state.removals.add(*key);
        let deleted = state.take(key);
        // Given back without the lock.
        drop(state);
        drop(deleted);
    }

    /// Lets go of a tenant's chunks, but for dirty ones; returns how many. A reader that has one keeps its slot.
    pub fn forget_tenant(&self, tenant: &str) -> usize {
        let mut state = self.lock();
        let chunks = state.chunks.iter();
        let of = chunks.filter(|(_, resident)| &*resident.tenant == tenant && !resident.dirty);
        let of: Vec<ChunkId> = of.map(|(key, _)| *key).collect();
        let gone: Vec<Resident> = of.iter().filter_map(|key| state.take(key)).collect();
        // Slots are given back without the lock.
        drop(state);
        gone.len()
    }

    /// Keeps those that are here until `until`. Answers how many are.
    pub fn pin(&self, space: SpaceKey, chunks: &[ChunkHash], until: Instant) -> usize {
        let now = Instant::now();
        let mut state = self.lock();
        let MemoryState {
            chunks: here, pins, ..
        } = &mut *state;
        let mut pinned = 0;
        for key in chunks.iter().map(|chunk| (space, *chunk)) {
            if here
                .get(&key)
                .is_some_and(|resident| !self.is_expired(resident, now))
            {
                let longest = pins.entry(key).or_insert(until);
                *longest = until.max(*longest);
                pinned += 1;
            }
        }
        pinned
    }

    pub fn unpin(&self, space: SpaceKey, chunks: &[ChunkHash]) -> usize {
        let mut state = self.lock();
        let unpin = |chunk: &&ChunkHash| state.pins.remove(&(space, **chunk)).is_some();
        let unpinned = chunks.iter().filter(unpin).count();
        drop(state);
        self.arena.nudge();
        unpinned
    }

    /// Part of a tenant's quota for a chunk that is about to come; goes back when it is dropped. None if the tenant has no
    /// room, once those that may go have gone.
    pub fn share(self: &Arc<Self>, tenant: &str, bytes: usize) -> Option<TenantShare> {
        let (now, mut gone) = (Instant::now(), Vec::new());
        let mut state = self.lock();
        if let Some(most) = self.options.tenant_bytes {
            while state.tenant_bytes(tenant) + bytes > most {
                gone.push(state.evict_of(tenant, Going::any(now))?);
            }
        }
        let tenant = state.tenant(tenant, self.options.policy);
        if let Some(of) = state.tenants.get_mut(&tenant) {
            of.reserved += bytes;
        }
        drop(state);
        Some(TenantShare {
            memory: Arc::clone(self),
            tenant,
            bytes,
        })
    }

    /// Lets go of what is too old and may go.
    pub fn expire(&self) {
        let now = Instant::now();
        let mut state = self.lock();
        let MemoryState { chunks, pins, .. } = &*state;
        let old = |(key, resident): &(&ChunkId, &Resident)| {
            self.is_expired(resident, now) && !resident.is_used() && !is_pinned(pins, key, now)
        };
        let old: Vec<ChunkId> = chunks.iter().filter(old).map(|(key, _)| *key).collect();
        let gone: Vec<Resident> = old.iter().filter_map(|key| state.take(key)).collect();
        state.stats.expired += gone.len() as u64;
        // Slots are given back without the lock.
        drop(state);
        drop(gone);
    }

    /// Makes the arena a slot freer, if it can: one that begins before that offset, or else for the oldest load.
    fn evict_one(&self, before: Option<usize>) -> bool {
        let going = Going {
            before: before.unwrap_or(usize::MAX),
            ..Going::any(Instant::now())
        };
        let mut state = self.lock();
        let mut evicted = state.evict(going);
        if evicted.is_none() && before.is_none() {
            evicted = state.evict(Going {
                pinned: true,
                ..going
            });
        }
        // Given back without the lock.
        drop(state);
        evicted.is_some()
    }

    pub fn stats(&self) -> MemoryStats {
        let now = Instant::now();
        let mut state = self.lock();
        state.pins.retain(|_, until| *until > now);
        MemoryStats {
            chunks: state.chunks.len() as u64,
            pinned_chunks: state.pins.len() as u64,
            ..state.stats
        }
    }

    /// What each tenant has here.
    pub fn tenants(&self) -> Vec<(String, u64)> {
        let state = self.lock();
        let tenants = state.tenants.iter();
        tenants
            .map(|(name, of)| (name.to_string(), of.bytes as u64))
            .collect()
    }

    fn is_expired(&self, resident: &Resident, now: Instant) -> bool {
        !resident.dirty && self.options.ttl.is_some_and(|ttl| now - resident.since >= ttl)
    }

    /// No panic can leave the state half-changed, so a poisoned lock is as good.
    fn lock(&self) -> MutexGuard<'_, MemoryState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
