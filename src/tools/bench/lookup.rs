//! Lookups through a gateway: each existence request that reaches the store is a turn.

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::{Duration, Instant};

use super::error::BenchError;
use super::phase_run::{Op, PhaseFailure, PhaseLimits, PhaseRun};
use super::report::PhaseReport;
use super::session::{Bench, Clock, ends_phase};
use super::settings::{BenchPhase, to_usize};
use crate::arena::SLOT_ALIGN;
use crate::format::{ChunkHash, ChunkHasher, Space};
use crate::protocol::Strategy;
use crate::s3::fanout::{EndpointState, Requests};
use crate::s3::net::{Landing, Traffic};
use crate::s3::object::{
    Condition, ErrorKind, GetFuture, GetRange, ListPage, ObjectError, ObjectMeta, ObjectStore, Operation,
    RequestCounts, StoreFuture,
};

/// A space without chunks.
const SPACE: &str = r#"{"model": "kvgate/bench", "revision": "nobody-has-this", "chunk_tokens": 1,
    "mha": {"layers": 1, "heads": 1, "head_dim": 64}}"#;

/// Longest time for a whole lookup or load; their requests have limits of their own.
pub(super) const WHOLE: Duration = Duration::from_secs(3600);
/// Chunks in one lookup: a prompt of a million tokens has as many.
const LOOKUP_CHUNKS: usize = 4096;

impl Bench {
    /// Asks a new gateway for each chunk: for the prompt's chunks, or else for absent ones.
    pub(super) async fn lookup(&mut self) -> Result<PhaseReport, BenchError> {
        let (space, chunks) = match &self.prompt {
            Some(prompt) => {
                let count = to_usize(self.objects);
                (prompt.space.clone(), prompt.chunks[..count].to_vec())
            }
            None => absent(self.settings().objects)?,
        };
        let each = chunks.len() as u64;
        if self.settings().warm_up {
            let once = PhaseLimits {
                time: None,
                ..self.limits(Some(each), |_| 0)
            };
            let report = self.look_up(&space, &chunks, Some(1), once).await?;
            if let Some(report) = ends_phase(report) {
                return Ok(report);
            }
        }
        let rounds = self.rounds(each);
        let total = rounds.map(|rounds| rounds.saturating_mul(each));
        let limits = self.limits(total, |_| 0);
        self.look_up(&space, &chunks, rounds, limits).await
    }

    /// Looks up all chunks, `rounds` times.
    async fn look_up(
        &mut self,
        space: &Space,
        chunks: &[ChunkHash],
        rounds: Option<u64>,
        limits: PhaseLimits,
    ) -> Result<PhaseReport, BenchError> {
        let arena = self.arena_of(SLOT_ALIGN)?;
        let course = self.start(BenchPhase::Lookup, limits, 1);
        let clock = Clock::start(&*self.target.store);
        let asked = Asked {
            inner: Arc::clone(&self.target.store),
            course: Arc::clone(&course),
            present: self.prompt.is_some(),
        };
        let gateway = self.gateway(Arc::new(asked), arena, self.reads_only());
        let all = async {
            for _ in 0..rounds.unwrap_or(u64::MAX) {
                for some in chunks.chunks(LOOKUP_CHUNKS) {
                    let deadline = Instant::now() + WHOLE;
                    gateway.lookup(space, some, Strategy::Exact, deadline).await;
                    if course.is_over() {
                        return;
                    }
                }
                gateway.forget_existence();
            }
        };
        let done = course.interruptible(all, &mut self.interrupts).await;
        Ok(self.finish(&course, &clock, !done))
    }
}

/// Chunks that are not stored.
fn absent(count: u64) -> Result<(Space, Vec<ChunkHash>), BenchError> {
    let space = Space::from_json(SPACE)?;
    let hasher = ChunkHasher::new(&space, None)?;
    let root = hasher.root(b"", b"")?;
    let tokens: Vec<u32> = (0..u32::try_from(count).unwrap_or(u32::MAX)).collect();
    let chunks = hasher.chain(&root, &tokens, &[])?;
    Ok((space, chunks))
}

/// A store whose existence requests take turns in a run, and are timed.
struct Asked {
    inner: Arc<dyn ObjectStore>,
    course: Arc<PhaseRun>,
    /// Whether the requested chunks must be there; otherwise they must be absent.
    present: bool,
}

impl Asked {
    async fn ask(
        &self,
        key: &str,
        answer: impl Future<Output = Result<ObjectMeta, ObjectError>>,
    ) -> Result<ObjectMeta, ObjectError> {
        let error = |kind| ObjectError::new(Operation::Head, key, kind, "");
        if self.course.turn().await.is_none() {
            return Err(error(ErrorKind::Deadline));
        }
        let began = Instant::now();
        let answer = answer.await;
        let latency = began.elapsed();
        let op = Ok(Some(Op { bytes: 0, latency }));
        let (counted, answer) = match answer {
            Ok(meta) if self.present => (op, Ok(meta)),
            Err(cause) if cause.kind == ErrorKind::NotFound && !self.present => (op, Err(cause)),
            Ok(meta) => (
                Err(PhaseFailure::Wrong(format!(
                    "HEAD {key}: there is such an object"
                ))),
                Ok(meta),
            ),
            // The run keeps the error itself, the gateway gets another of its kind.
            Err(cause) => {
                let told = error(cause.kind);
                (Err(cause.into()), Err(told))
            }
        };
        let failed = counted.is_err();
        self.course.count(0, counted);
        self.course.ended_one();
        if failed {
            self.course.after_failure().await;
        }
        answer
    }
}

impl ObjectStore for Asked {
    fn head<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        Box::pin(self.ask(key, self.inner.head(key, deadline)))
    }

    fn attributes<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        Box::pin(self.ask(key, self.inner.attributes(key, deadline)))
    }

    fn get<'a>(&'a self, get: GetRange<'a>, landing: Landing, deadline: Instant) -> GetFuture<'a> {
        self.inner.get(get, landing, deadline)
    }

    fn read<'a>(&'a self, key: &'a str, limit: usize, deadline: Instant) -> StoreFuture<'a, Bytes> {
        self.inner.read(key, limit, deadline)
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        when: Condition<'a>,
        deadline: Instant,
    ) -> StoreFuture<'a, Arc<str>> {
        self.inner.put(key, body, when, deadline)
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a str>,
        deadline: Instant,
    ) -> StoreFuture<'a, ListPage> {
        self.inner.list(prefix, from, deadline)
    }

    fn delete<'a>(&'a self, keys: &'a [String], deadline: Instant) -> StoreFuture<'a, ()> {
        self.inner.delete(keys, deadline)
    }

    fn check_bucket(&self, deadline: Instant) -> StoreFuture<'_, ()> {
        self.inner.check_bucket(deadline)
    }

    fn create_bucket(&self, deadline: Instant) -> StoreFuture<'_, ()> {
        self.inner.create_bucket(deadline)
    }

    fn requests(&self) -> RequestCounts {
        self.inner.requests()
    }

    fn traffic(&self) -> Traffic {
        self.inner.traffic()
    }

    fn totals(&self) -> Requests {
        self.inner.totals()
    }

    fn endpoints(&self) -> Vec<EndpointState> {
        self.inner.endpoints()
    }

    fn is_out_of_reach(&self) -> bool {
        self.inner.is_out_of_reach()
    }

    fn window_bytes(&self) -> usize {
        self.inner.window_bytes()
    }
}
