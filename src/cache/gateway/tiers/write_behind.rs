//! Chunks that were committed and are not on the lower tiers yet. They go there in the order of their commits, and
//! each is tried again until it is there: the engine that committed it has long gone on.
//!
//! The bytes are bounded, including those that engines only reserved. When they are used up, new chunks are
//! refused, or the deepest descendants whose turn has not come are given up: the rest of a chain is of use without
//! them, but never the other way round. Heads of chains are not given up. A snapshot of a state is as deep as the chain
//! of its prompt in the model's other kinds, and given up before the chunk that it follows. Chunks that were given up are remembered
//! for a while, so that no chunk of a full kind is stored whose parent is not; they are taken up again when an engine
//! wants to store them once more. Windows and snapshots of states have no such chain: a later one is of use without
//! those before.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Notify, oneshot};
use tokio::task::AbortHandle;
use tokio::time::Instant;

use crate::arena::Slot;
use crate::cache::gateway::bucket::StoreOutcome;
use crate::cache::recent::Recent;
use crate::cache::tier::Memory;
use crate::format::{ChunkHash, ChunkId, Kind, Space, SpaceKey};
use crate::metrics::trace::{self, OpenSpan};
use crate::protocol::{Flushed, WhenFull};
use serde::Serialize;

/// Limits of the write-behind.
#[derive(Debug, Clone, Copy)]
pub struct BehindOptions {
    /// Limit of bytes committed and not stored, or reserved.
    pub bytes_max: usize,
    pub when_full: WhenFull,
    /// Time limit of one attempt to store a chunk, after which it waits and tries again.
    pub deadline: Duration,
    /// The first wait; it doubles up to `retry_max`.
    pub retry_base: Duration,
    pub retry_max: Duration,
}

pub struct Behind {
    options: BehindOptions,
    state: Mutex<State>,
    /// Notified when an entry or a backlog chunk has ended.
    changed: Notify,
    /// Notified when pauses end.
    hurry: Notify,
}

struct State {
    entries: BTreeMap<u64, Entry>,
    /// By hash, which all kinds of a model share, then by space.
    chunks: HashMap<ChunkHash, HashMap<SpaceKey, u64>>,
    committed: u64,
    /// The turn of the entries up to this one has come.
    started: u64,
    /// Flushes that wait.
    flushes: u32,
    room_bytes: usize,
    /// Chunks that were given up.
    dropped: Recent<()>,
    /// Chunks that only a disk has, still to be sent from there: none of them has an entry.
    backlog: HashSet<ChunkId>,
    /// Whether a task is starting jobs whose turn comes.
    dispatching: bool,
    stats: BehindStats,
}

/// Number of given-up chunks that are remembered.
const DROPPED_MAX: usize = 1 << 16;

struct Entry {
    key: ChunkId,
    parent: Option<ChunkHash>,
    bytes: usize,
    /// Number of chunks before it in the chain that wait as well, or did when it came.
    depth: u32,
    is_snapshot: bool,
    /// The job; None once its turn has come.
    job: Option<WriteBehindJob>,
    /// The task that does it.
    task: Option<AbortHandle>,
    /// That of the job.
    not_before: Option<Instant>,
}

/// A chunk on its way down.
pub struct WriteBehindJob {
    pub space: Space,
    pub object: Sealed,
    pub since: Instant,
    /// From the commit to the tier below, in the trace of the call that committed the chunk.
    pub span: Option<OpenSpan>,
    /// The admission was asked already.
    pub is_admitted: bool,
    /// S3 is not asked for the chunk before.
    pub not_before: Option<Instant>,
    /// When the job ends or is dropped, the chunk may leave memory.
    _clean: Clean,
}

/// Figures of the write-behind; totals since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct BehindStats {
    /// Chunks committed and not on the lower tiers yet.
    pub waiting_chunks: u64,
    pub waiting_bytes: u64,
    /// Chunks of an earlier life of this node, on its disks and not on S3 yet; also on disks that were taken out.
    pub backlog_chunks: u64,
    /// Bytes reserved by engines, not committed.
    pub reserved_bytes: u64,
    pub stored: u64,
    /// Chunks that were there already.
    pub present: u64,
    /// Chunks given up because the write-behind was full, or at the end; or lost.
    pub dropped: u64,
    /// Dropped chunks whose only file could not be read or was gone.
    pub lost: u64,
    /// Chunks committed, and not sent to S3 because the configuration says so.
    pub kept_back: u64,
    pub failed_attempts: u64,
}

