//! Object keys: prefix, space and chunk.

use std::fmt;

use super::hash::{ChunkHash, SpaceId};
use super::hex;

/// The first 128 bits of a space id, as object keys carry it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpaceKey([u8; 16]);

impl SpaceKey {
    /// From the 32 hex digits in a key.
    pub fn from_hex(text: &str) -> Option<Self> {
        hex::decode("a space in a key", text).ok().map(Self)
    }
}

impl From<SpaceId> for SpaceKey {
    fn from(id: SpaceId) -> Self {
        let mut first = [0; 16];
        first.copy_from_slice(&id.0[..16]);
        Self(first)
    }
}

impl fmt::Display for SpaceKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex::encode(&self.0))
    }
}

/// Names a chunk on every node: its space, and its hash in it.
pub type ChunkId = (SpaceKey, ChunkHash);

/// Where kvgate's objects are in a bucket: empty, or ends in a slash.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KeyPrefix(String);

/// The thing that an object key under the prefix names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Key {
    /// The space in readable form.
    SpaceJson(SpaceKey),
    Chunk(SpaceKey, ChunkHash),
}

impl KeyPrefix {
    /// `prefix` as configured, without slashes at its ends.
    pub fn new(prefix: &str) -> Self {
        let prefix = prefix.trim_matches('/');
        Self(if prefix.is_empty() {
            String::new()
        } else {
            format!("{prefix}/")
        })
    }

    /// The whole prefix, to list all.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub fn chunk(&self, space: SpaceKey, chunk: &ChunkHash) -> String {
        format!("{}{space}/{chunk}", self.0)
    }

    pub fn space_json(&self, space: SpaceKey) -> String {
        format!("{}{space}/space.json", self.0)
    }

    /// All that belongs to a space.
    pub fn space(&self, space: SpaceKey) -> String {
        format!("{}{space}/", self.0)
    }

    /// For kvgate's own short-lived objects.
    pub fn own(&self, name: &str) -> String {
        format!("{}.kvgate/{name}", self.0)
    }

    /// Reads a key; None for what is not ours.
    pub fn parse(&self, key: &str) -> Option<Key> {
        let (space, name) = key.strip_prefix(&self.0)?.split_once('/')?;
        if space.bytes().chain(name.bytes()).any(|c| c.is_ascii_uppercase()) {
            return None;
        }
        let space = SpaceKey::from_hex(space)?;
        match name {
            "space.json" => Some(Key::SpaceJson(space)),
            chunk => chunk.parse().ok().map(|chunk| Key::Chunk(space, chunk)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip_and_others_are_not_ours() {
        let (space, chunk) = (SpaceKey::from(SpaceId([0xab; 32])), ChunkHash([0x1f; 32]));
        for prefix in ["", "kv", "/team/kv/"] {
            let keys = KeyPrefix::new(prefix);
            assert_eq!(
                keys.parse(&keys.chunk(space, &chunk)),
                Some(Key::Chunk(space, chunk))
            );
            assert_eq!(keys.parse(&keys.space_json(space)), Some(Key::SpaceJson(space)));
            assert_eq!(keys.parse(&keys.own("probe")), None);
            assert_eq!(keys.parse(&format!("other/{}", keys.chunk(space, &chunk))), None);
            assert_eq!(keys.parse(&keys.chunk(space, &chunk).to_uppercase()), None);
        }
        assert_eq!(
            KeyPrefix::new("kv").chunk(space, &chunk),
            format!("kv/{}/{}", "ab".repeat(16), "1f".repeat(32))
        );
    }
}
