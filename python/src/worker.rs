use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use kvgate::api::wire::AttachRequest;
use kvgate::chunk::ChunkHash;
use kvgate::client::{Client, Target};
use kvgate::connector::{NewChunk, Wanted, Worker as Rank};
use kvgate::copy::cuda::Gpu;
use kvgate::copy::{EngineStream, PagedCache, SlotMapping, Tensor};
use pyo3::prelude::*;
use serde::Deserialize;

use crate::copier::{copier, copy_options};
use crate::error::failed;
use crate::lookups::split;
use crate::runtime::runtime;
use crate::space::Space;

/// What a rank is started with.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    socket: PathBuf,
    attach: AttachRequest,
    tensors: Vec<Tensor>,
    /// CUDA's number of the GPU that the tensors are on; None: host memory.
    device: Option<usize>,
}

/// A job, and of a load the chunks that are not there.
type Ended = (String, Option<Vec<usize>>);

#[derive(Default)]
struct Jobs {
    state: Mutex<(usize, Vec<Ended>)>,
    changed: Condvar,
}

#[pyclass(frozen, module = "kvgate._native")]
pub struct Worker {
    rank: Arc<Rank>,
    cache: PagedCache,
    jobs: Arc<Jobs>,
}

#[pymethods]
impl Worker {
    #[new]
    fn new(py: Python<'_>, settings: &str, space: &Space) -> PyResult<Self> {
        let settings: Settings = serde_json::from_str(settings).map_err(failed)?;
        py.detach(|| Self::start(settings, space.0.clone()))
    }

    #[pyo3(signature = (job, hashes, first_token, tokens, block_table, deadline_ms))]
    fn load(
        &self,
        py: Python<'_>,
        job: String,
        hashes: &[u8],
        first_token: u64,
        tokens: (u64, u64),
        block_table: Vec<u32>,
        deadline_ms: u64,
    ) -> PyResult<()> {
        let hashes = split(hashes)?;
        let rank = Arc::clone(&self.rank);
        let wanted = self.wanted(&hashes, first_token, tokens, &block_table)?;
        py.detach(|| {
            self.spawn(job.clone(), async move {
                let loaded = rank.load(&job, &wanted, Some(deadline_ms), None).await;
                Some(match loaded {
                    Ok(failed) => failed.into_iter().map(|failed| failed.index).collect(),
                    // The engine computes it.
                    Err(_) => (0..wanted.len()).collect(),
                })
            })
        })
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
            chunks.push(NewChunk { hash, parent, spans });
        }
        let rank = Arc::clone(&self.rank);
        py.detach(|| {
            self.spawn(job, async move {
                // What can't be stored is stored the next time that somebody computes it.
                let _ = rank.store(&chunks, stream.map(EngineStream)).await;
                None
            })
        })
    }

    fn finished(&self) -> Vec<Ended> {
        std::mem::take(&mut self.lock().1)
    }

    fn wait(&self, py: Python<'_>) {
        py.detach(|| {
            let mut state = self.lock();
            while state.0 > 0 {
                state = self
                    .jobs
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner);
            }
        });
    }

    /// Waits for what is under way: the engine's memory may go after this.
    fn close(&self, py: Python<'_>) {
        self.wait(py);
    }
}

impl Worker {
    fn start(settings: Settings, space: kvgate::chunk::Space) -> PyResult<Self> {
        let options = copy_options()?;
        let cache = PagedCache::new(&space, &settings.tensors).map_err(failed)?;
        let gpu = settings.device.map(Gpu::open).transpose().map_err(failed)?;
        let client = Client::new(Target::Unix(settings.socket));
        let load = copier(gpu.as_ref(), cache.clone(), &options).map_err(failed)?;
        let (narrow_cache, narrow_gpu) = (cache.clone(), gpu.clone());
        let narrow = move |own: &[kvgate::node::Share]| {
            let own = own
                .iter()
                .map(|share| (share.planes.0..share.planes.1, share.heads.0..share.heads.1));
            copier(narrow_gpu.as_ref(), narrow_cache.only(own), &options)
        };
        let rank = Arc::new(Rank::new(&client, settings.attach, space, load, narrow));
        let starting = Arc::clone(&rank);
        // Without a gateway everything is a miss until one is there.
        runtime()?.spawn(async move {
            let _ = starting.start().await;
        });
        Ok(Self {
            rank,
            cache,
            jobs: Arc::default(),
        })
    }

    fn wanted(
        &self,
        hashes: &[ChunkHash],
        first_token: u64,
        tokens: (u64, u64),
        block_table: &[u32],
    ) -> PyResult<Vec<Wanted>> {
        let chunk_tokens = u64::from(self.cache.space().chunk_tokens());
        let wanted = hashes.iter().enumerate().map(|(index, &hash)| {
            let start = first_token + index as u64 * chunk_tokens;
            // Those of the chunk that are to be written.
            let within = |token: u64| {
                u32::try_from(token.clamp(start, start + chunk_tokens) - start).unwrap_or(u32::MAX)
            };
            let mapping = SlotMapping::Blocks {
                table: block_table,
                first_token: start,
            };
            let spans = self.cache.spans(mapping, within(tokens.0)..within(tokens.1));
            Ok(Wanted {
                hash,
                spans: spans.map_err(failed)?,
            })
        });
        wanted.collect()
    }

    fn spawn(
        &self,
        job: String,
        work: impl Future<Output = Option<Vec<usize>>> + Send + 'static,
    ) -> PyResult<()> {
        let jobs = Arc::clone(&self.jobs);
        let runtime = runtime()?;
        self.lock().0 += 1;
        let task = runtime.spawn(work);
        runtime.spawn(async move {
            // One that panicked has loaded nothing that could be relied on.
            let ended = task.await.unwrap_or_default();
            let mut state = jobs.state.lock().unwrap_or_else(PoisonError::into_inner);
            state.0 -= 1;
            state.1.push((job, ended));
            jobs.changed.notify_all();
        });
        Ok(())
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, (usize, Vec<Ended>)> {
        self.jobs.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
