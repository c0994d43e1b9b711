use std::ops::Deref;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::Gateway;
use crate::arena::Slot;
use crate::chunk::{ChunkHash, Header, HeaderError, Space};
use crate::object::{ErrorKind, ObjectError, Operation};

/// What a load does once a chunk is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterMiss {
    /// Ends: what an engine can use is the leading run.
    Stop,
    /// Loads the others all the same.
    Continue,
}

/// Chunks to bring into slots.
#[derive(Debug, Clone)]
pub struct LoadRequest {
    pub space: Space,
    /// In the order of the prompt.
    pub chunks: Vec<ChunkHash>,
    pub after_miss: AfterMiss,
    pub deadline: Instant,
}

/// A verified chunk in its slot, which is taken until the last clone is dropped.
#[derive(Debug, Clone)]
pub struct LoadedChunk {
    pub(super) space: Space,
    pub(super) header: Header,
    pub(super) object: Slot,
}

/// Why a chunk was not loaded. Nothing of it reaches the caller.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Miss {
    #[error("there is no such chunk")]
    Absent,
    #[error("the object is damaged: its length is wrong ({0})")]
    WrongLength(Arc<ObjectError>),
    #[error("the object is damaged: {0}")]
    BadHeader(HeaderError),
    #[error("the object is not this chunk: {0}")]
    Foreign(HeaderError),
    #[error("the object is damaged: the digest of plane {plane} does not match")]
    BadDigest { plane: usize },
    #[error("the object is known to be damaged")]
    Quarantined,
    #[error("the object was replaced while it was read")]
    Replaced,
    #[error("nobody can tell: {0}")]
    Unknown(Arc<ObjectError>),
    #[error("an object has {object_bytes} bytes, the arena {arena_bytes}: raise [arena] size")]
    ArenaTooSmall { object_bytes: usize, arena_bytes: usize },
    #[error("no slot became free before the deadline: release chunks earlier, or raise [arena] size")]
    ArenaFull,
    #[error("not tried, because chunk {at} of the prompt is missing")]
    RunEnded { at: usize },
}

impl Miss {
    /// Stable word for the reason.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Absent => "absent",
            Self::WrongLength(_) => "wrong_length",
            Self::BadHeader(_) => "bad_header",
            Self::Foreign(HeaderError::OtherSpace(_)) => "foreign_space",
            Self::Foreign(_) => "foreign_chunk",
            Self::BadDigest { .. } => "bad_digest",
            Self::Quarantined => "quarantined",
            Self::Replaced => "replaced",
            Self::Unknown(_) => "unknown",
            Self::ArenaTooSmall { .. } => "arena_too_small",
            Self::ArenaFull => "arena_full",
            Self::RunEnded { .. } => "run_ended",
        }
    }
}

impl LoadedChunk {
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// All planes, as `docs/FORMAT.md` orders them.
    pub fn payload(&self) -> Slot {
        self.object
            .slice(self.space.layout().header_len()..self.object.len())
    }

    /// The bytes of one plane: `[head][token][row]`.
    pub fn plane(&self, index: usize) -> Slot {
        self.object.slice(self.space.layout().plane(index))
    }
}

/// The outcomes of a load, in prompt order, each as soon as it and those before it are known. Dropping it gives up
/// the rest.
pub struct LoadStream {
    chunks: usize,
    next: usize,
    after_miss: AfterMiss,
    ended_at: Option<usize>,
    fetches: mpsc::UnboundedReceiver<Task<Result<LoadedChunk, Miss>>>,
    _driver: Task<()>,
}

impl LoadStream {
    /// The next chunk of the prompt; None after the last.
    pub async fn next(&mut self) -> Option<(usize, Result<LoadedChunk, Miss>)> {
        if self.next == self.chunks {
            return None;
        }
        let index = self.next;
        self.next += 1;
        if let Some(at) = self.ended_at {
            return Some((index, Err(Miss::RunEnded { at })));
        }
        let outcome = match self.fetches.recv().await {
            Some(mut fetch) => fetch.join().await,
            None => None,
        };
        let outcome = outcome.unwrap_or_else(|| {
            let lost = ObjectError::new(
                Operation::Get,
                "a load",
                ErrorKind::Broken,
                "its task ended early",
            );
            Err(Miss::Unknown(Arc::new(lost)))
        });
        if outcome.is_err() && self.after_miss == AfterMiss::Stop {
            self.ended_at = Some(index);
            // Aborts what is under way; closing first keeps the driver from adding more.
            self.fetches.close();
            while self.fetches.try_recv().is_ok() {}
        }
        Some((index, outcome))
    }

    /// All outcomes. Every loaded chunk keeps its slot meanwhile, so they must fit in the arena together.
    pub async fn collect(mut self) -> Vec<Result<LoadedChunk, Miss>> {
        let mut outcomes = Vec::with_capacity(self.chunks);
        while let Some((_, outcome)) = self.next().await {
            outcomes.push(outcome);
        }
        outcomes
    }
}

impl Gateway {
    /// Brings chunks into slots, verified, in prompt order. Needs a tokio runtime; starts at once.
    pub fn load(&self, request: LoadRequest) -> LoadStream {
        let (sender, fetches) = mpsc::unbounded_channel();
        let (chunks, after_miss) = (request.chunks.len(), request.after_miss);
        let gateway = self.clone();
        let driver = Task(tokio::spawn(async move { gateway.drive(request, sender).await }));
        LoadStream {
            chunks,
            next: 0,
            after_miss,
            ended_at: None,
            fetches,
            _driver: driver,
        }
    }

    /// Gets a slot for each chunk, in order, and starts its fetch.
    async fn drive(
        &self,
        request: LoadRequest,
        fetches: mpsc::UnboundedSender<Task<Result<LoadedChunk, Miss>>>,
    ) {
        let LoadRequest {
            space,
            chunks,
            deadline,
            ..
        } = request;
        let (object_bytes, arena_bytes) = (space.layout().object_len(), self.0.arena.size());
        // Held until every chunk has its slot, so of all loads only the oldest ever waits for one.
        let ticket = tokio::time::timeout_at(deadline, self.0.arena.ticket()).await;
        for chunk in chunks {
            let slot = match &ticket {
                _ if object_bytes > arena_bytes => Err(Miss::ArenaTooSmall {
                    object_bytes,
                    arena_bytes,
                }),
                Ok(ticket) => {
                    let slot = tokio::time::timeout_at(deadline, ticket.reserve(object_bytes)).await;
                    slot.map_err(|_| Miss::ArenaFull)
                }
                Err(_) => Err(Miss::ArenaFull),
            };
            let (gateway, space) = (self.clone(), space.clone());
            let fetch = Task(tokio::spawn(async move {
                gateway.fetch(&space, &chunk, slot?, deadline).await
            }));
            if fetches.send(fetch).is_err() {
                return;
            }
        }
    }
}

/// A task that ends with its handle.
struct Task<T>(JoinHandle<T>);

impl<T> Task<T> {
    /// None if it panicked.
    async fn join(&mut self) -> Option<T> {
        (&mut self.0).await.ok()
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

impl Deref for LoadedChunk {
    type Target = Slot;

    /// The whole object.
    fn deref(&self) -> &Slot {
        &self.object
    }
}
