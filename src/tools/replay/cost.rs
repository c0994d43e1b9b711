//! Requests to S3, bytes and money of a trace, by how existence is looked up and by what is stored.

use serde::Serialize;

use super::simulation::{Blocks, access, leading};
use super::trace::Trace;
use crate::cache::admission::{Admission, AdmissionOptions, Offer, Standing};
use crate::cache::existence::{ChunkState, PrefixSearch};
use crate::cache::tier::policy::{Access, Queue};
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
    /// Nodes, each with a memory and an admission of its own. Each prompt goes to a random one.
    pub nodes: usize,
    /// Blocks that have room in a node's memory, with the default policy; 0: no memory.
    pub memory_blocks: usize,
    /// Bytes a second that all nodes together may store, an equal part each; none: all blocks are stored.
    pub admit_bytes: Option<u64>,
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
    /// Leading blocks that were in the node's memory or on S3.
    pub hits: u64,
    /// Blocks that are stored because they were asked for again.
    pub second_chances: u64,
    pub dollars: f64,
}

/// Blocks that an admission remembers: the default of `[store] admit_chunks`.
const ADMIT_BLOCKS: usize = 131_072;

struct SimulatedNode {
    queue: Queue<u64>,
    admission: Option<Admission<u64>>,
}

impl SimulatedNode {
    fn new(plan: S3Plan) -> Self {
        let options = |bytes: u64| AdmissionOptions {
            bytes_per_s: bytes / plan.nodes.max(1) as u64,
            chunks_max: ADMIT_BLOCKS,
        };
        Self {
            queue: Queue::new(EvictionPolicy::Reuse),
            admission: plan.admit_bytes.map(|bytes| Admission::new(options(bytes))),
        }
    }

    /// Whether a block of a prompt is put on S3 now. What S3 has is known unless the node has the block itself: then
    /// nobody asks.
    fn puts(&mut self, offer: &Offer<u64>, stored: &Blocks, at_ms: u64) -> bool {
        let (is_here, is_stored) = (self.queue.has(&offer.key), stored.contains(&offer.key));
        let Some(admission) = &mut self.admission else {
            return !is_stored;
        };
        if !is_here && is_stored {
            admission.used(&offer.key);
            admission.is_there(&offer.key);
            return false;
        }
        match is_here && admission.used(&offer.key) != Some(Standing::Declined) {
            true => false,
            false => admission.offer(offer, at_ms).is_ok(),
        }
    }

    fn keep(&mut self, block: u64, access: Access, memory_blocks: usize) {
        if memory_blocks > 0 {
            self.queue.insert(block, access);
            while self.queue.len() > memory_blocks && self.queue.evict(|_| true).is_some() {}
        }
    }
}

/// Nothing is remembered of what exists, so these are the most HEADs that there can be.
pub fn cost(trace: &Trace, plan: S3Plan, settings: &CostSettings) -> Cost {
    let mut nodes: Vec<SimulatedNode> = (0..plan.nodes.max(1)).map(|_| SimulatedNode::new(plan)).collect();
    let (mut stored, mut random) = (Blocks::default(), fastrand::Rng::with_seed(1));
    let (mut heads, mut gets, mut puts, mut hits) = (0_u64, 0_u64, 0_u64, 0_u64);
    for (number, prompt) in trace.prompts.iter().enumerate() {
        let at = random.usize(..nodes.len());
        let node = &mut nodes[at];
        let there = leading(prompt, |block| node.queue.has(&block) || stored.contains(&block));
        hits += there as u64;
        heads += questions(
            plan.strategy,
            settings.probes,
            &prompt.blocks,
            &node.queue,
            &stored,
        );
        gets += prompt.blocks[..there]
            .iter()
            .filter(|block| !node.queue.has(block))
            .count() as u64;
        let access = access(prompt, number, there);
        let mut parent = None;
        for &block in &prompt.blocks {
            let offer = Offer {
                key: block,
                parent,
                is_doubtful: false,
                bytes: settings.block_bytes,
                added: access.added,
            };
            if node.puts(&offer, &stored, prompt.at_ms) {
                stored.insert(block);
                puts += 1;
            }
            node.keep(block, access, plan.memory_blocks);
            parent = Some(block);
        }
    }
    let read_bytes = gets * settings.block_bytes;
    let requests = settings.put * puts as f64 + settings.get * (gets + heads) as f64;
    let admissions = nodes.iter().filter_map(|node| node.admission.as_ref());
    Cost {
        plan,
        heads,
        gets,
        puts,
        read_bytes,
        written_bytes: puts * settings.block_bytes,
        hits,
        second_chances: admissions.map(|admission| admission.stats().second_chances).sum(),
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
    let mut search = PrefixSearch::new(states, Vec::new());
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
