//! Objects that are a prompt's chunks: a gateway stores them, and they are read as an engine reads them: looked up
//! together, then loaded in order. The chunks are synthetic and under a salt of their own, so no real prompt finds
//! them.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::future::try_join_all;
use tokio::time::{Duration, Instant};

use super::content::Content;
use super::error::BenchError;
use super::histogram::Histogram;
use super::lookup::WHOLE;
use super::phase_run::{Op, PhaseFailure, PhaseLimits, PhaseWorker};
use super::raw::RawTarget;
use super::report::{Latency, PhaseReport, PromptReport, gib_per_s};
use super::session::{Bench, Clock, ends_phase};
use super::settings::{BenchPhase, PromptSettings, to_usize};
use crate::cache::gateway::{
    AfterMiss, FilledSlot, Gateway, GatewayOptions, LoadSpec, StoreOutcome, StoreSlot,
};
use crate::config::Config;
use crate::format::{ChunkHash, ChunkHasher, KeyPrefix, Keyring, Space};
use crate::protocol::Order;
use crate::protocol::ProbeMode;
use crate::protocol::Strategy;
use crate::s3::object::{Capabilities, ErrorKind};

const VOCABULARY: u32 = 100_003;

/// A synthetic prompt, the same for the same name.
pub struct BenchPrompt {
    pub space: Space,
    pub tokens: u32,
    /// The order of its load.
    pub order: Order,
    /// For protected spaces.
    pub keyring: Keyring,
    pub(super) root: ChunkHash,
    pub(super) chunks: Vec<ChunkHash>,
    /// Its space.json was missing before, so this run removes it.
    pub(super) declares: bool,
}

impl BenchPrompt {
    /// Tokens beyond the last full chunk are ignored.
    pub fn new(space: Space, name: &str, tokens: u32, order: Order) -> Result<Self, BenchError> {
        let chunk_tokens = space.chunk_tokens();
        if tokens < chunk_tokens {
            return Err(BenchError::Tokens { tokens, chunk_tokens });
        }
        let hasher = ChunkHasher::new(&space, None)?;
        let root = hasher.root(format!("kvgate {name}").as_bytes(), b"")?;
        let words: Vec<u32> = (0..tokens).map(|at| at.wrapping_mul(7919) % VOCABULARY).collect();
        Ok(Self {
            chunks: hasher.chain(&root, &words, &[])?,
            root,
            tokens,
            order,
            keyring: Keyring::default(),
            space,
            declares: false,
        })
    }

    /// Number of chunks.
    pub fn len(&self) -> u64 {
        self.chunks.len() as u64
    }

    /// Always false: a prompt has at least one chunk.
    pub fn is_empty(&self) -> bool {
        self.chunks.is_empty()
    }

    /// Bytes of a chunk's object.
    pub fn object_bytes(&self) -> u64 {
        self.space.layout().object_len() as u64
    }

    /// Bytes of the largest GET that loads it: parts end where planes do, or layers.
    pub fn part_bytes(&self, config: &Config) -> u64 {
        let layout = self.space.layout();
        let sections = match self.order {
            Order::Chunk => {
                let load_bytes = layout.object_len().saturating_mul(self.chunks.len());
                layout.sections(GatewayOptions::from(config).part_bytes_of(load_bytes))
            }
            Order::Layer => layout.layer_groups(to_usize(config.load.layer_part_size.bytes())),
        };
        let bytes = sections.iter().map(|section| section.bytes.len() as u64);
        bytes.max().unwrap_or(self.object_bytes())
    }

    pub fn settings(&self) -> PromptSettings {
        PromptSettings {
            model: self.space.model().to_owned(),
            space: self.space.id().to_string(),
            tokens: self.tokens,
            order: self.order,
            chunk_tokens: self.space.chunk_tokens(),
        }
    }

    pub(super) fn keys(&self, prefix: &KeyPrefix) -> Vec<String> {
        let key = |chunk| prefix.chunk(self.space.key(), chunk);
        self.chunks.iter().map(key).collect()
    }
}

/// Stores chunks.
struct Storer {
    gateway: Gateway,
    target: Arc<RawTarget>,
    space: Space,
    root: ChunkHash,
    chunks: Arc<[ChunkHash]>,
    /// Number of chunks that were there already.
    present: Arc<AtomicU64>,
}

impl Storer {
    /// A free slot. Reserving never waits, and a slot whose request is over may stay taken for a moment.
    async fn slot(&self) -> StoreSlot {
        loop {
            if let Ok(slot) = self.gateway.reserve(&self.space) {
                return slot;
            }
            let ticket = self.gateway.arena().ticket().await;
            drop(ticket.reserve(self.space.layout().object_len()).await);
        }
    }
}

