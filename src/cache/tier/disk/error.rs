//! Errors of the disk tier, for its callers.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use super::fault::DiskFault;

/// An error of the disk tier.
#[derive(Debug, thiserror::Error)]
pub enum DiskError {
    #[error("there is no disk to use: give [disk] paths at least one folder")]
    NoPaths,
    #[error("{} belongs to a kvgate that runs: give another folder in [disk] paths, or stop that one", path.display())]
    InUse { path: PathBuf },
    #[error(
        "none of the disks can be used: {}. Give [disk] paths folders that this user may write to",
        .reasons.join("; ")
    )]
    Unusable { reasons: Vec<String> },
    #[error("an object of this space has {expected} bytes, not {actual}: give a slot of that length")]
    Length { expected: usize, actual: usize },
    /// Not there, or not any more.
    #[error("it is not on a disk: load it from the tier below")]
    Absent,
    #[error("the file has {actual} bytes where {expected} were expected: load it from the tier below")]
    Damaged { expected: u64, actual: u64 },
    #[error(
        "{} did not answer within {time:?} and is taken out: check the disk (dmesg, smartctl), or allow more by [disk] timeout",
        path.display()
    )]
    Late { path: PathBuf, time: Duration },
    /// It was taken out while somebody waited for it.
    #[error("the disk was taken out: load it from the tier below")]
    Out,
    #[error(
        "can't {what} on {}: {source}. Check the disk (dmesg, smartctl); after some failures in a row it is taken out",
        path.display()
    )]
    Io {
        what: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

impl DiskError {
    /// Whether a read's error says that this very file is no good; else that the process lacks something, or the disk is out.
    pub fn condemns(&self) -> bool {
        match self {
            Self::Absent | Self::Damaged { .. } => true,
            Self::Io { source, .. } => DiskFault::of(source) != DiskFault::Process,
            _ => false,
        }
    }
}
