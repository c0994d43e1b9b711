//! One chunk's sections: each a ranged GET into its part of the slot, and what the answers say of the chunk. Which
//! section is asked for when is in `chunk_order.rs` and `layer_order.rs`.

mod digests;
mod from_disk;
mod verify;

use std::ops::Range;
use std::sync::Arc;

use tokio::time::Instant;

use super::load::LoadedChunk;
use super::turns::{Turn, TurnPosition, Waiting};
use super::{Gateway, Miss};
use crate::arena::{Slot, SlotMut};
use crate::cache::existence::Known;
use crate::format::{ChunkHash, ChunkId, DigestKind, Section, Space};
use crate::protocol::Tier;
use crate::s3::net::Landing;
use crate::s3::object::{ErrorKind, GetRange, ObjectError, Operation, Version};

use self::digests::Digests;
pub(super) use self::from_disk::{read_verified, verify};
pub(super) use self::verify::ObjectHead;

/// A chunk that is being fetched; shared by the tasks of its GETs.
pub(super) struct ChunkFetch {
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
    /// Where it gets in line.
    place: TurnPosition,
    /// It was read a second time already.
    again: bool,
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

impl ChunkFetch {
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

    /// The slot, cut where the sections are. `place` tells each section's place by its number.
    pub fn cut(
        &self,
        slot: SlotMut,
        sections: &[Section],
        place: impl Fn(usize) -> TurnPosition,
    ) -> Vec<Part> {
        let mut slot = slot;
        let cut = |(i, section): (usize, &Section)| {
            let rest = slot.split_off(section.bytes.len());
            Part {
                slot: std::mem::replace(&mut slot, rest),
                digests: Digests::new(self.space.layout(), section.clone()),
                place: place(i),
                again: false,
            }
        };
        sections.iter().enumerate().map(cut).collect()
    }

    /// Gets in line for a section, now.
    pub fn wait(&self, part: &Part) -> Waiting {
        self.gateway.0.get_turns.wait(part.place, part.bytes().len())
    }

    /// Gets a section when its turn has come; the turn is over when it is dropped. `kind` is the digest to compute on the
    /// way.
    pub async fn get(
        &self,
        part: &mut Part,
        if_match: Option<&str>,
        kind: DigestKind,
        waiting: Waiting,
    ) -> Result<(Version, Turn), ObjectError> {
        let Ok(turn) = tokio::time::timeout_at(self.deadline, waiting).await else {
            return Err(self.error(ErrorKind::Deadline, "waiting for its turn"));
        };
        let get = GetRange {
            key: &self.key,
            range: part.bytes(),
            object_len: self.space.layout().object_len(),
            if_match,
        };
        let landing = Landing {
            // The part has no bytes until the store gives them back.
            slot: part.slot.split_off(0),
            watch: Some(part.digests.watch(kind)),
        };
        let (landing, meta) = self.gateway.0.store.get(get, landing, self.deadline).await;
        part.slot = landing.slot;
        Ok((meta?.version, turn))
    }

    /// What may be handed out: neighbouring sections that were verified. Also their bytes with the header, if they have it.
    pub fn loaded(&self, parts: impl IntoIterator<Item = Part>) -> (LoadedChunk, Slot) {
        let joined = parts.into_iter().map(|part| {
            let planes = part.digests.section().planes.clone();
            (part.slot, planes)
        });
        let joined = joined.reduce(|(mut slot, planes), (rest, more)| {
            slot.join(rest);
            (slot, planes.start..more.end)
        });
        let (slot, planes) = joined.expect("a layout has sections");
        let (slot, layout) = (slot.freeze(), self.space.layout());
        if planes == (0..layout.planes()) {
            return (self.whole(slot.clone(), Tier::S3), slot);
        }
        let header_len = match planes.start {
            0 => layout.header_len(),
            _ => 0,
        };
        let chunk = LoadedChunk {
            space: self.space.clone(),
            chunk: self.chunk,
            planes,
            payload: slot.slice(header_len..slot.len()),
            object: None,
            tier: Tier::S3,
            credit: None,
        };
        (chunk, slot)
    }

    /// A verified object.
    pub fn whole(&self, object: Slot, tier: Tier) -> LoadedChunk {
        let layout = self.space.layout();
        LoadedChunk {
            space: self.space.clone(),
            chunk: self.chunk,
            planes: 0..layout.planes(),
            payload: object.slice(layout.header_len()..object.len()),
            object: Some(object),
            tier,
            credit: None,
        }
    }

    /// Keeps a whole chunk in memory.
    pub fn keep(&self, chunk: &LoadedChunk) {
        self.gateway.keep(chunk, self.asked);
    }

    /// The object is a good one, as far as it was read.
    pub fn present(&self, head: &ObjectHead) {
        let known = Known::Present(Arc::clone(&head.version.etag));
        self.gateway.0.cache.learn(self.cache_key(), known, self.asked);
    }

    /// What a failed GET says of the chunk.
    pub fn missed(&self, error: ObjectError) -> Miss {
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

    pub fn error(&self, kind: ErrorKind, detail: &str) -> ObjectError {
        ObjectError::new(Operation::Get, &self.key, kind, detail)
    }

    fn cache_key(&self) -> ChunkId {
        (self.space.key(), self.chunk)
    }

    /// The digest that this gateway stores with: until a header tells, the best guess at what an object has.
    pub fn kind(&self) -> DigestKind {
        self.gateway.0.options.digest
    }

    /// Of the version that a lookup saw.
    pub fn known_etag(&self) -> Option<Arc<str>> {
        match self.gateway.0.cache.get(&self.cache_key(), self.asked) {
            Some(Known::Present(etag)) => Some(etag),
            _ => None,
        }
    }
}
