use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvgate::engine::client::{Client, DaemonAddress};
use kvgate::engine::copy::cuda::{Gpu, StreamMark};
use kvgate::engine::copy::{EngineStream, PagedCache, SlotMapping, Tensor};
use kvgate::engine::rank::{
    ComputedChunk, Failed, Hold, LoadJob, LoadProgress, LookupBreaker, StoreJob, WantedChunk, Worker as Rank,
    WorkerError,
};
use kvgate::format::ChunkHash;
use kvgate::protocol::AttachRequest;
use kvgate::protocol::Order;
use pyo3::prelude::*;
use serde::Deserialize;

use crate::copier::{copier, copy_options};
use crate::error::failed;
use crate::lookups::split;
use crate::runtime::runtime;
use crate::space::Space;

/// The settings of a rank.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    socket: PathBuf,
    /// A user whose socket is trusted, besides root and this process's own.
    #[serde(default)]
    socket_owner: Option<u32>,
    attach: AttachRequest,
    tensors: Vec<Tensor>,
    /// CUDA's number of the GPU that the tensors are on; None: host memory.
    device: Option<usize>,
    load_deadline_ms: u64,
    store_deadline_ms: u64,
    patience_ms: u64,
    breaker_timeouts: u32,
    breaker_pause_ms: u64,
}

#[pyclass(frozen, get_all, module = "kvgate._native")]
#[derive(Clone)]
pub struct Loaded {
    job: String,
    missing: Vec<usize>,
    bytes: u64,
    seconds: f64,
    error: Option<String>,
}

#[pyclass(frozen, get_all, module = "kvgate._native")]
#[derive(Clone)]
pub struct Stored {
    job: String,
    there: Vec<usize>,
    stored: usize,
    refused: usize,
    bytes: u64,
    seconds: f64,
    error: Option<String>,
}

#[derive(Default)]
struct Jobs {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    under_way: usize,
    loaded: Vec<Loaded>,
    stored: Vec<Stored>,
    /// Stores whose pages the engine has not been told to be free.
    holds: Vec<(String, Arc<Hold>)>,
    /// Loads under way that the engine waits for layer by layer.
    by_layer: Vec<(String, Arc<LoadProgress>)>,
}

#[pyclass(frozen, module = "kvgate._native")]
pub struct Worker {
    rank: Arc<Rank>,
    cache: PagedCache,
    jobs: Arc<Jobs>,
    load_deadline_ms: u64,
    store_deadline: Duration,
}

#[pymethods]
impl Worker {
    #[new]
    fn new(py: Python<'_>, settings: &str, space: &Space) -> PyResult<Self> {
        let settings: Settings = serde_json::from_str(settings).map_err(failed)?;
        py.detach(|| Self::start(settings, space.0.clone()))
    }

    fn is_attached(&self) -> Option<bool> {
        self.rank.is_attached()
    }

    #[pyo3(signature = (job, hashes, first_token, tokens, block_table, stream=None, by_layer=false))]
    fn load(
        &self,
        py: Python<'_>,
        job: String,
        hashes: &[u8],
        first_token: u64,
        tokens: (u64, u64),
        block_table: Vec<u32>,
        stream: Option<u64>,
        by_layer: bool,
    ) -> PyResult<()> {
        let hashes = split(hashes)?;
        let wanted = self.wanted(&hashes, first_token, tokens, &block_table)?;
        let bytes = self.bytes(wanted.iter().map(|chunk| chunk.spans.tokens()));
        let progress = Arc::new(LoadProgress::new(self.cache.space().planes().len(), wanted.len()));
        let (rank, deadline_ms) = (Arc::clone(&self.rank), self.load_deadline_ms);
        let order = match by_layer {
            true => Order::Layer,
            false => Order::Chunk,
        };
        py.detach(|| {
            let after = self.mark(stream)?;
            let (id, waited) = (job.clone(), (job.clone(), Arc::clone(&progress)));
            let all = 0..wanted.len();
            let work = async move {
                let load = LoadJob {
                    id: &id,
                    wanted: &wanted,
                    order,
                    deadline_ms: Some(deadline_ms),
                    after,
                };
                rank.load(load, &progress).await
            };
            let began = Instant::now();
            let begin = |state: &mut State| state.by_layer.extend(by_layer.then_some(waited));
            self.spawn(work, begin, move |state, ended: Result<Vec<Failed>, String>| {
                state.by_layer.retain(|(by_layer, _)| *by_layer != job);
                // A chunk that may be missing is computed.
                let (missing, error) = match ended {
                    Ok(failed) => (
                        failed.iter().map(|failed| failed.index).collect(),
                        failed.first().map(|failed| failed.reason.clone()),
                    ),
                    Err(error) => (all.collect(), Some(error)),
                };
                state.loaded.push(Loaded {
                    job,
                    missing,
                    bytes,
                    seconds: began.elapsed().as_secs_f64(),
                    error,
                });
            })
        })
    }

