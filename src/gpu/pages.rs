use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DriverError};

use crate::chunk::Space;
use crate::copy::cuda::Gpu;
use crate::copy::known::{KnownLayout, Pages};
use crate::copy::{LayoutError, PagedCache, Tensor};

/// An engine's KV memory on a GPU, in a known layout.
pub struct DevicePages {
    memory: CudaSlice<u8>,
    stream: Arc<CudaStream>,
    space: Space,
    /// Addresses count from the start.
    tensors: Vec<Tensor>,
}

impl DevicePages {
    /// Poisoned.
    pub fn new(gpu: &Gpu, space: &Space, layout: &KnownLayout, pages: &Pages) -> Result<Self, DriverError> {
        let (bytes, tensors) = layout.tensors(space, pages);
        let stream = gpu.context().new_stream()?;
        let poison = vec![POISON; usize::try_from(bytes).unwrap_or(usize::MAX)];
        let memory = stream.clone_htod(&poison)?;
        stream.synchronize()?;
        Ok(Self {
            memory,
            stream,
            space: space.clone(),
            tensors,
        })
    }

    pub fn cache(&self) -> Result<PagedCache, LayoutError> {
        let (base, _) = self.memory.device_ptr(&self.stream);
        PagedCache::new(&self.space, &at(&self.tensors, base))
    }

    /// The same in host memory, of as many bytes as the image has.
    pub fn cache_in(&self, image: &[u8]) -> Result<PagedCache, LayoutError> {
        PagedCache::new(&self.space, &at(&self.tensors, image.as_ptr() as u64))
    }

    pub fn image(&self) -> Result<Vec<u8>, DriverError> {
        let image = self.stream.clone_dtoh(&self.memory)?;
        self.stream.synchronize()?;
        Ok(image)
    }

    pub fn set(&mut self, image: &[u8]) -> Result<(), DriverError> {
        self.stream.memcpy_htod(image, &mut self.memory)?;
        self.stream.synchronize()
    }

    pub fn bytes(&self) -> usize {
        self.memory.len()
    }

    /// That its owner, the engine, would use.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }
}

/// What pages have before anything is written to them.
pub const POISON: u8 = 0xCD;

fn at(tensors: &[Tensor], base: u64) -> Vec<Tensor> {
    let at_base = |tensor: &Tensor| Tensor {
        address: base + tensor.address,
        ..tensor.clone()
    };
    tensors.iter().map(at_base).collect()
}
