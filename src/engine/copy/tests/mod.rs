//! Tests of every layout against a slow twin without parts, spans and regions: it looks each byte up by the meaning
//! of the tensors' axes.

use std::ops::Range;

use proptest::prelude::*;

use super::cache::PlanePart;
use super::known::{KNOWN, Pages};
use super::*;
use crate::format::{Plane, Space};
use crate::protocol::{Share, TokenShare};

mod refusals;

const POISON: u8 = 0xCD;
const ONE_THREAD: CpuOptions = CpuOptions {
    threads: 1,
    bytes_per_thread: 1 << 30,
};

fn space(chunk_tokens: u32, planes: &[(u32, u32)]) -> Space {
    space_of("full", chunk_tokens, planes)
}

fn space_of(kind: &str, chunk_tokens: u32, planes: &[(u32, u32)]) -> Space {
    let plane = |(layer, &(heads, row_bytes)): (usize, &(u32, u32))| Plane {
        name: "kv".into(),
        layer: u32::try_from(layer).unwrap(),
        heads,
        row_bytes,
    };
    let planes: Vec<Plane> = planes.iter().enumerate().map(plane).collect();
    let json = serde_json::json!({
        "model": "test/copy", "revision": "1", "dtype": "fp8_e4m3", "chunk_tokens": chunk_tokens, "planes": planes,
        "kind": kind,
    });
    Space::from_json(&json.to_string()).unwrap()
}

fn random_bytes(len: usize, seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; len];
    fastrand::Rng::with_seed(seed).fill(&mut bytes);
    bytes
}

/// The places of a chunk's tokens, as an engine gives them.
#[derive(Debug, Clone)]
enum Places {
    Blocks { table: Vec<u32>, first_token: u64 },
    Slots(Vec<i64>),
}

impl Places {
    fn mapping(&self) -> SlotMapping<'_> {
        match self {
            Self::Blocks { table, first_token } => SlotMapping::Blocks {
                table,
                first_token: *first_token,
            },
            Self::Slots(slots) => SlotMapping::Slots(slots),
        }
    }

    /// Block and token in the block, of the `nth` copied token, which is `token` of the chunk.
    fn place(&self, nth: usize, token: u32, block_tokens: u32) -> Option<(u64, u64)> {
        let block_tokens = u64::from(block_tokens);
        match self {
            Self::Blocks { table, first_token } => {
                let at = first_token + u64::from(token);
                Some((table[(at / block_tokens) as usize].into(), at % block_tokens))
            }
            Self::Slots(slots) => {
                let slot = u64::try_from(slots[nth]).ok()?;
                Some((slot / block_tokens, slot % block_tokens))
            }
        }
    }
}

/// Tensors in memory of their own.
struct Engine {
    space: Space,
    tensors: Vec<Tensor>,
    memory: Vec<u8>,
    blocks: u32,
    block_tokens: u32,
}

impl Engine {
    /// Addresses count from the memory's start.
    fn new(space: &Space, tensors: &[Tensor], bytes: usize, blocks: u32, block_tokens: u32) -> Self {
        let memory = vec![POISON; bytes];
        let base = memory.as_ptr() as u64;
        let tensors = tensors
            .iter()
            .map(|tensor| Tensor {
                address: base + tensor.address,
                ..tensor.clone()
            })
            .collect();
        Self {
            space: space.clone(),
            tensors,
            memory,
            blocks,
            block_tokens,
        }
    }

    fn cache(&self) -> PagedCache {
        PagedCache::new(&self.space, &self.tensors).unwrap()
    }

    /// A copier of `cache`, which is this engine's.
    fn copier(cache: PagedCache, options: CpuOptions) -> CpuCopier {
        // SAFETY: the tensors are in the engine's memory, which the test keeps as long as the copier.
        unsafe { CpuCopier::new(cache, options) }
    }

    fn job(&self, places: &Places, tokens: Range<u32>, planes: Range<usize>) -> CopyJob {
        CopyJob {
            planes,
            spans: self.cache().spans(places.mapping(), tokens).unwrap(),
            at: 0,
        }
    }

