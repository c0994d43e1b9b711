//! The first pages of the arena's file: what it is, and the generation of every slot.
//!
//! | bytes | what |
//! |---|---|
//! | 0..8 | `KVGARENA` |
//! | 8..12 | version of this table, u32 little-endian: 1 |
//! | 12..16 | bytes of a page, to which slots are aligned: 4096 |
//! | 16..32 | boot id |
//! | 32..40 | where the generations begin |
//! | 40..48 | where the slots begin |
//! | 48..56 | where they end |
//!
//! A generation is a u64, one for each page of the slots, and counts where a slot starts there: 0 while it is free, else a
//! number that no other slot of this arena ever had. A process compares it
//! after a copy: another number means that the copy has bytes of another slot.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use super::SLOT_ALIGN;
use super::mapping::Mapping;
use crate::format::hex;

pub(super) const MAGIC: &[u8; 8] = b"KVGARENA";
pub(super) const VERSION: u32 = 1;
const PAGE: u32 = 4096;
pub(super) const HEADER_LEN: usize = 56;

/// Tells an arena from every other one: a start makes a new one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct BootId([u8; 16]);

impl BootId {
    fn random() -> Self {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&fastrand::u64(..).to_le_bytes());
        id[8..].copy_from_slice(&fastrand::u64(..).to_le_bytes());
        Self(id)
    }

    pub(super) fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    /// From 32 hex digits.
    pub fn from_hex(text: &str) -> Option<Self> {
        hex::decode("a boot id", text).ok().map(Self)
    }
}

impl fmt::Display for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

impl fmt::Debug for BootId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "BootId({self})")
    }
}

pub(super) struct Front {
    boot_id: BootId,
    generations: *const AtomicU64,
    slots_at: usize,
}

// SAFETY: the pointer is to atomics in the mapping, which lives as long as the arena that holds both.
unsafe impl Send for Front {}
// SAFETY: as above; atomics may be shared.
unsafe impl Sync for Front {}

impl Front {
    /// Bytes in front of `slots_len` bytes of slots.
    pub fn len(slots_len: usize) -> usize {
        let table = slots_len / SLOT_ALIGN * size_of::<u64>();
        SLOT_ALIGN + table.next_multiple_of(SLOT_ALIGN)
    }

    /// Writes the header. The mapping has [`len`](Self::len) and `slots_len` bytes at least, all zero, and outlives this.
    pub fn new(mapping: &Mapping, slots_len: usize) -> Self {
        let boot_id = BootId::random();
        let slots_at = Self::len(slots_len);
        let mut header = [0; HEADER_LEN];
        header[..8].copy_from_slice(MAGIC);
        header[8..12].copy_from_slice(&VERSION.to_le_bytes());
        header[12..16].copy_from_slice(&PAGE.to_le_bytes());
        header[16..32].copy_from_slice(&boot_id.0);
        for (at, value) in [(32, SLOT_ALIGN), (40, slots_at), (48, slots_at + slots_len)] {
            header[at..at + 8].copy_from_slice(&(value as u64).to_le_bytes());
        }
        // SAFETY: the mapping has at least a page, and nobody else knows of it yet.
        unsafe { std::ptr::copy_nonoverlapping(header.as_ptr(), mapping.base(), HEADER_LEN) };
        // SAFETY: the table lies inside the mapping, behind the first page.
        let table = unsafe { mapping.base().add(SLOT_ALIGN) };
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "a mapping begins at a page, and the table too"
        )]
        let generations = table.cast::<AtomicU64>();
        Self {
            boot_id,
            generations,
            slots_at,
        }
    }

    pub fn boot_id(&self) -> BootId {
        self.boot_id
    }

    /// `offset` is where a slot starts, in the mapping.
    pub fn set_generation(&self, offset: usize, generation: u64) {
        let index = (offset - self.slots_at) / SLOT_ALIGN;
        // SAFETY: slots start inside the mapping, and the table has a place for each of their pages. Others only read it.
        let cell = unsafe { &*self.generations.add(index) };
        cell.store(generation, Ordering::Release);
    }
}
