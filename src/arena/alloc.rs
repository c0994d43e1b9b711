//! The arena's memory, given out as slots. A best-fit allocator keeps the free ranges; one ticket at a time may wait for
//! room, so the oldest load always goes on.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use range_alloc::RangeAllocator;
use tokio::sync::{Notify, OwnedMutexGuard};

use super::SLOT_ALIGN;
use super::front::{BootId, Front};
use super::mapping::{ArenaError, Mapping};
use super::slot::SlotMut;

/// How the arena is made.
#[derive(Debug, Clone, Default)]
pub struct ArenaOptions {
    /// Bytes for slots, used in whole pages.
    pub size: usize,
    /// Of these, bytes that only the holder of the [`Ticket`] may take.
    pub ticket_bytes: usize,
    /// A named file that other processes can map; else an unnamed one.
    pub path: Option<PathBuf>,
    /// Access to that file; 0: its owner alone.
    pub mode: u32,
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
pub struct Arena(Arc<ArenaShared>);

pub(super) struct ArenaShared {
    mapping: Mapping,
    front: Front,
    state: Mutex<State>,
    /// Frees a slot that nobody uses, if there is one.
    pressure: OnceLock<Pressure>,
    /// Whether all that is taken stays taken.
    stuck: OnceLock<Box<dyn Fn() -> bool + Send + Sync>>,
    /// Wakes the one ticket that waits.
    freed: Notify,
    waiting: AtomicBool,
    turn: Arc<tokio::sync::Mutex<()>>,
}

type Pressure = Box<dyn Fn(Option<usize>) -> bool + Send + Sync>;

/// Slots that are freed at most for one that does not wait.
const FREED_MAX: usize = 64;

struct State {
    common: RangeAllocator<usize>,
    /// For the ticket's holder.
    reserve: RangeAllocator<usize>,
    generation: u64,
    stats: ArenaStats,
}

impl State {
    fn allocate(&mut self, len: usize, ticket: bool) -> Option<Range<usize>> {
        let common = self.common.allocate_range(len).ok();
        match ticket {
            true => common.or_else(|| self.reserve.allocate_range(len).ok()),
            false => common,
        }
    }

    fn free(&mut self, range: Range<usize>) {
        match range.start < self.common.initial_range().end {
            true => self.common.free_range(range),
            false => self.reserve.free_range(range),
        }
    }
}

/// The right to wait for slots. One at a time, in the order they were asked for.
pub struct Ticket {
    arena: Arena,
    _turn: OwnedMutexGuard<()>,
}

impl Arena {
    pub fn new(options: &ArenaOptions) -> Result<Self, ArenaError> {
        let size = options.size / SLOT_ALIGN * SLOT_ALIGN;
        if size == 0 {
            return Err(ArenaError::TooSmall { size: options.size });
        }
        let front_len = Front::len(size);
        let mapping = Mapping::new(options, front_len + size)?;
        let front = Front::new(&mapping, size);
        let stats = ArenaStats {
            size_bytes: size,
            ..ArenaStats::default()
        };
        let ticket_bytes = options.ticket_bytes.next_multiple_of(SLOT_ALIGN).min(size);
        let middle = front_len + size - ticket_bytes;
        let state = Mutex::new(State {
            common: RangeAllocator::new(front_len..middle),
            reserve: RangeAllocator::new(middle..front_len + size),
            generation: 0,
            stats,
        });
        Ok(Self(Arc::new(ArenaShared {
            mapping,
            front,
            state,
            pressure: OnceLock::new(),
            stuck: OnceLock::new(),
            freed: Notify::new(),
            waiting: AtomicBool::new(false),
            turn: Arc::default(),
        })))
    }

    /// All of it, as it is mapped here: for registering it with a device, not for reading it.
    pub fn as_ptr(&self) -> *mut [u8] {
        std::ptr::slice_from_raw_parts_mut(self.0.mapping.base(), self.0.mapping.len())
    }

    /// Sets the function that frees a slot which is kept only because it may be useful. It answers whether it freed one.
    /// The arena calls it without locks when there is no room. Its argument: only a slot that begins before this place is
    /// of use. The ticket's holder can use every slot and can't do without one: then it is None. Only the first call counts.
    pub fn on_pressure(&self, free_one: impl Fn(Option<usize>) -> bool + Send + Sync + 'static) {
        // A second one would be a second owner of the arena.
        let _ = self.0.pressure.set(Box::new(free_one));
    }

    /// Sets the function that tells whether all taken slots stay taken, so that waiting is in vain. The arena calls it
    /// without locks. Only the first call counts.
    pub fn on_stuck(&self, is_stuck: impl Fn() -> bool + Send + Sync + 'static) {
        let _ = self.0.stuck.set(Box::new(is_stuck));
    }

    /// A slot of `len` bytes, if there is room now. It still has the bytes of the slot before.
    pub fn try_reserve(&self, len: usize) -> Option<SlotMut> {
        let slot = self.take(len, false);
        if slot.is_none() {
            self.0.lock().stats.refused += 1;
        }
        slot
    }

