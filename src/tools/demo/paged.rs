//! The demo's pages: host memory in vLLM's layout, its blocks dealt in random order.

use std::ops::Range;

use crate::arena::{Slot, SlotMut};
use crate::engine::copy::known::{KNOWN, Pages};
use crate::engine::copy::{
    CopyError, CopyJob, CpuOptions, HostPages, HostPagesError, PlanePart, SlotMapping,
};
use crate::format::Space;

/// Tokens of a block, vLLM's default.
pub const BLOCK_TOKENS: usize = 16;
/// vLLM's layout on a CPU: each layer `[blocks][heads][block tokens][row]`.
const LAYOUT: &str = "LBHNC";

/// KV memory like an engine's. A sequence's block table lists its blocks in their order.
pub struct DemoPages {
    pages: HostPages,
    block_tokens: usize,
    blocks: usize,
    /// Address of the first page.
    address: u64,
}

impl DemoPages {
    pub fn new(
        space: &Space,
        block_tokens: usize,
        blocks: usize,
        options: CpuOptions,
    ) -> Result<Self, HostPagesError> {
        let layout = KNOWN.iter().find(|layout| layout.order == LAYOUT);
        let size = Pages {
            blocks: u32::try_from(blocks).unwrap_or(u32::MAX),
            block_tokens: u32::try_from(block_tokens).unwrap_or(u32::MAX),
            heads: None,
            // Rows are copied whole; the type of their elements does not matter.
            element_bytes: 1,
        };
        let pages = HostPages::new(space, layout.unwrap_or(&KNOWN[0]), &size, 0, options)?;
        let address = pages.image().as_ptr() as u64;
        Ok(Self {
            pages,
            block_tokens,
            blocks,
            address,
        })
    }

    /// Overwrites everything.
    pub fn poison(&mut self, byte: u8) {
        self.pages.image_mut().fill(byte);
    }

    /// Number of blocks, over all sequences.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    pub fn bytes(&self) -> usize {
        self.pages.image().len()
    }

    pub(super) fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    pub(super) fn planes(&self) -> usize {
        self.pages.cache().parts().len()
    }

    pub(super) fn heads(&self, plane: usize) -> usize {
        self.part(plane).heads.1 as usize
    }

    /// One head of one block: `[block tokens][row]`.
    pub fn page(&self, plane: usize, block: u32, head: usize) -> &[u8] {
        &self.pages.image()[self.range(plane, block, head)]
    }

    pub fn page_mut(&mut self, plane: usize, block: u32, head: usize) -> &mut [u8] {
        let range = self.range(plane, block, head);
        &mut self.pages.image_mut()[range]
    }

    /// Gathers a chunk's object from the pages of its blocks; its header is not touched.
    pub fn gather(&mut self, blocks: &[u32], object: SlotMut) -> Result<SlotMut, CopyError> {
        let job = self.job(blocks, 0)?;
        self.pages.store(object, &job)
    }

    /// The reverse: from a chunk's payload into the pages of its blocks.
    pub fn scatter(&mut self, blocks: &[u32], payload: Slot) -> Result<(), CopyError> {
        let job = self.job(blocks, self.pages.cache().space().layout().header_len())?;
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

    fn job(&self, blocks: &[u32], at: usize) -> Result<CopyJob, CopyError> {
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
        start..start + self.block_tokens * part.run_bytes as usize
    }
}

/// All blocks of a cache in random order: block tables are cut from this list.
pub(super) fn shuffled_blocks(blocks: usize, random: &mut fastrand::Rng) -> Vec<u32> {
    let mut table: Vec<u32> = (0..u32::try_from(blocks).unwrap_or(u32::MAX)).collect();
    random.shuffle(&mut table);
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_shuffled() {
        let mut random = fastrand::Rng::with_seed(1);
        let (one, other) = (
            shuffled_blocks(128, &mut random),
            shuffled_blocks(128, &mut random),
        );
        assert_ne!(one, other);
        let neighbours = |table: &[u32]| table.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
        assert!(neighbours(&one) < 10 && neighbours(&other) < 10);
        let mut sorted = one.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..128).collect::<Vec<u32>>());
    }
}
