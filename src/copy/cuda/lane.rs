use std::sync::Arc;

use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr};

use super::gpu::{CudaError, Event, Gpu, call};
use super::kernel::Way;
use crate::copy::mapping::Span;

/// One direction: a stream for the DMAs, one for the kernels, and staging buffers that go from one to the other.
pub(super) struct Lane {
    pub dma: Arc<CudaStream>,
    pub kernel: Arc<CudaStream>,
    ring: Vec<Staging>,
    next: usize,
}

/// A staging buffer on the device, with the spans of the piece that is in it.
pub(super) struct Staging {
    bytes: CudaSlice<u8>,
    spans: CudaSlice<Span>,
    /// When the stream that empties it has done so.
    pub free: Option<CudaEvent>,
}

impl Lane {
    /// `staging`: buffers of so many bytes, and room for so many spans each.
    pub fn new(gpu: &Gpu, buffers: usize, bytes: usize, spans: usize) -> Result<Self, CudaError> {
        let (dma, kernel) = (gpu.stream()?, gpu.stream()?);
        let failed = call("get staging buffers on the GPU: lower [copy] staging_buffers or piece_size");
        let buffer = || {
            // SAFETY: nothing reads it before a DMA or a kernel has written it.
            let (bytes, spans) = unsafe { (dma.alloc(bytes), dma.alloc(spans)) };
            Ok(Staging {
                bytes: bytes.map_err(&failed)?,
                spans: spans.map_err(&failed)?,
                free: None,
            })
        };
        let ring = (0..buffers.max(1))
            .map(|_| buffer())
            .collect::<Result<_, CudaError>>()?;
        let lane = Self {
            dma,
            kernel,
            ring,
            next: 0,
        };
        // What is allocated in the order of one stream is then there for both.
        lane.drain()?;
        Ok(lane)
    }

    /// The buffer whose turn it is. It may still be in use until its `free`.
    pub fn staging(&mut self) -> &mut Staging {
        let at = self.next;
        self.next = (at + 1) % self.ring.len();
        &mut self.ring[at]
    }

    /// Waits until nothing is under way.
    pub fn drain(&self) -> Result<(), CudaError> {
        let failed = call("wait for the copies under way");
        self.dma.synchronize().map_err(&failed)?;
        self.kernel.synchronize().map_err(&failed)
    }

    /// `later` goes on when `earlier` has done what it was given so far.
    pub fn order(later: &CudaStream, earlier: &CudaStream) -> Result<CudaEvent, CudaError> {
        let failed = call("order two streams");
        let event = earlier.record_event(None).map_err(&failed)?;
        later.wait(&event).map_err(&failed)?;
        Ok(event)
    }

    /// The end of all that it was given: what the last stream of this way has done.
    pub fn end(&self, way: Way) -> Result<Event, CudaError> {
        match way {
            Way::Scatter => Event::record(&self.kernel),
            Way::Gather => Event::record(&self.dma),
        }
    }
}

impl Staging {
    /// For the stream that fills it.
    pub fn wait_until_free(&self, filler: &CudaStream) -> Result<(), CudaError> {
        match &self.free {
            Some(free) => filler.wait(free).map_err(call("wait for a staging buffer")),
            None => Ok(()),
        }
    }

    /// Addresses of bytes and spans.
    pub fn addresses(&self, stream: &CudaStream) -> (u64, u64) {
        (self.bytes.device_ptr(stream).0, self.spans.device_ptr(stream).0)
    }

    /// Brings the spans to the device.
    pub fn set_spans(&mut self, stream: &Arc<CudaStream>, spans: &[Span]) -> Result<(), CudaError> {
        let mut room = self.spans.slice_mut(..spans.len());
        let copied = stream.memcpy_htod(spans, &mut room);
        copied.map_err(call("copy a slot mapping to the GPU"))
    }
}
