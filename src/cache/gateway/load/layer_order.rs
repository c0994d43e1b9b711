//! Groups of layers: the first group of all chunks, then the next one. Its guarantees are at
//! [`Order`](crate::protocol::Order).
//!
//! A chunk's first group tells its version and header, so the chunk's other groups wait for that one. The slots of a window
//! are taken in its first step, in the order of the prompt and with the ticket, as in chunk order; what was started needs no
//! more of them. A load has no chunk of a window before it has the ticket, and others may join it only when the window has
//! all of its slots. So two loads can't wait for each other's. The next window's first step starts, like any, when the step
//! before the last has landed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{SetOnce, mpsc};
use tokio::time::Instant;

use super::drive::{Announce, ChunkSource, Drive};
use super::stream::{LoadGone, RunEnd};
use crate::arena::{SLOT_ALIGN, Slot};
use crate::cache::gateway::bucket::Waiting;
use crate::cache::gateway::chunk::LoadedChunk;
use crate::cache::gateway::credit::Spent;
use crate::cache::gateway::fetch::{ChunkFetch, ObjectHead, Part};
use crate::cache::gateway::miss::Miss;
use crate::cache::gateway::tiers::Announcement;
use crate::format::{Section, Space};
use crate::s3::object::ErrorKind;

/// Steps (one group of one window's chunks) that may be under way.
const STEPS_MAX: usize = 2;

/// Number of a load's chunks that go together: those that have room in half of the arena. Then the first step of
/// the next window finds room while the last of this one is under way; and the slots of one window always fit,
/// wherever those that it has already lie: they leave a hole that is larger than the average, which is at least a
/// slot.
pub fn window(space: &Space, chunks: usize, arena_bytes: usize) -> usize {
    let slot_bytes = space.layout().object_len().next_multiple_of(SLOT_ALIGN);
    (arena_bytes / 2 / slot_bytes).clamp(1, chunks.max(1))
}

/// A chunk under way, as the driver sees it.
enum Chunk {
    /// Its groups come from S3.
    Fetched {
        shared: Arc<Shared>,
        /// Parts of the groups that were not started.
        parts: std::vec::IntoIter<Part>,
    },
    /// The chunk comes whole: from memory, from the disk, or because another load fetches it.
    Whole(Whole),
}

/// A chunk's outcome, for all of its groups.
type Whole = Arc<SetOnce<Result<LoadedChunk, Miss>>>;

/// The common part of the tasks of a chunk's groups.
struct Shared {
    wanted: Arc<ChunkFetch>,
    /// The head from the first group, or the reason for its miss.
    head: SetOnce<Result<ObjectHead, Miss>>,
    missed: AtomicBool,
    credit: Option<Spent>,
    landed: Mutex<Landed>,
}

/// The groups that have landed, to keep the chunk when all have.
#[derive(Default)]
struct Landed {
    groups: Vec<Option<Slot>>,
    announcement: Option<Announcement>,
}

impl Drive {
    pub async fn in_layer_order(mut self, window: usize, run_end: RunEnd) {
        // An error means that the stream is gone.
        let _dropped = self.window_by_window(window, &run_end).await;
    }

    async fn window_by_window(&mut self, window: usize, run_end: &RunEnd) -> Result<(), LoadGone> {
        let part_bytes = self.tiers.bucket.options.layer_part_bytes;
        let groups = self.space.layout().layer_groups(part_bytes);
        let mut gate = Gate::default();
        for start in (0..self.chunks.len()).step_by(window) {
            let indices = start..self.chunks.len().min(start + window);
            let mut chunks = Vec::with_capacity(indices.len());
            // All credit before the first slot: a load that has slots and waits for its client may hold up other
            // loads.
            self.spend_for(indices.len()).await;
            for group in 0..groups.len() {
                let step = gate.pass().await;
                if group == 0 {
                    tokio::select! {
                        biased;
                        _ = run_end.clone().passes(start) => {}
                        () = self.all_or_ticket(indices.clone()) => {}
                    }
                }
                for index in indices.clone() {
                    if group == 0 {
                        chunks.push(self.begin(index, &indices, &groups, run_end, &step).await?);
                    } else if let Some(chunk) = &mut chunks[index - start] {
                        self.go_on(index, group, &groups, chunk, run_end, &step)?;
                    }
                }
                // Nor does it keep the ticket while it waits for its own steps.
                self.needs_no_more_slots();
                if group == 0 {
                    let fetched = chunks.iter().enumerate();
                    for (at, shared) in
                        fetched.filter_map(|(at, chunk)| Some((at, chunk.as_ref()?.fetched()?)))
                    {
                        shared.announce(|| self.announce(start + at));
                    }
                }
            }
        }
        Ok(())
    }

