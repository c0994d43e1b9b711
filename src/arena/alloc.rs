use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use range_alloc::RangeAllocator;
use tokio::sync::{Notify, OwnedMutexGuard};

use super::SLOT_ALIGN;
use super::mapping::{ArenaError, Mapping};
use super::slot::SlotMut;

/// How the arena is made.
#[derive(Debug, Clone, Default)]
pub struct ArenaOptions {
    /// Bytes, used in whole pages.
    pub size: usize,
    /// A named file that other processes can map; else an unnamed one.
    pub path: Option<PathBuf>,
    pub huge_pages: bool,
    /// Touch every page now instead of at its first use.
    pub prefault: bool,
    pub mlock: bool,
}

/// Figures since the start. Bytes count whole pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, serde::Serialize)]
pub struct ArenaStats {
    pub size_bytes: usize,
    pub used_bytes: usize,
    pub used_bytes_peak: usize,
    pub slots: usize,
    pub slots_peak: usize,
    /// Reservations that found no room.
    pub refused: u64,
}

/// See the [module](super). Cheap to clone.
#[derive(Clone)]
pub struct Arena(Arc<Shared>);

pub(super) struct Shared {
    mapping: Mapping,
    state: Mutex<State>,
    /// Wakes the one ticket that waits.
    freed: Notify,
    turn: Arc<tokio::sync::Mutex<()>>,
}

struct State {
    free: RangeAllocator<usize>,
    stats: ArenaStats,
}

/// The right to wait for slots. One at a time, in the order they were asked for.
pub struct Ticket {
    arena: Arena,
    _turn: OwnedMutexGuard<()>,
}

impl Arena {
    pub fn new(options: &ArenaOptions) -> Result<Self, ArenaError> {
        let mapping = Mapping::new(options)?;
        let size = mapping.len() / SLOT_ALIGN * SLOT_ALIGN;
        let stats = ArenaStats {
            size_bytes: size,
            ..ArenaStats::default()
        };
        let state = Mutex::new(State {
            free: RangeAllocator::new(0..size),
            stats,
        });
        Ok(Self(Arc::new(Shared {
            mapping,
            state,
            freed: Notify::new(),
            turn: Arc::default(),
        })))
    }

    /// A slot of `len` bytes, if there is room now. Its bytes are whatever was there before.
    pub fn try_reserve(&self, len: usize) -> Option<SlotMut> {
        assert!(len > 0, "a slot of no bytes");
        let reserved_len = len.next_multiple_of(SLOT_ALIGN);
        let mut state = self.0.lock();
        let Ok(reserved) = state.free.allocate_range(reserved_len) else {
            state.stats.refused += 1;
            return None;
        };
        let stats = &mut state.stats;
        stats.used_bytes += reserved_len;
        stats.slots += 1;
        stats.used_bytes_peak = stats.used_bytes_peak.max(stats.used_bytes);
        stats.slots_peak = stats.slots_peak.max(stats.slots);
        drop(state);
        Some(SlotMut::new(
            Lease {
                arena: Arc::clone(&self.0),
                reserved,
            },
            len,
        ))
    }

    /// Waits for its turn to wait for slots.
    pub async fn ticket(&self) -> Ticket {
        let turn = Arc::clone(&self.0.turn).lock_owned().await;
        Ticket {
            arena: self.clone(),
            _turn: turn,
        }
    }

    pub fn stats(&self) -> ArenaStats {
        self.0.lock().stats
    }

    pub fn size(&self) -> usize {
        self.stats().size_bytes
    }

    pub fn path(&self) -> Option<&Path> {
        self.0.mapping.path()
    }
}

impl Ticket {
    /// A slot of `len` bytes as soon as there is room; never if it is larger than the arena. Dropping the future
    /// gives up.
    pub async fn reserve(&self, len: usize) -> SlotMut {
        loop {
            if let Some(slot) = self.arena.try_reserve(len) {
                return slot;
            }
            // A release between the try and here has left its permit.
            self.arena.0.freed.notified().await;
        }
    }
}

/// Bytes of the arena that are taken, for as long as any handle to them lives.
pub(super) struct Lease {
    arena: Arc<Shared>,
    /// Whole pages.
    pub reserved: Range<usize>,
}

impl Lease {
    pub fn base(&self) -> *mut u8 {
        self.arena.mapping.base()
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.arena.lock();
        state.free.free_range(self.reserved.clone());
        state.stats.used_bytes -= self.reserved.len();
        state.stats.slots -= 1;
        drop(state);
        self.arena.freed.notify_one();
    }
}

impl Shared {
    /// No panic can leave the state half-changed, so a poisoned lock is as good.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
