//! Host memory that is registered with the driver, in pieces, so that DMA reaches it directly.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::sys;

use super::gpu::Gpu;
use crate::arena::{Arena, AttachedArena};

/// Registers for the engine's other contexts too, if it has any.
const PORTABLE: u32 = 1;
const PAGE: usize = 4096;

/// Host memory that is registered with a GPU's driver, so that DMAs go to it directly. It is registered in pieces,
/// because a piece that fails leaves the others, and because one driver call for a whole arena takes many seconds.
/// Copies work without registration too, but slower.
pub struct Pinned {
    gpu: Arc<Gpu>,
    /// Mapped for as long as it is registered.
    _held: Box<dyn Mapped>,
    memory: Range<usize>,
    piece_bytes: usize,
    /// Addresses of the registered pieces.
    registered: Vec<usize>,
}

/// Memory that can be registered.
///
/// # Safety
/// For as long as the value lives, moved or not, the bytes are mapped and stay where they are.
pub unsafe trait Mapped: Send + Sync + 'static {
    fn bytes(&self) -> *mut [u8];
}

// SAFETY: it keeps its mapping.
unsafe impl Mapped for Arena {
    fn bytes(&self) -> *mut [u8] {
        self.as_ptr()
    }
}

// SAFETY: it keeps its mapping.
unsafe impl Mapped for Arc<AttachedArena> {
    fn bytes(&self) -> *mut [u8] {
        self.as_ptr()
    }
}

impl Pinned {
    /// Registers memory in pieces of `piece_bytes`, and warns of pieces that can't be registered.
    pub fn register(gpu: &Arc<Gpu>, memory: impl Mapped, piece_bytes: usize) -> Self {
        let bytes = memory.bytes();
        let start = bytes.cast::<u8>() as usize;
        let mut pinned = Self {
            gpu: Arc::clone(gpu),
            _held: Box::new(memory),
            memory: start..start + bytes.len(),
            piece_bytes: piece_bytes.next_multiple_of(PAGE).max(PAGE),
            registered: Vec::new(),
        };
        let mut failed = None;
        for piece in pinned.pieces() {
            // SAFETY: it is mapped for as long as this lives, which unregisters it when it goes.
            let result = gpu.context.bind_to_thread().and_then(|()| unsafe {
                sys::cuMemHostRegister_v2(piece.start as *mut _, piece.len(), PORTABLE).result()
            });
            match result {
                Ok(()) => pinned.registered.push(piece.start),
                Err(error) => failed = Some(error),
            }
        }
        if let Some(error) = failed {
            tracing::warn!(
                %error,
                pinned_bytes = pinned.bytes(),
                of_bytes = pinned.memory.len(),
                "can't pin all of the arena for the GPU, going on with slower copies: raise ulimit -l (LimitMEMLOCK)"
            );
        }
        pinned
    }

    /// Number of registered bytes.
    pub fn bytes(&self) -> usize {
        let is = |piece: &Range<usize>| self.registered.contains(&piece.start);
        self.pieces().filter(is).map(|piece| piece.len()).sum()
    }

    /// Bytes from `address` on that one copy may have: the bytes after them are in another registration, or in
    /// none.
    pub(super) fn reach(&self, address: usize) -> usize {
        if address < self.memory.start {
            return self.memory.start - address;
        }
        if address >= self.memory.end {
            return usize::MAX - address;
        }
        let into = (address - self.memory.start) % self.piece_bytes;
        (self.piece_bytes - into).min(self.memory.end - address)
    }

    fn pieces(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (end, piece_bytes) = (self.memory.end, self.piece_bytes);
        self.memory
            .clone()
            .step_by(piece_bytes)
            .map(move |start| start..end.min(start + piece_bytes))
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        for &start in &self.registered {
            // SAFETY: it was registered, once. Copies from it are done: each copier keeps this until then.
            let result = self
                .gpu
                .context
                .bind_to_thread()
                .and_then(|()| unsafe { sys::cuMemHostUnregister(start as *mut _).result() });
            if let Err(error) = result {
                tracing::warn!(%error, "can't give back pinned memory; the process's end will");
                return;
            }
        }
    }
}
