//! Slots that chunks are gathered into: the payload first, then header and digests in front of it.

use crate::arena::{Arena, Slot, SlotMut};
use crate::format::{ChunkHash, Header, PlaneDigest, Space};

/// The arena has no room for a chunk now; the chunk is not stored, with no other effect.
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
    /// Lets `copy` fill the object's payload; it is given the whole slot and gives it back.
    pub fn filled_by<E>(self, copy: impl FnOnce(SlotMut) -> Result<SlotMut, E>) -> Result<Self, E> {
        let Self { slot, space } = self;
        Ok(Self {
            slot: copy(slot)?,
            space,
        })
    }

    /// The payload, to be filled wholly: plane by plane, each `[head][token][row]`. Holds older bytes until then.
    pub fn payload_mut(&mut self) -> &mut [u8] {
        let header_len = self.space.layout().header_len();
        &mut self.slot[header_len..]
    }

    /// The payload, as it is now.
    pub fn payload(&self) -> &[u8] {
        &self.slot[self.space.layout().header_len()..]
    }

    /// The length of the whole object.
    pub fn object_bytes(&self) -> usize {
        self.slot.len()
    }

    /// The offset of the whole slot in the arena's file.
    pub fn slot_offset(&self) -> usize {
        self.slot.slot_offset()
    }

    /// The offset of the payload in the arena's file.
    pub fn payload_offset(&self) -> usize {
        self.slot.offset() + self.space.layout().header_len()
    }

    pub fn generation(&self) -> u64 {
        self.slot.generation()
    }

    pub fn space(&self) -> &Space {
        &self.space
    }

    /// Splits the slot into room for the header, and the payload.
    pub fn split(self) -> (SlotMut, Slot) {
        let mut header = self.slot;
        let payload = header.split_off(self.space.layout().header_len());
        (header, payload.freeze())
    }
}

/// A filled slot, and the chunk in it.
#[derive(Debug)]
pub struct FilledSlot {
    pub hash: ChunkHash,
    /// The hash of the chunk before, or the root.
    pub parent: ChunkHash,
    pub slot: StoreSlot,
}

/// A slot for a new chunk of `space`. Never waits.
pub fn reserve(arena: &Arena, space: &Space) -> Result<StoreSlot, ArenaFull> {
    let object_bytes = space.layout().object_len();
    if let Some(slot) = arena.try_reserve(object_bytes) {
        Ok(StoreSlot {
            slot,
            space: space.clone(),
        })
    } else {
        let stats = arena.stats();
        Err(ArenaFull {
            object_bytes,
            used_bytes: stats.used_bytes,
            arena_bytes: stats.size_bytes,
        })
    }
}

/// Writes the header in front of the payload; the whole object is read-only from here on.
pub fn seal(
    digest: &PlaneDigest,
    space: &Space,
    chunk: &ChunkHash,
    parent: &ChunkHash,
    mut header: SlotMut,
    payload: &Slot,
) -> Slot {
    let layout = space.layout();
    let start = layout.header_len();
    let of_plane = |plane| {
        let bytes = layout.plane(plane);
        digest.of(&payload[bytes.start - start..bytes.end - start])
    };
    let of = Header {
        space_id: space.id(),
        chunk: *chunk,
        parent: *parent,
        tokens: space.chunk_tokens(),
        payload_len: layout.payload_len() as u64,
        kind: space.kind(),
        is_draft: !space.draft().is_empty(),
        digest_kind: digest.kind(),
        digests: (0..layout.planes()).map(of_plane).collect(),
        seal: None,
    };
    digest.seal(of).write(&mut header);
    header.freeze().join(payload)
}