/// The first chunk whose turn has not come.
pub struct Next {
    pub number: u64,
    pub space: Space,
    pub chunk: ChunkHash,
    /// None: unknown, or a first chunk.
    pub parent: Option<ChunkHash>,
    pub bytes: usize,
    pub is_admitted: bool,
}

/// A chunk's place in its chain.
#[derive(Debug, Clone, Copy)]
pub struct Link<'a> {
    pub kind: Kind,
    pub chunk: &'a ChunkHash,
    /// None: unknown, or a first chunk.
    pub parent: Option<&'a ChunkHash>,
}

/// Bytes of the write-behind set aside for a chunk; they go back when this is dropped.
pub struct Room {
    behind: Arc<Behind>,
    bytes: usize,
}

/// The whole object, now or as soon as its header is written.
pub enum Sealed {
    Now(Slot),
    Soon(oneshot::Receiver<Slot>),
}

impl Behind {
    pub fn new(options: BehindOptions) -> Self {
        Self {
            options,
            state: Mutex::new(State {
                entries: BTreeMap::new(),
                chunks: HashMap::new(),
                committed: 0,
                started: 0,
                flushes: 0,
                room_bytes: 0,
                dropped: Recent::new(DROPPED_MAX),
                backlog: HashSet::new(),
                dispatching: false,
                stats: BehindStats::default(),
            }),
            changed: Notify::new(),
            hurry: Notify::new(),
        }
    }

    /// Room for a chunk, if need be that of others which are dropped: only those deeper than it would be, so never
    /// one of its ancestors.
    pub fn room(self: &Arc<Self>, bytes: usize, link: Link<'_>) -> Option<Room> {
        let mut dropped = Vec::new();
        let mut state = self.lock();
        let depth = state.depth(link);
        while state.room_bytes + bytes > self.options.bytes_max {
            let entry = match self.options.when_full {
                WhenFull::Refuse => None,
                WhenFull::Drop => state.drop_deeper_than(depth),
            };
            let Some(entry) = entry else {
                drop(state);
                self.dropped(&dropped);
                return None;
            };
            dropped.push(entry);
        }
        let was_short = state.is_short(&self.options);
        state.room_bytes += bytes;
        let is_short = state.is_short(&self.options);
        drop(state);
        self.dropped(&dropped);
        if is_short && !was_short {
            self.hurry();
        }
        Some(Room {
            behind: Arc::clone(self),
            bytes,
        })
    }

    /// Aborts the tasks of dropped entries, without the lock: their slots go back to the arena.
    fn dropped(&self, entries: &[Entry]) {
        for entry in entries {
            if let Some(task) = &entry.task {
                task.abort();
            }
        }
        if !entries.is_empty() {
            self.changed.notify_waiters();
        }
    }

    /// Notes a chunk that was refused: in a full kind its descendants are of no use either.
    pub fn refused(&self, key: ChunkId) {
        self.lock().dropped.add(key, ());
    }

    /// Notes that some tier below has the chunk, whichever node or store brought it there.
    pub fn is_there(&self, key: &ChunkId) {
        self.lock().dropped.remove(key);
    }

    /// Forgets a chunk that is to be deleted.
    pub fn cancel(&self, key: &ChunkId) {
        let cancelled = {
            let mut state = self.lock();
            state.backlog.remove(key);
            state.number(key).and_then(|number| state.remove(number))
        };
        self.dropped(cancelled.as_slice());
        self.changed.notify_waiters();
    }

    /// Whether the chunk was given up or refused, and not taken since.
    pub fn was_dropped(&self, key: &ChunkId) -> bool {
        self.lock().dropped.has(key)
    }

