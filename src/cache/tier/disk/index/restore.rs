//! Chunks that a start found on the disks, put into the index in order of use.

use std::time::SystemTime;

use tokio::time::Instant;

use super::reservation::file_bytes;
use super::{Gone, Index, IndexEntry};
use crate::cache::tier::disk::folder::Mark;
use crate::format::ChunkId;

/// A chunk that was found at start.
pub(in crate::cache::tier::disk) struct Restored<'a> {
    pub key: ChunkId,
    pub disk: usize,
    pub tenant: &'a str,
    pub object_len: usize,
    pub used: SystemTime,
    pub written: SystemTime,
    pub mark: Mark,
}

impl Index {
    /// Puts in what was found, in order of use. Tells what is over a limit that was lowered and must go; and which files are
    /// none of the index's, because the chunk is elsewhere, or was deleted while the disk was out.
    pub fn restore(&self, mut found: Vec<Restored<'_>>) -> (Vec<Gone>, Vec<Gone>) {
        found.sort_by_key(|one| one.used);
        let (now, today) = (Instant::now(), SystemTime::now());
        let (mut gone, mut stale) = (Vec::new(), Vec::new());
        let mut state = self.lock();
        for one in found {
            let (disk, key) = (one.disk, one.key);
            let busy = state.writing.get(&key).or_else(|| state.leaving.get(&key));
            let elsewhere = busy.copied().or_else(|| self.entry(&key).map(|entry| entry.disk));
            if elsewhere == Some(disk) {
                // The very file is the index's.
                continue;
            }
            if elsewhere.is_some() || state.removals.has(&key) {
                stale.push(Gone { disk, key });
                continue;
            }
            let bytes = file_bytes(one.object_len);
            let tenant = state.tenants.number(one.tenant);
            state.tenants.take_bytes(tenant, bytes);
            state.disks[disk].bytes += bytes;
            let age = today.duration_since(one.written).unwrap_or_default();
            let entry = IndexEntry {
                disk,
                tenant,
                bytes,
                expires: self
                    .limits
                    .ttl
                    .and_then(|ttl| now.checked_add(ttl.saturating_sub(age))),
                serial: state.serial(),
            };
            // Its mode may be that of a file which somebody put back.
            let mark = match state.unsent.get(&key) == Some(&disk) {
                true => Mark::Dirty,
                false => one.mark,
            };
            self.put(&mut state, key, entry, mark);
        }
        state.expiry.sort();
        let quota = self.limits.tenant_bytes.unwrap_or(u64::MAX);
        for tenant in 0..state.tenants.len() {
            while state.tenants.bytes(tenant) > quota
                && let Some(one) = self.evict_of_tenant(&mut state, tenant)
            {
                gone.push(one);
            }
        }
        for disk in 0..state.disks.len() {
            while state.disks[disk].is_over()
                && let Some(one) = self.evict_of_disk(&mut state, disk)
            {
                gone.push(one);
            }
        }
        (gone, stale)
    }
}
