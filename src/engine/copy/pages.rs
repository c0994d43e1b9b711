//! Pages in host memory of our own, in a known layout. For callers without an engine: demo, checks and tests.

use memmap2::{MmapOptions, MmapRaw};

use super::cache::PagedCache;
use super::copier::CopyJob;
use super::cpu::{CpuCopier, CpuOptions};
use super::error::{CopyError, LayoutError};
use super::known::{KnownLayout, Pages};
use super::object::{Source, Target};
use crate::format::Space;

/// Pages in host memory of our own, in a known layout, for callers without an engine.
pub struct HostPages {
    copier: CpuCopier,
    /// Page-aligned, as engines have it. The copier has its address, so it is never borrowed during a copy.
    memory: MmapRaw,
}

/// Why such pages can't be made.
#[derive(Debug, thiserror::Error)]
pub enum HostPagesError {
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error("can't get {bytes} bytes for pages: {source}")]
    Memory { bytes: u64, source: std::io::Error },
}

impl HostPages {
    /// Pages whose bytes are all `poison`.
    pub fn new(
        space: &Space,
        layout: &KnownLayout,
        pages: &Pages,
        poison: u8,
        options: CpuOptions,
    ) -> Result<Self, HostPagesError> {
        let (bytes, mut tensors) = layout.tensors(space, pages);
        let map = MmapOptions::new().len(bytes as usize).map_anon();
        let mut map = map.map_err(|source| HostPagesError::Memory { bytes, source })?;
        map.fill(poison);
        let memory = MmapRaw::from(map);
        for tensor in &mut tensors {
            tensor.address += memory.as_ptr() as u64;
        }
        let cache = PagedCache::new(space, &tensors)?;
        // SAFETY: the copier is dropped with its memory, and copies only while `self` is borrowed mutably.
        let copier = unsafe { CpuCopier::new(cache, options) };
        Ok(Self { copier, memory })
    }

    /// Copies from the object into the pages.
    pub fn load<S: Source>(&mut self, from: S, job: &CopyJob) -> Result<S, CopyError> {
        self.copier.load(from, job)?.wait()
    }

    /// Copies from the pages into the object.
    pub fn store<T: Target>(&mut self, to: T, job: &CopyJob) -> Result<T, CopyError> {
        self.copier.store(to, job)?.wait()
    }

    pub fn cache(&self) -> &PagedCache {
        self.copier.cache()
    }

    /// All pages, as they lie in memory.
    pub fn image(&self) -> &[u8] {
        // SAFETY: the memory is mapped, and copies are made only while `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.memory.len()) }
    }

    pub fn image_mut(&mut self) -> &mut [u8] {
        // SAFETY: as for `image`.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_mut_ptr(), self.memory.len()) }
    }
}
