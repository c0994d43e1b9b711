//! Stores of chunks on S3: one PUT out of the slot, with the space's readable form beside its chunks. A change of
//! the same object that is under way is waited for, or reported.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use dashmap::Entry;
use tokio::sync::OwnedSemaphorePermit;
use tokio::task::AbortHandle;
use tokio::time::{Instant, sleep_until};

use super::Bucket;
use crate::arena::Slot;
use crate::cache::existence::{ProbeAnswer, Useless, Wanted};
use crate::cache::gateway::credit::kib;
use crate::cache::gateway::slot::{FilledSlot, seal};
use crate::format::{ChunkHash, ChunkId, Crc64, Space, object_crc64};
use crate::metrics::trace;
use crate::s3::object::{Condition, ErrorKind, ObjectError, Operation, PutExtras};

/// The outcome for a chunk.
#[derive(Debug, Clone)]
pub enum StoreOutcome {
    /// S3 acknowledged it.
    Stored,
    /// S3 had it already.
    Present,
    /// This gateway is storing it already, for another caller.
    Pending,
    Failed(Arc<ObjectError>),
}

impl StoreOutcome {
    /// For traces.
    pub fn about(&self) -> trace::Attribute {
        match self {
            Self::Stored => ("outcome", "stored".to_owned()),
            Self::Present => ("outcome", "present".to_owned()),
            Self::Pending => ("outcome", "pending".to_owned()),
            Self::Failed(error) => ("error", error.to_string()),
        }
    }
}

/// How long a space.json that was seen counts as present.
const DECLARE_AGAIN: Duration = Duration::from_secs(24 * 3600);
/// Rounds in which others may change the object under us before we give up.
const ROUNDS: usize = 4;

impl Bucket {
    /// Puts a chunk on S3, unless it is there. Its slot is free again when nothing reads it any more: with the
    /// answer, or, after a time-out or a dropped future, when the HTTP client has let go of it.
    pub async fn write_through(self: &Arc<Self>, chunk: FilledSlot, deadline: Instant) -> StoreOutcome {
        let FilledSlot { hash, parent, slot } = chunk;
        let space = slot.space().clone();
        let key = (space.key(), hash);
        if let Some(at) = self.asks_at(&key) {
            // At least half of the time is for the store.
            let now = Instant::now();
            sleep_until(at.min(now + deadline.saturating_duration_since(now) / 2)).await;
        }
        match self.has_already(&space, &hash, deadline).await {
            Ok(false) => {}
            Ok(true) => return StoreOutcome::Present,
            Err(error) => return StoreOutcome::Failed(error),
        }
        let permits = self.put_permits(slot.object_bytes());
        let Ok(permits) = tokio::time::timeout_at(deadline, permits).await else {
            return StoreOutcome::Failed(Arc::new(self.late(Operation::Put, &key, "waiting for its turn")));
        };
        let (header, payload) = slot.split();
        let digest = match self.options.writes(&space) {
            Ok(digest) => digest,
            Err(error) => {
                let key = self.object_key(&key);
                let error = ObjectError::new(Operation::Put, &key, ErrorKind::Broken, error.to_string());
                return StoreOutcome::Failed(Arc::new(error));
            }
        };
        let object = seal(&digest, &space, &hash, &parent, header, &payload);
        let object = match self.outgoing(&space, &hash, &object).await {
            Ok(object) => object,
            Err(error) => return StoreOutcome::Failed(error),
        };
        self.store_object(&space, hash, object, deadline, permits).await
    }

    /// Whether S3 has the chunk already, so that no body need be sent. S3 is asked only for [unanswered](super::unanswered) ones.
    /// Where it gives no answer, the PUT tells; fails where there is no connection.
    pub async fn has_already(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        deadline: Instant,
    ) -> Result<bool, Arc<ObjectError>> {
        let key = (space.key(), *chunk);
        if self.asks_at(&key).is_none() {
            return Ok(self.is_present(&key) == Some(true));
        }
        match self
            .is_there(space, chunk, &self.object_key(&key), deadline)
            .await
        {
            Ok(is_there) => {
                self.unanswered.remove(&key);
                Ok(is_there)
            }
            Err(error) if error.kind == ErrorKind::Connect => Err(Arc::new(error)),
            Err(_) => Ok(false),
        }
    }

    /// When S3 may be asked whether it has the chunk, before its body is sent. None: there is no such question.
    pub fn asks_at(&self, key: &ChunkId) -> Option<Instant> {
        self.unanswered
            .asks_at(key)
            .filter(|_| self.is_present(key).is_none())
    }

    /// A lookup got no answer for these, because of the error or because its time was over. A store asks first.
    pub fn got_no_answer(&self, keys: impl IntoIterator<Item = ChunkId>, error: Option<&Arc<ObjectError>>) {
        let kind = error.map(|error| error.kind);
        if kind.is_some_and(|kind| !kind.may_pass()) {
            // S3 refused the lookup's questions, and will refuse those of a store.
            return;
        }
        // Where hosts are gone, not processes, the lookup's time is over before the connection's.
        let is_outage = kind == Some(ErrorKind::Connect) || self.store.is_out_of_reach();
        self.unanswered.add(keys, is_outage);
    }

    /// Nothing is known any more of whether these are there. A store asks first.
    pub fn doubt(&self, space: &Space, chunks: &[ChunkHash]) {
        for chunk in chunks {
            self.cache.doubt(&(space.key(), *chunk));
        }
        let keys = chunks.iter().map(|chunk| (space.key(), *chunk));
        self.unanswered.add_at_once(keys);
    }

    /// Deletes a chunk once no PUT of it is under way: a PUT that S3 has received could take effect after the
    /// DELETE. No other change of the chunk starts before the returned value is dropped.
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

