//! Ranks of an engine whose model keeps several kinds of KV. Each kind's layers are dealt into groups, and what must be
//! in their pages is known byte by byte.

use std::ops::Range;
use std::time::Duration;

use kvgate::engine::client::Client;
use kvgate::engine::copy::{Copier, CpuCopier, CpuOptions, PagedCache, SlotMapping, Spans, Tensor};
use kvgate::engine::rank::{
    ComputedChunk, ComputedKind, Hold, KindPages, LoadJob, LoadProgress, LookupBreaker, StoreJob, Stored,
    WantedChunk, WantedKind, Worker, WorkerError,
};
use kvgate::format::Space;
use kvgate::protocol::{AttachRequest, Order, TokenShare};

use super::fixture::Prompt;

pub const CHUNK_TOKENS: u32 = 16;
const BLOCKS: u32 = 97;
const POISON: u8 = 0xA5;

/// A space of this kind, one plane a layer; `kind` and `draft` as JSON members.
pub fn space_of(members: &str, layers: &[u32], heads: u32, row_bytes: u32) -> Space {
    let planes: Vec<_> = layers
        .iter()
        .map(|&layer| ("kv", layer, heads, row_bytes))
        .collect();
    space_with(members, &planes)
}

/// The same with these planes: name, layer, heads and bytes of a row.
pub fn space_with(members: &str, planes: &[(&str, u32, u32, u32)]) -> Space {
    let plane = |(name, layer, heads, row_bytes): &(&str, u32, u32, u32)| {
        format!(r#"{{"name": "{name}", "layer": {layer}, "heads": {heads}, "row_bytes": {row_bytes}}}"#)
    };
    let planes: Vec<String> = planes.iter().map(plane).collect();
    Space::from_json(&format!(
        r#"{{"model": "test/kinds", "revision": "1", "dtype": "int8", "chunk_tokens": {CHUNK_TOKENS}, {members},
            "planes": [{}]}}"#,
        planes.join(", ")
    ))
    .unwrap()
}

/// A group of layers: planes of the space, and tokens of a block.
pub type Dealt = (Vec<usize>, u32);

/// A kind of KV, and how an engine deals its layers.
#[derive(Clone)]
pub struct DealtKind {
    pub space: Space,
    pub groups: Vec<Dealt>,
}

/// The place of a rank in its engine.
#[derive(Clone, Copy)]
pub struct Place {
    pub rank: u32,
    pub world_size: u32,
    pub tp: Option<(u32, u32)>,
    pub layers: Option<(u32, u32)>,
    pub tokens: TokenShare,
}

pub const ALONE: Place = Place {
    rank: 0,
    world_size: 1,
    tp: None,
    layers: None,
    tokens: TokenShare::ALL,
};

/// A rank with memory of its own.
pub struct TestRank {
    pub worker: Worker,
    place: Place,
    kinds: Vec<RankKind>,
}

struct RankKind {
    space: Space,
    groups: Vec<Group>,
}

/// Tensors `[block][head][token][row]`, one for each plane that the rank has. Of each chunk it has `tokens`.
struct Group {
    planes: Vec<Plane>,
    block_tokens: u32,
    tokens: TokenShare,
    cache: PagedCache,
}

struct Plane {
    /// Index in the space.
    index: usize,
    /// Those of the rank.
    heads: Range<u32>,
    memory: Vec<u8>,
}

impl Place {
    fn heads(&self, heads: u32) -> Range<u32> {
        let (rank, size) = self.tp.unwrap_or((0, 1));
        let first = rank * heads / size;
        first..((rank + 1) * heads / size).max(first + 1)
    }

    fn has(&self, layer: u32) -> bool {
        self.layers
            .is_none_or(|(first, end)| (first..end).contains(&layer))
    }
}

impl TestRank {
    pub fn new(client: &Client, instance: &str, place: Place, kinds: &[DealtKind]) -> Self {
        let kinds: Vec<RankKind> = kinds.iter().map(|dealt| RankKind::new(dealt, place)).collect();
        let pages = kinds.iter().map(|kind| KindPages {
            space: kind.space.clone(),
            is_draft: !kind.space.draft().is_empty(),
            groups: kind.groups.iter().map(|group| group.cache.clone()).collect(),
        });
        let options = CpuOptions {
            threads: 1,
            bytes_per_thread: 1 << 30,
        };
        // SAFETY: the memory goes after the worker, and is not touched while a job is under way.
        let make = move |cache| Ok(Copier::Cpu(unsafe { CpuCopier::new(cache, options) }));
        let attach = AttachRequest {
            instance: instance.to_owned(),
            rank: place.rank,
            world_size: place.world_size,
            layers: place.layers,
            tp: place.tp,
            tokens: place.tokens,
        };
        let breaker = LookupBreaker::new(3, Duration::from_secs(1));
        let worker = Worker::new(client, attach, pages.collect(), make, breaker).unwrap();
        Self { worker, place, kinds }
    }

