//! How fast copies are between slots and a GPU's pages.
//!
//! Each figure is measured in the same round as plain copies of the same bytes out of pinned memory, which is the
//! most that the bus can give.

use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::{CudaSlice, CudaStream, DriverError};
use serde::Serialize;

use super::error::GpuError;
use crate::arena::{Arena, ArenaOptions, SLOT_ALIGN, Slot, SlotMut};
use crate::config::units::GIB;
use crate::engine::copy::cuda::{CudaError, DevicePages, Gpu, Pinned};
use crate::engine::copy::known::{KnownLayout, Pages};
use crate::engine::copy::{CopyJob, CudaOptions, SlotMapping};
use crate::format::Space;

/// The measurements: each layout with each block size and each number of thread blocks.
pub struct BenchPlan {
    pub space: Space,
    /// This rank's KV heads, half-open; None: all.
    pub heads: Option<(u32, u32)>,
    pub layouts: Vec<KnownLayout>,
    pub block_tokens: Vec<u32>,
    pub thread_blocks: Vec<u32>,
    /// Chunks copied at a time, in each direction.
    pub chunks: usize,
    /// Rounds, of which the median counts.
    pub rounds: usize,
    pub element_bytes: u32,
    pub options: CudaOptions,
}

/// GiB/s of plain copies of the same bytes between pinned memory and the GPU, by one call a chunk.
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Floor {
    pub load_gib_s: f64,
    pub store_gib_s: f64,
    /// Sum of both directions at once.
    pub both_gib_s: f64,
}

/// The result of one way of copying. The ratios are to plain copies in the same round; medians.
#[derive(Debug, Clone, Serialize)]
pub struct BenchRow {
    pub layout: &'static str,
    pub block_tokens: u32,
    pub thread_blocks: u32,
    /// DMAs without a kernel; the thread blocks don't matter.
    pub direct: bool,
    /// This rank's bytes of a chunk.
    pub chunk_bytes: usize,
    pub load_gib_s: f64,
    pub store_gib_s: f64,
    pub both_gib_s: f64,
    pub load_ratio: f64,
    pub store_ratio: f64,
    pub both_ratio: f64,
    pub floor: Floor,
}

/// Measures; calls `told` with each row when it is done.
pub fn bench(
    gpu: &Arc<Gpu>,
    plan: &BenchPlan,
    mut told: impl FnMut(&BenchRow),
) -> Result<Vec<BenchRow>, GpuError> {
    let mut bed = Bed::new(gpu, plan)?;
    let mut rows = Vec::new();
    for layout in &plan.layouts {
        for &block_tokens in &plan.block_tokens {
            for &thread_blocks in &plan.thread_blocks {
                let options = CudaOptions {
                    thread_blocks,
                    ..plan.options
                };
                let row = bed.measure(plan, layout, block_tokens, options)?;
                told(&row);
                let direct = row.direct;
                rows.push(row);
                if direct {
                    break;
                }
            }
        }
    }
    Ok(rows)
}

/// Slots full of chunks, empty slots, and the buffers of plain copies.
struct Bed {
    gpu: Arc<Gpu>,
    sources: Vec<Slot>,
    targets: Vec<SlotMut>,
    pinned: Arc<Pinned>,
    share_bytes: usize,
    plain: [(Arc<CudaStream>, CudaSlice<u8>); 2],
}

impl Bed {
    fn new(gpu: &Arc<Gpu>, plan: &BenchPlan) -> Result<Self, GpuError> {
        let object_len = plan.space.layout().object_len();
        let arena = Arena::new(&ArenaOptions {
            size: 2 * plan.chunks * object_len.next_multiple_of(SLOT_ALIGN),
            prefault: true,
            ..ArenaOptions::default()
        })?;
        // A driver refuses plain copies that cross from one registration into the next.
        let in_one_piece = arena.as_ptr().len();
        let slot = || arena.try_reserve(object_len).ok_or(GpuError::Room(object_len));
        let mut sources = Vec::new();
        let mut targets = Vec::new();
        for seed in 0..plan.chunks {
            let mut source = slot()?;
            fastrand::Rng::with_seed(seed as u64).fill(&mut source);
            sources.push(source.freeze());
            targets.push(slot()?);
        }
        let heads = |heads: u32| {
            plan.heads
                .filter(|_| heads > 1)
                .map_or(heads, |(first, end)| end - first)
        };
        let of_plane = |plane: &crate::format::Plane| {
            heads(plane.heads) as usize * plane.row_bytes as usize * plan.space.chunk_tokens() as usize
        };
        let share_bytes = plan.space.planes().iter().map(of_plane).sum();
        let plain = || {
            let stream = gpu.context().new_stream()?;
            let buffer = stream.alloc_zeros(share_bytes)?;
            stream.synchronize()?;
            Ok((stream, buffer))
        };
        let failed = |error: DriverError| CudaError::Call {
            what: "get memory on the GPU",
            error,
        };
        Ok(Self {
            pinned: Arc::new(Pinned::register(gpu, arena, in_one_piece)),
            plain: [plain().map_err(failed)?, plain().map_err(failed)?],
            gpu: Arc::clone(gpu),
            sources,
            targets,
            share_bytes,
        })
    }