    /// Queues a chunk, with its room. False if it is given up because its parent was.
    pub fn push(
        &self,
        room: Room,
        chunk: &ChunkHash,
        parent: Option<&ChunkHash>,
        job: WriteBehindJob,
    ) -> bool {
        let mut state = self.lock();
        let (space, kind) = (job.space.key(), job.space.kind());
        let key = (space, *chunk);
        if kind.is_full() && parent.is_some_and(|parent| state.dropped.has(&(space, *parent))) {
            state.stats.dropped += 1;
            state.dropped.add(key, ());
            return false;
        }
        state.dropped.remove(&key);
        // The chunk is in memory, and is sent from there.
        state.backlog.remove(&key);
        state.committed += 1;
        let bytes = room.keep();
        let number = state.committed;
        let depth = state.depth(Link { kind, chunk, parent });
        let entry = Entry {
            key,
            parent: parent.copied(),
            bytes,
            depth,
            is_snapshot: kind == Kind::State,
            job: Some(job),
            task: None,
            not_before: None,
        };
        if kind != Kind::State {
            state.deepen_snapshots(chunk, depth + 1);
        }
        state.chunks.entry(*chunk).or_default().insert(space, number);
        state.entries.insert(number, entry);
        true
    }

    /// Whether a dispatcher is to be started.
    pub fn needs_dispatcher(&self) -> bool {
        !std::mem::replace(&mut self.lock().dispatching, true)
    }

    /// The first entry whose turn has not come. If there is none, the dispatcher is done.
    pub fn next(&self) -> Option<Next> {
        let mut state = self.lock();
        let waiting = state.entries.range(state.started + 1..);
        let next = waiting.into_iter().find_map(|(number, entry)| {
            let job = entry.job.as_ref()?;
            Some(Next {
                number: *number,
                space: job.space.clone(),
                chunk: entry.key.1,
                parent: entry.parent,
                bytes: entry.bytes,
                is_admitted: job.is_admitted,
            })
        });
        state.dispatching = next.is_some();
        next
    }

    /// Waits until then; not while a flush waits, or where half of the room is used up: engines would find none.
    pub async fn pause(&self, key: &ChunkId, until: Instant) {
        let hurry = self.hurry.notified();
        tokio::pin!(hurry);
        // From here on no notification is missed.
        hurry.as_mut().enable();
        let is_in_a_hurry = {
            let state = self.lock();
            state.flushes > 0 || state.is_short(&self.options)
        };
        if !is_in_a_hurry {
            let _ = tokio::time::timeout_at(until, hurry).await;
        }
        // What comes after it need not wait either.
        let mut state = self.lock();
        if let Some(entry) = state
            .number(key)
            .and_then(|number| state.entries.get_mut(&number))
        {
            entry.not_before = None;
        }
    }

    /// Ends all pauses: an engine finds no room.
    pub fn hurry(&self) {
        self.hurry.notify_waiters();
    }

    /// Starts an entry, unless it was given up meanwhile. S3 is asked for it at `asks_at`, and not before its parent.
    pub fn start(&self, number: u64, asks_at: Option<Instant>) -> Option<WriteBehindJob> {
        let mut state = self.lock();
        state.started = number;
        let entry = state.entries.get(&number)?;
        let parent = entry
            .parent
            .and_then(|parent| state.number(&(entry.key.0, parent)));
        let of_parent = parent.and_then(|parent| state.entries.get(&parent)?.not_before);
        let not_before = asks_at.max(of_parent).filter(|&at| at > Instant::now());
        let entry = state.entries.get_mut(&number)?;
        entry.not_before = not_before;
        let mut job = entry.job.take()?;
        job.not_before = not_before;
        Some(job)
    }

    pub fn began(&self, number: u64, task: AbortHandle) {
        match self.lock().entries.get_mut(&number) {
            Some(entry) => entry.task = Some(task),
            // Given up already, or done.
            None => task.abort(),
        }
    }

