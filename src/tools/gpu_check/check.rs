//! Whether copies are right: each known layout is loaded and stored on the GPU, and compared with the CPU's copies.

use std::sync::Arc;

use serde::Serialize;

use super::error::GpuError;
use crate::arena::{Arena, ArenaOptions, SlotMut};
use crate::engine::copy::cuda::{DevicePages, Gpu};
use crate::engine::copy::known::{KNOWN, KnownLayout, Pages};
use crate::engine::copy::{
    CopyJob, CpuOptions, CudaOptions, HostPages, MappingError, PagedCache, SlotMapping, Spans,
};
use crate::format::{Space, SpaceError};

/// A layout, a model and a rank.
#[derive(Debug, Clone)]
pub struct Case {
    pub layout: KnownLayout,
    pub model: &'static str,
    pub space: Space,
    pub pages: Pages,
}

/// The result of one comparison.
#[derive(Debug, Clone, Serialize)]
pub struct LayoutsChecked {
    pub layout: &'static str,
    pub model: &'static str,
    pub heads: Option<(u32, u32)>,
    pub block_tokens: u32,
    /// DMAs go straight to the pages, without a kernel.
    pub direct: bool,
    pub bytes: usize,
}

const CHUNK_TOKENS: u32 = 64;
const BLOCKS: u32 = 9;

/// Every known layout with every model that fits it, for a rank that has all heads and for one that has only some.
pub fn cases() -> Result<Vec<Case>, SpaceError> {
    // GQA; latents of MLA beside an indexer's keys, which 16-byte accesses can't read; K and V of fp8 in odd rows.
    let models = [
        (
            "gqa",
            "bfloat16",
            2,
            r#""mha": {"layers": 4, "heads": 4, "head_dim": 64}"#,
        ),
        (
            "mla and indexer",
            "fp8_e4m3",
            1,
            r#""planes": [{"name": "kv", "layer": 0, "heads": 1, "row_bytes": 656},
                          {"name": "index", "layer": 0, "heads": 1, "row_bytes": 132},
                          {"name": "kv", "layer": 1, "heads": 1, "row_bytes": 656},
                          {"name": "index", "layer": 1, "heads": 1, "row_bytes": 132}]"#,
        ),
        (
            "odd rows",
            "fp8_e4m3",
            1,
            r#""planes": [{"name": "kv", "layer": 0, "heads": 3, "row_bytes": 34},
                          {"name": "kv", "layer": 1, "heads": 3, "row_bytes": 34}]"#,
        ),
    ];
    let mut cases = Vec::new();
    for (model, dtype, element_bytes, planes) in models {
        let space = Space::from_json(&format!(
            r#"{{"model": "kvgate/{model}", "revision": "1", "dtype": "{dtype}", "chunk_tokens": {CHUNK_TOKENS}, {planes}}}"#
        ))?;
        let heads = space.planes()[0].heads;
        for layout in KNOWN {
            // Blocks smaller than a chunk, and larger: then DMAs may go straight to the pages.
            for (block_tokens, own) in [(16, None), (16, Some((1, heads))), (128, None)] {
                let pages = Pages {
                    blocks: BLOCKS,
                    block_tokens,
                    heads: own,
                    element_bytes,
                };
                let fits = space.planes().iter().all(|plane| layout.fits(plane, &pages));
                if fits && own.is_none_or(|(first, end)| first < end) {
                    cases.push(Case {
                        layout,
                        model,
                        space: space.clone(),
                        pages,
                    });
                }
            }
        }
    }
    Ok(cases)
}

/// Loads chunks into pages of the device and stores them back, and compares all bytes of the pages and the object
/// with those of the CPU's copies.
pub fn check(gpu: &Arc<Gpu>, case: &Case, options: CudaOptions) -> Result<LayoutsChecked, GpuError> {
    let Case { space, pages, .. } = case;
    let object_len = space.layout().object_len();
    let arena = Arena::new(&ArenaOptions {
        size: 3 * object_len.next_multiple_of(4096),
        ..ArenaOptions::default()
    })?;
    let slot = || arena.try_reserve(object_len).ok_or(GpuError::Room(object_len));
    let (mut source, mut target) = (slot()?, slot()?);
    fastrand::Rng::with_seed(1).fill(&mut source);
    target.fill(POISON);

    let layout = &case.layout;
    let mut device = DevicePages::new(gpu, space, layout, pages, POISON, options)?;
    let copier = device.copier();
    copier.pin(&copier.register(arena.clone()))?;
    let mut twin = HostPages::new(space, layout, pages, POISON, ONE_THREAD)?;
    let job = CopyJob {
        planes: 0..space.planes().len(),
        spans: some_slots(twin.cache(), pages)?,
        at: 0,
    };

    let source = source.freeze();
    let copier = device.copier();
    let after = copier.mark(device.engine())?;
    copier.load(source.clone(), &job, Some(&after))?.wait()?;
    twin.load(source, &job)?;
    case.compare("pages after a load", &device.image()?, twin.image())?;

    fastrand::Rng::with_seed(2).fill(twin.image_mut());
    device.set_image(twin.image())?;
    let expected = twin.store(vec![POISON; object_len], &job)?;
    let copier = device.copier();
    let after = copier.mark(device.engine())?;
    let target: SlotMut = copier.store(target, &job, Some(&after))?.wait()?;
    case.compare("the object after a store", &target, &expected)?;
    case.compare("pages after a store", &device.image()?, twin.image())?;
    Ok(LayoutsChecked {
        layout: layout.name,
        model: case.model,
        heads: pages.heads,
        block_tokens: pages.block_tokens,
        direct: device.copier().is_direct(),
        bytes: object_len,
    })
}

/// The bytes of pages and slots before anything is written to them.
const POISON: u8 = 0xCD;

const ONE_THREAD: CpuOptions = CpuOptions {
    threads: 1,
    bytes_per_thread: 1 << 30,
};

/// A chunk's tokens in blocks in random order, beginning inside a block; or in slots.
fn some_slots(cache: &PagedCache, pages: &Pages) -> Result<Spans, MappingError> {
    let mut random = fastrand::Rng::with_seed(3);
    if cache.blocks() == 1 {
        let mut slots: Vec<i64> = (0..i64::from(cache.block_tokens())).collect();
        random.shuffle(&mut slots);
        slots.truncate(CHUNK_TOKENS as usize);
        return cache.spans(SlotMapping::Slots(&slots), 0..CHUNK_TOKENS);
    }
    let mut table: Vec<u32> = (0..pages.blocks).collect();
    random.shuffle(&mut table);
    let mapping = SlotMapping::Blocks {
        table: &table,
        first_token: u64::from(pages.block_tokens) - 5,
    };
    cache.spans(mapping, 0..CHUNK_TOKENS)
}

impl Case {
    fn compare(&self, what: &'static str, got: &[u8], must: &[u8]) -> Result<(), GpuError> {
        match got.iter().zip(must).position(|(got, must)| got != must) {
            None => Ok(()),
            Some(at) => Err(GpuError::Differs {
                layout: self.layout.name,
                model: self.model,
                what,
                at,
                got: got[at],
                must: must[at],
            }),
        }
    }
}