    /// Pairs of (byte of the object, byte of the memory), one for each copied byte.
    fn twin(&self, places: &Places, tokens: Range<u32>, planes: Range<usize>) -> Vec<(usize, usize)> {
        let base = self.memory.as_ptr() as u64;
        let mut pairs = Vec::new();
        for tensor in &self.tensors {
            let size = |letter| tensor.axes.find(letter).map_or(1, |at| tensor.shape[at]);
            let step = |letter| tensor.axes.find(letter).map_or(0, |at| tensor.strides[at]);
            let (slots, row_letter) = (
                tensor.axes.contains('S'),
                if tensor.axes.contains('C') { 'C' } else { 'D' },
            );
            let (run, element) = (size(row_letter), u64::from(tensor.element_bytes));
            for (l, &plane) in (0_u64..).zip(&tensor.planes) {
                let (of, start) = (
                    &self.space.planes()[plane],
                    self.space.layout().plane(plane).start,
                );
                let chunk_rows = u64::from(self.space.chunk_rows());
                for h in 0..size('H') {
                    let head = u64::from(tensor.heads.map_or(0, |heads| heads.0)) + h;
                    for (nth, token) in tokens.clone().enumerate() {
                        let Some((block, offset)) = places.place(nth, token, self.block_tokens) else {
                            continue;
                        };
                        let of_token = match slots {
                            true => offset * step('S'),
                            false => block * step('B') + offset * step('N'),
                        };
                        for k in 0..size('K') {
                            for byte in 0..run * element {
                                let address = tensor.address
                                    + l * step('L')
                                    + of_token
                                    + h * step('H')
                                    + k * step('K')
                                    + (byte / element) * step(row_letter)
                                    + byte % element;
                                let row = head * chunk_rows + u64::from(token);
                                let in_row = u64::from(tensor.row_offset) + k * run * element + byte;
                                let object = start as u64 + row * u64::from(of.row_bytes) + in_row;
                                if planes.contains(&plane) {
                                    pairs.push((object as usize, (address - base) as usize));
                                }
                            }
                        }
                    }
                }
            }
        }
        pairs
    }

    /// Loads and stores by `cache`, which may be a wrong one; false: some byte differs from the twin's.
    fn is_right(
        &mut self,
        cache: &PagedCache,
        job: &CopyJob,
        pairs: &[(usize, usize)],
        whole: bool,
        options: CpuOptions,
    ) -> bool {
        let object = random_bytes(self.space.layout().object_len(), 1);
        self.memory.fill(POISON);
        let mut expected = self.memory.clone();
        pairs.iter().for_each(|&(from, to)| expected[to] = object[from]);
        let copier = Engine::copier(cache.clone(), options);
        copier.load(object.clone(), job).unwrap().wait().unwrap();
        if self.memory != expected {
            return false;
        }
        if !whole {
            return true;
        }
        let pages = random_bytes(self.memory.len(), 2);
        self.memory.copy_from_slice(&pages);
        let mut expected = vec![POISON; object.len()];
        pairs.iter().for_each(|&(to, from)| expected[to] = pages[from]);
        let stored = copier
            .store(vec![POISON; object.len()], job)
            .unwrap()
            .wait()
            .unwrap();
        stored == expected && self.memory == pages
    }
}

/// One tensor for each plane, its axes in any order, with gaps anywhere.
#[derive(Debug, Clone)]
struct AnyLayout {
    /// The space is one of states, whose chunks have one row.
    is_state: bool,
    /// Rows of a chunk.
    chunk_tokens: u32,
    blocks: u32,
    block_tokens: u32,
    element_bytes: u32,
    /// Heads: the plane's, those before the rank's, the rank's; elements of K (and of V) or of the row; order;
    /// gaps.
    planes: Vec<AnyPlane>,
    slots: bool,
}

#[derive(Debug, Clone)]
struct AnyPlane {
    heads: (u32, u32, u32),
    elements: u32,
    apart: bool,
    order: Vec<char>,
    gaps: Vec<u64>,
}

