//! What the drivers of both orders have in common. A driver gets slots in the order of the prompt and starts the fetches,
//! which it hands to the [`LoadStream`](super::LoadStream) in the order of the outcomes.

use std::future::Future;
use std::sync::Arc;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::fetch::Wanted;
use super::load::{LoadRequest, LoadedChunk};
use super::task::Task;
use super::turns::Place;
use super::{Gateway, Miss};
use crate::arena::{SlotMut, Ticket};
use crate::chunk::{ChunkHash, Space};

/// A load under way.
pub(super) struct Drive {
    pub gateway: Gateway,
    pub space: Space,
    pub chunks: Vec<ChunkHash>,
    deadline: Instant,
    number: u64,
    ticket: Option<Ticket>,
    steps: mpsc::UnboundedSender<Step>,
}

/// An outcome on its way; dropping it ends the fetch.
pub(super) struct Step {
    pub index: usize,
    /// The chunk has no further ones.
    pub last: bool,
    pub fetch: Task<Result<LoadedChunk, Miss>>,
}

/// Nobody wants the outcomes any more.
pub(super) struct Dropped;

impl Drive {
    pub fn new(gateway: &Gateway, request: LoadRequest) -> (Self, mpsc::UnboundedReceiver<Step>) {
        let (steps, receiver) = mpsc::unbounded_channel();
        let drive = Self {
            gateway: gateway.clone(),
            space: request.space,
            chunks: request.chunks,
            deadline: request.deadline,
            number: gateway.0.get_turns.load(),
            ticket: None,
            steps,
        };
        (drive, receiver)
    }

    /// A slot for a chunk, for which only the holder of the ticket may wait. The load keeps it until every chunk has its
    /// slot, so of all loads only the oldest ever waits for one.
    pub async fn slot(&mut self, index: usize) -> Result<SlotMut, Miss> {
        if let Some(miss) = self.gateway.missing(&self.space, &self.chunks[index]) {
            return Err(miss);
        }
        let object_bytes = self.space.layout().object_len();
        let arena = &self.gateway.0.arena;
        let arena_bytes = arena.size();
        if object_bytes > arena_bytes {
            return Err(Miss::ArenaTooSmall {
                object_bytes,
                arena_bytes,
            });
        }
        let ticket = &mut self.ticket;
        let slot = async {
            let ticket = match ticket {
                Some(ticket) => ticket,
                None => ticket.insert(arena.ticket().await),
            };
            ticket.reserve(object_bytes).await
        };
        let slot = tokio::time::timeout_at(self.deadline, slot).await;
        slot.map_err(|_| Miss::ArenaFull)
    }

    /// Lets the next load wait for slots.
    pub fn needs_no_more_slots(&mut self) {
        self.ticket = None;
    }

    pub fn wanted(&self, index: usize) -> Arc<Wanted> {
        let chunk = &self.chunks[index];
        Arc::new(Wanted::new(&self.gateway, &self.space, chunk, self.deadline))
    }

    pub fn place(&self, position: usize) -> Place {
        Place {
            load: self.number,
            position: position as u64,
        }
    }

    pub fn send(
        &self,
        index: usize,
        last: bool,
        fetch: impl Future<Output = Result<LoadedChunk, Miss>> + Send + 'static,
    ) -> Result<(), Dropped> {
        let fetch = Task::spawn(fetch);
        let step = Step { index, last, fetch };
        self.steps.send(step).map_err(|_| Dropped)
    }
}
