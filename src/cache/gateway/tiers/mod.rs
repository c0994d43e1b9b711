//! The places of chunks: memory, the disk, S3; and chunks on their way between them.
//!
//! A library has the same tiers as a node: a memory that keeps nothing, no disk, and S3.

mod admitting;
mod arriving;
mod write_behind;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::Semaphore;
use tokio::time::Instant;

pub use self::admitting::Admitting;
pub use self::arriving::{Announcement, Arriving, Flight};
pub use self::write_behind::{Behind, BehindOptions, BehindStats, Link, Next, Room, Sealed, WriteBehindJob};
use super::bucket::Bucket;
use super::chunk::LoadedChunk;
use super::credit::kib;
use super::warnings::DiskWarnings;
use crate::arena::Arena;
use crate::cache::admission::{AdmissionOptions, AdmissionStats, Standing};
use crate::cache::peers::{Asking, Peers};
pub use crate::cache::tier::KvEvents;
use crate::cache::tier::{Below, Disk, DiskStats, EventOptions, Memory, MemoryOptions, MemoryStats, Unsent};
use crate::format::{ChunkHash, ChunkId, KeyId, Keyring, Protection, Space, SpaceKey};
use crate::metrics::{Histogram, Times};
use crate::protocol::{BoundChunk, EvictionPolicy, Flushed, Tier, WhenFull};

/// The settings of a node's tiers and of the ways between them.
#[derive(Clone)]
pub struct TierOptions {
    pub memory: MemoryOptions,
    pub memory_flow: Flow,
    pub disk: Option<DiskTier>,
    /// Other nodes, asked before S3.
    pub peers: Option<Arc<Peers>>,
    pub behind: BehindOptions,
    /// None: S3 is given all chunks.
    pub admission: Option<AdmissionOptions>,
    /// Bytes from S3 that may be on their way from memory to the disk.
    pub promote_bytes_max: usize,
    /// A load's time limit, used for fetches that other loads may join as well.
    pub load_deadline: Duration,
    /// Loads of the same chunk read it once.
    pub shares_loads: bool,
    pub events: EventOptions,
}

impl TierOptions {
    /// A library's: nothing is kept, nothing is written behind, and each load is by itself.
    pub fn library() -> Self {
        let flow = Flow {
            asks_lower: true,
            stores_lower: true,
        };
        Self {
            memory: MemoryOptions {
                policy: EvictionPolicy::Lru,
                ttl: None,
                watermark_percent: 0,
                tenant_bytes: None,
                min_accesses: 0,
            },
            memory_flow: flow,
            disk: None,
            peers: None,
            behind: BehindOptions {
                bytes_max: 0,
                when_full: WhenFull::Refuse,
                deadline: Duration::ZERO,
                retry_base: Duration::ZERO,
                retry_max: Duration::ZERO,
            },
            admission: None,
            promote_bytes_max: 0,
            load_deadline: Duration::ZERO,
            shares_loads: false,
            events: EventOptions {
                chunks_max: 0,
                removals_max: 0,
            },
        }
    }
}

/// Figures of the tiers of this node.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct TierStats {
    pub memory: MemoryStats,
    pub disk: Option<DiskStats>,
    pub write_behind: BehindStats,
    /// Where S3 is not given all chunks.
    pub admission: Option<AdmissionStats>,
}

/// How long chunks wait, and for what: the queues of ARCHITECTURE.md.
#[derive(Debug, Default)]
pub struct TierTimes {
    /// A load for credit. Where there is enough nothing is noted, here and below.
    pub credit: Histogram,
    /// A load for the arena's ticket and a slot.
    pub arena: Histogram,
    /// A load for another load's fetch of the same chunk.
    pub flight: Histogram,
    /// A section for its turn.
    pub turn: Histogram,
    /// A chunk from its commit until the lowest tier has it.
    pub behind: Histogram,
}

/// Which lookups and stores go past a tier.
#[derive(Debug, Clone, Copy)]
pub struct Flow {
    /// Chunks that are not here are looked for below.
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
    /// Chunks from S3 are written here as well.
    pub promotes: bool,
}

/// Where a chunk is that S3 may lack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resting {
    /// Not here; or in memory, and kept from S3 until it is loaded more often.
    No,
    /// In memory or on a disk, and not on its way to S3.
    Here,
    OnItsWay,
}

pub struct Tiers {
    pub arena: Arena,
    pub memory: Arc<Memory>,
    pub bucket: Arc<Bucket>,
    pub arriving: Arc<Arriving>,
    pub behind: Arc<Behind>,
    /// None: S3 is given all chunks, or none.
    pub admitting: Option<Admitting>,
    pub options: TierOptions,
    pub disk_warnings: DiskWarnings,
    pub times: TierTimes,
    pub events: Arc<KvEvents>,
    promote_kib: Arc<Semaphore>,
}

