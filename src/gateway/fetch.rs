//! One chunk from S3 into its slot, verified.

use std::sync::Arc;

use futures::future::try_join_all;
use tokio::time::Instant;

use super::load::{LoadedChunk, Miss};
use super::{Gateway, kib};
use crate::arena::{Slot, SlotMut};
use crate::chunk::{ChunkHash, Header, HeaderError, Space};
use crate::existence::Known;
use crate::object::{ErrorKind, GetRange, ObjectError, Operation, Version};

/// One section on its way: its part of the slot and of the object.
struct Part {
    slot: SlotMut,
    bytes: std::ops::Range<usize>,
}

impl Gateway {
    /// Fetches and verifies a chunk, and remembers what that says of its existence.
    pub(super) async fn fetch(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        slot: SlotMut,
        deadline: Instant,
    ) -> Result<LoadedChunk, Miss> {
        let cache_key = (space.key(), *chunk);
        let etag = match self.0.cache.get(&cache_key, Instant::now()) {
            Some(Known::Absent) if self.0.cache.damaged(&cache_key).is_some() => {
                return Err(Miss::Quarantined);
            }
            Some(Known::Absent) => return Err(Miss::Absent),
            Some(Known::Present(etag)) => Some(etag),
            None => None,
        };
        let key = self.0.options.keys.chunk(space.key(), chunk);
        let (object, version) = match self.land(space, &key, slot, etag, deadline).await {
            Ok(landed) => landed,
            Err(error) => return Err(self.missed(cache_key, error)),
        };
        if self.0.cache.damaged(&cache_key).as_ref() == Some(&version) {
            self.0.cache.found_absent(cache_key);
            return Err(Miss::Quarantined);
        }
        match verify(space, chunk, &object) {
            Ok(header) => {
                let known = Known::Present(Arc::clone(&version.etag));
                self.0.cache.learn(cache_key, known, Instant::now());
                Ok(LoadedChunk {
                    space: space.clone(),
                    header,
                    object,
                })
            }
            Err(miss) => {
                tracing::warn!(key, etag = &*version.etag, "a damaged chunk: {miss}");
                self.0.cache.quarantine(cache_key, version);
                Err(miss)
            }
        }
    }

    /// What a failed GET says of the chunk.
    fn missed(&self, cache_key: crate::existence::CacheKey, error: ObjectError) -> Miss {
        match error.kind {
            ErrorKind::NotFound => {
                self.0.cache.found_absent(cache_key);
                Miss::Absent
            }
            ErrorKind::Changed => {
                self.0.cache.forget(&cache_key);
                Miss::Replaced
            }
            // The next lookup's HEAD sees the length too, and the version to quarantine.
            ErrorKind::Length { .. } => {
                self.0.cache.forget(&cache_key);
                Miss::WrongLength(Arc::new(error))
            }
            _ => Miss::Unknown(Arc::new(error)),
        }
    }

    /// All of the object, of one version. With an ETag from a lookup all ranges start at once; without one, or when
    /// that version is gone, the first range tells it.
    async fn land(
        &self,
        space: &Space,
        key: &str,
        mut slot: SlotMut,
        etag: Option<Arc<str>>,
        deadline: Instant,
    ) -> Result<(Slot, Version), ObjectError> {
        let object_len = space.layout().object_len();
        let mut sections = space.layout().sections(self.0.options.part_bytes).into_iter();
        let Some(head) = sections.next() else {
            return Err(ObjectError::new(
                Operation::Get,
                key,
                ErrorKind::Refused,
                "a space without planes",
            ));
        };
        let mut parts: Vec<Part> = Vec::new();
        let mut tail = slot.split_off(head.bytes.end);
        for section in sections {
            let rest = tail.split_off(section.bytes.len());
            parts.push(Part {
                slot: tail,
                bytes: section.bytes,
            });
            tail = rest;
        }
        let mut first = Part {
            slot,
            bytes: head.bytes,
        };
        let version = match etag {
            Some(etag) => {
                let all = std::iter::once(&mut first).chain(&mut parts);
                let all = all.map(|part| self.get(key, object_len, part, Some(&etag), deadline));
                match try_join_all(all).await {
                    Ok(versions) => versions.into_iter().next(),
                    // Stored anew since the lookup.
                    Err(error) if error.kind == ErrorKind::Changed => None,
                    Err(error) => return Err(error),
                }
            }
            None => None,
        };
        let version = if let Some(version) = version {
            version
        } else {
            let version = self.get(key, object_len, &mut first, None, deadline).await?;
            let rest = parts.iter_mut();
            try_join_all(rest.map(|part| self.get(key, object_len, part, Some(&version.etag), deadline)))
                .await?;
            version
        };
        let mut slot = first.slot;
        for part in parts {
            slot.join(part.slot);
        }
        Ok((slot.freeze(), version))
    }

    async fn get(
        &self,
        key: &str,
        object_len: usize,
        part: &mut Part,
        if_match: Option<&str>,
        deadline: Instant,
    ) -> Result<Version, ObjectError> {
        let most = kib(self.0.options.get_bytes_max);
        let permits = self.0.get_kib.acquire_many(kib(part.bytes.len()).min(most));
        let Ok(Ok(_permits)) = tokio::time::timeout_at(deadline, permits).await else {
            return Err(ObjectError::new(
                Operation::Get,
                key,
                ErrorKind::Deadline,
                "waiting for its turn",
            ));
        };
        let get = GetRange {
            key,
            range: part.bytes.clone(),
            object_len,
            if_match,
        };
        Ok(self.0.store.get(get, &mut part.slot, deadline).await?.version)
    }
}

/// Checks header and digests: nothing that fails here leaves the gateway.
fn verify(space: &Space, chunk: &ChunkHash, object: &Slot) -> Result<Header, Miss> {
    let header = Header::parse(object).map_err(Miss::BadHeader)?;
    header.expect(space, chunk).map_err(|error| match error {
        HeaderError::OtherSpace(_) | HeaderError::OtherChunk(_) => Miss::Foreign(error),
        error => Miss::BadHeader(error),
    })?;
    for (plane, digest) in header.digests.iter().enumerate() {
        if header.digest_kind.of(&object[space.layout().plane(plane)]) != *digest {
            return Err(Miss::BadDigest { plane });
        }
    }
    Ok(header)
}
