//! Lookups over all tiers: memory and disk first, then known existence on S3, then questions to S3, by a deadline.

use std::ops::Range;
use std::sync::Arc;

use futures::StreamExt;
use futures::stream;
use tokio::time::Instant;

use super::tiers::Tiers;
use crate::cache::existence::{ChunkState, PrefixSearch, ProbeAnswer, Wanted};
use crate::format::{ChunkHash, Mask, Run, Space};
use crate::protocol::Strategy;
use crate::protocol::Tier;
use crate::protocol::TierRun;
use crate::s3::object::ObjectError;

/// The answer of a lookup: which chunks of a prompt exist.
#[derive(Debug, Clone)]
pub struct Lookup {
    pub chunks: usize,
    /// Chunks that are there, as far as is known.
    pub mask: Mask,
    /// Chunks without an answer: an error, or the deadline passed. Their bits in `mask` are zero.
    pub unknown: Mask,
    /// Chunks that strategy `prefix` inferred from their neighbours, present or absent, without an answer of their
    /// own.
    pub inferred: Mask,
    /// Length of the leading run in `mask`.
    pub prefix: usize,
    pub tiers: Vec<TierRun>,
    /// Chunks that S3 was asked for.
    pub asked: usize,
    /// The reason why some are unknown; the first one met.
    pub error: Option<Arc<ObjectError>>,
}

/// Tells by `deadline` which chunks of a prompt exist.
pub async fn lookup(
    tiers: &Tiers,
    space: &Space,
    chunks: &[ChunkHash],
    strategy: Strategy,
    deadline: Instant,
) -> Lookup {
    let (lookup, _) = look(tiers, space, chunks, strategy, deadline).await;
    tiers.looked_up(chunks, lookup.prefix);
    lookup.note_unknown(tiers, space, chunks);
    if space.kind().is_full() {
        tiers.bucket.refresh.used(space, &chunks[..lookup.prefix]);
    } else {
        let there: Vec<ChunkHash> = lookup.present().map(|i| chunks[i]).collect();
        tiers.bucket.refresh.used(space, &there);
    }
    lookup
}

/// Also returns the tier of this node that has each chunk, which is looked up once.
pub(super) async fn look(
    tiers: &Tiers,
    space: &Space,
    chunks: &[ChunkHash],
    strategy: Strategy,
    deadline: Instant,
) -> (Lookup, Vec<Option<Tier>>) {
    let known = known(tiers, space, chunks);
    let (local, states) = (known.local, known.states);
    let search = Search {
        tiers,
        space,
        chunks,
        deadline,
    };
    // Windows and snapshots are there without those before them: their neighbours tell nothing of them.
    let mut lookup = match strategy {
        Strategy::Prefix if space.kind().is_full() => search.prefix(states, known.doubtful).await,
        Strategy::Prefix | Strategy::Exact => search.exact(states).await,
    };
    let a_peer_has = |i: usize| {
        let is_on_s3 = tiers.bucket.is_present(&(space.key(), chunks[i])) == Some(true);
        !is_on_s3 && tiers.a_peer_has(space, &chunks[i])
    };
    lookup.tiers = if tiers.peers_of(space).is_some() {
        let place = |(i, tier): (usize, &Option<Tier>)| tier.or_else(|| a_peer_has(i).then_some(Tier::Peer));
        let places: Vec<_> = local.iter().enumerate().map(place).collect();
        tier_runs(lookup.present(), &places)
    } else {
        tier_runs(lookup.present(), &local)
    };
    if space.kind().is_full() {
        // What an engine computes now, it stores.
        tiers.bucket.runs.looked_up(space.key(), chunks, lookup.prefix);
    }
    (lookup, local)
}

/// What is known of chunks without a question to S3.
pub(super) struct Known {
    /// The tier of this node that has each.
    pub local: Vec<Option<Tier>>,
    pub states: Vec<ChunkState>,
    /// Positions of chunks that are to be asked for, and that S3 lately did not have, or not in a version of use.
    pub doubtful: Vec<usize>,
}