impl Tiers {
    pub fn new(arena: Arena, bucket: Arc<Bucket>, options: TierOptions) -> Arc<Self> {
        let (memory, events) = (Memory::new(&arena, options.memory), KvEvents::new(options.events));
        memory.tell(&events);
        if let Some(tier) = &options.disk {
            tier.disk.tell(&events);
        }
        let stores_on_s3 = options.memory_flow.stores_lower
            && options.disk.as_ref().is_none_or(|disk| disk.flow.stores_lower);
        Arc::new(Self {
            admitting: options.admission.filter(|_| stores_on_s3).map(Admitting::new),
            memory,
            events,
            arena,
            arriving: Arc::default(),
            behind: Arc::new(Behind::new(options.behind)),
            disk_warnings: DiskWarnings::new(bucket.options.log_repeat),
            times: TierTimes::default(),
            promote_kib: Arc::new(Semaphore::new(kib(options.promote_bytes_max) as usize)),
            bucket,
            options,
        })
    }

    /// Whether S3 may be asked for chunks that are neither in memory nor on the disk.
    pub fn asks_s3(&self) -> bool {
        let disk = self.options.disk.as_ref();
        self.options.memory_flow.asks_lower && disk.is_none_or(|disk| disk.flow.asks_lower)
    }

    pub fn disk(&self) -> Option<&Disk> {
        self.options.disk.as_ref().map(|tier| &tier.disk)
    }

    /// The peer to ask for a chunk, if there is one. Encrypted chunks are plain in memory, and no peer is asked for them.
    pub fn asks_peer(&self, space: &Space, chunk: &ChunkHash) -> Option<Asking> {
        self.peers_of(space)?.ask((space.key(), *chunk))
    }

    /// Those that may be asked about a space.
    pub fn peers_of(&self, space: &Space) -> Option<&Arc<Peers>> {
        let is_encrypted = space.protection() == Protection::Encrypted;
        self.options.peers.as_ref().filter(|_| !is_encrypted)
    }

    /// Whether a chunk that is on its way here is waited for at a peer.
    pub fn is_asking_peer(&self, space: &Space, key: &ChunkId) -> bool {
        self.peers_of(space).is_some_and(|peers| peers.is_asking(key))
    }

    /// Whether a peer is known to have a chunk.
    pub fn a_peer_has(&self, space: &Space, chunk: &ChunkHash) -> bool {
        let holder = |peers: &Arc<Peers>| peers.holder(&(space.key(), *chunk));
        self.peers_of(space).and_then(holder).is_some()
    }

    /// What each tenant has in memory, and on disks.
    pub fn tenants(&self) -> [Vec<(String, u64)>; 2] {
        [
            self.memory.tenants(),
            self.disk().map(Disk::tenants).unwrap_or_default(),
        ]
    }

    /// For a disk's turn, of the reads and writes that had to wait.
    pub fn disk_waits(&self) -> Times {
        self.disk().map(Disk::waits).unwrap_or_default()
    }

    /// Whether the disk may be asked, and has the chunk.
    pub fn is_on_disk(&self, key: &ChunkId, now: Instant) -> bool {
        self.options.memory_flow.asks_lower && self.disk().is_some_and(|disk| disk.has(key, now))
    }

    pub fn resting(&self, key: &ChunkId) -> Resting {
        if !self.memory.has_due(key) && !self.is_on_disk(key, Instant::now()) {
            return Resting::No;
        }
        let is_unsent = self.disk().is_some_and(|disk| disk.unsent(key) != Unsent::No);
        match is_unsent || self.behind.is_waiting(key) {
            true => Resting::OnItsWay,
            false => Resting::Here,
        }
    }

    /// A prompt was looked up, and so many of its leading chunks were there: what leaves a tier first depends on it.
    pub fn looked_up(&self, chunks: &[ChunkHash], there: usize) {
        self.memory.looked_up(chunks, there);
        if let Some(disk) = self.disk() {
            disk.looked_up(chunks, there);
        }
    }

    /// An engine says what its events tell of chunks, parents first: those that are here have events from now on.
    pub fn bind(&self, space: SpaceKey, scheme: &str, chunks: Vec<BoundChunk>) {
        let hashes: Vec<ChunkHash> = chunks.iter().map(|chunk| chunk.hash).collect();
        self.events.bind(space, scheme, chunks);
        self.memory.tell_present(space, &hashes);
        if let Some(disk) = self.disk() {
            disk.tell_present(space, &hashes);
        }
        self.events.settle(space, scheme, &hashes);
    }

    /// An engine asked for a chunk that this node has, or got from S3.
    pub fn asked_for(&self, space: &Space, chunk: &ChunkHash, tier: Tier) {
        if let Some(admitting) = &self.admitting {
            let is_resting = || self.resting(&(space.key(), *chunk)) == Resting::Here;
            admitting.asked_for(space, chunk, tier, is_resting);
        }
    }

