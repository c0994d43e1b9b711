//! One chunk's sections: each a ranged GET into its part of the slot, verified by digests that were computed on the way,
//! and what the answers say of the chunk.

use std::ops::Range;
use std::sync::Arc;

use futures::future::join_all;
use tokio::time::Instant;

use super::digests::Digests;
use super::load::{LoadedChunk, Miss};
use super::{Gateway, kib};
use crate::arena::SlotMut;
use crate::chunk::{ChunkHash, DigestKind, Header, HeaderError, Section, Space};
use crate::existence::{CacheKey, Known};
use crate::net::Landing;
use crate::object::{ErrorKind, GetRange, ObjectError, Operation, Version};

/// A chunk that is being fetched.
pub(super) struct Wanted {
    gateway: Gateway,
    space: Space,
    chunk: ChunkHash,
    key: String,
    deadline: Instant,
    /// What the answers say of the chunk's existence is dated by this.
    asked: Instant,
}

/// One section on its way: its part of the slot and of the object.
pub(super) struct Part {
    slot: SlotMut,
    digests: Digests,
    /// It was read a second time already.
    again: bool,
}

/// What the first section tells of the whole object.
pub(super) struct Head {
    header: Header,
    version: Version,
}

impl Part {
    fn bytes(&self) -> Range<usize> {
        self.digests.section().bytes.clone()
    }
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
}

impl Wanted {
    pub fn new(gateway: &Gateway, space: &Space, chunk: &ChunkHash, deadline: Instant) -> Self {
        Self {
            gateway: gateway.clone(),
            space: space.clone(),
            chunk: *chunk,
            key: gateway.0.options.keys.chunk(space.key(), chunk),
            deadline,
            asked: Instant::now(),
        }
    }

    /// Fetches and verifies the whole chunk, and remembers what that says of its existence.
    pub async fn fetch(&self, slot: SlotMut) -> Result<LoadedChunk, Miss> {
        let sections = self.space.layout().sections(self.gateway.0.options.part_bytes);
        let parts = self.cut(slot, sections);
        let (mut parts, version) = self.land(parts).await.map_err(|error| self.missed(error))?;
        let head = self.head(&mut parts[0], version).await?;
        for part in &mut parts {
            self.check(part, &head).await?;
        }
        self.present(&head);
        let mut slots = parts.into_iter().map(|part| part.slot);
        let mut whole = slots.next().expect("a layout has sections");
        slots.for_each(|slot| whole.join(slot));
        Ok(LoadedChunk {
            space: self.space.clone(),
            header: head.header,
            object: whole.freeze(),
        })
    }

    /// The slot, cut where the sections are.
    fn cut(&self, mut slot: SlotMut, sections: Vec<Section>) -> Vec<Part> {
        let cut = |section: Section| {
            let rest = slot.split_off(section.bytes.len());
            Part {
                slot: std::mem::replace(&mut slot, rest),
                digests: Digests::new(self.space.layout(), section, self.kind()),
                again: false,
            }
        };
        sections.into_iter().map(cut).collect()
    }

    /// All of the object, of one version. With an ETag from a lookup all ranges start at once; without one, or when
    /// that version is gone, the first range tells it.
    async fn land(&self, mut parts: Vec<Part>) -> Result<(Vec<Part>, Version), ObjectError> {
        if let Some(etag) = self.known_etag() {
            match self.get_all(&mut parts, Some(&etag), self.kind()).await {
                Ok(version) => return Ok((parts, version)),
                // Stored anew since the lookup.
                Err(error) if error.kind == ErrorKind::Changed => {}
                Err(error) => return Err(error),
            }
        }
        let (first, rest) = parts.split_first_mut().expect("a layout has sections");
        let version = self.get(first, None, self.kind()).await?;
        if !rest.is_empty() {
            self.get_all(rest, Some(&version.etag), self.kind()).await?;
        }
        Ok((parts, version))
    }

    /// Some ranges at once, to the end of each, since only then are their parts of the slot ours again.
    async fn get_all(
        &self,
        parts: &mut [Part],
        if_match: Option<&str>,
        kind: DigestKind,
    ) -> Result<Version, ObjectError> {
        let gets = parts.iter_mut().map(|part| self.get(part, if_match, kind));
        // Of several errors, one that is not "changed" says more.
        let worst = |a: Result<Version, ObjectError>, b: Result<Version, ObjectError>| match (&a, &b) {
            (Err(error), Err(_)) if error.kind == ErrorKind::Changed => b,
            (Ok(_), Err(_)) => b,
            _ => a,
        };
        let results = join_all(gets).await;
        results.into_iter().reduce(worst).expect("a layout has sections")
    }

    async fn get(
        &self,
        part: &mut Part,
        if_match: Option<&str>,
        kind: DigestKind,
    ) -> Result<Version, ObjectError> {
        let options = &self.gateway.0.options;
        let permits = kib(part.bytes().len()).min(kib(options.get_bytes_max));
        let permits = self.gateway.0.get_kib.acquire_many(permits);
        let Ok(Ok(_permits)) = tokio::time::timeout_at(self.deadline, permits).await else {
            return Err(self.error(ErrorKind::Deadline, "waiting for its turn"));
        };
        let get = GetRange {
            key: &self.key,
            range: part.bytes(),
            object_len: self.space.layout().object_len(),
            if_match,
        };
        let landing = Landing {
            // No bytes are left in the part until the store gives them back.
            slot: part.slot.split_off(0),
            watch: Some(part.digests.watch(kind)),
        };
        let (landing, meta) = self.gateway.0.store.get(get, landing, self.deadline).await;
        part.slot = landing.slot;
        Ok(meta?.version)
    }

