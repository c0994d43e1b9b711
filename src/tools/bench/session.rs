//! One bench, from its first phase to the removal of what it wrote.
//!
//! A phase is measured from outside: a `Clock` takes time, CPU, requests and traffic at its start and at its end.
//! An interruption ends the phase under way, which keeps what it has measured so far. With `--warm-up` each phase
//! but delete is done once before its clock starts.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::content::Content;
use super::error::BenchError;
use super::phase_run::{Interrupts, Live, PhaseLimits, PhaseRun, PhaseWorker, interrupted};
use super::prompt::BenchPrompt;
use super::raw::{Deleter, HeaderSource, RawReader, RawTarget, Writer};
use super::report::{Cost, PhaseReport};
use super::settings::{BenchPhase, BenchSettings, to_usize};
use super::split;
use super::usage::{Usage, memory_available};
use crate::arena::{Arena, ArenaOptions, SLOT_ALIGN};
use crate::cache::gateway::{Gateway, GatewayOptions};
use crate::config::Config;
use crate::format::{KeyPrefix, Keyring};
use crate::protocol::ProbeMode;
use crate::s3::fanout::EndpointState;
use crate::s3::net::Traffic;
use crate::s3::object::{Capabilities, ObjectStore, RequestCounts};

/// One bench, phase by phase.
pub struct Bench {
    pub(super) config: Config,
    pub(super) target: Arc<RawTarget>,
    /// The prompt whose chunks are the objects, if any.
    pub(super) prompt: Option<BenchPrompt>,
    /// Number of existing objects: after a write that was cut short, fewer than asked for.
    pub(super) objects: u64,
    /// The digests that parts must have, made when a phase first needs them.
    crcs: Option<Arc<[u64]>>,
    /// Slots for parts that are read, made when a phase first needs them.
    parts: Option<Arena>,
    pub(super) interrupts: Interrupts,
    under_way: UnderWay,
}

/// The progress of a bench, for display.
#[derive(Clone, Default)]
pub struct UnderWay(Arc<Mutex<Option<Arc<PhaseRun>>>>);

