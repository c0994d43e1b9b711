//! The tiers of a node above S3, and what goes up and down between them.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::Gateway;
use super::arriving::Arriving;
use super::behind::{Behind, BehindOptions, Sealed};
use super::load::LoadedChunk;
use crate::arena::{Arena, Slot};
use crate::cache::tier::{Below, Disk, Memory, MemoryOptions};
use crate::format::{ChunkHash, ChunkId, Space};
use crate::protocol::Tier;

/// How the tiers of a node work together.
#[derive(Clone)]
pub struct TierOptions {
    pub memory: MemoryOptions,
    pub memory_flow: Flow,
    pub disk: Option<DiskTier>,
    pub behind: BehindOptions,
    /// Bytes that may be on their way from memory to the disk because they came from S3.
    pub promote_bytes_max: usize,
    /// A load's time limit, for what others may wait for as well.
    pub load_deadline: Duration,
}

/// What goes past a tier.
#[derive(Debug, Clone, Copy)]
pub struct Flow {
    /// What is not here is looked for below.
    pub asks_lower: bool,
    /// New chunks go to the tiers below.
    pub stores_lower: bool,
}

/// The disks between memory and S3.
#[derive(Clone)]
pub struct DiskTier {
    /// Opened already: reading its index takes a while.
    pub disk: Disk,
    pub flow: Flow,
    /// What comes from S3 is written here as well.
    pub promotes: bool,
}

pub(super) struct Tiers {
    pub memory: Arc<Memory>,
    pub arriving: Arc<Arriving>,
    pub behind: Arc<Behind>,
    pub options: TierOptions,
    promote_kib: Arc<Semaphore>,
}

impl Tiers {
    pub fn new(arena: &Arena, options: TierOptions) -> Self {
        Self {
            memory: Memory::new(arena, options.memory),
            arriving: Arc::default(),
            behind: Arc::new(Behind::new(options.behind)),
            promote_kib: Arc::new(Semaphore::new(super::kib(options.promote_bytes_max) as usize)),
            options,
        }
    }

    /// Whether S3 may be asked for what is neither in memory nor on the disk.
    pub fn asks_s3(&self) -> bool {
        let disk = self.options.disk.as_ref();
        self.options.memory_flow.asks_lower && disk.is_none_or(|disk| disk.flow.asks_lower)
    }

    pub fn disk(&self) -> Option<&Disk> {
        self.options.disk.as_ref().map(|tier| &tier.disk)
    }

    /// Whether the disk may be asked, and has the chunk.
    pub fn is_on_disk(&self, key: &ChunkId, now: Instant) -> bool {
        self.options.memory_flow.asks_lower && self.disk().is_some_and(|disk| disk.has(key, now))
    }
}

impl Gateway {
    /// Lets go of what is too old, in memory and on the disks; that happens by itself only when somebody asks for it.
    pub async fn expire(&self) {
        if let Some(tiers) = &self.0.tiers {
            tiers.memory.expire();
            if let Some(disk) = tiers.disk() {
                disk.expire().await;
            }
        }
    }

    /// Tries disks that were taken out again, for as long as this is polled.
    pub async fn retry_disks(&self) {
        if let Some(disk) = self.0.tiers.as_ref().and_then(Tiers::disk) {
            disk.retry().await;
        }
    }

    /// The chunk, if it is in memory.
    pub(super) fn resident(&self, space: &Space, chunk: &ChunkHash) -> Option<LoadedChunk> {
        let tiers = self.0.tiers.as_ref()?;
        let key = (space.key(), *chunk);
        let found = tiers.memory.get(&key, space)?;
        if found.is_due
            && let Some(object) = &found.object
        {
            self.goes_lower(space, chunk, object);
        }
        Some(LoadedChunk {
            space: space.clone(),
            chunk: *chunk,
            planes: 0..space.layout().planes(),
            payload: found.payload,
            object: found.object,
            tier: Tier::Memory,
            credit: None,
        })
    }

    /// A chunk that was stored here has been asked for often enough.
    fn goes_lower(&self, space: &Space, chunk: &ChunkHash, object: &Slot) {
        let Some(tiers) = self.0.tiers.as_ref() else {
            return;
        };
        let key = (space.key(), *chunk);
        let now = Instant::now();
        if !tiers.options.memory_flow.stores_lower || self.0.cache.is_present(&key, now) == Some(true) {
            return;
        }
        let Some(room) = tiers.behind.room(object.len(), None) else {
            tiers.memory.put_off(&key);
            return;
        };
        tiers.memory.soil(&key);
        tiers.behind.keeps_back(false);
        self.write_behind(room, space, chunk, None, Sealed::Now(object.clone()));
    }

    /// Keeps a chunk that was asked for at `since`, as far as there is room.
    pub(super) fn keep(&self, chunk: &LoadedChunk, since: Instant) {
        let (Some(tiers), Some(object)) = (self.0.tiers.as_ref(), &chunk.object) else {
            return;
        };
        let key = (chunk.space.key(), chunk.chunk);
        tiers.memory.insert(key, &chunk.space, object.clone(), since);
        let promotes = tiers.options.disk.as_ref().is_some_and(|disk| disk.promotes);
        let to_disk = promotes && chunk.tier == Tier::S3;
        if let Some(disk) = tiers.disk().filter(|_| to_disk)
            && let Ok(permit) =
                Arc::clone(&tiers.promote_kib).try_acquire_many_owned(super::kib(object.len()))
        {
            let (disk, space, hash, object) =
                (disk.clone(), chunk.space.clone(), chunk.chunk, object.clone());
            tokio::spawn(async move {
                if let Err(error) = disk.write(&space, &hash, object, since, Below::Has).await {
                    tracing::debug!(%error, "a chunk was not written to the disk");
                }
                drop(permit);
            });
        }
    }
}
