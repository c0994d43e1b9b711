//! Whole calls for programs that are no engine: each call names its memory, and has ended when it returns.
//!
//! A [`Direct`] is one process's session with the node. A call is a [`rank`](super::rank) of one kind, whose pages are
//! the memory of that call: so chunks go the same way as an engine's, with the same checks. The Python API and the C API
//! are made of these calls.
//!
//! Not for: several kinds of KV that belong together, several ranks, jobs in the background. Engines have those, by
//! [`rank::Worker`](super::rank::Worker).

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::client::{Client, ClientError, Engine, FoundChunks};
use super::copy::{Copier, CopyError, LayoutError, MappingError, PagedCache, SlotMapping, Spans, Tensor};
use super::rank::{
    ComputedChunk, ComputedKind, Hold, KindPages, LoadJob, LoadProgress, LookupBreaker, StoreJob,
    WantedChunk, WantedKind, Worker, WorkerError,
};
use crate::format::{ChunkHash, Kind, Space};
use crate::protocol::{AttachRequest, Flushed, Order};

/// Time after which a store asks again for room.
const AGAIN: Duration = Duration::from_millis(50);

/// One process's session with the node, for calls that name their memory.
pub struct Direct {
    client: Client,
    engine: Arc<Engine>,
    instance: String,
    calls: AtomicU64,
    make: MakeCopier,
}

type MakeCopier = Arc<dyn Fn(PagedCache) -> Result<Copier, CopyError> + Send + Sync>;

/// KV in this process's memory: all layers and heads of a space.
#[derive(Debug, Clone)]
pub struct DirectMemory {
    cache: PagedCache,
    /// For each token `block * block_tokens + token in the block`, negative: nowhere. None: token t is at t.
    slots: Option<Vec<i64>>,
}

/// The outcome of a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectLoaded {
    /// Leading chunks that are in the memory. What is behind them is undefined.
    pub chunks: usize,
    /// The reason why the next one is not.
    pub reason: Option<String>,
}

/// The outcome of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DirectStored {
    /// Leading chunks that the node has now.
    pub chunks: usize,
    /// Chunks that it did not have before.
    pub new: usize,
    /// Chunks for which it had no room in time: store them again later.
    pub refused: usize,
    /// The reason why others are not there.
    pub reason: Option<String>,
}

/// A call that could not be made.
#[derive(Debug, thiserror::Error)]
pub enum DirectError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Worker(#[from] WorkerError),
    #[error(transparent)]
    Layout(#[from] LayoutError),
    #[error(transparent)]
    Mapping(#[from] MappingError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(
        "the memory has not all layers and heads of plane {plane} (layer {layer}): give all of the space's"
    )]
    Partial { plane: usize, layer: u32 },
    #[error("a space of the kind {0:?} is for engines: these calls are for KV of all tokens (kind \"full\")")]
    Kind(Kind),
    #[error(
        "the memory has room for {room} tokens, and the chunks have {tokens}: name fewer, or give more memory"
    )]
    Room { room: usize, tokens: usize },
    #[error("{places} places are named, and the chunks have {tokens} tokens: name one for each")]
    Places { places: usize, tokens: usize },
    #[error("each chunk needs a parent: there are {parents} for {hashes}")]
    Parents { parents: usize, hashes: usize },
}

impl DirectMemory {
    /// Checks the tensors; an error lists all that doesn't fit the space.
    pub fn new(space: &Space, tensors: &[Tensor], slots: Option<Vec<i64>>) -> Result<Self, DirectError> {
        if space.kind() != Kind::Full {
            return Err(DirectError::Kind(space.kind()));
        }
        let cache = PagedCache::new(space, tensors)?;
        for (index, plane) in space.planes().iter().enumerate() {
            let is_whole = cache
                .parts()
                .iter()
                .any(|part| part.plane == index && part.heads == (0, plane.heads));
            if !is_whole {
                return Err(DirectError::Partial {
                    plane: index,
                    layer: plane.layer,
                });
            }
        }
        Ok(Self { cache, slots })
    }

