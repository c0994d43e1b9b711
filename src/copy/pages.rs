use std::ptr::NonNull;

use super::cache::PagedCache;
use super::copier::Job;
use super::cpu::{CpuCopier, CpuOptions};
use super::error::{CopyError, LayoutError};
use super::known::{KnownLayout, Pages};
use super::object::{Source, Target};
use crate::chunk::Space;

/// Pages in host memory of our own, in a known layout: an engine's for those who have none.
pub struct HostPages {
    copier: CpuCopier,
    /// From a `Box`. The copier has its address, so it is never borrowed while a copy is made.
    memory: NonNull<[u8]>,
}

// SAFETY: it owns its memory, as a `Box` would.
unsafe impl Send for HostPages {}
// SAFETY: through a shared reference it is only read.
unsafe impl Sync for HostPages {}

impl HostPages {
    /// All bytes are `poison`.
    pub fn new(
        space: &Space,
        layout: &KnownLayout,
        pages: &Pages,
        poison: u8,
        options: CpuOptions,
    ) -> Result<Self, LayoutError> {
        let (bytes, mut tensors) = layout.tensors(space, pages);
        let memory = vec![poison; bytes as usize].into_boxed_slice();
        let memory = NonNull::from(Box::leak(memory));
        for tensor in &mut tensors {
            tensor.address += memory.cast::<u8>().as_ptr() as u64;
        }
        let cache = PagedCache::new(space, &tensors);
        // SAFETY: the copier goes with its memory, and copies only while `self` is borrowed mutably.
        let copier = cache.map(|cache| unsafe { CpuCopier::new(cache, options) });
        match copier {
            Ok(copier) => Ok(Self { copier, memory }),
            Err(error) => {
                // SAFETY: nobody else has it.
                drop(unsafe { Box::from_raw(memory.as_ptr()) });
                Err(error)
            }
        }
    }

    /// From the object into the pages.
    pub fn load<S: Source>(&mut self, from: S, job: &Job) -> Result<S, CopyError> {
        self.copier.load(from, job)?.wait()
    }

    /// From the pages into the object.
    pub fn store<T: Target>(&mut self, to: T, job: &Job) -> Result<T, CopyError> {
        self.copier.store(to, job)?.wait()
    }

    pub fn cache(&self) -> &PagedCache {
        self.copier.cache()
    }

    /// All pages, as they lie in memory.
    pub fn image(&self) -> &[u8] {
        // SAFETY: it is ours, and copies are made only while `self` is borrowed mutably.
        unsafe { self.memory.as_ref() }
    }

    pub fn image_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `image`.
        unsafe { self.memory.as_mut() }
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // SAFETY: it came from a `Box`, and the copier makes no copies any more.
        drop(unsafe { Box::from_raw(self.memory.as_ptr()) });
    }
}
