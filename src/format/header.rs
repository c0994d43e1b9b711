//! The fixed part at the front of every object: what it is, and a digest for each plane. `docs/FORMAT.md` section 4.
//!
//! Its length depends on the number of planes only, so that the length of every object of a space is known before
//! it is read, whichever digest its writer chose.

use super::digest::DigestKind;
use super::hash::{ChunkHash, SpaceId};
use super::keyring::{KeyId, Keyring, PlaneCheck, SALT_LEN, SigningKey};
use super::kind::Kind;
use super::protection::Protection;
use super::space::Space;

/// The newest version that this kvgate reads and writes; version 1 has no protection.
pub const FORMAT_VERSION: u32 = 2;
/// The payload starts at a multiple of this, for direct I/O.
pub const HEADER_ALIGN: usize = 4096;

const MAGIC: [u8; 8] = *b"KVGATE\r\n";
const FIXED_LEN: usize = 256;
const DIGEST_LEN: usize = 32;
/// Bytes that must be zero: reserved ones, and in version 1 those of the seal.
const UNUSED_OPEN: &[std::ops::Range<usize>] = &[136..176, 188..FIXED_LEN];
const UNUSED_SIGNED: &[std::ops::Range<usize>] = &[152..176, 188..192, 224..FIXED_LEN];
const UNUSED_ENCRYPTED: &[std::ops::Range<usize>] = &[188..192, 224..FIXED_LEN];
const KEY_ID: std::ops::Range<usize> = 136..152;
const SALT_AT: usize = 152;
const TAG_AT: usize = 192;

/// Bytes of the header of a chunk with this many planes.
pub const fn header_len(planes: usize) -> usize {
    (FIXED_LEN + planes * DIGEST_LEN + DIGEST_LEN).next_multiple_of(HEADER_ALIGN)
}

/// Bytes at the front of an object that tell its [place in the chain](place_in_chain).
pub const CHAIN_LEN: usize = 112;

/// The hashes of a chunk and of its parent, from the front of its object. None for what is no chunk of this format. The
/// header's digest is not checked: that takes all of the header.
pub fn place_in_chain(front: &[u8]) -> Option<(ChunkHash, ChunkHash)> {
    let is_chunk =
        front.len() >= CHAIN_LEN && front[..8] == MAGIC && (1..=FORMAT_VERSION).contains(&u32_at(front, 8));
    is_chunk.then(|| (ChunkHash(array_at(front, 48)), ChunkHash(array_at(front, 80))))
}

/// Bytes at the front of an object that tell its [key](key_of).
pub const KEY_LEN: usize = KEY_ID.end;

/// The key that the front of an object names. None: no key, or no chunk of this format. Nothing is checked, as above.
pub fn key_of(front: &[u8]) -> Option<KeyId> {
    place_in_chain(front)?;
    let id = front.get(KEY_ID)?.try_into().ok()?;
    (id != [0; 16]).then_some(KeyId(id))
}

/// The description in a chunk's object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    pub space_id: SpaceId,
    pub chunk: ChunkHash,
    pub parent: ChunkHash,
    pub tokens: u32,
    pub payload_len: u64,
    pub kind: Kind,
    /// Whether the layers are a draft model's.
    pub is_draft: bool,
    pub digest_kind: DigestKind,
    /// One a plane, at the left, zeros after it.
    pub digests: Vec<[u8; 32]>,
    /// Of an object in a space with a protection.
    pub seal: Option<Seal>,
}

/// The proof that a header was written with a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal {
    pub key_id: KeyId,
    /// Random, of an encrypted object; else zeros.
    pub salt: [u8; SALT_LEN],
    /// BLAKE3, keyed, of all header bytes before the header's digest, with zeros in place of this tag.
    pub tag: blake3::Hash,
}

