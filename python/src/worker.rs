//! A rank's side: it attaches to the gateway, and loads and stores the chunks of all kinds of KV between slots and pages.
//!
//! Jobs run on the runtime; Python starts them and collects what has ended, once a step. An engine's blocks are given
//! back only after their job was collected.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use kvgate::engine::client::{Client, DaemonAddress, traced};
use kvgate::engine::copy::{EngineStream, Mark, PagedCache, SlotMapping, Spans, Tensor};
use kvgate::engine::rank::{
    ComputedChunk, ComputedKind, Failed, Hold, KindPages, LoadJob, LoadProgress, LookupBreaker, StoreJob,
    WantedChunk, WantedKind, Worker, WorkerError,
};
use kvgate::format::{ChunkHash, Space};
use kvgate::protocol::{AttachRequest, Order, TokenShare};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use serde::Deserialize;

use crate::copier::Copiers;
use crate::error::failed;
use crate::lookups::split;
use crate::runtime::runtime;
use crate::space::PySpace;

/// The settings of a rank.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    socket: PathBuf,
    /// A user whose socket is trusted, besides root and this process's own.
    #[serde(default)]
    socket_owner: Option<u32>,
    attach: AttachRequest,
    /// One for each space.
    kinds: Vec<KindSettings>,
    /// CUDA's number of the GPU that the tensors are on; None: host memory.
    device: Option<usize>,
    load_deadline_ms: u64,
    store_deadline_ms: u64,
    patience_ms: u64,
    breaker_timeouts: u32,
    breaker_pause_ms: u64,
}

/// One kind of KV in the engine's memory.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct KindSettings {
    /// The tensors of each group of layers that has block tables of its own; none where the rank has no layer of it.
    groups: Vec<Vec<Tensor>>,
    /// For each group the tokens of a chunk that its blocks have; all where it is none, or left out.
    #[serde(default)]
    tokens: Vec<Option<TokenShare>>,
    #[serde(default)]
    is_draft: bool,
}

/// (kind, hashes, a table for each group: rows to be written, blocks).
type LoadKind = (usize, PyBackedBytes, Vec<((u64, u64), Vec<i64>)>);
/// (kind, hashes, a parent for each, a table for each group: blocks of chunk after chunk).
type StoreKind = (usize, PyBackedBytes, PyBackedBytes, Vec<Vec<i64>>);

#[pyclass(frozen, get_all, module = "kvgate._native")]
#[derive(Clone)]
pub struct Loaded {
    job: String,
    missing: Vec<(usize, usize)>,
    missing_drafts: usize,
    bytes: u64,
    seconds: f64,
    error: Option<String>,
}

#[pyclass(frozen, get_all, module = "kvgate._native")]
#[derive(Clone)]
pub struct Stored {
    job: String,
    there: Vec<(usize, usize)>,
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

#[pyclass(frozen, name = "Worker", module = "kvgate._native")]
pub struct PyWorker {
    rank: Arc<Worker>,
    kinds: Vec<Kind>,
    jobs: Arc<Jobs>,
    load_deadline_ms: u64,
    store_deadline: Duration,
}

/// One kind of KV, and where each of its groups lies. None: the rank has no layer of that group.
struct Kind {
    space: Space,
    groups: Vec<Option<PagedCache>>,
}

#[pymethods]
impl PyWorker {
    #[new]
    #[pyo3(signature = (settings, spaces, copies=None))]
    fn new(
        py: Python<'_>,
        settings: &str,
        spaces: Vec<PyRef<'_, PySpace>>,
        copies: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let settings: Settings = serde_json::from_str(settings).map_err(failed)?;
        let spaces = spaces.iter().map(|space| space.0.clone()).collect();
        py.detach(|| Self::start(settings, spaces, copies))
    }

    fn is_attached(&self) -> Option<bool> {
        self.rank.is_attached()
    }

