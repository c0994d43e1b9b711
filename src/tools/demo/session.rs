//! The state of one demo: gateway, pages, prompts and report.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use super::error::DemoError;
use super::paged::DemoPages;
use super::plan::Plan;
use super::progress::DemoProgress;
use super::report::{DemoPhase, DemoReport};
use crate::cache::gateway::{Boundary, Gateway, GatewayOptions, Kinds, StoreOutcome};
use crate::config::Config;
use crate::engine::copy::CpuOptions;
use crate::format::{ChunkHash, KeyPrefix, Space};
use crate::protocol::Strategy;
use crate::s3::object::{ErrorKind, ObjectStore, RequestCounts};

/// The content of memory after the cache was lost.
pub(super) const POISON: u8 = 0xA5;
/// Time for stores under way when the run is interrupted.
const DRAIN: Duration = Duration::from_secs(10);
/// The most keys of one DELETE.
const DELETE_KEYS_MAX: usize = 1000;

/// One run, phase by phase. Call [`remove`](Self::remove) also when a phase failed.
pub struct Demo {
    pub(super) kinds: Vec<KindPages>,
    pub(super) plan: Plan,
    pub(super) config: Config,
    pub(super) store: Arc<dyn ObjectStore>,
    pub(super) gateway: Gateway,
    pub(super) random: fastrand::Rng,
    /// Stores under way. Kept outside the phases' futures, so that an interrupted run can still wait for them.
    pub(super) stores: JoinSet<(usize, ChunkHash, StoreOutcome)>,
    /// With the index of their kind.
    pub(super) stored: HashSet<(usize, ChunkHash)>,
    /// The space.json objects that were missing before: this run removes them.
    declares: Vec<String>,
    pub(super) report: DemoReport,
    pub(super) progress: DemoProgress,
}

/// One kind of the model's KV, and its pages.
pub(super) struct KindPages {
    pub space: Space,
    pub pages: DemoPages,
}

/// Measures time and requests since its start.
pub(super) struct RequestWatch {
    started: Instant,
    requests: RequestCounts,
}

impl Demo {
    /// Makes the bucket if missing, and allocates memory. Stores nothing yet.
    pub async fn open(
        store: Arc<dyn ObjectStore>,
        spaces: Vec<Space>,
        plan: Plan,
        mut config: Config,
    ) -> Result<Self, DemoError> {
        // A file is for engines, and there are none; the configured one may belong to a running daemon.
        config.arena.path = None;
        let watch = RequestWatch::start(&*store);
        let deadline = Instant::now() + config.s3.request_timeout;
        match store.check_bucket(deadline).await {
            Err(error) if error.kind == ErrorKind::NoBucket => store.create_bucket(deadline).await?,
            result => result?,
        }
        let gateway = Gateway::over(Arc::clone(&store), &config).await?;
        let mut declares = Vec::new();
        for space in &spaces {
            let key = KeyPrefix::new(&config.s3.prefix).space_json(space.key());
            match store.head(&key, deadline).await {
                Err(error) if error.kind == ErrorKind::NotFound => declares.push(key),
                result => drop(result?),
            }
        }
        let mut report = DemoReport::new(&spaces, &plan);
        report.phase(DemoPhase::OPEN).add(&watch, &*store);
        let (mut kinds, mut first_plane) = (Vec::new(), 0);
        for (space, kept) in spaces.into_iter().zip(&plan.kept) {
            let pages = DemoPages::new(&space, kept.len(), first_plane, CpuOptions::from(&config.copy))?;
            first_plane += space.planes().len();
            kinds.push(KindPages { space, pages });
        }
        Ok(Self {
            kinds,
            random: fastrand::Rng::with_seed(plan.shape.seed),
            stores: JoinSet::new(),
            stored: HashSet::new(),
            progress: DemoProgress::hidden(),
            plan,
            config,
            store,
            gateway,
            declares,
            report,
        })
    }

    /// Shows progress, if stderr is a terminal.
    pub fn show_progress(&mut self) {
        self.progress = DemoProgress::visible();
    }

    pub fn report(&self) -> &DemoReport {
        &self.report
    }

    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Replaces the gateway and the pages by new, empty ones.
    pub fn forget(&mut self) {
        let watch = RequestWatch::start(&*self.store);
        let bytes = self.poison();
        self.gateway = Gateway::new(
            Arc::clone(&self.store),
            self.gateway.arena().clone(),
            self.gateway.capabilities(),
            GatewayOptions::from(&self.config),
        );
        let phase = self.report.phase(DemoPhase::FORGET).add(&watch, &*self.store);
        phase.bytes += bytes;
    }

    /// Overwrites all pages; returns their bytes.
    pub(super) fn poison(&mut self) -> u64 {
        self.kinds.iter_mut().for_each(|kind| kind.pages.poison(POISON));
        self.page_bytes() as u64
    }

    fn page_bytes(&self) -> usize {
        self.kinds.iter().map(|kind| kind.pages.bytes()).sum()
    }

    /// Gives the next conversation other blocks.
    pub(super) fn deal(&mut self) {
        for kind in &mut self.kinds {
            kind.pages.shuffle(&mut self.random);
        }
    }

    /// How much of a prompt is there in all kinds.
    pub(super) async fn boundary(&self, chunks: &[ChunkHash], strategy: Strategy) -> Boundary {
        let spaces: Vec<Space> = self.kinds.iter().map(|kind| kind.space.clone()).collect();
        let kinds = Kinds {
            spaces: &spaces,
            drafts: &[],
            state_every: 0,
            lookahead: 0,
        };
        let deadline = Instant::now() + self.config.lookup.deadline;
        self.gateway.boundary(kinds, chunks, strategy, deadline).await
    }

    /// Deletes the objects that this run stored, and no others.
    pub async fn remove(&mut self) -> Result<(), DemoError> {
        let deadline = Instant::now() + DRAIN;
        while let Ok(Some(done)) = tokio::time::timeout_at(deadline, self.stores.join_next()).await {
            if let Ok((kind, chunk, StoreOutcome::Stored)) = done {
                self.stored.insert((kind, chunk));
            }
        }
        self.stores.abort_all();
        let watch = RequestWatch::start(&*self.store);
        let prefix = KeyPrefix::new(&self.config.s3.prefix);
        let chunks = self
            .stored
            .iter()
            .map(|(kind, chunk)| prefix.chunk(self.kinds[*kind].space.key(), chunk));
        let mut keys: Vec<String> = chunks.collect();
        self.progress.start(DemoPhase::REMOVE, keys.len() as u64, false);
        keys.append(&mut self.declares);
        for some in keys.chunks(DELETE_KEYS_MAX) {
            let deadline = Instant::now() + self.config.store.deadline;
            self.store.delete(some, deadline).await?;
            self.progress.add(some.len() as u64);
        }
        let phase = self.report.phase(DemoPhase::REMOVE).add(&watch, &*self.store);
        phase.chunks = self.stored.len();
        self.stored.clear();
        Ok(())
    }

    /// Ends the last phase; the arena's peak is known now.
    pub(super) fn finish(&mut self) {
        self.progress.end();
        self.report.arena_bytes_peak = self.gateway.arena().stats().used_bytes_peak;
        self.report.cache_bytes = self.page_bytes();
        self.report.equal = self.report.is_equal();
    }
}

impl RequestWatch {
    pub fn start(store: &dyn ObjectStore) -> Self {
        Self {
            started: Instant::now(),
            requests: store.requests(),
        }
    }

    pub fn read(&self, store: &dyn ObjectStore) -> (Duration, RequestCounts) {
        (self.started.elapsed(), store.requests().since(&self.requests))
    }
}
