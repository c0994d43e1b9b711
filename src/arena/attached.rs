//! The arena of another process, mapped into this one: what an engine sees of its node. Bytes are copied in and out; the
//! slot protocol says when.

use std::any::Any;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};

use memmap2::{MmapOptions, MmapRaw};

use super::SLOT_ALIGN;
use super::front::{BootId, HEADER_LEN, MAGIC, VERSION};

/// An arena of another process, mapped into this one. The slot protocol decides when which bytes may be read or written:
/// nothing here can tell whose a slot is.
#[derive(Debug)]
pub struct AttachedArena {
    map: MmapRaw,
    slots: std::ops::Range<usize>,
}

/// Bytes of a slot in another process's arena. Keeps the mapping; whose the slot is, is for the slot protocol to say.
#[derive(Debug)]
pub struct AttachedSlot {
    arena: Arc<AttachedArena>,
    at: usize,
    len: usize,
    /// The mapping that the slot is lent by; kept until the slot goes.
    _lender: Option<Arc<dyn Any + Send + Sync>>,
}

/// The file is not the arena that was meant.
#[derive(Debug, thiserror::Error)]
pub enum AttachedError {
    #[error("can't map the arena {}: {source}. Its file has the access rights of [api] socket_mode", path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("{} is not an arena that this kvgate can map: {what}", path.display())]
    Other { path: PathBuf, what: String },
    #[error(
        "the arena {} has version {theirs}, and the engine's kvgate maps version {VERSION}: the daemon is the {} one. Install \
         the same version of kvgate on both sides, the daemon's program and the engine's wheel, and start both anew; until \
         then the engine computes everything itself",
        path.display(), age(*theirs)
    )]
    Version { path: PathBuf, theirs: u32 },
    #[error("{at} and {len} bytes are not in the arena's slots")]
    Outside { at: usize, len: usize },
}

/// Of a daemon whose arena has this version.
fn age(theirs: u32) -> &'static str {
    if theirs > VERSION { "newer" } else { "older" }
}

impl AttachedArena {
    /// Maps the arena at `path`, which must be the one with this boot id: a start makes a new one.
    pub fn map(path: &Path, boot_id: BootId) -> Result<Self, AttachedError> {
        let fail = |source| AttachedError::File {
            path: path.into(),
            source,
        };
        let other = |what: String| AttachedError::Other {
            path: path.into(),
            what,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(fail)?;
        let len = file.metadata().map_err(fail)?.len();
        let len = usize::try_from(len).map_err(|_| other("it is too large".into()))?;
        if len < SLOT_ALIGN {
            return Err(other("it is too short".into()));
        }
        let map = MmapOptions::new().len(len).map_raw(&file).map_err(fail)?;
        let mut header = [0; HEADER_LEN];
        // SAFETY: the mapping has a page at least; the header was written before anybody was told of the file, and is
        // never changed.
        unsafe { std::ptr::copy_nonoverlapping(map.as_ptr(), header.as_mut_ptr(), HEADER_LEN) };
        let u32_at = |at: usize| header[at..at + 4].try_into().map_or(0, u32::from_le_bytes);
        let offset_at = |at: usize| {
            let value = header[at..at + 8].try_into().map_or(0, u64::from_le_bytes);
            usize::try_from(value).unwrap_or(usize::MAX)
        };
        if &header[..8] != MAGIC {
            return Err(other("it is no arena of kvgate, whatever it is".into()));
        }
        let theirs = u32_at(8);
        if theirs != VERSION {
            return Err(AttachedError::Version {
                path: path.into(),
                theirs,
            });
        }
        let mut id = [0; 16];
        id.copy_from_slice(&header[16..32]);
        if BootId::from_bytes(id) != boot_id {
            return Err(other(format!(
                "it is of another start than {boot_id}; attach again"
            )));
        }
        let slots = offset_at(40)..offset_at(48);
        if slots.start > slots.end || slots.end > len || offset_at(32) != SLOT_ALIGN {
            return Err(other("its header is damaged".into()));
        }
        Ok(Self { map, slots })
    }

    /// Bytes of a slot that this process has a lease on, or of one that it reserved.
    pub fn slot(self: &Arc<Self>, at: usize, len: usize) -> Result<AttachedSlot, AttachedError> {
        self.check(at, len)?;
        Ok(AttachedSlot {
            arena: Arc::clone(self),
            at,
            len,
            _lender: None,
        })
    }

    /// All of it, as it is mapped here.
    pub fn as_ptr(&self) -> *mut [u8] {
        std::ptr::slice_from_raw_parts_mut(self.map.as_mut_ptr(), self.map.len())
    }

    /// Copies out of a slot. The holder of a lease on it reads verified bytes.
    pub fn copy_out(&self, at: usize, to: &mut [u8]) -> Result<(), AttachedError> {
        self.check(at, to.len())?;
        // SAFETY: the bytes are in the mapping, and `to` is memory of this process.
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(at), to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Copies into a slot that was reserved.
    pub fn copy_in(&self, at: usize, from: &[u8]) -> Result<(), AttachedError> {
        self.check(at, from.len())?;
        // SAFETY: as in `copy_out`, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.map.as_mut_ptr().add(at), from.len()) };
        Ok(())
    }

    /// The generation of the slot that starts there; 0 if none does. If it is another one after a copy than before, the copy
    /// has bytes of another slot.
    pub fn generation(&self, slot: usize) -> Result<u64, AttachedError> {
        self.check(slot, SLOT_ALIGN)?;
        // SAFETY: the table has a u64 for each page of the slots, and begins at a page.
        #[expect(
            clippy::cast_ptr_alignment,
            reason = "a mapping begins at a page, and the table too"
        )]
        let table = self.map.as_ptr().wrapping_add(SLOT_ALIGN).cast::<AtomicU64>();
        let index = (slot - self.slots.start) / SLOT_ALIGN;
        // SAFETY: the table has a u64 for each page of the slots.
        let cell = unsafe { &*table.add(index) };
        // Bytes that were copied before this call were read before the generation is.
        fence(Ordering::Acquire);
        Ok(cell.load(Ordering::Acquire))
    }

    fn check(&self, at: usize, len: usize) -> Result<(), AttachedError> {
        let end = at.checked_add(len).ok_or(AttachedError::Outside { at, len })?;
        match self.slots.start <= at && end <= self.slots.end {
            true => Ok(()),
            false => Err(AttachedError::Outside { at, len }),
        }
    }
}

impl AttachedSlot {
    /// Keeps what the slot is lent by, too: a session, whose end would be the lease's.
    #[must_use]
    pub fn kept_by(self, lender: Arc<impl Any + Send + Sync>) -> Self {
        Self {
            _lender: Some(lender),
            ..self
        }
    }

    pub fn as_ptr(&self) -> *mut [u8] {
        let start = self.arena.map.as_mut_ptr().wrapping_add(self.at);
        std::ptr::slice_from_raw_parts_mut(start, self.len)
    }
}
