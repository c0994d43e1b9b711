//! Lookups over several kinds of KV of one model: the last place of a prompt where all of them are there.

use std::ops::Range;
use std::sync::Arc;

use futures::future::join_all;
use tokio::time::Instant;

use super::lookup::{Known, Lookup, Search, known, look, tier_runs};
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
    /// For each space, what is needed at the boundary.
    pub needed: Vec<NeededRun>,
    /// For each draft, what an engine would need there, as far as it is there without a gap.
    pub drafts: Vec<NeededRun>,
    /// A chunk without an answer could have told of more.
    pub is_open: bool,
    pub error: Option<Arc<ObjectError>>,
}

/// Chunks of one kind that are needed at the boundary, and are there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NeededRun {
    pub chunks: Range<usize>,
    pub tiers: Vec<TierRun>,
    /// Those of them that were inferred from their neighbours.
    pub inferred: Vec<Range<usize>>,
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
    let mut looked: Vec<Option<Looked>> = kinds.spaces.iter().map(|_| None).collect();
    let (mut full, mut asked, mut is_open) = (chunks.len(), 0, false);
    let (mut first, mut error) = (None, None);
    for (space, looked) in kinds.spaces.iter().zip(&mut looked) {
        if !space.kind().is_full() {
            continue;
        }
        let (found, local) = look(tiers, space, &chunks[..full], strategy, deadline).await;
        // The kind that has least tells where all end.
        if found.prefix < full {
            is_open = found.unknown.get(found.prefix);
        }
        full = full.min(found.prefix);
        asked += found.asked;
        error = error.or(found.error.clone());
        let inferred = found.inferred.clone();
        *looked = Some(Looked { local, inferred });
        first.get_or_insert(found);
    }
    let mut at = full.saturating_sub(kinds.lookahead);
    let others = kinds.spaces.iter().zip(&mut looked);
    let (others, of_others): (Vec<&Space>, Vec<_>) =
        others.filter(|(space, _)| !space.kind().is_full()).unzip();
    if !others.is_empty() {
        let round = tiers.bucket.options.lookup_probes + 1;
        let scope = match strategy {
            Strategy::Exact => Scope::All,
            Strategy::Prefix => Scope::Likely {
                questions: (ROUNDS * round).saturating_sub(asked).max(round),
                state_every: kinds.state_every,
            },
        };
        let found = search(tiers, &others, &chunks[..at], scope, deadline).await;
        at = found.search.boundary();
        is_open |= found.is_cut || found.search.is_open();
        error = error.or(found.error);
        first.get_or_insert_with(|| {
            let (states, run) = (found.search.states(0).to_vec(), others[0].needed(at));
            let mut first = Lookup::of(states, run, chunks.len(), found.is_cut);
            first.tiers = tier_runs(first.present(), &found.local[0]);
            first
        });
        for (index, (looked, local)) in of_others.into_iter().zip(found.local).enumerate() {
            let states = found.search.states(index).iter();
            let inferred = states.map(|&state| state == ChunkState::NotAsked).collect();
            *looked = Some(Looked { local, inferred });
        }
    }
    tiers.looked_up(chunks, at);
    if is_open {
        // An engine computes these for all kinds.
        let spaces = kinds.spaces.iter().chain(kinds.drafts).map(Space::key);
        let keys = spaces.flat_map(|space| chunks[at..].iter().map(move |chunk| (space, *chunk)));
        tiers.bucket.got_no_answer(keys, error.as_ref());
    }
    for space in kinds.spaces {
        tiers.bucket.refresh.used(space, &chunks[space.needed(at)]);
    }
    let needed = kinds.spaces.iter().zip(looked.into_iter().flatten());
    let needed = needed.map(|(space, looked)| looked.run(0, space.needed(at)));
    let drafts = kinds
        .drafts
        .iter()
        .map(|space| draft(tiers, space, chunks, at, strategy, deadline));
    Boundary {
        // There is a space, and it is full or not.
        first: first.unwrap_or_else(|| Lookup::of(Vec::new(), 0..0, chunks.len(), true)),
        chunks: at,
        full,
        needed: needed.collect(),
        drafts: join_all(drafts).await,
        is_open,
        error,
    }
}

/// What was found out about a kind's chunks.
struct Looked {
    /// The tier of this node that has each.
    local: Vec<Option<Tier>>,
    inferred: Mask,
}

impl Looked {
    /// A run of these chunks, which are there. `first` is the place of the first of them in the prompt.
    fn run(&self, first: usize, run: Range<usize>) -> NeededRun {
        let mut inferred: Vec<Range<usize>> = Vec::new();
        for i in run.clone().filter(|&i| self.inferred.get(i)) {
            match inferred.last_mut() {
                Some(last) if last.end == first + i => last.end += 1,
                _ => inferred.push(first + i..first + i + 1),
            }
        }
        let mut tiers = tier_runs(run.clone(), &self.local);
        tiers.iter_mut().for_each(|tier| tier.from += first);
        NeededRun {
            chunks: first + run.start..first + run.end,
            tiers,
            inferred,
        }
    }
}

/// How much of a draft's needed chunks is there. Nearly always it is all or nothing, so the two ends are asked for first.
async fn draft(
    tiers: &Tiers,
    space: &Space,
    chunks: &[ChunkHash],
    at: usize,
    strategy: Strategy,
    deadline: Instant,
) -> NeededRun {
    let run = space.needed(at);
    let chunks = &chunks[run.clone()];
    let Known {
        local,
        mut states,
        doubtful,
    } = known(tiers, space, chunks);
    let asks = Search {
        tiers,
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
            asks.prefix(states, doubtful).await
        }
    };
    found.note_unknown(tiers, space, chunks);
    tiers.bucket.refresh.used(space, &chunks[..found.prefix]);
    let inferred = found.inferred;
    Looked { local, inferred }.run(run.start, 0..found.prefix)
}

struct Searched {
    search: BoundarySearch,
    /// For each space, the tier of this node that has each chunk.
    local: Vec<Vec<Option<Tier>>>,
    /// The deadline ended it, or S3 answered nothing.
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
    let of_space = |space: &&Space| {
        let known = known(tiers, space, chunks);
        (known.local, (space.kind(), known.states, known.doubtful))
    };
    let (local, kinds) = spaces.iter().map(of_space).unzip();
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
                    tiers,
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
            is_cut = true;
            break;
        }
    }
    Searched {
        search,
        local,
        is_cut,
        error,
    }
}