    /// The places of the first chunks' tokens.
    fn places(&self, chunks: usize) -> Result<Vec<Spans>, DirectError> {
        let rows = self.cache.space().chunk_rows();
        let of_chunk = rows as usize;
        let table: Vec<u32> = (0..self.cache.blocks()).collect();
        let (tokens, room) = (
            chunks * of_chunk,
            table.len() * self.cache.block_tokens() as usize,
        );
        match self.slots.as_ref().map(Vec::len) {
            Some(places) if places < tokens => return Err(DirectError::Places { places, tokens }),
            None if room < tokens => return Err(DirectError::Room { room, tokens }),
            _ => {}
        }
        let place = |chunk: usize| {
            let mapping = match &self.slots {
                None => SlotMapping::Blocks {
                    table: &table,
                    first_token: (chunk * of_chunk) as u64,
                },
                Some(slots) => SlotMapping::Slots(&slots[chunk * of_chunk..(chunk + 1) * of_chunk]),
            };
            Ok(self.cache.spans(mapping, 0..rows)?)
        };
        (0..chunks).map(place).collect()
    }
}

impl Direct {
    /// A session that is opened by the first call that needs it. `instance` is no other process's. `make` makes a copier
    /// of a call's memory.
    pub fn new(
        client: &Client,
        instance: String,
        make: impl Fn(PagedCache) -> Result<Copier, CopyError> + Send + Sync + 'static,
    ) -> Self {
        let attach = AttachRequest {
            instance: instance.clone(),
            world_size: 1,
            ..AttachRequest::default()
        };
        Self {
            client: client.clone(),
            engine: Arc::new(client.engine(attach)),
            instance,
            calls: AtomicU64::new(0),
            make: Arc::new(make),
        }
    }

    /// Opens the session now: an error tells that there is no gateway.
    pub async fn attach(&self) -> Result<(), DirectError> {
        self.engine.session().await?;
        Ok(())
    }

    /// Which of these chunks the gateway has, told by `deadline`. Those in the node's memory stay there for `pin`; with
    /// `prefetch` the others come there in the background.
    pub async fn lookup(
        &self,
        space: &Space,
        hashes: &[ChunkHash],
        deadline: Duration,
        pin: Duration,
        prefetch: bool,
    ) -> Result<FoundChunks, DirectError> {
        if space.kind() != Kind::Full {
            return Err(DirectError::Kind(space.kind()));
        }
        if hashes.is_empty() {
            return Ok(FoundChunks::default());
        }
        let (deadline_ms, pin_ms) = (deadline.as_millis().max(1), pin.as_millis());
        let pins = match pin_ms {
            0 => String::new(),
            pin_ms => format!("&pin_ms={pin_ms}"),
        };
        let query = format!("tiers=true&deadline_ms={deadline_ms}&prefetch={prefetch}{pins}");
        Ok(self.client.lookup_space(space, hashes, &query).await?)
    }