/// Bytes that are not the header of the chunk that was asked for.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    #[error("it does not start with kvgate's magic: not a chunk")]
    Magic,
    #[error("format version {0} (this kvgate reads {FORMAT_VERSION})")]
    Version(u32),
    #[error("{actual} bytes are too few for a header of {needed}")]
    Short { needed: usize, actual: usize },
    #[error("header length {actual} where {expected} was expected")]
    HeaderLen { expected: usize, actual: usize },
    #[error("the header's own digest does not match")]
    Digest,
    #[error("digest kind {kind} of {width} bytes is not known")]
    DigestKind { kind: u32, width: u32 },
    #[error("kind {code} of {tokens} tokens (draft {draft}) is not known")]
    Kind { code: u32, tokens: u32, draft: u32 },
    #[error("it has KV of kind {actual} where {expected} was expected, or a draft's in place of a model's")]
    OtherKind { expected: Kind, actual: Kind },
    #[error("it is encrypted, which this kvgate can't read")]
    Encrypted,
    #[error("its protection is {actual}, and all objects of this space must be {demanded}: it is forged")]
    Protection {
        demanded: Protection,
        actual: Protection,
    },
    #[error("its header was not written with the key {0} that it names: it is forged")]
    Forged(KeyId),
    #[error(
        "it was written with key {key} of tenant {tenant:?}, which is not here: add that key to the tenant's `keys` in the \
         file of [keys] file"
    )]
    NoKey { key: KeyId, tenant: String },
    #[error("bytes that must be zero are not")]
    NotZero,
    #[error("it belongs to space {0}")]
    OtherSpace(SpaceId),
    #[error("it is chunk {0}")]
    OtherChunk(ChunkHash),
    #[error("{what} is {actual} where {expected} was expected")]
    Geometry {
        what: &'static str,
        expected: u64,
        actual: u64,
    },
}

impl HeaderError {
    /// Whether another version of kvgate may have written it, and can read it.
    pub fn is_of_another_version(&self) -> bool {
        matches!(self, Self::Version(_) | Self::DigestKind { .. } | Self::Encrypted)
    }
}

