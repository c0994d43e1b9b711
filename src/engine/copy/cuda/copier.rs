//! Copies by a GPU: DMA between the pinned arena and staging buffers, kernels between the buffers and the pages.
//! Events order them with the engine's stream.

use std::ops::Range;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, DevicePtr};

use super::dma::{self, PinnedBlock};
use super::gpu::{CudaError, Gpu, GpuEvent, StreamMark, call};
use super::kernel::{Params, PartRow, Way};
use super::lane::{Lane, RingSize};
use super::lanes::{LaneSet, Lanes};
use super::pinned::{Mapped, Pinned};
use super::shares::{KernelShares, Piece};
use crate::engine::copy::cache::PagedCache;
use crate::engine::copy::copier::{CopyJob, EngineStream, Pending};
use crate::engine::copy::error::CopyError;
use crate::engine::copy::mapping::Span;
use crate::engine::copy::object::{Source, Target};
use crate::engine::copy::region::Region;

/// Copies by a GPU.
pub struct CudaCopier {
    cache: PagedCache,
    shares: KernelShares,
    /// `shares.rows`, on the device; None: DMAs go straight to the pages.
    table: Option<CudaSlice<PartRow>>,
    /// Other copiers may use them, too.
    lanes: Arc<LaneSet>,
    gpu: Arc<Gpu>,
    options: CudaOptions,
}

#[derive(Debug, Clone, Copy)]
pub struct CudaOptions {
    /// Bytes of a DMA and of a staging buffer; a rank's share of one plane may be larger.
    pub piece_bytes: usize,
    /// Staging buffers for each direction.
    pub staging_buffers: usize,
    /// Thread blocks of a kernel, at most; about as many SMs are busy.
    pub thread_blocks: u32,
    /// From runs of this length on, DMAs go straight to the pages.
    pub direct_bytes: usize,
    /// Memory is pinned in pieces of this many bytes.
    pub pin_bytes: usize,
}

impl From<&crate::config::Copies> for CudaOptions {
    fn from(config: &crate::config::Copies) -> Self {
        Self {
            piece_bytes: config.piece_size.bytes() as usize,
            staging_buffers: config.staging_buffers as usize,
            thread_blocks: config.thread_blocks,
            direct_bytes: config.direct_size.bytes() as usize,
            pin_bytes: config.pin_size.bytes() as usize,
        }
    }
}

impl CudaCopier {
    /// A copier with lanes of its own. Until [`pin`](Self::pin), and for objects outside the pinned memory, copies are
    /// slower and may make the calling thread wait.
    ///
    /// # Safety
    /// The cache's addresses are of memory on this GPU that stays there for as long as the copier lives. Between a
    /// copy's call and its end the engine touches its tokens only on the stream that was marked for it.
    pub unsafe fn new(gpu: &Arc<Gpu>, cache: PagedCache, options: CudaOptions) -> Result<Self, CudaError> {
        // SAFETY: as the caller says.
        unsafe { Self::on(&Lanes::new(gpu, options), cache) }
    }

    /// A copier that shares these lanes with other copiers of the same worker.
    ///
    /// # Safety
    /// As for [`new`](Self::new).
    pub unsafe fn on(lanes: &Lanes, cache: PagedCache) -> Result<Self, CudaError> {
        let (gpu, options) = (&lanes.gpu, lanes.options);
        let shares = KernelShares::new(&cache)?;
        let is_direct = has_long_runs(&cache, options.direct_bytes);
        let set = lanes.set((!is_direct).then(|| RingSize {
            buffers: options.staging_buffers,
            bytes: options.piece_bytes.max(shares.largest()),
            spans: cache.space().chunk_rows() as usize,
        }))?;
        let table = match is_direct {
            true => None,
            false => Some(upload(gpu, &shares.rows)?),
        };
        Ok(Self {
            cache,
            shares,
            table,
            lanes: set,
            gpu: Arc::clone(gpu),
            options,
        })
    }

