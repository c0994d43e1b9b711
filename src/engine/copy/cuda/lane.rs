//! One direction of copies: a stream for DMA, one for kernels, and a ring of staging buffers between them.

use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr};

use super::gpu::{CudaError, Gpu, GpuEvent, StreamMark, call};
use super::kernel::Way;
use super::pinned::Pinned;
use crate::engine::copy::mapping::Span;

/// One direction: a stream for the DMAs, one for the kernels, and staging buffers that one fills and the other
/// empties. Where DMAs go straight to the pages, only the DMAs' stream.
pub(super) struct Lane {
    way: Way,
    pub dma: Arc<CudaStream>,
    /// None: DMAs go straight to the pages.
    kernel: Option<Arc<CudaStream>>,
    ring: Vec<Staging>,
    size: RingSize,
    next: usize,
    /// The mark that its latest copies came after.
    pub mark: Option<StreamMark>,
    /// No work was given to it since it finished.
    pub idle: bool,
    /// The memory with the DMAs' objects.
    pub pinned: Option<Arc<Pinned>>,
}

/// A staging buffer on the device, with the spans of the piece that is in it.
pub(super) struct Staging {
    bytes: CudaSlice<u8>,
    spans: CudaSlice<Span>,
    /// The event at which the emptying stream has emptied it.
    pub free: Option<CudaEvent>,
}

/// The sizes of staging buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct RingSize {
    pub buffers: usize,
    pub bytes: usize,
    pub spans: usize,
}

impl Lane {
    /// A lane; without a ring its DMAs go straight to the pages.
    pub fn new(gpu: &Gpu, way: Way, ring: Option<RingSize>) -> Result<Self, CudaError> {
        let mut lane = Self {
            way,
            dma: gpu.stream()?,
            kernel: ring.map(|_| gpu.stream()).transpose()?,
            ring: Vec::new(),
            size: RingSize::default(),
            next: 0,
            mark: None,
            idle: true,
            pinned: None,
        };
        if let Some(size) = ring {
            lane.grow(size)?;
        }
        Ok(lane)
    }

    /// Makes its buffers at least this large; waits for the copies that use smaller ones.
    pub fn grow(&mut self, size: RingSize) -> Result<(), CudaError> {
        let size = self.size.max(size);
        if size == self.size {
            return Ok(());
        }
        let failed = call("get staging buffers on the GPU: lower [copy] staging_buffers or piece_size");
        let mut ring = Vec::with_capacity(size.buffers);
        for _ in 0..size.buffers {
            // Allocated in the order of the filling stream; the other stream comes after it, so the buffers are
            // there for both.
            let filler = self.filler();
            // SAFETY: nothing reads them before they are filled.
            let (bytes, spans) = unsafe { (filler.alloc(size.bytes), filler.alloc(size.spans)) };
            ring.push(Staging {
                bytes: bytes.map_err(&failed)?,
                spans: spans.map_err(&failed)?,
                free: None,
            });
        }
        self.finish()?;
        (self.ring, self.size, self.next) = (ring, size, 0);
        Ok(())
    }

    /// The stream that reads or writes the pages.
    pub fn toucher(&self) -> &Arc<CudaStream> {
        self.kernel.as_ref().unwrap_or(&self.dma)
    }

    pub fn filler(&self) -> &Arc<CudaStream> {
        match self.way {
            Way::Scatter => &self.dma,
            Way::Gather => self.toucher(),
        }
    }

    pub fn emptier(&self) -> &Arc<CudaStream> {
        match self.way {
            Way::Scatter => self.toucher(),
            Way::Gather => &self.dma,
        }
    }

    /// The next buffer. It may be in use until its `free`.
    pub fn staging(&mut self) -> &mut Staging {
        let at = self.next;
        self.next = (at + 1) % self.ring.len();
        &mut self.ring[at]
    }

    /// Waits until no work is under way.
    pub fn finish(&mut self) -> Result<(), CudaError> {
        if !self.idle {
            let finished = self.emptier().synchronize();
            finished.map_err(call("wait for the copies under way"))?;
            self.idle = true;
        }
        Ok(())
    }

    /// The same after a copy that was given up midway.
    pub fn finish_half(&mut self) -> Result<(), CudaError> {
        let finished = self.filler().synchronize();
        finished.map_err(call("wait for a copy that failed"))?;
        self.finish()
    }

    /// Makes `later` wait until `earlier` has done all work given to it so far.
    pub fn order(later: &CudaStream, earlier: &CudaStream) -> Result<CudaEvent, CudaError> {
        let failed = call("order two streams");
        let event = earlier.record_event(None).map_err(&failed)?;
        later.wait(&event).map_err(&failed)?;
        Ok(event)
    }

    /// The end of all work that was given to it.
    pub fn end(&self) -> Result<GpuEvent, CudaError> {
        GpuEvent::record(self.emptier())
    }
}

impl RingSize {
    fn max(self, other: Self) -> Self {
        Self {
            buffers: self.buffers.max(other.buffers).max(1),
            bytes: self.bytes.max(other.bytes),
            spans: self.spans.max(other.spans),
        }
    }
}

impl Staging {
    /// Makes the filling stream wait until the buffer is free.
    pub fn wait_until_free(&self, filler: &CudaStream) -> Result<(), CudaError> {
        match &self.free {
            Some(free) => filler.wait(free).map_err(call("wait for a staging buffer")),
            None => Ok(()),
        }
    }

    /// Addresses of the bytes and the spans.
    pub fn addresses(&self, stream: &CudaStream) -> (u64, u64) {
        (self.bytes.device_ptr(stream).0, self.spans.device_ptr(stream).0)
    }

    /// Copies the spans to the device.
    pub fn set_spans(&mut self, stream: &Arc<CudaStream>, spans: &[Span]) -> Result<(), CudaError> {
        let mut room = self.spans.slice_mut(..spans.len());
        let copied = stream.memcpy_htod(spans, &mut room);
        copied.map_err(call("copy a slot mapping to the GPU"))
    }
}
