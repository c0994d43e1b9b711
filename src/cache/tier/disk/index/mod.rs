//! Which chunk is on which disk, which goes next, and how much room is left. No I/O.
//!
//! Lookups read a sharded map and nothing else. Everything that changes goes through one lock (`state.rs`), under which
//! the map is changed too; so the map is always as right as the rest. The index tells its caller what must happen to files,
//! and the caller does it without the lock:
//!
//! - A [`WriteReservation`] is a write from its placement until its entry is in, or until it is dropped.
//! - A [`Gone`] is out of the index, and its file must go. Until [`Index::left`] is called nothing is written under that
//!   name, so the unlink can't take a newer file.

mod expiry;
mod reservation;
mod restore;
mod shelf;
mod state;
mod tenants;

use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use dashmap::DashMap;
use foldhash::fast::RandomState;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;
use tokio::time::Instant;

use super::fault::DiskFault;
use super::folder::Mark;
use super::options::DiskOptions;
use super::stats::{PathStats, Unsent};
use crate::cache::tier::events::KvEvents;
use crate::cache::tier::prompts::Prompts;
use crate::format::{ChunkHash, ChunkId, SpaceKey};
use crate::protocol::Tier;

use reservation::file_bytes;
pub(super) use reservation::{Placed, WriteReservation};
pub(super) use restore::Restored;
use shelf::Shelf;
use state::IndexState;

/// On a full file system, this many times an object's bytes are evicted.
const EVICTED_WHEN_FULL: u64 = 4;

pub(super) struct Index {
    limits: Limits,
    /// Changed only under the lock of `state`; nobody who holds a guard of it may take that lock.
    entries: DashMap<ChunkId, IndexEntry, RandomState>,
    /// Which disks are not taken out.
    works: Vec<AtomicBool>,
    state: Mutex<IndexState>,
    prompts: Arc<Prompts>,
    events: OnceLock<Arc<KvEvents>>,
    /// Something in `IndexState::leaving` has left, or in `IndexState::writing` is over.
    ended: Notify,
}

struct Limits {
    /// For each disk.
    disk_bytes: u64,
    tenant_bytes: Option<u64>,
    ttl: Option<Duration>,
    failures: u32,
}

/// A chunk on a disk.
#[derive(Debug, Clone, Copy)]
pub(super) struct IndexEntry {
    pub disk: usize,
    tenant: usize,
    /// That its file takes.
    bytes: u64,
    expires: Option<Instant>,
    /// Tells it from later ones of the same key.
    pub serial: u64,
}

/// Out of the index; its file must go, and then [`Index::left`] be called.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Gone {
    pub disk: usize,
    pub key: ChunkId,
}

impl IndexEntry {
    fn is_live(&self, now: impl FnOnce() -> Instant) -> bool {
        self.expires.is_none_or(|expires| now() < expires)
    }
}

impl Index {
    pub fn new(options: &DiskOptions, paths: Vec<PathBuf>) -> Self {
        let shelf = |path| Shelf::new(path, options);
        let prompts = Arc::<Prompts>::default();
        Self {
            limits: Limits {
                disk_bytes: options.watermark_bytes(),
                tenant_bytes: options.tenant_bytes,
                ttl: options.ttl,
                failures: options.failures.max(1),
            },
            entries: DashMap::default(),
            works: paths.iter().map(|_| AtomicBool::new(true)).collect(),
            state: Mutex::new(IndexState::new(
                paths.into_iter().map(shelf).collect(),
                options.tenant_bytes.map(|_| options.policy),
                Arc::clone(&prompts),
            )),
            prompts,
            events: OnceLock::new(),
            ended: Notify::new(),
        }
    }

    /// A prompt was looked up, and so many of its leading chunks were there.
    pub fn looked_up(&self, chunks: &[ChunkHash], there: usize) {
        self.prompts.looked_up(chunks, there);
    }

    /// Tells them of what comes and goes from now on.
    pub fn tell(&self, events: &Arc<KvEvents>) {
        // Once, by the node that the disk is of.
        let _ = self.events.set(Arc::clone(events));
    }

