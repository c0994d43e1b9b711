//! The common part of the drivers of both orders. A driver gets slots in the order of the prompt and starts the
//! fetches, which it hands to the [`LoadStream`](super::LoadStream) in the order of the outcomes.

use std::collections::VecDeque;
use std::future::Future;
use std::ops::Range;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::Instant;

use super::spec::LoadSpec;
use super::stream::{LoadGone, LoadStep};
use crate::arena::{SlotMut, Ticket};
use crate::cache::gateway::bucket::TurnPosition;
use crate::cache::gateway::chunk::LoadedChunk;
use crate::cache::gateway::credit::{Credit, Spent};
use crate::cache::gateway::fetch::{ChunkFetch, WholeFetch};
use crate::cache::gateway::lower::resident;
use crate::cache::gateway::miss::Miss;
use crate::cache::gateway::task::Task;
use crate::cache::gateway::tiers::{Announcement, Flight, Tiers};
use crate::format::{ChunkHash, Section, Space};
use crate::metrics::trace;
use crate::s3::object::ErrorKind;

/// A load under way.
pub struct Drive {
    pub tiers: Arc<Tiers>,
    pub space: Space,
    pub chunks: Arc<[ChunkHash]>,
    /// The first chunk for the driver; those before need none.
    pub first: usize,
    /// Of each chunk in chunk order.
    pub sections: Arc<[Section]>,
    pub deadline: Instant,
    number: u64,
    ticket: Option<Ticket>,
    credit: Option<Credit>,
    /// Credit spent already, for chunks that come next.
    spent: VecDeque<Spent>,
    /// Found already, of chunks that come next.
    found: VecDeque<ChunkSource>,
    steps: mpsc::UnboundedSender<LoadStep>,
}

/// The source of a chunk.
pub enum ChunkSource {
    Missing(Miss),
    Memory(LoadedChunk),
    /// On its way already, or from the disk.
    Flight(Arc<Flight>),
    /// S3, into this slot. Others are told of it, unless that was to wait.
    S3(SlotMut, Option<Announcement>),
}

/// When others are told that a chunk comes from S3, and may wait for it.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Announce {
    Now,
    /// Later, by [`Drive::announce`], when this load needs no more slots. A load that waits for this chunk may have the very
    /// slots that the other chunks of this load wait for.
    Later,
}

impl Drive {
    pub fn new(
        tiers: &Arc<Tiers>,
        request: LoadSpec,
        credit: Option<Credit>,
    ) -> (Self, mpsc::UnboundedReceiver<LoadStep>) {
        let (steps, receiver) = mpsc::unbounded_channel();
        let layout = request.space.layout();
        let part_bytes = tiers
            .bucket
            .options
            .part_bytes_of(layout.object_len().saturating_mul(request.chunks.len()));
        let drive = Self {
            tiers: Arc::clone(tiers),
            sections: layout.sections(part_bytes).into(),
            space: request.space,
            chunks: request.chunks.into(),
            first: 0,
            deadline: request.deadline,
            number: tiers.bucket.get_turns.load(),
            ticket: None,
            credit,
            spent: VecDeque::new(),
            found: VecDeque::new(),
            steps,
        };
        (drive, receiver)
    }

    /// Takes the leading chunks that are in memory: they need no task.
    pub fn begin_with_memory(&mut self) -> VecDeque<LoadedChunk> {
        let mut ready = VecDeque::new();
        let bytes = self.space.layout().object_len();
        while let Some(chunk) = self.chunks.get(self.first) {
            let credit = match &self.credit {
                Some(credit) => match credit.try_spend(bytes) {
                    Some(spent) => Some(spent),
                    None => break,
                },
                None => None,
            };
            let Some(chunk) = self.resident(chunk) else {
                break;
            };
            ready.push_back(chunk.with_credit(credit));
            self.first += 1;
        }
        ready
    }

    /// Finds a chunk's source, with a slot where it needs one; also what it takes of the load's credit.
    ///
    /// Only the holder of the ticket may wait for a slot. The load keeps it until every chunk has its slot, so of all
    /// loads only the oldest ever waits for one. A load that waits for its own client to release something is not
    /// among them.
    pub async fn source(&mut self, index: usize, when: Announce) -> (Option<Spent>, ChunkSource) {
        match self.spend().await {
            Ok(credit) => match self.find(index, when).await {
                Ok(source) => (credit, source),
                Err(miss) => (None, ChunkSource::Missing(miss)),
            },
            Err(miss) => (None, ChunkSource::Missing(miss)),
        }
    }

