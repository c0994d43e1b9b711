//! The demo's pages: for each kind of KV host memory in vLLM's layout, its blocks dealt in random order.

use std::ops::Range;

use crate::arena::{Slot, SlotMut};
use crate::engine::copy::known::{KNOWN, Pages};
use crate::engine::copy::{
    CopyError, CopyJob, CpuOptions, HostPages, HostPagesError, PlanePart, SlotMapping,
};
use crate::format::Space;

/// Tokens of a block, vLLM's default.
const BLOCK_TOKENS: u32 = 16;
/// vLLM's layout on a CPU: each layer `[blocks][heads][block tokens][row]`.
const LAYOUT: &str = "LBHNC";

/// Memory of one kind of KV, like an engine's. The block table lists the blocks of one conversation's chunks in order.
pub struct DemoPages {
    pages: HostPages,
    /// Rows: one for each token, or a snapshot.
    block_rows: usize,
    /// Blocks of a chunk.
    chunk_blocks: usize,
    /// Number of the first plane among those of all kinds.
    first_plane: usize,
    table: Vec<u32>,
    /// Address of the first page.
    address: u64,
}

/// A block has the rows of so many tokens, or one snapshot of a state.
pub(super) fn block_rows(space: &Space) -> u32 {
    BLOCK_TOKENS.min(space.chunk_rows())
}

impl DemoPages {
    /// Memory for `chunks` chunks, and one more chunk's blocks to spare: those must stay untouched. `first_plane`: the
    /// number of planes of the kinds before.
    pub fn new(
        space: &Space,
        chunks: usize,
        first_plane: usize,
        options: CpuOptions,
    ) -> Result<Self, HostPagesError> {
        let layout = KNOWN.iter().find(|layout| layout.order == LAYOUT);
        let block_rows = block_rows(space);
        let chunk_blocks = (space.chunk_rows() / block_rows) as usize;
        let blocks = u32::try_from((chunks + 1) * chunk_blocks).unwrap_or(u32::MAX);
        let size = Pages {
            blocks,
            block_tokens: block_rows,
            heads: None,
            // Rows are copied whole; the type of their elements does not matter.
            element_bytes: 1,
        };
        let pages = HostPages::new(space, layout.unwrap_or(&KNOWN[0]), &size, 0, options)?;
        let address = pages.image().as_ptr() as u64;
        Ok(Self {
            pages,
            block_rows: block_rows as usize,
            chunk_blocks,
            first_plane,
            table: (0..blocks).collect(),
            address,
        })
    }

    /// Deals the blocks anew, in random order.
    pub fn shuffle(&mut self, random: &mut fastrand::Rng) {
        random.shuffle(&mut self.table);
    }

    /// The blocks of the chunk at this place.
    pub fn blocks(&self, place: usize) -> &[u32] {
        &self.table[place * self.chunk_blocks..][..self.chunk_blocks]
    }

    /// The blocks behind those of the first `chunks` chunks.
    pub fn blocks_behind(&self, chunks: usize) -> &[u32] {
        &self.table[chunks * self.chunk_blocks..]
    }

    /// Overwrites everything.
    pub fn poison(&mut self, byte: u8) {
        self.pages.image_mut().fill(byte);
    }

    pub fn bytes(&self) -> usize {
        self.pages.image().len()
    }

    pub(super) fn block_rows(&self) -> usize {
        self.block_rows
    }

    /// A plane's number among those of all kinds.
    pub(super) fn number(&self, plane: usize) -> usize {
        self.first_plane + plane
    }

    pub(super) fn planes(&self) -> usize {
        self.pages.cache().parts().len()
    }

    pub(super) fn heads(&self, plane: usize) -> usize {
        self.part(plane).heads.1 as usize
    }

    /// One head of one block: `[block rows][row]`.
    pub fn page(&self, plane: usize, block: u32, head: usize) -> &[u8] {
        &self.pages.image()[self.range(plane, block, head)]
    }

    pub fn page_mut(&mut self, plane: usize, block: u32, head: usize) -> &mut [u8] {
        let range = self.range(plane, block, head);
        &mut self.pages.image_mut()[range]
    }

    /// Gathers the object of the chunk at this place from its pages; its header is not touched.
    pub fn gather(&mut self, place: usize, object: SlotMut) -> Result<SlotMut, CopyError> {
        let job = self.job(place, 0)?;
        self.pages.store(object, &job)
    }

    /// The reverse: from a chunk's payload into its pages.
    pub fn scatter(&mut self, place: usize, payload: Slot) -> Result<(), CopyError> {
        let job = self.job(place, self.pages.cache().space().layout().header_len())?;
        self.pages.load(payload, &job).map(drop)
    }

    /// Number of bytes of a block, over all planes, that are not `byte`.
    pub fn bytes_unlike(&self, block: u32, byte: u8) -> usize {
        let pages =
            (0..self.planes()).flat_map(|plane| (0..self.heads(plane)).map(move |head| (plane, head)));
        let unlike = |(plane, head)| {
            self.page(plane, block, head)
                .iter()
                .filter(|&&b| b != byte)
                .count()
        };
        pages.map(unlike).sum()
    }

    fn job(&self, place: usize, at: usize) -> Result<CopyJob, CopyError> {
        let blocks = self.blocks(place);
        let cache = self.pages.cache();
        let mapping = SlotMapping::Blocks {
            table: blocks,
            first_token: 0,
        };
        Ok(CopyJob {
            planes: 0..cache.space().planes().len(),
            spans: cache.spans(mapping, 0..cache.space().chunk_rows())?,
            at,
        })
    }

    /// The only part of a plane: this layout has one part for each.
    fn part(&self, plane: usize) -> &PlanePart {
        &self.pages.cache().parts()[plane]
    }

    fn range(&self, plane: usize, block: u32, head: usize) -> Range<usize> {
        let part = self.part(plane);
        let start = part.address - self.address
            + u64::from(block) * part.block_stride
            + head as u64 * part.head_stride;
        let start = usize::try_from(start).unwrap_or(usize::MAX);
        start..start + self.block_rows * part.run_bytes as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_dealt_in_random_order() {
        let space = Space::from_json(
            r#"{"model": "m", "revision": "1", "dtype": "int8", "chunk_tokens": 64, "planes": [
                {"name": "kv", "layer": 0, "heads": 1, "row_bytes": 1}]}"#,
        );
        let options = CpuOptions {
            threads: 1,
            bytes_per_thread: 1,
        };
        let mut pages = DemoPages::new(&space.unwrap(), 31, 0, options).unwrap();
        let mut random = fastrand::Rng::with_seed(1);
        let mut deal = || {
            pages.shuffle(&mut random);
            pages.table.clone()
        };
        let (one, other) = (deal(), deal());
        assert_ne!(one, other);
        let neighbours = |table: &[u32]| table.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
        assert!(neighbours(&one) < 10 && neighbours(&other) < 10);
        let mut sorted = one.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..128).collect::<Vec<u32>>());
        assert_eq!(
            (pages.blocks(3), pages.blocks_behind(31)),
            (&other[12..16], &other[124..])
        );
    }
}
