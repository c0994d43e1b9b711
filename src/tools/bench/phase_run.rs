//! The common part of all phases: turns, pace, the end, and the tallies of finished requests.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tokio::sync::{Notify, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::histogram::Histogram;
use super::report::ReportMark;
use super::settings::BenchPhase;
use crate::s3::object::ObjectError;

/// Requests that may fail before a phase gives up: more failures mean that it won't get better.
const ERRORS_MAX: u64 = 1000;
/// Pause of a task after a failed request: while a server restarts, requests fail at once.
const AFTER_FAILURE: Duration = Duration::from_millis(100);
/// How much delay may be caught up: timers and busy cores are late by some milliseconds.
const CREDIT: Duration = Duration::from_millis(100);
/// Time for requests under way when the phase is interrupted, if they are not PUTs.
const GRACE: Duration = Duration::from_secs(2);

/// Counts interruptions.
pub type Interrupts = watch::Receiver<u32>;

/// One phase under way.
pub(super) struct PhaseRun {
    phase: BenchPhase,
    ops_a_turn: u64,
    /// Number of turns; None: until the time is over.
    total: Option<u64>,
    until: Option<Instant>,
    pace: Option<Pace>,
    next: AtomicU64,
    stopped: AtomicBool,
    /// Wakes tasks that wait for their pace when the run is stopped.
    stops: Notify,
    /// One tally for each task: other tasks lock it only to read.
    lanes: Box<[Mutex<Tally>]>,
    started: Instant,
    /// The start as wall-clock time.
    began: SystemTime,
    first_done: OnceLock<ReportMark>,
    fatal: Mutex<Option<ObjectError>>,
}

/// The time at which the next request may start.
struct Pace {
    /// How long a turn keeps the next one waiting.
    cost: Box<dyn Fn(u64) -> Duration + Send + Sync>,
    free_at: tokio::sync::Mutex<Instant>,
}

/// Finished requests.
#[derive(Default, Clone)]
pub(super) struct Tally {
    pub done: Done,
    pub errors: u64,
    pub first_error: Option<String>,
}

#[derive(Default, Clone)]
pub(super) struct Done {
    pub ops: u64,
    pub bytes: u64,
    pub latency: Histogram,
}

/// A request that succeeded.
pub(super) struct Op {
    pub bytes: u64,
    pub latency: Duration,
}

/// A request that failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum PhaseFailure {
    #[error(transparent)]
    Object(#[from] ObjectError),
    /// It was answered, but wrongly.
    #[error("{0}")]
    Wrong(String),
}

/// Makes one request after the other.
pub(super) trait PhaseWorker: Send + 'static {
    /// None: there was nothing to do in this turn.
    fn turn(&mut self, turn: u64) -> impl Future<Output = Result<Option<Op>, PhaseFailure>> + Send;
}

/// The limits of a run: its end, and its pace.
#[derive(Default)]
pub(super) struct PhaseLimits {
    pub total: Option<u64>,
    pub time: Option<Duration>,
    /// See [`Pace::cost`].
    pub cost: Option<Box<dyn Fn(u64) -> Duration + Send + Sync>>,
    /// Operations of a turn beyond the first.
    pub more_ops_a_turn: u64,
}

impl PhaseLimits {
    /// A limit of turns only.
    pub fn turns(total: u64) -> Self {
        Self {
            total: Some(total),
            ..Self::default()
        }
    }
}

impl PhaseRun {
    /// Starts a run, and its clock.
    pub fn start(phase: BenchPhase, limits: PhaseLimits, lanes: usize) -> Self {
        // The histograms are the bench's own memory, so they are allocated before the measurement.
        let lanes = (0..lanes).map(|_| Mutex::default()).collect();
        let started = Instant::now();
        let pace = limits.cost.map(|cost| Pace {
            cost,
            free_at: tokio::sync::Mutex::new(started),
        });
        Self {
            phase,
            ops_a_turn: 1 + limits.more_ops_a_turn,
            total: limits.total,
            // A deadline too far off to represent counts as none.
            until: limits.time.and_then(|time| started.checked_add(time)),
            pace,
            next: AtomicU64::new(0),
            stopped: AtomicBool::new(false),
            stops: Notify::new(),
            lanes,
            started,
            began: SystemTime::now(),
            first_done: OnceLock::new(),
            fatal: Mutex::default(),
        }
    }