    /// Takes a slot for a chunk and starts its first group. None if the chunk is missing or behind the end of the
    /// run.
    async fn begin(
        &mut self,
        index: usize,
        window: &Range<usize>,
        groups: &[Section],
        run_end: &RunEnd,
        step: &StepToken,
    ) -> Result<Option<Chunk>, LoadGone> {
        let (credit, source) = tokio::select! {
            biased;
            _ = run_end.clone().passes(index) => {
                self.needs_no_more_slots();
                return Ok(None);
            }
            source = self.source(index, Announce::Later) => source,
        };
        if index + 1 == self.chunks.len() {
            self.needs_no_more_slots();
        }
        let (slot, announcement) = match source {
            ChunkSource::Missing(miss) => {
                self.send(index, true, async { Err(miss) })?;
                return Ok(None);
            }
            ChunkSource::Memory(chunk) => {
                let whole = Arc::new(SetOnce::new_with(Some(Ok(chunk.with_credit(credit)))));
                self.group_of(index, 0, groups, &whole, run_end)?;
                return Ok(Some(Chunk::Whole(whole)));
            }
            ChunkSource::Flight(flight) => {
                let whole = Whole::default();
                let (joined, told) = (self.joined(index, flight), Arc::clone(&whole));
                let first = groups[0].planes.clone();
                let last = groups.len() == 1;
                // Chunks that other loads fetch hold up no step: those loads may wait for one of ours.
                let run_end = run_end.clone();
                self.send(index, last, async move {
                    let outcome = tokio::select! {
                        biased;
                        at = run_end.passes(index) => Err(Miss::RunEnded { at }),
                        outcome = joined => outcome.map(|chunk| chunk.with_credit(credit)),
                    };
                    // It is set only here.
                    let _ = told.set(outcome.clone());
                    outcome.map(|chunk| chunk.group(first))
                })?;
                return Ok(Some(Chunk::Whole(whole)));
            }
            ChunkSource::S3(slot, announcement) => (slot, announcement),
        };
        let before = window.start * groups.len() + (index - window.start);
        let wanted = self.wanted(index);
        let mut parts = wanted
            .cut(slot, groups, |group| self.place(before + group * window.len()))
            .into_iter();
        let first = parts.next().expect("a layout has sections");
        let waiting = wanted.wait(&first);
        let landed = Landed {
            groups: vec![None; groups.len()],
            announcement,
        };
        let shared = Arc::new(Shared {
            wanted,
            head: SetOnce::new(),
            missed: AtomicBool::new(false),
            credit,
            landed: Mutex::new(landed),
        });
        let fetch = Arc::clone(&shared).first(first, waiting);
        let fetch = Arc::clone(&shared).until(fetch, (index, self.deadline), run_end.clone(), step.clone());
        self.send(index, groups.len() == 1, fetch)?;
        Ok(Some(Chunk::Fetched { shared, parts }))
    }

    /// Sends a group of a chunk that comes whole.
    fn group_of(
        &self,
        index: usize,
        group: usize,
        groups: &[Section],
        whole: &Whole,
        run_end: &RunEnd,
    ) -> Result<(), LoadGone> {
        if matches!(whole.get(), Some(Err(_))) || !run_end.wants(index) {
            return Ok(());
        }
        let (whole, planes) = (Arc::clone(whole), groups[group].planes.clone());
        self.send(index, group + 1 == groups.len(), async move {
            let outcome = whole.wait().await.clone();
            outcome.map(|chunk| chunk.group(planes))
        })
    }

    /// Starts a chunk's next group, if it is still wanted.
    fn go_on(
        &self,
        index: usize,
        group: usize,
        groups: &[Section],
        chunk: &mut Chunk,
        run_end: &RunEnd,
        step: &StepToken,
    ) -> Result<(), LoadGone> {
        let (shared, parts) = match chunk {
            Chunk::Whole(whole) => {
                return self.group_of(index, group, groups, whole, run_end);
            }
            Chunk::Fetched { shared, parts } => (shared, parts),
        };
        if shared.missed.load(Ordering::Relaxed) || !run_end.wants(index) {
            // Dropping the parts frees the slot as soon as no task writes to it any more.
            *parts = Vec::new().into_iter();
        }
        let Some(part) = parts.next() else {
            return Ok(());
        };
        let fetch = Arc::clone(shared).further(part, group);
        let fetch = Arc::clone(shared).until(fetch, (index, self.deadline), run_end.clone(), step.clone());
        self.send(index, group + 1 == groups.len(), fetch)
    }
}

impl Chunk {
    fn fetched(&self) -> Option<&Shared> {
        match self {
            Self::Fetched { shared, .. } => Some(shared),
            Self::Whole(_) => None,
        }
    }
}

impl Shared {
    /// Others may wait for it from here on, if it is still to come.
    fn announce(&self, announce: impl FnOnce() -> Option<Announcement>) {
        let mut landed = self.lock();
        if !landed.groups.is_empty() {
            landed.announcement = announce();
        }
    }