fn any_plane(slots: bool) -> impl Strategy<Value = AnyPlane> {
    let heads =
        (0_u32..3, 1_u32..4, 0_u32..3).prop_map(|(before, own, after)| (before + own + after, before, own));
    (heads, 1_u32..20, any::<bool>()).prop_flat_map(move |(heads, elements, apart)| {
        let mut axes = if slots {
            vec!['S', 'H']
        } else {
            vec!['B', 'N', 'H']
        };
        axes.extend(apart.then_some('K'));
        let gaps = prop::collection::vec(0_u64..3, axes.len());
        (Just(axes).prop_shuffle(), gaps).prop_map(move |(order, gaps)| AnyPlane {
            heads,
            elements,
            apart,
            order,
            gaps,
        })
    })
}

fn any_layout() -> impl Strategy<Value = AnyLayout> {
    let element = prop::sample::select(vec![1_u32, 2, 4, 16]);
    let chunk = (1_u32..40, prop::bool::weighted(0.2));
    let chunk = chunk.prop_map(|(tokens, is_state)| (if is_state { 1 } else { tokens }, is_state));
    (chunk, 1_u32..12, 1_u32..24, element, any::<bool>()).prop_flat_map(
        |((chunk_tokens, is_state), spare, block_tokens, element_bytes, slots)| {
            prop::collection::vec(any_plane(slots), 1..5).prop_map(move |planes| AnyLayout {
                is_state,
                chunk_tokens,
                // A chunk may begin inside of a block.
                blocks: chunk_tokens.div_ceil(block_tokens) + 1 + spare,
                block_tokens,
                element_bytes,
                planes,
                slots,
            })
        },
    )
}

impl AnyLayout {
    fn engine(&self) -> Engine {
        let row = |plane: &AnyPlane| plane.elements * self.element_bytes * if plane.apart { 2 } else { 1 };
        let planes: Vec<(u32, u32)> = self
            .planes
            .iter()
            .map(|plane| (plane.heads.0, row(plane)))
            .collect();
        let space = match self.is_state {
            true => space_of("state", 40, &planes),
            false => space(self.chunk_tokens, &planes),
        };
        let mut end = 16;
        let mut tensors = Vec::new();
        for (index, plane) in self.planes.iter().enumerate() {
            let size = |axis: char| -> u64 {
                match axis {
                    'B' => self.blocks.into(),
                    'N' => self.block_tokens.into(),
                    'S' => u64::from(self.blocks * self.block_tokens),
                    'H' => plane.heads.2.into(),
                    _ => 2,
                }
            };
            let element = u64::from(self.element_bytes);
            let mut strides = vec![element];
            let mut extent = u64::from(plane.elements) * element;
            for (&axis, gap) in plane.order.iter().zip(&plane.gaps) {
                let stride = extent + gap * element;
                strides.push(stride);
                extent += (size(axis) - 1) * stride;
            }
            let letters = std::iter::once('D').chain(plane.order.iter().copied());
            let sizes =
                std::iter::once(plane.elements.into()).chain(plane.order.iter().map(|&axis| size(axis)));
            tensors.push(Tensor {
                address: end,
                bytes: extent,
                axes: letters.collect(),
                shape: sizes.collect(),
                strides,
                element_bytes: self.element_bytes,
                planes: vec![index],
                heads: Some((plane.heads.1, plane.heads.1 + plane.heads.2)),
                row_offset: 0,
            });
            end += extent + 16;
        }
        let (blocks, block_tokens) = match self.slots {
            true => (1, self.blocks * self.block_tokens),
            false => (self.blocks, self.block_tokens),
        };
        Engine::new(&space, &tensors, end as usize, blocks, block_tokens)
    }

