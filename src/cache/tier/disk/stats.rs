//! Figures of the disk tier.

use std::path::PathBuf;

use crate::format::{ChunkHash, ChunkId, Space};

/// Whether a disk has what the tier below has not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Unsent {
    No,
    Here,
    /// That disk was taken out.
    Out,
}

/// Chunks that the disks had and the tier below had not, when the disks were read.
#[derive(Debug, Default)]
pub struct Backlog {
    /// The oldest first.
    pub chunks: Vec<(Space, ChunkHash)>,
    /// Their space is not known: its `space.json` is missing, and they wait for [`Disk::adopt`](super::Disk::adopt).
    pub homeless: Vec<ChunkId>,
    /// They were there before the disk was taken out, and are not any more.
    pub missing: Vec<ChunkId>,
    /// Files that were no whole chunks, and were moved aside.
    pub damaged: u64,
}

impl Backlog {
    pub(super) fn add(&mut self, more: Self) {
        self.chunks.extend(more.chunks);
        self.homeless.extend(more.homeless);
        self.missing.extend(more.missing);
        self.damaged += more.damaged;
    }
}

/// Figures of the tier since it was opened.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct DiskStats {
    pub disks: Vec<PathStats>,
}

/// Figures of one disk. Bytes are whole blocks of 4096, as files take them.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct PathStats {
    pub path: PathBuf,
    pub state: DiskState,
    pub size_bytes: u64,
    /// Bytes of the chunks that are there, and of those that are being written.
    pub bytes: u64,
    pub chunks: u64,
    /// Chunks that the tier below does not have yet, also on a disk that was taken out.
    pub dirty: u64,
    /// Chunks that made room for others.
    pub evicted: u64,
    /// Chunks that were removed because of their age.
    pub expired: u64,
    /// Failures of I/O.
    pub errors: u64,
    /// Chunks that were read.
    pub reads: u64,
    /// Chunks that were written.
    pub writes: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskState {
    #[default]
    Ok,
    /// Taken out, with the reason.
    Failed(String),
}
