//! An engine that deals a space's layers into two groups, and keeps a state beside them: three copiers on one worker's
//! lanes.

use std::ops::RangeInclusive;
use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr, DevicePtrMut};
use kvgate::arena::{Arena, ArenaOptions, Slot, SlotMut};
use kvgate::engine::copy::cuda::{Gpu, Lanes, StreamMark};
use kvgate::engine::copy::{
    CopyJob, CpuCopier, CpuOptions, CudaCopier, EngineStream, PagedCache, SlotMapping, Target, Tensor,
};
use kvgate::format::Space;
use kvgate::protocol::TokenShare;

use crate::mock::{CHILD, Mock, SEEDS, drain, fails_in_child};
use crate::stage::{CHUNK_TOKENS, options, peek};

const BLOCKS: u32 = 12;
/// Rows are 64 bytes, and a snapshot is longer: staged, or straight to the pages.
const WAYS: [usize; 2] = [usize::MAX, 900];

/// A group of layers: its pages, and how a chunk lies in them.
struct Group {
    /// First, so that it goes first: it waits for copies that are under way.
    copier: Option<CudaCopier>,
    space: Space,
    tensors: Vec<Tensor>,
    block_tokens: u32,
    /// Of each chunk.
    tokens: TokenShare,
    pages: CudaSlice<u8>,
}

/// The groups of a full space, then that of a state.
struct Groups {
    groups: Vec<Group>,
    full: Space,
    state: Space,
    lanes: Arc<Lanes>,
    engine: Arc<CudaStream>,
    arena: Arena,
}

fn space(members: &str, planes: u32, heads: u32, row_bytes: u32) -> Space {
    let plane =
        |layer| format!(r#"{{"name": "kv", "layer": {layer}, "heads": {heads}, "row_bytes": {row_bytes}}}"#);
    let planes: Vec<String> = (0..planes).map(plane).collect();
    Space::from_json(&format!(
        r#"{{"model": "kvgate/groups", "revision": "1", "dtype": "int8", "chunk_tokens": {CHUNK_TOKENS}, {members},
            "planes": [{}]}}"#,
        planes.join(", ")
    ))
    .unwrap()
}

/// `[block][head][token][row]` for each plane, in pages that are padded by 32 bytes. Addresses count from 0.
fn tensors(space: &Space, planes: &[usize], heads: (u32, u32), block_tokens: u32) -> (usize, Vec<Tensor>) {
    let row = u64::from(space.planes()[planes[0]].row_bytes);
    let (count, tokens) = (u64::from(heads.1 - heads.0), u64::from(block_tokens));
    let page = count * tokens * row + 32;
    let bytes = page * u64::from(BLOCKS);
    let tensor = |(nth, &plane): (usize, &usize)| Tensor {
        address: nth as u64 * bytes,
        bytes,
        axes: "BHNC".into(),
        shape: vec![BLOCKS.into(), count, tokens, row],
        strides: vec![page, tokens * row, row, 1],
        element_bytes: 1,
        planes: vec![plane],
        heads: Some(heads),
        row_offset: 0,
    };
    let tensors = planes.iter().enumerate().map(tensor).collect();
    (bytes as usize * planes.len(), tensors)
}