impl UnderWay {
    /// The phase under way, if one is.
    pub fn live(&self) -> Option<Live> {
        self.lock().as_deref().map(PhaseRun::live)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Arc<PhaseRun>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Measures usage, requests and traffic since its start, and each address's share.
pub(super) struct Clock {
    usage: Usage,
    requests: RequestCounts,
    traffic: Traffic,
    endpoints: Vec<EndpointState>,
}

impl Clock {
    pub fn start(store: &dyn ObjectStore) -> Self {
        Self {
            usage: Usage::now(),
            requests: store.requests(),
            traffic: store.traffic(),
            endpoints: store.endpoints(),
        }
    }

    /// The cost after this many seconds.
    fn read(&self, store: &dyn ObjectStore, seconds: f64) -> Cost {
        Cost {
            usage: Usage::now().since(self.usage),
            requests: store.requests().since(&self.requests),
            traffic: store.traffic().since(&self.traffic),
            endpoints: split::between(&self.endpoints, store.endpoints(), seconds),
        }
    }
}

impl Bench {
    /// A bench; sends nothing yet. Each change of `interrupts` ends the phase under way.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        config: Config,
        settings: BenchSettings,
        prompt: Option<BenchPrompt>,
        interrupts: Interrupts,
    ) -> Result<Self, BenchError> {
        settings.check()?;
        let prefix = KeyPrefix::new(&config.s3.prefix);
        let keys = match &prompt {
            Some(prompt) => prompt.keys(&prefix),
            None => (0..settings.objects)
                .map(|object| format!("{}{}-o{object:05}", prefix.as_str(), settings.name))
                .collect(),
        };
        Ok(Self {
            objects: settings.objects,
            prompt,
            crcs: None,
            parts: None,
            target: Arc::new(RawTarget {
                store,
                keys,
                content: Content::new(),
                read_limit: config.load.deadline,
                write_limit: config.store.deadline,
                settings,
            }),
            config,
            interrupts,
            under_way: UnderWay::default(),
        })
    }

    pub fn settings(&self) -> &BenchSettings {
        &self.target.settings
    }

    /// Ignores the interruptions so far.
    pub fn forget_interrupts(&mut self) {
        self.interrupts.mark_unchanged();
    }

    pub fn under_way(&self) -> UnderWay {
        self.under_way.clone()
    }

    /// Fails if memory is too small for one of the phases: before a prompt is written, not after.
    pub fn check(&self, phases: &[BenchPhase]) -> Result<(), BenchError> {
        if self.prompt.is_some() && phases.contains(&BenchPhase::Read) {
            let (slots, lower) = self.load_slots();
            slots_bytes(slots, self.settings().object_bytes, lower)?;
        }
        Ok(())
    }

    /// Runs one phase. Fails if it can't begin; errors of its requests are in the report.
    pub async fn run(&mut self, phase: BenchPhase) -> Result<PhaseReport, BenchError> {
        let result = self.run_phase(phase).await;
        if matches!((phase, &result), (BenchPhase::Write, Err(_))) {
            // The phase did not begin.
            self.objects = 0;
        }
        result
    }

    async fn run_phase(&mut self, phase: BenchPhase) -> Result<PhaseReport, BenchError> {
        match phase {
            BenchPhase::Write if self.prompt.is_some() => self.store_prompt().await,
            BenchPhase::Read if self.prompt.is_some() => self.load_prompts().await,
            BenchPhase::Write => self.write().await,
            BenchPhase::Read => self.read().await,
            BenchPhase::Head => self.head().await,
            BenchPhase::Lookup => self.lookup().await,
            BenchPhase::Delete => self.delete().await,
        }
    }

    async fn write(&mut self) -> Result<PhaseReport, BenchError> {
        let settings = &self.target.settings;
        let (objects, object_bytes) = (settings.objects, settings.object_bytes);
        let total = settings.rounds.map(|rounds| objects.saturating_mul(rounds));
        let lanes = self.lanes(total);
        let arena = self.arena(lanes, object_bytes, "--concurrency or --object-size")?;
        Writer::fill(&self.target, &arena);
        let mut workers: Vec<_> = (0..lanes).map(|_| Writer::new(&self.target, &arena)).collect();
        let bytes = move |_| object_bytes;
        let limits = self.limits(Some(objects), bytes);
        if let Some(report) = self.warm_up(BenchPhase::Write, limits, &mut workers).await? {
            return Ok(report);
        }
        let limits = self.limits(total, bytes);
        let (course, report) = self.course(BenchPhase::Write, limits, &mut workers).await?;
        // The objects of the warm-up's write are there, whether the phase wrote them again or not.
        if !self.settings().warm_up {
            self.objects = objects.min(course.issued());
        }
        Ok(report)
    }

    async fn read(&mut self) -> Result<PhaseReport, BenchError> {
        let settings = &self.target.settings;
        let each = self.objects * settings.parts();
        let total = self.rounds(each).map(|rounds| each.saturating_mul(rounds));
        let lanes = self.lanes(total);
        let mut readers = Vec::with_capacity(lanes);
        for _ in 0..lanes {
            readers.push(self.reader().await?);
        }
        let target = Arc::clone(&self.target);
        let parts = target.settings.parts();
        let bytes = move |turn| target.part_len(turn % parts);
        let limits = self.limits(Some(each), bytes.clone());
        if let Some(report) = self.warm_up(BenchPhase::Read, limits, &mut readers).await? {
            return Ok(report);
        }
        let limits = self.limits(total, bytes);
        Ok(self.course(BenchPhase::Read, limits, &mut readers).await?.1)
    }

    async fn head(&mut self) -> Result<PhaseReport, BenchError> {
        let objects = self.objects;
        let total = self.rounds(objects).map(|rounds| objects.saturating_mul(rounds));
        let worker = |_| HeaderSource {
            target: Arc::clone(&self.target),
            objects,
        };
        let mut workers: Vec<_> = (0..self.lanes(total)).map(worker).collect();
        let limits = self.limits(Some(objects), |_| 0);
        if let Some(report) = self.warm_up(BenchPhase::Head, limits, &mut workers).await? {
            return Ok(report);
        }
        let limits = self.limits(total, |_| 0);
        Ok(self.course(BenchPhase::Head, limits, &mut workers).await?.1)
    }

    /// Deletes all objects once, without regard to rounds and time limit: nothing is left behind.
    async fn delete(&mut self) -> Result<PhaseReport, BenchError> {
        let total = Some(self.objects);
        let worker = |_| Deleter {
            target: Arc::clone(&self.target),
        };
        let mut workers = (0..self.lanes(total)).map(worker).collect();
        let limits = PhaseLimits {
            time: None,
            ..self.limits(total, |_| 0)
        };
        let report = self.course(BenchPhase::Delete, limits, &mut workers).await?.1;
        self.undeclare().await?;
        Ok(report)
    }

    /// A new gateway, with as many requests in flight as the other phases.
    pub(super) fn gateway(
        &self,
        store: Arc<dyn ObjectStore>,
        arena: Arena,
        capabilities: Capabilities,
    ) -> Gateway {
        let settings = &self.target.settings;
        let object_bytes = to_usize(settings.object_bytes).next_multiple_of(SLOT_ALIGN);
        let options = GatewayOptions {
            get_bytes_max: to_usize(settings.part_bytes).saturating_mul(settings.concurrency),
            // Of encrypted spaces each has a buffer.
            put_bytes_max: object_bytes.saturating_mul(settings.concurrency),
            lookup_concurrency: settings.concurrency,
            lookup_deadline: self.target.read_limit,
            keyring: self
                .prompt
                .as_ref()
                .map_or_else(Keyring::default, |prompt| prompt.keyring.clone()),
            ..GatewayOptions::from(&self.config)
        };
        Gateway::new(store, arena, capabilities, options)
    }

    /// Capabilities for gateways that only read: probing for more would write to the bucket.
    pub(super) fn reads_only(&self) -> Capabilities {
        Capabilities {
            attributes: self.config.s3.probe == ProbeMode::Attributes,
            ..Capabilities::default()
        }
    }

    /// How often a phase goes over this many objects. Without objects there is no round, even with a time limit.
    pub(super) fn rounds(&self, objects: u64) -> Option<u64> {
        match objects {
            0 => Some(0),
            _ => self.settings().rounds,
        }
    }

    /// Tasks for a phase with this many turns.
    pub(super) fn lanes(&self, total: Option<u64>) -> usize {
        let concurrency = self.target.settings.concurrency;
        total
            .and_then(|total| usize::try_from(total).ok())
            .map_or(concurrency, |total| total.min(concurrency))
    }

    /// Limits of a phase: the time limit, and the rate limit for turns of this many bytes.
    pub(super) fn limits(
        &self,
        total: Option<u64>,
        bytes: impl Fn(u64) -> u64 + Send + Sync + 'static,
    ) -> PhaseLimits {
        let settings = &self.target.settings;
        let (by_bytes, by_requests) = (settings.bytes_per_second, settings.requests_per_second);
        let cost = move |turn| {
            let of = |amount: u64, rate: Option<u64>| {
                rate.map_or(Duration::ZERO, |rate| {
                    Duration::from_secs_f64(amount as f64 / rate.max(1) as f64)
                })
            };
            of(bytes(turn), by_bytes).max(of(1, by_requests))
        };
        let paced = by_bytes.is_some() || by_requests.is_some();
        PhaseLimits {
            total,
            time: settings.time_limit,
            cost: paced.then(|| Box::new(cost) as _),
            more_ops_a_turn: 0,
        }
    }

    pub(super) async fn course<W: PhaseWorker>(
        &mut self,
        phase: BenchPhase,
        limits: PhaseLimits,
        workers: &mut Vec<W>,
    ) -> Result<(Arc<PhaseRun>, PhaseReport), BenchError> {
        let course = self.start(phase, limits, workers.len());
        let clock = Clock::start(&*self.target.store);
        let interrupted = course.run(workers, &mut self.interrupts).await;
        let report = self.finish(&course, &clock, interrupted);
        Ok((course, report))
    }

    /// Makes unmeasured turns, if configured, however long they take. Returns the report if the phase ends with
    /// them.
    async fn warm_up<W: PhaseWorker>(
        &mut self,
        phase: BenchPhase,
        limits: PhaseLimits,
        workers: &mut Vec<W>,
    ) -> Result<Option<PhaseReport>, BenchError> {
        if !self.settings().warm_up {
            return Ok(None);
        }
        let limits = PhaseLimits { time: None, ..limits };
        let report = self.course(phase, limits, workers).await?.1;
        Ok(ends_phase(report))
    }

    /// Starts a run, and its clock.
    pub(super) fn start(&self, phase: BenchPhase, limits: PhaseLimits, lanes: usize) -> Arc<PhaseRun> {
        let course = Arc::new(PhaseRun::start(phase, limits, lanes));
        *self.under_way.lock() = Some(Arc::clone(&course));
        course
    }

    pub(super) fn finish(&self, course: &PhaseRun, clock: &Clock, interrupted: bool) -> PhaseReport {
        let ended = course.mark();
        let cost = clock.read(&*self.target.store, ended.seconds);
        *self.under_way.lock() = None;
        let mut report = PhaseReport::new(&self.target.settings, course, ended, cost);
        report.objects = self.objects;
        report.interrupted = interrupted;
        report
    }

    /// Runs a phase's preparation, unless interrupted.
    pub(super) async fn unless_interrupted<T>(
        interrupts: &mut Interrupts,
        work: impl Future<Output = T>,
    ) -> Result<T, BenchError> {
        tokio::select! {
            done = work => Ok(done),
            () = interrupted(interrupts) => Err(BenchError::Interrupted),
        }
    }

    async fn reader(&mut self) -> Result<RawReader, BenchError> {
        let (settings, objects) = (&self.target.settings, self.objects);
        if settings.verify && self.crcs.is_none() {
            let (target, stop) = (Arc::clone(&self.target), Arc::new(AtomicBool::new(false)));
            let stopped = Arc::clone(&stop);
            let crcs = tokio::task::spawn_blocking(move || target.part_crcs(&stopped));
            let crcs = Self::unless_interrupted(&mut self.interrupts, crcs).await;
            stop.store(true, Ordering::Relaxed);
            // Fails only after a panic.
            self.crcs = Some(crcs?.unwrap_or_default().into());
        }
        let arena = if let Some(arena) = &self.parts {
            arena
        } else {
            // No phase has more readers.
            let each = settings.objects.saturating_mul(settings.parts());
            let total = settings.rounds.map(|rounds| rounds.saturating_mul(each));
            let arena = self.arena(
                self.lanes(total),
                settings.part_bytes,
                "--concurrency or --part-size",
            )?;
            self.parts.insert(arena)
        };
        Ok(RawReader::new(&self.target, arena, objects, self.crcs.as_ref()).await)
    }

    /// A prefaulted arena for this many slots.
    pub(super) fn arena(
        &self,
        slots: usize,
        slot_bytes: u64,
        lower: &'static str,
    ) -> Result<Arena, BenchError> {
        self.arena_of(to_usize(slots_bytes(slots as u64, slot_bytes, lower)?))
    }

    pub(super) fn arena_of(&self, size: usize) -> Result<Arena, BenchError> {
        Ok(Arena::new(&ArenaOptions {
            size: size.max(SLOT_ALIGN),
            // The configured file may belong to a running daemon.
            path: None,
            huge_pages: self.config.arena.huge_pages,
            mlock: self.config.arena.mlock,
            prefault: true,
            ..ArenaOptions::default()
        })?)
    }
}

/// The slots' bytes. Fails, naming the flag to lower, if memory is too small.
fn slots_bytes(slots: u64, slot_bytes: u64, lower: &'static str) -> Result<u64, BenchError> {
    let slot_bytes = slot_bytes.next_multiple_of(SLOT_ALIGN as u64);
    let bytes = slot_bytes.saturating_mul(slots);
    if let Some(available) = memory_available().filter(|&available| bytes > available) {
        return Err(BenchError::Memory {
            slots,
            slot_bytes,
            available,
            lower,
        });
    }
    Ok(bytes)
}

/// Whether the warm-up ends its phase: if so, its report is the phase's. Failed requests don't end it, since the
/// measured ones show them.
pub(super) fn ends_phase(warm_up: PhaseReport) -> Option<PhaseReport> {
    if let Some(first) = &warm_up.errors.first {
        tracing::warn!(
            count = warm_up.errors.count,
            first,
            "requests failed in the warm-up"
        );
    }
    (warm_up.interrupted || warm_up.fatal.is_some()).then_some(warm_up)
}
