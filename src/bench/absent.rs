//! Lookups through a gateway, one turn a question.

use std::sync::Arc;

use bytes::Bytes;
use tokio::time::{Duration, Instant};

use super::course::{Course, Failure, Op};
use super::error::BenchError;
use crate::chunk::{ChunkHash, ChunkHasher, Space};
use crate::net::Landing;
use crate::object::{
    Condition, ErrorKind, GetFuture, GetRange, ListPage, ObjectError, ObjectMeta, ObjectStore, Operation,
    RequestCounts, StoreFuture,
};

/// Nobody stores in it.
const SPACE: &str = r#"{"model": "kvgate/bench", "revision": "nobody-has-this", "chunk_tokens": 1,
    "mha": {"layers": 1, "heads": 1, "head_dim": 64}}"#;

/// Chunks that nobody has.
pub(super) fn chunks(count: u64) -> Result<(Space, Vec<ChunkHash>), BenchError> {
    let space = Space::from_json(SPACE)?;
    let hasher = ChunkHasher::new(&space, None)?;
    let root = hasher.root(b"", b"")?;
    let tokens: Vec<u32> = (0..u32::try_from(count).unwrap_or(u32::MAX)).collect();
    let chunks = hasher.chain(&root, &tokens, &[])?;
    Ok((space, chunks))
}

/// A store whose questions about existence take turns in a course, and are timed.
pub(super) struct Asked {
    pub inner: Arc<dyn ObjectStore>,
    pub course: Arc<Course>,
    /// Whether what is asked for must be there; otherwise it must not.
    pub present: bool,
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
        let op = Ok(Some(Op {
            bytes: 0,
            latency,
            mixed: false,
        }));
        let (counted, answer) = match answer {
            Ok(meta) if self.present => (op, Ok(meta)),
            Err(cause) if cause.kind == ErrorKind::NotFound && !self.present => (op, Err(cause)),
            Ok(meta) => (
                Err(Failure::Wrong(format!("HEAD {key}: there is such an object"))),
                Ok(meta),
            ),
            // The course keeps the error itself, the gateway gets another of its kind.
            Err(cause) => {
                let told = error(cause.kind);
                (Err(cause.into()), Err(told))
            }
        };
        self.course.count(0, counted);
        self.course.was_it_the_last_turn();
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
}

/// Longest time for one lookup; the requests have their own limits.
pub(super) const LOOKUP: Duration = Duration::from_secs(3600);
/// Chunks in one lookup: a prompt of a million tokens has as many.
pub(super) const LOOKUP_CHUNKS: usize = 4096;
