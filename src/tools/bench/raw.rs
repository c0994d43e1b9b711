//! The requests of the phases that don't use chunks.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::check::{self, Seen};
use super::content::Content;
use super::phase_run::{Op, PhaseFailure, PhaseWorker};
use super::settings::{BenchSettings, to_usize};
use crate::arena::{Arena, SlotMut};
use crate::s3::net::{BodyWatch, Landing};
use crate::s3::object::{Condition, ErrorKind, GetRange, ObjectStore};

/// The common data of all requests of a bench.
pub(super) struct RawTarget {
    pub store: Arc<dyn ObjectStore>,
    pub settings: BenchSettings,
    /// The key of every object.
    pub keys: Vec<String>,
    pub content: Content,
    /// Limits for one request, its retries included.
    pub read_limit: Duration,
    pub write_limit: Duration,
}

impl RawTarget {
    fn key(&self, object: u64) -> &str {
        &self.keys[to_usize(object)]
    }

    fn object_len(&self) -> usize {
        to_usize(self.settings.object_bytes)
    }

    /// Bytes of one of an object's parts.
    pub fn part_len(&self, part: u64) -> u64 {
        let settings = &self.settings;
        settings
            .part_bytes
            .min(settings.object_bytes - part * settings.part_bytes)
    }

    /// The digests of all parts, object after object. Fewer if stopped.
    pub fn part_crcs(&self, stop: &AtomicBool) -> Vec<u64> {
        let (parts, part_bytes) = (self.settings.parts(), self.settings.part_bytes);
        let crc = |index: u64| {
            let (object, part) = (index / parts, index % parts);
            let start = part * part_bytes;
            self.content.crc(object, start..start + self.part_len(part))
        };
        (0..self.settings.objects * parts)
            .take_while(|_| !stop.load(Ordering::Relaxed))
            .map(crc)
            .collect()
    }
}

/// Waits for a free slot: a finished request may hold its slot for a moment.
async fn slot(arena: &Arena, len: usize) -> SlotMut {
    match arena.try_reserve(len) {
        Some(slot) => slot,
        None => arena.ticket().await.reserve(len).await,
    }
}

/// Reads parts into one slot.
pub(super) struct RawReader {
    target: Arc<RawTarget>,
    /// Number of existing objects.
    objects: u64,
    /// Taken while a request is under way, and lost with one that was given up.
    slot: Option<SlotMut>,
    check: Option<Check>,
}

struct Check {
    crcs: Arc<[u64]>,
    watch: Option<Box<dyn BodyWatch>>,
    seen: Arc<Seen>,
}

impl RawReader {
    /// A reader; without `crcs` it verifies nothing.
    pub async fn new(
        target: &Arc<RawTarget>,
        arena: &Arena,
        objects: u64,
        crcs: Option<&Arc<[u64]>>,
    ) -> Self {
        let len = to_usize(target.settings.part_bytes);
        let check = crcs.map(|crcs| {
            let (watch, seen) = check::watch();
            Check {
                crcs: Arc::clone(crcs),
                watch: Some(watch),
                seen,
            }
        });
        Self {
            target: Arc::clone(target),
            objects,
            slot: Some(slot(arena, len).await),
            check,
        }
    }

    /// Reads one part of one object.
    async fn read(&mut self, object: u64, part: u64) -> Result<Op, PhaseFailure> {
        let (target, key) = (&self.target, self.target.key(object));
        let (start, len) = (part * target.settings.part_bytes, target.part_len(part));
        let Some(mut slot) = self.slot.take() else {
            return Err(PhaseFailure::Wrong(format!(
                "GET {key}: the slot did not come back"
            )));
        };
        let rest = slot.split_off(to_usize(len));
        let mut landing = Landing::new(slot);
        if let Some(check) = &mut self.check {
            check.seen.clear();
            landing.watch = check.watch.take();
        }
        let get = GetRange {
            key,
            range: to_usize(start)..to_usize(start + len),
            object_len: target.object_len(),
            if_match: None,
        };
        let began = Instant::now();
        let (landing, result) = target.store.get(get, landing, began + target.read_limit).await;
        let latency = began.elapsed();
        let Landing { mut slot, watch, .. } = landing;
        let judged = match (result, &mut self.check) {
            (Err(error), _) => Err(explained(error, target)),
            (Ok(_), Some(check))
                if !check
                    .seen
                    .is(len, check.crcs[to_usize(object * target.settings.parts() + part)]) =>
            {
                Err(PhaseFailure::Wrong(wrong(target, object, start, &slot)))
            }
            (Ok(_), _) => Ok(Op { bytes: len, latency }),
        };
        if let Some(check) = &mut self.check {
            check.watch = watch;
        }
        slot.join(rest);
        self.slot = Some(slot);
        judged
    }
}

