//! The order in which chunks come to the end of their time.

use std::collections::VecDeque;

use tokio::time::Instant;

use crate::format::ChunkId;

/// Whose time is over next. All have the same TTL, so it is the order in which they were written. Chunks that went before
/// their time stay in line for a while.
#[derive(Default)]
pub(super) struct Expiry(VecDeque<(Instant, ChunkId, u64)>);

/// In line beyond twice those that are there.
const SLACK: usize = 1024;

impl Expiry {
    pub fn push(&mut self, expires: Instant, key: ChunkId, serial: u64) {
        self.0.push_back((expires, key, serial));
    }

    pub fn push_first(&mut self, expires: Instant, key: ChunkId, serial: u64) {
        self.0.push_front((expires, key, serial));
    }

    /// The next whose time is over, as key and serial.
    pub fn pop_due(&mut self, now: Instant) -> Option<(ChunkId, u64)> {
        self.0.front().filter(|(expires, ..)| *expires <= now)?;
        self.0.pop_front().map(|(_, key, serial)| (key, serial))
    }

    /// For what was not pushed in order.
    pub fn sort(&mut self) {
        self.0.make_contiguous().sort_by_key(|(expires, ..)| *expires);
    }

    /// Forgets those that are gone, when they are more than the `live` ones: O(1) for each that was pushed.
    pub fn trim(&mut self, live: usize, is_live: impl Fn(&ChunkId, u64) -> bool) {
        if self.0.len() > live.saturating_mul(2).saturating_add(SLACK) {
            self.0.retain(|(_, key, serial)| is_live(key, *serial));
        }
    }
}
