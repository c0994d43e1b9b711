//! A load's result: verified planes in their slots.

use std::ops::Range;

use super::credit::Spent;
use crate::arena::Slot;
use crate::format::{ChunkHash, Space};
use crate::protocol::Tier;

/// Verified planes of a chunk in its slot: all planes in chunk order, those of a group in layer order. The slot is
/// taken until every clone of every part that was handed out of it is dropped.
#[derive(Debug, Clone)]
pub struct LoadedChunk {
    pub(super) space: Space,
    pub(super) chunk: ChunkHash,
    pub(super) planes: Range<usize>,
    /// The bytes of `planes`, without the header.
    pub(super) payload: Slot,
    /// Header and payload, if these are all planes and the header is written.
    pub(super) object: Option<Slot>,
    pub(super) tier: Tier,
    /// The credit of the load that asked for it.
    pub(super) credit: Option<Spent>,
}

impl LoadedChunk {
    /// A chunk of a whole object that was verified.
    pub(super) fn whole(space: &Space, chunk: ChunkHash, object: Slot, tier: Tier) -> Self {
        let layout = space.layout();
        Self {
            space: space.clone(),
            chunk,
            planes: 0..layout.planes(),
            payload: object.slice(layout.header_len()..object.len()),
            object: Some(object),
            tier,
            credit: None,
        }
    }

    pub fn hash(&self) -> ChunkHash {
        self.chunk
    }

    pub fn space(&self) -> &Space {
        &self.space
    }

    /// The tier it was found in.
    pub fn tier(&self) -> Tier {
        self.tier
    }

    /// Header and payload, if all planes are here and the header is written.
    pub fn object(&self) -> Option<&Slot> {
        self.object.as_ref()
    }

    /// The range of planes that are here.
    pub fn planes(&self) -> Range<usize> {
        self.planes.clone()
    }

    /// The bytes of [`planes`](Self::planes), as `docs/FORMAT.md` orders them: the object's whole payload if all
    /// planes are here.
    pub fn payload(&self) -> Slot {
        self.payload.clone()
    }

    /// The bytes of one of [`planes`](Self::planes): `[head][token][row]`. `index` counts in the whole chunk;
    /// panics for a plane that is not here.
    pub fn plane(&self, index: usize) -> Slot {
        assert!(
            self.planes.contains(&index),
            "plane {index}, where {:?} are",
            self.planes
        );
        let layout = self.space.layout();
        let (plane, start) = (layout.plane(index), layout.plane(self.planes.start).start);
        self.payload.slice(plane.start - start..plane.end - start)
    }
}

impl LoadedChunk {
    /// A part of this chunk: some of its planes.
    pub(super) fn group(&self, planes: Range<usize>) -> Self {
        let layout = self.space.layout();
        let start = layout.plane(self.planes.start).start;
        let bytes = layout.plane(planes.start).start..layout.plane(planes.end - 1).end;
        Self {
            payload: self.payload.slice(bytes.start - start..bytes.end - start),
            object: self.object.clone().filter(|_| planes == self.planes),
            planes,
            ..self.clone()
        }
    }

    pub(super) fn with_credit(mut self, credit: Option<Spent>) -> Self {
        self.credit = credit;
        self
    }
}
