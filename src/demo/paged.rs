use crate::chunk::Plane;

/// Tokens of a block, as vLLM's default.
pub const BLOCK_TOKENS: usize = 16;

/// KV memory as an engine has it: for each plane `[blocks][heads][block tokens][row]`, all in one allocation. Which
/// blocks a sequence has, and in which order, is in its block table.
pub struct PagedCache {
    planes: Vec<PlanePages>,
    block_tokens: usize,
    blocks: usize,
    pages: Vec<u8>,
}

struct PlanePages {
    start: usize,
    heads: usize,
    /// Bytes of one head of one block.
    page_bytes: usize,
}

impl PagedCache {
    pub fn new(planes: &[Plane], block_tokens: usize, blocks: usize) -> Self {
        let mut end = 0;
        let place = |plane: &Plane| {
            let pages = PlanePages {
                start: end,
                heads: plane.heads as usize,
                page_bytes: block_tokens * plane.row_bytes as usize,
            };
            end += blocks * pages.heads * pages.page_bytes;
            pages
        };
        Self {
            planes: planes.iter().map(place).collect(),
            block_tokens,
            blocks,
            pages: vec![0; end],
        }
    }

    /// Overwrites everything.
    pub fn poison(&mut self, byte: u8) {
        self.pages.fill(byte);
    }

    /// Blocks of all sequences together.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    pub fn bytes(&self) -> usize {
        self.pages.len()
    }

    pub(super) fn block_tokens(&self) -> usize {
        self.block_tokens
    }

    pub(super) fn planes(&self) -> usize {
        self.planes.len()
    }

    pub(super) fn heads(&self, plane: usize) -> usize {
        self.planes[plane].heads
    }

    /// One head of one block: `[block tokens][row]`.
    pub fn page(&self, plane: usize, block: u32, head: usize) -> &[u8] {
        &self.pages[self.range(plane, block, head)]
    }

    pub fn page_mut(&mut self, plane: usize, block: u32, head: usize) -> &mut [u8] {
        let range = self.range(plane, block, head);
        &mut self.pages[range]
    }

    /// A chunk's payload, plane by plane each `[head][token][row]`, from the pages of its blocks.
    pub fn gather(&self, blocks: &[u32], payload: &mut [u8]) {
        let mut rest = payload;
        for (plane, pages) in self.planes.iter().enumerate() {
            let plane_bytes = pages.heads * blocks.len() * pages.page_bytes;
            let (of_plane, after) = rest.split_at_mut(plane_bytes);
            rest = after;
            let mut runs = of_plane.chunks_exact_mut(pages.page_bytes);
            for head in 0..pages.heads {
                for (&block, run) in blocks.iter().zip(&mut runs) {
                    run.copy_from_slice(self.page(plane, block, head));
                }
            }
        }
    }

    /// The way back: from a chunk's payload into the pages of its blocks.
    pub fn scatter(&mut self, blocks: &[u32], payload: &[u8]) {
        let mut rest = payload;
        for plane in 0..self.planes.len() {
            let PlanePages {
                heads, page_bytes, ..
            } = self.planes[plane];
            let (of_plane, after) = rest.split_at(heads * blocks.len() * page_bytes);
            rest = after;
            let mut runs = of_plane.chunks_exact(page_bytes);
            for head in 0..heads {
                for (&block, run) in blocks.iter().zip(&mut runs) {
                    self.page_mut(plane, block, head).copy_from_slice(run);
                }
            }
        }
    }

    /// Bytes of a block, over all planes, that are not `byte`.
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

    fn range(&self, plane: usize, block: u32, head: usize) -> std::ops::Range<usize> {
        let pages = &self.planes[plane];
        let start = pages.start + (block as usize * pages.heads + head) * pages.page_bytes;
        start..start + pages.page_bytes
    }
}

/// All blocks of a cache in random order: block tables are cut from it.
pub(super) fn shuffled_blocks(blocks: usize, random: &mut fastrand::Rng) -> Vec<u32> {
    let mut table: Vec<u32> = (0..u32::try_from(blocks).unwrap_or(u32::MAX)).collect();
    random.shuffle(&mut table);
    table
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn planes(geometry: &[(u32, u32)]) -> Vec<Plane> {
        let plane = |(layer, &(heads, row_bytes)): (usize, &(u32, u32))| Plane {
            name: "kv".into(),
            layer: u32::try_from(layer).unwrap(),
            heads,
            row_bytes,
        };
        geometry.iter().enumerate().map(plane).collect()
    }

    /// The slow obvious twin of gather: where each byte of the payload is in the pages.
    fn places(planes: &[Plane], block_tokens: usize, cache_blocks: usize, blocks: &[u32]) -> Vec<usize> {
        let mut places = Vec::new();
        let mut start = 0;
        for plane in planes {
            let (heads, row_bytes) = (plane.heads as usize, plane.row_bytes as usize);
            for head in 0..heads {
                for token in 0..blocks.len() * block_tokens {
                    let block = blocks[token / block_tokens] as usize;
                    let row = (block * heads + head) * block_tokens + token % block_tokens;
                    places.extend((0..row_bytes).map(|byte| start + row * row_bytes + byte));
                }
            }
            start += cache_blocks * heads * block_tokens * row_bytes;
        }
        places
    }

    proptest! {
        #[test]
        fn gather_and_scatter_are_as_their_twin(
            geometry in prop::collection::vec((1_u32..5, 1_u32..20), 1..5),
            block_tokens in 1_usize..20,
            chunk_blocks in 1_usize..6,
            spare in 0_usize..4,
            seed: u64,
        ) {
            let (planes, cache_blocks) = (planes(&geometry), chunk_blocks + spare);
            let mut random = fastrand::Rng::with_seed(seed);
            let table = shuffled_blocks(cache_blocks, &mut random);
            let blocks = &table[..chunk_blocks];
            let places = places(&planes, block_tokens, cache_blocks, blocks);
            let mut cache = PagedCache::new(&planes, block_tokens, cache_blocks);
            random.fill(&mut cache.pages);

            let expected: Vec<u8> = places.iter().map(|&place| cache.pages[place]).collect();
            let mut payload = vec![0; places.len()];
            cache.gather(blocks, &mut payload);
            prop_assert_eq!(&payload, &expected);

            let mut pages = cache.pages.clone();
            random.fill(&mut payload);
            places.iter().zip(&payload).for_each(|(&place, &byte)| pages[place] = byte);
            cache.scatter(blocks, &payload);
            prop_assert!(cache.pages == pages, "and nothing else is touched");
        }
    }

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
