//! What S3 is given, where `[store] admit` is `auto`: each chunk is offered to the admission when its turn comes, in the
//! order of the commits, so parents first. A declined chunk goes to the disk alone and may then leave memory.
//!
//! A declined chunk that is asked for again is offered once more, after its declined ancestors. One task does that for
//! all of them, one after the other, with the chunk from memory or from the disk. The admission forgets, and knows of no
//! earlier life of the node: of a chunk that is here and that it does not know, only S3 knows whether it lacks it. So S3 is
//! asked, once for each chunk.

use std::sync::Arc;

use tokio::time::Instant;

use super::write_behind;
use crate::arena::Slot;
use crate::cache::admission::{Offer, Standing};
use crate::cache::existence::{ProbeAnswer, Wanted};
use crate::cache::gateway::fetch::read_verified;
use crate::cache::gateway::tiers::{Admitting, Link, Next, Resting, Sealed, Tiers};
use crate::format::{ChunkHash, ChunkId, Header, Space};

/// Where a chunk goes whose turn has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// To the disk and S3.
    Down,
    /// To the disk alone.
    Declined,
    /// To the disk, and to S3 after its ancestors, if they are admitted: they may have to be read, and no other store
    /// waits for that.
    AfterAncestors,
}

pub fn way(tiers: &Tiers, next: &Next) -> Way {
    let Some(admitting) = tiers.admitting.as_ref().filter(|_| !next.is_admitted) else {
        return Way::Down;
    };
    let (space, key) = (&next.space, (next.space.key(), next.chunk));
    let parent = next.parent.filter(|_| space.kind().is_full());
    let (mut needs_ancestors, mut is_doubtful) = (false, false);
    if let Some(parent) = parent {
        let parent_key = (key.0, parent);
        let is_there = tiers.bucket.is_present(&parent_key) == Some(true);
        let is_resting = tiers.resting(&parent_key) == Resting::Here;
        let mut admission = admitting.lock();
        if is_there {
            // Another node may have stored it.
            admission.is_there(&parent_key);
        }
        let comes_again = admission.standing(&key).is_some();
        let standing = admission.standing(&parent_key);
        is_doubtful = match standing {
            Some(standing) => standing == Standing::Doubtful,
            None => is_resting,
        };
        needs_ancestors = is_doubtful || comes_again && standing == Some(Standing::Declined);
    }
    match offer(
        tiers,
        admitting,
        space,
        next.chunk,
        parent,
        is_doubtful,
        next.bytes,
    ) {
        true => Way::Down,
        false if needs_ancestors => Way::AfterAncestors,
        false => Way::Declined,
    }
}

/// Offers the declined chunks again that engines ask for, for as long as the future is polled.
pub async fn second_chances(tiers: &Arc<Tiers>) {
    let Some(admitting) = &tiers.admitting else { return };
    loop {
        let (space, chunk) = admitting.next().await;
        let (key, at_ms) = ((space.key(), chunk), tiers.memory.access(&chunk).at_ms);
        let bytes = space.layout().object_len() as u64;
        // The walk along a long chain would be for nothing.
        if admitting.lock().is_used_up(&key, bytes, at_ms) {
            continue;
        }
        if find_missing(tiers, admitting, &space, chunk).await.is_some() {
            offer_chain(tiers, admitting, &space, chunk).await;
        }
    }
}

fn offer(
    tiers: &Tiers,
    admitting: &Admitting,
    space: &Space,
    chunk: ChunkHash,
    parent: Option<ChunkHash>,
    is_doubtful: bool,
    bytes: usize,
) -> bool {
    let access = tiers.memory.access(&chunk);
    let offer = Offer {
        key: (space.key(), chunk),
        parent: parent.map(|parent| (space.key(), parent)),
        is_doubtful,
        bytes: bytes as u64,
        added: access.added,
    };
    admitting.lock().offer(&offer, access.at_ms).is_ok()
}

