//! A rank's store: reserve, copy out of the pages, commit. The pages are needed until the copies are made.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::pinning::Registered;
use super::worker::{Worker, WorkerError, pin};
use crate::arena::AttachedSlot;
use crate::engine::client::ApiSession;
use crate::engine::copy::cuda::StreamMark;
use crate::engine::copy::{CopyError, CopyJob, Pending, Spans};
use crate::format::ChunkHash;
use crate::protocol::Share;
use crate::protocol::{CommitOutcome, ReserveAnswer, ReserveChunk, ReservedChunk, SlotName};

/// Computed chunks of a prompt, in its order, to store from their pages.
pub struct StoreJob<'a> {
    pub chunks: &'a [ComputedChunk],
    /// The chunks are computed by the work that the engine's stream was given until here.
    pub after: Option<StreamMark>,
    /// Without room in the node by then nothing is stored: the engine wants its pages back.
    pub deadline: Duration,
}

/// A computed chunk, and its place in the pages.
#[derive(Debug, Clone)]
pub struct ComputedChunk {
    pub hash: ChunkHash,
    /// The chunk before, or the root.
    pub parent: ChunkHash,
    pub spans: Spans,
}

/// The outcome of a store.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stored {
    /// Chunks that the node has or will get: stored by this rank, there already, or left to another rank or engine.
    pub there: Vec<usize>,
    /// Number of chunks that this rank stored.
    pub stored: usize,
    /// Number of chunks for which the node had no room, or not all ranks yet.
    pub refused: usize,
}

/// How long a store needs the engine's pages.
#[derive(Default)]
pub struct Hold {
    state: Mutex<Pages>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum Pages {
    /// No page is read yet.
    #[default]
    Wanted,
    Copying,
    Free,
}

impl Worker {
    pub async fn store(&self, store: StoreJob<'_>, hold: &Hold) -> Result<Stored, WorkerError> {
        // However the store ends, no page is read any more.
        let _frees = Frees(hold);
        if self.breaker.is_open() {
            return Err(WorkerError::Paused);
        }
        let reserving = self.reserve(store.chunks);
        tokio::pin!(reserving);
        let in_time = tokio::time::timeout(store.deadline, &mut reserving).await;
        self.breaker.note(in_time.is_ok());
        let reserved = if let Ok(reserved) = in_time {
            reserved
        } else {
            hold.give_up();
            // Slots that it still gets are given back.
            reserving.await
        };
        let (session, pinned, reserved) = reserved?;
        let mut stored = Stored::default();
        let mut named = Vec::new();
        for (index, reserved_chunk) in reserved.chunks.into_iter().enumerate().take(store.chunks.len()) {
            match reserved_chunk {
                ReservedChunk::Slot {
                    slot,
                    generation,
                    offset,
                } => named.push((index, SlotName { slot, generation }, offset)),
                ReservedChunk::Skip { .. } if reserved.ranks_missing => stored.refused += 1,
                ReservedChunk::Skip { skip } if skip == "full" => stored.refused += 1,
                ReservedChunk::Skip { .. } => stored.there.push(index),
            }
        }
        if named.is_empty() {
            return Ok(stored);
        }
        let names = |range: Range<usize>| named[range].iter().map(|&(_, name, _)| name).collect::<Vec<_>>();
        if !hold.begin() {
            session.abort(names(0..named.len())).await?;
            return Err(WorkerError::GivenUp);
        }
        let gathered = self.gather(&session, pinned, &reserved.own, &named, &store).await;
        hold.free();
        let Gathered { good, kept, error } = gathered;
        let mut given_up = names(good..named.len());
        given_up.retain(|name| !kept.contains(name));
        if !given_up.is_empty() {
            session.abort(given_up).await?;
        }
        let committed = session.commit(names(0..good)).await?;
        for (&(index, ..), outcome) in named.iter().zip(&committed.slots) {
            if matches!(outcome, CommitOutcome::Ok { .. }) {
                stored.stored += 1;
                stored.there.push(index);
            }
        }
        stored.there.sort_unstable();
        match error {
            Some(error) => Err(error),
            None => Ok(stored),
        }
    }

