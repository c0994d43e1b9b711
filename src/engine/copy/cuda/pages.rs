//! Pages on a GPU of our own, in a known layout. For checks and measurements.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr};

use super::copier::{CudaCopier, CudaOptions};
use super::gpu::{CudaError, Gpu, call};
use crate::engine::copy::cache::PagedCache;
use crate::engine::copy::copier::EngineStream;
use crate::engine::copy::error::LayoutError;
use crate::engine::copy::known::{KnownLayout, Pages};
use crate::format::Space;

/// Pages on a GPU of our own, in a known layout, with a stream like the engine's.
pub struct DevicePages {
    // Dropped before its memory.
    copier: CudaCopier,
    memory: CudaSlice<u8>,
    stream: Arc<CudaStream>,
}

#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl DevicePages {
    /// Pages whose bytes are all `poison`.
    pub fn new(
        gpu: &Arc<Gpu>,
        space: &Space,
        layout: &KnownLayout,
        pages: &Pages,
        poison: u8,
        options: CudaOptions,
    ) -> Result<Self, PagesError> {
        let failed = call("get memory for pages on the GPU");
        let (bytes, mut tensors) = layout.tensors(space, pages);
        let stream = gpu.stream()?;
        let memory = stream
            .clone_htod(&vec![poison; bytes as usize])
            .map_err(&failed)?;
        stream.synchronize().map_err(&failed)?;
        for tensor in &mut tensors {
            tensor.address += memory.device_ptr(&stream).0;
        }
        let cache = PagedCache::new(space, &tensors)?;
        // SAFETY: the memory is dropped after the copier, and no other code touches it.
        let copier = unsafe { CudaCopier::new(gpu, cache, options)? };
        Ok(Self {
            copier,
            memory,
            stream,
        })
    }

    pub fn copier(&self) -> &CudaCopier {
        &self.copier
    }

    pub fn engine(&self) -> EngineStream {
        EngineStream(self.stream.cu_stream() as u64)
    }

    /// All pages, as they lie in memory. Copies must have ended.
    pub fn image(&self) -> Result<Vec<u8>, CudaError> {
        let failed = call("read the pages");
        let image = self.stream.clone_dtoh(&self.memory).map_err(&failed)?;
        self.stream.synchronize().map_err(&failed)?;
        Ok(image)
    }

    pub fn set_image(&mut self, image: &[u8]) -> Result<(), CudaError> {
        let failed = call("write the pages");
        self.stream
            .memcpy_htod(image, &mut self.memory)
            .map_err(&failed)?;
        self.stream.synchronize().map_err(&failed)
    }
}
