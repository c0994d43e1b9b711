//! DMA copies of blocks of rows, in as few calls as the strides allow.

use cudarc::driver::CudaStream;
use cudarc::driver::sys::{self, CUmemorytype};

use super::gpu::{CudaError, call};
use super::kernel::Way;
use super::pinned::Pinned;

/// Rows at equal distances on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct PinnedBlock {
    pub host: usize,
    pub host_pitch: usize,
    pub device: u64,
    pub device_pitch: usize,
    pub row_bytes: usize,
    pub rows: usize,
}

impl PinnedBlock {
    /// As one row, where the rows lie side by side.
    fn flat(mut self) -> Self {
        let touch = self.host_pitch == self.row_bytes && self.device_pitch == self.row_bytes;
        if touch {
            self.row_bytes *= self.rows;
            self.rows = 1;
        }
        self
    }

    fn host_bytes(&self) -> usize {
        (self.rows - 1) * self.host_pitch + self.row_bytes
    }

    /// The block in parts, none of which crosses from one registration into the next.
    fn cut(self, pinned: Option<&Pinned>) -> Vec<Self> {
        let whole = self.flat();
        let Some(pinned) = pinned.filter(|pinned| pinned.reach(whole.host) < whole.host_bytes()) else {
            return vec![whole];
        };
        let mut pieces = Vec::new();
        for row in 0..whole.rows {
            let mut done = 0;
            while done < whole.row_bytes {
                let host = whole.host + row * whole.host_pitch + done;
                let bytes = pinned.reach(host).min(whole.row_bytes - done);
                pieces.push(Self {
                    host,
                    host_pitch: bytes,
                    device: whole.device + (row * whole.device_pitch + done) as u64,
                    device_pitch: bytes,
                    row_bytes: bytes,
                    rows: 1,
                });
                done += bytes;
            }
        }
        pieces
    }
}

/// Gives `stream` the copies of a block.
///
/// # Safety
/// Both sides must be there, and used by this copy only, until the stream has got past it.
pub(super) unsafe fn copy(
    stream: &CudaStream,
    way: Way,
    block: PinnedBlock,
    pinned: Option<&Pinned>,
) -> Result<(), CudaError> {
    let failed = call("copy between arena and GPU");
    stream.context().bind_to_thread().map_err(&failed)?;
    let stream = stream.cu_stream();
    for piece in block.cut(pinned) {
        let (host, device, bytes) = (piece.host as *mut _, piece.device, piece.row_bytes);
        // SAFETY: as the caller says.
        let result = unsafe {
            match (way, piece.rows) {
                (Way::Scatter, 1) => sys::cuMemcpyHtoDAsync_v2(device, host, bytes, stream),
                (Way::Gather, 1) => sys::cuMemcpyDtoHAsync_v2(host, device, bytes, stream),
                _ => sys::cuMemcpy2DAsync_v2(&piece.as_2d(way), stream),
            }
        };
        result.result().map_err(&failed)?;
    }
    Ok(())
}

impl PinnedBlock {
    fn as_2d(&self, way: Way) -> sys::CUDA_MEMCPY2D {
        let (host, device) = (
            CUmemorytype::CU_MEMORYTYPE_HOST,
            CUmemorytype::CU_MEMORYTYPE_DEVICE,
        );
        let (from, to) = match way {
            Way::Scatter => (host, device),
            Way::Gather => (device, host),
        };
        let pitch = |side| match side == host {
            true => self.host_pitch,
            false => self.device_pitch,
        };
        sys::CUDA_MEMCPY2D {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: from,
            srcHost: self.host as *const _,
            srcDevice: self.device,
            srcArray: std::ptr::null_mut(),
            srcPitch: pitch(from),
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: to,
            dstHost: self.host as *mut _,
            dstDevice: self.device,
            dstArray: std::ptr::null_mut(),
            dstPitch: pitch(to),
            WidthInBytes: self.row_bytes,
            Height: self.rows,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_that_touch_are_one() {
        let block = PinnedBlock {
            host: 4096,
            host_pitch: 64,
            device: 0,
            device_pitch: 64,
            row_bytes: 64,
            rows: 10,
        };
        assert_eq!(block.flat().rows, 1);
        assert_eq!(block.flat().row_bytes, 640);
        let apart = PinnedBlock {
            host_pitch: 128,
            ..block
        };
        assert_eq!(apart.flat(), apart);
        assert_eq!(apart.host_bytes(), 9 * 128 + 64);
    }
}
