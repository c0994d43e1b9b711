//! What a load is asked for, and what it hands out: chunks to bring, and verified planes in their slots.

use std::collections::VecDeque;
use std::ops::Range;

use tokio::time::Instant;

use super::Gateway;
use super::credit::{Credit, Spent};
use super::drive::Drive;
use super::layer_order::window;
use super::stream::LoadStream;
use super::task::Task;
use crate::arena::Slot;
use crate::format::{ChunkHash, Space};
use crate::protocol::Order;
use crate::protocol::Tier;

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
pub struct LoadSpec {
    pub space: Space,
    /// In the order of the prompt.
    pub chunks: Vec<ChunkHash>,
    pub order: Order,
    pub after_miss: AfterMiss,
    pub deadline: Instant,
}

/// Verified planes of a chunk in its slot: all of them in chunk order, those of a group in layer order. The slot is taken
/// until the last clone is dropped of everything that was handed out of it.
#[derive(Debug, Clone)]
pub struct LoadedChunk {
    pub(super) space: Space,
    pub(super) chunk: ChunkHash,
    pub(super) planes: Range<usize>,
    /// Theirs, without the header.
    pub(super) payload: Slot,
    /// Header and payload, if these are all planes and the header is written.
    pub(super) object: Option<Slot>,
    pub(super) tier: Tier,
    /// Of the load that it was loaded for.
    pub(super) credit: Option<Spent>,
}

impl LoadedChunk {
    pub fn hash(&self) -> ChunkHash {
        self.chunk
    }

    pub fn space(&self) -> &Space {
        &self.space
    }

    /// Where it was found.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Header and payload, if all planes are here and the header is written.
    pub fn object(&self) -> Option<&Slot> {
        self.object.as_ref()
    }

    /// Which planes these are.
    pub fn planes(&self) -> Range<usize> {
        self.planes.clone()
    }

    /// The bytes of [`planes`](Self::planes), as `docs/FORMAT.md` orders them: the object's whole payload if these are all.
    pub fn payload(&self) -> Slot {
        self.payload.clone()
    }

    /// The bytes of one of [`planes`](Self::planes): `[head][token][row]`. `index` counts in the whole chunk; panics for one
    /// that is not here.
    pub fn plane(&self, index: usize) -> Slot {
        assert!(
            self.planes.contains(&index),
            "plane {index}, where {:?} are",
            self.planes
        );
        let layout = self.space.layout();
        let (plane, start) = (layout.plane(index), layout.plane(self.planes.start).start);
        self.payload.slice(plane.start - start..plane.end - start)
    }
}

impl LoadedChunk {
    /// Some of its planes.
    pub(super) fn group(&self, planes: Range<usize>) -> Self {
        let layout = self.space.layout();
        let start = layout.plane(self.planes.start).start;
        let bytes = layout.plane(planes.start).start..layout.plane(planes.end - 1).end;
        Self {
            payload: self.payload.slice(bytes.start - start..bytes.end - start),
            object: self.object.clone().filter(|_| planes == self.planes),
            planes,
            ..self.clone()
        }
    }

    pub(super) fn with_credit(mut self, credit: Option<Spent>) -> Self {
        self.credit = credit;
        self
    }
}

impl Gateway {
    /// The same, with a limit on what it holds at a time.
    pub fn load_on_credit(&self, request: LoadSpec, credit: Credit) -> LoadStream {
        self.start(request, Some(credit))
    }

    /// Brings chunks into slots, verified. Needs a tokio runtime; starts at once.
    pub fn load(&self, request: LoadSpec) -> LoadStream {
        self.start(request, None)
    }

    fn start(&self, request: LoadSpec, credit: Option<Credit>) -> LoadStream {
        let chunks = request.chunks.len();
        // Half of either.
        let most = credit
            .as_ref()
            .map_or(usize::MAX, Credit::bytes)
            .min(self.0.arena.size());
        let window = match request.order {
            Order::Chunk => 1,
            Order::Layer => window(&request.space, chunks, most),
        };
        let order = match window {
            // The whole load, however small the arena.
            _ if chunks == 1 => request.order,
            1 => Order::Chunk,
            _ => Order::Layer,
        };
        let after_miss = request.after_miss;
        let (mut drive, steps) = Drive::new(self, request, credit);
        let ready = match order {
            Order::Chunk => drive.begin_with_memory(),
            Order::Layer => VecDeque::new(),
        };
        LoadStream::new(chunks, order, window, after_miss, steps, ready, |run_end| {
            Task::spawn(async move {
                match order {
                    Order::Chunk => drive.in_chunk_order().await,
                    Order::Layer => drive.in_layer_order(window, run_end).await,
                }
            })
        })
    }
}