    /// Copies from the object into the pages, after `after`.
    pub fn load<S: Source>(
        &self,
        from: S,
        job: &CopyJob,
        after: Option<&StreamMark>,
    ) -> Result<Pending<S>, CopyError> {
        let bytes = from.bytes();
        let parts = job.check_load(&self.cache, bytes.len())?;
        let host = bytes.cast::<u8>() as usize;
        self.copy(from, Way::Scatter, host, job, parts, after)
    }

    /// Copies from the pages into the object, after `after`.
    pub fn store<T: Target>(
        &self,
        mut to: T,
        job: &CopyJob,
        after: Option<&StreamMark>,
    ) -> Result<Pending<T>, CopyError> {
        let bytes = to.bytes();
        let parts = job.check_store(&self.cache, bytes.len())?;
        let host = bytes.cast::<u8>() as usize;
        self.copy(to, Way::Gather, host, job, parts, after)
    }

    /// The work that `engine` was given so far, for copies that come after it.
    pub fn mark(&self, engine: EngineStream) -> Result<StreamMark, CudaError> {
        self.gpu.mark(engine)
    }

    /// Registers memory with this copier's GPU, for [`pin`](Self::pin). For a large arena it takes seconds.
    pub fn register(&self, memory: impl Mapped) -> Arc<Pinned> {
        Arc::new(Pinned::register(&self.gpu, memory, self.options.pin_bytes))
    }

    /// Expects objects in this memory from now on. If the memory is new, it waits for the copies under way, which
    /// use the memory pinned before.
    pub fn pin(&self, pinned: &Arc<Pinned>) -> Result<(), CudaError> {
        self.lanes.pin(pinned)
    }

    pub fn cache(&self) -> &PagedCache {
        &self.cache
    }

    /// Whether DMAs go straight to the pages.
    pub fn is_direct(&self) -> bool {
        self.table.is_none()
    }

    fn copy<H>(
        &self,
        held: H,
        way: Way,
        host: usize,
        job: &CopyJob,
        parts: Range<usize>,
        after: Option<&StreamMark>,
    ) -> Result<Pending<H>, CopyError> {
        let mut lane = match way {
            Way::Scatter => self.lanes.load_after(after)?,
            Way::Gather => self.lanes.store_after(after)?,
        };
        lane.idle = false;
        match self.submit(&mut lane, way, host, job, parts) {
            Ok(done) => Ok(Pending::new(held, Some(done))),
            Err(error) => {
                // Some of the copy may be under way.
                if lane.finish_half().is_ok() {
                    return Err(error.into());
                }
                std::mem::forget(held);
                Err(CopyError::Kept(error))
            }
        }
    }

    fn submit(
        &self,
        lane: &mut Lane,
        way: Way,
        host: usize,
        job: &CopyJob,
        parts: Range<usize>,
    ) -> Result<GpuEvent, CudaError> {
        // With no token there is nothing to launch.
        let parts = if job.spans.tokens() == 0 { 0..0 } else { parts };
        match &self.table {
            None => self.direct(lane, way, host, job, parts)?,
            Some(table) => {
                for piece in self.shares.pieces(&parts, self.options.piece_bytes) {
                    self.piece(lane, table, way, host, job, &piece)?;
                }
            }
        }
        lane.end()
    }

