//! What this node does for `[gc]`: whether it leads, and what it has removed from S3. `/metrics` reads it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Figures since the start.
#[derive(Debug, Default)]
pub struct GcStats {
    leads: AtomicBool,
    removed: AtomicU64,
    removed_bytes: AtomicU64,
    failed: AtomicU64,
}

impl GcStats {
    pub fn set_leads(&self, leads: bool) {
        self.leads.store(leads, Ordering::Relaxed);
    }

    pub fn leads(&self) -> bool {
        self.leads.load(Ordering::Relaxed)
    }

    /// Objects that were removed, and their bytes.
    pub fn add_removed(&self, objects: u64, bytes: u64) {
        self.removed.fetch_add(objects, Ordering::Relaxed);
        self.removed_bytes.fetch_add(bytes, Ordering::Relaxed);
    }

    /// A run ended with an error.
    pub fn add_failed(&self) {
        self.failed.fetch_add(1, Ordering::Relaxed);
    }

    pub fn removed(&self) -> u64 {
        self.removed.load(Ordering::Relaxed)
    }

    pub fn removed_bytes(&self) -> u64 {
        self.removed_bytes.load(Ordering::Relaxed)
    }

    pub fn failed(&self) -> u64 {
        self.failed.load(Ordering::Relaxed)
    }
}