    /// Spends credit for some chunks at once. Without enough credit by the deadline, the chunks miss one by one.
    pub async fn spend_for(&mut self, chunks: usize) {
        // A failure here is reported with the first chunk.
        let _late = self.spend_together(chunks).await;
    }

    async fn spend(&mut self) -> Result<Option<Spent>, Miss> {
        if let Some(spent) = self.spent.pop_front() {
            return Ok(Some(spent));
        }
        self.spend_together(1).await?;
        Ok(self.spent.pop_front())
    }

    /// Spends for all at once, not chunk by chunk: another load of the same engine may want as much.
    async fn spend_together(&mut self, chunks: usize) -> Result<(), Miss> {
        let Some(credit) = self.credit.clone() else {
            return Ok(());
        };
        let bytes = self.space.layout().object_len();
        let spend = credit.spend(bytes, chunks);
        tokio::pin!(spend);
        let spent = match futures::poll!(&mut spend) {
            Poll::Ready(spent) => spent,
            Poll::Pending => {
                self.ticket = None;
                let spent = tokio::time::timeout_at(self.deadline, spend);
                let span = trace::begin("credit");
                let spent = self.tiers.times.credit.of(spent).await;
                trace::end(span, || vec![("chunks", chunks.to_string())]);
                spent.map_err(|_| Miss::NotReleased)?
            }
        };
        self.spent = spent.into();
        Ok(())
    }

    async fn find(&mut self, index: usize, when: Announce) -> Result<ChunkSource, Miss> {
        if let Some(source) = self.found.pop_front() {
            return Ok(source);
        }
        let tiers = Arc::clone(&self.tiers);
        let chunk = self.chunks[index];
        let key = (self.space.key(), chunk);
        if let Some(source) = self.here(&chunk) {
            return Ok(source);
        }
        if !tiers.is_on_disk(&key, Instant::now()) {
            if !tiers.asks_s3() {
                return Err(Miss::Absent);
            }
            if !tiers.a_peer_has(&self.space, &chunk) {
                self.may_be_there(&chunk)?;
            }
        }
        let slot = self.slot().await?;
        // Another load may have brought it during the wait.
        if let Some(source) = self.here(&chunk) {
            return Ok(source);
        }
        let is_on_disk = tiers.is_on_disk(&key, Instant::now());
        // Before others can join the flight: a peer must not wait for it.
        let peer = match is_on_disk {
            true => None,
            false => tiers.asks_peer(&self.space, &chunk),
        };
        let is_alone = when == Announce::Later || !tiers.options.shares_loads;
        if is_alone && !is_on_disk && peer.is_none() {
            return Ok(ChunkSource::S3(slot, None));
        }
        let announcement = match tiers.arriving.announce(key) {
            Ok(announcement) => announcement,
            Err(flight) => return Ok(ChunkSource::Flight(flight)),
        };
        // A chunk that was on its way at the first look, and is here by now.
        if let Some(chunk) = self.resident(&chunk) {
            return Ok(ChunkSource::Memory(chunk));
        }
        if !tiers.is_on_disk(&key, Instant::now()) && peer.is_none() {
            return Ok(ChunkSource::S3(slot, Some(announcement)));
        }
        let (wanted, sections) = (self.wanted(index), Arc::clone(&self.sections));
        let place = self.place(index * sections.len());
        // Half of this load's time is left for S3. The fetch may have more, for others.
        let peer = peer.map(|peer| (peer, Instant::now() + self.time_left() / 2));
        let fetch = wanted.from_below(slot, sections, place, peer);
        Ok(ChunkSource::Flight(announcement.fly(fetch)))
    }

    /// None: another load brings it as well, and others wait for that one; or each load is by itself.
    pub fn announce(&self, index: usize) -> Option<Announcement> {
        let key = (self.space.key(), self.chunks[index]);
        let announce = || self.tiers.arriving.announce(key).ok();
        self.tiers.options.shares_loads.then(announce).flatten()
    }

    /// For a load that can do without all of these chunks' slots, or with all of them only. It waits for the ticket before
    /// it has the first of them, since the ticket's holder may wait for those that other loads have.
    pub async fn all_or_ticket(&mut self, indices: Range<usize>) {
        let chunks = &self.chunks[indices];
        if chunks.iter().all(|chunk| self.is_here(chunk)) {
            let found: VecDeque<_> = chunks.iter().map_while(|chunk| self.here(chunk)).collect();
            if found.len() == chunks.len() {
                self.found = found;
                return;
            }
        }
        if self.ticket.is_none() {
            let ticket = tokio::time::timeout_at(self.deadline, self.tiers.arena.ticket());
            // Too late, it gets no slots either.
            self.ticket = ticket.await.ok();
        }
    }

