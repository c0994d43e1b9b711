//! The kernels of `kernels/paged.cu`, and their parameters as the GPU reads them.

use std::sync::Arc;

use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DeviceRepr, LaunchConfig, PushKernelArg};
use cudarc::nvrtc::Ptx;

use super::gpu::{CudaError, call};
use crate::engine::copy::cache::PlanePart;
use crate::engine::copy::mapping::Span;

/// `kernels/paged.cu`, compiled by `kernels/compile.sh`; the driver compiles it to machine code.
pub const PTX: &str = include_str!("../../../../kernels/paged.ptx");

/// Threads of a block, and the accesses of each under way: `__launch_bounds__` and `DEPTH` in the source.
const THREADS: u32 = 256;
const DEPTH: u32 = 4;

/// `struct Part` of the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct PartRow {
    pub address: u64,
    pub block_stride: u64,
    pub token_stride: u64,
    pub head_stride: u64,
    pub share_offset: u64,
    pub row_bytes: u32,
    pub row_offset: u32,
    pub run_bytes: u32,
    pub heads: u32,
}

/// `struct Params` of the kernel.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(super) struct Params {
    pub parts: u64,
    pub spans: u64,
    pub staging: u64,
    pub share_offset: u64,
    pub parts_count: u32,
    pub spans_count: u32,
    pub tiles: u32,
    pub unit: u32,
    pub chunk_tokens: u32,
    pub blocks: u32,
    pub block_tokens: u32,
    pub reserved: u32,
}

// SAFETY: plain integers, laid out as the kernel has them; `tests/gpu` compares the sizes with the PTX.
unsafe impl DeviceRepr for PartRow {}
// SAFETY: as above.
unsafe impl DeviceRepr for Params {}
// SAFETY: as above.
unsafe impl DeviceRepr for Span {}

impl PartRow {
    pub fn new(part: &PlanePart, row_bytes: u32, share_offset: u64) -> Self {
        Self {
            address: part.address,
            block_stride: part.block_stride,
            token_stride: part.token_stride,
            head_stride: part.head_stride,
            share_offset,
            row_bytes,
            row_offset: part.row_offset,
            run_bytes: part.run_bytes,
            heads: part.heads.1 - part.heads.0,
        }
    }

    /// The largest access that all rows of the part allow.
    pub fn unit(&self) -> u32 {
        let all = self.address
            | self.block_stride
            | self.token_stride
            | self.head_stride
            | self.share_offset
            | u64::from(self.row_bytes | self.row_offset | self.run_bytes);
        match all.trailing_zeros() {
            4.. => 16,
            2..4 => 4,
            _ => 1,
        }
    }

    /// Units of `unit` bytes in `tokens` tokens; None: more than the kernel can count.
    pub fn units(&self, tokens: u32, unit: u32) -> Option<u32> {
        let rows = self.heads.checked_mul(tokens)?;
        let units = rows.checked_mul(self.run_bytes / unit)?;
        (units < 1 << 31).then_some(units)
    }
}

/// Tiles for `units` units.
pub(super) fn tiles(units: u32) -> u32 {
    units.div_ceil(THREADS * DEPTH)
}

pub(super) struct Kernels {
    scatter: CudaFunction,
    gather: CudaFunction,
}

/// The direction of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// From staging into the pages.
    Scatter,
    Gather,
}

impl Kernels {
    pub fn load(context: &Arc<CudaContext>) -> Result<Self, CudaError> {
        let failed = call("load the copy kernels: the driver must be 525 or newer");
        let module = context.load_module(Ptx::from_src(PTX)).map_err(&failed)?;
        Ok(Self {
            scatter: module.load_function("kvgate_scatter").map_err(&failed)?,
            gather: module.load_function("kvgate_gather").map_err(&failed)?,
        })
    }

    /// Launches the kernel on at most `thread_blocks` thread blocks.
    ///
    /// # Safety
    /// All that the parameters point to must be there, and used by no other code, until the kernel has run.
    pub unsafe fn launch(
        &self,
        stream: &CudaStream,
        way: Way,
        params: &Params,
        blocks: u32,
    ) -> Result<(), CudaError> {
        let tiles = u64::from(params.parts_count) * u64::from(params.spans_count) * u64::from(params.tiles);
        let config = LaunchConfig {
            grid_dim: (u32::try_from(tiles).unwrap_or(u32::MAX).min(blocks).max(1), 1, 1),
            block_dim: (THREADS, 1, 1),
            shared_mem_bytes: 0,
        };
        let function = match way {
            Way::Scatter => &self.scatter,
            Way::Gather => &self.gather,
        };
        let mut launch = stream.launch_builder(function);
        launch.arg(params);
        // SAFETY: as the caller says; the parameters are what the kernel takes.
        unsafe { launch.launch(config) }.map_err(call("launch a copy kernel"))?;
        Ok(())
    }
}
