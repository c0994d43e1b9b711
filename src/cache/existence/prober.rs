//! Questions to S3 whether a chunk exists. Each question is under way once at a time; later callers with the same
//! question wait for its answer.

use std::sync::{Arc, OnceLock};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry as MapEntry;
use tokio::sync::{Semaphore, watch};
use tokio::time::{Duration, Instant};

use super::cache::{ExistenceCache, Known, Useless};
use crate::cache::episode::Episode;
use crate::format::{ChunkHash, ChunkId, HeaderError, KeyPrefix, Run, Space};
use crate::metrics::trace;
use crate::s3::object::{Capabilities, ErrorKind, ObjectError, ObjectMeta, ObjectStore, Operation};

/// The answer to "does this chunk exist?".
#[derive(Debug, Clone)]
pub enum ProbeAnswer {
    /// With its hint, if it came with one.
    Present(Option<Run>),
    Absent,
    /// There is one that this node can't use, and must not replace.
    Left,
    Unknown(Arc<ObjectError>),
}

/// What a caller can use of an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wanted {
    Existence,
    /// Run hints as well: only the answer to a HEAD has them.
    Hints,
}

/// Asks S3 for chunks that the cache does not know, each question once at a time.
#[derive(Clone)]
pub struct Prober(Arc<Inner>);

struct Inner {
    store: Arc<dyn ObjectStore>,
    cache: Arc<ExistenceCache>,
    keys: KeyPrefix,
    capabilities: Arc<OnceLock<Capabilities>>,
    permits: Semaphore,
    /// Time limit for a question, which other callers may have joined.
    time_limit: Duration,
    /// Warning: objects of a wrong length.
    damaged: Episode,
    /// Warning: S3 does not accept the keys.
    denied: Episode,
    /// Warning: objects whose key is not here.
    keyless: Episode,
    flights: DashMap<ChunkId, watch::Receiver<Option<ProbeAnswer>>>,
}

impl Prober {
    /// Uses `GetObjectAttributes` where the server is known to have it, else HEAD.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        cache: Arc<ExistenceCache>,
        keys: KeyPrefix,
        capabilities: Arc<OnceLock<Capabilities>>,
        concurrency: usize,
        time_limit: Duration,
        [damaged, denied, keyless]: [Episode; 3],
    ) -> Self {
        let permits = Semaphore::new(concurrency);
        Self(Arc::new(Inner {
            store,
            cache,
            keys,
            capabilities,
            permits,
            time_limit,
            damaged,
            denied,
            keyless,
            flights: DashMap::new(),
        }))
    }

    /// Asks S3, or joins the same question under way. The answer is remembered, also when the caller is gone by
    /// then.
    pub async fn ask(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        wanted: Wanted,
        deadline: Instant,
    ) -> ProbeAnswer {
        match self.ask_or_join(space, chunk, wanted, deadline).await {
            // The first caller's deadline passed, not this one's.
            (ProbeAnswer::Unknown(error), true)
                if error.kind == ErrorKind::Deadline && Instant::now() < deadline =>
            {
                self.ask_or_join(space, chunk, wanted, deadline).await.0
            }
            (answer, _) => answer,
        }
    }

    /// Also returns whether another caller had asked already.
    async fn ask_or_join(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        wanted: Wanted,
        deadline: Instant,
    ) -> (ProbeAnswer, bool) {
        let cache_key = (space.key(), *chunk);
        let key = || self.0.keys.chunk(cache_key.0, chunk);
        let (mut flight, joined) = match self.0.flights.entry(cache_key) {
            MapEntry::Occupied(flight) => (flight.get().clone(), true),
            MapEntry::Vacant(_) if Instant::now() >= deadline => {
                return (unknown(&key(), ErrorKind::Deadline, "not asked"), false);
            }
            MapEntry::Vacant(vacant) => {
                let (tell, told) = watch::channel(None);
                vacant.insert(told.clone());
                let inner = Arc::clone(&self.0);
                let object_len = space.layout().object_len() as u64;
                let deadline = deadline.max(Instant::now() + inner.time_limit);
                let key = key();
                tokio::spawn(trace::carry(async move {
                    let answer = inner
                        .ask_store(cache_key, &key, object_len, wanted, deadline)
                        .await;
                    inner.flights.remove(&cache_key);
                    tell.send_replace(Some(answer));
                }));
                (told, false)
            }
        };
        let told = tokio::time::timeout_at(deadline, flight.wait_for(Option::is_some)).await;
        let answer = match told {
            Ok(answer) => answer.ok().and_then(|answer| answer.clone()).unwrap_or_else(|| {
                // The question's task is gone without an answer; the next caller starts a new one.
                self.0.flights.remove(&cache_key);
                unknown(&key(), ErrorKind::Broken, "the question was dropped")
            }),
            Err(_) => unknown(&key(), ErrorKind::Deadline, "waiting for the answer"),
        };
        (answer, joined)
    }
}

