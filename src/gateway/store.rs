use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;

use super::{Gateway, kib};
use crate::arena::SlotMut;
use crate::chunk::{ChunkHash, Header, Space};
use crate::existence::{Answer, CacheKey};
use crate::object::{Condition, ErrorKind, ObjectError, Operation};

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
    /// The payload, to be filled wholly: plane by plane, each `[head][token][row]`. Holds other bytes before.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        let header_len = self.space.layout().header_len();
        &mut self.slot[header_len..]
    }
}

/// A filled slot, and which chunk it is.
#[derive(Debug)]
pub struct NewChunk {
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
    pub async fn store(&self, chunk: NewChunk, deadline: Instant) -> StoreOutcome {
        let cache_key = (chunk.slot.space.key(), chunk.hash);
        if self.0.cache.is_present(&cache_key, Instant::now()) == Some(true) {
            return StoreOutcome::Present;
        }
        if self.0.storing.insert(cache_key, ()).is_some() {
            return StoreOutcome::Pending;
        }
        let _mine = Storing(self, cache_key);
        match self.put(chunk, deadline).await {
            Ok(outcome) => outcome,
            Err(error) => StoreOutcome::Failed(Arc::new(error)),
        }
    }

    async fn put(&self, chunk: NewChunk, deadline: Instant) -> Result<StoreOutcome, ObjectError> {
        let space = chunk.slot.space.clone();
        let key = self.0.options.keys.chunk(space.key(), &chunk.hash);
        let cache_key = (space.key(), chunk.hash);
        self.declare(&space, deadline).await?;
        let most = kib(self.0.options.put_bytes_max);
        let permits = self.0.put_kib.acquire_many(kib(chunk.slot.slot.len()).min(most));
        let Ok(Ok(_permits)) = tokio::time::timeout_at(deadline, permits).await else {
            return Err(ObjectError::new(
                Operation::Put,
                &key,
                ErrorKind::Deadline,
                "waiting for its turn",
            ));
        };
        let body = self.seal(chunk);
        for _ in 0..ROUNDS {
            let damaged = self.0.cache.damaged(&cache_key);
            let capabilities = self.0.capabilities;
            let when = match &damaged {
                Some(version) if capabilities.if_match => Condition::IfMatch(&version.etag),
                Some(_) => Condition::Always,
                None if capabilities.if_none_match => Condition::IfAbsent,
                // This server overwrites, so look first.
                None => match self.0.prober.ask(&space, &cache_key.1, deadline).await {
                    Answer::Present(_) => return Ok(StoreOutcome::Present),
                    Answer::Unknown(error) => {
                        return Err(ObjectError::new(
                            Operation::Put,
                            &key,
                            error.kind,
                            error.to_string(),
                        ));
                    }
                    Answer::Absent => Condition::Always,
                },
            };
            match self.0.store.put(&key, body.clone(), when, deadline).await {
                Ok(etag) => {
                    self.0.cache.stored(cache_key, etag);
                    return Ok(StoreOutcome::Stored);
                }
                // Somebody else's object, or our own first attempt. Only a HEAD tells whether it is a good one; if
                // not, the next round replaces it.
                Err(error) if matches!(error.kind, ErrorKind::Changed | ErrorKind::NotFound) => {
                    match self.0.prober.ask(&space, &cache_key.1, deadline).await {
                        Answer::Present(_) => return Ok(StoreOutcome::Present),
                        Answer::Absent => self.settle(&key, cache_key, deadline).await?,
                        Answer::Unknown(error) => {
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
        Err(ObjectError::new(
            Operation::Put,
            &key,
            ErrorKind::Conflict,
            "others keep changing the object",
        ))
    }

    /// A damaged object that is gone by now is no longer in the way.
    async fn settle(&self, key: &str, cache_key: CacheKey, deadline: Instant) -> Result<(), ObjectError> {
        match self.0.store.head(key, deadline).await {
            Err(error) if error.kind == ErrorKind::NotFound => {
                self.0.cache.lift_quarantine(&cache_key);
                Ok(())
            }
            result => result.map(drop),
        }
    }

    /// Writes the header in front of the payload; from here on the slot is read-only.
    fn seal(&self, chunk: NewChunk) -> Bytes {
        let NewChunk {
            hash,
            parent,
            slot: StoreSlot { mut slot, space },
        } = chunk;
        let layout = space.layout();
        let digest_kind = self.0.options.digest;
        let header = Header {
            space_id: space.id(),
            chunk: hash,
            parent,
            tokens: space.chunk_tokens(),
            payload_len: layout.payload_len() as u64,
            digest_kind,
            digests: (0..layout.planes())
                .map(|plane| digest_kind.of(&slot[layout.plane(plane)]))
                .collect(),
        };
        header.write(&mut slot);
        Bytes::from_owner(slot.freeze())
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
        let put = |when| {
            self.0
                .store
                .put(key, Bytes::copy_from_slice(json.as_bytes()), when, deadline)
        };
        if !self.0.capabilities.if_none_match {
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

/// Takes the chunk off the list of those being stored, however that ends.
struct Storing<'a>(&'a Gateway, CacheKey);

impl Drop for Storing<'_> {
    fn drop(&mut self) {
        self.0.0.storing.remove(&self.1);
    }
}
