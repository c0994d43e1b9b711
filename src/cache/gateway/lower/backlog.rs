//! Chunks that the disks have and S3 has not: they were committed in an earlier life of this node, which ended
//! before they were sent. Lookups find them here, so no engine stores them again; the node must send them by
//! itself.
//!
//! They are sent one after the other, each with a slot that nothing else wants at that moment and a turn among the
//! other PUTs. So they take no room of the write-behind, and a new store waits for one of them at most.
//!
//! The write-behind lists a chunk as unsent until S3 has it, it is deleted, or it is lost: a disk that is taken out
//! ends nothing, and its chunks are sent when it comes back. A chunk is lost when its file is gone, or can't be
//! read twice; it then counts as dropped.

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;

use tokio::time::Instant;

use crate::cache::gateway::bucket::StoreOutcome;
use crate::cache::gateway::fetch::read_verified;
use crate::cache::gateway::tiers::Tiers;
use crate::cache::tier::{Backlog, Disk, Unsent};
use crate::format::{ChunkHash, ChunkId, Space, SpaceKey};

/// Limit of a space's JSON, which is far smaller, with its tens of thousands of planes at most.
const SPACE_JSON_BYTES_MAX: usize = 64 << 20;

/// Sends the chunks that the disks had at start, and those of disks that are taken up again. A flush waits for it
/// from now on, and it goes on for as long as the returned future is polled.
pub fn send_backlog(tiers: &Arc<Tiers>) -> impl Future<Output = ()> + Send + use<> {
    let (tiers, mut backlog) = (Arc::clone(tiers), Backlog::default());
    let mut homeless = HashSet::new();
    if let Some(disk) = tiers.disk() {
        backlog = disk.take_backlog();
        take_on(&tiers, &backlog, &mut homeless);
    }
    async move {
        let Some(disk) = tiers.disk() else { return };
        let pause = tiers.behind.options().retry_max;
        loop {
            if !backlog.chunks.is_empty() {
                tracing::info!(
                    chunks = backlog.chunks.len(),
                    "sending the chunks that the disks have and S3 lacks"
                );
            }
            for (space, chunk) in &backlog.chunks {
                send_from_disk(&tiers, space, chunk).await;
            }
            backlog = tokio::select! {
                more = disk.more_backlog() => more,
                () = tokio::time::sleep(pause), if !homeless.is_empty() => {
                    find_spaces(&tiers, disk, &mut homeless).await;
                    disk.take_backlog()
                }
            };
            take_on(&tiers, &backlog, &mut homeless);
        }
    }
}

/// Makes a space known: chunks on the disks may have waited for that.
pub fn knows(tiers: &Tiers, space: &Space) {
    if let Some(disk) = tiers.disk().filter(|disk| disk.is_homeless(space.key())) {
        let (disk, space) = (disk.clone(), space.clone());
        tokio::spawn(async move { disk.adopt(&space).await });
    }
}

/// Asks S3 for unknown spaces that the disks have chunks of.
async fn find_spaces(tiers: &Tiers, disk: &Disk, homeless: &mut HashSet<SpaceKey>) {
    homeless.retain(|space| disk.is_homeless(*space));
    for &key in &*homeless {
        let bucket = &tiers.bucket;
        let name = bucket.options.keys.space_json(key);
        let deadline = Instant::now() + bucket.options.lookup_deadline;
        let json = bucket
            .store
            .read(&name, SPACE_JSON_BYTES_MAX, deadline)
            .await
            .ok();
        let text = json.and_then(|json| String::from_utf8(json.into()).ok());
        if let Some(space) = text.and_then(|text| Space::from_json(&text).ok())
            && space.key() == key
        {
            disk.adopt(&space).await;
        }
    }
}

async fn send_from_disk(tiers: &Tiers, space: &Space, chunk: &ChunkHash) {
    let Some(tier) = &tiers.options.disk else { return };
    let key = (space.key(), *chunk);
    let options = tiers.behind.options();
    let mut wait = options.retry_base;
    // The chunk may be deleted meanwhile, or sent by an engine's store.
    while tiers.behind.is_backlog(&key) {
        match tier.disk.unsent(&key) {
            // The chunk comes back with its disk.
            Unsent::Out => return,
            Unsent::No => return tiers.behind.lost([key]),
            Unsent::Here => {}
        }
        let is_last = !tier.flow.stores_lower;
        // Where the disk is the last tier by now, the chunk has arrived.
        if is_last || try_send(tiers, &tier.disk, space, chunk).await {
            tiers.behind.backlog_ends(&key, is_last);
            tier.disk.clean(&key).await;
            return;
        }
        if tiers.behind.is_backlog(&key) {
            tokio::time::sleep(wait.mul_f64(0.5 + fastrand::f64())).await;
            wait = (wait * 2).min(options.retry_max);
        }
    }
}

/// Tries once; true if S3 has the chunk now. Nothing is held between two attempts.
async fn try_send(tiers: &Tiers, disk: &Disk, space: &Space, chunk: &ChunkHash) -> bool {
    if tiers.bucket.is_present(&(space.key(), *chunk)) == Some(true) {
        return true;
    }
    let Some(slot) = tiers.arena.try_reserve(space.layout().object_len()) else {
        return false;
    };
    let Ok(object) = read_verified(tiers, disk, space, chunk, slot).await else {
        return false;
    };
    let permits = tiers.bucket.put_permits(object.len()).await;
    let Ok(object) = tiers.bucket.outgoing(space, chunk, &object.freeze()).await else {
        return false;
    };
    let deadline = Instant::now() + tiers.behind.options().deadline;
    let stored = tiers
        .bucket
        .store_object(space, *chunk, object, deadline, permits);
    match stored.await {
        StoreOutcome::Stored | StoreOutcome::Present => true,
        StoreOutcome::Pending => false,
        StoreOutcome::Failed(error) => {
            tiers.behind.failed();
            tiers.bucket.warnings.waits.tell(&error);
            false
        }
    }
}

/// Adds a backlog; a flush waits for it from now on.
fn take_on(tiers: &Tiers, backlog: &Backlog, homeless: &mut HashSet<SpaceKey>) {
    let keys = backlog.chunks.iter().map(|(space, chunk)| (space.key(), *chunk));
    // Some were sent since their disk was read: the list before may have had them too.
    let is_unsent = |key: &ChunkId| tiers.disk().is_some_and(|disk| disk.unsent(key) != Unsent::No);
    let keys = keys.filter(is_unsent);
    tiers
        .behind
        .add_backlog(keys.chain(backlog.homeless.iter().copied()));
    homeless.extend(backlog.homeless.iter().map(|(space, _)| *space));
    tiers.behind.lost(backlog.missing.iter().copied());
    tiers.behind.lost_files(backlog.damaged);
}
