//! Memory that holds an object, as copies read and write it.

use crate::arena::{AttachedSlot, Slot, SlotMut};

/// Memory with (a part of) a chunk's object, which a load reads.
///
/// # Safety
/// For as long as the value lives, moved or not, the bytes are mapped, stay in place and are not written.
pub unsafe trait Source: Send + 'static {
    fn bytes(&self) -> *const [u8];
}

/// Memory that a store writes a chunk's object to.
///
/// # Safety
/// For as long as the value lives, moved or not, the bytes are mapped, stay in place and are neither read nor
/// written by anything else.
pub unsafe trait Target: Send + 'static {
    fn bytes(&mut self) -> *mut [u8];
}

// SAFETY: a slot's lease keeps the mapping, and no `SlotMut` overlaps a `Slot`.
unsafe impl Source for Slot {
    fn bytes(&self) -> *const [u8] {
        &raw const **self
    }
}

// SAFETY: a slot's lease keeps the mapping, and a `SlotMut` is the only handle to its bytes.
unsafe impl Target for SlotMut {
    fn bytes(&mut self) -> *mut [u8] {
        &raw mut **self
    }
}

// SAFETY: it keeps the mapping; by the slot protocol a slot that is leased for a load is not written.
unsafe impl Source for AttachedSlot {
    fn bytes(&self) -> *const [u8] {
        self.as_ptr()
    }
}

// SAFETY: it keeps the mapping; by the slot protocol no other process touches a rank's own bytes of a reserved slot
// until the rank commits.
unsafe impl Target for AttachedSlot {
    fn bytes(&mut self) -> *mut [u8] {
        self.as_ptr()
    }
}

// SAFETY: its bytes are on the heap, and stay there while it is moved.
unsafe impl Source for Vec<u8> {
    fn bytes(&self) -> *const [u8] {
        &raw const **self
    }
}

// SAFETY: as above, and it is the only handle to them.
unsafe impl Target for Vec<u8> {
    fn bytes(&mut self) -> *mut [u8] {
        &raw mut **self
    }
}
