//! The format of a chunk: its space, hash, key, header and bytes in order. No I/O.
//!
//! A *chunk* is the KV cache of `chunk_tokens` consecutive tokens of a prompt, for all layers and heads of a
//! *space*: one kind of KV of a model (model, revision, kind, dtype, geometry, tenant). Its hash covers the model, the
//! whole prefix before it and its own tokens, so equal hashes in one space mean interchangeable bytes, on every node and
//! in every language, without an index. All kinds of a model have the same chain of hashes.
//!
//! The format is written down in `docs/FORMAT.md`. It can't change once caches exist, except with a new format
//! version; `tests/data/vectors.json` pins it, and a Python implementation in `tests/reference` reproduces it.

mod crc64;
mod digest;
mod dtype;
mod hash;
mod header;
pub(crate) mod hex;
mod key;
mod keyring;
mod kind;
mod layout;
mod mask;
mod protection;
mod rekey;
mod run;
mod space;
mod space_input;

pub(crate) use crc64::{Append, Crc64};
pub(crate) use digest::object_crc64;
pub use digest::{DigestKind, Digester, PlaneDigest};
pub use dtype::DType;
pub use hash::{
    ChunkHash, ChunkHasher, Extra, HashError, HashScheme, ModelId, PageNames, SpaceId, TenantSecret,
};
pub use header::{
    CHAIN_LEN, FORMAT_VERSION, HEADER_ALIGN, Header, HeaderError, KEY_LEN, Seal, header_len, key_of,
    place_in_chain,
};
pub use hex::HexError;
pub use key::{ChunkId, Key, KeyPrefix, SpaceKey};
pub use keyring::{KeyError, KeyId, Keyring, PlaneCheck, PlaneCipher, SigningKey, TenantKeys};
pub use kind::Kind;
pub use layout::{Layout, Plane, Section, parts};
pub use mask::{Mask, MaskError};
pub use protection::Protection;
pub use rekey::{KeyState, NotRekeyed};
pub use run::{RUN_CHUNKS_MAX, RUN_KEY, Run};
pub use space::{CHUNK_BYTES_MAX, PLANES_MAX, Shard, Space, SpaceError};
pub use space_input::{Mha, Mla, SpaceInput};
