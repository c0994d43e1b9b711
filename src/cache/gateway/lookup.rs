//! Lookups over all tiers: memory and disk first, then what is known of S3, then questions to S3, by a deadline.

use std::sync::Arc;

use futures::StreamExt;
use futures::stream;
use tokio::time::Instant;

use super::Gateway;
use super::tiers::Tiers;
use crate::cache::existence::{ChunkState, PrefixSearch, ProbeAnswer};
use crate::format::{ChunkHash, Mask, Space};
use crate::protocol::Strategy;
use crate::protocol::Tier;
use crate::protocol::TierRun;
use crate::s3::object::ObjectError;

/// Which chunks of a prompt exist.
#[derive(Debug, Clone)]
pub struct Lookup {
    pub chunks: usize,
    /// Those that are there, as far as is known.
    pub mask: Mask,
    /// Those that nobody could tell of: an error, or the deadline passed. Their bits in `mask` are zero.
    pub unknown: Mask,
    /// Those that strategy `prefix` took from their neighbours, present or absent, without an answer of their own.
    pub inferred: Mask,
    /// Length of the leading run in `mask`.
    pub prefix: usize,
    pub tiers: Vec<TierRun>,
    /// Why some are unknown; the first reason met.
    pub error: Option<Arc<ObjectError>>,
}

impl Gateway {
    /// Says which chunks of a prompt exist, by `deadline`.
    pub async fn lookup(
        &self,
        space: &Space,
        chunks: &[ChunkHash],
        strategy: Strategy,
        deadline: Instant,
    ) -> Lookup {
        let now = Instant::now();
        let space_key = space.key();
        let local = self.local(space, chunks, now);
        let asks_s3 = self.0.tiers.as_ref().is_none_or(Tiers::asks_s3);
        let cached = |(i, chunk): (usize, &ChunkHash)| match &local {
            Some(local) if local[i].is_some() => ChunkState::Present,
            _ if !asks_s3 => ChunkState::Absent,
            _ => match self.0.cache.is_present(&(space_key, *chunk), now) {
                Some(true) => ChunkState::Present,
                Some(false) => ChunkState::Absent,
                None => ChunkState::NotAsked,
            },
        };
        let states: Vec<ChunkState> = chunks.iter().enumerate().map(cached).collect();
        let mut lookup = match strategy {
            Strategy::Exact => self.exact(space, chunks, states, deadline).await,
            Strategy::Prefix => self.prefix(space, chunks, states, deadline).await,
        };
        lookup.tiers = runs(&lookup.mask, |i| {
            let local = local.as_ref().and_then(|local| local[i]);
            local.unwrap_or(Tier::S3)
        });
        lookup
    }

    /// The tier of this node that has each chunk; None if there are no tiers.
    fn local(&self, space: &Space, chunks: &[ChunkHash], now: Instant) -> Option<Vec<Option<Tier>>> {
        let tiers = self.0.tiers.as_ref()?;
        let mut local = vec![None; chunks.len()];
        tiers
            .memory
            .find(space.key(), chunks, |i| local[i] = Some(Tier::Memory));
        for (tier, chunk) in local.iter_mut().zip(chunks) {
            if tier.is_none() && tiers.is_on_disk(&(space.key(), *chunk), now) {
                *tier = Some(Tier::Disk);
            }
        }
        Some(local)
    }

    async fn exact(
        &self,
        space: &Space,
        chunks: &[ChunkHash],
        mut states: Vec<ChunkState>,
        deadline: Instant,
    ) -> Lookup {
        let open = (0..chunks.len())
            .filter(|&i| states[i] == ChunkState::NotAsked)
            .collect();
        let (answers, error) = self.ask(space, chunks, open, deadline).await;
        for (i, state) in answers {
            states[i] = state;
        }
        let is = |wanted| states.iter().map(|&state| state == wanted).collect::<Mask>();
        Lookup::new(
            is(ChunkState::Present),
            is(ChunkState::Unknown),
            Mask::new(chunks.len()),
            error,
        )
    }

    async fn prefix(
        &self,
        space: &Space,
        chunks: &[ChunkHash],
        states: Vec<ChunkState>,
        deadline: Instant,
    ) -> Lookup {
        let mut search = PrefixSearch::new(states);
        let mut error = None;
        loop {
            let ask = search.next(self.0.options.lookup_probes);
            if ask.is_empty() || Instant::now() >= deadline {
                break;
            }
            let (answers, failed) = self.ask(space, chunks, ask, deadline).await;
            error = error.or(failed);
            // Nobody answers: more questions would only make that worse.
            let lost = answers.iter().all(|(_, state)| *state == ChunkState::Unknown);
            for (i, state) in answers {
                search.learn(i, state);
            }
            if lost {
                break;
            }
        }
        let (present, end) = search.run();
        let mut mask = Mask::new(chunks.len());
        mask.set_prefix(present);
        let unknown = (0..chunks.len()).map(|i| (present..end).contains(&i)).collect();
        let told = |state: &ChunkState| matches!(state, ChunkState::Present | ChunkState::Absent);
        let inferred = |(i, state)| !(present..end).contains(&i) && !told(state);
        let inferred = search.states().iter().enumerate().map(inferred).collect();
        Lookup::new(mask, unknown, inferred, error)
    }

    /// Asks for some positions at once. Also answers the first error that was met.
    async fn ask(
        &self,
        space: &Space,
        chunks: &[ChunkHash],
        positions: Vec<usize>,
        deadline: Instant,
    ) -> (Vec<(usize, ChunkState)>, Option<Arc<ObjectError>>) {
        let mut error = None;
        let asked = positions.into_iter().map(|i| async move {
            // Others may have asked since the lookup began.
            let state = match self.0.cache.is_present(&(space.key(), chunks[i]), Instant::now()) {
                Some(true) => Ok(ChunkState::Present),
                Some(false) => Ok(ChunkState::Absent),
                None => match self.0.prober.ask(space, &chunks[i], deadline).await {
                    ProbeAnswer::Present(_) => Ok(ChunkState::Present),
                    ProbeAnswer::Absent => Ok(ChunkState::Absent),
                    ProbeAnswer::Unknown(error) => Err(error),
                },
            };
            (i, state)
        });
        let answers: Vec<_> = stream::iter(asked)
            .buffer_unordered(self.0.options.lookup_concurrency)
            .collect()
            .await;
        let states = answers.into_iter().map(|(i, state)| {
            let state = state.unwrap_or_else(|cause| {
                error.get_or_insert(cause);
                ChunkState::Unknown
            });
            (i, state)
        });
        (states.collect(), error)
    }
}

impl Lookup {
    fn new(mask: Mask, unknown: Mask, inferred: Mask, error: Option<Arc<ObjectError>>) -> Self {
        Self {
            chunks: mask.len(),
            prefix: mask.prefix(),
            mask,
            unknown,
            inferred,
            tiers: Vec::new(),
            error,
        }
    }

    /// Those of `mask` that are in this tier.
    pub fn within(&self, tier: Tier) -> Mask {
        let mut mask = Mask::new(self.chunks);
        for run in self.tiers.iter().filter(|run| run.tier == tier) {
            (run.from..run.from + run.count).for_each(|i| mask.set(i));
        }
        mask
    }
}

/// Those of the mask, in runs of one tier.
fn runs(mask: &Mask, tier_of: impl Fn(usize) -> Tier) -> Vec<TierRun> {
    let mut runs: Vec<TierRun> = Vec::new();
    for i in (0..mask.len()).filter(|&i| mask.get(i)) {
        let tier = tier_of(i);
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