    async fn reserve(
        &self,
        chunks: &[ComputedChunk],
    ) -> Result<(Arc<ApiSession>, Registered, ReserveAnswer), WorkerError> {
        let (session, pinned) = self.session().await?;
        let wanted = chunks.iter().map(|chunk| ReserveChunk {
            hash: chunk.hash,
            parent: chunk.parent,
            tokens: None,
        });
        let space = self.space.id().to_string();
        let reserved = session.reserve(&space, wanted.collect()).await?;
        Ok((session, pinned, reserved))
    }

    /// Copies the rank's own share of each chunk into its slot.
    async fn gather(
        &self,
        session: &Arc<ApiSession>,
        pinned: Registered,
        own: &[Share],
        named: &[(usize, SlotName, usize)],
        store: &StoreJob<'_>,
    ) -> Gathered {
        let copier = match self.store_copier(own) {
            Ok(copier) => copier,
            Err(error) => return Gathered::none(error.into()),
        };
        if let Err(error) = pin(Arc::clone(&copier), pinned).await {
            return Gathered::none(error);
        }
        let layout = self.space.layout();
        let mut jobs = Vec::with_capacity(named.len());
        for &(index, name, offset) in named {
            let job = CopyJob {
                planes: 0..layout.planes(),
                spans: store.chunks[index].spans.clone(),
                at: layout.header_len(),
            };
            match session.arena.slot(offset, layout.payload_len()) {
                Ok(slot) => jobs.push((name, slot.kept_by(Arc::clone(session)), job)),
                Err(error) => return Gathered::none(error.into()),
            }
        }
        let after = store.after.clone();
        let copied = tokio::task::spawn_blocking(move || {
            let begin = |(name, slot, job): (SlotName, AttachedSlot, CopyJob)| {
                (name, copier.store(slot, &job, after.as_ref()))
            };
            let pending: Vec<(SlotName, Result<Pending<AttachedSlot>, CopyError>)> =
                jobs.into_iter().map(begin).collect();
            let mut gathered = Gathered::default();
            for (name, copy) in pending {
                match copy.and_then(Pending::wait) {
                    Ok(_) if gathered.error.is_none() => gathered.good += 1,
                    Ok(_) => {}
                    Err(error) => {
                        if matches!(error, CopyError::Kept(_)) {
                            gathered.kept.push(name);
                        }
                        gathered.error = gathered.error.or(Some(error.into()));
                    }
                }
            }
            gathered
        });
        copied.await.unwrap_or_else(|error| Gathered {
            // Some copies may still be under way.
            kept: named.iter().map(|&(_, name, _)| name).collect(),
            ..Gathered::none(error.into())
        })
    }
}

/// The outcome of a store's copies.
#[derive(Default)]
struct Gathered {
    /// Number of leading chunks that are in their slots.
    good: usize,
    /// Slots that the device may still write: neither committed nor aborted. They end with the process.
    kept: Vec<SlotName>,
    error: Option<WorkerError>,
}

impl Gathered {
    fn none(error: WorkerError) -> Self {
        Self {
            error: Some(error),
            ..Self::default()
        }
    }
}

impl Hold {
    pub fn is_free(&self) -> bool {
        *self.lock() == Pages::Free
    }

    /// Gives the engine its pages back: copies that have not begun never will; blocks for those under way.
    pub fn end(&self) {
        self.give_up();
        let mut pages = self.lock();
        while *pages != Pages::Free {
            pages = self.changed.wait(pages).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn give_up(&self) {
        let mut pages = self.lock();
        if *pages == Pages::Wanted {
            *pages = Pages::Free;
        }
    }

    /// Begins to copy. False if the engine has its pages back.
    fn begin(&self) -> bool {
        let mut pages = self.lock();
        let is_wanted = *pages == Pages::Wanted;
        if is_wanted {
            *pages = Pages::Copying;
        }
        is_wanted
    }

    fn free(&self) {
        *self.lock() = Pages::Free;
        self.changed.notify_all();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Pages> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Frees<'a>(&'a Hold);

impl Drop for Frees<'_> {
    fn drop(&mut self) {
        self.0.free();
    }
}
