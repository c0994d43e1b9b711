//! Which chunk a router's block hashes mean.
//!
//! Dynamo names a block by XXH3-64 of its tokens, with a seed that has the LoRA and the salt in it. It can't be turned
//! back. So a call that tells tokens leaves behind, for the last block of each chunk, the hash of all block hashes up to
//! it, and the chunk. Bounded: two generations, of which the older one goes when the younger is full. What is asked for or
//! followed is in the younger one from then on.

use std::collections::HashMap;
use std::mem;

use twox_hash::XxHash3_64;

use crate::format::{ChunkHash, ModelId};

const SEED: u64 = 1337;

/// Dynamo's hash of a block's tokens.
pub struct LocalHasher {
    seed: u64,
}

impl LocalHasher {
    pub fn new(lora_name: &str, cache_salt: &str) -> Self {
        let part = |text: &str, seed| match text {
            "" => 0,
            text => XxHash3_64::oneshot_with_seed(seed, text.as_bytes()),
        };
        let seed = SEED.wrapping_add(part(lora_name, 0));
        Self {
            seed: seed.wrapping_add(part(cache_salt, 1)),
        }
    }

    /// Of each block of so many tokens.
    pub fn blocks(&self, tokens: &[u32], size: usize) -> Vec<u64> {
        tokens.chunks_exact(size).map(|block| self.block(block)).collect()
    }

    fn block(&self, tokens: &[u32]) -> u64 {
        let bytes: Vec<u8> = tokens.iter().flat_map(|token| token.to_le_bytes()).collect();
        XxHash3_64::oneshot_with_seed(self.seed, &bytes)
    }
}

/// For each block, the hash of all up to it. `parent` is that of the block before; None: there is none.
pub fn chained(mut parent: Option<u64>, local: impl Iterator<Item = u64>) -> impl Iterator<Item = u64> {
    local.map(move |local| {
        let hash = match parent {
            None => local,
            Some(parent) => {
                let pair = [u64::to_le_bytes(parent), local.to_le_bytes()];
                XxHash3_64::oneshot_with_seed(SEED, pair.as_flattened())
            }
        };
        parent = Some(hash);
        hash
    })
}

/// A chunk, and how many blocks it has.
type Bound = (ChunkHash, usize);

#[derive(Default)]
struct Generation {
    /// By the hash of all blocks up to the chunk's end.
    chunks: HashMap<(ModelId, u64), Bound>,
    /// And back, for the chunk that follows.
    ends: HashMap<(ModelId, ChunkHash), u64>,
}

/// See the [module](self).
pub struct BoundBlocks {
    younger: Generation,
    older: Generation,
    /// Chunks of a generation.
    most: usize,
}

impl BoundBlocks {
    pub fn new(most: usize) -> Self {
        Self {
            younger: Generation::default(),
            older: Generation::default(),
            most: most.max(1),
        }
    }

    /// `local` are the blocks of these chunks, equally many in each. They follow `parent`; None: they are the prompt's
    /// first. Those that follow one that is not known are not bound.
    pub fn bind(&mut self, model: ModelId, parent: Option<ChunkHash>, local: &[u64], chunks: &[ChunkHash]) {
        let end = parent.map(|parent| self.end(model, parent));
        let blocks = local.len().checked_div(chunks.len()).filter(|blocks| *blocks > 0);
        let (Some(blocks), false) = (blocks, end == Some(None)) else {
            return;
        };
        let chained: Vec<u64> = chained(end.flatten(), local.iter().copied()).collect();
        for (last, chunk) in chained.iter().skip(blocks - 1).step_by(blocks).zip(chunks) {
            self.insert(model, *last, (*chunk, blocks));
        }
    }

    /// The chunks of leading blocks, as far as they are known, and how many blocks each has.
    pub fn chunks(&mut self, model: ModelId, local: &[u64]) -> (Vec<ChunkHash>, usize) {
        let chained: Vec<u64> = chained(None, local.iter().copied()).collect();
        let first = chained.iter().enumerate().find_map(|(i, hash)| {
            let (_, blocks) = self.bound(model, *hash)?;
            (i + 1 == blocks).then_some(blocks)
        });
        let Some(blocks) = first else {
            return (Vec::new(), 1);
        };
        let ends = chained.iter().skip(blocks - 1).step_by(blocks);
        let known = ends.map_while(|hash| Some((*hash, self.bound(model, *hash)?)));
        let known: Vec<(u64, Bound)> = known.take_while(|(_, bound)| bound.1 == blocks).collect();
        // After all were found: the older generation may go now.
        for (last, bound) in &known {
            self.renew(model, *last, *bound);
        }
        (known.into_iter().map(|(_, (chunk, _))| chunk).collect(), blocks)
    }

    /// The hash of all blocks up to the chunk's end.
    fn end(&mut self, model: ModelId, chunk: ChunkHash) -> Option<u64> {
        let key = (model, chunk);
        let ends = [&self.younger.ends, &self.older.ends];
        let end = ends.into_iter().find_map(|ends| ends.get(&key)).copied()?;
        if let Some(bound) = self.bound(model, end) {
            self.renew(model, end, bound);
        }
        Some(end)
    }

