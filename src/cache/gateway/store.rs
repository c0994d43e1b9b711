//! Stores of engines that don't wait: a chunk is a hit on this node as soon as it is committed, and goes to the
//! lower tiers in the background.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::credit::{Credit, Spent};
use super::lower::write_behind;
use super::slot::{self, StoreSlot};
use super::tiers::{Link, Room, Sealed, Tiers};
use crate::cache::tier::TenantShare;
use crate::format::{ChunkHash, ChunkId, KeyError, Space};
use crate::protocol::Tier;

/// A slot that an engine may fill, and its place in the write-behind.
pub struct Reserved {
    pub slot: StoreSlot,
    room: Room,
    share: TenantShare,
    spent: Option<Spent>,
}

/// The reason why a chunk need not, or can't, be stored now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Skip {
    /// The chunk is there already.
    Present,
    /// Another load or store is about to bring it.
    Pending,
    /// There is no room: in the arena, in the write-behind, in the tenant's share, or in the engine's.
    Full,
}

impl Skip {
    /// A stable word for the reason.
    pub fn word(self) -> &'static str {
        match self {
            Self::Present => "present",
            Self::Pending => "pending",
            Self::Full => "full",
        }
    }
}

/// One call's chunks of a space, reserved one after another. Once there is no room for one of them, the rest get
/// none either: each try may look at everything in memory.
pub struct ReserveCall<'a> {
    tiers: &'a Arc<Tiers>,
    space: &'a Space,
    credit: Option<&'a Credit>,
    is_full: bool,
}

impl<'a> ReserveCall<'a> {
    pub(super) fn new(tiers: &'a Arc<Tiers>, space: &'a Space, credit: Option<&'a Credit>) -> Self {
        Self {
            tiers,
            space,
            credit,
            is_full: false,
        }
    }

    /// Reserves a slot for a new chunk that is committed later. Never waits.
    pub fn reserve(&mut self, chunk: &ChunkHash, parent: &ChunkHash) -> Result<Reserved, Skip> {
        let (tiers, space) = (self.tiers, self.space);
        let key = (space.key(), *chunk);
        let now = Instant::now();
        let known = || tiers.bucket.is_present(&key) == Some(true);
        if tiers.memory.has(&key) && !is_unproven(tiers, &key) {
            store_again(tiers, space, chunk, parent);
            tiers.asked_for(space, chunk, Tier::Memory);
            return Err(Skip::Present);
        }
        let is_on_disk = tiers.is_on_disk(&key, now);
        if is_on_disk || known() {
            tiers.asked_for(space, chunk, if is_on_disk { Tier::Disk } else { Tier::S3 });
            tiers.behind.is_there(&key);
            return Err(Skip::Present);
        }
        if tiers.arriving.join(&key).is_some() && !tiers.is_asking_peer(space, &key) {
            return Err(Skip::Pending);
        }
        let reserved = match self.comes_after(&(key.0, *parent)) {
            true => self.take_room(chunk, parent),
            false => None,
        };
        reserved.ok_or_else(|| {
            tiers.behind.refused(key);
            Skip::Full
        })
    }

    /// Whether the parent is stored, or may be.
    fn comes_after(&self, parent: &ChunkId) -> bool {
        if !self.space.kind().is_full() {
            return true;
        }
        let Tiers { bucket, behind, .. } = &**self.tiers;
        if bucket.is_present(parent) == Some(true) {
            // Another node stored it.
            behind.is_there(parent);
        }
        !behind.was_dropped(parent)
    }

    fn take_room(&mut self, chunk: &ChunkHash, parent: &ChunkHash) -> Option<Reserved> {
        if self.is_full {
            return None;
        }
        let reserved = self.try_room(chunk, parent);
        self.is_full = reserved.is_none();
        reserved
    }