fn unknown(key: &str, kind: ErrorKind, detail: &str) -> ProbeAnswer {
    ProbeAnswer::Unknown(Arc::new(ObjectError::new(Operation::Head, key, kind, detail)))
}

impl Inner {
    async fn ask_store(
        &self,
        cache_key: ChunkId,
        key: &str,
        object_len: u64,
        wanted: Wanted,
        deadline: Instant,
    ) -> ProbeAnswer {
        let mut span = trace::begin("probe");
        let Ok(Ok(_permit)) = tokio::time::timeout_at(deadline, self.permits.acquire()).await else {
            return unknown(key, ErrorKind::Deadline, "waiting for its turn");
        };
        trace::mark(&mut span, "turn");
        let asked = Instant::now();
        let has_attributes = self.capabilities.get().is_some_and(|known| known.attributes);
        let attributes = has_attributes && wanted == Wanted::Existence;
        let ask = async {
            match attributes {
                true => self.store.attributes(key, deadline).await,
                false => self.store.head(key, deadline).await,
            }
        };
        let seen = trace::within(span.as_ref(), ask).await;
        let answer = self.learn(seen, cache_key, key, object_len, asked);
        trace::end(span, || {
            let answer = match &answer {
                ProbeAnswer::Present(_) => ("answer", "present".to_owned()),
                ProbeAnswer::Absent => ("answer", "absent".to_owned()),
                ProbeAnswer::Left => ("answer", "left".to_owned()),
                ProbeAnswer::Unknown(error) => ("error", error.to_string()),
            };
            vec![
                ("chunk", cache_key.1.to_string().chars().take(12).collect()),
                answer,
            ]
        });
        answer
    }

    /// What an answer of S3 says, also to the cache.
    fn learn(
        &self,
        seen: Result<ObjectMeta, ObjectError>,
        cache_key: ChunkId,
        key: &str,
        object_len: u64,
        asked: Instant,
    ) -> ProbeAnswer {
        match seen {
            Ok(meta) if meta.len != object_len => {
                let len = meta.len;
                self.damaged
                    .tell(&format_args!("{key} has {len} bytes, not {object_len}"));
                self.cache
                    .pass_over(cache_key, meta.version, Useless::Damaged, asked);
                ProbeAnswer::Absent
            }
            Ok(meta)
                if let Some((version, why)) = self.cache.useless(&cache_key)
                    && version == meta.version =>
            {
                self.cache.learn(cache_key, Known::Absent, asked);
                match why {
                    Useless::Damaged => ProbeAnswer::Absent,
                    Useless::Left(why) => {
                        if matches!(why, HeaderError::NoKey { .. }) {
                            self.keyless.tell(&why);
                        }
                        ProbeAnswer::Left
                    }
                }
            }
            Ok(meta) => {
                self.cache
                    .learn(cache_key, Known::Present(meta.version.etag), asked);
                ProbeAnswer::Present(meta.run.as_deref().and_then(Run::parse))
            }
            Err(error) if error.kind == ErrorKind::NotFound => {
                self.cache.is_gone(&cache_key);
                self.cache.learn(cache_key, Known::Absent, asked);
                ProbeAnswer::Absent
            }
            Err(error) => {
                if matches!(error.kind, ErrorKind::Denied | ErrorKind::Credentials) {
                    self.denied.tell(&error);
                }
                ProbeAnswer::Unknown(Arc::new(error))
            }
        }
    }
}
