//! The common part of all handles of the disk tier: the index, the folders, and turns to use a disk. Everything that
//! blocks is here.

use std::collections::HashSet;
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};

use super::error::DiskError;
use super::fault::DiskFault;
use super::folder::{Folder, FolderFound};
use super::handle::Wrote;
use super::index::{Gone, Index, IndexEntry, WriteReservation};
use super::options::DiskOptions;
use super::passed_over::PassedOver;
use super::stats::{Backlog, DiskStats, PathStats};
use crate::format::{ChunkId, Space, SpaceKey};
use crate::metrics::Histogram;

/// Chunks past their time that one write removes at most: it adds one, so they don't pile up, and it isn't held up.
const EXPIRED_PER_WRITE: usize = 16;

/// The common part of all handles, and everything that may block.
pub(super) struct DiskShared {
    pub index: Arc<Index>,
    /// As the index numbers them; None while it is taken out.
    disks: Vec<RwLock<Option<OneDisk>>>,
    pub paths: Vec<PathBuf>,
    /// Their file systems at start.
    pub devices: Vec<u64>,
    pub options: DiskOptions,
    /// For the right to use a disk.
    pub turns: Histogram,
    /// Disks that were not usable at the start.
    unusable: Vec<PathStats>,
    /// Found when a disk was read, and dirty.
    backlog: Mutex<Backlog>,
    pub backlog_comes: Notify,
    /// Spaces that are not known, of which a disk has what the tier below has not.
    homeless: Mutex<HashSet<(usize, SpaceKey)>>,
    pub passed_over: PassedOver,
}

/// A task that works on it has the folder as well, and so keeps it locked.
struct OneDisk {
    folder: Arc<Folder>,
    depth: Arc<Semaphore>,
}

/// A chunk that is out of the index: dropping this removes its file.
pub(super) struct Leaving {
    shared: Arc<DiskShared>,
    pub gone: Gone,
}

impl DiskShared {
    pub fn new(
        index: Index,
        folders: Vec<Folder>,
        options: &DiskOptions,
        unusable: Vec<PathStats>,
        backlog: Backlog,
        homeless: HashSet<(usize, SpaceKey)>,
    ) -> Self {
        let shared = Self {
            index: Arc::new(index),
            disks: folders.iter().map(|_| RwLock::default()).collect(),
            devices: folders.iter().map(|folder| folder.device).collect(),
            paths: folders.iter().map(|folder| folder.path().to_owned()).collect(),
            options: options.clone(),
            turns: Histogram::default(),
            unusable,
            backlog: Mutex::new(backlog),
            backlog_comes: Notify::new(),
            homeless: Mutex::new(homeless),
            passed_over: PassedOver::default(),
        };
        let folders = folders.into_iter().enumerate();
        folders.for_each(|(disk, folder)| shared.use_folder(disk, folder));
        shared
    }

    pub fn use_folder(&self, disk: usize, folder: Folder) {
        let depth = self.options.depth.clamp(1, Semaphore::MAX_PERMITS);
        let one = OneDisk {
            folder: Arc::new(folder),
            depth: Arc::new(Semaphore::new(depth)),
        };
        *self.disks[disk].write().unwrap_or_else(PoisonError::into_inner) = Some(one);
    }

    /// None while the disk is taken out.
    pub fn folder(&self, disk: usize) -> Option<Arc<Folder>> {
        let one = self.disks[disk].read().unwrap_or_else(PoisonError::into_inner);
        one.as_ref().map(|one| Arc::clone(&one.folder))
    }

    pub fn more_backlog(&self, more: Backlog) {
        self.backlog
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .add(more);
        self.backlog_comes.notify_one();
    }

