//! One chunk of a bucket: its length, its version and its header.

use std::sync::Arc;

use super::Inventory;
use crate::arena::{Arena, ArenaOptions, SLOT_ALIGN};
use crate::cache::gateway::OpenError;
use crate::format::{ChunkHash, Header, HeaderError, Keyring, PLANES_MAX, Space, SpaceKey, header_len};
use crate::s3::net::Landing;
use crate::s3::object::{ErrorKind, GetRange, ObjectMeta};

/// One chunk's object and its header. Its payload is not read.
#[derive(Debug, Clone)]
pub struct ChunkStat {
    pub key: String,
    pub meta: ObjectMeta,
    /// The length that the object must have, where the space is known.
    pub expected_len: Option<u64>,
    pub header: HeaderState,
}

#[derive(Debug, Clone)]
pub enum HeaderState {
    /// Whole, and of this chunk and space.
    Good(Header),
    /// Whole, but of another chunk or space, or with another geometry.
    Wrong(Header, HeaderError),
    Damaged(HeaderError),
}

impl ChunkStat {
    pub fn right_length(&self) -> bool {
        self.expected_len.is_none_or(|expected| expected == self.meta.len)
    }

    pub fn is_good(&self) -> bool {
        self.right_length() && matches!(self.header, HeaderState::Good(_))
    }
}

impl Inventory {
    /// HEADs a chunk and reads its header; None if there is no such object. Without the space's readable form fewer
    /// checks are possible.
    pub async fn stat(
        &self,
        space_key: SpaceKey,
        space: Option<&Space>,
        chunk: &ChunkHash,
    ) -> Result<Option<ChunkStat>, OpenError> {
        let key = self.keys.chunk(space_key, chunk);
        let meta = match self.store.head(&key, self.deadline()).await {
            Ok(meta) => meta,
            Err(error) if error.kind == ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        let header_bytes = match space {
            Some(space) => space.layout().header_len(),
            None => header_len(PLANES_MAX as usize),
        };
        let object_len = usize::try_from(meta.len).unwrap_or(usize::MAX);
        let header = match header_bytes.min(object_len) {
            0 => HeaderState::Damaged(HeaderError::Short {
                needed: header_bytes,
                actual: 0,
            }),
            bytes => {
                let arena = Arena::new(&ArenaOptions {
                    size: bytes.next_multiple_of(SLOT_ALIGN),
                    ..ArenaOptions::default()
                })?;
                let slot = arena.ticket().await.reserve(bytes).await;
                let get = GetRange {
                    key: &key,
                    range: 0..bytes,
                    object_len,
                    if_match: Some(&Arc::clone(&meta.version.etag)),
                };
                let (landing, got) = self.store.get(get, Landing::new(slot), self.deadline()).await;
                match got {
                    Ok(_) => judge(&landing.slot, space_key, space, chunk, &self.keyring),
                    Err(error) if error.kind == ErrorKind::NotFound => return Ok(None),
                    Err(error) => return Err(error.into()),
                }
            }
        };
        Ok(Some(ChunkStat {
            key,
            meta,
            expected_len: space.map(|space| space.layout().object_len() as u64),
            header,
        }))
    }
}

fn judge(
    bytes: &[u8],
    space_key: SpaceKey,
    space: Option<&Space>,
    chunk: &ChunkHash,
    keys: &Keyring,
) -> HeaderState {
    let header = match Header::parse(bytes) {
        Ok(header) => header,
        Err(error) => return HeaderState::Damaged(error),
    };
    let fits = match space {
        Some(space) => header.expect(space, chunk, keys).map(drop),
        None if SpaceKey::from(header.space_id) != space_key => Err(HeaderError::OtherSpace(header.space_id)),
        None if header.chunk != *chunk => Err(HeaderError::OtherChunk(header.chunk)),
        None => Ok(()),
    };
    match fits {
        Ok(()) => HeaderState::Good(header),
        Err(error) => HeaderState::Wrong(header, error),
    }
}
