//! Lookups over several kinds of KV of one model: the last place of a prompt where all of them are there.

use std::ops::Range;
use std::sync::Arc;

use futures::future::join_all;
use tokio::time::Instant;

use super::lookup::{Lookup, Search, known, local, lookup, runs};
use super::tiers::Tiers;
use crate::cache::existence::{BoundarySearch, ChunkState, Scope};
use crate::format::{ChunkHash, Mask, Space};
use crate::protocol::{Strategy, Tier, TierRun};
use crate::s3::object::ObjectError;

/// The kinds of KV of a model, each a space.
#[derive(Debug, Clone, Copy)]
pub struct Kinds<'a> {
    /// Those that an engine can't go on without. At least one.
    pub spaces: &'a [Space],
    /// Those that it can: a draft model's.
    pub drafts: &'a [Space],
    /// Chunks between the snapshots that writers keep of a state; 0: only at the ends of prompts.
    pub state_every: usize,
    /// Chunks of the full kinds that must be there beyond the boundary.
    pub lookahead: usize,
}

/// The answer of a lookup over kinds.
#[derive(Debug, Clone)]
pub struct Boundary {
    /// Of the first full space; of the first space where none is full.
    pub first: Lookup,
    /// Leading chunks after which an engine can go on.
    pub chunks: usize,
    /// Leading chunks that all full kinds have: up to here a snapshot or a window could be made use of.
    pub full: usize,
    /// For each space, the chunks that are needed at the boundary, and their tiers.
    pub needed: Vec<(Range<usize>, Vec<TierRun>)>,
    /// For each draft, the chunks that an engine would need there, as far as they are there without a gap.
    pub drafts: Vec<Range<usize>>,
    /// A chunk without an answer could have told of more.
    pub is_open: bool,
    pub error: Option<Arc<ObjectError>>,
}

/// Rounds of questions that a lookup over kinds may take: it asks no more than so many times as one round does.
const ROUNDS: usize = 6;

/// Tells by `deadline` how much of a prompt is there in all kinds.
pub async fn boundary(
    tiers: &Tiers,
    kinds: Kinds<'_>,
    chunks: &[ChunkHash],
    strategy: Strategy,
    deadline: Instant,
) -> Boundary {
    let (full_spaces, others): (Vec<&Space>, Vec<&Space>) =
        kinds.spaces.iter().partition(|space| space.kind().is_full());
    let (mut lookups, mut full, mut is_open) = (Vec::new(), chunks.len(), false);
    for space in &full_spaces {
        let found = lookup(tiers, space, &chunks[..full], strategy, deadline).await;
        // The kind that has least tells where all end.
        if found.prefix < full {
            is_open = found.unknown.get(found.prefix);
        }
        full = full.min(found.prefix);
        lookups.push(found);
    }
    let end = full.saturating_sub(kinds.lookahead);
    let (mut at, mut error) = (end, lookups.iter().find_map(|found| found.error.clone()));
    let mut of_first = None;
    if !others.is_empty() {
        let round = tiers.bucket.options.lookup_probes + 1;
        let asked: usize = lookups.iter().map(|found| found.asked).sum();
        let scope = match strategy {
            Strategy::Exact => Scope::All,
            Strategy::Prefix => Scope::Likely {
                questions: (ROUNDS * round).saturating_sub(asked).max(round),
                state_every: kinds.state_every,
            },
        };
        let found = search(tiers, &others, &chunks[..end], scope, deadline).await;
        at = found.search.boundary();
        is_open |= found.is_cut || found.search.is_open();
        error = error.or(found.error);
        of_first = Some(found.search.states(0).to_vec());
    }
    let first = match (lookups.first(), of_first) {
        (Some(found), _) => found.clone(),
        (None, states) => {
            let found = Lookup::of(
                states.unwrap_or_default(),
                kinds.spaces[0].needed(at),
                chunks.len(),
            );
            found.with_tiers(tiers, &kinds.spaces[0], chunks)
        }
    };
    let mut lookups = lookups.into_iter();
    let mut needed = Vec::with_capacity(kinds.spaces.len());
    for space in kinds.spaces {
        let run = space.needed(at);
        let found = if space.kind().is_full() {
            lookups.next()
        } else {
            None
        };
        let of_run = match found {
            Some(found) => clip(&found.tiers, run.end),
            None => tiers_of(tiers, space, chunks, run.clone()),
        };
        needed.push((run, of_run));
    }
    let drafts = kinds
        .drafts
        .iter()
        .map(|space| draft(tiers, space, chunks, at, strategy, deadline));
    Boundary {
        first,
        chunks: at,
        full,
        needed,
        drafts: join_all(drafts).await,
        is_open,
        error,
    }
}