impl Groups {
    fn new(direct_bytes: usize) -> Self {
        let full = space(r#""kind": "full""#, 6, 4, 64);
        let state = space(r#""kind": "state""#, 3, 2, 992);
        let gpu = Gpu::open(0).unwrap();
        let engine = gpu.context().new_stream().unwrap();
        let arena = Arena::new(&ArenaOptions {
            size: 1 << 20,
            ..ArenaOptions::default()
        })
        .unwrap();
        let lanes = Lanes::new(&gpu, options(direct_bytes));
        let group = |space: &Space, planes: &[usize], heads, block_tokens| {
            let (bytes, tensors) = tensors(space, planes, heads, block_tokens);
            Group {
                copier: None,
                space: space.clone(),
                tensors,
                block_tokens,
                tokens: TokenShare::ALL,
                pages: engine.clone_htod(&vec![0xCD; bytes]).unwrap(),
            }
        };
        let groups = vec![
            group(&full, &[0, 2, 5], (1, 3), 8),
            group(&full, &[1, 3, 4], (1, 3), 16),
            group(&state, &[0, 1, 2], (1, 2), 1),
        ];
        let mut all = Self {
            groups,
            full,
            state,
            lanes,
            engine,
            arena,
        };
        for at in 0..all.groups.len() {
            let cache = all.groups[at].cache(all.base(at));
            // SAFETY: arena and pages are gone after the copier.
            let copier = unsafe { CudaCopier::on(&all.lanes, cache) }.unwrap();
            all.groups[at].copier = Some(copier);
        }
        let pinned = all.copier(0).register(all.arena.clone());
        for at in 0..all.groups.len() {
            all.copier(at).pin(&pinned).unwrap();
        }
        all
    }

    fn copier(&self, at: usize) -> &CudaCopier {
        self.groups[at].copier.as_ref().unwrap()
    }

    fn base(&self, at: usize) -> u64 {
        self.groups[at].pages.device_ptr(&self.engine).0
    }

    fn stream(&self) -> EngineStream {
        EngineStream(self.engine.cu_stream() as u64)
    }

    fn mark(&self) -> StreamMark {
        self.copier(0).mark(self.stream()).unwrap()
    }

    fn slot(&self, space: &Space, fill: impl FnOnce(&mut [u8])) -> SlotMut {
        let mut slot = self.arena.try_reserve(space.layout().object_len()).unwrap();
        fill(&mut slot);
        slot
    }

    /// Objects of the full space and of the state.
    fn objects(&self, seed: u64) -> [Slot; 2] {
        [&self.full, &self.state].map(|space| {
            let random = |bytes: &mut [u8]| fastrand::Rng::with_seed(seed).fill(bytes);
            self.slot(space, random).freeze()
        })
    }

    /// What the engine computes: all pages of all groups are this.
    fn compute(&mut self, seed: u64) -> Vec<Vec<u8>> {
        let engine = Arc::clone(&self.engine);
        let images = self.groups.iter_mut().zip(seed..).map(|(group, seed)| {
            let mut image = vec![0; group.pages.len()];
            fastrand::Rng::with_seed(seed).fill(&mut image);
            let (to, _) = group.pages.device_ptr_mut(&engine);
            // SAFETY: as many bytes as the pages have; the source is read before the call returns.
            unsafe { cudarc::driver::result::memcpy_htod_async(to, &image, engine.cu_stream()) }.unwrap();
            image
        });
        images.collect()
    }

    fn peek(&self, at: usize) -> Vec<u8> {
        peek(self.base(at), self.groups[at].pages.len())
    }

    /// Whether no later group has the same lanes: a wait for its copies is one for those before.
    fn is_last_of_its_lanes(&self, at: usize) -> bool {
        let is_direct = self.copier(at).is_direct();
        (at + 1..self.groups.len()).all(|later| self.copier(later).is_direct() != is_direct)
    }

    fn object_of(&self, at: usize) -> usize {
        usize::from(self.groups[at].space.id() == self.state.id())
    }
}

impl Group {
    fn cache(&self, base: u64) -> PagedCache {
        let at = |tensor: &Tensor| Tensor {
            address: base + tensor.address,
            ..tensor.clone()
        };
        let cache = PagedCache::new(&self.space, &self.tensors.iter().map(at).collect::<Vec<_>>()).unwrap();
        cache.with_tokens(self.tokens).unwrap()
    }

    /// Chunk `nth`'s blocks, apart from those of its neighbours.
    fn job(&self, nth: u32) -> CopyJob {
        let count = self.space.chunk_rows().div_ceil(self.block_tokens);
        let table: Vec<u32> = (0..count).map(|at| (nth * count + at) * 5 % BLOCKS).collect();
        let mapping = SlotMapping::Blocks {
            table: &table,
            first_token: 0,
        };
        CopyJob {
            planes: 0..self.space.planes().len(),
            spans: self
                .cache(1 << 20)
                .spans(mapping, 0..self.space.chunk_rows())
                .unwrap(),
            at: 0,
        }
    }

    /// A copy as the CPU would have done it.
    fn twin(&self, image: &mut [u8]) -> CpuCopier {
        let options = CpuOptions {
            threads: 1,
            bytes_per_thread: 1 << 30,
        };
        // SAFETY: the image is there for as long as the copy, which is all that is done with it.
        unsafe { CpuCopier::new(self.cache(image.as_mut_ptr() as u64), options) }
    }
}

/// A slot that several groups write, each its own planes. The test keeps the slot.
struct Shared(*mut [u8]);

// SAFETY: the memory is the arena's, which the test keeps, as it does the slot; each group writes bytes of its own.
unsafe impl Target for Shared {
    fn bytes(&mut self) -> *mut [u8] {
        self.0
    }
}
// SAFETY: as above.
unsafe impl Send for Shared {}

fn life(mock: &Mock, direct_bytes: usize) -> RangeInclusive<usize> {
    let engines = loads_into_all_groups(mock, Groups::new(direct_bytes));
    stores_out_of_all_groups(Groups::new(direct_bytes));
    goes_one_after_the_other(Groups::new(direct_bytes));
    engines
}

/// Returns the numbers of the engine's own waits: where the copies are in one lane, the last is one for all.
fn loads_into_all_groups(mock: &Mock, mut all: Groups) -> RangeInclusive<usize> {
    let objects = [all.objects(1), all.objects(2)];
    let mut images = all.compute(3);
    let mark = all.mark();
    let mut loads = Vec::new();
    // Chunk by chunk, and group by group.
    for (nth, objects) in (0..).zip(&objects) {
        for (at, image) in images.iter_mut().enumerate() {
            let (job, object) = (all.groups[at].job(nth), &objects[all.object_of(at)]);
            loads.push(all.copier(at).load(object.clone(), &job, Some(&mark)).unwrap());
            all.groups[at].twin(image).load(object.clone(), &job).unwrap();
        }
    }
    let first = mock.waits() + 1;
    for load in &loads {
        load.hold_up(all.stream()).unwrap();
    }
    let engines = first..=mock.waits();
    let attended: Vec<u64> = all
        .groups
        .iter()
        .map(|group| all.engine.clone_dtod(&group.pages).unwrap().leak())
        .collect();
    all.engine.synchronize().unwrap();
    for (at, image) in images.iter().enumerate() {
        assert!(
            peek(attended[at], image.len()) == *image,
            "what the engine attended to in group {at}"
        );
    }
    std::mem::forget((loads, all));
    engines
}

fn stores_out_of_all_groups(mut all: Groups) {
    let mut images = all.compute(5);
    let mark = all.mark();
    let poison = |bytes: &mut [u8]| bytes.fill(0xEE);
    let mut slots = [&all.full, &all.state].map(|space| all.slot(space, poison));
    let (mut stores, mut expected) = (Vec::new(), Vec::new());
    for (at, image) in images.iter_mut().enumerate() {
        let (job, of) = (all.groups[at].job(0), all.object_of(at));
        let shared = Shared(&raw mut *slots[of]);
        stores.push(all.copier(at).store(shared, &job, Some(&mark)).unwrap());
        // Bytes that are the same whatever was there are the group's.
        expected.push([0xEE, 0x11].map(|before| {
            let object = vec![before; slots[of].len()];
            let twin = all.groups[at].twin(image);
            twin.store(object, &job).unwrap().wait().unwrap()
        }));
    }
    // The engine writes these blocks again.
    for (at, store) in stores.iter().enumerate() {
        if all.is_last_of_its_lanes(at) {
            store.hold_up(all.stream()).unwrap();
        }
    }
    all.compute(6);
    for (at, store) in stores.into_iter().enumerate() {
        store.wait().unwrap();
        let [one, other] = &expected[at];
        let stored = slots[all.object_of(at)].iter().zip(one).zip(other);
        let mut of_group = stored.filter(|((_, one), other)| one == other);
        assert!(of_group.all(|((is, one), _)| is == one), "what group {at} stored");
    }
    drain();
    for (space, slot) in [&all.full, &all.state].into_iter().zip(&slots) {
        let header = space.layout().header_len();
        assert!(slot[..header].iter().all(|&byte| byte == 0xEE));
    }
    std::mem::forget((slots, all));
}

/// A copier that goes waits for its copies, and leaves the others' lanes in order.
fn goes_one_after_the_other(mut all: Groups) {
    let objects = all.objects(7);
    let mut images = all.compute(8);
    let mark = all.mark();
    let mut loads = Vec::new();
    for (at, image) in images.iter_mut().enumerate() {
        let (job, object) = (all.groups[at].job(1), &objects[all.object_of(at)]);
        loads.push(all.copier(at).load(object.clone(), &job, Some(&mark)).unwrap());
        all.groups[at].twin(image).load(object.clone(), &job).unwrap();
    }
    for at in 0..all.groups.len() {
        all.groups[at].copier = None;
        assert!(all.peek(at) == images[at], "group {at} when its copier is gone");
        // The next one goes on with the same lanes.
        if let Some(next) = all.groups.get(at + 1) {
            let (job, object) = (next.job(0), &objects[all.object_of(at + 1)]);
            loads.push(all.copier(at + 1).load(object.clone(), &job, None).unwrap());
            let twin = next.twin(&mut images[at + 1]);
            twin.load(object.clone(), &job).unwrap();
        }
    }
    std::mem::forget((loads, all));
}

/// Ranks that have some of the tokens each write one object, through staging or straight, and read it.
#[test]
fn tokens_that_are_dealt_are_right_lazy_and_permuted() {
    for seed in SEEDS {
        for (direct_bytes, heads) in [(usize::MAX, (1, 3)), (usize::MAX, (1, 2)), (200, (1, 2))] {
            let _mock = Mock::start(seed);
            let mut all = Groups::new(direct_bytes);
            let (mut object, mut images) = (vec![0xEE; all.full.layout().object_len()], Vec::new());
            let mut slot = all.slot(&all.full, |bytes| bytes.fill(0xEE));
            for rank in 0..2 {
                let group = &mut all.groups[rank];
                group.copier = None;
                (_, group.tensors) = tensors(&all.full, &[0, 2, 5], heads, 8);
                group.block_tokens = 8;
                group.tokens = TokenShare {
                    rank: rank as u32,
                    size: 2,
                    interleave: 4,
                };
                let cache = all.groups[rank].cache(all.base(rank));
                // SAFETY: arena and pages are gone after the copier.
                let copier = unsafe { CudaCopier::on(&all.lanes, cache) }.unwrap();
                assert_eq!(copier.is_direct(), direct_bytes == 200);
                copier.pin(&copier.register(all.arena.clone())).unwrap();
                all.groups[rank].copier = Some(copier);
            }
            let mut computed = all.compute(seed);
            let mark = all.mark();
            for (rank, image) in computed.iter_mut().enumerate().take(2) {
                let job = all.groups[rank].job(0);
                let shared = Shared(&raw mut *slot);
                let stored = all.copier(rank).store(shared, &job, Some(&mark)).unwrap();
                let _ = stored.wait().unwrap();
                object = all.groups[rank]
                    .twin(image)
                    .store(object, &job)
                    .unwrap()
                    .wait()
                    .unwrap();
            }
            assert!(*slot == *object, "heads {heads:?}");
            // Other blocks.
            for (rank, image) in computed.iter_mut().enumerate().take(2) {
                let job = all.groups[rank].job(1);
                let loaded = all.copier(rank).load(object.clone(), &job, Some(&mark)).unwrap();
                let _ = loaded.wait().unwrap();
                let twin = all.groups[rank].twin(image);
                let _ = twin.load(object.clone(), &job).unwrap().wait().unwrap();
                images.push(image.clone());
            }
            drain();
            for (rank, image) in images.iter().enumerate() {
                assert!(all.peek(rank) == *image, "rank {rank}, heads {heads:?}");
            }
            std::mem::forget((slot, all));
        }
    }
}

#[test]
fn groups_of_one_worker_are_right_lazy_and_permuted() {
    for seed in SEEDS {
        for direct_bytes in WAYS {
            let mock = Mock::start(seed);
            life(&mock, direct_bytes);
            drain();
        }
    }
}

/// "way nth"
#[test]
fn child() {
    let Ok(purpose) = std::env::var(CHILD) else {
        return;
    };
    let words: Vec<usize> = purpose.split(' ').map(|word| word.parse().unwrap()).collect();
    for seed in SEEDS {
        let mock = Mock::start(seed);
        mock.skip_wait(words[1]);
        life(&mock, WAYS[words[0]]);
    }
}

#[test]
fn no_wait_of_a_group_can_be_left_out() {
    for (way, direct_bytes) in WAYS.into_iter().enumerate() {
        let (waits, engines) = {
            let mock = Mock::start(0);
            let engines = life(&mock, direct_bytes);
            (mock.waits(), engines)
        };
        assert!(!fails_in_child("groups::child", &format!("{way} 0"), None));
        let left: Vec<usize> = (1..=waits)
            .filter(|nth| !engines.contains(nth))
            .filter(|nth| !fails_in_child("groups::child", &format!("{way} {nth}"), None))
            .collect();
        assert!(left.is_empty(), "way {way}: of {waits} nobody misses {left:?}");
    }
}

/// Another group costs its table of parts; staging is there.
#[test]
fn more_groups_take_no_more_staging() {
    let mock = Mock::start(0);
    let all = Groups::new(usize::MAX);
    let allocations = || mock.calls("cuMemAllocAsync");
    let streams = mock.calls("cuStreamCreate");
    for _ in 0..5 {
        let before = allocations();
        // SAFETY: the pages are gone after the copier.
        let copier = unsafe { CudaCopier::on(&all.lanes, all.groups[1].cache(all.base(1))) }.unwrap();
        assert!(!copier.is_direct());
        assert_eq!(allocations() - before, 1, "its table");
    }
    // One more for each upload of a table.
    assert!(mock.calls("cuStreamCreate") - streams <= 5);
}

/// A layer that is larger than the buffers: they grow when the copies that use them have ended.
#[test]
fn buffers_grow_for_a_larger_share() {
    for seed in SEEDS {
        let _mock = Mock::start(seed);
        let mut all = Groups::new(usize::MAX);
        let objects = all.objects(1);
        let mut images = all.compute(2);
        // The pages are there.
        all.engine.synchronize().unwrap();
        let job = all.groups[0].job(0);
        let under_way = all.copier(0).load(objects[0].clone(), &job, None).unwrap();

        let large = space(r#""kind": "state""#, 1, 1, 64 << 10);
        let (bytes, tensors) = tensors(&large, &[0], (0, 1), 1);
        let group = Group {
            copier: None,
            space: large.clone(),
            tensors,
            block_tokens: 1,
            tokens: TokenShare::ALL,
            pages: all.engine.clone_htod(&vec![0xCD; bytes]).unwrap(),
        };
        let base = group.pages.device_ptr(&all.engine).0;
        // SAFETY: the pages are gone after the copier.
        let copier = unsafe { CudaCopier::on(&all.lanes, group.cache(base)) }.unwrap();
        let object = all
            .slot(&large, |bytes| fastrand::Rng::with_seed(9).fill(bytes))
            .freeze();
        all.engine.synchronize().unwrap();
        let loaded = copier.load(object.clone(), &group.job(3), None).unwrap();
        loaded.wait().unwrap();
        let mut image = vec![0xCD; bytes];
        group.twin(&mut image).load(object, &group.job(3)).unwrap();
        assert!(peek(base, bytes) == image);

        under_way.wait().unwrap();
        let again = all.copier(0).load(objects[0].clone(), &job, None).unwrap();
        again.wait().unwrap();
        all.groups[0]
            .twin(&mut images[0])
            .load(objects[0].clone(), &job)
            .unwrap();
        assert!(all.peek(0) == images[0]);
    }
}
