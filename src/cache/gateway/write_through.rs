//! Chunks to S3: header and digests in front, then one PUT out of the slot. A library waits for it here. On a node the
//! write-behind (`behind.rs`) calls it for chunks that were committed.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dashmap::Entry;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::{Gateway, kib};
use crate::arena::{Slot, SlotMut};
use crate::cache::existence::ProbeAnswer;
use crate::format::{ChunkHash, ChunkId, Crc64, Header, Space, object_crc64};
use crate::s3::object::{Condition, ErrorKind, ObjectError, Operation};

/// The arena has no room for a chunk now; the chunk is not stored, nothing else happens.
#[derive(Debug, thiserror::Error)]
#[error(
    "no room for a chunk of {object_bytes} bytes in the arena ({used_bytes} of {arena_bytes} bytes taken)"
)]
pub struct ArenaFull {
    pub object_bytes: usize,
    pub used_bytes: usize,
    pub arena_bytes: usize,
}

/// A slot to gather a chunk of a space into.
#[derive(Debug)]
pub struct StoreSlot {
    slot: SlotMut,
    space: Space,
}

impl StoreSlot {
    /// Has the object's payload filled by a copy, which is given the whole slot and gives it back.
    pub fn filled_by<E>(self, copy: impl FnOnce(SlotMut) -> Result<SlotMut, E>) -> Result<Self, E> {
        let Self { slot, space } = self;
        Ok(Self {
            slot: copy(slot)?,
            space,
        })
    }

    /// The payload, to be filled wholly: plane by plane, each `[head][token][row]`. Holds other bytes before.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        let header_len = self.space.layout().header_len();
        &mut self.slot[header_len..]
    }

    /// The same, as it is now.
    pub fn payload(&self) -> &[u8] {
        &self.slot[self.space.layout().header_len()..]
    }

    /// Where the whole slot starts in the arena's file.
    pub fn slot_offset(&self) -> usize {
        self.slot.slot_offset()
    }

    /// Where the payload starts there.
    pub fn payload_offset(&self) -> usize {
        self.slot.offset() + self.space.layout().header_len()
    }

    pub fn generation(&self) -> u64 {
        self.slot.generation()
    }

    pub fn space(&self) -> &Space {
        &self.space
    }

    /// Room for the header, and the payload.
    pub(super) fn split(self) -> (SlotMut, Slot) {
        let mut header = self.slot;
        let payload = header.split_off(self.space.layout().header_len());
        (header, payload.freeze())
    }
}

/// A filled slot, and which chunk it is.
#[derive(Debug)]
pub struct FilledSlot {
    pub hash: ChunkHash,
    /// The chunk before, or the root.
    pub parent: ChunkHash,
    pub slot: StoreSlot,
}

/// What became of a chunk.
#[derive(Debug, Clone)]
pub enum StoreOutcome {
    /// S3 acknowledged it.
    Stored,
    /// It was there already.
    Present,
    /// This gateway is storing it already, for somebody else.
    Pending,
    Failed(Arc<ObjectError>),
}

/// How long a space.json that was seen counts as there.
const DECLARE_AGAIN: Duration = Duration::from_secs(24 * 3600);
/// Rounds in which others may change the object under us before we give up.
const ROUNDS: usize = 4;

impl Gateway {
    /// A slot for a new chunk of `space`. Never waits.
    pub fn reserve(&self, space: &Space) -> Result<StoreSlot, ArenaFull> {
        let object_bytes = space.layout().object_len();
        if let Some(slot) = self.0.arena.try_reserve(object_bytes) {
            Ok(StoreSlot {
                slot,
                space: space.clone(),
            })
        } else {
            let stats = self.0.arena.stats();
            Err(ArenaFull {
                object_bytes,
                used_bytes: stats.used_bytes,
                arena_bytes: stats.size_bytes,
            })
        }
    }

    /// Puts a chunk on S3, unless it is there. Its slot is free again when nobody reads it any more: with the answer,
    /// or, after a time-out or a dropped future, when the HTTP client has let go of it.
    pub async fn write_through(&self, chunk: FilledSlot, deadline: Instant) -> StoreOutcome {
        let (space, hash) = (chunk.slot.space.clone(), chunk.hash);
        let cache_key = (space.key(), hash);
        if self.0.cache.is_present(&cache_key, Instant::now()) == Some(true) {
            return StoreOutcome::Present;
        }
        let permits = self.put_permits(chunk.slot.slot.len());
        let Ok(permits) = tokio::time::timeout_at(deadline, permits).await else {
            return StoreOutcome::Failed(Arc::new(self.no_turn(cache_key)));
        };
        let (header, payload) = chunk.slot.split();
        let object = self.seal(&space, &hash, &chunk.parent, header, &payload);
        self.store_object(&space, hash, object, deadline, permits).await
    }