impl Header {
    /// Writes the header into the first [`header_len`] bytes of `out`, which must be there.
    pub fn write(&self, out: &mut [u8]) {
        let len = header_len(self.digests.len());
        let out = &mut out[..len];
        out.fill(0);
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &MAGIC);
        put(8, &self.digest_kind.protection().format_version().to_le_bytes());
        put(12, &u32_of(len).to_le_bytes());
        put(16, &self.space_id.0);
        put(48, &self.chunk.0);
        put(80, &self.parent.0);
        put(112, &self.tokens.to_le_bytes());
        put(116, &u32_of(self.digests.len()).to_le_bytes());
        put(120, &self.payload_len.to_le_bytes());
        put(128, &self.digest_kind.code().to_le_bytes());
        put(132, &u32_of(self.digest_kind.width()).to_le_bytes());
        let (kind, tokens) = self.kind.code();
        put(176, &kind.to_le_bytes());
        put(180, &tokens.to_le_bytes());
        put(184, &u32::from(self.is_draft).to_le_bytes());
        if let Some(seal) = &self.seal {
            put(KEY_ID.start, &seal.key_id.0);
            put(SALT_AT, &seal.salt);
            put(TAG_AT, seal.tag.as_bytes());
        }
        for (plane, digest) in self.digests.iter().enumerate() {
            put(FIXED_LEN + plane * DIGEST_LEN, digest);
        }
        let digest = blake3::hash(&out[..len - DIGEST_LEN]);
        out[len - DIGEST_LEN..].copy_from_slice(digest.as_bytes());
    }

    /// The header with the proof that it was written with the key.
    #[must_use]
    pub fn sealed(mut self, key: &SigningKey, salt: [u8; SALT_LEN]) -> Self {
        let seal = |tag| {
            Some(Seal {
                key_id: key.id(),
                salt,
                tag,
            })
        };
        self.seal = seal(blake3::Hash::from_bytes([0; 32]));
        self.seal = seal(self.tag(key));
        self
    }

    /// The tag that the key makes of this header.
    pub(super) fn tag(&self, key: &SigningKey) -> blake3::Hash {
        let mut bytes = vec![0; header_len(self.digests.len())];
        self.write(&mut bytes);
        bytes[TAG_AT..TAG_AT + DIGEST_LEN].fill(0);
        let body = bytes.len() - DIGEST_LEN;
        blake3::keyed_hash(key.header(), &bytes[..body])
    }

    /// Reads the header at the front of `bytes`, which may go on after it, and checks all that takes neither the space
    /// nor its keys. [`expect`](Self::expect) checks the rest.
    pub fn parse(bytes: &[u8]) -> Result<Self, HeaderError> {
        if bytes.len() < FIXED_LEN {
            return Err(HeaderError::Short {
                needed: FIXED_LEN,
                actual: bytes.len(),
            });
        }
        if bytes[..8] != MAGIC {
            return Err(HeaderError::Magic);
        }
        // These hold in every version, so that damage to the version is not taken for another version.
        let len = u32_at(bytes, 12) as usize;
        if len == 0 || !len.is_multiple_of(HEADER_ALIGN) {
            return Err(HeaderError::HeaderLen {
                expected: HEADER_ALIGN,
                actual: len,
            });
        }
        let header = bytes.get(..len).ok_or(HeaderError::Short {
            needed: len,
            actual: bytes.len(),
        })?;
        let (body, digest) = header.split_at(len - DIGEST_LEN);
        if *blake3::hash(body).as_bytes() != *digest {
            return Err(HeaderError::Digest);
        }
        let version = u32_at(body, 8);
        if !(1..=FORMAT_VERSION).contains(&version) {
            return Err(HeaderError::Version(version));
        }
        let planes = u32_at(body, 116) as usize;
        let expected = header_len(planes);
        if len != expected {
            return Err(HeaderError::HeaderLen {
                expected,
                actual: len,
            });
        }
        let (kind, width) = (u32_at(body, 128), u32_at(body, 132));
        let digest_kind = DigestKind::from_code(kind)
            .filter(|kind| u32_of(kind.width()) == width && kind.protection().format_version() == version)
            .ok_or(HeaderError::DigestKind { kind, width })?;
        let seal = (!digest_kind.protection().is_none()).then(|| Seal {
            key_id: KeyId(array_at(body, KEY_ID.start)),
            salt: array_at(body, SALT_AT),
            tag: blake3::Hash::from_bytes(array_at(body, TAG_AT)),
        });
        let unused = match &seal {
            Some(_) if digest_kind == DigestKind::Aes256Gcm => UNUSED_ENCRYPTED,
            Some(_) => UNUSED_SIGNED,
            None if body[KEY_ID].iter().any(|&byte| byte != 0) => return Err(HeaderError::Encrypted),
            None => UNUSED_OPEN,
        };
        let (code, tokens, draft) = (u32_at(body, 176), u32_at(body, 180), u32_at(body, 184));
        let kind = Kind::from_code((code, tokens)).filter(|_| draft <= 1);
        let kind = kind.ok_or(HeaderError::Kind { code, tokens, draft })?;
        let (table, rest) = body[FIXED_LEN..].split_at(planes * DIGEST_LEN);
        let digests: Vec<[u8; 32]> = table.as_chunks().0.to_vec();
        let after = digests.iter().flat_map(|digest| &digest[digest_kind.width()..]);
        let unused = unused.iter().flat_map(|range| &body[range.clone()]);
        if unused.chain(after).chain(rest).any(|&byte| byte != 0) {
            return Err(HeaderError::NotZero);
        }
        Ok(Self {
            space_id: SpaceId(array_at(body, 16)),
            chunk: ChunkHash(array_at(body, 48)),
            parent: ChunkHash(array_at(body, 80)),
            tokens: u32_at(body, 112),
            payload_len: u64::from_le_bytes(array_at(body, 120)),
            kind,
            is_draft: draft == 1,
            digest_kind,
            digests,
            seal,
        })
    }

    /// Checks that this is the header of `chunk` in `space`, written with a key of its tenant where the space demands
    /// it. Returns how the planes are checked.
    pub fn expect(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        keys: &Keyring,
    ) -> Result<PlaneCheck, HeaderError> {
        if self.space_id != space.id() {
            return Err(HeaderError::OtherSpace(self.space_id));
        }
        if self.chunk != *chunk {
            return Err(HeaderError::OtherChunk(self.chunk));
        }
        let check = keys.reads(space, self)?;
        let layout = space.layout();
        let same = |what, expected: u64, actual: u64| match expected == actual {
            true => Ok(()),
            false => Err(HeaderError::Geometry {
                what,
                expected,
                actual,
            }),
        };
        same(
            "the number of tokens",
            space.chunk_tokens().into(),
            self.tokens.into(),
        )?;
        same(
            "the number of planes",
            layout.planes() as u64,
            self.digests.len() as u64,
        )?;
        same(
            "the payload length",
            layout.payload_len() as u64,
            self.payload_len,
        )?;
        match (self.kind, self.is_draft) == (space.kind(), !space.draft().is_empty()) {
            true => Ok(check),
            false => Err(HeaderError::OtherKind {
                expected: space.kind(),
                actual: self.kind,
            }),
        }
    }
}

