//! Fewer wake-ups: the kernel says that a socket can be read when many bytes are there, not at the first one.

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// Where the kernel copies into the slot, more brings nothing: `bench/landing.py` has the cost of a GiB.
const PLAIN_BYTES: usize = 256 << 10;
/// TLS is slower, so more bytes come while nobody waits for them.
const TLS_BYTES: usize = 2 << 20;

#[expect(clippy::cast_possible_truncation, reason = "4")]
const VALUE_LEN: libc::socklen_t = size_of::<libc::c_int>() as libc::socklen_t;

/// `SO_RCVLOWAT` of one socket.
pub struct LowWater {
    most: usize,
    now: usize,
}

impl LowWater {
    /// For a new socket whose bytes the kernel copies into the slot.
    pub fn plain() -> Self {
        Self::new(PLAIN_BYTES)
    }

    /// For a new socket whose bytes are deciphered into the slot.
    pub(super) fn tls() -> Self {
        Self::new(TLS_BYTES)
    }

    fn new(most: usize) -> Self {
        Self { most, now: 1 }
    }

    /// At least `coming` bytes will still come: it is enough to wake up when many of them are there. 0: at the first byte.
    /// Errors and the end wake up at once, with any value.
    pub fn expect(&mut self, socket: &impl AsFd, coming: usize) -> io::Result<()> {
        let bytes = coming.clamp(1, self.most);
        if bytes == self.now {
            return Ok(());
        }
        let value = libc::c_int::try_from(bytes).unwrap_or(1);
        // SAFETY: the descriptor is open while it is borrowed, and the value is an int that lives through the call.
        let done = unsafe {
            libc::setsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_RCVLOWAT,
                (&raw const value).cast(),
                VALUE_LEN,
            )
        };
        if done != 0 {
            return Err(io::Error::last_os_error());
        }
        self.now = bytes;
        Ok(())
    }
}
