//! Chunks that the disks have and S3 has not: they were committed in an earlier life of this node, which ended
//! before they were sent. Lookups find them here, so no engine stores them again; the node must send them by
//! itself.
//!
//! They are sent one after the other, each with a slot that nothing else wants at that moment and a turn among the
//! other PUTs. So they take no room of the write-behind, and a new store waits for one of them at most. One that can't
//! be sent now, because its key is not here for example, is tried again after all others.
//!
//! The write-behind lists a chunk as unsent until S3 has it, it is deleted, or it is lost: a disk that is taken out
//! ends nothing, and its chunks are sent when it comes back. A chunk is lost when its file is gone, or can't be
//! read twice; it then counts as dropped.

use std::collections::HashSet;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::cache::gateway::bucket::StoreOutcome;
use crate::cache::gateway::fetch::read_verified;
use crate::cache::gateway::tiers::{DiskTier, Tiers};
use crate::cache::tier::{Backlog, Disk, Unsent};
use crate::format::{ChunkHash, ChunkId, HeaderError, Space, SpaceKey};

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
        let Some(tier) = &tiers.options.disk else { return };
        let disk = &tier.disk;
        let mut pause = Pause::new(&tiers);
        let mut unsent = Vec::new();
        loop {
            if !backlog.chunks.is_empty() {
                tracing::info!(
                    chunks = backlog.chunks.len(),
                    "sending the chunks that the disks have and S3 lacks"
                );
            }
            unsent.extend(backlog.chunks.drain(..).map(Waiting::new));
            unsent = send_each(&tiers, tier, unsent, &mut pause).await;
            let wait = match unsent.is_empty() {
                true => pause.most,
                false => pause.longer(),
            };
            backlog = tokio::select! {
                more = disk.more_backlog() => more,
                () = tokio::time::sleep(wait), if !homeless.is_empty() || !unsent.is_empty() => {
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

/// A chunk to be sent.
struct Waiting {
    space: Space,
    chunk: ChunkHash,
    /// The last attempt found that its key is not here.
    no_key: Option<HeaderError>,
}

impl Waiting {
    fn new((space, chunk): (Space, ChunkHash)) -> Self {
        let no_key = None;
        Self { space, chunk, no_key }
    }
}

/// The time between two attempts.
struct Pause {
    next: Duration,
    base: Duration,
    most: Duration,
}

impl Pause {
    fn new(tiers: &Tiers) -> Self {
        let options = tiers.behind.options();
        Self {
            next: options.retry_base,
            base: options.retry_base,
            most: options.retry_max,
        }
    }

    fn longer(&mut self) -> Duration {
        let wait = self.next.mul_f64(0.5 + fastrand::f64() / 2.0);
        self.next = (self.next * 2).min(self.most);
        wait
    }
}

/// The outcome of an attempt.
enum Sent {
    /// S3 has the chunk.
    Done,
    /// S3 does not take it, or there is no slot: that may hold for the next one too.
    NotNow,
    /// It can't be read, or can't leave this node.
    ItsOwn(Option<HeaderError>),
}

/// Tries each chunk once; returns those that are left.
async fn send_each(tiers: &Tiers, tier: &DiskTier, waiting: Vec<Waiting>, pause: &mut Pause) -> Vec<Waiting> {
    let keyring = &tiers.bucket.options.keyring;
    let is_last = !tier.flow.stores_lower;
    let mut left = Vec::new();
    for mut one in waiting {
        let key = (one.space.key(), one.chunk);
        // It may have been deleted meanwhile, or sent by an engine's store.
        if !tiers.behind.is_backlog(&key) {
            continue;
        }
        match tier.disk.unsent(&key) {
            // The chunk comes back with its disk.
            Unsent::Out => continue,
            Unsent::No => {
                tiers.behind.lost([key]);
                continue;
            }
            Unsent::Here => {}
        }
        if let Some(error) = one.no_key.as_ref().filter(|error| !keyring.has(error)) {
            tiers.bucket.warnings.keyless.tell(error);
            left.push(one);
            continue;
        }
        // Where the disk is the last tier by now, the chunk has arrived.
        let sent = match is_last {
            true => Sent::Done,
            false => try_send(tiers, &tier.disk, &one.space, &one.chunk).await,
        };
        one.no_key = match sent {
            Sent::Done => {
                tiers.behind.backlog_ends(&key, is_last);
                tier.disk.clean(&key).await;
                pause.next = pause.base;
                continue;
            }
            Sent::NotNow => {
                tokio::time::sleep(pause.longer()).await;
                None
            }
            Sent::ItsOwn(no_key) => no_key,
        };
        left.push(one);
    }
    left
}

/// Tries once. Nothing is held between two attempts.
async fn try_send(tiers: &Tiers, disk: &Disk, space: &Space, chunk: &ChunkHash) -> Sent {
    let bucket = &tiers.bucket;
    if bucket.is_present(&(space.key(), *chunk)) == Some(true) {
        return Sent::Done;
    }
    // Before it is read.
    if let Err(error) = bucket.may_leave(space) {
        bucket.warnings.waits.tell(&error);
        return Sent::ItsOwn(None);
    }
    let Some(slot) = tiers.arena.try_reserve(space.layout().object_len()) else {
        return Sent::NotNow;
    };
    let object = match read_verified(tiers, disk, space, chunk, slot).await {
        Ok(object) => object,
        Err(not_read) => return Sent::ItsOwn(not_read.no_key),
    };
    let permits = bucket.put_permits(object.len()).await;
    let object = match bucket.outgoing(space, chunk, &object.freeze()).await {
        Ok(object) => object,
        Err(error) => {
            bucket.warnings.waits.tell(&error);
            return Sent::ItsOwn(None);
        }
    };
    let deadline = Instant::now() + tiers.behind.options().deadline;
    match bucket
        .store_object(space, *chunk, object, deadline, permits)
        .await
    {
        StoreOutcome::Stored | StoreOutcome::Present => Sent::Done,
        StoreOutcome::Pending => Sent::ItsOwn(None),
        StoreOutcome::Failed(error) => {
            tiers.behind.failed();
            bucket.warnings.waits.tell(&error);
            Sent::NotNow
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