    /// Copies a piece through a staging buffer.
    fn piece(
        &self,
        lane: &mut Lane,
        table: &CudaSlice<PartRow>,
        way: Way,
        host: usize,
        job: &CopyJob,
        piece: &Piece,
    ) -> Result<(), CudaError> {
        let (dma, kernel) = (Arc::clone(&lane.dma), Arc::clone(lane.toucher()));
        let pinned = lane.pinned.clone();
        let (filler, emptier) = (&Arc::clone(lane.filler()), &Arc::clone(lane.emptier()));
        let staging = lane.staging();
        let spans = job.spans.as_slice();
        let (bytes, spans_at) = staging.addresses(filler);
        let blocks = self.shares.blocks(piece, host, job.at, bytes);
        let params = Params {
            parts: table.device_ptr(&kernel).0 + (piece.parts.start * size_of::<PartRow>()) as u64,
            spans: spans_at,
            staging: bytes,
            share_offset: self.shares.all[piece.shares.start].offset as u64,
            parts_count: piece.parts.len() as u32,
            spans_count: spans.len() as u32,
            tiles: self.shares.tiles(
                &piece.parts,
                spans.iter().map(|span| span.tokens).max().unwrap_or_default(),
            ),
            unit: self.shares.unit,
            chunk_tokens: self.cache.space().chunk_rows(),
            blocks: self.cache.blocks(),
            block_tokens: self.cache.block_tokens(),
            reserved: 0,
        };
        let transfer = || {
            // SAFETY: the object's bytes are held until the copy is done, the staging buffer is this piece's.
            let mut each = blocks
                .iter()
                .map(|&block| unsafe { dma::copy(&dma, way, block, pinned.as_deref()) });
            each.try_for_each(|copied| copied)
        };
        // SAFETY: the table, the staging buffer and the pages are there for as long as the copier is, which waits for
        // the lanes when it goes; spans and parts were checked against the cache.
        let launch = || unsafe {
            self.gpu
                .kernels
                .launch(&kernel, way, &params, self.options.thread_blocks)
        };

        staging.wait_until_free(filler)?;
        staging.set_spans(filler, spans)?;
        match way {
            Way::Scatter => transfer()?,
            Way::Gather => launch()?,
        }
        Lane::order(emptier, filler)?;
        match way {
            Way::Scatter => launch()?,
            Way::Gather => transfer()?,
        }
        staging.free = Some(
            emptier
                .record_event(None)
                .map_err(call("mark a staging buffer"))?,
        );
        Ok(())
    }

    /// Copies straight between object and pages.
    fn direct(
        &self,
        lane: &Lane,
        way: Way,
        host: usize,
        job: &CopyJob,
        parts: Range<usize>,
    ) -> Result<(), CudaError> {
        for part in &self.cache.parts()[parts] {
            for span in job.spans.as_slice() {
                let region = Region::new(&self.cache, part, span);
                for outer in 0..region.outer.count {
                    let block = PinnedBlock {
                        host: host + region.object + outer * region.outer.object - job.at,
                        host_pitch: region.inner.object,
                        device: region.address + (outer * region.outer.pages) as u64,
                        device_pitch: region.inner.pages,
                        row_bytes: region.run,
                        rows: region.inner.count,
                    };
                    // SAFETY: the object's bytes are held until the copy is done; the span was checked to be in the
                    // pages, which are there for as long as the copier is.
                    unsafe { dma::copy(&lane.dma, way, block, lane.pinned.as_deref())? };
                }
            }
        }
        Ok(())
    }
}

fn upload(gpu: &Gpu, rows: &[PartRow]) -> Result<CudaSlice<PartRow>, CudaError> {
    let failed = call("copy the layout to the GPU");
    let stream = gpu.stream()?;
    let table = stream.clone_htod(rows).map_err(&failed)?;
    // Both lanes' streams use it.
    stream.synchronize().map_err(&failed)?;
    Ok(table)
}

/// Whether the tokens of every block are runs of at least `direct_bytes`, so that DMAs alone are nearly as fast. It is all planes
/// or none: a stream that touches pages waits for the engine, and DMAs into staging buffers don't, so a copy of both sorts
/// would need streams of both.
fn has_long_runs(cache: &PagedCache, direct_bytes: usize) -> bool {
    let tokens = cache.tokens();
    let run = if tokens.is_all() {
        u32::MAX
    } else {
        tokens.interleave
    };
    let block = Span {
        token: 0,
        tokens: cache.block_tokens().min(cache.space().chunk_rows()).min(run),
        block: 0,
        offset: 0,
    };
    let is_long = |part| {
        let region = Region::new(cache, part, &block);
        region.outer.count == 1 && region.run >= direct_bytes
    };
    // With one block for all tokens the length of the runs is unknown.
    cache.blocks() > 1 && cache.parts().iter().all(is_long)
}

/// Waits until nothing uses the table, and none of its copies the staging buffers or the pinned memory any more.
impl Drop for CudaCopier {
    fn drop(&mut self) {
        self.lanes.finish();
    }
}