    /// Runs a task for each worker until nothing is left to do. Returns whether it was interrupted; if not,
    /// `workers` has the workers again.
    pub async fn run<W: PhaseWorker>(
        self: &Arc<Self>,
        workers: &mut Vec<W>,
        interrupts: &mut Interrupts,
    ) -> bool {
        let mut tasks = JoinSet::new();
        for (lane, worker) in workers.drain(..).enumerate() {
            let run = Arc::clone(self);
            tasks.spawn(async move { run.work(lane, worker).await });
        }
        // Objects that a delete leaves behind must be cleaned up by hand: the first interruption does not end it.
        let mut spare = self.phase == BenchPhase::Delete && *interrupts.borrow() == 0;
        let mut was_interrupted = false;
        loop {
            let all = async {
                while let Some(done) = tasks.join_next().await {
                    workers.extend(done.ok());
                }
            };
            let done = if spare {
                tokio::select! {
                    () = all => true,
                    () = interrupted(interrupts) => false,
                }
            } else {
                self.interruptible(all, interrupts).await
            };
            if done {
                return was_interrupted;
            }
            was_interrupted = true;
            if !std::mem::take(&mut spare) {
                break;
            }
        }
        let all = async { while tasks.join_next().await.is_some() {} };
        // An abandoned PUT could come after its DELETE.
        let puts = self.phase == BenchPhase::Write;
        tokio::select! {
            () = all => {}
            () = tokio::time::sleep(GRACE), if !puts => {}
            () = interrupted(interrupts) => {}
        }
        tasks.shutdown().await;
        true
    }

    /// Whether `work` was done before an interruption. An interruption ends the turns.
    pub async fn interruptible(&self, work: impl Future<Output = ()>, interrupts: &mut Interrupts) -> bool {
        tokio::select! {
            () = work => true,
            () = interrupted(interrupts) => {
                self.stop();
                false
            }
        }
    }

    async fn work<W: PhaseWorker>(&self, lane: usize, mut worker: W) -> W {
        while let Some(turn) = self.turn().await {
            let result = worker.turn(turn).await;
            let failed = result.is_err();
            self.count(lane, result);
            if failed {
                self.after_failure().await;
            }
        }
        self.first_done.get_or_init(|| self.mark());
        worker
    }

    /// Makes the failed request's task wait, if there is more to do.
    pub async fn after_failure(&self) {
        if !self.was_the_last() {
            self.wait(Instant::now() + AFTER_FAILURE).await;
        }
    }

    /// The next turn; None after the last.
    pub async fn turn(&self) -> Option<u64> {
        let Some(pace) = &self.pace else {
            return self.take();
        };
        // The task that waits for its time also keeps the others waiting, in order.
        let mut free_at = pace.free_at.lock().await;
        if self.was_the_last() {
            return None;
        }
        self.wait(*free_at).await;
        let turn = self.take()?;
        let credit = Instant::now().checked_sub(CREDIT).unwrap_or(self.started);
        *free_at = (*free_at).max(credit) + (pace.cost)(turn);
        Some(turn)
    }

    /// Waits until `then`, or until no turn is left.
    async fn wait(&self, then: Instant) {
        let stops = self.stops.notified();
        let due = self.until.map_or(then, |until| then.min(until));
        // A timer would waste a millisecond.
        if due <= Instant::now() || self.is_over() {
            return;
        }
        tokio::select! {
            () = tokio::time::sleep_until(due) => {}
            () = stops => {}
        }
    }

    /// Takes a turn without waiting for its time.
    fn take(&self) -> Option<u64> {
        if self.is_over() {
            return None;
        }
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        self.total.is_none_or(|total| turn < total).then_some(turn)
    }