    fn wait_layer(&self, py: Python<'_>, plane: usize) {
        py.detach(|| {
            let waited = self.jobs.lock().by_layer.clone();
            for (_, progress) in waited {
                progress.wait(plane);
            }
        });
    }

    /// Waits until all loads that the engine waits for layer by layer have ended.
    fn wait_layers(&self, py: Python<'_>) {
        py.detach(|| {
            let mut state = self.jobs.lock();
            while !state.by_layer.is_empty() {
                state = self.jobs.wait(state);
            }
        });
    }

    #[pyo3(signature = (job, hashes, parent, first_token, block_table, stream=None))]
    fn store(
        &self,
        py: Python<'_>,
        job: String,
        hashes: &[u8],
        parent: &[u8],
        first_token: u64,
        block_table: Vec<u32>,
        stream: Option<u64>,
    ) -> PyResult<()> {
        let (hashes, mut parents) = (split(hashes)?, split(parent)?);
        parents.extend_from_slice(&hashes);
        let chunk_tokens = self.cache.space().chunk_tokens();
        let mut chunks = Vec::with_capacity(hashes.len());
        for (index, (&hash, parent)) in hashes.iter().zip(parents).enumerate() {
            let mapping = SlotMapping::Blocks {
                table: &block_table,
                first_token: first_token + index as u64 * u64::from(chunk_tokens),
            };
            let spans = self.cache.spans(mapping, 0..chunk_tokens).map_err(failed)?;
            chunks.push(ComputedChunk { hash, parent, spans });
        }
        let chunk_bytes = self.bytes([chunk_tokens]);
        let (rank, deadline) = (Arc::clone(&self.rank), self.store_deadline);
        let hold = Arc::<Hold>::default();
        py.detach(|| {
            let after = self.mark(stream)?;
            let held = (job.clone(), Arc::clone(&hold));
            let work = async move {
                let store = StoreJob {
                    chunks: &chunks,
                    after,
                    deadline,
                };
                rank.store(store, &hold).await
            };
            let began = Instant::now();
            let begin = |state: &mut State| state.holds.push(held);
            self.spawn(work, begin, move |state, ended| {
                // A chunk that can't be stored is stored when it is computed next.
                let (stored, error) = match ended {
                    Ok(stored) => (stored, None),
                    Err(error) => (kvgate::engine::rank::Stored::default(), Some(error)),
                };
                state.stored.push(Stored {
                    job,
                    bytes: stored.stored as u64 * chunk_bytes,
                    there: stored.there,
                    stored: stored.stored,
                    refused: stored.refused,
                    seconds: began.elapsed().as_secs_f64(),
                    error,
                });
            })
        })
    }

    fn loaded(&self) -> Vec<Loaded> {
        std::mem::take(&mut self.jobs.lock().loaded)
    }

    fn stored(&self) -> Vec<Stored> {
        std::mem::take(&mut self.jobs.lock().stored)
    }

    fn freed(&self) -> Vec<String> {
        let mut state = self.jobs.lock();
        let free = state.holds.extract_if(.., |(_, hold)| hold.is_free());
        free.map(|(job, _)| job).collect()
    }

    fn take_back(&self, py: Python<'_>, jobs: Vec<String>) {
        let state = self.jobs.lock();
        let wanted = state.holds.iter().filter(|(job, _)| jobs.contains(job));
        let holds: Vec<_> = wanted.map(|(_, hold)| Arc::clone(hold)).collect();
        drop(state);
        py.detach(|| holds.iter().for_each(|hold| hold.end()));
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| {
            self.rank.close();
            let holds: Vec<_> = self
                .jobs
                .lock()
                .holds
                .iter()
                .map(|(_, hold)| Arc::clone(hold))
                .collect();
            holds.iter().for_each(|hold| hold.end());
            let mut state = self.jobs.lock();
            while state.under_way > 0 {
                state = self.jobs.wait(state);
            }
        });
    }
}

