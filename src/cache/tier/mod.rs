//! The tiers of a node above S3: chunks in memory, in the slots they came in, and on local disks.
//!
//! The tiers keep and find; what goes up and down between them is the gateway's business. Chunks from memory
//! were verified before they came there; chunks from a disk are still to be verified.

pub mod disk;
mod events;
mod memory;
pub mod policy;
mod prompts;
mod removals;

pub use disk::{
    Backlog, Below, Disk, DiskError, DiskOptions, DiskState, DiskStats, PathStats, Unsent, Wrote,
};
pub use events::{EventOptions, KvEvents};
pub use memory::{Memory, MemoryHit, MemoryOptions, MemoryStats, TenantShare};

/// `percent` hundredths of `bytes`, without overflow.
fn percent_of(bytes: u64, percent: u32) -> u64 {
    let percent = u64::from(percent);
    bytes / 100 * percent + bytes % 100 * percent / 100
}
