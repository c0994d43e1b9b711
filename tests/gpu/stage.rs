//! An engine and its pages on the tests' driver: copies to make, and what must be in memory afterwards.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use kvgate::arena::{Arena, ArenaOptions, Slot, SlotMut};
use kvgate::engine::copy::cuda::{Gpu, StreamMark};
use kvgate::engine::copy::known::{KNOWN, KnownLayout, Pages};
use kvgate::engine::copy::{
    CopyError, CopyJob, CpuCopier, CpuOptions, CudaCopier, CudaOptions, EngineStream, PagedCache, Pending,
    SlotMapping, Tensor,
};
use kvgate::format::Space;

use crate::mock::{Mock, SEEDS, drain};

/// An engine with a paged cache and a stream of its own, an arena, and copies between them.
pub struct Stage {
    /// First, so that it goes first: it waits for copies that are under way.
    pub copier: Option<CudaCopier>,
    pub gpu: Arc<Gpu>,
    pub space: Space,
    pub engine: Arc<CudaStream>,
    pub pages: CudaSlice<u8>,
    tensors: Vec<Tensor>,
    pub arena: Arena,
}

pub const CHUNK_TOKENS: u32 = 32;
const BLOCKS: u32 = 12;
const LAYERS: usize = 6;

pub fn options(direct_bytes: usize) -> CudaOptions {
    let share = 2 * CHUNK_TOKENS as usize * 32 * 2 * 2;
    CudaOptions {
        piece_bytes: 3 * share,
        staging_buffers: 2,
        thread_blocks: 2,
        direct_bytes,
        pin_bytes: 64 << 10,
    }
}

impl Stage {
    /// A chunk goes in two pieces, of three layers each. The pages have two heads of four.
    pub fn new(layout: &KnownLayout, direct_bytes: usize) -> Result<Self, CopyError> {
        Self::with_heads(layout, direct_bytes, (1, 3))
    }

    pub fn with_heads(
        layout: &KnownLayout,
        direct_bytes: usize,
        heads: (u32, u32),
    ) -> Result<Self, CopyError> {
        let space = Space::from_json(&format!(
            r#"{{"model": "kvgate/stage", "revision": "1", "dtype": "float16", "chunk_tokens": {CHUNK_TOKENS},
                "mha": {{"layers": {LAYERS}, "heads": 4, "head_dim": 32}}}}"#
        ))
        .unwrap();
        let pages = Pages {
            blocks: BLOCKS,
            block_tokens: 8,
            heads: Some(heads),
            element_bytes: 2,
        };
        let (bytes, tensors) = layout.tensors(&space, &pages);
        let gpu = Gpu::open(0)?;
        let failed = |error| kvgate::engine::copy::cuda::CudaError::Call {
            what: "set the stage",
            error,
        };
        let engine = gpu.context().new_stream().map_err(failed)?;
        let pages = engine.clone_htod(&vec![0xCD; bytes as usize]).map_err(failed)?;
        let arena = Arena::new(&ArenaOptions {
            size: 1 << 20,
            ..ArenaOptions::default()
        })
        .unwrap();
        let mut stage = Self {
            gpu,
            space,
            engine,
            pages,
            tensors,
            copier: None,
            arena,
        };
        // SAFETY: arena and pages are gone after the copier.
        stage.copier = unsafe {
            let copier = CudaCopier::new(&stage.gpu, stage.cache(stage.base()), options(direct_bytes))?;
            copier.pin(&copier.register(stage.arena.clone()))?;
            Some(copier)
        };
        Ok(stage)
    }

    pub fn copier(&self) -> &CudaCopier {
        self.copier.as_ref().unwrap()
    }

    pub fn mark(&self) -> StreamMark {
        self.copier().mark(self.stream()).unwrap()
    }

    pub fn stream(&self) -> EngineStream {
        EngineStream(self.engine.cu_stream() as u64)
    }

    /// Of the pages. With this driver it can be read as host memory, too: without a wait, if one is brave.
    pub fn base(&self) -> u64 {
        self.pages.device_ptr(&self.engine).0
    }

    pub fn bytes(&self) -> usize {
        self.pages.len()
    }

    pub fn cache(&self, base: u64) -> PagedCache {
        let at = |tensor: &Tensor| Tensor {
            address: base + tensor.address,
            ..tensor.clone()
        };
        PagedCache::new(&self.space, &self.tensors.iter().map(at).collect::<Vec<_>>()).unwrap()
    }

    /// Chunk `nth`'s blocks, in another order each, and apart from the one's before and after it; it begins inside of
    /// one.
    pub fn job(&self, nth: u32) -> CopyJob {
        let mut table = [3, 0, 4, 2, 1].map(|block| (block + nth * 6) % BLOCKS);
        table.rotate_left(nth as usize / 2);
        let mapping = SlotMapping::Blocks {
            table: &table,
            first_token: 5,
        };
        CopyJob {
            planes: 0..LAYERS,
            spans: self.cache(4096).spans(mapping, 0..CHUNK_TOKENS).unwrap(),
            at: 0,
        }
    }

    pub fn slot(&self) -> SlotMut {
        self.arena.try_reserve(self.space.layout().object_len()).unwrap()
    }

    pub fn object(&self, seed: u64) -> Slot {
        let mut slot = self.slot();
        fastrand::Rng::with_seed(seed).fill(&mut slot);
        slot.freeze()
    }

    /// The engine computes: all pages have this value then.
    pub fn compute(&mut self, seed: u64) -> Vec<u8> {
        let mut image = vec![0; self.bytes()];
        fastrand::Rng::with_seed(seed).fill(&mut image);
        let (to, _) = self.pages.device_ptr_mut(&self.engine);
        // SAFETY: as many bytes as the pages have; the source is read before the call returns.
        unsafe { cudarc::driver::result::memcpy_htod_async(to, &image, self.engine.cu_stream()) }.unwrap();
        image
    }

    /// The engine reads: a copy of the pages, which is there when its stream has got so far.
    pub fn attend(&self) -> u64 {
        let read = self.engine.clone_dtod(&self.pages).unwrap();
        read.leak()
    }

    pub fn load(&self, object: &Slot, job: &CopyJob) -> Pending<Slot> {
        self.copier()
            .load(object.clone(), job, Some(&self.mark()))
            .unwrap()
    }

    pub fn poisoned_slot(&self) -> SlotMut {
        let mut slot = self.slot();
        slot.fill(0xEE);
        slot
    }

    /// A chunk's part of the pages.
    pub fn blocks_of(&self, job: &CopyJob, image: &[u8]) -> Vec<u8> {
        let mut image = image.to_vec();
        self.twin_store(&mut image, vec![0; self.space.layout().object_len()], job)
    }

    /// A load as the CPU would have done it to `image`.
    pub fn twin_load(&self, image: &mut [u8], object: &Slot, job: &CopyJob) {
        self.twin(image).load(object.clone(), job).unwrap();
    }

    pub fn twin_store(&self, image: &mut [u8], object: Vec<u8>, job: &CopyJob) -> Vec<u8> {
        self.twin(image).store(object, job).unwrap().wait().unwrap()
    }

    fn twin(&self, image: &mut [u8]) -> CpuCopier {
        let options = CpuOptions {
            threads: 1,
            bytes_per_thread: 1 << 30,
        };
        // SAFETY: the image is there for as long as the copy, which is all that is done with it.
        unsafe { CpuCopier::new(self.cache(image.as_mut_ptr() as u64), options) }
    }
}

