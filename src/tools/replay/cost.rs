//! Requests to S3, bytes and money of a trace, by how existence is looked up and by what is stored.

use serde::Serialize;

use super::simulation::{Blocks, access, leading};
use super::trace::Trace;
use crate::cache::existence::{ChunkState, PrefixSearch};
use crate::cache::tier::policy::Queue;
use crate::protocol::{EvictionPolicy, Strategy};

/// Prices in dollars.
#[derive(Debug, Clone)]
pub struct CostSettings {
    pub block_bytes: u64,
    /// A thousand PUTs.
    pub put: f64,
    /// A thousand GETs or HEADs.
    pub get: f64,
    /// A GiB that is read.
    pub read_gib: f64,
    /// Positions that a search asks for in one round.
    pub probes: usize,
}

/// What is kept where.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct S3Plan {
    pub strategy: Strategy,
    /// Blocks that have room in memory, with the default policy; 0: no memory.
    pub memory_blocks: usize,
    /// A new block is stored if its chance to be asked for again is at least this; else when it is used once more from
    /// memory. 0: all are stored.
    pub admit_chance: f64,
}

/// Totals of the trace.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Cost {
    pub plan: S3Plan,
    pub heads: u64,
    pub gets: u64,
    pub puts: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    /// Leading blocks that were in memory or on S3.
    pub hits: u64,
    pub dollars: f64,
}

/// Nothing is remembered of what exists, so these are the most HEADs that there can be.
pub fn cost(trace: &Trace, plan: S3Plan, settings: &CostSettings) -> Cost {
    let mut queue = Queue::new(EvictionPolicy::Reuse);
    let (mut stored, mut ever) = (Blocks::default(), Blocks::default());
    let (mut heads, mut gets, mut puts, mut hits) = (0_u64, 0_u64, 0_u64, 0_u64);
    for (number, prompt) in trace.prompts.iter().enumerate() {
        let there = leading(prompt, |block| queue.has(&block) || stored.contains(&block));
        hits += there as u64;
        heads += questions(plan.strategy, settings.probes, &prompt.blocks, &queue, &stored);
        gets += prompt.blocks[..there]
            .iter()
            .filter(|block| !queue.has(block))
            .count() as u64;
        let access = access(prompt, number, leading(prompt, |block| ever.contains(&block)));
        let chance = queue.chance(access);
        // In a chain each needs the one before it.
        let mut admits = true;
        for &block in &prompt.blocks {
            ever.insert(block);
            let is_worth_it = queue.has(&block) || chance.is_none_or(|chance| chance >= plan.admit_chance);
            admits &= stored.contains(&block) || is_worth_it;
            if admits && stored.insert(block) {
                puts += 1;
            }
            if plan.memory_blocks > 0 {
                queue.insert(block, access);
                while queue.len() > plan.memory_blocks && queue.evict(|_| true).is_some() {}
            }
        }
    }
    let read_bytes = gets * settings.block_bytes;
    let requests = settings.put * puts as f64 + settings.get * (gets + heads) as f64;
    Cost {
        plan,
        heads,
        gets,
        puts,
        read_bytes,
        written_bytes: puts * settings.block_bytes,
        hits,
        dollars: requests / 1000.0 + settings.read_gib * read_bytes as f64 / (1_u64 << 30) as f64,
    }
}

/// HEADs of one lookup, by the daemon's own search.
fn questions(strategy: Strategy, probes: usize, blocks: &[u64], queue: &Queue<u64>, stored: &Blocks) -> u64 {
    let state = |block: &u64| match queue.has(block) {
        true => ChunkState::Present,
        false => ChunkState::NotAsked,
    };
    let states: Vec<ChunkState> = blocks.iter().map(state).collect();
    if strategy == Strategy::Exact {
        return states
            .iter()
            .filter(|&&state| state == ChunkState::NotAsked)
            .count() as u64;
    }
    let mut search = PrefixSearch::new(states);
    let mut asked = 0;
    loop {
        let ask = search.next(probes);
        if ask.is_empty() {
            return asked;
        }
        asked += ask.len() as u64;
        for place in ask {
            let state = match stored.contains(&blocks[place]) {
                true => ChunkState::Present,
                false => ChunkState::Absent,
            };
            search.learn(place, state);
        }
    }
}