    /// Keeps a chunk that was asked for at `since`, as far as there is room. Its fetch began when the keys had changed
    /// `changes` times; `key` is the key that decrypted it.
    pub fn keep(&self, chunk: &LoadedChunk, since: Instant, changes: u64, key_id: Option<KeyId>) {
        let Some(object) = &chunk.object else { return };
        let key = (chunk.space.key(), chunk.chunk);
        self.asked_for(&chunk.space, &chunk.chunk, chunk.tier);
        let is_unproven = chunk.tier == Tier::Peer && self.bucket.is_present(&key) != Some(true);
        let is_kept = match is_unproven {
            true => self
                .memory
                .insert_unproven(key, &chunk.space, object.clone(), since),
            false => self.memory.insert(key, &chunk.space, object.clone(), since),
        };
        // After it is there: one that comes before the change is forgotten with the others.
        if is_kept && self.bucket.options.keyring.changes() != changes {
            self.memory.delete(&key);
        }
        let promotes = self.options.disk.as_ref().is_some_and(|disk| disk.promotes);
        // What is on the disk counts as stored.
        let to_disk = promotes && matches!(chunk.tier, Tier::Peer | Tier::S3) && !is_unproven;
        if let Some(disk) = self.disk().filter(|_| to_disk)
            && let Ok(permit) = Arc::clone(&self.promote_kib).try_acquire_many_owned(kib(object.len()))
        {
            let (disk, space, hash, object) =
                (disk.clone(), chunk.space.clone(), chunk.chunk, object.clone());
            let bucket = Arc::clone(&self.bucket);
            tokio::spawn(async move {
                let Ok(object) = bucket.outgoing_of(&space, &hash, &object, key_id).await else {
                    return;
                };
                if let Err(error) = disk.write(&space, &hash, object, since, Below::Has).await {
                    tracing::debug!(%error, "a chunk was not written to the disk");
                }
                drop(permit);
            });
        }
    }

    /// Takes over the keys of tenants. What may have been read with one that is gone is forgotten: from memory it would
    /// still be loaded.
    pub fn replace_keys(&self, keys: &Keyring) {
        let lost = self.bucket.options.keyring.replace(keys);
        self.arriving.forget_all();
        self.bucket.cache.keys_changed();
        if let Some(disk) = self.disk() {
            disk.all_of_use();
        }
        for tenant in lost {
            let chunks = self.memory.forget_tenant(&tenant);
            tracing::info!(
                tenant,
                chunks,
                "a key of the tenant was taken away: memory lets go of its chunks"
            );
        }
    }

    /// Removes a chunk from this node.
    pub async fn delete_here(&self, key: &ChunkId) {
        self.behind.cancel(key);
        self.arriving.forget(key);
        if let Some(admitting) = &self.admitting {
            admitting.lock().forget(key);
        }
        self.memory.delete(key);
        if let Some(disk) = self.disk() {
            disk.delete(key).await;
        }
    }

    /// Drops chunks that are too old.
    pub async fn expire(&self) {
        self.memory.expire();
        if let Some(disk) = self.disk() {
            disk.expire().await;
        }
    }

    /// Waits until all chunks that were committed before, in an earlier life as well, are on S3, but for those that
    /// the configuration keeps from it; at most until the deadline.
    pub async fn flush(&self, deadline: Instant) -> Flushed {
        let flushed = self.behind.flush(deadline).await;
        let admission = self.admission_stats().unwrap_or_default();
        Flushed {
            declined: admission.declined_now + self.declined_unknown(),
            forgotten: admission.forgotten,
            unread_disks: self.disk().map_or(0, Disk::unread) as u64,
            ..flushed
        }
    }

    /// Gives up chunks that are not on the lower tiers yet; returns how many chunks are lost by that, and how many
    /// the disks keep.
    pub fn give_up(&self) -> (u64, u64) {
        let is_kept = |key: &ChunkId| self.disk().map(|disk| disk.unsent(key)) == Some(Unsent::Here);
        let given_up = self.behind.give_up(is_kept);
        self.bucket.abort_puts();
        given_up
    }

    pub fn stats(&self) -> TierStats {
        TierStats {
            memory: self.memory.stats(),
            disk: self.disk().map(Disk::stats),
            write_behind: self.behind.stats(),
            admission: self.admission_stats(),
        }
    }

    /// Declined chunks on the disks that the admission does not know of: an earlier life declined them, or they are forgotten.
    fn declined_unknown(&self) -> u64 {
        let declined = self.disk().map(Disk::declined).unwrap_or_default();
        let is_unknown = |key: &&ChunkId| {
            let standing = self
                .admitting
                .as_ref()
                .and_then(|admitting| admitting.lock().standing(key));
            matches!(standing, None | Some(Standing::Doubtful))
        };
        declined.iter().filter(is_unknown).count() as u64
    }

    fn admission_stats(&self) -> Option<AdmissionStats> {
        self.admitting.as_ref().map(|admitting| admitting.lock().stats())
    }
}