    #[pyo3(signature = (job, kinds, stream=None, by_layer=false, traceparent=None))]
    fn load(
        &self,
        py: Python<'_>,
        job: String,
        kinds: Vec<LoadKind>,
        stream: Option<u64>,
        by_layer: bool,
        traceparent: Option<String>,
    ) -> PyResult<()> {
        let mut wanted = Vec::with_capacity(kinds.len());
        let mut bytes = 0;
        for (kind, hashes, tables) in kinds {
            let of = self.kind(kind, tables.len())?;
            let chunks = of.wanted(&split(&hashes)?, &tables)?;
            bytes += of.bytes(chunks.iter().map(|chunk| chunk.spans.as_slice()));
            wanted.push(WantedKind { kind, chunks });
        }
        let progress = Arc::new(LoadProgress::new(wanted.iter().map(|wanted| {
            let planes = self.kinds[wanted.kind].space.planes().len();
            (wanted.kind, planes, wanted.chunks.len())
        })));
        let (rank, deadline_ms) = (Arc::clone(&self.rank), self.load_deadline_ms);
        let order = match by_layer {
            true => Order::Layer,
            false => Order::Chunk,
        };
        py.detach(|| {
            let marked = self.rank.mark(stream.map(EngineStream));
            let (id, waited) = (job.clone(), (job.clone(), Arc::clone(&progress)));
            let all: Vec<(usize, usize)> = wanted
                .iter()
                .flat_map(|wanted| (0..wanted.chunks.len()).map(|index| (wanted.kind, index)))
                .collect();
            let kinds = Arc::clone(&self.rank);
            let work = async move {
                let (after, unmarked) = match marked {
                    Ok(after) => (after, None),
                    Err(error) => (None, Some(error)),
                };
                let load = LoadJob {
                    id: &id,
                    kinds: &wanted,
                    order,
                    deadline_ms: Some(deadline_ms),
                    after,
                };
                match unmarked {
                    None => rank.load(load, &progress).await,
                    // Nothing may be written before the engine's own work is done.
                    Some(error) => {
                        rank.decline_load(load, &progress).await;
                        Err(error.into())
                    }
                }
            };
            let began = Instant::now();
            let begin = |state: &mut State| state.by_layer.extend(by_layer.then_some(waited));
            self.spawn(
                traceparent,
                work,
                begin,
                move |state, ended: Result<Vec<Failed>, String>| {
                    state.by_layer.retain(|(by_layer, _)| *by_layer != job);
                    // A chunk that may be missing is computed.
                    let (failed, error) = match ended {
                        Ok(failed) => {
                            // A draft's reason is of use where nothing else is missing.
                            let first = failed
                                .iter()
                                .find(|failed| !kinds.is_draft(failed.kind))
                                .or(failed.first());
                            let reason = first.map(|failed| failed.reason.clone());
                            let indices = failed.iter().map(|failed| (failed.kind, failed.index));
                            (indices.collect(), reason)
                        }
                        Err(error) => (all, Some(error)),
                    };
                    let (drafts, missing): (Vec<_>, Vec<_>) =
                        failed.into_iter().partition(|&(kind, _)| kinds.is_draft(kind));
                    state.loaded.push(Loaded {
                        job,
                        missing,
                        missing_drafts: drafts.len(),
                        bytes,
                        seconds: began.elapsed().as_secs_f64(),
                        error,
                    });
                },
            )
        })
    }

