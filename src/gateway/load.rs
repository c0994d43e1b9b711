use std::ops::Deref;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::Gateway;
use super::fetch::Wanted;
use crate::arena::{Slot, SlotMut, Ticket};
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
    #[error("this kvgate can't read the object: {0}. Another version wrote it; it is left as it is")]
    Unreadable(HeaderError),
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
            Self::Unreadable(_) => "unreadable",
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

type Fetch = Task<Result<LoadedChunk, Miss>>;

/// The outcomes of a load, in prompt order, each as soon as it and those before it are known. Dropping it gives up
/// the rest.
pub struct LoadStream {
    chunks: usize,
    next: usize,
    after_miss: AfterMiss,
    ended_at: Option<usize>,
    fetches: mpsc::UnboundedReceiver<Fetch>,
    /// Chunk `next`'s, once it is here.
    current: Option<Fetch>,
    driver: Task<()>,
}

impl LoadStream {
    /// The next chunk of the prompt; None after the last. Cancel safe: dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<(usize, Result<LoadedChunk, Miss>)> {
        if self.next == self.chunks {
            return None;
        }
        let outcome = match self.ended_at {
            Some(at) => Err(Miss::RunEnded { at }),
            None => self.outcome().await,
        };
        // No await from here on.
        let index = self.next;
        self.next += 1;
        self.current = None;
        if outcome.is_err() && self.ended_at.is_none() && self.after_miss == AfterMiss::Stop {
            self.ended_at = Some(index);
            // Ends what is under way, and gives the ticket back.
            self.driver.0.abort();
            self.fetches.close();
            while self.fetches.try_recv().is_ok() {}
        }
        Some((index, outcome))
    }

    async fn outcome(&mut self) -> Result<LoadedChunk, Miss> {
        if self.current.is_none() {
            self.current = self.fetches.recv().await;
        }
        let outcome = match &mut self.current {
            Some(fetch) => fetch.join().await,
            None => None,
        };
        outcome.unwrap_or_else(|| {
            let lost = ObjectError::new(
                Operation::Get,
                "a load",
                ErrorKind::Broken,
                "its task ended early",
            );
            Err(Miss::Unknown(Arc::new(lost)))
        })
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
            current: None,
            driver,
        }
    }

    /// Gets a slot for each chunk, in order, and starts its fetch.
    async fn drive(&self, request: LoadRequest, fetches: mpsc::UnboundedSender<Fetch>) {
        let LoadRequest {
            space,
            chunks,
            deadline,
            ..
        } = request;
        let object_bytes = space.layout().object_len();
        let mut ticket = None;
        for chunk in chunks {
            let slot = match self.missing(&space, &chunk) {
                Some(miss) => Err(miss),
                None => self.slot(&mut ticket, object_bytes, deadline).await,
            };
            let wanted = Wanted::new(self, &space, &chunk, deadline);
            let fetch = Task(tokio::spawn(async move { wanted.fetch(slot?).await }));
            if fetches.send(fetch).is_err() {
                return;
            }
        }
    }

    /// A slot, for which only the holder of the ticket may wait. It is held until every chunk has its slot, so of all
    /// loads only the oldest ever waits for one.
    async fn slot(
        &self,
        ticket: &mut Option<Ticket>,
        object_bytes: usize,
        deadline: Instant,
    ) -> Result<SlotMut, Miss> {
        let arena_bytes = self.0.arena.size();
        if object_bytes > arena_bytes {
            return Err(Miss::ArenaTooSmall {
                object_bytes,
                arena_bytes,
            });
        }
        let slot = async {
            if ticket.is_none() {
                *ticket = Some(self.0.arena.ticket().await);
            }
            match ticket {
                Some(ticket) => Some(ticket.reserve(object_bytes).await),
                None => None,
            }
        };
        tokio::time::timeout_at(deadline, slot)
            .await
            .ok()
            .flatten()
            .ok_or(Miss::ArenaFull)
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
