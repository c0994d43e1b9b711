//! The bytes that the connections carried.

use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

/// The bytes that the connections carried so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Traffic {
    /// Connections that were made.
    pub connections: u64,
    /// Requests sent again because a kept connection turned out to be closed.
    pub stale: u64,
    /// Bytes of bodies that landed in slots.
    pub landed_bytes: u64,
    /// Bytes that were copied in user space: they came with the head, or through TLS.
    pub copied_bytes: u64,
}

impl Traffic {
    /// The difference since `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            connections: self.connections - earlier.connections,
            stale: self.stale - earlier.stale,
            landed_bytes: self.landed_bytes - earlier.landed_bytes,
            copied_bytes: self.copied_bytes - earlier.copied_bytes,
        }
    }
}

/// Counts [`Traffic`].
#[derive(Debug, Default)]
pub(super) struct NetCounters {
    pub connections: AtomicU64,
    pub stale: AtomicU64,
    pub landed_bytes: AtomicU64,
    pub copied_bytes: AtomicU64,
}

pub(super) fn add(counter: &AtomicU64, more: usize) {
    counter.fetch_add(more as u64, Ordering::Relaxed);
}

impl NetCounters {
    pub fn read(&self) -> Traffic {
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Traffic {
            connections: read(&self.connections),
            stale: read(&self.stale),
            landed_bytes: read(&self.landed_bytes),
            copied_bytes: read(&self.copied_bytes),
        }
    }
}
