//! Handles to the bytes of a slot. `SlotMut` is the only writer and can be split; `Slot` is shared and read-only. The
//! memory goes back with the last handle.

use std::ops::{Deref, DerefMut, Range};
use std::sync::Arc;

use super::alloc::Lease;

/// The only handle to some bytes of a slot: may write them. Several together may make up the slot.
pub struct SlotMut {
    lease: Arc<Lease>,
    /// In the arena; inside `lease.reserved`, and disjoint from every other handle's to the same lease.
    range: Range<usize>,
}

/// A shared, read-only handle to bytes of a slot. Cheap to clone.
#[derive(Clone)]
pub struct Slot {
    /// None only while it is dropped.
    lease: Option<Arc<Lease>>,
    /// Disjoint from every [`SlotMut`]'s range.
    range: Range<usize>,
}

impl SlotMut {
    pub(super) fn new(lease: Lease, len: usize) -> Self {
        let range = lease.reserved.start..lease.reserved.start + len;
        Self {
            lease: Arc::new(lease),
            range,
        }
    }

    /// Cuts it in two: keeps the first `at` bytes, returns the rest. Panics past the end.
    #[must_use]
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.range.len(), "split at {at} of {}", self.range.len());
        let middle = self.range.start + at;
        let rest = Self {
            lease: Arc::clone(&self.lease),
            range: middle..self.range.end,
        };
        self.range.end = middle;
        rest
    }

    // By value: the part is gone afterwards.
    #[expect(clippy::needless_pass_by_value)]
    /// Joins a part that [`split_off`](Self::split_off) cut off. Panics if `rest` is not the part that follows.
    pub fn join(&mut self, rest: Self) {
        let follows = Arc::ptr_eq(&self.lease, &rest.lease) && self.range.end == rest.range.start;
        assert!(follows, "joined parts must be neighbours in one slot");
        self.range.end = rest.range.end;
    }

    /// Gives up writing, for good.
    pub fn freeze(self) -> Slot {
        Slot {
            lease: Some(self.lease),
            range: self.range,
        }
    }

    /// Where it starts in the arena's file, in bytes.
    pub fn offset(&self) -> usize {
        self.range.start
    }

    /// Where the whole slot starts.
    pub fn slot_offset(&self) -> usize {
        self.lease.reserved.start
    }

    /// The generation of the whole slot: no other slot of this arena ever has it.
    pub fn generation(&self) -> u64 {
        self.lease.generation
    }
}

impl Slot {
    fn lease(&self) -> &Arc<Lease> {
        self.lease.as_ref().expect("a slot that is not dropped")
    }

    /// Puts a part and the one that follows together. Panics if it is not what follows.
    #[must_use]
    pub fn join(&self, rest: &Self) -> Self {
        let follows = Arc::ptr_eq(self.lease(), rest.lease()) && self.range.end == rest.range.start;
        assert!(follows, "joined parts must be neighbours in one slot");
        Self {
            lease: self.lease.clone(),
            range: self.range.start..rest.range.end,
        }
    }

    /// Whether there is any handle to the slot besides the `own` ones that the caller has.
    pub fn is_used_by_others(&self, own: usize) -> bool {
        Arc::strong_count(self.lease()) > own
    }

    /// Where the whole slot starts.
    pub fn slot_offset(&self) -> usize {
        self.lease().reserved.start
    }

    /// The generation of the whole slot: no other slot of this arena ever has it.
    pub fn generation(&self) -> u64 {
        self.lease().generation
    }

    /// A part of it. Panics past the end.
    #[must_use]
    pub fn slice(&self, part: Range<usize>) -> Self {
        assert!(
            part.start <= part.end && part.end <= self.range.len(),
            "{part:?} of {}",
            self.range.len()
        );
        let range = self.range.start + part.start..self.range.start + part.end;
        Self {
            lease: self.lease.clone(),
            range,
        }
    }

    /// Where it starts in the arena's file, in bytes.
    pub fn offset(&self) -> usize {
        self.range.start
    }
}

impl Deref for SlotMut {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range is inside the mapping, which the lease keeps alive, and no other handle can write it:
        // ranges of `SlotMut`s are disjoint, and a `Slot` comes only from one that was given up. Other processes
        // that map the arena are bound by the slot protocol (`node/ledger.rs`) not to write slots that aren't theirs.
        unsafe { std::slice::from_raw_parts(self.lease.base().add(self.range.start), self.range.len()) }
    }
}

impl DerefMut for SlotMut {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `deref`, and `&mut self` makes this the only reference to the range.
        unsafe { std::slice::from_raw_parts_mut(self.lease.base().add(self.range.start), self.range.len()) }
    }
}

impl Deref for Slot {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        // SAFETY: the range is inside the mapping, which the lease keeps alive, and no `SlotMut` overlaps a `Slot`.
        unsafe { std::slice::from_raw_parts(self.lease().base().add(self.range.start), self.range.len()) }
    }
}

/// Wakes the load that waits for a slot. It may take this one now, if only the memory tier still has a handle.
impl Drop for Slot {
    fn drop(&mut self) {
        if let Some(lease) = self.lease.take() {
            let arena = lease.arena();
            drop(lease);
            arena.nudge();
        }
    }
}

/// For `bytes::Bytes::from_owner`: request bodies straight from the slot.
impl AsRef<[u8]> for Slot {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl std::fmt::Debug for SlotMut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SlotMut({:?})", self.range)
    }
}

impl std::fmt::Debug for Slot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Slot({:?})", self.range)
    }
}