    /// Whether no turn is left.
    fn was_the_last(&self) -> bool {
        self.total
            .is_some_and(|total| self.next.load(Ordering::Relaxed) >= total)
    }

    /// After a request of a task outside the run: nothing may be left to do.
    pub fn ended_one(&self) {
        if self.was_the_last() || self.is_over() {
            self.first_done.get_or_init(|| self.mark());
        }
    }

    pub fn count(&self, lane: usize, result: Result<Option<Op>, PhaseFailure>) {
        let mut tally = lock(&self.lanes[lane]);
        match result {
            Ok(None) => {}
            Ok(Some(op)) => {
                let done = &mut tally.done;
                done.ops += 1;
                done.bytes += op.bytes;
                done.latency.record(op.latency);
            }
            Err(failure) => {
                tally.errors += 1;
                if tally.first_error.is_none() {
                    tally.first_error = Some(failure.to_string());
                }
                drop(tally);
                self.failed(failure);
            }
        }
    }

    fn failed(&self, failure: PhaseFailure) {
        match failure {
            // Every other request will meet this error too.
            PhaseFailure::Object(error) if error.kind.is_setup() => {
                self.stop();
                lock(&self.fatal).get_or_insert(error);
            }
            PhaseFailure::Object(_) | PhaseFailure::Wrong(_) => {
                if self.gave_up() {
                    self.stop();
                }
            }
        }
    }

    pub fn phase(&self) -> BenchPhase {
        self.phase
    }

    /// Seconds since 1970.
    pub fn began(&self) -> f64 {
        self.began
            .duration_since(UNIX_EPOCH)
            .unwrap_or_default()
            .as_secs_f64()
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
        self.stops.notify_waiters();
    }

    /// Whether no more turns are given.
    pub fn is_over(&self) -> bool {
        let late = self.until.is_some_and(|until| Instant::now() >= until);
        late || self.stopped.load(Ordering::Relaxed)
    }

    /// The error that makes the whole command fail.
    pub fn take_fatal(&self) -> Option<ObjectError> {
        lock(&self.fatal).take()
    }

    /// Whether it ended because of too many failed requests.
    pub fn gave_up(&self) -> bool {
        self.errors() >= ERRORS_MAX
    }

    fn errors(&self) -> u64 {
        self.lanes.iter().map(|lane| lock(lane).errors).sum()
    }

    /// Number of turns given.
    pub fn issued(&self) -> u64 {
        let next = self.next.load(Ordering::Relaxed);
        self.total.map_or(next, |total| next.min(total))
    }

    /// When the first task found nothing left to do, if that happened.
    pub fn first_done(&self) -> Option<ReportMark> {
        self.first_done.get().copied()
    }

    /// The progress by now.
    pub fn mark(&self) -> ReportMark {
        let (ops, bytes, _) = self.sums();
        ReportMark::new(self.started.elapsed(), ops, bytes)
    }

    fn sums(&self) -> (u64, u64, u64) {
        let sum = |(ops, bytes, errors): (u64, u64, u64), lane: &Mutex<Tally>| {
            let tally = lock(lane);
            (
                ops + tally.done.ops,
                bytes + tally.done.bytes,
                errors + tally.errors,
            )
        };
        self.lanes.iter().fold((0, 0, 0), sum)
    }

    /// The sum of all tasks' tallies.
    pub fn tally(&self) -> Tally {
        let mut all = Tally::default();
        for lane in &self.lanes {
            let tally = lock(lane);
            all.done.ops += tally.done.ops;
            all.done.bytes += tally.done.bytes;
            all.done.latency.add(&tally.done.latency);
            all.errors += tally.errors;
            if all.first_error.is_none() {
                all.first_error.clone_from(&tally.first_error);
            }
        }
        all
    }

    /// The figures of the progress line.
    pub fn live(&self) -> Live {
        let (ops, bytes, errors) = self.sums();
        Live {
            phase: self.phase,
            seconds: self.started.elapsed().as_secs_f64(),
            total: self.total.map(|total| total.saturating_mul(self.ops_a_turn)),
            ops,
            bytes,
            errors,
        }
    }
}

