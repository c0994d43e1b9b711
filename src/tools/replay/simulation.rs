//! One policy at one size: the daemon's own policy code, with the trace's clock.

use std::collections::HashSet;

use foldhash::fast::FixedState;
use serde::Serialize;

use super::trace::Prompt;
use crate::cache::tier::policy::{Access, Queue};
use crate::protocol::EvictionPolicy;

/// Blocks, of all prompts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Hits {
    /// Blocks of the leading runs that were there: the rest of a prompt must be computed anyway.
    pub leading: u64,
    pub asked: u64,
}

impl Hits {
    /// In a hundred.
    pub fn percent(self) -> f64 {
        100.0 * self.leading as f64 / self.asked.max(1) as f64
    }
}

pub(super) type Blocks = HashSet<u64, FixedState>;

/// Blocks at the start of a prompt that are there.
pub(super) fn leading(prompt: &Prompt, is_there: impl Fn(u64) -> bool) -> usize {
    prompt.blocks.iter().take_while(|block| is_there(**block)).count()
}

/// The use of a prompt's blocks. `number`: its place in the trace. `known`: its leading blocks that some tier has.
pub(super) fn access(prompt: &Prompt, number: usize, known: usize) -> Access {
    let short = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
    Access {
        at_ms: prompt.at_ms,
        request: short(number).saturating_add(1),
        added: short(prompt.blocks.len() - known),
    }
}

/// A memory of so many blocks with this policy, over an S3 that keeps everything.
pub fn simulate(prompts: &[Prompt], policy: EvictionPolicy, capacity: usize) -> Hits {
    let (mut queue, mut ever, mut hits) = (Queue::new(policy), Blocks::default(), Hits::default());
    for (number, prompt) in prompts.iter().enumerate() {
        hits.asked += prompt.blocks.len() as u64;
        hits.leading += leading(prompt, |block| queue.has(&block)) as u64;
        let access = access(prompt, number, leading(prompt, |block| ever.contains(&block)));
        for &block in &prompt.blocks {
            ever.insert(block);
            queue.insert(block, access);
            while queue.len() > capacity && queue.evict(|_| true).is_some() {}
        }
    }
    hits
}

/// A memory that never forgets: nothing can have more.
pub fn infinite(prompts: &[Prompt]) -> Hits {
    let (mut ever, mut hits) = (Blocks::default(), Hits::default());
    for prompt in prompts {
        hits.asked += prompt.blocks.len() as u64;
        hits.leading += leading(prompt, |block| ever.contains(&block)) as u64;
        ever.extend(&prompt.blocks);
    }
    hits
}
