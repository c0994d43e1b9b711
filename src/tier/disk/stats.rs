use std::path::PathBuf;

/// Figures of the tier since it was opened.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct DiskStats {
    pub disks: Vec<PathStats>,
}

/// Of one disk. Bytes are whole blocks of 4096, as files take them.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize)]
pub struct PathStats {
    pub path: PathBuf,
    pub state: DiskState,
    pub size_bytes: u64,
    /// Of the chunks that are there, and of those that are being written.
    pub bytes: u64,
    pub chunks: u64,
    /// Of them, those that the tier below does not have yet.
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