    /// None: the chunk was declined.
    pub fn ends(&self, number: u64, outcome: Option<&StoreOutcome>) {
        let mut state = self.lock();
        let entry = state.remove(number);
        match outcome {
            Some(StoreOutcome::Stored) => state.stats.stored += 1,
            Some(StoreOutcome::Present | StoreOutcome::Pending) => state.stats.present += 1,
            Some(StoreOutcome::Failed(_)) => {
                state.stats.dropped += 1;
                // An engine that wants to store it once more sends it from memory.
                if let Some(entry) = entry {
                    state.dropped.add(entry.key, ());
                }
            }
            None => {}
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Adds chunks that the disks have. Chunks that are in memory as well are sent from there.
    pub fn add_backlog(&self, chunks: impl Iterator<Item = ChunkId>) {
        let mut state = self.lock();
        for key in chunks {
            if state.number(&key).is_none() {
                state.backlog.insert(key);
            }
        }
    }

    /// Whether the chunk is on its way down, or will be.
    pub fn is_waiting(&self, key: &ChunkId) -> bool {
        let state = self.lock();
        state.number(key).is_some() || state.backlog.contains(key)
    }

    pub fn is_backlog(&self, key: &ChunkId) -> bool {
        self.lock().backlog.contains(key)
    }

    /// Ends a backlog chunk that is on S3, or on the last tier by now.
    pub fn backlog_ends(&self, key: &ChunkId, kept_back: bool) {
        let mut state = self.lock();
        if state.backlog.remove(key) {
            state.stats.kept_back += u64::from(kept_back);
        }
        drop(state);
        self.changed.notify_waiters();
    }

    /// Notes chunks that no disk has any more. Chunks that are in memory as well, that were sent or deleted are no
    /// loss.
    pub fn lost(&self, keys: impl IntoIterator<Item = ChunkId>) {
        let mut state = self.lock();
        let lost = keys.into_iter().filter(|key| state.backlog.remove(key)).count() as u64;
        drop(state);
        self.lost_files(lost);
    }

    /// Counts lost chunks that S3 does not have and whose files were no whole chunks.
    pub fn lost_files(&self, chunks: u64) {
        let mut state = self.lock();
        state.stats.dropped += chunks;
        state.stats.lost += chunks;
        drop(state);
        self.changed.notify_waiters();
    }

    /// Counts a chunk that goes no lower, as the configuration says; or one that goes after all.
    pub fn keeps_back(&self, is_kept: bool) {
        let kept_back = &mut self.lock().stats.kept_back;
        *kept_back = match is_kept {
            true => *kept_back + 1,
            false => kept_back.saturating_sub(1),
        };
    }

    pub fn options(&self) -> &BehindOptions {
        &self.options
    }

    pub fn failed(&self) {
        self.lock().stats.failed_attempts += 1;
    }

    /// Waits until all chunks committed before this call, in an earlier life as well, are stored or dropped; at
    /// most until the deadline.
    pub async fn flush(&self, deadline: Instant) -> Flushed {
        let upto = self.lock().committed;
        let _in_a_hurry = Flushing::new(self);
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on no notification is missed.
            changed.as_mut().enable();
            let flushed = {
                let state = self.lock();
                Flushed {
                    pending: (state.entries.range(..=upto).count() + state.backlog.len()) as u64,
                    dropped: state.stats.dropped,
                    kept_back: state.stats.kept_back,
                    ..Flushed::default()
                }
            };
            if flushed.pending == 0 || tokio::time::timeout_at(deadline, changed).await.is_err() {
                return flushed;
            }
        }
    }

    /// Gives up all waiting chunks; returns how many chunks are lost by that, and how many a disk keeps.
    pub fn give_up(&self, is_kept: impl Fn(&ChunkId) -> bool) -> (u64, u64) {
        let mut state = self.lock();
        let numbers: Vec<u64> = state.entries.keys().copied().collect();
        let entries: Vec<_> = numbers
            .into_iter()
            .filter_map(|number| state.remove(number))
            .collect();
        let lost = entries.iter().filter(|entry| !is_kept(&entry.key)).count();
        let kept = entries.len() - lost + state.backlog.len();
        state.stats.dropped += lost as u64;
        drop(state);
        self.dropped(&entries);
        (lost as u64, kept as u64)
    }

    pub fn stats(&self) -> BehindStats {
        let state = self.lock();
        let waiting_bytes: usize = state.entries.values().map(|entry| entry.bytes).sum();
        BehindStats {
            waiting_chunks: state.entries.len() as u64,
            waiting_bytes: waiting_bytes as u64,
            backlog_chunks: state.backlog.len() as u64,
            reserved_bytes: (state.room_bytes - waiting_bytes) as u64,
            ..state.stats
        }
    }

    /// No panic can leave the state half-changed, so a poisoned lock is still usable.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn is_short(&self, options: &BehindOptions) -> bool {
        self.room_bytes > options.bytes_max / 2
    }