impl Worker {
    fn start(settings: Settings, space: kvgate::format::Space) -> PyResult<Self> {
        let options = copy_options()?;
        let cache = PagedCache::new(&space, &settings.tensors).map_err(failed)?;
        let gpu = settings.device.map(Gpu::open).transpose().map_err(failed)?;
        let patience = Duration::from_millis(settings.patience_ms);
        let client = Client::new(DaemonAddress::Unix(settings.socket))
            .trusting(settings.socket_owner)
            .with_patience(patience);
        let load = copier(gpu.as_ref(), cache.clone(), &options).map_err(failed)?;
        let narrow_cache = cache.clone();
        let narrow = move |own: &[kvgate::protocol::Share]| {
            let own = own
                .iter()
                .map(|share| (share.planes.0..share.planes.1, share.heads.0..share.heads.1));
            copier(gpu.as_ref(), narrow_cache.only(own), &options)
        };
        let pause = Duration::from_millis(settings.breaker_pause_ms);
        let breaker = LookupBreaker::new(settings.breaker_timeouts, pause);
        let rank = Arc::new(Rank::new(&client, settings.attach, space, load, narrow, breaker));
        let starting = Arc::clone(&rank);
        // Without a gateway every chunk is a miss until one is there.
        runtime()?.spawn(async move {
            let _ = starting.session().await;
        });
        Ok(Self {
            rank,
            cache,
            jobs: Arc::default(),
            load_deadline_ms: settings.load_deadline_ms,
            store_deadline: Duration::from_millis(settings.store_deadline_ms),
        })
    }

    fn wanted(
        &self,
        hashes: &[ChunkHash],
        first_token: u64,
        tokens: (u64, u64),
        block_table: &[u32],
    ) -> PyResult<Vec<WantedChunk>> {
        let chunk_tokens = u64::from(self.cache.space().chunk_tokens());
        let wanted = hashes.iter().enumerate().map(|(index, &hash)| {
            let start = first_token + index as u64 * chunk_tokens;
            // The chunk's tokens that are to be written.
            let within = |token: u64| {
                u32::try_from(token.clamp(start, start + chunk_tokens) - start).unwrap_or(u32::MAX)
            };
            let mapping = SlotMapping::Blocks {
                table: block_table,
                first_token: start,
            };
            let spans = self.cache.spans(mapping, within(tokens.0)..within(tokens.1));
            Ok(WantedChunk {
                hash,
                spans: spans.map_err(failed)?,
            })
        });
        wanted.collect()
    }

    fn mark(&self, stream: Option<u64>) -> PyResult<Option<StreamMark>> {
        let marked = stream.map(|stream| self.rank.mark(EngineStream(stream)));
        Ok(marked.transpose().map_err(failed)?.flatten())
    }

    /// Bytes of these tokens.
    fn bytes(&self, tokens: impl IntoIterator<Item = u32>) -> u64 {
        let tokens: u64 = tokens.into_iter().map(u64::from).sum();
        tokens * self.cache.token_bytes()
    }

    fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, WorkerError>> + Send + 'static,
        begin: impl FnOnce(&mut State),
        end: impl FnOnce(&mut State, Result<T, String>) + Send + 'static,
    ) -> PyResult<()> {
        let jobs = Arc::clone(&self.jobs);
        let runtime = runtime()?;
        let mut state = self.jobs.lock();
        state.under_way += 1;
        begin(&mut state);
        drop(state);
        let task = runtime.spawn(work);
        runtime.spawn(async move {
            let ended = match task.await {
                Ok(ended) => ended.map_err(|error| error.to_string()),
                // A panicked task has done nothing to rely on.
                Err(error) => Err(error.to_string()),
            };
            let mut state = jobs.lock();
            state.under_way -= 1;
            end(&mut state, ended);
            drop(state);
            jobs.changed.notify_all();
        });
        Ok(())
    }
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}