impl PhaseWorker for Storer {
    async fn turn(&mut self, turn: u64) -> Result<Option<Op>, PhaseFailure> {
        let index = to_usize(turn);
        let mut slot = self.slot().await;
        Content::stamp(turn, slot.payload_mut());
        let (hash, parent) = (
            self.chunks[index],
            index
                .checked_sub(1)
                .map_or(self.root, |before| self.chunks[before]),
        );
        let began = Instant::now();
        let deadline = began + self.target.write_limit;
        let chunk = FilledSlot { hash, parent, slot };
        let bytes = match self.gateway.write_through(chunk, deadline).await {
            StoreOutcome::Stored => self.target.settings.object_bytes,
            // Left by a run that kept its chunks. Some servers read the body before they answer so.
            StoreOutcome::Present | StoreOutcome::Pending => {
                self.present.fetch_add(1, Ordering::Relaxed);
                0
            }
            StoreOutcome::Failed(error) => {
                return Err(match Arc::try_unwrap(error) {
                    Ok(error) => error.into(),
                    Err(shared) => PhaseFailure::Wrong(shared.to_string()),
                });
            }
        };
        Ok(Some(Op {
            bytes,
            latency: began.elapsed(),
        }))
    }
}

/// Times of whole prompts.
#[derive(Default)]
struct Times {
    lookup: Histogram,
    first_chunk: Histogram,
    first_layer: Histogram,
    last_chunk: Histogram,
    /// Times to the last chunks, summed over all prompts.
    sum: Duration,
}

impl Bench {
    /// Stores every chunk once: stored chunks are not stored again.
    pub(super) async fn store_prompt(&mut self) -> Result<PhaseReport, BenchError> {
        let Some(prompt) = &mut self.prompt else {
            return Err(BenchError::Settings("no prompt was given".into()));
        };
        let space_json = KeyPrefix::new(&self.target.settings.prefix).space_json(prompt.space.key());
        let soon = Instant::now() + self.target.read_limit;
        let head = self.target.store.head(&space_json, soon);
        prompt.declares = match Self::unless_interrupted(&mut self.interrupts, head).await? {
            Err(error) if error.kind == ErrorKind::NotFound => true,
            result => result.map(|_| false)?,
        };
        // A conditional PUT is one request; without it a HEAD goes first.
        let probe_key =
            KeyPrefix::new(&self.target.settings.prefix).own(&format!("probe-{:016x}", fastrand::u64(..)));
        let store = &*self.target.store;
        let probe = Capabilities::probe(store, &probe_key, ProbeMode::Head, soon);
        let capabilities = Self::unless_interrupted(&mut self.interrupts, probe).await??;
        let (space, root, chunks) = (prompt.space.clone(), prompt.root, prompt.chunks.clone());
        let total = Some(chunks.len() as u64);
        let object_bytes = self.settings().object_bytes;
        let lanes = self.lanes(total);
        let arena = self.arena(lanes, object_bytes, "--concurrency or --chunk-tokens")?;
        let gateway = self.gateway(Arc::clone(&self.target.store), arena, capabilities);
        // All at once, so that each slot of the arena gets its content; only the stamps change later.
        let slots: Vec<StoreSlot> = std::iter::from_fn(|| gateway.reserve(&space).ok()).collect();
        for mut slot in slots {
            self.target.content.fill(slot.payload_mut());
        }
        let chunks: Arc<[ChunkHash]> = chunks.into();
        let present = Arc::new(AtomicU64::new(0));
        let worker = |_| Storer {
            gateway: gateway.clone(),
            target: Arc::clone(&self.target),
            space: space.clone(),
            root,
            chunks: Arc::clone(&chunks),
            present: Arc::clone(&present),
        };
        let mut workers = (0..lanes).map(worker).collect();
        if self.settings().warm_up {
            self.connect(lanes).await?;
        }
        let limits = self.limits(total, move |_| object_bytes);
        let (course, mut report) = self.course(BenchPhase::Write, limits, &mut workers).await?;
        report.present = present.load(Ordering::Relaxed);
        self.objects = course.issued();
        Ok(report)
    }

    /// Warms up connections and signatures only, since stored chunks are not stored again.
    async fn connect(&mut self, connections: usize) -> Result<(), BenchError> {
        let soon = Instant::now() + self.target.read_limit;
        let asks = (0..connections).map(|_| self.target.store.check_bucket(soon));
        let all = try_join_all(asks);
        Self::unless_interrupted(&mut self.interrupts, all).await??;
        Ok(())
    }

    /// Looks up and loads the whole prompt, again and again.
    pub(super) async fn load_prompts(&mut self) -> Result<PhaseReport, BenchError> {
        if self.settings().warm_up {
            let report = self
                .load_prompts_within(PhaseLimits::turns(self.objects.min(1)))
                .await?;
            if let Some(report) = ends_phase(report) {
                return Ok(report);
            }
        }
        let bytes = self.objects * self.settings().object_bytes;
        let limits = self.limits(self.rounds(self.objects), move |_| bytes);
        self.load_prompts_within(limits).await
    }