    fn measure(
        &mut self,
        plan: &BenchPlan,
        layout: &KnownLayout,
        block_tokens: u32,
        options: CudaOptions,
    ) -> Result<BenchRow, GpuError> {
        let chunk_blocks = plan.space.chunk_tokens().div_ceil(block_tokens);
        let pages = Pages {
            // In random order, with other blocks between them.
            blocks: 2 * chunk_blocks * plan.chunks as u32,
            block_tokens,
            heads: plan.heads,
            element_bytes: plan.element_bytes,
        };
        let device = DevicePages::new(&self.gpu, &plan.space, layout, &pages, 0, options)?;
        device.copier().pin(&self.pinned)?;
        let jobs = jobs(&device, plan, &pages)?;
        let mut rounds = Vec::new();
        // One more round to warm up.
        for _ in 0..=plan.rounds {
            rounds.push(Round {
                plain: [
                    self.plain(true, false)?,
                    self.plain(false, true)?,
                    self.plain(true, true)?,
                ],
                paged: [
                    self.paged(&device, &jobs, true, false)?,
                    self.paged(&device, &jobs, false, true)?,
                    self.paged(&device, &jobs, true, true)?,
                ],
            });
        }
        rounds.remove(0);
        let bytes = (self.share_bytes * plan.chunks) as f64;
        let moved = [bytes, bytes, 2.0 * bytes];
        let speed = |of: fn(&Round) -> &[f64; 3], way: usize| {
            median(
                rounds
                    .iter()
                    .map(|round| moved[way] / of(round)[way] / GIB as f64),
            )
        };
        let ratio = |way: usize| median(rounds.iter().map(|round| round.plain[way] / round.paged[way]));
        Ok(BenchRow {
            layout: layout.name,
            block_tokens,
            thread_blocks: options.thread_blocks,
            direct: device.copier().is_direct(),
            chunk_bytes: self.share_bytes,
            load_gib_s: speed(|round| &round.paged, 0),
            store_gib_s: speed(|round| &round.paged, 1),
            both_gib_s: speed(|round| &round.paged, 2),
            load_ratio: ratio(0),
            store_ratio: ratio(1),
            both_ratio: ratio(2),
            floor: Floor {
                load_gib_s: speed(|round| &round.plain, 0),
                store_gib_s: speed(|round| &round.plain, 1),
                both_gib_s: speed(|round| &round.plain, 2),
            },
        })
    }

    /// Seconds for plain copies of the chunks' bytes, contiguous.
    fn plain(&mut self, load: bool, store: bool) -> Result<f64, CudaError> {
        let failed = |error: DriverError| CudaError::Call {
            what: "copy to or from pinned memory",
            error,
        };
        let [(up, onto), (down, from)] = &mut self.plain;
        let started = Instant::now();
        for (source, target) in self.sources.iter().zip(&mut self.targets) {
            if load {
                up.memcpy_htod(&source[..self.share_bytes], onto)
                    .map_err(failed)?;
            }
            if store {
                down.memcpy_dtoh(from, &mut target[..self.share_bytes])
                    .map_err(failed)?;
            }
        }
        up.synchronize().map_err(failed)?;
        down.synchronize().map_err(failed)?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// Seconds for kvgate's copies of all chunks.
    fn paged(
        &mut self,
        device: &DevicePages,
        jobs: &[CopyJob],
        load: bool,
        store: bool,
    ) -> Result<f64, GpuError> {
        let (mut loads, mut stores) = (Vec::new(), Vec::new());
        let mut targets = std::mem::take(&mut self.targets).into_iter();
        let started = Instant::now();
        for (source, job) in self.sources.iter().zip(jobs) {
            if load {
                loads.push(device.copier().load(source.clone(), job, None)?);
            }
            if store && let Some(target) = targets.next() {
                stores.push(device.copier().store(target, job, None)?);
            }
        }
        loads.into_iter().try_for_each(|load| load.wait().map(drop))?;
        let back = stores.into_iter().map(crate::engine::copy::Pending::wait);
        let back: Vec<SlotMut> = back.collect::<Result<_, _>>()?;
        let seconds = started.elapsed().as_secs_f64();
        self.targets = back.into_iter().chain(targets).collect();
        Ok(seconds)
    }
}

/// Seconds of a load, a store, and both at once.
struct Round {
    plain: [f64; 3],
    paged: [f64; 3],
}

fn jobs(device: &DevicePages, plan: &BenchPlan, pages: &Pages) -> Result<Vec<CopyJob>, GpuError> {
    let (cache, chunk_tokens) = (device.copier().cache(), plan.space.chunk_tokens());
    let mut table: Vec<u32> = (0..pages.blocks).collect();
    fastrand::Rng::with_seed(1).shuffle(&mut table);
    let chunk_blocks = chunk_tokens.div_ceil(pages.block_tokens) as usize;
    let job = |blocks: &[u32]| {
        let slots: Vec<i64>;
        let mapping = match cache.blocks() {
            // Where all tokens are one block, the engine's pages are runs of slots.
            1 => {
                let of_block = |&block: &u32| {
                    (0..pages.block_tokens).map(move |token| block * pages.block_tokens + token)
                };
                let all = blocks.iter().flat_map(of_block).map(i64::from);
                slots = all.take(chunk_tokens as usize).collect();
                SlotMapping::Slots(&slots)
            }
            _ => SlotMapping::Blocks {
                table: blocks,
                first_token: 0,
            },
        };
        Ok(CopyJob {
            planes: 0..plan.space.planes().len(),
            spans: cache.spans(mapping, 0..chunk_tokens)?,
            at: 0,
        })
    };
    table.chunks(chunk_blocks).take(plan.chunks).map(job).collect()
}

pub(super) fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or_default()
}