    /// The same for a whole object whose turn has come. The PUT goes on when the future is dropped: S3 may have received it, and
    /// only its end tells a DELETE that nothing comes after it.
    pub(super) async fn store_object(
        &self,
        space: &Space,
        chunk: ChunkHash,
        object: Slot,
        deadline: Instant,
        permits: Option<OwnedSemaphorePermit>,
    ) -> StoreOutcome {
        let Some(change) = self.try_change((space.key(), chunk)) else {
            return StoreOutcome::Pending;
        };
        let (gateway, space, key) = (self.clone(), space.clone(), change.1);
        let put = tokio::spawn(async move {
            let _until_it_ends = (change, permits);
            let body = Bytes::from_owner(object);
            gateway.put(&space, chunk, body, deadline).await
        });
        if let Some(mut change) = self.0.changing.get_mut(&key) {
            *change = Some(put.abort_handle());
        }
        match put.await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => StoreOutcome::Failed(Arc::new(error)),
            Err(error) => match error.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                // The gateway ends, and whoever waits here with it.
                Err(_) => std::future::pending().await,
            },
        }
    }

    /// The right to change a chunk on S3, unless somebody has it.
    fn try_change(&self, key: ChunkId) -> Option<Change> {
        let is_free = match self.0.changing.entry(key) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(None);
                true
            }
        };
        is_free.then(|| Change(self.clone(), key))
    }

    /// The same, when whoever has it is done.
    pub(super) async fn change(&self, key: ChunkId) -> Change {
        loop {
            let changed = self.0.changed.notified();
            tokio::pin!(changed);
            // From here on nothing is missed.
            changed.as_mut().enable();
            if let Some(change) = self.try_change(key) {
                return change;
            }
            changed.await;
        }
    }

    /// Ends all PUTs under way: nobody is left who could ask what became of them.
    pub(super) fn abort_puts(&self) {
        let puts = self.0.changing.iter();
        let puts: Vec<_> = puts.filter_map(|put| put.value().clone()).collect();
        puts.iter().for_each(AbortHandle::abort);
    }

    /// The right to have so many bytes in flight. Who asked first is served first.
    pub(super) async fn put_permits(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let most = kib(self.0.options.put_bytes_max);
        let permits = Arc::clone(&self.0.put_kib);
        // Nobody closes it.
        permits.acquire_many_owned(kib(bytes).min(most)).await.ok()
    }

    fn no_turn(&self, (space, chunk): ChunkId) -> ObjectError {
        let key = self.0.options.keys.chunk(space, &chunk);
        ObjectError::new(Operation::Put, &key, ErrorKind::Deadline, "waiting for its turn")
    }

    async fn put(
        &self,
        space: &Space,
        chunk: ChunkHash,
        body: Bytes,
        deadline: Instant,
    ) -> Result<StoreOutcome, ObjectError> {
        let key = self.0.options.keys.chunk(space.key(), &chunk);
        let cache_key = (space.key(), chunk);
        self.declare(space, deadline).await?;
        let crc64 = object_crc64(space.layout(), &body);
        let mut refused = None;
        for _ in 0..ROUNDS {
            let damaged = self.0.cache.damaged(&cache_key);
            let capabilities = self.capabilities();
            let when = match &damaged {
                Some(version) if capabilities.if_match => Condition::IfMatch(&version.etag),
                Some(_) => Condition::Always,
                None if capabilities.if_none_match => Condition::IfAbsent,
                // This server overwrites, so look first.
                None => match self.0.prober.ask(space, &cache_key.1, deadline).await {
                    ProbeAnswer::Present(_) => return Ok(StoreOutcome::Present),
                    ProbeAnswer::Unknown(error) => {
                        return Err(ObjectError::new(
                            Operation::Put,
                            &key,
                            error.kind,
                            error.to_string(),
                        ));
                    }
                    ProbeAnswer::Absent => Condition::Always,
                },
            };
            match self.put_body(&key, body.clone(), crc64, when, deadline).await {
                // It was other bytes that arrived.
                Err(error) if error.kind == ErrorKind::Checksum => {
                    self.0.warnings.sent_again.tell(&error);
                    refused = Some(error);
                }
                Ok(etag) => {
                    self.0.cache.stored(cache_key, etag);
                    return Ok(StoreOutcome::Stored);
                }
                // Somebody else's object, or our own first attempt. Only a HEAD tells whether it is a good one; if
                // not, the next round replaces it.
                Err(error) if matches!(error.kind, ErrorKind::Changed | ErrorKind::NotFound) => {
                    match self.0.prober.ask(space, &cache_key.1, deadline).await {
                        ProbeAnswer::Present(_) => return Ok(StoreOutcome::Present),
                        ProbeAnswer::Absent => self.settle(&key, cache_key, deadline).await?,
                        ProbeAnswer::Unknown(error) => {
                            return Err(ObjectError::new(
                                Operation::Put,
                                &key,
                                error.kind,
                                error.to_string(),
                            ));
                        }
                    }
                }
                Err(error) => return Err(error),
            }
        }
        let changing = || {
            let words = "others keep changing the object";
            ObjectError::new(Operation::Put, &key, ErrorKind::Conflict, words)
        };
        Err(refused.unwrap_or_else(changing))
    }

    /// With the checksum where the server is known to compare it.
    async fn put_body(
        &self,
        key: &str,
        body: Bytes,
        crc64: Option<u64>,
        when: Condition<'_>,
        deadline: Instant,
    ) -> Result<Arc<str>, ObjectError> {
        match crc64.filter(|_| self.capabilities().checksum) {
            Some(crc64) => self.0.store.put_checked(key, body, crc64, when, deadline).await,
            None => self.0.store.put(key, body, when, deadline).await,
        }
    }

    /// A damaged object that is gone by now is no longer in the way.
    async fn settle(&self, key: &str, cache_key: ChunkId, deadline: Instant) -> Result<(), ObjectError> {
        match self.0.store.head(key, deadline).await {
            Err(error) if error.kind == ErrorKind::NotFound => {
                self.0.cache.lift_quarantine(&cache_key);
                Ok(())
            }
            result => result.map(drop),
        }
    }

    /// Writes the header in front of the payload; the whole object is read-only from here on.
    pub(super) fn seal(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        parent: &ChunkHash,
        mut header: SlotMut,
        payload: &Slot,
    ) -> Slot {
        let layout = space.layout();
        let (kind, start) = (self.0.options.digest, layout.header_len());
        let digest = |plane| {
            let bytes = layout.plane(plane);
            kind.of(&payload[bytes.start - start..bytes.end - start])
        };
        let of = Header {
            space_id: space.id(),
            chunk: *chunk,
            parent: *parent,
            tokens: space.chunk_tokens(),
            payload_len: layout.payload_len() as u64,
            digest_kind: kind,
            digests: (0..layout.planes()).map(digest).collect(),
        };
        of.write(&mut header);
        header.freeze().join(payload)
    }

    /// Puts the space's readable form beside its chunks, once in a while, as it is the first that a bucket's lifecycle
    /// rule removes; mends it where it is damaged.
    async fn declare(&self, space: &Space, deadline: Instant) -> Result<(), ObjectError> {
        let declared = Arc::clone(&self.0.spaces.entry(space.key()).or_default());
        let key = self.0.options.keys.space_json(space.key());
        let Ok(mut declared) = tokio::time::timeout_at(deadline, declared.lock()).await else {
            return Err(ObjectError::new(
                Operation::Put,
                &key,
                ErrorKind::Deadline,
                "waiting for its turn",
            ));
        };
        if declared.is_none_or(|at| at.elapsed() > DECLARE_AGAIN) {
            self.put_space_json(space, &key, deadline).await?;
            *declared = Some(Instant::now());
        }
        Ok(())
    }

    async fn put_space_json(&self, space: &Space, key: &str, deadline: Instant) -> Result<(), ObjectError> {
        let json = space.canonical_json();
        let crc64 = Some(Crc64::of(json.as_bytes()));
        let put = |when| {
            self.put_body(
                key,
                Bytes::copy_from_slice(json.as_bytes()),
                crc64,
                when,
                deadline,
            )
        };
        if !self.capabilities().if_none_match {
            return put(Condition::Always).await.map(drop);
        }
        match put(Condition::IfAbsent).await {
            Err(error) if error.kind == ErrorKind::Changed => {}
            result => return result.map(drop),
        }
        match self.0.store.read(key, json.len(), deadline).await {
            Ok(there) if there == json => Ok(()),
            Err(error) if error.kind.retryable() || error.kind == ErrorKind::Deadline => Err(error),
            _ => {
                tracing::warn!(key, "a damaged space.json is replaced");
                put(Condition::Always).await.map(drop)
            }
        }
    }
}

/// A PUT or a DELETE under way, until it has ended in whatever way.
pub(super) struct Change(Gateway, ChunkId);

impl Drop for Change {
    fn drop(&mut self) {
        let Self(gateway, key) = self;
        gateway.0.changing.remove(key);
        gateway.0.changed.notify_waiters();
    }
}
