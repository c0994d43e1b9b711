//! The bench's check of a read: a CRC-64 over the stretches as they arrive, compared with the digest known in
//! advance.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::format::Crc64;
use crate::s3::net::BodyWatch;

/// Digests a read while it arrives.
struct Crc {
    crc: Crc64,
    seen: Arc<Seen>,
}

/// The length and digest of the bytes that arrived.
#[derive(Default)]
pub(super) struct Seen {
    crc: AtomicU64,
    len: AtomicU64,
}

/// A watch, and the place of its result once the landing has come back.
pub(super) fn watch() -> (Box<dyn BodyWatch>, Arc<Seen>) {
    let seen = Arc::new(Seen::default());
    let crc = Crc {
        crc: Crc64::new(),
        seen: Arc::clone(&seen),
    };
    (Box::new(crc), seen)
}

impl BodyWatch for Crc {
    fn arrived(&mut self, at: usize, bytes: &[u8]) {
        if at == 0 {
            self.crc = Crc64::new();
        }
        self.crc.update(bytes);
        // The landing is handed back through a channel or a lock, which orders these stores.
        self.seen.crc.store(self.crc.sum(), Ordering::Relaxed);
        self.seen.len.store((at + bytes.len()) as u64, Ordering::Relaxed);
    }
}

impl Seen {
    /// Whether exactly `len` bytes with this digest arrived.
    pub fn is(&self, len: u64, crc: u64) -> bool {
        self.len.load(Ordering::Relaxed) == len && self.crc.load(Ordering::Relaxed) == crc
    }

    /// Resets for the next read.
    pub fn clear(&self) {
        self.len.store(0, Ordering::Relaxed);
    }
}
