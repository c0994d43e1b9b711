//! The whole path of a prompt: from S3 into slots, and from the slots into a GPU's pages.

use std::sync::Arc;

use serde::Serialize;
use tokio::time::Instant;

use super::bench::median;
use super::error::GpuError;
use crate::cache::gateway::{AfterMiss, FilledSlot, Gateway, LoadSpec, StoreOutcome};
use crate::config::Config;
use crate::config::units::GIB;
use crate::engine::copy::cuda::{DevicePages, Gpu};
use crate::engine::copy::known::{KnownLayout, Pages};
use crate::engine::copy::{CopyJob, CudaOptions, SlotMapping};
use crate::format::{ChunkHash, ChunkHasher, KeyPrefix, Space};
use crate::protocol::Order;
use crate::s3::object::{ErrorKind, ObjectStore};

/// A prompt to store, and to load into pages.
pub struct PathPlan {
    pub space: Space,
    pub chunks: usize,
    pub layout: KnownLayout,
    pub block_tokens: u32,
    pub element_bytes: u32,
    /// Rounds, of which the median counts.
    pub rounds: usize,
}

/// Speeds of the whole path. Medians.
#[derive(Debug, Clone, Serialize)]
pub struct PathReport {
    pub chunks: usize,
    pub bytes: u64,
    /// From S3 into verified slots.
    pub slots_gib_s: f64,
    /// From S3 through slots into the pages.
    pub pages_gib_s: f64,
    /// Time until the first chunk is in its pages.
    pub first_chunk_ms: f64,
}

/// Measures the whole path. At the end stores all pages back and compares them; removes the chunks from S3.
pub async fn path(
    gpu: &Arc<Gpu>,
    store: Arc<dyn ObjectStore>,
    config: &Config,
    plan: &PathPlan,
) -> Result<PathReport, GpuError> {
    let prompt = Prompt::new(store, config, plan).await?;
    let result = prompt.measure(gpu, config, plan).await;
    prompt.remove(config).await?;
    result
}

struct Prompt {
    gateway: Gateway,
    store: Arc<dyn ObjectStore>,
    space: Space,
    root: ChunkHash,
    chunks: Vec<ChunkHash>,
}

impl Prompt {
    async fn new(store: Arc<dyn ObjectStore>, config: &Config, plan: &PathPlan) -> Result<Self, GpuError> {
        let mut config = config.clone();
        // A file is for engines, and there are none.
        config.arena.path = None;
        let deadline = Instant::now() + config.s3.request_timeout;
        match store.check_bucket(deadline).await {
            Err(error) if error.kind == ErrorKind::NoBucket => store.create_bucket(deadline).await?,
            result => result?,
        }
        let gateway = Gateway::over(Arc::clone(&store), &config).await?;
        let hasher = ChunkHasher::new(&plan.space, None)?;
        // Under a salt of its own, so that no prompt finds it.
        let root = hasher.root(&fastrand::u64(..).to_le_bytes(), b"kvgate gpu bench")?;
        let tokens = vec![7; plan.chunks * plan.space.chunk_tokens() as usize];
        let prompt = Self {
            chunks: hasher.chain(&root, &tokens, &[])?,
            root,
            space: plan.space.clone(),
            gateway,
            store,
        };
        for nth in 0..prompt.chunks.len() {
            prompt.store(nth, Instant::now() + config.store.deadline).await?;
        }
        Ok(prompt)
    }

    async fn store(&self, nth: usize, deadline: Instant) -> Result<(), GpuError> {
        let object_bytes = self.space.layout().object_len();
        let mut slot = self
            .gateway
            .reserve(&self.space)
            .map_err(|_| GpuError::Room(object_bytes))?;
        fill(slot.payload_mut(), nth);
        let new = FilledSlot {
            hash: self.chunks[nth],
            parent: nth.checked_sub(1).map_or(self.root, |before| self.chunks[before]),
            slot,
        };
        match self.gateway.write_through(new, deadline).await {
            StoreOutcome::Stored | StoreOutcome::Present => Ok(()),
            other => Err(GpuError::Path(format!("chunk {nth} was not stored: {other:?}"))),
        }
    }