/// Offers a chunk and its ancestors again, as far as they were declined and are here: the first of the chain first, until
/// one is not admitted.
async fn offer_chain(tiers: &Arc<Tiers>, admitting: &Admitting, space: &Space, chunk: ChunkHash) {
    let chain = admitting.lock().declined_chain(&(space.key(), chunk));
    for key in chain.into_iter().flatten() {
        let Some(object) = object_here(tiers, space, &key.1).await else {
            return;
        };
        let (chunk, bytes, parent) = (key.1, object.len(), parent_of(space, &object));
        if !offer(tiers, admitting, space, chunk, parent, false, bytes) {
            return;
        }
        let link = Link {
            kind: space.kind(),
            chunk: &chunk,
            parent: parent.as_ref(),
        };
        let Some(room) = tiers.behind.room(bytes, link) else {
            return admitting.lock().take_back(&key, bytes as u64);
        };
        tiers.memory.soil(&key);
        write_behind(
            tiers,
            room,
            space,
            &chunk,
            parent.as_ref(),
            Sealed::Now(object),
            true,
        );
    }
}

/// Notes which of a chunk and its ancestors that are here S3 lacks, as far as the admission does not remember them. None
/// if that can't be told, or an ancestor is neither here nor on S3: then the chunk is of no use there. The first chunk of
/// a prompt that was declined long ago is among these, for a root can't be told from a chunk that is gone.
async fn find_missing(
    tiers: &Tiers,
    admitting: &Admitting,
    space: &Space,
    mut chunk: ChunkHash,
) -> Option<()> {
    let mut missing: Vec<(ChunkId, Option<ChunkId>)> = Vec::new();
    let mut is_orphan = false;
    loop {
        let key = (space.key(), chunk);
        let (standing, parent) = {
            let admission = admitting.lock();
            (admission.standing(&key), admission.declined_parent(&key))
        };
        if standing.is_some_and(|standing| standing != Standing::Doubtful) {
            match parent {
                Some(parent) => chunk = parent.1,
                None => break,
            }
            continue;
        }
        let resting = tiers.resting(&key);
        let is_there = resting == Resting::OnItsWay || tiers.bucket.is_present(&key) == Some(true);
        if is_there || asks_s3(tiers, space, &chunk).await? {
            admitting.lock().is_there(&key);
            if let Some(disk) = tiers.disk().filter(|_| resting == Resting::Here) {
                disk.clean(&key).await;
            }
            break;
        }
        if resting == Resting::No {
            is_orphan = true;
            break;
        }
        let parent = parent_of(space, &object_here(tiers, space, &chunk).await?);
        missing.push((key, parent.map(|parent| (space.key(), parent))));
        match parent {
            Some(parent) => chunk = parent,
            None => break,
        }
    }
    let mut admission = admitting.lock();
    let mut of_top = is_orphan;
    for (key, parent) in missing.into_iter().rev() {
        admission.is_missing(key, parent, std::mem::take(&mut of_top));
    }
    (!is_orphan).then_some(())
}

/// Whether S3 has a chunk. None: it does not answer.
async fn asks_s3(tiers: &Tiers, space: &Space, chunk: &ChunkHash) -> Option<bool> {
    let deadline = Instant::now() + tiers.bucket.options.lookup_deadline;
    match tiers
        .bucket
        .prober
        .ask(space, chunk, Wanted::Existence, deadline)
        .await
    {
        ProbeAnswer::Present(_) | ProbeAnswer::Left => Some(true),
        ProbeAnswer::Absent => Some(false),
        ProbeAnswer::Unknown(_) => None,
    }
}

/// The whole object, from memory or the disk.
async fn object_here(tiers: &Tiers, space: &Space, chunk: &ChunkHash) -> Option<Slot> {
    let key = (space.key(), *chunk);
    if let Some(object) = tiers.memory.object(&key) {
        return Some(object);
    }
    let disk = tiers.disk().filter(|_| tiers.is_on_disk(&key, Instant::now()))?;
    let slot = tiers.arena.try_reserve(space.layout().object_len())?;
    let object = read_verified(tiers, disk, space, chunk, slot).await.ok()?;
    Some(object.freeze())
}

/// The chunk that it is of no use without, or the root.
pub fn parent_of(space: &Space, object: &Slot) -> Option<ChunkHash> {
    let header = space.kind().is_full().then(|| Header::parse(object));
    header?.ok().map(|header| header.parent)
}