/// It is the work of a lookup that grows with the prompt, so each space is looked through once.
pub(super) fn known(tiers: &Tiers, space: &Space, chunks: &[ChunkHash]) -> Known {
    let now = Instant::now();
    let local = local(tiers, space, chunks, now);
    let (asks_s3, has_peers) = (tiers.asks_s3(), tiers.peers_of(space).is_some());
    let cache = &tiers.bucket.cache;
    let has_useless = cache.has_useless();
    let mut doubtful = Vec::new();
    let cached = |(i, chunk): (usize, &ChunkHash)| {
        if local[i].is_some() {
            return ChunkState::Present;
        }
        if !asks_s3 {
            return ChunkState::Absent;
        }
        let key = (space.key(), *chunk);
        let is_doubtful = match cache.is_present(&key, now) {
            Some(true) => return ChunkState::Present,
            Some(false) if !has_peers => return ChunkState::Absent,
            // A peer may have it: that costs a question to the peers alone.
            Some(false) => true,
            None => has_useless && cache.is_useless(&key),
        };
        if is_doubtful {
            doubtful.push(i);
        }
        ChunkState::NotAsked
    };
    let states = chunks.iter().enumerate().map(cached).collect();
    Known {
        local,
        states,
        doubtful,
    }
}

/// The tier of this node that has each chunk; None if neither memory nor disk has it.
fn local(tiers: &Tiers, space: &Space, chunks: &[ChunkHash], now: Instant) -> Vec<Option<Tier>> {
    let mut local = vec![None; chunks.len()];
    tiers
        .memory
        .find(space.key(), chunks, |i| local[i] = Some(Tier::Memory));
    for (tier, chunk) in local.iter_mut().zip(chunks) {
        if tier.is_none() && tiers.is_on_disk(&(space.key(), *chunk), now) {
            *tier = Some(Tier::Disk);
        }
    }
    local
}

/// A position, what is known of the chunk there, and its hint.
type Answer = (usize, ChunkState, Option<Run>);

/// The questions to S3 for chunks whose existence is not known yet.
pub(super) struct Search<'a> {
    pub tiers: &'a Tiers,
    pub space: &'a Space,
    pub chunks: &'a [ChunkHash],
    pub deadline: Instant,
}

impl Search<'_> {
    pub async fn exact(&self, mut states: Vec<ChunkState>) -> Lookup {
        let open: Vec<usize> = (0..states.len())
            .filter(|&i| states[i] == ChunkState::NotAsked)
            .collect();
        let asked = open.len();
        let (answers, error) = self.ask(open).await;
        for (i, state) in answers {
            states[i] = state;
        }
        let is = |wanted| states.iter().map(|&state| state == wanted).collect::<Mask>();
        Lookup {
            asked,
            error,
            ..Lookup::new(
                is(ChunkState::Present),
                is(ChunkState::Unknown),
                Mask::new(states.len()),
            )
        }
    }

    /// Of the `doubtful` chunks, as many are asked for as a round takes: the first of them nearly always end the prefix.
    pub async fn prefix(&self, states: Vec<ChunkState>, mut doubtful: Vec<usize>) -> Lookup {
        let (chunks, probes) = (states.len(), self.tiers.bucket.options.lookup_probes);
        doubtful.truncate(probes);
        let mut search = PrefixSearch::new(states, doubtful);
        let (mut error, mut asked) = (None, 0);
        loop {
            let ask = search.next(probes);
            if ask.is_empty() || Instant::now() >= self.deadline {
                break;
            }
            asked += ask.len();
            let (answers, failed) = self.ask_for(ask, Wanted::Hints).await;
            error = error.or(failed);
            // No question was answered: more of them would only make that worse.
            let lost = answers.iter().all(|(_, state, _)| *state == ChunkState::Unknown);
            for (i, state, run) in answers {
                search.learn(i, state);
                if let Some(run) = run {
                    search.hint(i, i + 1 + run.agrees(&self.chunks[i + 1..]));
                }
            }
            if lost {
                break;
            }
        }
        let (present, end) = search.run();
        let mut mask = Mask::new(chunks);
        mask.set_prefix(present);
        let unknown = (0..chunks).map(|i| (present..end).contains(&i)).collect();
        let told = |state: &ChunkState| matches!(state, ChunkState::Present | ChunkState::Absent);
        let inferred = |(i, state)| !(present..end).contains(&i) && !told(state);
        let inferred = search.states().iter().enumerate().map(inferred).collect();
        Lookup {
            asked,
            error,
            ..Lookup::new(mask, unknown, inferred)
        }
    }

    /// Asks for some positions at once. Also returns the first error that was met.
    pub async fn ask(&self, positions: Vec<usize>) -> (Vec<(usize, ChunkState)>, Option<Arc<ObjectError>>) {
        let (answers, error) = self.ask_for(positions, Wanted::Existence).await;
        (
            answers.into_iter().map(|(i, state, _)| (i, state)).collect(),
            error,
        )
    }

    async fn ask_for(
        &self,
        positions: Vec<usize>,
        wanted: Wanted,
    ) -> (Vec<Answer>, Option<Arc<ObjectError>>) {
        let mut error = None;
        let asked = positions.into_iter().map(|i| async move {
            // Others may have asked since the lookup began.
            let (bucket, chunk) = (&self.tiers.bucket, &self.chunks[i]);
            let answer = match bucket.is_present(&(self.space.key(), *chunk)) {
                Some(true) => ProbeAnswer::Present(None),
                Some(false) => ProbeAnswer::Absent,
                None => bucket.prober.ask(self.space, chunk, wanted, self.deadline).await,
            };
            let answer = match answer {
                ProbeAnswer::Absent | ProbeAnswer::Left => match self.a_peer_has(chunk).await {
                    true => ProbeAnswer::Present(None),
                    false => ProbeAnswer::Absent,
                },
                answer => answer,
            };
            (i, answer)
        });
        let answers: Vec<_> = stream::iter(asked)
            .buffer_unordered(self.tiers.bucket.options.lookup_concurrency)
            .collect()
            .await;
        let answers = answers.into_iter().map(|(i, answer)| match answer {
            ProbeAnswer::Present(run) => (i, ChunkState::Present, run),
            ProbeAnswer::Absent | ProbeAnswer::Left => (i, ChunkState::Absent, None),
            ProbeAnswer::Unknown(cause) => {
                error.get_or_insert(cause);
                (i, ChunkState::Unknown, None)
            }
        });
        (answers.collect(), error)
    }

    /// Whether a chunk that S3 does not have is a hit all the same.
    async fn a_peer_has(&self, chunk: &ChunkHash) -> bool {
        match self.tiers.peers_of(self.space) {
            Some(peers) => {
                let finds = peers.finds((self.space.key(), *chunk));
                tokio::time::timeout_at(self.deadline, finds)
                    .await
                    .unwrap_or(false)
            }
            None => false,
        }
    }
}

