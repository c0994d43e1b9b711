//! Lookups over several kinds of KV of one model: the last place of a prompt where all of them are there.

use std::ops::Range;
use std::sync::Arc;

use futures::future::join_all;
use tokio::time::Instant;

use super::lookup::{Lookup, Search, local, lookup, runs};
use super::tiers::Tiers;
use crate::cache::existence::{BoundarySearch, ChunkState, Scope};
use crate::format::{ChunkHash, Kind, Mask, Space};
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
}

/// The answer of a lookup over kinds.
#[derive(Debug, Clone)]
pub struct Boundary {
    /// Of the first full space; nothing where there is none.
    pub first: Lookup,
    /// Leading chunks after which an engine can go on.
    pub chunks: usize,
    /// Leading chunks that all full kinds have: up to here a snapshot or a window could be made use of.
    pub full: usize,
    /// For each space, the chunks that are needed there, and their tiers.
    pub needed: Vec<(Range<usize>, Vec<TierRun>)>,
    /// For each draft, those of its needed chunks that are there.
    pub drafts: Vec<Mask>,
    /// A chunk without an answer could have told of more.
    pub is_open: bool,
    pub error: Option<Arc<ObjectError>>,
}

/// Tells by `deadline` how much of a prompt is there in all kinds.
pub async fn boundary(
    tiers: &Tiers,
    kinds: Kinds<'_>,
    chunks: &[ChunkHash],
    strategy: Strategy,
    deadline: Instant,
) -> Boundary {
    let (mut first, mut full) = (None, chunks.len());
    let (mut error, mut is_open) = (None, false);
    for space in kinds.spaces.iter().filter(|space| space.kind().is_full()) {
        let found = lookup(tiers, space, &chunks[..full], strategy, deadline).await;
        // A kind that has less ends all: what another did not tell no longer matters.
        if found.prefix < full {
            is_open = found.unknown.get(found.prefix);
        }
        full = full.min(found.prefix);
        error = error.or_else(|| found.error.clone());
        first.get_or_insert(found);
    }
    let others: Vec<&Space> = kinds
        .spaces
        .iter()
        .filter(|space| !space.kind().is_full())
        .collect();
    let mut at = full;
    if !others.is_empty() && full > 0 {
        let scope = match strategy {
            Strategy::Exact => Scope::All,
            Strategy::Prefix => Scope::Likely {
                // As many rounds as the search for a prefix of thousands of chunks takes.
                questions: ROUNDS * (tiers.bucket.options.lookup_probes + 1),
                state_every: kinds.state_every,
            },
        };
        let found = search(tiers, &others, &chunks[..full], scope, deadline).await;
        at = found.0;
        is_open |= found.1;
        error = error.or(found.2);
    }
    let now = Instant::now();
    let needed = kinds.spaces.iter().map(|space| {
        let run = space.needed(at);
        let here = local(tiers, space, &chunks[run.clone()], now);
        let mut of = runs(&run.clone().map(|_| true).collect(), |i| {
            here[i].unwrap_or(Tier::S3)
        });
        of.iter_mut().for_each(|tier| tier.from += run.start);
        (run, of)
    });
    let needed = needed.collect();
    let drafts = kinds.drafts.iter().map(|space| async move {
        let mut mask = Mask::new(at);
        let run = space.needed(at);
        // A draft's windows and states are few chunks; of its full layers the prefix is taken.
        let found = lookup(tiers, space, &chunks[run.clone()], strategy, deadline).await;
        (0..found.prefix).for_each(|i| mask.set(run.start + i));
        mask
    });
    let first = first.unwrap_or_else(|| {
        let mut nothing = Lookup::nothing(chunks.len());
        let run = kinds.spaces[0].needed(at);
        run.for_each(|i| nothing.mask.set(i));
        nothing
    });
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

/// Rounds of questions that the search backwards may take.
const ROUNDS: usize = 4;

/// The boundary of windows and states within a prefix; whether an answer that is missing could have told of more; and
/// the first error.
async fn search(
    tiers: &Tiers,
    spaces: &[&Space],
    chunks: &[ChunkHash],
    scope: Scope,
    deadline: Instant,
) -> (usize, bool, Option<Arc<ObjectError>>) {
    let now = Instant::now();
    let known = |space: &&Space| {
        let states = super::lookup::known(tiers, space, chunks, &local(tiers, space, chunks, now), now);
        (space.kind(), states)
    };
    let chunk_tokens = spaces[0].chunk_tokens();
    let kinds: Vec<(Kind, Vec<ChunkState>)> = spaces.iter().map(known).collect();
    let mut search = BoundarySearch::new(kinds, chunks.len(), chunk_tokens, scope);
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
            let of = questions.iter().filter(move |(kind, _)| *kind == index);
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
    (search.boundary(), is_cut || search.is_open(), error)
}