/// Device memory as it is now, whatever is under way.
pub fn peek(base: u64, bytes: usize) -> Vec<u8> {
    // SAFETY: device memory is host memory with this driver.
    unsafe { std::slice::from_raw_parts(base as *const u8, bytes) }.to_vec()
}

/// All that an engine does, each with copies that nothing has waited for before. Panics if anything is not as the CPU's
/// copies have it.
pub fn life(layout: &KnownLayout, direct_bytes: usize) {
    let stage = || Stage::new(layout, direct_bytes).unwrap();
    attends_to_what_was_loaded(stage());
    sees_what_was_loaded(stage());
    stores_what_was_computed(stage());
    goes_while_copies_are_under_way(stage());
    loads_while_an_older_load_waits(stage());
}

fn attends_to_what_was_loaded(mut stage: Stage) {
    let (object, job) = (stage.object(1), stage.job(0));
    let mut image = stage.compute(3);
    stage.twin_load(&mut image, &object, &job);
    let load = stage.load(&object, &job);
    load.hold_up(stage.stream()).unwrap();
    let attended = stage.attend();
    stage.engine.synchronize().unwrap();
    assert!(
        peek(attended, stage.bytes()) == image,
        "what the engine attended to"
    );
    assert!(load.is_done().unwrap(), "as the engine's stream says");
    std::mem::forget(load);
    // It would wait once more for what is done.
    std::mem::forget(stage);
}

/// The lane for those that wait is an older load's.
fn loads_while_an_older_load_waits(mut stage: Stage) {
    let copies = [0, 1].map(|nth| (stage.object(nth.into()), stage.job(nth)));
    let mut image = stage.compute(8);
    let older = stage.load(&copies[0].0, &copies[0].1);
    older.hold_up(stage.stream()).unwrap();
    let attended = stage.attend();
    stage.twin_load(&mut image, &copies[0].0, &copies[0].1);
    let mut later = stage.compute(9);
    let younger = stage.load(&copies[1].0, &copies[1].1);
    stage.twin_load(&mut later, &copies[1].0, &copies[1].1);
    younger.wait().unwrap();
    let pages = peek(stage.base(), stage.bytes());
    assert!(
        stage.blocks_of(&copies[1].1, &pages) == stage.blocks_of(&copies[1].1, &later),
        "the younger one's pages"
    );
    drain();
    assert!(
        peek(attended, stage.bytes()) == image,
        "what the older one brought"
    );
    assert!(
        peek(stage.base(), stage.bytes()) == later,
        "what the younger one brought"
    );
    // All is done.
    std::mem::forget(older);
    std::mem::forget(stage);
}

