//! The disk tier's limits.

use std::path::PathBuf;
use std::time::Duration;

use crate::cache::tier::percent_of;
use crate::protocol::EvictionPolicy;

/// The disk tier's limits.
#[derive(Debug, Clone)]
pub struct DiskOptions {
    /// A folder on each disk; made if missing.
    pub paths: Vec<PathBuf>,
    /// For each path.
    pub size_bytes: u64,
    /// Eviction keeps each disk at or below this share of its size, in a hundred.
    pub watermark_percent: u32,
    pub policy: EvictionPolicy,
    /// How long an object is there after it was written.
    pub ttl: Option<Duration>,
    /// Failures of I/O in a row after which a disk is taken out; at least one.
    pub failures: u32,
    /// For one read or write, after which the disk is taken out: it hangs.
    pub timeout: Duration,
    /// After which a disk that was taken out is tried again.
    pub retry: Duration,
    /// Reads and writes at a time for each disk; at least one.
    pub depth: usize,
    /// Most bytes of files that were moved aside, on each disk: the oldest go first, the newest stays.
    pub lost_bytes: u64,
    /// The most that one tenant may have, over all disks together.
    pub tenant_bytes: Option<u64>,
    /// Chunks that an earlier life [declined](super::Below::Declines) must get to the tier below after all.
    pub sends_declined: bool,
}

impl Default for DiskOptions {
    /// No disks; with limits as the configuration has them.
    fn default() -> Self {
        Self {
            paths: Vec::new(),
            size_bytes: 100 << 30,
            watermark_percent: 95,
            policy: EvictionPolicy::Reuse,
            ttl: None,
            failures: 3,
            timeout: Duration::from_secs(30),
            retry: Duration::from_mins(1),
            depth: 16,
            lost_bytes: 1 << 30,
            tenant_bytes: None,
            sends_declined: false,
        }
    }
}

impl DiskOptions {
    /// The bytes that eviction leaves on each disk at most.
    pub(super) fn watermark_bytes(&self) -> u64 {
        percent_of(self.size_bytes, self.watermark_percent)
    }
}
