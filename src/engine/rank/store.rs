//! A rank's store: reserve, copy out of the pages, commit. The pages are needed until the copies are made.

use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use futures::future::join_all;

use super::pinning::Registered;
use super::worker::{Worker, WorkerError, pin};
use crate::arena::AttachedSlot;
use crate::engine::client::ApiSession;
use crate::engine::copy::{Copier, CopyError, CopyJob, Mark, Pending, Spans, wait_for_all};
use crate::format::ChunkHash;
use crate::protocol::{CommitOutcome, ReserveAnswer, ReserveChunk, ReservedChunk, Share, SlotName};

/// Computed chunks of a prompt to store from their pages.
pub struct StoreJob<'a> {
    /// Each kind is reserved and committed for itself.
    pub kinds: &'a [ComputedKind],
    /// The chunks are computed by the work that the engine's stream was given until here.
    pub after: Option<Mark>,
    /// Without room in the node by then nothing is stored: the engine wants its pages back.
    pub deadline: Duration,
}

/// Computed chunks of one kind, in the order of the prompt.
#[derive(Debug, Clone)]
pub struct ComputedKind {
    /// Index in the worker's kinds.
    pub kind: usize,
    pub chunks: Vec<ComputedChunk>,
}

/// A computed chunk, and its place in the pages of each of the kind's groups.
#[derive(Debug, Clone)]
pub struct ComputedChunk {
    pub hash: ChunkHash,
    /// The chunk before, or the root.
    pub parent: ChunkHash,
    pub spans: Vec<Spans>,
}

/// The outcome of a store, for one kind.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Stored {
    /// Index in the worker's kinds.
    pub kind: usize,
    /// Chunks that the node has or will get: stored by this rank, there already, or left to another rank or engine.
    pub there: Vec<usize>,
    /// Number of chunks that this rank stored.
    pub stored: usize,
    /// Number of chunks for which the node had no room, or not all ranks yet.
    pub refused: usize,
    /// The reason why some chunks are not there, other than that they were refused.
    pub error: Option<String>,
}

/// How long a store needs the engine's pages.
#[derive(Default)]
pub struct Hold {
    state: Mutex<PagesState>,
    changed: Condvar,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
enum PagesState {
    /// No page is read yet.
    #[default]
    Wanted,
    Copying,
    Free,
}

/// Chunks of one kind that have slots.
struct Slots<'a> {
    computed: &'a ComputedKind,
    /// What is known of the kind's outcome so far.
    stored: Stored,
    own: Vec<Share>,
    /// Index in the kind's chunks, slot, and the payload's offset in the arena.
    named: Vec<(usize, SlotName, usize)>,
}

impl Worker {
    /// Returns the outcome of each kind, in the order of the job.
    pub async fn store(&self, store: StoreJob<'_>, hold: &Hold) -> Result<Vec<Stored>, WorkerError> {
        // However the store ends, no page is read any more.
        let _frees = Frees(hold);
        for computed in store.kinds {
            let tables = computed.chunks.iter().map(|chunk| chunk.spans.len());
            self.check_tables(computed.kind, tables)?;
        }
        if self.breaker.is_open() {
            return Err(WorkerError::Paused);
        }
        let reserving = self.reserve(store.kinds);
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
        let (session, pinned, kinds) = reserved?;
        if kinds.iter().all(|kind| kind.named.is_empty()) {
            return Ok(kinds.into_iter().map(|kind| kind.stored).collect());
        }
        if !hold.begin() {
            let aborts = kinds.iter().map(|kind| session.abort(kind.names()));
            for aborted in join_all(aborts).await {
                aborted?;
            }
            return Err(WorkerError::GivenUp);
        }
        let gathers = kinds
            .iter()
            .map(|kind| self.gather(&session, pinned.clone(), kind, &store));
        let gathered = join_all(gathers).await;
        hold.free();
        let commits = kinds.into_iter().zip(gathered);
        Ok(join_all(commits.map(|(kind, gathered)| kind.commit(&session, gathered))).await)
    }

