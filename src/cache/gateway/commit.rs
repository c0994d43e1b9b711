//! Stores of engines that don't wait: a chunk is a hit on this node as soon as it is committed, and goes to the lower tiers
//! behind their back.

use crate::protocol::Flushed;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::behind::{BehindStats, Room, Sealed};
use super::credit::{Credit, Spent};
use super::{Gateway, StoreSlot};
use crate::cache::tier::{Disk, DiskStats, MemoryStats, TenantShare, Unsent};
use crate::format::{ChunkHash, ChunkId, Space};

/// A slot that an engine may fill, and its place in the write-behind.
pub struct Reserved {
    pub slot: StoreSlot,
    room: Room,
    share: TenantShare,
    spent: Option<Spent>,
}

/// Why a chunk need not, or can't, be stored now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// It is there already.
    Present,
    /// Somebody else is about to bring it.
    Pending,
    /// There is no room: in the arena, in the write-behind, in the tenant's share, or in the engine's.
    Full,
}

impl Skip {
    /// Stable word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Present => "present",
            Self::Pending => "pending",
            Self::Full => "full",
        }
    }
}

/// Figures of the tiers of this node.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct TierStats {
    pub memory: MemoryStats,
    pub disk: Option<DiskStats>,
    pub write_behind: BehindStats,
}

impl Gateway {
    /// A slot for a new chunk. Never waits.
    pub fn reserve_behind(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        parent: &ChunkHash,
    ) -> Result<Reserved, Skip> {
        self.reserve_on_credit(space, chunk, parent, None)
    }

    /// The same, with a limit on what the engine holds at a time.
    pub fn reserve_on_credit(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        parent: &ChunkHash,
        credit: Option<&Credit>,
    ) -> Result<Reserved, Skip> {
        // Without tiers nobody would keep it.
        let tiers = self.0.tiers.as_ref().ok_or(Skip::Full)?;
        let key = (space.key(), *chunk);
        let now = Instant::now();
        let known = || self.0.cache.is_present(&key, now) == Some(true);
        if tiers.memory.has(&key) {
            self.store_again(space, chunk, parent);
            return Err(Skip::Present);
        }
        if tiers.is_on_disk(&key, now) || known() {
            tiers.behind.is_there(&key);
            return Err(Skip::Present);
        }
        if tiers.arriving.join(&key).is_some() {
            return Err(Skip::Pending);
        }
        self.take_room(space, &key, parent, credit).ok_or_else(|| {
            tiers.behind.refused(key);
            Skip::Full
        })
    }

    fn take_room(
        &self,
        space: &Space,
        key: &ChunkId,
        parent: &ChunkHash,
        credit: Option<&Credit>,
    ) -> Option<Reserved> {
        let tiers = self.0.tiers.as_ref()?;
        let parent = (key.0, *parent);
        if self.0.cache.is_present(&parent, Instant::now()) == Some(true) {
            // Another node stored it.
            tiers.behind.is_there(&parent);
        }
        if tiers.behind.was_dropped(&parent) {
            return None;
        }
        let bytes = space.layout().object_len();
        let spent = match credit {
            Some(credit) => Some(credit.try_spend(bytes)?),
            None => None,
        };
        let share = tiers.memory.share(space.tenant(), bytes)?;
        let room = tiers.behind.room(bytes, Some(&parent))?;
        let slot = self.reserve(space).ok()?;
        Some(Reserved {
            slot,
            room,
            share,
            spent,
        })
    }

    /// A chunk that is in memory, but was given up on its way down, is sent there once more.
    fn store_again(&self, space: &Space, chunk: &ChunkHash, parent: &ChunkHash) {
        let Some(tiers) = &self.0.tiers else { return };
        let key = (space.key(), *chunk);
        if !tiers.behind.was_dropped(&key) || tiers.behind.was_dropped(&(key.0, *parent)) {
            return;
        }
        let object = tiers.memory.get(&key, space).and_then(|found| found.object);
        if let Some(object) = object
            && let Some(room) = tiers.behind.room(object.len(), Some(&(key.0, *parent)))
        {
            tiers.memory.soil(&key);
            self.write_behind(room, space, chunk, Some(parent), Sealed::Now(object));
        }
    }

    /// The chunk is filled: it is a hit from now on. Returns at once. False if somebody else's came first.
    pub fn commit(&self, chunk: ChunkHash, parent: ChunkHash, reserved: Reserved) -> bool {
        let Some(tiers) = &self.0.tiers else { return false };
        let Reserved {
            slot,
            room,
            share,
            spent,
        } = reserved;
        // Nobody writes there any more.
        drop(spent);
        let space = slot.space().clone();
        let key = (space.key(), chunk);
        let (header, payload) = slot.split();
        drop(share);
        let lower = tiers.options.memory_flow.stores_lower && tiers.options.memory.min_accesses == 0;
        if !tiers.memory.insert_new(key, &space, payload.clone(), lower) {
            return false;
        }
        let (tell, sealed) = oneshot::channel();
        let (gateway, of) = (self.clone(), space.clone());
        // Digests take a millisecond and more.
        tokio::task::spawn_blocking(move || {
            let object = gateway.seal(&of, &chunk, &parent, header, &payload);
            if let Some(tiers) = &gateway.0.tiers {
                tiers.memory.sealed(&key, object.clone());
            }
            // Nobody listens where the chunk goes no lower, or was dropped.
            let _ = tell.send(object);
        });
        if lower {
            self.write_behind(room, &space, &chunk, Some(&parent), Sealed::Soon(sealed));
        } else {
            tiers.behind.keeps_back(true);
        }
        true
    }

    /// Waits until all that was committed before, in an earlier life as well, is on S3, but for what the configuration keeps
    /// from it; at most until the deadline.
    pub async fn flush(&self, deadline: Instant) -> Flushed {
        match &self.0.tiers {
            Some(tiers) => Flushed {
                unread_disks: tiers.disk().map_or(0, Disk::unread) as u64,
                ..tiers.behind.flush(deadline).await
            },
            None => Flushed::default(),
        }
    }

    /// Gives up what is not on the lower tiers yet; answers how many chunks are lost with that, and how many the disks keep:
    /// these are sent the next time.
    pub fn give_up(&self) -> (u64, u64) {
        let given_up = self.0.tiers.as_ref().map_or((0, 0), |tiers| {
            let is_kept = |key: &ChunkId| tiers.disk().map(|disk| disk.unsent(key)) == Some(Unsent::Here);
            tiers.behind.give_up(is_kept)
        });
        self.abort_puts();
        given_up
    }

    /// Keeps those of the chunks that are in memory there until `until`; answers how many.
    pub fn pin(&self, space: &Space, chunks: &[ChunkHash], until: Instant) -> usize {
        let tiers = self.0.tiers.as_ref();
        tiers.map_or(0, |tiers| tiers.memory.pin(space.key(), chunks, until))
    }

    pub fn unpin(&self, space: &Space, chunks: &[ChunkHash]) -> usize {
        let tiers = self.0.tiers.as_ref();
        tiers.map_or(0, |tiers| tiers.memory.unpin(space.key(), chunks))
    }

    pub fn tier_stats(&self) -> TierStats {
        self.0
            .tiers
            .as_ref()
            .map_or_else(TierStats::default, |tiers| TierStats {
                memory: tiers.memory.stats(),
                disk: tiers.disk().map(Disk::stats),
                write_behind: tiers.behind.stats(),
            })
    }
}