    /// Fills the pages of these chunks with what the model would compute.
    pub fn compute(&mut self, kind: usize, chunks: &[usize]) {
        let rank_kind = &mut self.kinds[kind];
        let space = rank_kind.space.clone();
        for group in &mut rank_kind.groups {
            for &chunk in chunks {
                group.each_row(&space, chunk, |plane, head, row, bytes| {
                    bytes.copy_from_slice(&row_of(&space, plane, head, chunk, row));
                });
            }
        }
    }

    /// Whether the pages of a chunk are what the model would compute; None: they are untouched.
    pub fn is_right(&mut self, kind: usize, chunk: usize, rows: &Range<u32>) -> Option<bool> {
        let rank_kind = &mut self.kinds[kind];
        let space = rank_kind.space.clone();
        let (mut right, mut untouched) = (true, true);
        for group in &mut rank_kind.groups {
            group.each_row(&space, chunk, |plane, head, row, bytes| {
                let is_untouched = bytes.iter().all(|&byte| byte == POISON);
                untouched &= is_untouched;
                right &= match rows.contains(&row) {
                    true => bytes == row_of(&space, plane, head, chunk, row),
                    false => is_untouched,
                };
            });
        }
        (!untouched).then_some(right)
    }

    pub async fn store(&self, prompt: &Prompt, kinds: &[(usize, Vec<usize>)]) -> Vec<Stored> {
        self.store_held(prompt, kinds, &Hold::default()).await.unwrap()
    }

    pub async fn store_held(
        &self,
        prompt: &Prompt,
        kinds: &[(usize, Vec<usize>)],
        hold: &Hold,
    ) -> Result<Vec<Stored>, WorkerError> {
        let computed = kinds
            .iter()
            .map(|(kind, chunks)| self.computed(prompt, *kind, chunks));
        self.store_of(&computed.collect::<Vec<_>>(), hold).await
    }

    pub async fn store_of(&self, kinds: &[ComputedKind], hold: &Hold) -> Result<Vec<Stored>, WorkerError> {
        let store = StoreJob {
            kinds,
            after: None,
            deadline: Duration::from_secs(20),
        };
        self.worker.store(store, hold).await
    }

    pub fn computed(&self, prompt: &Prompt, kind: usize, chunks: &[usize]) -> ComputedKind {
        let computed = |&chunk: &usize| ComputedChunk {
            hash: prompt.hashes[chunk],
            parent: prompt.parent(chunk),
            spans: self.spans(kind, chunk, 0..u32::MAX),
        };
        ComputedKind {
            kind,
            chunks: chunks.iter().map(computed).collect(),
        }
    }

    /// Loads these chunks; (kind, index) of those that failed.
    pub async fn load(
        &self,
        prompt: &Prompt,
        id: &str,
        order: Order,
        kinds: &[(usize, Vec<usize>)],
        rows: Range<u32>,
    ) -> Vec<(usize, usize)> {
        let wanted = |(kind, chunks): &(usize, Vec<usize>)| WantedKind {
            kind: *kind,
            chunks: chunks
                .iter()
                .map(|&chunk| WantedChunk {
                    hash: prompt.hashes[chunk],
                    spans: self.spans(*kind, chunk, rows.clone()),
                })
                .collect(),
        };
        let wanted: Vec<WantedKind> = kinds.iter().map(wanted).collect();
        let progress = std::sync::Arc::new(LoadProgress::new(wanted.iter().map(|wanted| {
            let planes = self.kinds[wanted.kind].space.planes().len();
            (wanted.kind, planes, wanted.chunks.len())
        })));
        let load = LoadJob {
            id,
            kinds: &wanted,
            order,
            deadline_ms: Some(20_000),
            after: None,
        };
        let failed = self.worker.load(load, &progress).await.unwrap();
        // Every plane has come, or never will.
        for wanted in &wanted {
            let planes = self.kinds[wanted.kind].space.planes().len();
            (0..planes).for_each(|plane| progress.wait(wanted.kind, plane));
        }
        failed
            .into_iter()
            .map(|failed| (failed.kind, failed.index))
            .collect()
    }

    /// Where a chunk's rows are in each group; of them only `rows` are copied.
    pub fn spans(&self, kind: usize, chunk: usize, rows: Range<u32>) -> Vec<Spans> {
        let of = &self.kinds[kind];
        let all = of.space.chunk_rows();
        let spans = |group: &Group| {
            let table = group.table(&of.space, chunk);
            let mapping = SlotMapping::Blocks {
                table: &table,
                first_token: 0,
            };
            group
                .cache
                .spans(mapping, rows.start.min(all)..rows.end.min(all))
                .unwrap()
        };
        of.groups.iter().map(spans).collect()
    }