    async fn reserve<'a>(
        &self,
        kinds: &'a [ComputedKind],
    ) -> Result<(Arc<ApiSession>, Registered, Vec<Slots<'a>>), WorkerError> {
        let (session, pinned) = self.session().await?;
        let reserve = async |computed: &'a ComputedKind| {
            let wanted = computed.chunks.iter().map(|chunk| ReserveChunk {
                hash: chunk.hash,
                parent: chunk.parent,
                tokens: None,
            });
            let space = self.kinds[computed.kind].space.id().to_string();
            let mut slots = Slots {
                computed,
                stored: Stored {
                    kind: computed.kind,
                    ..Stored::default()
                },
                own: Vec::new(),
                named: Vec::new(),
            };
            if computed.chunks.is_empty() {
                return slots;
            }
            match session.reserve(&space, wanted.collect()).await {
                Ok(reserved) => slots.take(reserved),
                Err(error) => slots.stored.error = Some(error.to_string()),
            }
            slots
        };
        let reserved = join_all(kinds.iter().map(reserve)).await;
        Ok((session, pinned, reserved))
    }

    /// Copies the rank's own share of each chunk into its slot.
    async fn gather(
        &self,
        session: &Arc<ApiSession>,
        pinned: Registered,
        slots: &Slots<'_>,
        store: &StoreJob<'_>,
    ) -> Gathered {
        if slots.named.is_empty() {
            return Gathered::default();
        }
        let kind = &self.kinds[slots.computed.kind];
        let copiers = match kind.own_copiers(&slots.own, &self.make) {
            Ok(copiers) => copiers,
            Err(error) => return Gathered::none(error.into()),
        };
        let all = copiers.iter().map(|(_, copier)| Arc::clone(copier)).collect();
        if let Err(error) = pin(all, pinned).await {
            return Gathered::none(error);
        }
        let layout = kind.space.layout();
        let mut jobs = Vec::with_capacity(slots.named.len());
        for &(index, name, offset) in &slots.named {
            let mut of_chunk = Vec::with_capacity(copiers.len());
            for (group, copier) in &copiers {
                let job = CopyJob {
                    planes: 0..layout.planes(),
                    spans: slots.computed.chunks[index].spans[*group].only(copier.cache().tokens()),
                    at: layout.header_len(),
                };
                match session.arena.slot(offset, layout.payload_len()) {
                    Ok(slot) => {
                        of_chunk.push((Arc::clone(copier), slot.kept_by(Arc::clone(session)), job));
                    }
                    Err(error) => return Gathered::none(error.into()),
                }
            }
            jobs.push((name, of_chunk));
        }
        let after = store.after.clone();
        let copied = tokio::task::spawn_blocking(move || gather_all(jobs, after.as_ref()));
        copied.await.unwrap_or_else(|error| Gathered {
            // Some copies may still be under way.
            kept: slots.names(),
            ..Gathered::none(error.into())
        })
    }
}

type GroupCopy = (Arc<Copier>, AttachedSlot, CopyJob);
type Begun = Result<Pending<AttachedSlot>, CopyError>;

/// Begins all copies, then waits for them. A chunk is in its slot when the copies of all groups are.
fn gather_all(jobs: Vec<(SlotName, Vec<GroupCopy>)>, after: Option<&Mark>) -> Gathered {
    let begin = |(copier, slot, job): GroupCopy| copier.store(slot, &job, after);
    let begun: Vec<(SlotName, Vec<Begun>)> = jobs
        .into_iter()
        .map(|(name, of_chunk)| (name, of_chunk.into_iter().map(begin).collect()))
        .collect();
    let mut gathered = Gathered::default();
    for (name, of_chunk) in begun {
        let (mut pending, mut failed) = (Vec::new(), None);
        for copy in of_chunk {
            match copy {
                Ok(copy) => pending.push(copy),
                Err(error) => failed = worse(failed, error),
            }
        }
        if let Err(error) = wait_for_all(pending) {
            failed = worse(failed, error);
        }
        match failed {
            None if gathered.error.is_none() => gathered.good += 1,
            None => {}
            Some(error) => {
                if matches!(error, CopyError::Kept(_)) {
                    gathered.kept.push(name);
                }
                gathered.error = gathered.error.or(Some(error.into()));
            }
        }
    }
    gathered
}