    fn wait_layer(&self, py: Python<'_>, kind: usize, plane: usize) {
        py.detach(|| {
            let waited = self.jobs.lock().by_layer.clone();
            for (_, progress) in waited {
                progress.wait(kind, plane);
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

    #[pyo3(signature = (job, kinds, stream=None, traceparent=None))]
    fn store(
        &self,
        py: Python<'_>,
        job: String,
        kinds: Vec<StoreKind>,
        stream: Option<u64>,
        traceparent: Option<String>,
    ) -> PyResult<()> {
        let mut computed = Vec::with_capacity(kinds.len());
        let mut chunk_bytes = HashMap::new();
        for (kind, hashes, parents, tables) in kinds {
            let of = self.kind(kind, tables.len())?;
            let chunks = of.computed(&split(&hashes)?, &split(&parents)?, &tables)?;
            let first = chunks.first().map(|chunk| chunk.spans.as_slice());
            chunk_bytes.insert(kind, of.bytes(first));
            computed.push(ComputedKind { kind, chunks });
        }
        let (rank, deadline) = (Arc::clone(&self.rank), self.store_deadline);
        let hold = Arc::<Hold>::default();
        py.detach(|| {
            let after = self.mark(stream)?;
            let held = (job.clone(), Arc::clone(&hold));
            let work = async move {
                let store = StoreJob {
                    kinds: &computed,
                    after,
                    deadline,
                };
                rank.store(store, &hold).await
            };
            let began = Instant::now();
            let begin = |state: &mut State| state.holds.push(held);
            self.spawn(traceparent, work, begin, move |state, ended| {
                // A chunk that can't be stored is stored when it is computed next.
                let (kinds, error) = match ended {
                    Ok(kinds) => {
                        let error = kinds.iter().find_map(|kind| kind.error.clone());
                        (kinds, error)
                    }
                    Err(error) => (Vec::new(), Some(error)),
                };
                let bytes = kinds.iter().map(|of| of.stored as u64 * chunk_bytes[&of.kind]);
                let there = kinds
                    .iter()
                    .flat_map(|of| of.there.iter().map(|&index| (of.kind, index)));
                state.stored.push(Stored {
                    job,
                    bytes: bytes.sum(),
                    there: there.collect(),
                    stored: kinds.iter().map(|of| of.stored).sum(),
                    refused: kinds.iter().map(|of| of.refused).sum(),
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

impl PyWorker {
    fn start(settings: Settings, spaces: Vec<Space>, copies: Option<Py<PyAny>>) -> PyResult<Self> {
        if settings.kinds.len() != spaces.len() {
            return Err(failed(format!(
                "each space needs its tensors: there are {} spaces, and {} kinds in the settings",
                spaces.len(),
                settings.kinds.len()
            )));
        }
        let copiers = Copiers::new(settings.device, copies)?;
        let patience = Duration::from_millis(settings.patience_ms);
        let client = Client::new(DaemonAddress::Unix(settings.socket))
            .trusting(settings.socket_owner)
            .with_patience(patience);
        let (mut kinds, mut pages) = (Vec::new(), Vec::new());
        for (space, of) in spaces.into_iter().zip(settings.kinds) {
            let cache = |(group, tensors): (usize, &Vec<Tensor>)| {
                let tokens = of.tokens.get(group).copied().flatten().unwrap_or_default();
                let is_here = !tensors.is_empty();
                let cache = || PagedCache::new(&space, tensors)?.with_tokens(tokens);
                is_here.then(cache).transpose()
            };
            let groups: Vec<Option<PagedCache>> = of
                .groups
                .iter()
                .enumerate()
                .map(cache)
                .collect::<Result<_, _>>()
                .map_err(failed)?;
            pages.push(KindPages {
                space: space.clone(),
                is_draft: of.is_draft,
                groups: groups.iter().flatten().cloned().collect(),
            });
            kinds.push(Kind { space, groups });
        }
        let make = move |cache: PagedCache| copiers.make(cache);
        let pause = Duration::from_millis(settings.breaker_pause_ms);
        let breaker = LookupBreaker::new(settings.breaker_timeouts, pause);
        let rank = Worker::new(&client, settings.attach, pages, make, breaker).map_err(failed)?;
        let rank = Arc::new(rank);
        let starting = Arc::clone(&rank);
        // Without a gateway every chunk is a miss until one is there.
        runtime()?.spawn(async move {
            let _ = starting.session().await;
        });
        Ok(Self {
            rank,
            kinds,
            jobs: Arc::default(),
            load_deadline_ms: settings.load_deadline_ms,
            store_deadline: Duration::from_millis(settings.store_deadline_ms),
        })
    }

    /// A kind, for a job with this many tables.
    fn kind(&self, kind: usize, tables: usize) -> PyResult<&Kind> {
        let of = self.kinds.get(kind);
        let of = of.ok_or_else(|| failed(format!("kind {kind} of {}", self.kinds.len())))?;
        match of.groups.len() == tables {
            true => Ok(of),
            false => Err(failed(format!(
                "kind {kind} has {} groups, and {tables} block tables are given",
                of.groups.len()
            ))),
        }
    }

    fn mark(&self, stream: Option<u64>) -> PyResult<Option<Mark>> {
        self.rank.mark(stream.map(EngineStream)).map_err(failed)
    }

    fn spawn<T: Send + 'static>(
        &self,
        traceparent: Option<String>,
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
        let task = runtime.spawn(async move { traced(traceparent.as_deref(), work).await });
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

impl Kind {
    /// The places of a load's chunks. `tables`: for each group the rows to be written, counted from the first chunk's
    /// first row, and the blocks from that row on.
    fn wanted(&self, hashes: &[ChunkHash], tables: &[((u64, u64), Vec<i64>)]) -> PyResult<Vec<WantedChunk>> {
        let rows = u64::from(self.space.chunk_rows());
        let blocks: Vec<Vec<u32>> = tables.iter().map(|(_, blocks)| numbers(blocks)).collect();
        let wanted = hashes.iter().enumerate().map(|(index, &hash)| {
            let start = index as u64 * rows;
            // The chunk's rows that are to be written.
            let within = |row: u64| u32::try_from(row.clamp(start, start + rows) - start).unwrap_or(u32::MAX);
            let tables = tables.iter().zip(&blocks);
            let spans = self
                .groups
                .iter()
                .zip(tables)
                .filter_map(|(cache, (table, blocks))| {
                    let mapping = SlotMapping::Blocks {
                        table: blocks,
                        first_token: start,
                    };
                    let cache = cache.as_ref()?;
                    Some(cache.spans(mapping, within(table.0.0)..within(table.0.1)))
                });
            let spans = spans.collect::<Result<_, _>>().map_err(failed)?;
            Ok(WantedChunk { hash, spans })
        });
        wanted.collect()
    }

    /// The places of a store's chunks. `tables`: for each group the blocks of chunk after chunk.
    fn computed(
        &self,
        hashes: &[ChunkHash],
        parents: &[ChunkHash],
        tables: &[Vec<i64>],
    ) -> PyResult<Vec<ComputedChunk>> {
        if parents.len() != hashes.len() {
            return Err(failed("a store needs a parent for each chunk"));
        }
        let rows = self.space.chunk_rows();
        let tables: Vec<Vec<u32>> = tables.iter().map(|blocks| numbers(blocks)).collect();
        let computed = hashes.iter().zip(parents).enumerate();
        let computed = computed.map(|(index, (&hash, &parent))| {
            let spans = self.groups.iter().zip(&tables).filter_map(|(cache, blocks)| {
                let cache = cache.as_ref()?;
                let of_chunk = cache.tokens().count(rows).div_ceil(cache.block_tokens()) as usize;
                let mapping = SlotMapping::Blocks {
                    table: blocks.get(index * of_chunk..).unwrap_or_default(),
                    first_token: 0,
                };
                Some(cache.spans(mapping, 0..rows))
            });
            let spans = spans.collect::<Result<_, _>>().map_err(failed)?;
            Ok(ComputedChunk { hash, parent, spans })
        });
        computed.collect()
    }

    /// Bytes of these chunks' rows; each chunk has spans in each group that is here.
    fn bytes<'a>(&self, chunks: impl IntoIterator<Item = &'a [Spans]>) -> u64 {
        let of_chunk = |spans: &[Spans]| {
            let groups = self.groups.iter().flatten().zip(spans);
            let bytes = groups.map(|(cache, spans)| u64::from(spans.tokens()) * cache.token_bytes());
            bytes.sum::<u64>()
        };
        chunks.into_iter().map(of_chunk).sum()
    }
}

/// Block numbers. Where no row is written there may be anything; a number that can't be becomes one that no cache
/// has.
fn numbers(blocks: &[i64]) -> Vec<u32> {
    let number = |&block: &i64| u32::try_from(block).unwrap_or(u32::MAX);
    blocks.iter().map(number).collect()
}

impl Jobs {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(&self, state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
    }
}
