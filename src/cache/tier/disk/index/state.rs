//! All of the index that changes, under one lock.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::RandomState;

use super::IndexEntry;
use super::expiry::Expiry;
use super::shelf::Shelf;
use super::tenants::Tenants;
use crate::cache::tier::prompts::Prompts;
use crate::cache::tier::removals::Removals;
use crate::format::ChunkId;
use crate::protocol::EvictionPolicy;

type KeyMap<V> = HashMap<ChunkId, V, RandomState>;

/// All that changes, under one lock.
pub(super) struct IndexState {
    pub disks: Vec<Shelf>,
    pub tenants: Tenants,
    /// Chunks that are being written, each with its disk. A second write of the chunk waits for the first one's end.
    pub writing: KeyMap<usize>,
    /// Out of the index while their files are still there, on which disk.
    pub leaving: KeyMap<usize>,
    /// How often each is pinned; one need not be there.
    pub pins: KeyMap<u32>,
    /// Chunks that the tier below does not have, and on which disk each is: also while that disk is taken out, and its
    /// entries are gone. Each is pinned once for that.
    pub unsent: KeyMap<usize>,
    /// Chunks that the tier below does not have and need not get, and on which disk each is, like `unsent`. No pin.
    pub declined: KeyMap<usize>,
    pub expiry: Expiry,
    pub removals: Removals,
    pub prompts: Arc<Prompts>,
    serials: u64,
}

impl IndexState {
    /// `tenant_policy`: if tenants are limited.
    pub fn new(disks: Vec<Shelf>, tenant_policy: Option<EvictionPolicy>, prompts: Arc<Prompts>) -> Self {
        Self {
            disks,
            tenants: Tenants::new(tenant_policy),
            writing: KeyMap::default(),
            leaving: KeyMap::default(),
            pins: KeyMap::default(),
            unsent: KeyMap::default(),
            declined: KeyMap::default(),
            expiry: Expiry::default(),
            removals: Removals::default(),
            prompts,
            serials: 0,
        }
    }

    pub fn serial(&mut self) -> u64 {
        self.serials += 1;
        self.serials
    }

    pub fn hit(&mut self, key: &ChunkId, entry: &IndexEntry) {
        let access = self.prompts.access(&key.1);
        self.disks[entry.disk].queue.hit(key, access);
        self.tenants.hit(entry.tenant, key, access);
    }

    pub fn pin(&mut self, key: &ChunkId) {
        *self.pins.entry(*key).or_insert(0) += 1;
    }

    /// The tier below does not have what this disk has.
    pub fn soil(&mut self, key: &ChunkId, disk: usize) {
        match self.unsent.insert(*key, disk) {
            Some(before) => self.disks[before].dirty -= 1,
            None => self.pin(key),
        }
        self.disks[disk].dirty += 1;
    }

    /// True if nobody pins it any more.
    pub fn unpin(&mut self, key: &ChunkId) -> bool {
        let Some(pins) = self.pins.get_mut(key) else {
            return false;
        };
        *pins -= 1;
        let is_last = *pins == 0;
        if is_last {
            self.pins.remove(key);
        }
        is_last
    }

    /// The disk for a new object: of those that work, the one with the most room. Where none has room without evicting
    /// something, they take turns; else one of them would evict all the time, and what is on the others never age.
    pub fn choose(&mut self, object_bytes: u64) -> Option<usize> {
        let useful_room = |shelf: &Shelf| Some(shelf.room()).filter(|&room| room >= object_bytes);
        let working = self
            .disks
            .iter()
            .enumerate()
            .filter(|(_, shelf)| shelf.failed.is_none());
        // All have the same size, so the most room is the most free share.
        let best = working.max_by_key(|(_, shelf)| (useful_room(shelf), Reverse(shelf.chosen)));
        let (disk, _) = best?;
        self.disks[disk].chosen = self.serial();
        Some(disk)
    }
}