    /// A fetch, up to the end of the run.
    async fn until(
        self: Arc<Self>,
        fetch: impl Future<Output = Result<LoadedChunk, Miss>>,
        (index, deadline): (usize, Instant),
        run_end: RunEnd,
        _step: StepToken,
    ) -> Result<LoadedChunk, Miss> {
        let fetch = async {
            let outcome = fetch.await;
            if let Err(miss) = &outcome
                && let Some(announcement) = self.give_up()
            {
                announcement.tell(Err(miss.clone()));
            }
            outcome
        };
        let ended = tokio::select! {
            biased;
            at = run_end.passes(index) => Miss::RunEnded { at },
            outcome = tokio::time::timeout_at(deadline, fetch) => match outcome {
                Ok(outcome) => return outcome,
                Err(_) => self.wanted.missed(self.wanted.error(ErrorKind::Deadline, "loading a group of layers")),
            },
        };
        // The end of this load ends no others: they go on by themselves.
        drop(self.give_up());
        Err(ended)
    }

    /// Gives up the whole chunk. Returns the announcement if others are still to be told.
    fn give_up(&self) -> Option<Announcement> {
        self.missed.store(true, Ordering::Relaxed);
        let mut landed = self.lock();
        landed.groups.clear();
        landed.announcement.take()
    }

    async fn first(self: Arc<Self>, part: Part, waiting: Waiting) -> Result<LoadedChunk, Miss> {
        let (head, outcome) = match self.land_first(part, waiting).await {
            Ok((head, chunk)) => (Ok(head), Ok(chunk)),
            Err(miss) => (Err(miss.clone()), Err(miss)),
        };
        // It is set only here.
        let _ = self.head.set(head);
        outcome
    }

    async fn land_first(&self, mut part: Part, waiting: Waiting) -> Result<(ObjectHead, LoadedChunk), Miss> {
        let (wanted, kind) = (&self.wanted, self.wanted.guess());
        let etag = wanted.known_etag();
        let mut got = wanted.get(&mut part, etag.as_deref(), kind, waiting).await;
        if etag.is_some() && matches!(&got, Err(error) if error.kind == ErrorKind::Changed) {
            // Stored anew since the lookup.
            let waiting = wanted.wait(&part);
            got = wanted.get(&mut part, None, kind, waiting).await;
        }
        let (version, turn) = got.map_err(|error| wanted.missed(error))?;
        // A second reading queues again.
        drop(turn);
        let head = wanted.head(&mut part, version).await?;
        wanted.check(&mut part, &head).await?;
        wanted.present(&head);
        let chunk = self.landed(0, wanted.loaded([part]));
        Ok((head, chunk))
    }

    async fn further(self: Arc<Self>, mut part: Part, group: usize) -> Result<LoadedChunk, Miss> {
        // This load has the miss from the first group; loads that joined have it from the group that tells them
        // first.
        let head = self.head.wait().await.as_ref().map_err(Miss::clone)?;
        let wanted = &self.wanted;
        let (etag, digest) = (&head.version.etag, head.check.digest());
        let waiting = wanted.wait(&part);
        let got = wanted.get(&mut part, Some(etag), digest, waiting).await;
        let (_, turn) = got.map_err(|error| wanted.missed(error))?;
        drop(turn);
        wanted.check(&mut part, head).await?;
        Ok(self.landed(group, wanted.loaded([part])))
    }

    /// Notes a landed group. With the last one the whole chunk is here, for other loads too.
    fn landed(&self, group: usize, (chunk, slot): (LoadedChunk, Slot)) -> LoadedChunk {
        let mut landed = self.lock();
        if let Some(place) = landed.groups.get_mut(group) {
            *place = Some(slot);
        }
        if !landed.groups.is_empty() && landed.groups.iter().all(Option::is_some) {
            let groups = std::mem::take(&mut landed.groups).into_iter().flatten();
            let object = groups.reduce(|slot, rest| slot.join(&rest));
            let announcement = landed.announcement.take();
            drop(landed);
            if let Some(object) = object {
                let whole = self.wanted.whole(object);
                self.wanted.keep(&whole, None);
                if let Some(announcement) = announcement {
                    announcement.tell(Ok(whole));
                }
            }
        }
        chunk.with_credit(self.credit.clone())
    }

    fn lock(&self) -> MutexGuard<'_, Landed> {
        self.landed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A token held by everything that belongs to a step.
type StepToken = mpsc::Sender<Infallible>;

/// Lets a step start when the one before the last is over.
#[derive(Default)]
struct Gate {
    under_way: VecDeque<mpsc::Receiver<Infallible>>,
}

impl Gate {
    async fn pass(&mut self) -> StepToken {
        if self.under_way.len() == STEPS_MAX
            && let Some(mut oldest) = self.under_way.pop_front()
        {
            // Ends when the last of its tokens is dropped.
            oldest.recv().await;
        }
        let (token, receiver) = mpsc::channel(1);
        self.under_way.push_back(receiver);
        token
    }
}
