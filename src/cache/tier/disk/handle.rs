//! The disk tier as others use it: has, read, write, remove, pin. The index answers without I/O; what blocks runs on a
//! thread of its own.

use std::panic::resume_unwind;
use std::sync::Arc;

use futures::future::join_all;
use tokio::task::spawn_blocking;
use tokio::time::{Instant, sleep};

use super::error::DiskError;
use super::folder::Mark;
use super::index::{Gone, Placed};
use super::open::open;
use super::options::DiskOptions;
use super::shared::DiskShared;
use super::stats::{Backlog, DiskStats, Unsent};
use crate::arena::{Slot, SlotMut};
use crate::cache::tier::events::KvEvents;
use crate::format::{ChunkHash, ChunkId, Space, SpaceKey};
use crate::metrics::Times;

/// The disk tier; see the [module](super). Cheap to clone.
///
/// A read or write goes on when its future is dropped, and keeps its slot until then.
#[derive(Clone)]
pub struct Disk(pub(super) Arc<DiskShared>);

/// The outcome of a write.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wrote {
    Stored,
    /// It is there.
    Present,
    /// No disk works, what is there may not go, or it is larger than a disk or its tenant's share.
    NoRoom,
    /// It was deleted meanwhile.
    Deleted,
}

/// Whether the tier below has a chunk that is written here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Below {
    Has,
    /// Not yet: the file is *dirty*, neither evicted nor removed for its age until it is [`clean`](Disk::clean), also after
    /// a restart.
    Lacks,
    /// Not, and it need not: the file is evicted and removed like one that the tier below has. It says so until it is
    /// [`clean`](Disk::clean): see [`declined`](Disk::declined).
    Declines,
    /// This is the last tier: file and folder are synced before the chunk counts as stored.
    Nothing,
}

/// Files whose time is over that are removed in one go: a disk that works removes so many well within its time limit.
const REMOVED_AT_ONCE: usize = 256;

impl Disk {
    /// Locks the folders and reads what is in them. Blocks. A disk that can't be used is left out if another can.
    pub fn open(options: &DiskOptions) -> Result<Self, DiskError> {
        open(options).map(Self)
    }

    /// A prompt was looked up, and so many of its leading chunks were there: the policy learns of it with their uses.
    pub fn looked_up(&self, chunks: &[ChunkHash], there: usize) {
        self.0.index.looked_up(chunks, there);
    }

    /// Tells them of what comes and goes from now on.
    pub fn tell(&self, events: &Arc<KvEvents>) {
        self.0.index.tell(events);
    }

    /// Tells of those that are here.
    pub fn tell_present(&self, space: SpaceKey, chunks: &[ChunkHash]) {
        self.0.index.tell_present(space, chunks);
    }

    /// Waits for a disk's turn, of the reads and writes that had to.
    pub fn waits(&self) -> Times {
        self.0.turns.read()
    }

    /// Whether a chunk is there, and not past its time. No I/O. For many keys, reading the clock costs as much as the rest.
    pub fn has(&self, key: &ChunkId, now: Instant) -> bool {
        self.0.index.has(key, now) && !self.0.passed_over.has(key)
    }

    /// The chunk's file is of no use now, and may be again: it is no hit until it is written anew, or
    /// [`all_of_use`](Self::all_of_use).
    pub fn pass_over(&self, key: ChunkId) {
        self.0.passed_over.add(key);
    }

    /// Files that were passed over are hits again.
    pub fn all_of_use(&self) {
        self.0.passed_over.clear();
    }

    /// The chunk was used, though not read from here.
    pub fn touch(&self, key: &ChunkId) {
        self.0.index.touch(key);
    }

