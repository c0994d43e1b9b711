//! The digests of a chunk's planes: CRC-64/NVME or BLAKE3, or in signed spaces BLAKE3 with a key.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::crc64::{Append, Crc64};
use super::header::Header;
use super::keyring::{SALT_LEN, SigningKey};
use super::layout::Layout;
use super::protection::Protection;

/// How the planes of a chunk are digested. `bench/micro.rs` has what each costs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub enum DigestKind {
    /// Detects damage.
    #[default]
    #[serde(rename = "crc64nvme")]
    Crc64Nvme,
    /// Detects damage and tampering by whoever can write the payload but not the header.
    #[serde(rename = "blake3")]
    Blake3,
    /// Detects all that was not written with the tenant's key. Of signed spaces only.
    #[serde(rename = "blake3-keyed")]
    KeyedBlake3,
    /// The tag of the encryption. Of encrypted spaces only.
    #[serde(rename = "aes256-gcm")]
    Aes256Gcm,
}

impl fmt::Display for DigestKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Crc64Nvme => "crc64nvme",
            Self::Blake3 => "blake3",
            Self::KeyedBlake3 => "blake3-keyed",
            Self::Aes256Gcm => "aes256-gcm",
        })
    }
}

impl DigestKind {
    /// Those that a space without protection may be stored with.
    pub const WORDS: &'static [(&'static str, Self)] =
        &[("crc64nvme", Self::Crc64Nvme), ("blake3", Self::Blake3)];

    /// The number in the header.
    pub fn code(self) -> u32 {
        match self {
            Self::Crc64Nvme => 1,
            Self::Blake3 => 2,
            Self::KeyedBlake3 => 3,
            Self::Aes256Gcm => 4,
        }
    }

    pub fn from_code(code: u32) -> Option<Self> {
        match code {
            1 => Some(Self::Crc64Nvme),
            2 => Some(Self::Blake3),
            3 => Some(Self::KeyedBlake3),
            4 => Some(Self::Aes256Gcm),
            _ => None,
        }
    }

    /// Bytes of a digest.
    pub fn width(self) -> usize {
        match self {
            Self::Crc64Nvme => 8,
            Self::Aes256Gcm => 16,
            Self::Blake3 | Self::KeyedBlake3 => 32,
        }
    }

    /// The protection of the spaces whose objects have it.
    pub fn protection(self) -> Protection {
        match self {
            Self::Crc64Nvme | Self::Blake3 => Protection::None,
            Self::KeyedBlake3 => Protection::Signed,
            Self::Aes256Gcm => Protection::Encrypted,
        }
    }
}

/// How the planes of one object are digested, with the key where that takes one.
#[derive(Debug, Clone, PartialEq)]
pub enum PlaneDigest {
    Crc64Nvme,
    Blake3,
    Signed(SigningKey),
}

impl PlaneDigest {
    /// Of an object without protection, and of the decrypted one in memory.
    pub fn open(kind: DigestKind) -> Self {
        match kind {
            DigestKind::Crc64Nvme => Self::Crc64Nvme,
            DigestKind::Blake3 | DigestKind::KeyedBlake3 | DigestKind::Aes256Gcm => Self::Blake3,
        }
    }

    pub fn kind(&self) -> DigestKind {
        match self {
            Self::Crc64Nvme => DigestKind::Crc64Nvme,
            Self::Blake3 => DigestKind::Blake3,
            Self::Signed(_) => DigestKind::KeyedBlake3,
        }
    }

    /// The header with the proof that it was written with the key, where there is one.
    pub fn seal(&self, header: Header) -> Header {
        match self {
            Self::Crc64Nvme | Self::Blake3 => header,
            Self::Signed(key) => header.sealed(key, [0; SALT_LEN]),
        }
    }

    /// The digest of `bytes`, at the left of 32 bytes, zeros after it.
    pub fn of(&self, bytes: &[u8]) -> [u8; 32] {
        match self {
            Self::Crc64Nvme => left(Crc64::of(bytes)),
            Self::Blake3 => *blake3::hash(bytes).as_bytes(),
            Self::Signed(key) => *blake3::keyed_hash(key.planes(), bytes).as_bytes(),
        }
    }

    /// For bytes that come stretch by stretch.
    pub fn digester(&self) -> Digester {
        Digester(match self {
            Self::Crc64Nvme => State::Crc64Nvme(Crc64::new()),
            Self::Blake3 => State::Blake3(Box::default()),
            Self::Signed(key) => State::Blake3(Box::new(blake3::Hasher::new_keyed(key.planes()))),
        })
    }
}

/// Computes a digest of bytes that come one stretch after the other.
#[derive(Debug)]
pub struct Digester(State);

#[derive(Debug)]
enum State {
    Crc64Nvme(Crc64),
    Blake3(Box<blake3::Hasher>),
}

