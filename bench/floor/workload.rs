//! The floor's workload: objects in parts, dealt to its connections, and checked at the end.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use clap::Args;
use kvgate::arena::{Arena, ArenaOptions, SLOT_ALIGN, SlotMut};
use kvgate::config::units::{ByteSize, MIB};

use crate::Error;

/// The objects to transfer, and the bytes of each request.
#[derive(Debug, Clone, Args)]
pub struct Workload {
    #[arg(long, default_value_t = 64)]
    pub objects: u32,
    #[arg(long, default_value = "16MiB")]
    pub object_size: ByteSize,
    #[arg(long, default_value = "16MiB")]
    pub part_size: ByteSize,
    #[arg(long, default_value_t = 16)]
    pub in_flight: u32,
    /// How often all objects are gone through.
    #[arg(long, default_value_t = 1)]
    pub rounds: u32,
}

impl Workload {
    /// The name of an object; `bench/harness/workload.py` makes them.
    pub fn name(object: u32) -> String {
        format!("obj-{object:05}")
    }

    pub fn ops(&self) -> u64 {
        let parts = self.object_size.0.div_ceil(self.part_size.0);
        u64::from(self.objects) * parts * u64::from(self.rounds)
    }

    pub fn bytes(&self) -> u64 {
        u64::from(self.objects) * self.object_size.0 * u64::from(self.rounds)
    }
}

/// A range of an object, and where it lands or leaves from.
pub struct Part {
    pub object: u32,
    pub offset: u64,
    pub slot: SlotMut,
}

/// The parts that wait for their turn. A worker takes one, and gives it back for the next round.
pub struct Queue(Mutex<Waiting>);

struct Waiting {
    parts: VecDeque<Part>,
    left: u64,
}

impl Queue {
    /// In an arena of its own, every page of which was touched; nothing is to be done yet.
    pub fn new(workload: &Workload) -> Result<Self, Error> {
        let size = usize::try_from(workload.object_size.0)?;
        let part_size = usize::try_from(workload.part_size.0)?;
        let arena = Arena::new(&ArenaOptions {
            size: size.next_multiple_of(SLOT_ALIGN) * usize::try_from(workload.objects)?,
            prefault: true,
            ..ArenaOptions::default()
        })?;
        let mut parts = VecDeque::new();
        for object in 0..workload.objects {
            let mut rest = arena.try_reserve(size).ok_or("the arena is full")?;
            let mut offset = 0;
            while rest.len() > part_size {
                let after = rest.split_off(part_size);
                parts.push_back(Part {
                    object,
                    offset,
                    slot: rest,
                });
                offset += workload.part_size.0;
                rest = after;
            }
            parts.push_back(Part {
                object,
                offset,
                slot: rest,
            });
        }
        // Or a worker would find all parts taken while there is still something to do.
        if parts.len() < usize::try_from(workload.in_flight)? {
            return Err(format!(
                "{} parts are fewer than --in-flight {}",
                parts.len(),
                workload.in_flight
            )
            .into());
        }
        Ok(Self(Mutex::new(Waiting { parts, left: 0 })))
    }

    pub fn take(&self) -> Option<Part> {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.left = waiting.left.checked_sub(1)?;
        waiting.parts.pop_front()
    }

    pub fn give_back(&self, part: Part) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.parts.push_back(part);
    }

    /// There is all the work to do, once more if it was done.
    pub fn refill(&self, workload: &Workload) {
        let mut waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        waiting.left = workload.ops();
    }

    pub fn into_parts(self) -> VecDeque<Part> {
        self.0.into_inner().unwrap_or_else(PoisonError::into_inner).parts
    }

    /// Every MiB of an object begins with the object's and its own number.
    pub fn check(&self) -> Result<(), Error> {
        let waiting = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mib_bytes = usize::try_from(MIB)?;
        for part in &waiting.parts {
            for (mib, bytes) in (part.offset / MIB..).zip(part.slot.chunks_exact(mib_bytes)) {
                let stamp = u64::from(part.object) << 32 | mib;
                if bytes[..8] != stamp.to_le_bytes() {
                    return Err(format!(
                        "object {}, MiB {mib}: not the bytes that were stored",
                        part.object
                    )
                    .into());
                }
            }
        }
        Ok(())
    }
}