    /// Writes a whole object, header and payload, which somebody began to bring at `since`. It is a hit when this returns:
    /// another write of it that is under way is waited for, as that may fail.
    pub async fn write(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        object: Slot,
        since: Instant,
        below: Below,
    ) -> Result<Wrote, DiskError> {
        let object_len = length(space, &object)?;
        let key = (space.key(), *chunk);
        if self.0.passed_over.remove(&key) {
            // What the tier below has not stays.
            self.remove(&key).await;
        }
        let reservation = loop {
            let something_ends = self.0.index.something_ends();
            let mark = match below {
                Below::Lacks => Mark::Dirty,
                Below::Declines => Mark::Declined,
                Below::Has | Below::Nothing => Mark::Clean,
            };
            match self.0.index.place(key, space.tenant(), object_len, since, mark) {
                Placed::On(reservation) => break reservation,
                Placed::Present => return Ok(Wrote::Present),
                Placed::NoRoom => return Ok(Wrote::NoRoom),
                Placed::Deleted => return Ok(Wrote::Deleted),
                Placed::Busy => something_ends.await,
                Placed::Expired(gone) => self.leave(Some(gone)).await,
            }
        };
        let disk = reservation.disk;
        let turn = self.0.turn(disk).await?;
        let (shared, space) = (Arc::clone(&self.0), space.clone());
        let write = move || {
            let _turn = turn;
            shared.write(reservation, &space, &object, below == Below::Nothing)
        };
        self.in_time(disk, write).await?
    }

    /// Fills the slot with a whole object, which the caller must verify, and [`remove`](Self::remove) if it is damaged.
    /// Counts as a use. After an error the slot may hold anything; a disk that hangs keeps it.
    pub async fn read(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        mut slot: SlotMut,
    ) -> (Option<SlotMut>, Result<(), DiskError>) {
        if let Err(error) = length(space, &slot) {
            return (Some(slot), Err(error));
        }
        let key = (space.key(), *chunk);
        let Some(entry) = self.0.index.find(&key) else {
            return (Some(slot), Err(DiskError::Absent));
        };
        let turn = match self.0.turn(entry.disk).await {
            Ok(turn) => turn,
            Err(error) => return (Some(slot), Err(error)),
        };
        let shared = Arc::clone(&self.0);
        let read = move || {
            let _turn = turn;
            let read = shared.read(&key, &entry, &mut slot);
            (slot, read)
        };
        match self.in_time(entry.disk, read).await {
            Ok((slot, read)) => (Some(slot), read),
            Err(late) => (None, Err(late)),
        }
    }

    /// Removes a chunk, for instance one that did not verify. It is no hit any more at once, even if this is dropped. A chunk
    /// that the tier below does not have stays: see [`set_aside`](Self::set_aside).
    pub async fn remove(&self, key: &ChunkId) {
        self.leave(self.0.index.take(key, None)).await;
    }

    /// The same for a chunk that is to be nowhere. A write or a load of it that is under way does not put it back.
    pub async fn delete(&self, key: &ChunkId) {
        self.leave(self.0.index.delete(key)).await;
    }

    /// A chunk that the tier below does not have can't be read, and is lost. Its file is moved to where people find it. True
    /// if it was here until now: so each loss is counted once.
    pub async fn set_aside(&self, key: &ChunkId) -> bool {
        let Some(gone) = self.0.index.take_lost(key) else {
            return false;
        };
        let shared = Arc::clone(&self.0);
        // One that hangs is taken out, which says why.
        let _ = self.in_time(gone.disk, move || shared.set_aside(&gone)).await;
        true
    }

    /// The tier below has the chunk.
    pub async fn clean(&self, key: &ChunkId) {
        if let Some(disk) = self.0.index.clean(key) {
            let (shared, key) = (Arc::clone(&self.0), *key);
            // One that hangs is taken out, which says why.
            let _ = self.in_time(disk, move || shared.clean(disk, &key)).await;
        }
    }

    /// Whether a disk has the chunk, and the tier below has not as far as is known.
    pub fn unsent(&self, key: &ChunkId) -> Unsent {
        self.0.index.unsent(key)
    }

    /// Chunks that the tier below does not have and need not get, also of earlier lives, and on disks that were taken out.
    pub fn declined(&self) -> Vec<ChunkId> {
        self.0.index.declined()
    }