    fn bound(&self, model: ModelId, last: u64) -> Option<Bound> {
        let generations = [&self.younger.chunks, &self.older.chunks];
        let mut found = generations
            .into_iter()
            .filter_map(|chunks| chunks.get(&(model, last)));
        found.next().copied()
    }

    fn renew(&mut self, model: ModelId, last: u64, bound: Bound) {
        if !self.younger.chunks.contains_key(&(model, last)) {
            self.insert(model, last, bound);
        }
    }

    fn insert(&mut self, model: ModelId, last: u64, bound: Bound) {
        // The same blocks under many adapters are one entry there, and many here.
        let Generation { chunks, ends } = &self.younger;
        if chunks.len().max(ends.len()) >= self.most {
            self.older = mem::take(&mut self.younger);
        }
        self.younger.chunks.insert((model, last), bound);
        self.younger.ends.insert((model, bound.0), last);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chunk(n: u8) -> ChunkHash {
        ChunkHash([n; 32])
    }

    #[test]
    fn hashes_are_of_tokens_and_what_else_decides_the_kv() {
        let plain = LocalHasher::new("", "").block(&[1, 2, 3]);
        let bytes = [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0];
        assert_eq!(plain, XxHash3_64::oneshot_with_seed(1337, &bytes));
        for (lora, salt) in [("a", ""), ("", "a"), ("a", "a")] {
            assert_ne!(LocalHasher::new(lora, salt).block(&[1, 2, 3]), plain);
        }
    }

    #[test]
    fn blocks_are_known_behind_the_same_blocks_of_the_same_model_only() {
        let mut bound = BoundBlocks::new(100);
        let (model, other) = (ModelId([1; 32]), ModelId([2; 32]));
        let local = [10, 11, 12, 13, 14, 15];
        let chunks = [chunk(1), chunk(2), chunk(3)];
        bound.bind(model, None, &local, &chunks);
        assert_eq!(bound.chunks(model, &local), (chunks.to_vec(), 2));
        assert_eq!(bound.chunks(model, &local[..5]).0, chunks[..2]);
        assert_eq!(bound.chunks(model, &[10, 11, 12, 99, 14, 15]).0, chunks[..1]);
        assert!(bound.chunks(model, &local[2..]).0.is_empty());
        assert!(bound.chunks(other, &local).0.is_empty());
        bound.bind(model, None, &[], &[]);
    }

    #[test]
    fn chunks_that_follow_a_known_one_are_known_as_if_they_came_with_it() {
        let (model, local) = (ModelId([1; 32]), [10, 11, 12, 13, 14, 15]);
        let mut bound = BoundBlocks::new(100);
        bound.bind(model, Some(chunk(1)), &local[2..4], &[chunk(2)]);
        assert!(
            bound.chunks(model, &local[2..4]).0.is_empty(),
            "its parent is not known"
        );
        bound.bind(model, None, &local[..2], &[chunk(1)]);
        bound.bind(model, Some(chunk(1)), &local[2..], &[chunk(2), chunk(3)]);
        assert_eq!(
            bound.chunks(model, &local),
            (vec![chunk(1), chunk(2), chunk(3)], 2)
        );
    }

    #[test]
    fn the_oldest_go_first() {
        let mut bound = BoundBlocks::new(2);
        let model = ModelId([1; 32]);
        for n in 0..5 {
            bound.bind(model, None, &[u64::from(n)], &[chunk(n)]);
        }
        let known = |n: u8| !bound.chunks(model, &[u64::from(n)]).0.is_empty();
        assert_eq!([0, 1, 2, 3, 4].map(known), [false, false, true, true, true]);
        assert!(bound.younger.chunks.len() + bound.older.chunks.len() <= 4);
    }

    #[test]
    fn those_that_are_asked_for_or_followed_stay() {
        let mut bound = BoundBlocks::new(4);
        let model = ModelId([1; 32]);
        bound.bind(model, None, &[100], &[chunk(100)]);
        let asked = [chunk(101), chunk(102)];
        bound.bind(model, None, &[101, 102], &asked);
        for n in 0..20 {
            bound.bind(model, Some(chunk(100)), &[u64::from(n)], &[chunk(n)]);
            assert_eq!(bound.chunks(model, &[101, 102, 9]).0, asked, "{n}");
        }
        assert_eq!(bound.chunks(model, &[100, 19]).0, [chunk(100), chunk(19)]);
    }

    #[test]
    fn one_prompt_under_many_adapters_costs_no_more() {
        let mut bound = BoundBlocks::new(2);
        for n in 0..20 {
            bound.bind(ModelId([1; 32]), None, &[7], &[chunk(n)]);
        }
        assert!(bound.younger.ends.len() + bound.older.ends.len() <= 4);
    }
}