    /// Puts a whole object whose turn has come. The PUT goes on when the future is dropped: S3 may have received
    /// it, and only its end tells a DELETE that no bytes come after it.
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
        let put = tokio::spawn(trace::carry(async move {
            let _until_it_ends = (change, permits);
            let body = Bytes::from_owner(object);
            bucket.put(&space, chunk, body, deadline).await
        }));
        if let Some(mut change) = self.changing.get_mut(&key) {
            *change = Some(put.abort_handle());
        }
        match put.await {
            Ok(Ok(outcome)) => outcome,
            Ok(Err(error)) => StoreOutcome::Failed(Arc::new(error)),
            Err(error) => match error.try_into_panic() {
                Ok(panic) => resume_unwind(panic),
                // The gateway ends, and the task that waits here with it.
                Err(_) => std::future::pending().await,
            },
        }
    }

    /// Takes the right to change a chunk on S3, unless another change of it is under way.
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

    /// Takes the same right, once the change under way has ended.
    async fn change(self: &Arc<Self>, key: ChunkId) -> Change {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // From here on no notification is missed.
            changed.as_mut().enable();
            if let Some(change) = self.try_change(key) {
                return change;
            }
            changed.await;
        }
    }

    /// Ends all PUTs under way: no caller is left to ask for their outcome.
    pub fn abort_puts(&self) {
        let puts = self.changing.iter();
        let puts: Vec<_> = puts.filter_map(|put| put.value().clone()).collect();
        puts.iter().for_each(AbortHandle::abort);
    }

    /// The right to have `bytes` in flight, in the order of the calls.
    pub async fn put_permits(&self, bytes: usize) -> Option<OwnedSemaphorePermit> {
        let most = kib(self.options.put_bytes_max);
        let permits = Arc::clone(&self.put_kib);
        // The semaphore is never closed.
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
        let run = self.runs.of(&cache_key).map(|run| run.text());
        let extras = PutExtras {
            crc64,
            run: run.as_deref(),
        };
        let mut refused = None;
        for _ in 0..ROUNDS {
            let useless = self.cache.useless(&cache_key);
            let capabilities = self.capabilities();
            let when = match &useless {
                Some((version, Useless::Damaged)) if capabilities.if_match => {
                    Condition::IfMatch(&version.etag)
                }
                Some((_, Useless::Damaged)) => Condition::Always,
                None if capabilities.if_none_match => Condition::IfAbsent,
                // This server overwrites, or would be sent a body that it does not take: so ask first.
                None | Some((_, Useless::Left(_))) => {
                    if self.is_there(space, &chunk, &key, deadline).await? {
                        return Ok(StoreOutcome::Present);
                    }
                    match capabilities.if_none_match {
                        true => Condition::IfAbsent,
                        false => Condition::Always,
                    }
                }
            };
            match self.put_body(&key, body.clone(), extras, when, deadline).await {
                // The bytes changed on their way.
                Err(error) if error.kind == ErrorKind::Checksum => {
                    self.warnings.sent_again.tell(&error);
                    refused = Some(error);
                }
                Ok(etag) => {
                    self.cache.stored(cache_key, etag);
                    return Ok(StoreOutcome::Stored);
                }
                // Another client's object, or our own first attempt. Only a HEAD tells whether it is good; if not,
                // the next round replaces it.
                Err(error) if matches!(error.kind, ErrorKind::Changed | ErrorKind::NotFound) => {
                    if self.is_there(space, &chunk, &key, deadline).await? {
                        return Ok(StoreOutcome::Present);
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

    /// Puts with the checksum where the server is known to compare it, and with the hint where it keeps that.
    async fn put_body(
        &self,
        key: &str,
        body: Bytes,
        extras: PutExtras<'_>,
        when: Condition<'_>,
        deadline: Instant,
    ) -> Result<Arc<str>, ObjectError> {
        let capabilities = self.capabilities();
        let extras = PutExtras {
            crc64: extras.crc64.filter(|_| capabilities.checksum),
            run: extras.run.filter(|_| capabilities.metadata),
        };
        self.store.put_with(key, body, extras, when, deadline).await
    }

    /// Whether S3 has an object that must not be replaced.
    async fn is_there(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        key: &str,
        deadline: Instant,
    ) -> Result<bool, ObjectError> {
        match self.prober.ask(space, chunk, Wanted::Existence, deadline).await {
            ProbeAnswer::Present(_) | ProbeAnswer::Left => Ok(true),
            ProbeAnswer::Absent => Ok(false),
            ProbeAnswer::Unknown(error) => {
                let (kind, why) = (error.kind, error.to_string());
                Err(ObjectError::new(Operation::Put, key, kind, why))
            }
        }
    }

    /// Puts the space's readable form beside its chunks, again every `DECLARE_AGAIN`, because a bucket's lifecycle
    /// rule removes it first; mends it where it is damaged.
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
        let extras = PutExtras {
            crc64: Some(Crc64::of(json.as_bytes())),
            run: None,
        };
        let put = |when| {
            self.put_body(
                key,
                Bytes::copy_from_slice(json.as_bytes()),
                extras,
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
            Err(error) if error.kind.may_pass() => Err(error),
            _ => {
                tracing::warn!(key, "a damaged space.json is replaced");
                put(Condition::Always).await.map(drop)
            }
        }
    }
}

/// A PUT or a DELETE under way; dropping this marks its end, with any outcome.
pub struct Change(Arc<Bucket>, ChunkId);

impl Drop for Change {
    fn drop(&mut self) {
        let Self(bucket, key) = self;
        bucket.changing.remove(key);
        bucket.changed.notify_waiters();
    }
}
