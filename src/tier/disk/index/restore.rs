use std::time::SystemTime;

use tokio::time::Instant;

use super::reservation::file_bytes;
use super::{Entry, Gone, Index};
use crate::existence::CacheKey;

/// A chunk that was found at start.
pub(in crate::tier::disk) struct Restored<'a> {
    pub key: CacheKey,
    pub disk: usize,
    pub tenant: &'a str,
    pub object_len: usize,
    pub used: SystemTime,
    pub written: SystemTime,
    pub dirty: bool,
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
            let is_busy = state.writing.contains_key(&key) || state.leaving.contains_key(&key);
            if is_busy || self.entries.contains_key(&key) || state.removals.has(&key) {
                stale.push(Gone { disk, key });
                continue;
            }
            let bytes = file_bytes(one.object_len);
            let tenant = state.tenants.number(one.tenant);
            state.tenants.take_bytes(tenant, bytes);
            state.disks[disk].bytes += bytes;
            let age = today.duration_since(one.written).unwrap_or_default();
            let entry = Entry {
                disk,
                tenant,
                bytes,
                expires: self
                    .limits
                    .ttl
                    .and_then(|ttl| now.checked_add(ttl.saturating_sub(age))),
                serial: state.serial(),
            };
            self.put(&mut state, key, entry, one.dirty);
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