    /// A chunk's depth, as it is or would be.
    fn depth(&self, link: Link<'_>) -> u32 {
        let is_snapshot = link.kind == Kind::State;
        let after = |chunk: &ChunkHash, with_snapshots: bool| {
            let before = self.of_hash(chunk);
            let before = before.filter(|entry| with_snapshots || !entry.is_snapshot);
            before.map(|entry| entry.depth + 1).max().unwrap_or_default()
        };
        let depth = link.parent.map_or(0, |parent| after(parent, is_snapshot));
        // A snapshot is of no use without its prompt's chunks in the other kinds.
        match is_snapshot {
            true => depth.max(after(link.chunk, false)),
            false => depth,
        }
    }

    /// Snapshots may come before the chunks that they follow.
    fn deepen_snapshots(&mut self, chunk: &ChunkHash, depth: u32) {
        for number in self.chunks.get(chunk).into_iter().flat_map(HashMap::values) {
            if let Some(entry) = self.entries.get_mut(number).filter(|entry| entry.is_snapshot) {
                entry.depth = entry.depth.max(depth);
            }
        }
    }

    /// The entries of a hash, in whatever space.
    fn of_hash(&self, chunk: &ChunkHash) -> impl Iterator<Item = &Entry> {
        let numbers = self.chunks.get(chunk).into_iter().flat_map(HashMap::values);
        numbers.filter_map(|number| self.entries.get(number))
    }

    fn number(&self, (space, chunk): &ChunkId) -> Option<u64> {
        self.chunks.get(chunk)?.get(space).copied()
    }

    /// Drops the last of the deepest entries whose turn has not come; never a head.
    fn drop_deeper_than(&mut self, depth: u32) -> Option<Entry> {
        let waiting = self
            .entries
            .iter()
            .filter(|(_, entry)| entry.job.is_some() && entry.depth > depth);
        let (&number, _) = waiting.max_by_key(|(number, entry)| (entry.depth, **number))?;
        self.stats.dropped += 1;
        let entry = self.remove(number)?;
        self.dropped.add(entry.key, ());
        Some(entry)
    }

    fn remove(&mut self, number: u64) -> Option<Entry> {
        let entry = self.entries.remove(&number)?;
        let (space, chunk) = entry.key;
        if let Some(of_hash) = self.chunks.get_mut(&chunk) {
            if of_hash.get(&space) == Some(&number) {
                of_hash.remove(&space);
            }
            if of_hash.is_empty() {
                self.chunks.remove(&chunk);
            }
        }
        self.room_bytes -= entry.bytes;
        Some(entry)
    }
}

/// A flush that waits: nothing pauses.
struct Flushing<'a>(&'a Behind);

impl<'a> Flushing<'a> {
    fn new(behind: &'a Behind) -> Self {
        behind.lock().flushes += 1;
        behind.hurry();
        Self(behind)
    }
}

impl Drop for Flushing<'_> {
    fn drop(&mut self) {
        self.0.lock().flushes -= 1;
    }
}

impl Room {
    /// Hands the bytes over to an entry.
    fn keep(mut self) -> usize {
        std::mem::take(&mut self.bytes)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.bytes > 0 {
            self.behind.lock().room_bytes -= self.bytes;
        }
    }
}

impl WriteBehindJob {
    /// A job for a chunk that is in memory, and is dirty there until the job ends.
    pub fn new(
        memory: &Arc<Memory>,
        space: &Space,
        chunk: &ChunkHash,
        object: Sealed,
        is_admitted: bool,
    ) -> Self {
        Self {
            space: space.clone(),
            object,
            is_admitted,
            not_before: None,
            since: Instant::now(),
            span: trace::begin("lower"),
            _clean: Clean(Arc::clone(memory), (space.key(), *chunk)),
        }
    }
}

/// Lets a chunk leave memory when it is dropped.
struct Clean(Arc<Memory>, ChunkId);

impl Drop for Clean {
    fn drop(&mut self) {
        self.0.clean(&self.1);
    }
}