/// The error that says more of the slot: that the device may still use it, or the first.
fn worse(before: Option<CopyError>, error: CopyError) -> Option<CopyError> {
    match error {
        CopyError::Kept(_) => Some(error),
        _ => before.or(Some(error)),
    }
}

impl Slots<'_> {
    fn take(&mut self, reserved: ReserveAnswer) {
        let ranks_missing = reserved.ranks_missing;
        let chunks = reserved.chunks.into_iter().take(self.computed.chunks.len());
        for (index, chunk) in chunks.enumerate() {
            match chunk {
                ReservedChunk::Slot {
                    slot,
                    generation,
                    offset,
                } => self.named.push((index, SlotName { slot, generation }, offset)),
                ReservedChunk::Skip { .. } if ranks_missing => self.stored.refused += 1,
                ReservedChunk::Skip { skip } if skip == "full" => self.stored.refused += 1,
                ReservedChunk::Skip { .. } => self.stored.there.push(index),
            }
        }
        self.own = reserved.own;
    }

    fn names(&self) -> Vec<SlotName> {
        self.named.iter().map(|&(_, name, _)| name).collect()
    }

    /// Commits what was copied, and gives the other slots up. After an error of a copy none of the kind's chunks
    /// counts as there: all are stored again.
    async fn commit(self, session: &ApiSession, gathered: Gathered) -> Stored {
        let mut stored = self.stored.clone();
        if self.named.is_empty() {
            return stored;
        }
        if let Err(error) = self.try_commit(session, gathered, &mut stored).await {
            stored = Stored {
                kind: stored.kind,
                error: Some(error.to_string()),
                ..Stored::default()
            };
        }
        stored
    }

    async fn try_commit(
        &self,
        session: &ApiSession,
        gathered: Gathered,
        stored: &mut Stored,
    ) -> Result<(), WorkerError> {
        let Gathered { good, kept, error } = gathered;
        let names = self.names();
        let mut given_up = names[good..].to_vec();
        given_up.retain(|name| !kept.contains(name));
        // Whatever becomes of those, the good ones are committed.
        let aborted = match given_up.is_empty() {
            true => Ok(()),
            false => session.abort(given_up).await.map(drop),
        };
        let committed = session.commit(names[..good].to_vec()).await?;
        aborted?;
        for (&(index, ..), outcome) in self.named.iter().zip(&committed.slots) {
            if matches!(outcome, CommitOutcome::Ok { .. }) {
                stored.stored += 1;
                stored.there.push(index);
            }
        }
        stored.there.sort_unstable();
        error.map_or(Ok(()), Err)
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
        *self.lock() == PagesState::Free
    }

    /// Gives the engine its pages back: copies that have not begun never will; blocks for those under way.
    pub fn end(&self) {
        self.give_up();
        let mut pages = self.lock();
        while *pages != PagesState::Free {
            pages = self.changed.wait(pages).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn give_up(&self) {
        let mut pages = self.lock();
        if *pages == PagesState::Wanted {
            *pages = PagesState::Free;
        }
    }

    /// Begins to copy. False if the engine has its pages back.
    fn begin(&self) -> bool {
        let mut pages = self.lock();
        let is_wanted = *pages == PagesState::Wanted;
        if is_wanted {
            *pages = PagesState::Copying;
        }
        is_wanted
    }

    fn free(&self) {
        *self.lock() = PagesState::Free;
        self.changed.notify_all();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, PagesState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Frees<'a>(&'a Hold);

impl Drop for Frees<'_> {
    fn drop(&mut self) {
        self.0.free();
    }
}