    /// Loads leading chunks of a prompt into the memory, until `stop`.
    ///
    /// The memory is this call's until it returns, and the call may not be dropped before.
    pub async fn load(
        &self,
        space: &Space,
        hashes: &[ChunkHash],
        memory: &DirectMemory,
        deadline: Duration,
        stop: impl Future<Output = ()>,
    ) -> Result<DirectLoaded, DirectError> {
        let places = memory.places(hashes.len())?;
        let chunks = hashes.iter().zip(places).map(|(&hash, places)| WantedChunk {
            hash,
            spans: vec![places],
        });
        let kinds = [WantedKind {
            kind: 0,
            chunks: chunks.collect(),
        }];
        let worker = self.worker(space, memory)?;
        let progress = Arc::new(LoadProgress::new([]));
        let id = format!("{}-{}", self.instance, self.calls.fetch_add(1, Ordering::Relaxed));
        let job = LoadJob {
            id: &id,
            kinds: &kinds,
            order: Order::Chunk,
            deadline_ms: Some(u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX)),
            after: None,
        };
        let loading = worker.load(job, &progress);
        tokio::pin!(loading);
        let failed = tokio::select! {
            failed = &mut loading => failed,
            () = stop => {
                worker.close();
                loading.await
            }
        }?;
        let first = failed.into_iter().min_by_key(|failed| failed.index);
        Ok(DirectLoaded {
            chunks: first.as_ref().map_or(hashes.len(), |failed| failed.index),
            reason: first.map(|failed| failed.reason),
        })
    }

    /// Stores leading chunks of a prompt out of the memory. Where they are more than the gateway has room for, the rest
    /// follows when the first ones have left for the lower tiers, until `deadline` or `stop`.
    ///
    /// The memory may not change before the call returns, and the call may not be dropped before.
    pub async fn store(
        &self,
        space: &Space,
        hashes: &[ChunkHash],
        parents: &[ChunkHash],
        memory: &DirectMemory,
        deadline: Duration,
        stop: impl Future<Output = ()>,
    ) -> Result<DirectStored, DirectError> {
        if hashes.len() != parents.len() {
            return Err(DirectError::Parents {
                parents: parents.len(),
                hashes: hashes.len(),
            });
        }
        let places = memory.places(hashes.len())?;
        let named = hashes.iter().zip(parents).zip(places);
        let chunks = named.map(|((&hash, &parent), places)| ComputedChunk {
            hash,
            parent,
            spans: vec![places],
        });
        let chunks: Vec<ComputedChunk> = chunks.collect();
        let worker = self.worker(space, memory)?;
        let until = Instant::now() + deadline;
        let mut is_there = vec![false; hashes.len()];
        let mut left: Vec<usize> = (0..hashes.len()).collect();
        let (mut new, mut refused) = (0, 0);
        tokio::pin!(stop);
        let reason = loop {
            let of_left = left.iter().map(|&index| chunks[index].clone());
            let kinds = [ComputedKind {
                kind: 0,
                chunks: of_left.collect(),
            }];
            let job = StoreJob {
                kinds: &kinds,
                after: None,
                deadline: until.saturating_duration_since(Instant::now()),
            };
            let stored = match worker.store(job, &Hold::default()).await {
                Ok(stored) => stored.into_iter().next().unwrap_or_default(),
                Err(error) if left.len() == hashes.len() => return Err(error.into()),
                Err(error) => break Some(error.to_string()),
            };
            new += stored.stored;
            for &at in &stored.there {
                is_there[left[at]] = true;
            }
            left.retain(|&index| !is_there[index]);
            refused = stored.refused;
            if refused == 0 || stored.error.is_some() || Instant::now() + AGAIN >= until {
                break stored.error;
            }
            // The gateway makes room as chunks reach a lower tier.
            tokio::select! {
                () = tokio::time::sleep(AGAIN) => {}
                () = &mut stop => break None,
            }
        };
        Ok(DirectStored {
            chunks: is_there.iter().take_while(|&&there| there).count(),
            new,
            refused,
            reason,
        })
    }

    /// Waits until S3 has every chunk that was committed before.
    pub async fn flush(&self, deadline: Duration) -> Result<Flushed, DirectError> {
        let deadline_ms = u64::try_from(deadline.as_millis()).unwrap_or(u64::MAX);
        Ok(self.client.flush(Some(deadline_ms)).await?)
    }

    /// The rank of one call.
    fn worker(&self, space: &Space, memory: &DirectMemory) -> Result<Worker, DirectError> {
        let pages = KindPages {
            space: space.clone(),
            is_draft: false,
            groups: vec![memory.cache.clone()],
        };
        let make = Arc::clone(&self.make);
        // A call that the gateway does not answer fails by itself: nothing is paused.
        let breaker = LookupBreaker::new(u32::MAX, Duration::ZERO);
        let worker = Worker::on(
            Arc::clone(&self.engine),
            vec![pages],
            move |cache| make(cache),
            breaker,
        );
        Ok(worker?)
    }
}