/// Lengths in a header are far below 2^32: at most `PLANES_MAX` planes.
fn u32_of(len: usize) -> u32 {
    u32::try_from(len).expect("header lengths fit in 32 bits")
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut array = [0; N];
    array.copy_from_slice(&bytes[at..at + N]);
    array
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    prop_compose! {
        fn any_header()(
            ids in any::<[[u8; 32]; 3]>(),
            tokens in any::<u32>(),
            payload_len in any::<u64>(),
            (blake3, is_draft) in any::<(bool, bool)>(),
            kind in prop_oneof![
                Just(Kind::Full), Just(Kind::State), any::<u32>().prop_map(Kind::Window),
                any::<u32>().prop_map(Kind::Chunked),
            ],
            mut digests in prop::collection::vec(any::<[u8; 32]>(), 0..200),
        ) -> Header {
            let digest_kind = if blake3 { DigestKind::Blake3 } else { DigestKind::Crc64Nvme };
            digests.iter_mut().for_each(|digest| digest[digest_kind.width()..].fill(0));
            let [space_id, chunk, parent] = ids;
            Header {
                space_id: SpaceId(space_id),
                chunk: ChunkHash(chunk),
                parent: ChunkHash(parent),
                tokens, payload_len, kind, is_draft, digest_kind, digests, seal: None,
            }
        }
    }

    fn bytes_of(header: &Header) -> Vec<u8> {
        let mut bytes = vec![0xee; header_len(header.digests.len())];
        header.write(&mut bytes);
        bytes
    }

    proptest! {
        #[test]
        fn round_trips(header in any_header(), after in prop::collection::vec(any::<u8>(), 0..100)) {
            let mut bytes = bytes_of(&header);
            prop_assert_eq!(bytes.len() % HEADER_ALIGN, 0);
            bytes.extend(after);
            prop_assert_eq!(place_in_chain(&bytes), Some((header.chunk, header.parent)));
            prop_assert_eq!(Header::parse(&bytes), Ok(header));
        }

        #[test]
        fn any_changed_byte_is_refused(header in any_header(), at in any::<prop::sample::Index>(), flip in 1_u8..) {
            let mut bytes = bytes_of(&header);
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
            prop_assert!(Header::parse(&bytes).is_err());
        }

        #[test]
        fn a_cut_header_is_refused(header in any_header(), len in any::<prop::sample::Index>()) {
            let bytes = bytes_of(&header);
            prop_assert!(Header::parse(&bytes[..len.index(bytes.len())]).is_err());
        }

        /// A header whose digest is right but whose fields are not: what a faulty writer makes.
        #[test]
        fn forged_fields_never_panic(header in any_header(), at in 0_usize..256, value in any::<u8>()) {
            let mut bytes = bytes_of(&header);
            bytes[at] = value;
            let body = bytes.len() - 32;
            let digest = blake3::hash(&bytes[..body]);
            bytes[body..].copy_from_slice(digest.as_bytes());
            if let Ok(parsed) = Header::parse(&bytes) {
                prop_assert_eq!(bytes_of(&parsed), bytes);
            }
        }

        #[test]
        fn noise_never_panics(bytes in prop::collection::vec(any::<u8>(), 0..9000)) {
            prop_assert!(Header::parse(&bytes).is_err());
        }
    }
}