    pub fn take_backlog(&self) -> Backlog {
        std::mem::take(&mut self.backlog.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn homeless_on(&self, space: SpaceKey) -> Vec<usize> {
        let homeless = self.homeless();
        let of_space = homeless.iter().filter(|(_, key)| *key == space);
        of_space.map(|(disk, _)| *disk).collect()
    }

    /// A disk was read: these, and no others.
    pub fn are_homeless(&self, disk: usize, spaces: impl IntoIterator<Item = SpaceKey>) {
        let mut homeless = self.homeless();
        homeless.retain(|(of, _)| *of != disk);
        homeless.extend(spaces.into_iter().map(|space| (disk, space)));
    }

    pub fn is_homeless(&self, disk: usize, space: SpaceKey) -> bool {
        self.homeless().contains(&(disk, space))
    }

    pub fn has_home(&self, disk: usize, space: SpaceKey) {
        self.homeless().remove(&(disk, space));
    }

    fn homeless(&self) -> MutexGuard<'_, HashSet<(usize, SpaceKey)>> {
        self.homeless.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn unread(&self) -> usize {
        self.unusable.len()
    }

    /// Moves the file of what was [taken out](Index::take_lost) to where people find it.
    pub fn set_aside(&self, gone: &Gone) {
        // On one that was taken out it stays, and is found when that is read anew.
        if let Some(folder) = self.folder(gone.disk)
            && let Err(error) = folder.set_aside(&gone.key, self.options.lost_bytes)
        {
            self.failed(gone.disk, "move a damaged object aside", error);
        }
        self.index.left(&gone.key);
    }

    /// Waits for the right to use a disk.
    pub async fn turn(&self, disk: usize) -> Result<OwnedSemaphorePermit, DiskError> {
        let depth = {
            let one = self.disks[disk].read().unwrap_or_else(PoisonError::into_inner);
            one.as_ref().map(|one| Arc::clone(&one.depth))
        };
        let depth = depth.ok_or(DiskError::Out)?;
        if let Ok(turn) = Arc::clone(&depth).try_acquire_owned() {
            return Ok(turn);
        }
        let turn = self.turns.of(depth.acquire_owned()).await;
        turn.map_err(|_| DiskError::Out)
    }

    pub fn write(
        self: &Arc<Self>,
        mut reservation: WriteReservation,
        space: &Space,
        object: &[u8],
        syncs: bool,
    ) -> Result<Wrote, DiskError> {
        drop(self.leave(self.index.expire(EXPIRED_PER_WRITE)));
        let (has_room, gone) = reservation.take_room();
        drop(self.leave(gone));
        let disk = reservation.disk;
        let Some(folder) = self.folder(disk).filter(|_| has_room) else {
            return Ok(Wrote::NoRoom);
        };
        match folder.write(space, &reservation.key.1, object, reservation.mark, syncs) {
            Ok(()) => {
                let (wrote, gone) = reservation.commit();
                drop(self.leave(gone));
                Ok(wrote)
            }
            Err(error) => self.not_written(disk, object.len(), error),
        }
    }

    pub fn not_written(
        self: &Arc<Self>,
        disk: usize,
        object_len: usize,
        error: io::Error,
    ) -> Result<Wrote, DiskError> {
        if DiskFault::of(&error) != DiskFault::Full {
            return Err(self.failed(disk, "write an object", error));
        }
        let gone = self.index.is_full(disk, object_len);
        tracing::debug!(
            path = %self.paths[disk].display(),
            evicted = gone.len(),
            "the file system has less room than [disk] size"
        );
        drop(self.leave(gone));
        Ok(Wrote::NoRoom)
    }

    pub fn read(
        self: &Arc<Self>,
        key: &ChunkId,
        entry: &IndexEntry,
        object: &mut [u8],
    ) -> Result<(), DiskError> {
        let folder = self.folder(entry.disk).ok_or(DiskError::Out)?;
        let found = folder.read(key, object);
        if matches!(found, Ok(FolderFound::Whole)) {
            self.index.has_read(entry.disk);
            return Ok(());
        }
        let is_lost = !matches!(&found, Err(error) if DiskFault::of(error) == DiskFault::Process);
        if is_lost {
            drop(self.leave(self.index.take(key, Some(entry.serial))));
        }
        match found {
            Ok(FolderFound::Length(actual)) => Err(DiskError::Damaged {
                expected: object.len() as u64,
                actual,
            }),
            Err(error) => Err(self.failed(entry.disk, "read an object", error)),
            Ok(FolderFound::Absent | FolderFound::Whole) => Err(DiskError::Absent),
        }
    }

    /// The tier below has the chunk.
    pub fn clean(&self, disk: usize, key: &ChunkId) {
        // Dirty for ever costs a question to the tier below at each start.
        if let Some(folder) = self.folder(disk)
            && let Err(error) = folder.clean(key)
        {
            self.failed(disk, "change the mode of an object", error);
        }
    }

    /// Chunks that are out of the index; their files go when this is dropped.
    pub fn leave(self: &Arc<Self>, gone: impl IntoIterator<Item = Gone>) -> Vec<Leaving> {
        let leaving = |gone| Leaving {
            shared: Arc::clone(self),
            gone,
        };
        gone.into_iter().map(leaving).collect()
    }

    pub fn stats(&self) -> DiskStats {
        let mut disks = self.index.stats();
        disks.extend(self.unusable.iter().cloned());
        DiskStats { disks }
    }

    /// Removes a file that is none of the index's.
    pub fn discard(&self, disk: usize, folder: &Folder, key: &ChunkId) {
        if let Err(error) = folder.remove(key) {
            self.failed(disk, "remove an object", error);
        }
    }

    fn failed(&self, disk: usize, what: &'static str, source: io::Error) -> DiskError {
        let path = self.paths[disk].clone();
        if self.index.has_failed(disk, &source) {
            self.is_out(disk, &source);
        }
        DiskError::Io { what, path, source }
    }

    /// Something on this disk takes too long, and may never end.
    pub fn hangs(&self, disk: usize) -> DiskError {
        let late = DiskError::Late {
            path: self.paths[disk].clone(),
            time: self.options.timeout,
        };
        if self.index.take_disk_out(disk, late.to_string()) {
            self.is_out(disk, &late);
        }
        late
    }

    fn is_out(&self, disk: usize, error: &impl std::fmt::Display) {
        let out = self.disks[disk]
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(out) = out {
            // There is no turn to wait for any more.
            out.depth.close();
        }
        tracing::error!(
            path = %self.paths[disk].display(),
            %error,
            "this disk is taken out, its chunks are misses from now on: check it; it is tried again in {:?}",
            self.options.retry
        );
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let Gone { disk, key } = self.gone;
        // On one that was taken out it stays, and is found when that is read anew.
        if let Some(folder) = self.shared.folder(disk) {
            self.shared.discard(disk, &folder, &key);
        }
        self.shared.index.left(&key);
    }
}