impl Lookup {
    /// The answer of a search over kinds none of which is full: what is known of the first of them. `needed` is there
    /// or inferred. `is_cut`: the search ended before all questions that it had, so of the other chunks nobody could
    /// tell.
    pub(super) fn of(mut states: Vec<ChunkState>, needed: Range<usize>, chunks: usize, is_cut: bool) -> Self {
        states.resize(chunks, ChunkState::NotAsked);
        if is_cut {
            for (_, state) in states.iter_mut().enumerate().filter(|(i, _)| !needed.contains(i)) {
                if *state == ChunkState::NotAsked {
                    *state = ChunkState::Unknown;
                }
            }
        }
        let is = |wanted| states.iter().map(move |&state| state == wanted);
        let mut mask: Mask = is(ChunkState::Present).collect();
        needed.for_each(|i| mask.set(i));
        Self::new(
            mask,
            is(ChunkState::Unknown).collect(),
            is(ChunkState::NotAsked).collect(),
        )
    }

    /// Chunks of `mask`.
    pub(super) fn present(&self) -> impl Iterator<Item = usize> {
        (0..self.chunks).filter(|&i| self.mask.get(i))
    }

    fn new(mask: Mask, unknown: Mask, inferred: Mask) -> Self {
        Self {
            chunks: mask.len(),
            prefix: mask.prefix(),
            mask,
            unknown,
            inferred,
            tiers: Vec::new(),
            asked: 0,
            error: None,
        }
    }

    /// A store asks for these first.
    pub(super) fn note_unknown(&self, tiers: &Tiers, space: &Space, chunks: &[ChunkHash]) {
        if self.unknown.count() > 0 {
            let unknown = (0..self.chunks).filter(|&i| self.unknown.get(i));
            let keys = unknown.map(|i| (space.key(), chunks[i]));
            tiers.bucket.got_no_answer(keys, self.error.as_ref());
        }
    }

    /// Chunks of `mask` that are in this tier.
    pub fn within(&self, tier: Tier) -> Mask {
        let mut mask = Mask::new(self.chunks);
        for run in self.tiers.iter().filter(|run| run.tier == tier) {
            (run.from..run.from + run.count).for_each(|i| mask.set(i));
        }
        mask
    }
}

/// Chunks that are there, in runs of one tier: of this node, or S3.
pub(super) fn tier_runs(chunks: impl Iterator<Item = usize>, local: &[Option<Tier>]) -> Vec<TierRun> {
    let mut runs: Vec<TierRun> = Vec::new();
    for i in chunks {
        let tier = local[i].unwrap_or(Tier::S3);
        match runs.last_mut() {
            Some(run) if run.from + run.count == i && run.tier == tier => run.count += 1,
            _ => runs.push(TierRun {
                tier,
                from: i,
                count: 1,
            }),
        }
    }
    runs
}
