//! One GPU through the CUDA driver, loaded if present: context, events, streams and our kernels.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute, CUevent_flags};
use cudarc::driver::{CudaContext, CudaEvent, CudaStream, DriverError};

use super::kernel::Kernels;
use crate::engine::copy::copier::EngineStream;

/// The first version with all functions that are called here.
const DRIVER_MIN: i32 = 12_000;

/// Why the GPU can't be used, or a call to its driver failed.
#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error("no NVIDIA driver here: libcuda.so.1 can't be loaded")]
    NoDriver,
    #[error("the NVIDIA driver supports CUDA {}.{}, and 12.0 is needed: install driver 525 or newer", .0 / 1000, .0 % 1000 / 10)]
    DriverTooOld(i32),
    #[error("there is no GPU {device}: this machine has {count}")]
    NoDevice { device: usize, count: usize },
    #[error("can't {what}: {error}")]
    Call { what: &'static str, error: DriverError },
    #[error("the engine's KV tensors are too large for the GPU's copies: {0}")]
    TooLarge(String),
}

/// For `map_err`: names the failed call.
pub(super) fn call(what: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |error| CudaError::Call { what, error }
}

/// One GPU: its primary context, shared with the engine in this process, and our kernels in it.
pub struct Gpu {
    pub(super) context: Arc<CudaContext>,
    pub(super) kernels: Kernels,
    pub(super) device: usize,
}

/// The device and driver, for people.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Presence {
    pub device: usize,
    pub name: String,
    pub memory_bytes: usize,
    pub compute_capability: String,
    pub multiprocessors: usize,
    /// The newest CUDA that the driver knows, as 12.8.
    pub driver: String,
}

impl Gpu {
    /// Loads the driver, if there is one.
    pub fn open(device: usize) -> Result<Arc<Self>, CudaError> {
        // SAFETY: loads libcuda if it is there, whose initialisers are NVIDIA's business. cudarc panics without it,
        // so nothing else of it is called before.
        if !unsafe { sys::is_culib_present() } {
            return Err(CudaError::NoDriver);
        }
        let version = driver_version()?;
        if version < DRIVER_MIN {
            return Err(CudaError::DriverTooOld(version));
        }
        cudarc::driver::result::init().map_err(call("initialise the driver"))?;
        let count = CudaContext::device_count().map_err(call("count the GPUs"))?;
        let count = usize::try_from(count).unwrap_or_default();
        if device >= count {
            return Err(CudaError::NoDevice { device, count });
        }
        let context = CudaContext::new(device).map_err(call("get the GPU's primary context"))?;
        // SAFETY: all that our streams share is ordered by events here. With tracking, making a stream would wait
        // for all work that the engine has under way.
        unsafe { context.disable_event_tracking() };
        let kernels = Kernels::load(&context)?;
        Ok(Arc::new(Self {
            context,
            kernels,
            device,
        }))
    }

    pub fn presence(&self) -> Result<Presence, CudaError> {
        let context = &self.context;
        let driver = driver_version()?;
        let failed = call("ask for the GPU's properties");
        let (major, minor) = context.compute_capability().map_err(&failed)?;
        let multiprocessors = context
            .attribute(CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)
            .map_err(&failed)?;
        Ok(Presence {
            device: self.device,
            name: context.name().map_err(&failed)?,
            memory_bytes: context.total_mem().map_err(&failed)?,
            compute_capability: format!("{major}.{minor}"),
            multiprocessors: usize::try_from(multiprocessors).unwrap_or_default(),
            driver: format!("{}.{}", driver / 1000, driver % 1000 / 10),
        })
    }

    /// The context, for callers that make their own streams and allocations.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.context
    }

    pub(super) fn stream(&self) -> Result<Arc<CudaStream>, CudaError> {
        self.context.new_stream().map_err(call("make a stream"))
    }

    /// The work that `engine` was given so far.
    pub fn mark(&self, engine: EngineStream) -> Result<StreamMark, CudaError> {
        // SAFETY: the engine vouches for its stream, and the wrapper is gone at the end of this call.
        let stream = unsafe { self.context.wrap_borrowed_stream(engine.0 as sys::CUstream) };
        // A thread that waits for the event sleeps.
        let event = stream.record_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC));
        Ok(StreamMark(Arc::new(
            event.map_err(call("mark the engine's stream"))?,
        )))
    }
}

/// A place in the engine's stream; copies come after it.
#[derive(Clone)]
pub struct StreamMark(Arc<CudaEvent>);

impl StreamMark {
    /// Makes `stream` wait until the engine's is past the mark.
    pub(super) fn hold_up(&self, stream: &CudaStream) -> Result<(), CudaError> {
        stream.wait(&self.0).map_err(call("wait for the engine's stream"))
    }

    pub(super) fn is_passed(&self) -> Result<bool, CudaError> {
        self.0
            .try_is_complete()
            .map_err(call("ask for the engine's stream"))
    }

    /// Makes this thread wait until the engine's stream is past the mark.
    pub(super) fn wait(&self) -> Result<(), CudaError> {
        self.0.synchronize().map_err(call("wait for the engine's stream"))
    }

    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

fn driver_version() -> Result<i32, CudaError> {
    let mut version = 0;
    // SAFETY: writes one int.
    let result = unsafe { sys::cuDriverGetVersion(&raw mut version) };
    result.result().map_err(call("ask for the driver's version"))?;
    Ok(version)
}

/// The end of a copy.
pub struct GpuEvent(CudaEvent);

impl GpuEvent {
    pub(super) fn record(stream: &CudaStream) -> Result<Self, CudaError> {
        // A thread that waits for the event sleeps.
        let event = stream.record_event(Some(CUevent_flags::CU_EVENT_BLOCKING_SYNC));
        Ok(Self(event.map_err(call("mark the end of a copy"))?))
    }

    pub fn is_done(&self) -> Result<bool, CudaError> {
        self.0.try_is_complete().map_err(call("ask for a copy"))
    }

    pub fn wait(&self) -> Result<(), CudaError> {
        self.0.synchronize().map_err(call("wait for a copy"))
    }

    /// Makes the engine's stream wait until the copy is done.
    pub fn hold_up(&self, engine: EngineStream) -> Result<(), CudaError> {
        let context = self.0.context();
        // SAFETY: as in `Gpu::mark`.
        let stream = unsafe { context.wrap_borrowed_stream(engine.0 as sys::CUstream) };
        stream.wait(&self.0).map_err(call("let the engine's stream wait"))
    }
}