    /// Tells of those that are here.
    pub fn tell_present(&self, space: SpaceKey, chunks: &[ChunkHash]) {
        let (Some(events), _state) = (self.events.get(), self.lock()) else {
            return;
        };
        for key in chunks.iter().map(|chunk| (space, *chunk)) {
            if self.entry(&key).is_some() {
                events.stored(&key, Tier::Disk);
            }
        }
    }

    /// Whether it is there, on a disk that works.
    pub fn has(&self, key: &ChunkId, now: Instant) -> bool {
        let entry = self.entries.get(key);
        entry.is_some_and(|entry| entry.is_live(|| now) && self.works(entry.disk))
    }

    pub fn works(&self, disk: usize) -> bool {
        self.works[disk].load(Ordering::Relaxed)
    }

    /// The chunk counts as used.
    pub fn touch(&self, key: &ChunkId) {
        self.find(key);
    }

    /// Where to read it, which counts as a use. A pinned one is there even past its time.
    pub fn find(&self, key: &ChunkId) -> Option<IndexEntry> {
        let mut state = self.lock();
        let entry = self.entry(key)?;
        let is_there = entry.is_live(Instant::now) || state.pins.contains_key(key);
        is_there.then(|| {
            state.hit(key, &entry);
            entry
        })
    }

    /// Takes a chunk out, or only a certain entry of it. A chunk that the tier below does not have stays.
    pub fn take(&self, key: &ChunkId, serial: Option<u64>) -> Option<Gone> {
        let mut state = self.lock();
        let entry = self.entry(key)?;
        let is_it = serial.is_none_or(|serial| serial == entry.serial);
        let goes = is_it && !state.unsent.contains_key(key);
        goes.then(|| self.take_out(&mut state, key)).flatten()
    }

    /// Takes a chunk out that can't be read, and that the tier below does not have. Only one caller gets it.
    pub fn take_lost(&self, key: &ChunkId) -> Option<Gone> {
        let mut state = self.lock();
        let is_here = self.entry(key).map(|entry| entry.disk) == state.unsent.get(key).copied();
        is_here.then(|| self.take_out(&mut state, key)).flatten()
    }

    /// Takes a chunk out. A load that is bringing it already does not put it back.
    pub fn delete(&self, key: &ChunkId) -> Option<Gone> {
        let mut state = self.lock();
        state.removals.add(*key);
        // It may be on a disk that is out.
        self.clean_in(&mut state, key);
        self.take_out(&mut state, key)
    }

    /// The file is gone; its name is free.
    pub fn left(&self, key: &ChunkId) {
        self.lock().leaving.remove(key);
        self.ended.notify_waiters();
    }

