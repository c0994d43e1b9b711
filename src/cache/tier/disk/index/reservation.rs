//! A write's place: which disk, and room on it, evicting others where needed. Dropped before its commit, it gives the
//! room back.

use std::sync::Arc;

use tokio::time::Instant;

use super::state::IndexState;
use super::{Gone, Index, IndexEntry};
use crate::cache::tier::disk::direct::BLOCK;
use crate::cache::tier::disk::folder::Mark;
use crate::cache::tier::disk::handle::Wrote;
use crate::format::ChunkId;

/// The place of a write, or the reason why there is none.
pub(in crate::cache::tier::disk) enum Placed {
    On(WriteReservation),
    Present,
    /// Another write of it, which may fail, or the removal of an older file is under way: ask again when
    /// [something ended](Index::something_ends), or a disk was taken out.
    Busy,
    /// One that is past its time must go first.
    Expired(Gone),
    /// It was deleted since somebody began to bring it.
    Deleted,
    /// No disk works, a disk that hangs is at it, or it would not fit if there were nothing else.
    NoRoom,
}

/// A write, until its entry is in or this is dropped: nobody else writes that chunk.
pub(in crate::cache::tier::disk) struct WriteReservation {
    index: Arc<Index>,
    pub key: ChunkId,
    pub disk: usize,
    tenant: usize,
    bytes: u64,
    /// When somebody began to bring it.
    since: Instant,
    pub mark: Mark,
    /// Whether its bytes count as taken; else they only wait.
    is_taken: bool,
}

impl Index {
    /// Chooses a disk for an object.
    pub fn place(
        self: &Arc<Self>,
        key: ChunkId,
        tenant: &str,
        object_len: usize,
        since: Instant,
        mark: Mark,
    ) -> Placed {
        let bytes = file_bytes(object_len);
        let quota = self.limits.tenant_bytes.unwrap_or(u64::MAX);
        let mut state = self.lock();
        if state.removals.has_since(&key, since) {
            return Placed::Deleted;
        }
        let stays = |entry: &IndexEntry| entry.is_live(Instant::now) || state.unsent.contains_key(&key);
        if let Some(entry) = self.entry(&key).filter(stays) {
            state.hit(&key, &entry);
            return Placed::Present;
        }
        let busy = state.writing.get(&key).or_else(|| state.leaving.get(&key));
        if let Some(&disk) = busy {
            // A write on a disk that was taken out may never end.
            return match self.works(disk) {
                true => Placed::Busy,
                false => Placed::NoRoom,
            };
        }
        if let Some(gone) = self.take_out(&mut state, &key) {
            state.disks[gone.disk].expired += 1;
            return Placed::Expired(gone);
        }
        if bytes > self.limits.disk_bytes.min(quota) {
            return Placed::NoRoom;
        }
        let Some(disk) = state.choose(bytes) else {
            return Placed::NoRoom;
        };
        state.writing.insert(key, disk);
        state.disks[disk].queued_bytes += bytes;
        let tenant = state.tenants.number(tenant);
        drop(state);
        Placed::On(WriteReservation {
            index: Arc::clone(self),
            key,
            disk,
            tenant,
            bytes,
            since,
            mark,
            is_taken: false,
        })
    }
}

impl WriteReservation {
    /// Takes the room. False if there is none, as far as what is there may go.
    pub fn take_room(&mut self) -> (bool, Vec<Gone>) {
        let index = Arc::clone(&self.index);
        let mut state = index.lock();
        let mut gone = Vec::new();
        state.disks[self.disk].queued_bytes -= self.bytes;
        state.disks[self.disk].bytes += self.bytes;
        state.tenants.take_bytes(self.tenant, self.bytes);
        self.is_taken = true;
        let has_room = self.make_room(&mut state, &mut gone);
        if !has_room {
            state.disks[self.disk].regrow(self.bytes);
        }
        (has_room, gone)
    }

    fn make_room(&self, state: &mut IndexState, gone: &mut Vec<Gone>) -> bool {
        let (index, limits) = (&self.index, &self.index.limits);
        if state.disks[self.disk].failed.is_some() {
            return false;
        }
        let quota = limits.tenant_bytes.unwrap_or(u64::MAX);
        while state.tenants.bytes(self.tenant) > quota {
            let Some(one) = index.evict_of_tenant(state, self.tenant) else {
                return false;
            };
            gone.push(one);
        }
        while state.disks[self.disk].is_over() {
            let Some(one) = index.evict_of_disk(state, self.disk) else {
                return false;
            };
            gone.push(one);
        }
        true
    }

    /// The file is in place: from here on it is a hit, or it must go because the chunk was deleted meanwhile.
    pub fn commit(mut self) -> (Wrote, Option<Gone>) {
        let index = Arc::clone(&self.index);
        let mut state = index.lock();
        let shelf = &mut state.disks[self.disk];
        shelf.writes += 1;
        if shelf.failed.is_some() {
            // It is found at the next start, and no hit until then.
            return (Wrote::NoRoom, None);
        }
        shelf.failures = 0;
        if state.removals.has_since(&self.key, self.since) {
            state.leaving.insert(self.key, self.disk);
            let Self { disk, key, .. } = self;
            return (Wrote::Deleted, Some(Gone { disk, key }));
        }
        state.removals.forget(&self.key);
        let shelf = &mut state.disks[self.disk];
        shelf.regrow(self.bytes);
        let entry = IndexEntry {
            disk: self.disk,
            tenant: self.tenant,
            bytes: std::mem::take(&mut self.bytes),
            expires: index.limits.ttl.and_then(|ttl| Instant::now().checked_add(ttl)),
            serial: state.serial(),
        };
        index.put(&mut state, self.key, entry, self.mark);
        let is_live = |key: &ChunkId, serial| index.entry(key).is_some_and(|entry| entry.serial == serial);
        let live: u64 = state.disks.iter().map(|shelf| shelf.chunks).sum();
        state
            .expiry
            .trim(usize::try_from(live).unwrap_or(usize::MAX), is_live);
        (Wrote::Stored, None)
    }
}

impl Drop for WriteReservation {
    fn drop(&mut self) {
        let mut state = self.index.lock();
        state.writing.remove(&self.key);
        if self.is_taken {
            state.disks[self.disk].bytes -= self.bytes;
            state.tenants.give_bytes(self.tenant, self.bytes);
        } else {
            state.disks[self.disk].queued_bytes -= self.bytes;
        }
        drop(state);
        self.index.ended.notify_waiters();
    }
}

/// The bytes of an object's file on a disk.
pub(super) fn file_bytes(object_len: usize) -> u64 {
    object_len.next_multiple_of(BLOCK) as u64
}