    async fn load_prompts_within(&mut self, limits: PhaseLimits) -> Result<PhaseReport, BenchError> {
        let Some(prompt) = &self.prompt else {
            return Err(BenchError::Settings("no prompt was given".into()));
        };
        let count = to_usize(self.objects);
        let (space, chunks) = (prompt.space.clone(), prompt.chunks[..count].to_vec());
        let limits = PhaseLimits {
            more_ops_a_turn: self.objects.saturating_sub(1),
            ..limits
        };
        let store = Arc::clone(&self.target.store);
        let (slots, lower) = self.load_slots();
        let arena = self.arena(to_usize(slots), self.settings().object_bytes, lower)?;
        let gateway = self.gateway(store, arena, self.reads_only());
        let (strategy, order) = (self.config.lookup.strategy, prompt.order);
        let mut times = Times::default();
        let course = self.start(BenchPhase::Read, limits, 1);
        let clock = Clock::start(&*self.target.store);
        let all = async {
            while course.turn().await.is_some() {
                gateway.forget_existence();
                let tell = |result| course.count(0, result);
                load(&gateway, &space, &chunks, (strategy, order), &mut times, tell).await;
            }
        };
        let done = course.interruptible(all, &mut self.interrupts).await;
        let mut report = self.finish(&course, &clock, !done);
        let prompts = times.last_chunk.count();
        let loaded = prompts * self.objects * self.settings().object_bytes;
        report.prompt = Some(PromptReport {
            prompts,
            gib_per_s: gib_per_s(loaded, times.sum),
            chunks: chunks.len() as u64,
            lookup_us: Latency::of(&times.lookup),
            first_chunk_us: Latency::of(&times.first_chunk),
            first_layer_us: Latency::of(&times.first_layer),
            last_chunk_us: Latency::of(&times.last_chunk),
        });
        Ok(report)
    }

    /// Slots for the bytes in flight, one awaited chunk and one just handed out. In layer order: slots for the
    /// whole prompt in one window, which is half of an arena.
    pub(super) fn load_slots(&self) -> (u64, &'static str) {
        let settings = self.settings();
        let in_flight = settings.part_bytes.saturating_mul(settings.concurrency as u64);
        match self.prompt.as_ref().map(|prompt| prompt.order) {
            Some(Order::Layer) => (self.objects.saturating_mul(2), "--tokens"),
            _ => (
                (in_flight.div_ceil(settings.object_bytes) + 2).min(self.objects.max(1)),
                "--concurrency or --part-size",
            ),
        }
    }

    /// Removes the space.json that a store of this run wrote.
    pub(super) async fn undeclare(&mut self) -> Result<(), BenchError> {
        if let Some(prompt) = self.prompt.as_mut().filter(|prompt| prompt.declares) {
            let key = KeyPrefix::new(&self.target.settings.prefix).space_json(prompt.space.key());
            let (deadline, key) = (Instant::now() + self.target.write_limit, [key]);
            let delete = self.target.store.delete(&key, deadline);
            Self::unless_interrupted(&mut self.interrupts, delete).await??;
            prompt.declares = false;
        }
        Ok(())
    }
}

/// Looks up and loads one prompt. The first layer is complete with every chunk's first planes: in chunk order, with
/// the last chunk.
async fn load(
    gateway: &Gateway,
    space: &Space,
    chunks: &[ChunkHash],
    (strategy, order): (Strategy, Order),
    times: &mut Times,
    tell: impl Fn(Result<Option<Op>, PhaseFailure>),
) {
    let began = Instant::now();
    let found = gateway.lookup(space, chunks, strategy, began + WHOLE).await;
    times.lookup.record(began.elapsed());
    if found.prefix < chunks.len() {
        let why = match found.error {
            Some(error) => error.to_string(),
            None => "write them first: kvgate bench write, with the same space, --tokens and --prefix".into(),
        };
        let (there, all) = (found.prefix, chunks.len());
        tell(Err(PhaseFailure::Wrong(format!(
            "only the first {there} of the prompt's {all} chunks were found; {why}"
        ))));
        return;
    }
    let loading = Instant::now();
    let mut stream = gateway.load(LoadSpec {
        space: space.clone(),
        chunks: chunks.to_vec(),
        order,
        after_miss: AfterMiss::Stop,
        deadline: loading + WHOLE,
    });
    let layout = space.layout();
    let mut first_layers = 0;
    while let Some((index, outcome)) = stream.next().await {
        let chunk = match outcome {
            Ok(chunk) => chunk,
            Err(miss) => {
                tell(Err(PhaseFailure::Wrong(format!(
                    "chunk {index} of the prompt: {miss}"
                ))));
                return;
            }
        };
        let planes = chunk.planes();
        if planes.start == 0 {
            first_layers += 1;
            if first_layers == chunks.len() {
                times.first_layer.record(began.elapsed());
            }
        }
        if planes.end < layout.planes() {
            continue;
        }
        if index == 0 {
            times.first_chunk.record(began.elapsed());
        }
        tell(Ok(Some(Op {
            bytes: layout.object_len() as u64,
            latency: loading.elapsed(),
        })));
    }
    let took = began.elapsed();
    times.last_chunk.record(took);
    times.sum += took;
}