    /// Wakes when a write is over or a file gone, from the moment it is made.
    pub fn something_ends(&self) -> Notified<'_> {
        self.ended.notified()
    }

    /// A disk's file system had no room for an object. Takes out some, and expects less room for a while; so the next
    /// ones go elsewhere if they can, and fit if they can't.
    pub fn is_full(&self, disk: usize, object_len: usize) -> Vec<Gone> {
        let object_bytes = file_bytes(object_len);
        let mut state = self.lock();
        // The object's own bytes are among them, and are about to be given back.
        let limit_bytes = state.disks[disk]
            .bytes
            .saturating_sub(object_bytes * (EVICTED_WHEN_FULL + 1));
        state.disks[disk].is_full(limit_bytes);
        let mut gone = Vec::new();
        while state.disks[disk].bytes > limit_bytes + object_bytes {
            let Some(one) = self.evict_of_disk(&mut state, disk) else {
                break;
            };
            gone.push(one);
        }
        gone
    }

    /// Takes out at most `most` chunks whose time is over.
    pub fn expire(&self, most: usize) -> Vec<Gone> {
        if self.limits.ttl.is_none() {
            return Vec::new();
        }
        let (mut state, now) = (self.lock(), Instant::now());
        let mut gone = Vec::new();
        while gone.len() < most
            && let Some((key, serial)) = state.expiry.pop_due(now)
        {
            let is_it = self.entry(&key).is_some_and(|entry| entry.serial == serial);
            // Its last unpin puts it back in line.
            if is_it && !state.pins.contains_key(&key) {
                let one = self.take_out(&mut state, &key);
                one.iter().for_each(|one| state.disks[one.disk].expired += 1);
                gone.extend(one);
            }
        }
        gone
    }

    /// It is neither evicted nor removed for its age until it is unpinned as often.
    pub fn pin(&self, key: &ChunkId) {
        self.lock().pin(key);
    }

    pub fn unpin(&self, key: &ChunkId) {
        self.unpin_in(&mut self.lock(), key);
    }

    /// Whether the tier below does not have it, though a disk does.
    pub fn unsent(&self, key: &ChunkId) -> Unsent {
        match self.lock().unsent.get(key) {
            None => Unsent::No,
            Some(&disk) if self.works(disk) => Unsent::Here,
            Some(_) => Unsent::Out,
        }
    }

    /// What the tier below does not have, and need not get.
    pub fn declined(&self) -> Vec<ChunkId> {
        self.lock().declined.keys().copied().collect()
    }

    /// The tier below has it. Answers the disk whose file says otherwise.
    pub fn clean(&self, key: &ChunkId) -> Option<usize> {
        self.clean_in(&mut self.lock(), key)
    }

    fn clean_in(&self, state: &mut IndexState, key: &ChunkId) -> Option<usize> {
        let declined_on = state.declined.remove(key);
        let Some(disk) = state.unsent.remove(key) else {
            return declined_on;
        };
        state.disks[disk].dirty -= 1;
        self.unpin_in(state, key);
        Some(disk)
    }

    /// A disk was read anew: the unsent chunks that it had, and that are not there any more.
    pub fn missing(&self, disk: usize) -> Vec<ChunkId> {
        let mut state = self.lock();
        let had = state.unsent.iter().filter(|(_, on)| **on == disk);
        let had: Vec<ChunkId> = had.map(|(key, _)| *key).collect();
        state
            .declined
            .retain(|key, on| *on != disk || self.entries.contains_key(key));
        let mut missing = Vec::new();
        for key in had {
            if let Some(there) = self.entry(&key).map(|entry| entry.disk) {
                state.soil(&key, there);
            } else {
                self.clean_in(&mut state, &key);
                missing.push(key);
            }
        }
        missing
    }

    fn unpin_in(&self, state: &mut IndexState, key: &ChunkId) {
        if state.unpin(key)
            && let Some(entry) = self.entry(key)
            && let Some(expires) = entry.expires.filter(|&expires| expires <= Instant::now())
        {
            state.expiry.push_first(expires, *key, entry.serial);
        }
    }

    /// A read went well.
    pub fn has_read(&self, disk: usize) {
        let mut state = self.lock();
        let shelf = &mut state.disks[disk];
        shelf.reads += 1;
        shelf.failures = 0;
    }

    /// An operation failed. True if the disk was taken out because of that.
    pub fn has_failed(&self, disk: usize, error: &io::Error) -> bool {
        let mut state = self.lock();
        let shelf = &mut state.disks[disk];
        shelf.errors += 1;
        if matches!(DiskFault::of(error), DiskFault::Process | DiskFault::Short) || shelf.failed.is_some() {
            return false;
        }
        shelf.failures += 1;
        if shelf.failures < self.limits.failures {
            return false;
        }
        self.take_out_in(&mut state, disk, error.to_string());
        true
    }

    /// The disk is of no use, and none of its chunks is there any more. False if that was known.
    pub fn take_disk_out(&self, disk: usize, reason: String) -> bool {
        let mut state = self.lock();
        let works = state.disks[disk].failed.is_none();
        if works {
            state.disks[disk].errors += 1;
            self.take_out_in(&mut state, disk, reason);
        }
        works
    }

    /// It was read anew, and is of use again.
    pub fn take_disk_up(&self, disk: usize) {
        let mut state = self.lock();
        let shelf = &mut state.disks[disk];
        (shelf.failed, shelf.failures) = (None, 0);
        self.works[disk].store(true, Ordering::Relaxed);
    }

    fn take_out_in(&self, state: &mut IndexState, disk: usize, reason: String) {
        state.disks[disk].failed = Some(reason);
        self.works[disk].store(false, Ordering::Relaxed);
        while let Some(key) = state.disks[disk].queue.evict(|_| true) {
            self.drop_entry(state, &key);
        }
        // Nobody need wait for what is under way there.
        self.ended.notify_waiters();
    }

    pub fn stats(&self) -> Vec<PathStats> {
        self.lock().disks.iter().map(Shelf::stats).collect()
    }

    /// What each tenant has, on all disks.
    pub fn tenants(&self) -> Vec<(String, u64)> {
        self.lock().tenants.all().collect()
    }

    /// Takes out the next of a disk.
    fn evict_of_disk(&self, state: &mut IndexState, disk: usize) -> Option<Gone> {
        let pins = &state.pins;
        let key = state.disks[disk].queue.evict(|key| !pins.contains_key(key))?;
        self.evicted(state, &key)
    }

    /// Takes out the next of a tenant, on any disk.
    fn evict_of_tenant(&self, state: &mut IndexState, tenant: usize) -> Option<Gone> {
        let pins = &state.pins;
        let key = state.tenants.evict(tenant, |key| !pins.contains_key(key))?;
        self.evicted(state, &key)
    }

    fn evicted(&self, state: &mut IndexState, key: &ChunkId) -> Option<Gone> {
        let gone = self.take_out(state, key)?;
        state.disks[gone.disk].evicted += 1;
        Some(gone)
    }

    fn take_out(&self, state: &mut IndexState, key: &ChunkId) -> Option<Gone> {
        let entry = self.drop_entry(state, key)?;
        if state.unsent.get(key) == Some(&entry.disk) {
            self.clean_in(state, key);
        }
        if state.declined.get(key) == Some(&entry.disk) {
            state.declined.remove(key);
        }
        state.leaving.insert(*key, entry.disk);
        Some(Gone {
            disk: entry.disk,
            key: *key,
        })
    }

    fn drop_entry(&self, state: &mut IndexState, key: &ChunkId) -> Option<IndexEntry> {
        let (_, entry) = self.entries.remove(key)?;
        if let Some(events) = self.events.get() {
            events.removed(key, Tier::Disk);
        }
        let shelf = &mut state.disks[entry.disk];
        shelf.queue.remove(key);
        shelf.bytes -= entry.bytes;
        shelf.chunks -= 1;
        state.tenants.remove(entry.tenant, key, entry.bytes);
        Some(entry)
    }

    /// Puts in an entry whose bytes are accounted for already.
    fn put(&self, state: &mut IndexState, key: ChunkId, entry: IndexEntry, mark: Mark) {
        state.declined.remove(&key);
        match mark {
            Mark::Clean => {}
            Mark::Dirty => state.soil(&key, entry.disk),
            Mark::Declined => drop(state.declined.insert(key, entry.disk)),
        }
        let access = self.prompts.access(&key.1);
        let shelf = &mut state.disks[entry.disk];
        shelf.queue.insert(key, access);
        shelf.chunks += 1;
        state.tenants.insert(entry.tenant, key, access);
        if let Some(expires) = entry.expires {
            state.expiry.push(expires, key, entry.serial);
        }
        self.entries.insert(key, entry);
        if let Some(events) = self.events.get() {
            events.stored(&key, Tier::Disk);
        }
    }

    #[cfg(test)]
    pub fn is_at_rest(&self) -> bool {
        let state = self.lock();
        state.writing.is_empty() && state.leaving.is_empty()
    }

    /// Everything there is, by disk, when nothing is under way.
    #[cfg(test)]
    pub fn entries_at_rest(&self) -> std::collections::BTreeMap<ChunkId, usize> {
        let state = self.lock();
        assert!(state.disks.iter().all(|shelf| shelf.queued_bytes == 0));
        let disk_bytes: u64 = state.disks.iter().map(|shelf| shelf.bytes).sum();
        let tenants = 0..state.tenants.len();
        assert_eq!(
            tenants.map(|number| state.tenants.bytes(number)).sum::<u64>(),
            disk_bytes
        );
        let queued: usize = state.disks.iter().map(|shelf| shelf.queue.len()).sum();
        assert_eq!(queued, self.entries.len());
        self.entries
            .iter()
            .map(|entry| (*entry.key(), entry.disk))
            .collect()
    }

    fn entry(&self, key: &ChunkId) -> Option<IndexEntry> {
        self.entries.get(key).map(|entry| *entry)
    }

    /// No panic can leave the state half-changed, so a poisoned lock is as good.
    fn lock(&self) -> MutexGuard<'_, IndexState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
