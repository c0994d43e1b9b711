//! The best that could be done with the future known: what is used last again leaves first (Belady's rule, and a block may
//! leave as soon as it came). No policy can hit more blocks, so its hits, wherever in a prompt they are, are a bound.

use std::collections::{BTreeSet, HashMap};

use foldhash::fast::FixedState;

use super::simulation::{Hits, leading};
use super::trace::Prompt;

/// See the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Best {
    /// What it does for leading runs, as for the policies.
    pub greedy: Hits,
    /// All blocks that were there, also behind one that was not.
    pub bound: Hits,
}

/// Never again: later than all prompts.
const NEVER: usize = usize::MAX;

pub fn best(prompts: &[Prompt], capacity: usize) -> Best {
    let mut next: HashMap<u64, usize, FixedState> = HashMap::default();
    // For each prompt the next one that uses each of its blocks.
    let mut later: Vec<Vec<usize>> = Vec::with_capacity(prompts.len());
    for (number, prompt) in prompts.iter().enumerate().rev() {
        let blocks = prompt.blocks.iter();
        later.push(
            blocks
                .map(|block| next.insert(*block, number).unwrap_or(NEVER))
                .collect(),
        );
    }
    let mut here: HashMap<u64, (usize, usize), FixedState> = HashMap::default();
    // By the next use, then by the place in the prompt: the last of these leaves.
    let mut order: BTreeSet<(usize, usize, u64)> = BTreeSet::new();
    let mut best = Best {
        greedy: Hits::default(),
        bound: Hits::default(),
    };
    for (prompt, later) in prompts.iter().zip(later.into_iter().rev()) {
        let asked = prompt.blocks.len() as u64;
        best.greedy.asked += asked;
        best.bound.asked += asked;
        best.greedy.leading += leading(prompt, |block| here.contains_key(&block)) as u64;
        for (place, (&block, next)) in prompt.blocks.iter().zip(later).enumerate() {
            if let Some((was_next, was_place)) = here.insert(block, (next, place)) {
                best.bound.leading += 1;
                order.remove(&(was_next, was_place, block));
            }
            order.insert((next, place, block));
            if here.len() > capacity
                && let Some((_, _, last)) = order.pop_last()
            {
                here.remove(&last);
            }
        }
    }
    best
}
