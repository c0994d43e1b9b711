//! The process at the other end of a socket: its identity, and whether it is still there.

use std::io;
use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process as the kernel names it when it connects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Process {
    /// None if the process is in another PID namespace.
    pub pid: Option<i32>,
    pub uid: u32,
}

/// A process, told apart from any later one with its number.
#[derive(Debug)]
pub struct PeerProcess(OwnedFd);

impl PeerProcess {
    /// None where the system can't watch the process: it is in another PID namespace, gone already, or the kernel
    /// is old. An error where watching failed only this time.
    pub fn new(process: Process) -> io::Result<Option<Self>> {
        let Some(pid) = process.pid.and_then(Pid::from_raw) else {
            return Ok(None);
        };
        match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(fd) => Ok(Some(Self(fd))),
            Err(Errno::SRCH | Errno::NOSYS | Errno::PERM | Errno::INVAL) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Whether the process has ended.
    pub fn is_gone(&self) -> bool {
        // A pidfd becomes readable when its process ends.
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}