    /// Chunks that were dirty when the disks were read: they must be sent down. The first to ask gets it.
    pub fn take_backlog(&self) -> Backlog {
        self.0.take_backlog()
    }

    /// A space is known. Chunks of it whose `space.json` was missing are hits from now on, and come as more backlog.
    pub async fn adopt(&self, space: &Space) {
        for disk in self.0.homeless_on(space.key()) {
            let (shared, space) = (Arc::clone(&self.0), space.clone());
            let _ = self.in_time(disk, move || shared.adopt(disk, &space)).await;
        }
    }

    /// Whether a disk has what the tier below has not of a space that is not known.
    pub fn is_homeless(&self, space: SpaceKey) -> bool {
        !self.0.homeless_on(space).is_empty()
    }

    /// Disks that could not be used at the start: what they have is not known.
    pub fn unread(&self) -> usize {
        self.0.unread()
    }

    /// The same as [`take_backlog`](Self::take_backlog), when there is more.
    pub async fn more_backlog(&self) -> Backlog {
        self.0.backlog_comes.notified().await;
        self.take_backlog()
    }

    /// Tries disks that were taken out again, each after a pause, for as long as this is polled. Its chunks are hits again
    /// when all of the disk was read.
    pub async fn retry(&self) {
        let pause = self.0.options.retry;
        let retry = async |disk| loop {
            while self.0.index.works(disk) {
                sleep(pause).await;
            }
            sleep(pause).await;
            let shared = Arc::clone(&self.0);
            blocking(move || shared.take_up(disk)).await;
        };
        join_all((0..self.0.paths.len()).map(retry)).await;
    }

    /// Keeps a chunk from eviction, and readable past its time, until it is unpinned as often. It need not be there yet.
    pub fn pin(&self, key: &ChunkId) {
        self.0.index.pin(key);
    }

    /// Ends one [`pin`](Self::pin).
    pub fn unpin(&self, key: &ChunkId) {
        self.0.index.unpin(key);
    }

    /// Removes the files of chunks that are past their time. Writes do so too; this is for a tier that has none for long.
    pub async fn expire(&self) {
        loop {
            let gone = self.0.index.expire(REMOVED_AT_ONCE);
            if gone.is_empty() {
                return;
            }
            self.leave(gone).await;
        }
    }

    pub fn stats(&self) -> DiskStats {
        self.0.stats()
    }

    /// What each tenant has, on all disks.
    pub fn tenants(&self) -> Vec<(String, u64)> {
        self.0.index.tenants()
    }

    /// Removes the files of what is out of the index, even if this is dropped.
    async fn leave(&self, gone: impl IntoIterator<Item = Gone>) {
        let mut leaving = self.0.leave(gone);
        leaving.sort_by_key(|leaving| leaving.gone.disk);
        while let Some(disk) = leaving.last().map(|last| last.gone.disk) {
            let rest = leaving.partition_point(|leaving| leaving.gone.disk < disk);
            let of_disk = leaving.split_off(rest);
            let _ = self.in_time(disk, move || drop(of_disk)).await;
        }
    }

    /// Runs what blocks on a disk. One that takes too long is taken out, and what runs there is left to itself: nothing else
    /// may wait for it.
    async fn in_time<T: Send + 'static>(
        &self,
        disk: usize,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, DiskError> {
        let done = tokio::time::timeout(self.0.options.timeout, blocking(work)).await;
        done.map_err(|_| self.0.hangs(disk))
    }
}

fn length(space: &Space, object: &[u8]) -> Result<usize, DiskError> {
    let (expected, actual) = (space.layout().object_len(), object.len());
    match expected == actual {
        true => Ok(expected),
        false => Err(DiskError::Length { expected, actual }),
    }
}

/// Runs what blocks, to its end even if nobody waits for it.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(error) => match error.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            // The runtime goes down, and this task with it.
            Err(_) => std::future::pending().await,
        },
    }
}
