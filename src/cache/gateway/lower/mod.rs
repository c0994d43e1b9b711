//! The way down: chunks in memory go to the disk and to S3 in the background, in the order of their commits
//! (`tiers/write_behind.rs`), and are tried again until they are there.

mod backlog;

use std::sync::Arc;

use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

pub use self::backlog::{knows, send_backlog};
use super::bucket::{Bucket, StoreOutcome};
use super::chunk::LoadedChunk;
use super::fetch::verify_resident;
use super::tiers::{Link, Room, Sealed, Tiers, WriteBehindJob};
use crate::arena::Slot;
use crate::cache::tier::{Below, Wrote};
use crate::format::{ChunkHash, Space};
use crate::protocol::Tier;
use crate::s3::object::{ErrorKind, ObjectError, Operation};

/// The chunk, if it is in memory. A chunk that was stored here is sent lower once it has been asked for often
/// enough.
pub fn resident(tiers: &Arc<Tiers>, space: &Space, chunk: &ChunkHash) -> Option<LoadedChunk> {
    let found = tiers.memory.get(&(space.key(), *chunk), space)?;
    if found.is_due
        && let Some(object) = &found.object
    {
        goes_lower(tiers, space, chunk, object);
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

fn goes_lower(tiers: &Arc<Tiers>, space: &Space, chunk: &ChunkHash, object: &Slot) {
    let key = (space.key(), *chunk);
    if !tiers.options.memory_flow.stores_lower || tiers.bucket.is_present(&key) == Some(true) {
        return;
    }
    let link = Link {
        kind: space.kind(),
        chunk,
        parent: None,
    };
    let Some(room) = tiers.behind.room(object.len(), link) else {
        tiers.memory.put_off(&key);
        return;
    };
    tiers.memory.soil(&key);
    tiers.behind.keeps_back(false);
    write_behind(tiers, room, space, chunk, None, Sealed::Now(object.clone()));
}

/// Queues a chunk that is in memory for the lower tiers.
pub fn write_behind(
    tiers: &Arc<Tiers>,
    room: Room,
    space: &Space,
    chunk: &ChunkHash,
    parent: Option<&ChunkHash>,
    object: Sealed,
) {
    let job = WriteBehindJob::new(&tiers.memory, space, chunk, object);
    if tiers.behind.push(room, chunk, parent, job) && tiers.behind.needs_dispatcher() {
        tokio::spawn(dispatch(Arc::clone(tiers)));
    }
}

/// Starts waiting jobs in their order, as the bytes in flight allow.
async fn dispatch(tiers: Arc<Tiers>) {
    while let Some(bytes) = tiers.behind.next_bytes() {
        let permits = tiers.bucket.put_permits(bytes).await;
        // The first job may be another one by now.
        let Some((number, chunk, mut job)) = tiers.behind.start(bytes) else {
            continue;
        };
        let of = Arc::clone(&tiers);
        let task = tokio::spawn(async move {
            let outcome = lower(&of, chunk, &mut job, permits).await;
            of.times.behind.observe(job.since.elapsed());
            drop(job);
            of.behind.ends(number, &outcome);
        });
        tiers.behind.began(number, task.abort_handle());
    }
}

/// Brings a chunk down to the lowest tier that is to have it.
async fn lower(
    tiers: &Tiers,
    chunk: ChunkHash,
    job: &mut WriteBehindJob,
    permits: Option<OwnedSemaphorePermit>,
) -> StoreOutcome {
    let (space, bucket) = (&job.space, &tiers.bucket);
    let object = match &mut job.object {
        Sealed::Now(object) => object.clone(),
        Sealed::Soon(object) => match object.await {
            Ok(object) => object,
            Err(_) => return broken(bucket, space, &chunk, "its digests were not computed"),
        },
    };
    let mut sealed = match bucket.outgoing(space, &chunk, &object).await {
        Ok(sealed) => Some(sealed),
        Err(error) => return StoreOutcome::Failed(error),
    };
    let disk = tiers.options.disk.as_ref();
    let goes_lower = disk.is_none_or(|disk| disk.flow.stores_lower);
    let written = match &sealed {
        Some(sealed) => write_to_disk(tiers, space, &chunk, sealed, job.since, goes_lower).await,
        None => false,
    };
    if !goes_lower {
        return match written {
            true => {
                tiers.behind.keeps_back(true);
                StoreOutcome::Stored
            }
            false => broken(bucket, space, &chunk, "no disk had room for it"),
        };
    }
    let options = tiers.behind.options();
    let mut wait = options.retry_base;
    let mut permits = permits;
    loop {
        let deadline = Instant::now() + options.deadline;
        // Nothing but the chunk itself is held between two attempts.
        let outcome = match sealed.take() {
            Some(sealed) => bucket.store_object(space, chunk, sealed, deadline, permits).await,
            None => match bucket.outgoing(space, &chunk, &object).await {
                Ok(sealed) => bucket.store_object(space, chunk, sealed, deadline, permits).await,
                Err(error) => StoreOutcome::Failed(error),
            },
        };
        match outcome {
            StoreOutcome::Failed(error) => {
                tiers.behind.failed();
                bucket.warnings.waits.tell(&error);
                let keys = &bucket.options.keyring;
                if error.kind == ErrorKind::Checksum
                    && verify_resident(keys, space, &chunk, &object).await.is_err()
                {
                    // The slot itself is damaged: it must not be loaded, and no attempt can send it.
                    tiers.memory.delete(&(space.key(), chunk));
                    return StoreOutcome::Failed(error);
                }
            }
            // Another store of the chunk is under way, which may fail.
            StoreOutcome::Pending => {}
            outcome => {
                if let Some(disk) = tiers.disk() {
                    disk.clean(&(space.key(), chunk)).await;
                }
                return outcome;
            }
        }
        // Spread the retries, so that they don't come all at once when the server is back.
        tokio::time::sleep(wait.mul_f64(0.5 + fastrand::f64())).await;
        wait = (wait * 2).min(options.retry_max);
        permits = bucket.put_permits(object.len()).await;
    }
}

/// Writes a chunk to the disk; returns whether a disk has it now.
async fn write_to_disk(
    tiers: &Tiers,
    space: &Space,
    chunk: &ChunkHash,
    object: &Slot,
    since: Instant,
    goes_lower: bool,
) -> bool {
    let below = if goes_lower { Below::Lacks } else { Below::Nothing };
    let Some(disk) = tiers.disk() else {
        return false;
    };
    match disk.write(space, chunk, object.clone(), since, below).await {
        Ok(wrote) => matches!(wrote, Wrote::Stored | Wrote::Present),
        Err(error) => {
            tracing::debug!(%error, "a chunk was not written to the disk");
            false
        }
    }
}

fn broken(bucket: &Bucket, space: &Space, chunk: &ChunkHash, detail: &str) -> StoreOutcome {
    let key = bucket.object_key(&(space.key(), *chunk));
    let error = ObjectError::new(Operation::Put, &key, ErrorKind::Broken, detail);
    StoreOutcome::Failed(Arc::new(error))
}