/// Progress of a phase under way.
#[derive(Debug, Clone, Copy)]
pub struct Live {
    pub phase: BenchPhase,
    pub seconds: f64,
    /// Number of requests in all, if known.
    pub total: Option<u64>,
    pub ops: u64,
    pub bytes: u64,
    pub errors: u64,
}

/// Waits for the next interruption; forever if there is no sender left.
pub(super) async fn interrupted(interrupts: &mut Interrupts) {
    if interrupts.changed().await.is_err() {
        std::future::pending::<()>().await;
    }
}

/// No panic can leave a tally half-changed, so a poisoned lock is safe to use.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes this time for each turn.
    struct Sleeper(Duration);

    impl PhaseWorker for Sleeper {
        async fn turn(&mut self, turn: u64) -> Result<Option<Op>, PhaseFailure> {
            tokio::time::sleep(self.0).await;
            match turn {
                9 => Err(PhaseFailure::Wrong(format!("turn {turn}"))),
                _ => Ok(Some(Op {
                    bytes: 100,
                    latency: self.0,
                })),
            }
        }
    }

    async fn run(limits: PhaseLimits, workers: usize, each: Duration) -> (Arc<PhaseRun>, Duration) {
        let (_keep, mut interrupts) = watch::channel(0);
        let run = Arc::new(PhaseRun::start(BenchPhase::Read, limits, workers));
        let mut sleepers: Vec<_> = (0..workers).map(|_| Sleeper(each)).collect();
        assert!(!run.run(&mut sleepers, &mut interrupts).await);
        let took = run.started.elapsed();
        assert_eq!(sleepers.len(), workers, "they are there again");
        (run, took)
    }

    const MS: Duration = Duration::from_millis(1);

    #[tokio::test(start_paused = true)]
    async fn a_stop_wakes_who_waits_for_its_pace() {
        let limits = PhaseLimits {
            cost: Some(Box::new(|_| 1_000_000 * MS)),
            ..PhaseLimits::default()
        };
        let run = Arc::new(PhaseRun::start(BenchPhase::Write, limits, 1));
        assert_eq!(run.turn().await, Some(0));
        let waiting = Arc::clone(&run);
        let turn = tokio::spawn(async move { waiting.turn().await });
        tokio::time::sleep(MS).await;
        run.stop();
        assert_eq!(turn.await.unwrap(), None);
        assert_eq!(run.started.elapsed(), MS);
    }

    #[tokio::test(start_paused = true)]
    async fn every_turn_is_taken_once_and_the_first_done_is_earlier() {
        let limits = PhaseLimits {
            total: Some(10),
            ..PhaseLimits::default()
        };
        let (run, took) = run(limits, 4, 100 * MS).await;
        assert_eq!(took, 300 * MS, "4, 4 and 2");
        let tally = run.tally();
        assert_eq!((tally.done.ops, tally.done.bytes, tally.errors), (9, 900, 1));
        assert_eq!(tally.first_error.as_deref(), Some("turn 9"));
        let first = run.first_done().unwrap();
        assert!((first.seconds - 0.2).abs() < 1e-6, "{first:?}");
        assert!(
            (7..9).contains(&first.ops),
            "the others of that moment may be counted or not"
        );
        assert_eq!((run.mark().ops, run.issued()), (9, 10));
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_limit_ends_turns_not_requests() {
        let limits = PhaseLimits {
            time: Some(250 * MS),
            ..PhaseLimits::default()
        };
        let (run, took) = run(limits, 2, 100 * MS).await;
        assert_eq!((took, run.issued()), (300 * MS, 6));
    }

    #[tokio::test(start_paused = true)]
    async fn the_pace_is_kept_whatever_the_requests_take() {
        for (workers, each) in [(1, Duration::ZERO), (8, 15 * MS), (3, 5 * MS)] {
            let limits = PhaseLimits {
                total: Some(101),
                cost: Some(Box::new(|_| 10 * MS)),
                ..PhaseLimits::default()
            };
            let (run, took) = run(limits, workers, each).await;
            assert_eq!(
                took,
                1000 * MS + each,
                "{workers} workers: the first starts at once"
            );
            assert_eq!(run.issued(), 101);
        }
        // Slower than the pace, so there is no credit to catch up with.
        let limits = PhaseLimits {
            total: Some(10),
            cost: Some(Box::new(|_| 10 * MS)),
            ..PhaseLimits::default()
        };
        assert_eq!(run(limits, 1, 50 * MS).await.1, 500 * MS);
        let limits = PhaseLimits {
            time: Some(95 * MS),
            cost: Some(Box::new(|turn| if turn == 3 { 1000 * MS } else { 10 * MS })),
            ..PhaseLimits::default()
        };
        let (run, took) = run(limits, 1, Duration::ZERO).await;
        assert_eq!((took, run.issued()), (95 * MS, 4), "nobody sleeps past the end");
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_is_a_little_late_catches_up() {
        struct Late(Duration);
        impl PhaseWorker for Late {
            async fn turn(&mut self, turn: u64) -> Result<Option<Op>, PhaseFailure> {
                if turn == 3 {
                    tokio::time::sleep(self.0).await;
                }
                Ok(None)
            }
        }
        for (late, took) in [(CREDIT, 200 * MS), (2 * CREDIT, 290 * MS)] {
            let (_keep, mut interrupts) = watch::channel(0);
            let limits = PhaseLimits {
                total: Some(21),
                cost: Some(Box::new(|_| 10 * MS)),
                ..PhaseLimits::default()
            };
            let run = Arc::new(PhaseRun::start(BenchPhase::Read, limits, 1));
            run.run(&mut vec![Late(late)], &mut interrupts).await;
            assert_eq!(run.started.elapsed(), took, "no more than the credit: {late:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_interruption_does_not_end_deletes_unless_one_came_before() {
        for (before, deletes) in [(0, 20), (1, 9)] {
            let (interrupt, mut interrupts) = watch::channel(before);
            interrupts.mark_unchanged();
            let run = Arc::new(PhaseRun::start(BenchPhase::Delete, PhaseLimits::turns(20), 1));
            tokio::spawn(async move {
                tokio::time::sleep(85 * MS).await;
                interrupt.send_modify(|count| *count += 1);
                tokio::time::sleep(GRACE * 2).await;
            });
            assert!(run.run(&mut vec![Sleeper(10 * MS)], &mut interrupts).await);
            assert_eq!(run.tally().done.ops + run.tally().errors, deletes);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_interruption_ends_it_also_when_requests_hang() {
        let (interrupt, mut interrupts) = watch::channel(0);
        let run = Arc::new(PhaseRun::start(BenchPhase::Read, PhaseLimits::default(), 2));
        let mut workers = vec![Sleeper(10 * MS), Sleeper(3600 * 1000 * MS)];
        tokio::spawn(async move {
            tokio::time::sleep(95 * MS).await;
            interrupt.send_replace(1);
            tokio::time::sleep(GRACE * 2).await;
        });
        assert!(run.run(&mut workers, &mut interrupts).await);
        assert_eq!(run.started.elapsed(), 95 * MS + GRACE);
        assert_eq!(run.tally().done.ops, 8);
        assert_eq!(run.tally().errors, 1, "after it that task waits");
    }

    #[tokio::test(start_paused = true)]
    async fn too_many_errors_end_it() {
        struct Failing;
        impl PhaseWorker for Failing {
            async fn turn(&mut self, _: u64) -> Result<Option<Op>, PhaseFailure> {
                Err(PhaseFailure::Wrong("no".into()))
            }
        }
        let (_keep, mut interrupts) = watch::channel(0);
        let run = Arc::new(PhaseRun::start(BenchPhase::Read, PhaseLimits::default(), 1));
        run.run(&mut vec![Failing], &mut interrupts).await;
        assert_eq!(run.tally().errors, ERRORS_MAX);
    }
}