    /// Checks the header. Nothing that fails here or in [`check`](Self::check) leaves the gateway.
    async fn head(&self, part: &mut Part, mut version: Version) -> Result<Head, Miss> {
        if self.gateway.0.cache.damaged(&self.cache_key()).as_ref() == Some(&version) {
            self.gateway
                .0
                .cache
                .learn(self.cache_key(), Known::Absent, self.asked);
            return Err(Miss::Quarantined);
        }
        let mut header = self.header(part);
        if matches!(header, Err(Miss::BadHeader(_)))
            && let Some(same) = self.again(part, &version, self.kind()).await?
        {
            (header, version) = (self.header(part), same);
        }
        match header {
            Ok(header) => Ok(Head { header, version }),
            Err(miss @ Miss::Unreadable(_)) => Err(miss),
            Err(miss) => Err(self.damaged(miss, version)),
        }
    }

    fn header(&self, part: &Part) -> Result<Header, Miss> {
        let header = Header::parse(&part.slot).map_err(|error| match error {
            HeaderError::Version(_) | HeaderError::DigestKind { .. } | HeaderError::Encrypted => {
                Miss::Unreadable(error)
            }
            error => Miss::BadHeader(error),
        })?;
        match header.expect(&self.space, &self.chunk) {
            Ok(()) => Ok(header),
            Err(error @ (HeaderError::OtherSpace(_) | HeaderError::OtherChunk(_))) => {
                Err(Miss::Foreign(error))
            }
            Err(error) => Err(Miss::BadHeader(error)),
        }
    }

    /// Checks the planes of a section.
    async fn check(&self, part: &mut Part, head: &Head) -> Result<(), Miss> {
        let kind = head.header.digest_kind;
        let bad = |part: &Part| part.digests.bad_plane(&part.slot, kind, &head.header.digests);
        let mut version = head.version.clone();
        let mut plane = bad(part);
        if plane.is_some()
            && let Some(same) = self.again(part, &version, kind).await?
        {
            (plane, version) = (bad(part), same);
        }
        match plane {
            None => Ok(()),
            Some(plane) => Err(self.damaged(Miss::BadDigest { plane }, version)),
        }
    }

    /// Reads a section whose bytes don't match once more: they may have been damaged on the way, which TCP's checksum
    /// does not always see, and the object is good. None if that was done already. One that can't be read again is
    /// not called damaged on one reading's word: nobody can tell.
    async fn again(
        &self,
        part: &mut Part,
        version: &Version,
        kind: DigestKind,
    ) -> Result<Option<Version>, Miss> {
        if std::mem::replace(&mut part.again, true) {
            return Ok(None);
        }
        let range = part.bytes();
        tracing::warn!(
            key = self.key,
            ?range,
            "bytes that don't match their digest; reading them again"
        );
        let version = self.get(part, Some(&version.etag), kind).await;
        version.map(Some).map_err(|error| self.missed(error))
    }

    fn present(&self, head: &Head) {
        let known = Known::Present(Arc::clone(&head.version.etag));
        self.gateway.0.cache.learn(self.cache_key(), known, self.asked);
    }

    fn damaged(&self, miss: Miss, version: Version) -> Miss {
        tracing::warn!(key = self.key, etag = &*version.etag, "a damaged chunk: {miss}");
        self.gateway
            .0
            .cache
            .quarantine(self.cache_key(), version, self.asked);
        miss
    }

    /// What a failed GET says of the chunk.
    fn missed(&self, error: ObjectError) -> Miss {
        let cache = &self.gateway.0.cache;
        match error.kind {
            ErrorKind::NotFound => {
                cache.learn(self.cache_key(), Known::Absent, self.asked);
                Miss::Absent
            }
            ErrorKind::Changed => {
                cache.forget(&self.cache_key());
                Miss::Replaced
            }
            // The next lookup's HEAD sees the length too, and the version to quarantine.
            ErrorKind::Length { .. } => {
                cache.forget(&self.cache_key());
                Miss::WrongLength(Arc::new(error))
            }
            _ => Miss::Unknown(Arc::new(error)),
        }
    }

    fn error(&self, kind: ErrorKind, detail: &str) -> ObjectError {
        ObjectError::new(Operation::Get, &self.key, kind, detail)
    }

    fn cache_key(&self) -> CacheKey {
        (self.space.key(), self.chunk)
    }

    /// The digests that this gateway stores with: until a header tells, the best guess at what an object has.
    fn kind(&self) -> DigestKind {
        self.gateway.0.options.digest
    }

    /// Of the version that a lookup saw.
    fn known_etag(&self) -> Option<Arc<str>> {
        match self.gateway.0.cache.get(&self.cache_key(), self.asked) {
            Some(Known::Present(etag)) => Some(etag),
            _ => None,
        }
    }
}
