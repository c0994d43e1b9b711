//! The index's view of one disk: bytes, limits, and whether the file system is full.

use std::path::PathBuf;

use crate::cache::tier::disk::options::DiskOptions;
use crate::cache::tier::disk::stats::{DiskState, PathStats};
use crate::cache::tier::policy::Queue;
use crate::format::ChunkId;

/// The index's view of one disk.
pub(super) struct Shelf {
    path: PathBuf,
    size_bytes: u64,
    /// The bytes that eviction leaves at most, as configured.
    watermark_bytes: u64,
    /// The same, as far as the file system has room: it may be shared with others.
    limit_bytes: u64,
    pub queue: Queue<ChunkId>,
    /// Bytes of the chunks that are there, and of the writes that have taken their room.
    pub bytes: u64,
    /// Bytes of the writes that wait for their turn.
    pub queued_bytes: u64,
    /// When it was last chosen for a write, as a serial.
    pub chosen: u64,
    /// In a row.
    pub failures: u32,
    /// Why it was taken out.
    pub failed: Option<String>,
    pub chunks: u64,
    pub dirty: u64,
    pub evicted: u64,
    pub expired: u64,
    pub errors: u64,
    pub reads: u64,
    pub writes: u64,
}

impl Shelf {
    pub fn new(path: PathBuf, options: &DiskOptions) -> Self {
        Self {
            path,
            size_bytes: options.size_bytes,
            watermark_bytes: options.watermark_bytes(),
            limit_bytes: options.watermark_bytes(),
            queue: Queue::new(options.policy),
            bytes: 0,
            queued_bytes: 0,
            chosen: 0,
            failures: 0,
            failed: None,
            chunks: 0,
            dirty: 0,
            evicted: 0,
            expired: 0,
            errors: 0,
            reads: 0,
            writes: 0,
        }
    }

    /// For new objects, without evicting any.
    pub fn room(&self) -> u64 {
        self.limit_bytes.saturating_sub(self.bytes + self.queued_bytes)
    }

    /// Whether something must be evicted.
    pub fn is_over(&self) -> bool {
        self.bytes > self.limit_bytes
    }

    /// The file system is full with what is there now.
    pub fn is_full(&mut self, bytes: u64) {
        self.limit_bytes = self.limit_bytes.min(bytes);
    }

    /// The file system is given another try bit by bit: a quarter of each object that was to be written.
    pub fn regrow(&mut self, object_bytes: u64) {
        self.limit_bytes = self.watermark_bytes.min(self.limit_bytes + object_bytes / 4);
    }

    pub fn stats(&self) -> PathStats {
        PathStats {
            path: self.path.clone(),
            state: self.failed.clone().map_or(DiskState::Ok, DiskState::Failed),
            size_bytes: self.size_bytes,
            bytes: self.bytes,
            chunks: self.chunks,
            dirty: self.dirty,
            evicted: self.evicted,
            expired: self.expired,
            errors: self.errors,
            reads: self.reads,
            writes: self.writes,
        }
    }
}
