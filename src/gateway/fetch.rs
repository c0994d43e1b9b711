//! One chunk from S3 into its slot, verified.

use std::ops::Range;
use std::sync::Arc;

use futures::future::join_all;
use tokio::time::Instant;

use super::load::{LoadedChunk, Miss};
use super::{Gateway, kib};
use crate::arena::{Slot, SlotMut};
use crate::chunk::{ChunkHash, Header, HeaderError, Section, Space};
use crate::existence::{CacheKey, Known};
use crate::net::Landing;
use crate::object::{ErrorKind, GetRange, ObjectError, Operation, Version};

/// One section on its way: its part of the slot and of the object.
struct Part {
    slot: SlotMut,
    bytes: Range<usize>,
}

impl Gateway {
    /// Why the chunk is not worth a request, if that is known.
    pub(super) fn missing(&self, space: &Space, chunk: &ChunkHash) -> Option<Miss> {
        let cache_key = (space.key(), *chunk);
        match self.0.cache.is_present(&cache_key, Instant::now()) {
            Some(false) if self.0.cache.damaged(&cache_key).is_some() => Some(Miss::Quarantined),
            Some(false) => Some(Miss::Absent),
            _ => None,
        }
    }

    /// Fetches and verifies a chunk, and remembers what that says of its existence.
    pub(super) async fn fetch(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        slot: SlotMut,
        deadline: Instant,
    ) -> Result<LoadedChunk, Miss> {
        let cache_key = (space.key(), *chunk);
        let asked = Instant::now();
        let etag = match self.0.cache.get(&cache_key, asked) {
            Some(Known::Present(etag)) => Some(etag),
            _ => None,
        };
        let key = self.0.options.keys.chunk(space.key(), chunk);
        let (object, version) = match self.land(space, &key, slot, etag, deadline).await {
            Ok(landed) => landed,
            Err(error) => return Err(self.missed(cache_key, error, asked)),
        };
        if self.0.cache.damaged(&cache_key).as_ref() == Some(&version) {
            self.0.cache.learn(cache_key, Known::Absent, asked);
            return Err(Miss::Quarantined);
        }
        match verify(space, chunk, &object) {
            Ok(header) => {
                self.0
                    .cache
                    .learn(cache_key, Known::Present(Arc::clone(&version.etag)), asked);
                Ok(LoadedChunk {
                    space: space.clone(),
                    header,
                    object,
                })
            }
            Err(miss @ Miss::Unreadable(_)) => Err(miss),
            Err(miss) => {
                tracing::warn!(key, etag = &*version.etag, "a damaged chunk: {miss}");
                self.0.cache.quarantine(cache_key, version, asked);
                Err(miss)
            }
        }
    }

    /// What a failed GET says of the chunk.
    fn missed(&self, cache_key: CacheKey, error: ObjectError, asked: Instant) -> Miss {
        match error.kind {
            ErrorKind::NotFound => {
                self.0.cache.learn(cache_key, Known::Absent, asked);
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
        slot: SlotMut,
        etag: Option<Arc<str>>,
        deadline: Instant,
    ) -> Result<(Slot, Version), ObjectError> {
        let mut parts = cut(slot, space.layout().sections(self.0.options.part_bytes));
        let get = async |parts, etag| {
            self.get_all(key, space.layout().object_len(), parts, etag, deadline)
                .await
        };
        if let Some(etag) = &etag {
            let (back, version) = get(parts, Some(&**etag)).await;
            match version {
                Ok(version) => return Ok((join(back), version)),
                // Stored anew since the lookup.
                Err(error) if error.kind == ErrorKind::Changed => parts = back,
                Err(error) => return Err(error),
            }
        }
        let rest = parts.split_off(1);
        let (mut parts, version) = get(parts, None).await;
        let version = version?;
        if !rest.is_empty() {
            let (rest, same) = get(rest, Some(&*version.etag)).await;
            same?;
            parts.extend(rest);
        }
        Ok((join(parts), version))
    }

    /// Some ranges at once, to the end of each, since only then are their parts of the slot ours again.
    async fn get_all(
        &self,
        key: &str,
        object_len: usize,
        parts: Vec<Part>,
        if_match: Option<&str>,
        deadline: Instant,
    ) -> (Vec<Part>, Result<Version, ObjectError>) {
        let gets = parts
            .into_iter()
            .map(|part| self.get(key, object_len, part, if_match, deadline));
        let (parts, results): (Vec<Part>, Vec<_>) = join_all(gets).await.into_iter().unzip();
        // Of several errors, one that is not "changed" says more.
        let worst = |a: Result<Version, ObjectError>, b: Result<Version, ObjectError>| match (&a, &b) {
            (Err(error), Err(_)) if error.kind == ErrorKind::Changed => b,
            (Ok(_), Err(_)) => b,
            _ => a,
        };
        let nothing = || ObjectError::new(Operation::Get, key, ErrorKind::Refused, "a space without planes");
        (
            parts,
            results
                .into_iter()
                .reduce(worst)
                .unwrap_or_else(|| Err(nothing())),
        )
    }

    async fn get(
        &self,
        key: &str,
        object_len: usize,
        part: Part,
        if_match: Option<&str>,
        deadline: Instant,
    ) -> (Part, Result<Version, ObjectError>) {
        let Part { slot, bytes } = part;
        let most = kib(self.0.options.get_bytes_max);
        let permits = self.0.get_kib.acquire_many(kib(bytes.len()).min(most));
        let Ok(Ok(_permits)) = tokio::time::timeout_at(deadline, permits).await else {
            let late = ObjectError::new(Operation::Get, key, ErrorKind::Deadline, "waiting for its turn");
            return (Part { slot, bytes }, Err(late));
        };
        let get = GetRange {
            key,
            range: bytes.clone(),
            object_len,
            if_match,
        };
        let (landing, meta) = self.0.store.get(get, Landing::new(slot), deadline).await;
        let slot = landing.slot;
        (Part { slot, bytes }, meta.map(|meta| meta.version))
    }
}

/// The slot, cut where the sections are.
fn cut(mut slot: SlotMut, sections: Vec<Section>) -> Vec<Part> {
    let cut = |section: Section| {
        let rest = slot.split_off(section.bytes.len());
        Part {
            slot: std::mem::replace(&mut slot, rest),
            bytes: section.bytes,
        }
    };
    sections.into_iter().map(cut).collect()
}

/// The whole slot again, to be read only from here on.
fn join(parts: Vec<Part>) -> Slot {
    let whole = parts.into_iter().map(|part| part.slot).reduce(|mut slot, next| {
        slot.join(next);
        slot
    });
    whole.expect("a layout has sections").freeze()
}

/// Checks header and digests: nothing that fails here leaves the gateway.
fn verify(space: &Space, chunk: &ChunkHash, object: &Slot) -> Result<Header, Miss> {
    let header = Header::parse(object).map_err(|error| match error {
        HeaderError::Version(_) | HeaderError::DigestKind { .. } | HeaderError::Encrypted => {
            Miss::Unreadable(error)
        }
        error => Miss::BadHeader(error),
    })?;
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
