//! The way down: chunks in memory go to the disk and to S3 in the background, in the order of their commits
//! (`tiers/write_behind.rs`), and are tried again until they are there. S3 is given all of them, or those that are
//! admitted (`admit.rs`).

mod admit;
mod backlog;

use std::sync::Arc;

use futures::future::join;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;

use self::admit::{Way, parent_of, way};
pub use self::backlog::knows;
use super::bucket::{Bucket, StoreOutcome};
use super::chunk::LoadedChunk;
use super::fetch::verify_resident;
use super::tiers::{Link, Room, Sealed, Tiers, WriteBehindJob};
use crate::arena::Slot;
use crate::cache::tier::{Below, Wrote};
use crate::format::{ChunkHash, Space};
use crate::metrics::trace::{self, OpenSpan};
use crate::protocol::Tier;
use crate::s3::object::{ErrorKind, ObjectError, Operation};

/// The chunk, if it is in memory. A chunk that was stored here is sent lower once it has been asked for often
/// enough.
pub fn resident(tiers: &Arc<Tiers>, space: &Space, chunk: &ChunkHash) -> Option<LoadedChunk> {
    let found = tiers.memory.get(&(space.key(), *chunk), space)?;
    match found.object.as_ref().filter(|_| found.is_due) {
        Some(object) => goes_lower(tiers, space, chunk, object),
        None => tiers.asked_for(space, chunk, Tier::Memory),
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
    let parent = tiers.admitting.as_ref().and_then(|admitting| {
        let parent = parent_of(space, object);
        admitting.is_due(&key, parent.map(|parent| (key.0, parent)));
        parent
    });
    let object = Sealed::Now(object.clone());
    write_behind(tiers, room, space, chunk, parent.as_ref(), object, false);
}

/// Sends chunks that engines do not wait for, for as long as the returned future is polled: those that the disks had at
/// start, and declined ones that are asked for again. A flush waits for the former from now on.
pub fn send_more(tiers: &Arc<Tiers>) -> impl Future<Output = ()> + Send + use<> {
    let (backlog, tiers) = (backlog::send_backlog(tiers), Arc::clone(tiers));
    async move {
        join(backlog, admit::second_chances(&tiers)).await;
    }
}

/// Queues a chunk that is in memory for the lower tiers. `is_admitted`: the admission need not be asked.
pub fn write_behind(
    tiers: &Arc<Tiers>,
    room: Room,
    space: &Space,
    chunk: &ChunkHash,
    parent: Option<&ChunkHash>,
    object: Sealed,
    is_admitted: bool,
) {
    let job = WriteBehindJob::new(&tiers.memory, space, chunk, object, is_admitted);
    if tiers.behind.push(room, chunk, parent, job) && tiers.behind.needs_dispatcher() {
        tokio::spawn(dispatch(Arc::clone(tiers)));
    }
}

/// Starts waiting jobs in their order, as the bytes in flight allow.
async fn dispatch(tiers: Arc<Tiers>) {
    while let Some(next) = tiers.behind.next() {
        let (number, chunk) = (next.number, next.chunk);
        let way = way(&tiers, &next);
        let permits = match way {
            Way::Down => tiers.bucket.put_permits(next.bytes).await,
            Way::Declined | Way::AfterAncestors => None,
        };
        let asks_at = tiers.bucket.asks_at(&(next.space.key(), chunk));
        // It may have been given up by now.
        let Some(mut job) = tiers.behind.start(number, asks_at) else {
            continue;
        };
        let of = Arc::clone(&tiers);
        let task = tokio::spawn(async move {
            trace::mark(&mut job.span, "turn");
            let mut span = job.span.take();
            let outcome = lower(&of, chunk, &mut job, way, permits, &mut span).await;
            trace::end(span, || {
                let chunk = chunk.to_string().chars().take(12).collect();
                let declined = ("outcome", "declined".to_owned());
                let outcome = outcome.as_ref().map_or(declined, StoreOutcome::about);
                vec![("chunk", chunk), outcome]
            });
            of.times.behind.observe(job.since.elapsed());
            drop(job);
            of.behind.ends(number, outcome.as_ref());
        });
        tiers.behind.began(number, task.abort_handle());
    }
}

/// Brings a chunk down to the lowest tier that is to have it. None if it was declined: that is no tier's failure.
async fn lower(
    tiers: &Tiers,
    chunk: ChunkHash,
    job: &mut WriteBehindJob,
    way: Way,
    mut permits: Option<OwnedSemaphorePermit>,
    span: &mut Option<OpenSpan>,
) -> Option<StoreOutcome> {
    let (space, bucket) = (&job.space, &tiers.bucket);
    let object = match &mut job.object {
        Sealed::Now(object) => object.clone(),
        Sealed::Soon(object) => match object.await {
            Ok(object) => object,
            Err(_) => return Some(broken(bucket, space, &chunk, "its digests were not computed")),
        },
    };
    trace::mark(span, "sealed");
    let mut sealed = match bucket.outgoing(space, &chunk, &object).await {
        Ok(sealed) => Some(sealed),
        Err(error) => {
            bucket.warnings.given_up.tell(&error);
            return Some(StoreOutcome::Failed(error));
        }
    };
    let disk = tiers.options.disk.as_ref();
    let goes_lower = disk.is_none_or(|disk| disk.flow.stores_lower);
    let below = match (goes_lower, way) {
        (false, _) => Below::Nothing,
        (true, Way::Down) => Below::Lacks,
        (true, Way::Declined | Way::AfterAncestors) => Below::Declines,
    };
    let written = match &sealed {
        Some(sealed) => write_to_disk(tiers, space, &chunk, sealed, job.since, below).await,
        None => false,
    };
    if disk.is_some() {
        trace::mark(span, "disk");
    }
    if !goes_lower {
        return Some(match written {
            true => {
                tiers.behind.keeps_back(true);
                StoreOutcome::Stored
            }
            false => broken(bucket, space, &chunk, "no disk had room for it"),
        });
    }
    if let Some(admitting) = tiers.admitting.as_ref().filter(|_| way == Way::AfterAncestors) {
        admitting.ask(space, &chunk);
    }
    if way != Way::Down {
        return None;
    }
    if let Some(at) = job.not_before {
        // Others need the buffer and the turn.
        sealed = None;
        drop(permits.take());
        tiers.behind.pause(&(space.key(), chunk), at).await;
        trace::mark(span, "pause");
        permits = bucket.put_permits(object.len()).await;
    }
    let outgoing = Outgoing { object, sealed };
    Some(send(tiers, chunk, job, outgoing, permits, span.as_ref()).await)
}

/// A chunk's object as it is in memory, and as it goes to S3, unless that is to be made once more.
struct Outgoing {
    object: Slot,
    sealed: Option<Slot>,
}

/// Tries until S3 has the chunk, or it is found damaged.
async fn send(
    tiers: &Tiers,
    chunk: ChunkHash,
    job: &WriteBehindJob,
    Outgoing { object, mut sealed }: Outgoing,
    mut permits: Option<OwnedSemaphorePermit>,
    span: Option<&OpenSpan>,
) -> StoreOutcome {
    let (space, bucket) = (&job.space, &tiers.bucket);
    let options = tiers.behind.options();
    let mut wait = options.retry_base;
    loop {
        let now = Instant::now();
        let deadline = now + options.deadline;
        // Lookups wait for the same places.
        let answered_by = deadline.min(now + bucket.options.lookup_deadline);
        let put = trace::begin_part(span, "PUT");
        let stored = async {
            match bucket.has_already(space, &chunk, answered_by).await {
                Ok(false) => {}
                Ok(true) => return StoreOutcome::Present,
                Err(error) => return StoreOutcome::Failed(error),
            }
            let sealed = match sealed.take() {
                Some(sealed) => sealed,
                None => match bucket.outgoing(space, &chunk, &object).await {
                    Ok(sealed) => sealed,
                    Err(error) => return StoreOutcome::Failed(error),
                },
            };
            bucket.store_object(space, chunk, sealed, deadline, permits).await
        };
        let outcome = trace::within(put.as_ref(), stored).await;
        trace::end(put, || vec![outcome.about()]);
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
        // Nothing but the chunk itself is held between two attempts: who has a turn may wait for a buffer.
        sealed = None;
        // Spread the retries, so that they don't come all at once when the server is back.
        tokio::time::sleep(wait.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
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
    below: Below,
) -> bool {
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