    async fn measure(
        &self,
        gpu: &Arc<Gpu>,
        config: &Config,
        plan: &PathPlan,
    ) -> Result<PathReport, GpuError> {
        let chunk_blocks = self.space.chunk_tokens().div_ceil(plan.block_tokens);
        let pages = Pages {
            blocks: chunk_blocks * plan.chunks as u32,
            block_tokens: plan.block_tokens,
            heads: None,
            element_bytes: plan.element_bytes,
        };
        let options = CudaOptions::from(&config.copy);
        let device = DevicePages::new(gpu, &self.space, &plan.layout, &pages, 0, options)?;
        let copier = device.copier();
        copier.pin(&copier.register(self.gateway.arena().clone()))?;
        let jobs = self.jobs(&device, &pages)?;
        let (mut to_slots, mut to_pages, mut first) = (Vec::new(), Vec::new(), Vec::new());
        // One more round to warm up.
        for _ in 0..=plan.rounds {
            to_slots.push(self.load(config, None).await?.0);
            let (seconds, first_chunk) = self.load(config, Some((&device, &jobs))).await?;
            to_pages.push(seconds);
            first.push(first_chunk);
        }
        self.compare(&device, &jobs)?;
        let bytes = (self.chunks.len() * self.space.layout().payload_len()) as u64;
        let speed = |seconds: &[f64]| bytes as f64 / median(seconds[1..].iter().copied()) / GIB as f64;
        Ok(PathReport {
            chunks: self.chunks.len(),
            bytes,
            slots_gib_s: speed(&to_slots),
            pages_gib_s: speed(&to_pages),
            first_chunk_ms: median(first[1..].iter().copied()) * 1e3,
        })
    }

    /// Seconds until all chunks are loaded, and until the first is. A chunk's copy begins when it has arrived.
    async fn load(
        &self,
        config: &Config,
        pages: Option<(&DevicePages, &[CopyJob])>,
    ) -> Result<(f64, f64), GpuError> {
        let started = Instant::now();
        let mut stream = self.gateway.load(LoadSpec {
            space: self.space.clone(),
            chunks: self.chunks.clone(),
            order: Order::Chunk,
            after_miss: AfterMiss::Stop,
            deadline: started + config.load.deadline,
        });
        let (mut pending, mut first) = (Vec::new(), None);
        while let Some((nth, outcome)) = stream.next().await {
            let chunk =
                outcome.map_err(|miss| GpuError::Path(format!("chunk {nth} was not loaded: {miss}")))?;
            if let Some((device, jobs)) = pages {
                pending.push(device.copier().load(chunk.payload(), &jobs[nth], None)?);
                if first.is_none() && pending[0].is_done()? {
                    first = Some(started.elapsed());
                }
            }
        }
        for copy in pending {
            copy.wait()?;
            first.get_or_insert_with(|| started.elapsed());
        }
        Ok((
            started.elapsed().as_secs_f64(),
            first.unwrap_or_default().as_secs_f64(),
        ))
    }

    fn jobs(&self, device: &DevicePages, pages: &Pages) -> Result<Vec<CopyJob>, GpuError> {
        let mut table: Vec<u32> = (0..pages.blocks).collect();
        fastrand::Rng::with_seed(1).shuffle(&mut table);
        let chunk_tokens = self.space.chunk_tokens();
        let job = |nth: usize| {
            let mapping = SlotMapping::Blocks {
                table: &table,
                first_token: nth as u64 * u64::from(chunk_tokens),
            };
            Ok(CopyJob {
                planes: 0..self.space.planes().len(),
                spans: device.copier().cache().spans(mapping, 0..chunk_tokens)?,
                at: self.space.layout().header_len(),
            })
        };
        (0..self.chunks.len()).map(job).collect()
    }

    /// Compares every byte of the pages, by a store.
    fn compare(&self, device: &DevicePages, jobs: &[CopyJob]) -> Result<(), GpuError> {
        let payload_len = self.space.layout().payload_len();
        let mut expected = vec![0; payload_len];
        for (nth, job) in jobs.iter().enumerate() {
            let stored = device.copier().store(vec![0; payload_len], job, None)?.wait()?;
            fill(&mut expected, nth);
            if stored != expected {
                return Err(GpuError::Path(format!(
                    "chunk {nth} is not in its pages what was stored. Don't use this GPU with kvgate, and report it"
                )));
            }
        }
        Ok(())
    }

    async fn remove(&self, config: &Config) -> Result<(), GpuError> {
        let prefix = KeyPrefix::new(&config.s3.prefix);
        let key = |chunk| prefix.chunk(self.space.key(), chunk);
        let mut keys: Vec<String> = self.chunks.iter().map(key).collect();
        keys.push(prefix.space_json(self.space.key()));
        let deadline = Instant::now() + config.store.deadline;
        Ok(self.store.delete(&keys, deadline).await?)
    }
}

fn fill(payload: &mut [u8], nth: usize) {
    fastrand::Rng::with_seed(nth as u64).fill(payload);
}