/// The runs of the first `end` chunks.
fn clip(tiers: &[TierRun], end: usize) -> Vec<TierRun> {
    let before = tiers.iter().filter(|run| run.from < end);
    let cut = before.map(|run| TierRun {
        count: run.count.min(end - run.from),
        ..*run
    });
    cut.collect()
}

/// The tiers of a run of chunks that are there.
fn tiers_of(tiers: &Tiers, space: &Space, chunks: &[ChunkHash], run: Range<usize>) -> Vec<TierRun> {
    let here = local(tiers, space, &chunks[run.clone()], Instant::now());
    let all: Mask = run.clone().map(|_| true).collect();
    let mut of_run = runs(&all, |i| here[i].unwrap_or(Tier::S3));
    of_run.iter_mut().for_each(|tier| tier.from += run.start);
    of_run
}

/// How much of a draft's needed chunks is there. Nearly always it is all or nothing, so the two ends are asked for first.
async fn draft(
    tiers: &Tiers,
    space: &Space,
    chunks: &[ChunkHash],
    at: usize,
    strategy: Strategy,
    deadline: Instant,
) -> Range<usize> {
    let run = space.needed(at);
    let chunks = &chunks[run.clone()];
    let now = Instant::now();
    let mut states = known(tiers, space, chunks, &local(tiers, space, chunks, now), now);
    let asks = Search {
        bucket: &tiers.bucket,
        space,
        chunks,
        deadline,
    };
    let found = match strategy {
        Strategy::Exact => asks.exact(states).await,
        Strategy::Prefix => {
            let mut ends = vec![0, run.len().saturating_sub(1)];
            ends.dedup();
            ends.retain(|&i| states.get(i) == Some(&ChunkState::NotAsked));
            for (i, state) in asks.ask(ends).await.0 {
                states[i] = state;
            }
            asks.prefix(states).await
        }
    };
    run.start..run.start + found.prefix
}

struct Searched {
    search: BoundarySearch,
    /// The deadline ended it.
    is_cut: bool,
    /// The first that was met.
    error: Option<Arc<ObjectError>>,
}

/// The boundary of windows and states within a prefix.
async fn search(
    tiers: &Tiers,
    spaces: &[&Space],
    chunks: &[ChunkHash],
    scope: Scope,
    deadline: Instant,
) -> Searched {
    let now = Instant::now();
    let of_space = |space: &&Space| {
        let states = known(tiers, space, chunks, &local(tiers, space, chunks, now), now);
        (space.kind(), states)
    };
    let kinds = spaces.iter().map(of_space).collect();
    let mut search = BoundarySearch::new(kinds, chunks.len(), spaces[0].chunk_tokens(), scope);
    let (mut error, mut is_cut) = (None, false);
    loop {
        let questions = search.next(tiers.bucket.options.lookup_probes + 1);
        if questions.is_empty() {
            break;
        }
        if Instant::now() >= deadline {
            is_cut = true;
            break;
        }
        let of_spaces = spaces.iter().enumerate().map(|(index, space)| {
            let of = questions.iter().filter(|(kind, _)| *kind == index);
            let positions: Vec<usize> = of.map(|&(_, chunk)| chunk).collect();
            async move {
                let asks = Search {
                    bucket: &tiers.bucket,
                    space,
                    chunks,
                    deadline,
                };
                (index, asks.ask(positions).await)
            }
        });
        let mut is_lost = true;
        for (index, (answers, failed)) in join_all(of_spaces).await {
            error = error.or(failed);
            for (chunk, state) in answers {
                is_lost &= state == ChunkState::Unknown;
                search.learn(index, chunk, state);
            }
        }
        // No question was answered: more of them would only make that worse.
        if is_lost {
            break;
        }
    }
    Searched {
        search,
        is_cut,
        error,
    }
}