    /// Whether the rank has anything of this kind.
    pub fn has(&self, kind: usize) -> bool {
        let layers = self.kinds[kind].space.planes().iter();
        layers.into_iter().any(|plane| self.place.has(plane.layer))
    }
}

impl RankKind {
    fn new(dealt: &DealtKind, place: Place) -> Self {
        let space = &dealt.space;
        let group = |(planes, block_tokens): &Dealt| {
            let planes: Vec<usize> = planes
                .iter()
                .copied()
                .filter(|&plane| place.has(space.planes()[plane].layer))
                .collect();
            (!planes.is_empty()).then(|| Group::new(space, planes, *block_tokens, place))
        };
        Self {
            space: space.clone(),
            groups: dealt.groups.iter().filter_map(group).collect(),
        }
    }
}

impl Group {
    fn new(space: &Space, planes: Vec<usize>, block_tokens: u32, place: Place) -> Self {
        let (planes, tensors): (Vec<Plane>, Vec<Tensor>) = planes
            .into_iter()
            .map(|index| Plane::new(space, index, block_tokens, place))
            .unzip();
        // Each rank has all of a state, and of a draft whose engine does not deal it.
        let is_dealt = space.chunk_rows() > 1 && space.draft().is_empty();
        let tokens = if is_dealt { place.tokens } else { TokenShare::ALL };
        Self {
            planes,
            block_tokens,
            tokens,
            cache: PagedCache::new(space, &tensors)
                .unwrap()
                .with_tokens(tokens)
                .unwrap(),
        }
    }

    /// Blocks of a chunk, scattered over the memory.
    fn table(&self, space: &Space, chunk: usize) -> Vec<u32> {
        let count = self.tokens.count(space.chunk_rows()).div_ceil(self.block_tokens);
        let block = |at| (chunk as u32 * count + at) * 31 % BLOCKS;
        (0..count).map(block).collect()
    }

    /// Calls with plane, head, row in the chunk and the row's bytes: the slow twin of a copy.
    fn each_row(&mut self, space: &Space, chunk: usize, mut each: impl FnMut(usize, u32, u32, &mut [u8])) {
        let table = self.table(space, chunk);
        let TokenShare {
            rank,
            size,
            interleave,
        } = self.tokens;
        let is_own = |row: &u32| row / interleave % size == rank;
        for plane in &mut self.planes {
            let row_bytes = space.planes()[plane.index].row_bytes as usize;
            let page = plane.memory.len() / BLOCKS as usize;
            for head in plane.heads.clone() {
                for (nth, row) in (0..).zip((0..space.chunk_rows()).filter(is_own)) {
                    let block = table[(nth / self.block_tokens) as usize] as usize;
                    let in_block = (head - plane.heads.start) * self.block_tokens + nth % self.block_tokens;
                    let at = block * page + in_block as usize * row_bytes;
                    each(plane.index, head, row, &mut plane.memory[at..at + row_bytes]);
                }
            }
        }
    }
}

impl Plane {
    fn new(space: &Space, index: usize, block_tokens: u32, place: Place) -> (Self, Tensor) {
        let of = &space.planes()[index];
        let heads = place.heads(of.heads);
        let (count, row) = (u64::from(heads.end - heads.start), u64::from(of.row_bytes));
        // As in vLLM, where a page is padded to that of other layers.
        let page = count * u64::from(block_tokens) * row + 32;
        let memory = vec![POISON; (page * u64::from(BLOCKS)) as usize];
        let tensor = Tensor {
            address: memory.as_ptr() as u64,
            bytes: memory.len() as u64,
            axes: "BHNC".into(),
            shape: vec![BLOCKS.into(), count, block_tokens.into(), row],
            strides: vec![page, u64::from(block_tokens) * row, row, 1],
            element_bytes: 1,
            planes: vec![index],
            heads: Some((heads.start, heads.end)),
            row_offset: 0,
        };
        let plane = Self { index, heads, memory };
        (plane, tensor)
    }
}

/// What the model computes for a row: no other row has the same.
fn row_of(space: &Space, plane: usize, head: u32, chunk: usize, row: u32) -> Vec<u8> {
    let mut bytes = vec![0; space.planes()[plane].row_bytes as usize];
    blake3::Hasher::new()
        .update(space.id().to_string().as_bytes())
        .update(format!("{plane} {head} {chunk} {row}").as_bytes())
        .finalize_xof()
        .fill(&mut bytes);
    bytes
}