    fn places(&self, seed: u64, first_token: u64) -> Places {
        let mut random = fastrand::Rng::with_seed(seed);
        if self.slots || random.bool() {
            let mut slots: Vec<i64> = (0..i64::from(self.blocks * self.block_tokens)).collect();
            if random.bool() {
                random.shuffle(&mut slots);
            }
            slots.truncate(self.chunk_tokens as usize);
            return Places::Slots(slots);
        }
        let mut table: Vec<u32> = (0..self.blocks).collect();
        random.shuffle(&mut table);
        Places::Blocks {
            table,
            first_token: first_token % u64::from(self.block_tokens),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_layout_is_as_its_twin(
        layout in any_layout(),
        seed: u64,
        first_token in 0_u64..24,
        threads in 1_usize..4,
    ) {
        let mut engine = layout.engine();
        let (cache, places) = (engine.cache(), layout.places(seed, first_token));
        let (tokens, planes) = (0..layout.chunk_tokens, 0..layout.planes.len());
        let options = CpuOptions { threads, bytes_per_thread: 64 };
        let job = engine.job(&places, tokens.clone(), planes.clone());
        let pairs = engine.twin(&places, tokens, planes);
        prop_assert!(engine.is_right(&cache, &job, &pairs, true, options));
    }

    #[test]
    fn some_tokens_of_some_planes_are_as_their_twin(
        layout in any_layout(),
        seed: u64,
        cuts in (0_u32..40, 0_u32..40),
        plane_cuts in (0_usize..5, 0_usize..5),
        holes: u64,
    ) {
        let mut engine = layout.engine();
        let cut = |at: u32| at.min(layout.chunk_tokens);
        let tokens = cut(cuts.0.min(cuts.1))..cut(cuts.0.max(cuts.1));
        let cut = |at: usize| at.min(layout.planes.len());
        let planes = cut(plane_cuts.0.min(plane_cuts.1))..cut(plane_cuts.0.max(plane_cuts.1));
        let mut places = layout.places(seed, seed % 7);
        if let Places::Slots(slots) = &mut places {
            slots.truncate(tokens.len());
            let holed = slots.iter_mut().enumerate().filter(|(nth, _)| holes >> (nth % 64) & 1 == 1);
            holed.for_each(|(_, slot)| *slot = -1);
        }
        let job = engine.job(&places, tokens.clone(), planes.clone());
        let pairs = engine.twin(&places, tokens, planes);
        let cache = engine.cache();
        prop_assert!(engine.is_right(&cache, &job, &pairs, false, ONE_THREAD));
    }

    /// An engine's groups have some of the planes each: a copy of one leaves the planes of the others alone.
    #[test]
    fn groups_put_one_chunk_together(layout in any_layout(), seed: u64, dealt: [bool; 4]) {
        let mut engine = layout.engine();
        let places = layout.places(seed, seed % 7);
        let (tokens, planes) = (0..layout.chunk_tokens, 0..layout.planes.len());
        let job = engine.job(&places, tokens.clone(), planes.clone());
        let groups = [true, false].map(|group| planes.clone().filter(|&at| dealt[at] == group).collect::<Vec<_>>());
        let groups = groups.into_iter().filter(|group| !group.is_empty());
        let groups: Vec<_> = groups
            .map(|group| {
                let of_group: Vec<Tensor> = group.iter().map(|&plane| engine.tensors[plane].clone()).collect();
                let pairs = group.iter().flat_map(|&at| engine.twin(&places, tokens.clone(), at..at + 1));
                (PagedCache::new(&engine.space, &of_group).unwrap(), pairs.collect::<Vec<_>>())
            })
            .collect();
        let object = random_bytes(engine.space.layout().object_len(), 1);
        let mut expected = engine.memory.clone();
        for (cache, pairs) in &groups {
            pairs.iter().for_each(|&(from, to)| expected[to] = object[from]);
            let copier = Engine::copier(cache.clone(), ONE_THREAD);
            copier.load(object.clone(), &job).unwrap().wait().unwrap();
            prop_assert!(engine.memory == expected);
        }
        let pages = random_bytes(engine.memory.len(), 2);
        engine.memory.copy_from_slice(&pages);
        let mut expected = vec![POISON; object.len()];
        let mut stored = expected.clone();
        for (cache, pairs) in &groups {
            pairs.iter().for_each(|&(to, from)| expected[to] = pages[from]);
            stored = Engine::copier(cache.clone(), ONE_THREAD).store(stored, &job).unwrap().wait().unwrap();
            prop_assert!(stored == expected);
        }
    }

    /// A cache at tensor parallelism 2 or 3 writes what one rank reads, and the other way round, in other layouts.
    #[test]
    fn ranks_of_any_layouts_put_one_chunk_together(
        one in 0_usize..KNOWN.len(),
        other in 0_usize..KNOWN.len(),
        ranks in 1_u32..4,
        block_tokens in 1_u32..20,
        seed: u64,
    ) {
        let space = space(17, &[(6, 32), (6, 32), (6, 64)]);
        let pages = |ranks: u32, rank| Pages {
            blocks: 17 / block_tokens + 3,
            block_tokens,
            heads: Some((rank * (6 / ranks), (rank + 1) * (6 / ranks))),
            element_bytes: 2,
        };
        let known = |layout: usize, ranks| {
            let layout = KNOWN[layout];
            layout.fits(&space.planes()[0], &pages(ranks, 0)).then_some(layout)
        };
        let (Some(one), Some(other)) = (known(one, ranks), known(other, 1)) else {
            return Ok(());
        };
        let object = random_bytes(space.layout().object_len(), seed);
        let mut together = object.clone();
        together[space.layout().header_len()..].fill(POISON);
        for rank in 0..ranks {
            let engine = known_engine(&space, one, &pages(ranks, rank));
            let (copier, job) = whole_job(&engine, seed);
            copier.load(object.clone(), &job).unwrap().wait().unwrap();
            together = copier.store(together, &job).unwrap().wait().unwrap();
        }
        prop_assert!(together == object, "{} by {ranks} ranks", one.name);
        let engine = known_engine(&space, other, &pages(1, 0));
        let (copier, job) = whole_job(&engine, seed + 1);
        copier.load(together, &job).unwrap().wait().unwrap();
        let back = copier.store(object.clone(), &job).unwrap().wait().unwrap();
        prop_assert!(back == object, "read by {}", other.name);
    }
}

fn known_engine(space: &Space, layout: known::KnownLayout, pages: &Pages) -> Engine {
    let (bytes, tensors) = layout.tensors(space, pages);
    let cache_blocks = match layout.order.contains('S') {
        true => (1, pages.blocks * pages.block_tokens),
        false => (pages.blocks, pages.block_tokens),
    };
    Engine::new(space, &tensors, bytes as usize, cache_blocks.0, cache_blocks.1)
}

/// A whole chunk in random slots.
fn whole_job(engine: &Engine, seed: u64) -> (CpuCopier, CopyJob) {
    let mut slots: Vec<i64> = (0..i64::from(engine.blocks * engine.block_tokens)).collect();
    fastrand::Rng::with_seed(seed).shuffle(&mut slots);
    let chunk_tokens = engine.space.chunk_tokens();
    slots.truncate(chunk_tokens as usize);
    let job = engine.job(
        &Places::Slots(slots),
        0..chunk_tokens,
        0..engine.space.planes().len(),
    );
    (Engine::copier(engine.cache(), ONE_THREAD), job)
}

#[test]
fn known_layouts_are_as_their_twin() {
    // K and V apart, latents of MLA with an indexer's keys beside them, and heads of a rank.
    let mha = space(24, &[(4, 64), (4, 64), (4, 64)]);
    let latents = space(24, &[(1, 656), (1, 132), (1, 656), (1, 132)]);
    let mut tried = 0;
    for layout in KNOWN {
        for (space, heads) in [
            (&mha, None),
            (&mha, Some((1, 3))),
            (&mha, Some((3, 4))),
            (&latents, None),
        ] {
            let pages = Pages {
                blocks: 7,
                block_tokens: 8,
                heads,
                element_bytes: 2,
            };
            if !space.planes().iter().all(|plane| layout.fits(plane, &pages)) {
                continue;
            }
            let mut engine = known_engine(space, layout, &pages);
            let places = match layout.order.contains('S') {
                true => Places::Slots((0..24).map(|token| (token * 5) % 56).collect()),
                false => Places::Blocks {
                    table: vec![5, 0, 6, 2],
                    first_token: 3,
                },
            };
            let job = engine.job(&places, 0..24, 0..space.planes().len());
            let pairs = engine.twin(&places, 0..24, 0..space.planes().len());
            assert_eq!(
                pairs.len(),
                engine
                    .cache()
                    .parts()
                    .iter()
                    .map(|part| { (part.heads.1 - part.heads.0) as usize * 24 * part.run_bytes as usize })
                    .sum::<usize>()
            );
            let cache = engine.cache();
            assert!(
                engine.is_right(&cache, &job, &pairs, true, ONE_THREAD),
                "{} {heads:?}",
                layout.name
            );
            tried += 1;
        }
    }
    assert!(tried > KNOWN.len());
}

type Mistake = (&'static str, fn(&mut PlanePart));

/// A test must notice each number of a copy that is made wrong.
#[test]
fn every_planted_mistake_is_caught() {
    let space = space(12, &[(4, 32), (4, 32)]);
    let pages = Pages {
        blocks: 6,
        block_tokens: 4,
        heads: Some((1, 3)),
        element_bytes: 2,
    };
    let layout = KNOWN.iter().find(|layout| layout.order == "LBKNHD").unwrap();
    let places = Places::Blocks {
        table: vec![4, 1, 3, 0],
        first_token: 2,
    };
    let mistakes: [Mistake; 10] = [
        ("block stride", |part| part.block_stride -= 16),
        ("token stride", |part| part.token_stride += 16),
        ("token stride, less", |part| part.token_stride -= 16),
        ("head stride", |part| part.head_stride += 16),
        ("no head stride", |part| part.head_stride = 0),
        ("address", |part| part.address += 2),
        ("row offset", |part| part.row_offset ^= 16),
        ("run", |part| part.run_bytes -= 2),
        ("heads", |part| part.heads = (0, 2)),
        ("one head", |part| part.heads.1 -= 1),
    ];
    let (bytes, tensors) = layout.tensors(&space, &pages);
    // A wrong stride may lead out of the cache, but not out of the memory.
    let mut engine = Engine::new(&space, &tensors, bytes as usize * 2, 6, 4);
    let job = engine.job(&places, 0..12, 0..2);
    let pairs = engine.twin(&places, 0..12, 0..2);
    let right = engine.cache();
    assert!(engine.is_right(&right, &job, &pairs, true, ONE_THREAD));
    for part in 0..right.parts().len() {
        for (name, plant) in mistakes {
            let mut wrong = right.clone();
            plant(wrong.part_mut(part));
            assert!(
                !engine.is_right(&wrong, &job, &pairs, true, ONE_THREAD),
                "nobody notices a wrong {name} in part {part}"
            );
        }
    }
}

/// As vLLM shows states: one row of bytes a block, in pages that are padded, with one share for each rank.
#[test]
fn a_chunk_of_a_state_is_one_snapshot_of_a_rank() {
    let space = space_of("state", 256, &[(2, 40), (2, 40)]);
    assert_eq!(space.layout().payload_len(), 2 * 2 * 40);
    let tensor = |plane: u64| Tensor {
        address: plane * 64,
        bytes: 5 * 128 - plane * 64,
        axes: "BHNC".into(),
        shape: vec![5, 1, 1, 40],
        strides: vec![128, 40, 40, 1],
        element_bytes: 1,
        planes: vec![plane as usize],
        heads: Some((1, 2)),
        row_offset: 0,
    };
    let mut engine = Engine::new(&space, &[tensor(0), tensor(1)], 5 * 128, 5, 1);
    let cache = engine.cache();
    assert_eq!((cache.block_tokens(), cache.token_bytes()), (1, 80));
    let places = Places::Blocks {
        table: vec![3],
        first_token: 0,
    };
    let job = engine.job(&places, 0..1, 0..2);
    let pairs = engine.twin(&places, 0..1, 0..2);
    assert_eq!(pairs.len(), 80);
    assert!(engine.is_right(&cache, &job, &pairs, true, ONE_THREAD));
    let blocks = |table: &[u32], tokens| {
        let mapping = SlotMapping::Blocks {
            table,
            first_token: 0,
        };
        cache.spans(mapping, tokens)
    };
    assert!(matches!(blocks(&[3, 4], 0..2), Err(MappingError::Tokens { .. })));
    let nothing = CopyJob {
        spans: blocks(&[], 0..0).unwrap(),
        ..job
    };
    let copier = Engine::copier(engine.cache(), ONE_THREAD);
    let error = copier.store(vec![0; space.layout().object_len()], &nothing).err();
    assert!(
        matches!(
            error,
            Some(CopyError::Tokens {
                tokens: 0,
                chunk_tokens: 1
            })
        ),
        "{error:?}"
    );
}

#[test]
fn a_part_of_an_object_is_enough_for_its_planes() {
    let space = space(8, &[(2, 16), (2, 16), (2, 16)]);
    let pages = Pages {
        blocks: 4,
        block_tokens: 4,
        heads: None,
        element_bytes: 2,
    };
    let engine = known_engine(&space, KNOWN[0], &pages);
    let places = Places::Blocks {
        table: vec![1, 3],
        first_token: 0,
    };
    let object = random_bytes(space.layout().object_len(), 3);
    let (second, third) = (space.layout().plane(1), space.layout().plane(2));
    let job = CopyJob {
        at: second.start,
        ..engine.job(&places, 0..8, 1..3)
    };
    let copier = Engine::copier(engine.cache(), ONE_THREAD);
    let part = object[second.start..third.end].to_vec();
    copier.load(part.clone(), &job).unwrap().wait().unwrap();
    for (from, to) in engine.twin(&places, 0..8, 1..3) {
        assert_eq!(engine.memory[to], object[from]);
    }
    let short = copier.load(part[1..].to_vec(), &job).err().unwrap();
    assert!(matches!(short, CopyError::Object { .. }), "{short}");
    let other = CopyJob { planes: 2..4, ..job };
    assert!(matches!(
        copier.load(part, &other).err().unwrap(),
        CopyError::Planes { .. }
    ));
}

#[test]
fn a_rank_stores_only_what_it_owns() {
    let space = space(4, &[(4, 16), (4, 16)]);
    let pages = Pages {
        blocks: 2,
        block_tokens: 4,
        heads: Some((0, 4)),
        element_bytes: 2,
    };
    let mut engine = known_engine(&space, KNOWN[1], &pages);
    engine.memory.fill(7);
    // Two heads of the first plane, another of the second.
    let share = |planes, heads| Share {
        planes,
        heads,
        tokens: TokenShare::ALL,
    };
    let own = [
        share((0, 1), (0, 1)),
        share((0, 1), (3, 4)),
        share((1, 2), (2, 3)),
    ];
    let own = engine.cache().only(&own);
    let places = Places::Blocks {
        table: vec![1],
        first_token: 0,
    };
    let job = engine.job(&places, 0..4, 0..2);
    let stored = Engine::copier(own, ONE_THREAD).store(vec![0; space.layout().object_len()], &job);
    let stored = stored.unwrap().wait().unwrap();
    let head = |plane: usize, head: usize| {
        let start = space.layout().plane(plane).start + head * 64;
        stored[start..start + 64].iter().all(|&byte| byte == 7)
    };
    let written: Vec<bool> = (0..2)
        .flat_map(|plane| (0..4).map(move |at| (plane, at)))
        .map(|(p, h)| head(p, h))
        .collect();
    assert_eq!(written, [true, false, false, true, false, false, true, false]);
    assert_eq!(
        stored.iter().map(|&byte| usize::from(byte)).sum::<usize>(),
        7 * 3 * 64
    );
}
