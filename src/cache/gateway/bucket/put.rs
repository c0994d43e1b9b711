//! Chunks to S3: one PUT out of the slot, with the space's readable form beside its chunks. Who else changes the object at
//! the same time is waited for, or told.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dashmap::Entry;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::Bucket;
use crate::arena::Slot;
use crate::cache::existence::ProbeAnswer;
use crate::cache::gateway::credit::kib;
use crate::cache::gateway::slot::{FilledSlot, seal};
use crate::format::{ChunkHash, ChunkId, Crc64, Space, object_crc64};
use crate::s3::object::{Condition, ErrorKind, ObjectError, Operation};

/// The outcome for a chunk.
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

impl Bucket {
    /// Puts a chunk on S3, unless it is there. Its slot is free again when nobody reads it any more: with the answer,
    /// or, after a time-out or a dropped future, when the HTTP client has let go of it.
    pub async fn write_through(self: &Arc<Self>, chunk: FilledSlot, deadline: Instant) -> StoreOutcome {
        let FilledSlot { hash, parent, slot } = chunk;
        let space = slot.space().clone();
        let key = (space.key(), hash);
        if self.is_present(&key) == Some(true) {
            return StoreOutcome::Present;
        }
        let permits = self.put_permits(slot.object_bytes());
        let Ok(permits) = tokio::time::timeout_at(deadline, permits).await else {
            return StoreOutcome::Failed(Arc::new(self.late(Operation::Put, &key, "waiting for its turn")));
        };
        let (header, payload) = slot.split();
        let object = seal(self.options.digest, &space, &hash, &parent, header, &payload);
        self.store_object(&space, hash, object, deadline, permits).await
    }

    /// Deletes a chunk once no PUT of it is under way: what S3 has received of one already would come after the DELETE.
    /// Nobody changes the chunk before the answer is dropped.
    pub async fn delete(self: &Arc<Self>, key: ChunkId, deadline: Instant) -> Result<Change, ObjectError> {
        let Ok(change) = tokio::time::timeout_at(deadline, self.change(key)).await else {
            return Err(self.late(Operation::Delete, &key, "waiting for a store of it to end"));
        };
        self.store.delete(&[self.object_key(&key)], deadline).await?;
        Ok(change)
    }

    fn late(&self, operation: Operation, key: &ChunkId, detail: &str) -> ObjectError {
        ObjectError::new(operation, &self.object_key(key), ErrorKind::Deadline, detail)
    }

    /// Puts a whole object whose turn has come. The PUT goes on when the future is dropped: S3 may have received it, and
    /// only its end tells a DELETE that nothing comes after it.
    pub async fn store_object(
        self: &Arc<Self>,
        space: &Space,
        chunk: ChunkHash,
        object: Slot,
        deadline: Instant,
        permits: Option<OwnedSemaphorePermit>,
    ) -> StoreOutcome {
        let Some(change) = self.try_change((space.key(), chunk)) else {
            return StoreOutcome::Pending;
        };
        let (bucket, space, key) = (Arc::clone(self), space.clone(), change.1);
        let put = tokio::spawn(async move {
            let _until_it_ends = (change, permits);
            let body = Bytes::from_owner(object);
            bucket.put(&space, chunk, body, deadline).await
        });
        if let Some(mut change) = self.changing.get_mut(&key) {
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
    fn try_change(self: &Arc<Self>, key: ChunkId) -> Option<Change> {
        let is_free = match self.changing.entry(key) {
            Entry::Occupied(_) => false,
            Entry::Vacant(entry) => {
                entry.insert(None);
                true
            }
        };
        is_free.then(|| Change(Arc::clone(self), key))
    }

    /// The same, when whoever has it is done.
    async fn change(self: &Arc<Self>, key: ChunkId) -> Change {
        loop {
            let changed = self.changed.notified();
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
    pub fn abort_puts(&self) {
        let puts = self.changing.iter();
        let puts: Vec<_> = puts.filter_map(|put| put.value().clone()).collect();
        puts.iter().for_each(AbortHandle::abort);
    }

    /// The right to have so many bytes in flight. Who asked first is served first.
    pub async fn put_permits(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let most = kib(self.options.put_bytes_max);
        let permits = Arc::clone(&self.put_kib);
        // Nobody closes it.
        permits.acquire_many_owned(kib(bytes).min(most)).await.ok()
    }

    async fn put(
        &self,
        space: &Space,
        chunk: ChunkHash,
        body: Bytes,
        deadline: Instant,
    ) -> Result<StoreOutcome, ObjectError> {
        let key = self.options.keys.chunk(space.key(), &chunk);
        let cache_key = (space.key(), chunk);
        self.declare(space, deadline).await?;
        let crc64 = object_crc64(space.layout(), &body);
        let mut refused = None;
        for _ in 0..ROUNDS {
            let damaged = self.cache.damaged(&cache_key);
            let capabilities = self.capabilities();
            let when = match &damaged {
                Some(version) if capabilities.if_match => Condition::IfMatch(&version.etag),
                Some(_) => Condition::Always,
                None if capabilities.if_none_match => Condition::IfAbsent,
                // This server overwrites, so look first.
                None => match self.prober.ask(space, &cache_key.1, deadline).await {
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
                    self.warnings.sent_again.tell(&error);
                    refused = Some(error);
                }
                Ok(etag) => {
                    self.cache.stored(cache_key, etag);
                    return Ok(StoreOutcome::Stored);
                }
                // Somebody else's object, or our own first attempt. Only a HEAD tells whether it is a good one; if
                // not, the next round replaces it.
                Err(error) if matches!(error.kind, ErrorKind::Changed | ErrorKind::NotFound) => {
                    match self.prober.ask(space, &cache_key.1, deadline).await {
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
            Some(crc64) => self.store.put_checked(key, body, crc64, when, deadline).await,
            None => self.store.put(key, body, when, deadline).await,
        }
    }

    /// A damaged object that is gone by now is no longer in the way.
    async fn settle(&self, key: &str, cache_key: ChunkId, deadline: Instant) -> Result<(), ObjectError> {
        match self.store.head(key, deadline).await {
            Err(error) if error.kind == ErrorKind::NotFound => {
                self.cache.lift_quarantine(&cache_key);
                Ok(())
            }
            result => result.map(drop),
        }
    }

    /// Puts the space's readable form beside its chunks, once in a while, as it is the first that a bucket's lifecycle
    /// rule removes; mends it where it is damaged.
    async fn declare(&self, space: &Space, deadline: Instant) -> Result<(), ObjectError> {
        let declared = Arc::clone(&self.spaces.entry(space.key()).or_default());
        let key = self.options.keys.space_json(space.key());
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
        match self.store.read(key, json.len(), deadline).await {
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
pub struct Change(Arc<Bucket>, ChunkId);

impl Drop for Change {
    fn drop(&mut self) {
        let Self(bucket, key) = self;
        bucket.changing.remove(key);
        bucket.changed.notify_waiters();
    }
}