    fn take(&self, len: usize, ticket: bool) -> Option<SlotMut> {
        assert!(len > 0, "a slot of no bytes");
        let reserved_len = len.next_multiple_of(SLOT_ALIGN);
        let before = (!ticket).then(|| self.0.lock().common.initial_range().end);
        let mut freed = 0;
        loop {
            let taken = self.0.lock().take(reserved_len, ticket);
            if let Some((reserved, generation)) = taken {
                self.0.front.set_generation(reserved.start, generation);
                let lease = Lease {
                    arena: Arc::clone(&self.0),
                    reserved,
                    generation,
                };
                return Some(SlotMut::new(lease, len));
            }
            freed += 1;
            let may_go_on = ticket || freed <= FREED_MAX;
            if !may_go_on || !self.0.pressure.get().is_some_and(|free_one| free_one(before)) {
                return None;
            }
        }
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

    /// Bytes of the longest run that is free: the largest slot that there is room for now.
    pub fn free_run_bytes(&self) -> usize {
        let state = self.0.lock();
        let longest = |region: &RangeAllocator<usize>| {
            let (mut end, mut longest) = (region.initial_range().start, 0);
            for taken in region.allocated_ranges() {
                longest = longest.max(taken.start - end);
                end = taken.end;
            }
            longest.max(region.initial_range().end - end)
        };
        longest(&state.common).max(longest(&state.reserve))
    }

    /// The most that one slot can have.
    pub fn slot_bytes_max(&self) -> usize {
        let state = self.0.lock();
        let len = |region: &RangeAllocator<usize>| region.initial_range().len();
        len(&state.common).max(len(&state.reserve))
    }

    pub fn path(&self) -> Option<&Path> {
        self.0.mapping.path()
    }

    /// Removes its file, before the last handle is gone.
    pub fn unlink(&self) {
        self.0.mapping.unlink();
    }

    /// Bytes of its file: the front, then the slots.
    pub fn file_bytes(&self) -> usize {
        self.0.mapping.len()
    }

    /// Tells this arena from every other one.
    pub fn boot_id(&self) -> BootId {
        self.0.front.boot_id()
    }

    /// A slot may be free for the ticket that waits, because something may be freed now.
    pub fn nudge(&self) {
        self.0.nudge();
    }
}

impl Ticket {
    /// A slot of `len` bytes as soon as there is room; never if it is larger than the arena. Dropping the future
    /// gives up.
    pub async fn reserve(&self, len: usize) -> SlotMut {
        loop {
            if let Some(slot) = self.wait(len, || false).await {
                return slot;
            }
        }
    }

    /// The same; None as soon as nothing can come free.
    pub async fn reserve_unless_stuck(&self, len: usize) -> Option<SlotMut> {
        let stuck = &self.arena.0.stuck;
        self.wait(len, || stuck.get().is_some_and(|is_stuck| is_stuck()))
            .await
    }

    async fn wait(&self, len: usize, is_stuck: impl Fn() -> bool) -> Option<SlotMut> {
        let _waiting = Waiting::new(&self.arena.0);
        loop {
            if let Some(slot) = self.arena.take(len, true) {
                return Some(slot);
            }
            if is_stuck() {
                return None;
            }
            // A release between the try and here has left its permit.
            self.arena.0.freed.notified().await;
        }
    }
}

/// The ticket's holder waits, so a slot that is given back wakes it.
struct Waiting<'a>(&'a ArenaShared);

impl<'a> Waiting<'a> {
    fn new(arena: &'a ArenaShared) -> Self {
        arena.waiting.store(true, Ordering::SeqCst);
        Self(arena)
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.0.waiting.store(false, Ordering::SeqCst);
    }
}

/// Bytes of the arena that are taken, for as long as any handle to them lives.
pub(super) struct Lease {
    arena: Arc<ArenaShared>,
    /// Whole pages.
    pub reserved: Range<usize>,
    /// No other lease of this arena ever has it.
    pub generation: u64,
}

impl Lease {
    pub fn base(&self) -> *mut u8 {
        self.arena.mapping.base()
    }

    pub fn arena(&self) -> Arc<ArenaShared> {
        Arc::clone(&self.arena)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.arena.front.set_generation(self.reserved.start, 0);
        let mut state = self.arena.lock();
        state.free(self.reserved.clone());
        state.stats.used_bytes -= self.reserved.len();
        state.stats.slots -= 1;
        drop(state);
        self.arena.nudge();
    }
}

impl State {
    fn take(&mut self, reserved_len: usize, ticket: bool) -> Option<(Range<usize>, u64)> {
        let reserved = self.allocate(reserved_len, ticket)?;
        self.generation += 1;
        let stats = &mut self.stats;
        stats.used_bytes += reserved_len;
        stats.slots += 1;
        stats.used_bytes_peak = stats.used_bytes_peak.max(stats.used_bytes);
        stats.slots_peak = stats.slots_peak.max(stats.slots);
        Some((reserved, self.generation))
    }
}

impl ArenaShared {
    pub fn nudge(&self) {
        if self.waiting.load(Ordering::SeqCst) {
            self.freed.notify_one();
        }
    }

    /// No panic can leave the state half-changed, so a poisoned lock is as good.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
