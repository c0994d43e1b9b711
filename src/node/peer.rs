//! Whether the process at the other end of a socket is still there.

use std::os::fd::OwnedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// A process, told apart from any later one with its number.
#[derive(Debug)]
pub struct Peer(OwnedFd);

impl Peer {
    /// None where the system can't tell: another PID namespace, an old kernel.
    pub fn new(pid: i32) -> Option<Self> {
        let fd = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty()).ok()?;
        Some(Self(fd))
    }

    /// However it ended.
    pub fn is_gone(&self) -> bool {
        // Readable is what a pidfd becomes when its process ends.
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
    }
}
