use crate::arena::SlotMut;

/// Where the body of a ranged GET goes. It is handed over with the request and comes back when nothing writes to it any
/// more.
pub struct Landing {
    /// As long as the range.
    pub slot: SlotMut,
    pub watch: Option<Box<dyn Watch>>,
}

/// Sees the bytes of a body right after they have arrived in the slot, while they are in the CPU's cache.
pub trait Watch: Send {
    /// `bytes` begin `at` bytes after the slot's start. Stretches come in order and without gaps; 0 starts anew.
    fn arrived(&mut self, at: usize, bytes: &[u8]);
}

impl Landing {
    /// Without a watch.
    pub fn new(slot: SlotMut) -> Self {
        Self { slot, watch: None }
    }

    /// The stretch at `at` of `len` bytes is in the slot.
    pub fn arrived(&mut self, at: usize, len: usize) {
        if let Some(watch) = &mut self.watch {
            watch.arrived(at, &self.slot[at..at + len]);
        }
    }
}
