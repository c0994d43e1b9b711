use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use super::error::DiskError;
use super::fault::Fault;
use super::folder::{Folder, Found};
use super::handle::Wrote;
use super::index::{Entry, Gone, Index, Reservation};
use super::options::DiskOptions;
use super::stats::{DiskStats, PathStats};
use crate::chunk::{ChunkHash, Space};
use crate::existence::CacheKey;

/// Chunks past their time that one write removes at most: it adds one, so they don't pile up, and it isn't held up.
const EXPIRED_PER_WRITE: usize = 16;

/// What all handles share, and everything that may block.
pub(super) struct Shared {
    pub index: Arc<Index>,
    /// As the index numbers them.
    disks: Vec<OneDisk>,
    /// For one operation.
    pub timeout: Duration,
    /// Those that were not usable at start.
    unusable: Vec<PathStats>,
    /// Found at start, and dirty.
    backlog: Mutex<Vec<(Space, ChunkHash)>>,
}

struct OneDisk {
    folder: Folder,
    depth: Arc<Semaphore>,
}

/// A chunk that is out of the index: dropping this removes its file.
pub(super) struct Leaving {
    shared: Arc<Shared>,
    pub gone: Gone,
}

impl Shared {
    pub fn new(
        index: Index,
        folders: Vec<Folder>,
        options: &DiskOptions,
        unusable: Vec<PathStats>,
        backlog: Vec<(Space, ChunkHash)>,
    ) -> Self {
        let one = |folder| OneDisk {
            folder,
            depth: Arc::new(Semaphore::new(options.depth.clamp(1, Semaphore::MAX_PERMITS))),
        };
        Self {
            index: Arc::new(index),
            disks: folders.into_iter().map(one).collect(),
            timeout: options.timeout,
            unusable,
            backlog: Mutex::new(backlog),
        }
    }

    pub fn take_backlog(&self) -> Vec<(Space, ChunkHash)> {
        std::mem::take(&mut self.backlog.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for the right to use a disk.
    pub async fn turn(&self, disk: usize) -> Result<OwnedSemaphorePermit, DiskError> {
        let depth = Arc::clone(&self.disks[disk].depth);
        depth.acquire_owned().await.map_err(|_| DiskError::Out)
    }

    pub fn write(
        self: &Arc<Self>,
        mut reservation: Reservation,
        space: &Space,
        object: &[u8],
    ) -> Result<Wrote, DiskError> {
        drop(self.leave(self.index.expire(EXPIRED_PER_WRITE)));
        let (has_room, gone) = reservation.take_room();
        drop(self.leave(gone));
        if !has_room {
            return Ok(Wrote::NoRoom);
        }
        let disk = reservation.disk;
        match self
            .folder(disk)
            .write(space, &reservation.key.1, object, reservation.dirty)
        {
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
        if Fault::of(&error) != Fault::Full {
            return Err(self.failed(disk, "write an object", error));
        }
        let gone = self.index.is_full(disk, object_len);
        tracing::debug!(
            path = %self.folder(disk).path().display(),
            evicted = gone.len(),
            "the file system has less room than [disk] size"
        );
        drop(self.leave(gone));
        Ok(Wrote::NoRoom)
    }

    pub fn read(self: &Arc<Self>, key: &CacheKey, entry: &Entry, object: &mut [u8]) -> Result<(), DiskError> {
        let found = self.folder(entry.disk).read(key, object);
        if matches!(found, Ok(Found::Whole)) {
            self.index.has_read(entry.disk);
            return Ok(());
        }
        let is_lost = !matches!(&found, Err(error) if Fault::of(error) == Fault::Process);
        if is_lost {
            drop(self.leave(self.index.take(key, Some(entry.serial))));
        }
        match found {
            Ok(Found::Length(actual)) => Err(DiskError::Damaged {
                expected: object.len() as u64,
                actual,
            }),
            Err(error) => Err(self.failed(entry.disk, "read an object", error)),
            Ok(Found::Absent | Found::Whole) => Err(DiskError::Absent),
        }
    }

    /// The tier below has the chunk.
    pub fn clean(&self, disk: usize, key: &CacheKey) {
        // Dirty for ever costs a question to the tier below at each start.
        if self.index.works(disk)
            && let Err(error) = self.folder(disk).clean(key)
        {
            self.failed(disk, "change the mode of an object", error);
        }
    }

    /// What is out of the index; its files go when this is dropped.
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

    pub fn folder(&self, disk: usize) -> &Folder {
        &self.disks[disk].folder
    }

    fn failed(&self, disk: usize, what: &'static str, source: io::Error) -> DiskError {
        let path = self.folder(disk).path().to_owned();
        if self.index.has_failed(disk, &source) {
            self.is_out(disk, &source);
        }
        DiskError::Io { what, path, source }
    }

    /// Something on this disk takes too long, and may never end.
    pub fn hangs(&self, disk: usize) -> DiskError {
        let late = DiskError::Late {
            path: self.folder(disk).path().to_owned(),
            time: self.timeout,
        };
        if self.index.take_disk_out(disk, late.to_string()) {
            self.is_out(disk, &late);
        }
        late
    }

    fn is_out(&self, disk: usize, error: &impl std::fmt::Display) {
        // Who waits for a turn has none to wait for.
        self.disks[disk].depth.close();
        tracing::error!(
            path = %self.folder(disk).path().display(),
            %error,
            "this disk is taken out, its chunks are misses from now on: check it, and start kvgate again to use it"
        );
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        let Gone { disk, key } = self.gone;
        // On one that was taken out it stays, and is found at the next start.
        if self.shared.index.works(disk)
            && let Err(error) = self.shared.folder(disk).remove(&key)
        {
            self.shared.failed(disk, "remove an object", error);
        }
        self.shared.index.left(&key);
    }
}