/// By the host, as soon as a load says that it is done.
fn sees_what_was_loaded(mut stage: Stage) {
    let mut image = stage.compute(4);
    let copies = [0, 1].map(|nth| (stage.object(nth.into()), stage.job(nth)));
    let mark = stage.mark();
    let load = |nth: usize| {
        let (object, job) = &copies[nth];
        stage.copier().load(object.clone(), job, Some(&mark)).unwrap()
    };
    let loads = [load(0), load(1)];
    for (load, (object, job)) in loads.into_iter().zip(&copies) {
        load.wait().unwrap();
        stage.twin_load(&mut image, object, job);
        let pages = peek(stage.base(), stage.bytes());
        assert!(
            stage.blocks_of(job, &pages) == stage.blocks_of(job, &image),
            "a chunk's pages"
        );
    }
    drain();
    assert!(
        peek(stage.base(), stage.bytes()) == image,
        "the pages after all loads"
    );
    std::mem::forget(stage);
}

fn stores_what_was_computed(mut stage: Stage) {
    let mut image = stage.compute(5);
    let jobs = [0, 1].map(|nth| stage.job(nth));
    let store = |nth: usize, after: Option<&StreamMark>| {
        stage
            .copier()
            .store(stage.poisoned_slot(), &jobs[nth], after)
            .unwrap()
    };
    let stores = [store(0, Some(&stage.mark())), store(1, None)];
    // The engine writes these blocks again.
    stores[1].hold_up(stage.stream()).unwrap();
    let object_len = stage.space.layout().object_len();
    let expected = [0, 1].map(|nth| stage.twin_store(&mut image, vec![0xEE; object_len], &jobs[nth]));
    stage.compute(6);
    for (stored, expected) in stores.into_iter().zip(expected) {
        assert!(*stored.wait().unwrap() == expected[..], "what was stored");
    }
    std::mem::forget(stage);
}

fn goes_while_copies_are_under_way(mut stage: Stage) {
    let (object, load_job, store_job) = (stage.object(7), stage.job(0), stage.job(1));
    let mut image = stage.compute(7);
    let object_len = stage.space.layout().object_len();
    let expected = stage.twin_store(&mut image, vec![0xEE; object_len], &store_job);
    let load = stage.load(&object, &load_job);
    let slot = stage.poisoned_slot();
    let stored_at = slot.as_ptr() as u64;
    let store = stage
        .copier()
        .store(slot, &store_job, Some(&stage.mark()))
        .unwrap();
    stage.copier = None;
    assert!(
        peek(stored_at, object_len) == expected,
        "what was stored when the copier is gone"
    );
    stage.twin_load(&mut image, &object, &load_job);
    assert!(
        peek(stage.base(), stage.bytes()) == image,
        "the pages when the copier is gone"
    );
    // All is done: these need not wait for it.
    std::mem::forget((load, store));
}

/// Another arena, as after a restart of the daemon: copies under way are from the old one, which goes after them.
#[test]
fn an_arena_takes_the_place_of_another() {
    for seed in SEEDS {
        let mock = Mock::start(seed);
        let mut stage = Stage::new(&KNOWN[1], usize::MAX).unwrap();
        let first = stage.arena.stats().size_bytes;
        let (object, job) = (stage.object(1), stage.job(0));
        let mut image = stage.compute(2);
        let before = stage.load(&object, &job);

        stage.arena = Arena::new(&ArenaOptions {
            size: 2 << 20,
            ..ArenaOptions::default()
        })
        .unwrap();
        let pinned = stage.copier().register(stage.arena.clone());
        assert!(mock.registered() > first + (2 << 20));
        stage.copier().pin(&pinned).unwrap();
        let left = mock.registered();
        assert!(
            (2 << 20..first + (2 << 20)).contains(&left),
            "the old one is still pinned"
        );
        assert!(before.is_done().unwrap(), "its copy had to end before");
        stage.copier().pin(&pinned).unwrap();

        let (next, next_job) = (stage.object(3), stage.job(1));
        stage.load(&next, &next_job).wait().unwrap();
        stage.twin_load(&mut image, &object, &job);
        stage.twin_load(&mut image, &next, &next_job);
        assert!(peek(stage.base(), stage.bytes()) == image);
    }
}
