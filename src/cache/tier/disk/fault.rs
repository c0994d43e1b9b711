//! The meaning of an I/O error: for the file, the disk, or this process.

use std::io::{self, ErrorKind};

use rustix::io::Errno;

/// The meaning of an I/O error.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DiskFault {
    /// The file system has no room: it is fuller than configured, but works.
    Full,
    /// Direct I/O is refused.
    NotDirect,
    /// The process or the machine lacks something that has nothing to do with the disk.
    Process,
    /// A file shrank while it was read.
    Short,
    /// Everything else: the disk's own.
    Disk,
}

impl DiskFault {
    pub fn of(error: &io::Error) -> Self {
        if error.kind() == ErrorKind::UnexpectedEof {
            return Self::Short;
        }
        match Errno::from_io_error(error) {
            Some(Errno::NOSPC | Errno::DQUOT) => Self::Full,
            Some(Errno::INVAL | Errno::OPNOTSUPP) => Self::NotDirect,
            Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM | Errno::AGAIN) => Self::Process,
            _ => Self::Disk,
        }
    }
}
