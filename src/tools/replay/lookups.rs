//! The questions of lookups, by the daemon's own search: each node remembers for a while what it asked for, loaded or stored,
//! and S3 keeps everything.

use std::collections::HashMap;

use foldhash::fast::FixedState;
use serde::Serialize;

use super::trace::{Prompt, Trace};
use crate::cache::existence::{ChunkState, PrefixSearch};
use crate::format::RUN_CHUNKS_MAX;
use crate::protocol::Strategy;

/// How chunks are looked up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LookupPlan {
    pub strategy: Strategy,
    /// Each prompt goes to a random one.
    pub nodes: usize,
    /// S3 keeps user metadata, so chunks have run hints.
    pub hints: bool,
    pub present_ttl_ms: u64,
    pub absent_ttl_ms: u64,
    /// Positions that a search asks for in one round.
    pub probes: usize,
}

/// Totals of the trace.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Lookups {
    pub plan: LookupPlan,
    pub heads: u64,
    /// Questions one after another; those of a round are asked at once.
    pub rounds: u64,
    /// Of all prompts, 99 in a hundred take no more.
    pub rounds_p99: u64,
    pub rounds_max: u64,
    /// Prompts whose stored prefix was not found as it is.
    pub wrong: u64,
}

type ById<T> = HashMap<u64, T, FixedState>;

/// What a node knows of blocks, and since when.
struct KnownBlocks<'a> {
    plan: &'a LookupPlan,
    blocks: ById<(ChunkState, u64)>,
}

impl KnownBlocks<'_> {
    fn get(&self, block: u64, at_ms: u64) -> ChunkState {
        match self.blocks.get(&block) {
            Some(&(ChunkState::Present, since)) if at_ms - since < self.plan.present_ttl_ms => {
                ChunkState::Present
            }
            Some(&(ChunkState::Absent, since)) if at_ms - since < self.plan.absent_ttl_ms => {
                ChunkState::Absent
            }
            _ => ChunkState::NotAsked,
        }
    }

    /// The same answer again makes it no newer.
    fn learn(&mut self, block: u64, state: ChunkState, at_ms: u64) {
        if self.get(block, at_ms) != state {
            self.blocks.insert(block, (state, at_ms));
        }
    }
}

pub fn lookups(trace: &Trace, plan: LookupPlan) -> Lookups {
    let node = || KnownBlocks {
        plan: &plan,
        blocks: ById::default(),
    };
    let mut nodes: Vec<KnownBlocks> = (0..plan.nodes.max(1)).map(|_| node()).collect();
    // What S3 has: the prompt and the place in it that each block was first stored for.
    let mut stored: ById<(&Prompt, usize)> = ById::default();
    let mut random = fastrand::Rng::with_seed(1);
    let (mut heads, mut wrong, mut rounds) = (0, 0, Vec::with_capacity(trace.prompts.len()));
    for prompt in &trace.prompts {
        let (blocks, at_ms) = (&prompt.blocks, prompt.at_ms);
        let at = random.usize(..nodes.len());
        let known = &mut nodes[at];
        let states = blocks.iter().map(|&block| known.get(block, at_ms)).collect();
        let mut ask = |place: usize| {
            heads += 1;
            let found = stored.get(&blocks[place]);
            let state = found.map_or(ChunkState::Absent, |_| ChunkState::Present);
            known.learn(blocks[place], state, at_ms);
            let agrees = found.filter(|_| plan.hints).map(|&(first, at)| {
                let pairs = first.blocks[at + 1..].iter().zip(&blocks[place + 1..]);
                pairs
                    .take(RUN_CHUNKS_MAX)
                    .take_while(|(said, block)| said == block)
                    .count()
            });
            (state, agrees)
        };
        let (found, took) = match plan.strategy {
            Strategy::Exact => exact(states, &mut ask),
            Strategy::Prefix => prefix(states, plan.probes, &mut ask),
        };
        rounds.push(took);
        let there = blocks
            .iter()
            .take_while(|block| stored.contains_key(block))
            .count();
        wrong += u64::from(found != there);
        // What is there is loaded, the rest stored.
        for (place, &block) in blocks.iter().enumerate() {
            stored.entry(block).or_insert((prompt, place));
            known.learn(block, ChunkState::Present, at_ms);
        }
    }
    rounds.sort_unstable();
    Lookups {
        plan,
        heads,
        rounds: rounds.iter().sum(),
        rounds_p99: rounds.get(rounds.len() * 99 / 100).copied().unwrap_or(0),
        rounds_max: rounds.last().copied().unwrap_or(0),
        wrong,
    }
}

/// A block's state, and how many blocks after it its hint has in common with the prompt.
type Answer = (ChunkState, Option<usize>);

/// The leading blocks that were found, and the rounds.
fn exact(mut states: Vec<ChunkState>, ask: &mut impl FnMut(usize) -> Answer) -> (usize, u64) {
    let mut rounds = 0;
    for (place, state) in states.iter_mut().enumerate() {
        if *state == ChunkState::NotAsked {
            (*state, rounds) = (ask(place).0, 1);
        }
    }
    let leading = states.iter().take_while(|&&state| state == ChunkState::Present);
    (leading.count(), rounds)
}

fn prefix(states: Vec<ChunkState>, probes: usize, ask: &mut impl FnMut(usize) -> Answer) -> (usize, u64) {
    let (mut search, mut rounds) = (PrefixSearch::new(states, Vec::new()), 0);
    loop {
        let places = search.next(probes);
        if places.is_empty() {
            return (search.run().0, rounds);
        }
        rounds += 1;
        for place in places {
            let (state, agrees) = ask(place);
            search.learn(place, state);
            if let Some(agrees) = agrees {
                search.hint(place, place + 1 + agrees);
            }
        }
    }
}
