//! The arena: one shared mapping that chunks land in and leave from, cut into slots.
//!
//! A *slot* holds one object, header and payload. A [`SlotMut`] is the only way to write one, and is the only handle
//! to its bytes; it can be split, so that several ranges land in it at once, and joined again. [`SlotMut::freeze`]
//! turns it into a [`Slot`], which is shared and read-only. The bytes are given back when the last handle is gone.
//! The holder may be a dropped future, a request body still on its way, or an engine. So a slot can't be reused while
//! anything reads or writes it, and nothing has to remember to release it.
//!
//! Waiting for space is possible only with a [`Ticket`], and there is one at a time, oldest first: two loads that
//! each hold what the other waits for can't happen.
//!
//! Not for: deciding what stays (that is the tiers' business), and memory of a GPU.

mod alloc;
mod attached;
mod front;
mod mapping;
mod slot;

pub use alloc::{Arena, ArenaOptions, ArenaStats, Ticket};
pub use attached::{AttachedArena, AttachedError, AttachedSlot};
pub use front::BootId;
pub use mapping::ArenaError;
pub use slot::{Slot, SlotMut};

/// Slots start and end at multiples of this, for direct I/O.
pub const SLOT_ALIGN: usize = 4096;

#[cfg(test)]
mod tests;