    fn try_room(&self, chunk: &ChunkHash, parent: &ChunkHash) -> Option<Reserved> {
        let (tiers, space) = (self.tiers, self.space);
        let bytes = space.layout().object_len();
        let spent = match self.credit {
            Some(credit) => Some(credit.try_spend(bytes)?),
            None => None,
        };
        let place = || {
            let share = tiers.memory.share(space.tenant(), bytes)?;
            let room = tiers.behind.room(bytes, link(space, chunk, parent))?;
            Some((share, room, slot::reserve(&tiers.arena, space).ok()?))
        };
        let Some((share, room, slot)) = place() else {
            tiers.behind.hurry();
            return None;
        };
        Some(Reserved {
            slot,
            room,
            share,
            spent,
        })
    }
}

fn link<'a>(space: &Space, chunk: &'a ChunkHash, parent: &'a ChunkHash) -> Link<'a> {
    Link {
        kind: space.kind(),
        chunk,
        parent: Some(parent),
    }
}

/// Sends a chunk down once more that is in memory but was given up on its way.
fn store_again(tiers: &Arc<Tiers>, space: &Space, chunk: &ChunkHash, parent: &ChunkHash) {
    let key = (space.key(), *chunk);
    let has_lost_parent = space.kind().is_full() && tiers.behind.was_dropped(&(key.0, *parent));
    if !tiers.behind.was_dropped(&key) || has_lost_parent {
        return;
    }
    let object = tiers.memory.get(&key, space).and_then(|found| found.object);
    if let Some(object) = object
        && let Some(room) = tiers.behind.room(object.len(), link(space, chunk, parent))
    {
        tiers.memory.soil(&key);
        let object = Sealed::Now(object);
        write_behind(tiers, room, space, chunk, Some(parent), object, false);
    }
}

/// Whether a chunk in memory came from a peer that may not have stored it yet, and may never. It counts as not stored: an
/// engine that stores it is promised that S3 will have it, and has bytes of its own.
fn is_unproven(tiers: &Tiers, key: &ChunkId) -> bool {
    tiers.options.memory_flow.stores_lower
        && tiers.memory.is_unproven(key)
        && tiers.bucket.is_present(key) != Some(true)
}

/// See [`Gateway::commit`](super::Gateway::commit).
pub fn commit(
    tiers: &Arc<Tiers>,
    chunk: ChunkHash,
    parent: ChunkHash,
    reserved: Reserved,
) -> Result<bool, KeyError> {
    let Reserved {
        slot,
        room,
        share,
        spent,
    } = reserved;
    // No engine writes there any more.
    drop(spent);
    let space = slot.space().clone();
    let key = (space.key(), chunk);
    // A space that may not be served is not reserved for, so only a reload since then can have changed that.
    let digest = tiers.bucket.options.writes(&space).inspect_err(|error| {
        tiers.behind.refused(key);
        tiers.bucket.warnings.keyless.tell(error);
    })?;
    let (header, payload) = slot.split();
    drop(share);
    let lower = tiers.options.memory_flow.stores_lower && tiers.options.memory.min_accesses == 0;
    if !tiers.memory.insert_new(key, &space, payload.clone(), lower) {
        return Ok(false);
    }
    let (tell, sealed) = oneshot::channel();
    let (in_memory, of) = (Arc::clone(&tiers.memory), space.clone());
    let peers = tiers.peers_of(&space).cloned();
    // Off the runtime: digests take a millisecond and more.
    tokio::task::spawn_blocking(move || {
        let object = slot::seal(&digest, &of, &chunk, &parent, header, &payload);
        in_memory.sealed(&key, object.clone());
        if let Some(peers) = peers {
            peers.committed(key);
        }
        // The receiver is gone where the chunk goes no lower, or was dropped.
        let _ = tell.send(object);
    });
    if lower {
        let object = Sealed::Soon(sealed);
        write_behind(tiers, room, &space, &chunk, Some(&parent), object, false);
    } else {
        tiers.behind.keeps_back(true);
    }
    Ok(true)
}