/// Describes the wrong bytes of a part.
fn wrong(target: &RawTarget, object: u64, start: u64, bytes: &[u8]) -> String {
    let part = format!(
        "GET {}: wrong bytes in the part at offset {start} of object {object}",
        target.key(object)
    );
    match target.content.first_difference(object, start, bytes) {
        None => format!("{part}: what arrived had another digest than what is in memory"),
        Some((at, None)) => format!("{part}: byte {at} is the first"),
        Some((at, Some((other, offset)))) => format!(
            "{part}: byte {at} is the first; the block around it is stamped object {other}, offset {offset}"
        ),
    }
}

/// Adds advice to an error if the objects don't match the settings.
fn explained(error: crate::s3::object::ObjectError, target: &RawTarget) -> PhaseFailure {
    match error.kind {
        ErrorKind::NotFound => PhaseFailure::Wrong(match target.settings.embedded {
            true => format!("{error}; write the objects first, in the same run: kvgate bench write read"),
            false => format!(
                "{error}; write the objects first: kvgate bench write, with the same --prefix, --name and --objects"
            ),
        }),
        ErrorKind::Length { .. } => PhaseFailure::Wrong(format!(
            "{error}; was it written with another --object-size than {}?",
            crate::config::units::ByteSize(target.settings.object_bytes)
        )),
        _ => error.into(),
    }
}

impl PhaseWorker for RawReader {
    async fn turn(&mut self, turn: u64) -> Result<Option<Op>, PhaseFailure> {
        let parts = self.target.settings.parts();
        let at = turn % (self.objects * parts);
        self.read(at / parts, at % parts).await.map(Some)
    }
}

/// Writes objects from slots that hold everything but the stamps.
pub(super) struct Writer {
    target: Arc<RawTarget>,
    arena: Arena,
}

impl Writer {
    pub fn new(target: &Arc<RawTarget>, arena: &Arena) -> Self {
        Self {
            target: Arc::clone(target),
            arena: arena.clone(),
        }
    }

    /// Fills the arena's slots with the content. All slots have one size, so their assignment does not matter.
    pub fn fill(target: &RawTarget, arena: &Arena) {
        let slots: Vec<SlotMut> = std::iter::from_fn(|| arena.try_reserve(target.object_len())).collect();
        for mut slot in slots {
            target.content.fill(&mut slot);
        }
    }

    async fn write(&mut self, object: u64) -> Result<Op, PhaseFailure> {
        let mut slot = slot(&self.arena, self.target.object_len()).await;
        Content::stamp(object, &mut slot);
        let (bytes, body) = (slot.len() as u64, Bytes::from_owner(slot.freeze()));
        let began = Instant::now();
        let deadline = began + self.target.write_limit;
        let key = self.target.key(object);
        self.target
            .store
            .put(key, body, Condition::Always, deadline)
            .await?;
        Ok(Op {
            bytes,
            latency: began.elapsed(),
        })
    }
}

impl PhaseWorker for Writer {
    async fn turn(&mut self, turn: u64) -> Result<Option<Op>, PhaseFailure> {
        let objects = self.target.settings.objects;
        self.write(turn % objects).await.map(Some)
    }
}

/// Makes HEAD requests for objects.
pub(super) struct HeaderSource {
    pub target: Arc<RawTarget>,
    pub objects: u64,
}

impl PhaseWorker for HeaderSource {
    async fn turn(&mut self, turn: u64) -> Result<Option<Op>, PhaseFailure> {
        let target = &self.target;
        let began = Instant::now();
        let head = target
            .store
            .head(target.key(turn % self.objects), began + target.read_limit);
        let meta = head.await.map_err(|error| explained(error, target))?;
        let latency = began.elapsed();
        if meta.len != target.settings.object_bytes {
            return Err(PhaseFailure::Wrong(format!(
                "HEAD {}: {} bytes, not {}; was it written with another --object-size?",
                target.key(turn % self.objects),
                meta.len,
                target.settings.object_bytes
            )));
        }
        Ok(Some(Op { bytes: 0, latency }))
    }
}

/// Pauses before a failed DELETE is repeated: objects left behind must be cleaned up by hand.
const DELETE_AGAIN: [Duration; 3] = [Duration::from_secs(1); 3];

/// Removes objects, one request each.
pub(super) struct Deleter {
    pub target: Arc<RawTarget>,
}

impl PhaseWorker for Deleter {
    async fn turn(&mut self, turn: u64) -> Result<Option<Op>, PhaseFailure> {
        let key = [self.target.key(turn).to_owned()];
        let began = Instant::now();
        let delete = || {
            self.target
                .store
                .delete(&key, Instant::now() + self.target.write_limit)
        };
        let mut result = delete().await;
        for pause in DELETE_AGAIN {
            if !matches!(&result, Err(error) if error.kind.retryable()) {
                break;
            }
            tokio::time::sleep(pause).await;
            result = delete().await;
        }
        result?;
        Ok(Some(Op {
            bytes: 0,
            latency: began.elapsed(),
        }))
    }
}