    /// Without counting as a use.
    fn is_here(&self, chunk: &ChunkHash) -> bool {
        let key = (self.space.key(), *chunk);
        self.tiers.memory.has(&key) || self.tiers.arriving.join(&key).is_some()
    }

    /// In memory, or on its way there.
    fn here(&self, chunk: &ChunkHash) -> Option<ChunkSource> {
        let resident = self.resident(chunk);
        resident.map(ChunkSource::Memory).or_else(|| {
            let flight = self.tiers.arriving.join(&(self.space.key(), *chunk));
            flight.map(ChunkSource::Flight)
        })
    }

    fn resident(&self, chunk: &ChunkHash) -> Option<LoadedChunk> {
        resident(&self.tiers, &self.space, chunk)
    }

    fn may_be_there(&self, chunk: &ChunkHash) -> Result<(), Miss> {
        self.tiers.bucket.missing(&self.space, chunk).map_or(Ok(()), Err)
    }

    async fn slot(&mut self) -> Result<SlotMut, Miss> {
        let object_bytes = self.space.layout().object_len();
        let arena = &self.tiers.arena;
        let arena_bytes = arena.slot_bytes_max();
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
            ticket.reserve_unless_stuck(object_bytes).await
        };
        let span = trace::begin("slot");
        let slot = tokio::time::timeout_at(self.deadline, slot);
        let slot = self.tiers.times.arena.of(slot).await;
        trace::end(span, || vec![("bytes", object_bytes.to_string())]);
        slot.ok().flatten().ok_or(Miss::ArenaFull)
    }

    /// Lets the next load wait for slots.
    pub fn needs_no_more_slots(&mut self) {
        self.ticket = None;
    }

    /// The chunk of a flight. If the flight was given up, it is fetched anew if there is a slot; waiting for one
    /// here would be waiting out of turn.
    pub fn joined(
        &self,
        index: usize,
        flight: Arc<Flight>,
    ) -> impl Future<Output = Result<LoadedChunk, Miss>> + Send + 'static {
        let (wanted, sections, place) = (self.wanted(index), Arc::clone(&self.sections), self.place(index));
        let (tiers, space, chunk) = (Arc::clone(&self.tiers), self.space.clone(), self.chunks[index]);
        let (deadline, half) = (self.deadline, Instant::now() + self.time_left() / 2);
        async move {
            let span = trace::begin("flight");
            let waiting = async {
                match tokio::time::timeout_at(half, flight.outcome()).await {
                    Ok(outcome) => Ok(outcome),
                    // The other load may have more time for the peer than this one: half of it is left for S3.
                    Err(_) if tiers.is_asking_peer(&space, &(space.key(), chunk)) => Ok(None),
                    Err(_) => tokio::time::timeout_at(deadline, flight.outcome()).await,
                }
            };
            let outcome = tiers.times.flight.of(waiting).await;
            trace::end(span, || vec![("index", index.to_string())]);
            match outcome {
                // The deadline may have been another load's.
                Ok(Some(Err(Miss::Unknown(error)))) if error.kind == ErrorKind::Deadline => {
                    if Instant::now() >= deadline {
                        return Err(Miss::Unknown(error));
                    }
                }
                Ok(Some(outcome)) => return outcome,
                Ok(None) => {}
                Err(_) => {
                    let late =
                        wanted.error(ErrorKind::Deadline, "waiting for another load of the same chunk");
                    return Err(wanted.missed(late));
                }
            }
            // The chunk may have come another way, and not be on S3.
            if let Some(here) = resident(&tiers, &space, &chunk) {
                return Ok(here);
            }
            match tiers.arena.try_reserve(space.layout().object_len()) {
                Some(slot) => WholeFetch::new(wanted, slot, &sections, |_| place).fetch().await,
                None => Err(Miss::ArenaFull),
            }
        }
    }

    pub fn wanted(&self, index: usize) -> Arc<ChunkFetch> {
        let chunk = &self.chunks[index];
        // Other loads with more time may wait for it.
        let deadline = self
            .deadline
            .max(Instant::now() + self.tiers.options.load_deadline);
        Arc::new(ChunkFetch::new(&self.tiers, &self.space, chunk, deadline))
    }

    fn time_left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    pub fn place(&self, position: usize) -> TurnPosition {
        TurnPosition {
            load: self.number,
            position: position as u64,
        }
    }

    pub fn send(
        &self,
        index: usize,
        last: bool,
        fetch: impl Future<Output = Result<LoadedChunk, Miss>> + Send + 'static,
    ) -> Result<(), LoadGone> {
        let fetch = Task::spawn(fetch);
        let step = LoadStep { index, last, fetch };
        self.steps.send(step).map_err(|_| LoadGone)
    }
}