impl Digester {
    pub fn update(&mut self, bytes: &[u8]) {
        match &mut self.0 {
            State::Crc64Nvme(crc) => crc.update(bytes),
            State::Blake3(hasher) => {
                hasher.update(bytes);
            }
        }
    }

    /// What [`PlaneDigest::of`] says of all bytes since the last call; the next byte begins anew.
    pub fn finish(&mut self) -> [u8; 32] {
        match &mut self.0 {
            State::Crc64Nvme(crc) => left(std::mem::replace(crc, Crc64::new()).sum()),
            State::Blake3(hasher) => {
                let digest = *hasher.finalize().as_bytes();
                hasher.reset();
                digest
            }
        }
    }
}

fn left(crc: u64) -> [u8; 32] {
    let mut digest = [0; 32];
    digest[..8].copy_from_slice(&crc.to_le_bytes());
    digest
}

/// The CRC-64/NVME of a whole object, from the digests in its header: the payload is not read. None where they are others.
pub(crate) fn object_crc64(layout: &Layout, object: &[u8]) -> Option<u64> {
    let header = Header::parse(object).ok()?;
    if header.digest_kind != DigestKind::Crc64Nvme || header.digests.len() != layout.planes() {
        return None;
    }
    let mut sum = Crc64::of(object.get(..layout.header_len())?);
    // Most planes have the same length.
    let mut append = (0, Append::new(0));
    for (plane, digest) in header.digests.iter().enumerate() {
        let len = layout.plane(plane).len();
        if append.0 != len {
            append = (len, Append::new(len));
        }
        sum = append.1.sum(sum, u64::from_le_bytes(*digest.first_chunk()?));
    }
    Some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ChunkHash, Keyring, Space, TenantSecret};
    use proptest::prelude::*;

    fn kinds() -> [PlaneDigest; 3] {
        let signed = Keyring::of_one(Protection::Signed, TenantSecret::new([3; 32]));
        let space = Space::from_json(
            r#"{"model": "m", "revision": "1", "protection": "signed", "mha": {"layers": 1, "heads": 1, "head_dim": 1}}"#,
        );
        let signed = signed.writes(&space.unwrap(), DigestKind::Crc64Nvme).unwrap();
        [PlaneDigest::Crc64Nvme, PlaneDigest::Blake3, signed]
    }

    proptest! {
        #[test]
        fn cuts_do_not_matter(stretches in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..3000), 0..6)) {
            for kind in kinds() {
                let mut digester = kind.digester();
                for _twice in 0..2 {
                    stretches.iter().for_each(|stretch| digester.update(stretch));
                    prop_assert_eq!(digester.finish(), kind.of(&stretches.concat()));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn sums_are_put_together(first in prop::collection::vec(any::<u8>(), 0..300), second in prop::collection::vec(any::<u8>(), 0..70_000)) {
            let sum = Append::new(second.len()).sum(Crc64::of(&first), Crc64::of(&second));
            prop_assert_eq!(sum, Crc64::of(&[first, second].concat()));
        }
    }

    #[test]
    fn an_object_s_sum_is_that_of_its_bytes() {
        let space = Space::from_json(
            r#"{"model": "m", "revision": "1", "dtype": "float16", "chunk_tokens": 16, "planes": [
                {"name": "kv", "layer": 0, "heads": 2, "row_bytes": 64}, {"name": "kv", "layer": 1, "heads": 2, "row_bytes": 64},
                {"name": "kv", "layer": 2, "heads": 1, "row_bytes": 100}]}"#,
        )
        .unwrap();
        let layout = space.layout();
        let mut object: Vec<u8> = (0..layout.object_len()).map(|i| (i * 31 % 251) as u8).collect();
        for (kind, sum) in [(PlaneDigest::Crc64Nvme, true), (PlaneDigest::Blake3, false)] {
            let header = Header {
                space_id: space.id(),
                chunk: ChunkHash([7; 32]),
                parent: ChunkHash([8; 32]),
                tokens: 16,
                payload_len: layout.payload_len() as u64,
                kind: space.kind(),
                is_draft: false,
                digest_kind: kind.kind(),
                digests: (0..layout.planes())
                    .map(|plane| kind.of(&object[layout.plane(plane)]))
                    .collect(),
                seal: None,
            };
            header.write(&mut object);
            assert_eq!(object_crc64(layout, &object), sum.then(|| Crc64::of(&object)));
        }
        object[20] ^= 1;
        assert_eq!(object_crc64(layout, &object), None, "no header");
    }

    #[test]
    fn check_values() {
        let crc = PlaneDigest::Crc64Nvme.of(b"123456789");
        assert_eq!(crc[..8], 0xAE8B_1486_0A79_9888_u64.to_le_bytes());
        assert_eq!(crc[8..], [0; 24]);
        assert_eq!(PlaneDigest::Blake3.of(b""), *blake3::hash(b"").as_bytes());
        for kind in kinds().map(|digest| digest.kind()) {
            assert_eq!(DigestKind::from_code(kind.code()), Some(kind));
        }
    }
}
