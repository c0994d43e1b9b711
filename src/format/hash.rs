//! The chain of chunk hashes over a prompt's tokens, keyed by the model: the same for all of its spaces.

use std::fmt;

use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use super::hex::{self, HexError};
use super::space::Space;

macro_rules! hash_type {
    ($(#[$doc:meta])* $name:ident, $what:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub [u8; 32]);

        impl $name {
            pub fn as_bytes(&self) -> &[u8; 32] {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&hex::encode(&self.0))
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{}({self})", stringify!($name))
            }
        }

        impl std::str::FromStr for $name {
            type Err = HexError;
            fn from_str(text: &str) -> Result<Self, HexError> {
                hex::decode($what, text).map(Self)
            }
        }

        impl Serialize for $name {
            fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.collect_str(self)
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                String::deserialize(deserializer)?.parse().map_err(serde::de::Error::custom)
            }
        }
    };
}

hash_type! {
    /// BLAKE3 of the space's canonical JSON: all that must be equal for chunks to be interchangeable, tokens aside.
    SpaceId, "a space id"
}
hash_type! {
    /// The same for all spaces of one model: what chunk hashes are keyed with.
    ModelId, "a model id"
}
hash_type! {
    /// Names a chunk: covers the model, all tokens before it and its own. Never folded.
    ChunkHash, "a chunk hash"
}

/// Where chunk hashes come from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum HashScheme {
    /// [`ChunkHasher`].
    #[serde(rename = "kvgate-v1")]
    KvgateV1,
    /// The engine brings them: SGLang's pages,
    #[serde(rename = "sglang-sha256")]
    SglangSha256,
    /// or vLLM's blocks.
    #[serde(rename = "vllm-sha256")]
    VllmSha256,
}

/// Keeps one tenant from computing (or guessing the presence of) another's keys. 32 bytes; never printed.
#[derive(Clone, PartialEq, Eq)]
pub struct TenantSecret(Zeroizing<[u8; 32]>);

impl TenantSecret {
    pub fn new(bytes: [u8; 32]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    pub(super) fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The key of a model's chunk hashes.
    fn hash_key(&self, model: ModelId) -> Self {
        Self::new(*blake3::keyed_hash(&self.0, model.as_bytes()).as_bytes())
    }

    /// From 64 hex digits; the error doesn't repeat them.
    pub fn from_hex(text: &str) -> Result<Self, HashError> {
        hex::decode("a tenant secret", text.trim())
            .map(Self::new)
            .map_err(|_| HashError::Secret)
    }
}

impl fmt::Debug for TenantSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TenantSecret(..)")
    }
}

/// Anything else that decides the KV of a position: an image's digest, a prompt embedding.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Extra {
    /// Position in the tokens that it goes with.
    pub offset: u32,
    pub bytes: Vec<u8>,
}

/// Input that has no chunk hash.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HashError {
    #[error(
        "this space takes its chunk hashes from the engine (its hash scheme is not kvgate-v1): give hashes, not tokens"
    )]
    Scheme,
    #[error("a chunk has {expected} tokens, not {actual}: only full chunks have a hash")]
    Tokens { expected: u32, actual: usize },
    #[error("an extra is at position {offset}, but there are {tokens} tokens: offsets count from 0")]
    ExtraOffset { offset: u32, tokens: usize },
    #[error("{what} has {actual} bytes: at most 4294967295 can be hashed")]
    TooLong { what: &'static str, actual: usize },
    #[error("a tenant secret is 64 hex digits, for instance from `openssl rand -hex 32`")]
    Secret,
}

/// Computes the chunk hashes of a model (scheme `kvgate-v1`, docs/FORMAT.md section 3).
///
/// No seed and no platform's own hash: the same tokens give the same hashes in every process.
#[derive(Clone)]
pub struct ChunkHasher {
    key: [u8; 32],
    chunk_tokens: u32,
}

/// The names of hashes that an engine brings (the schemes other than `kvgate-v1`): themselves, and for a tenant with a
/// secret keyed by it.
#[derive(Clone, Default)]
pub struct PageNames(Option<TenantSecret>);

impl PageNames {
    pub fn new(space: &Space, secret: Option<&TenantSecret>) -> Self {
        Self(secret.map(|secret| secret.hash_key(space.model_id())))
    }

    /// Zeros are no page's hash, and stay.
    pub fn of(&self, hashes: Vec<ChunkHash>) -> Vec<ChunkHash> {
        let Some(key) = &self.0 else { return hashes };
        let named = hashes.into_iter().map(|hash| {
            if hash.0 == [0; 32] {
                return hash;
            }
            let mut input = [0x02; 33];
            input[1..].copy_from_slice(&hash.0);
            ChunkHash(*blake3::keyed_hash(key.as_bytes(), &input).as_bytes())
        });
        named.collect()
    }
}

impl ChunkHasher {
    pub fn new(space: &Space, secret: Option<&TenantSecret>) -> Result<Self, HashError> {
        if space.hash() != HashScheme::KvgateV1 {
            return Err(HashError::Scheme);
        }
        let id = space.model_id();
        let key = secret.map_or(*id.as_bytes(), |secret| *secret.hash_key(id).as_bytes());
        Ok(Self {
            key,
            chunk_tokens: space.chunk_tokens(),
        })
    }

    /// The parent of every first chunk. An absent salt or adapter is the empty one.
    pub fn root(&self, salt: &[u8], adapter: &[u8]) -> Result<ChunkHash, HashError> {
        let mut input = vec![0x00];
        push_bytes(&mut input, "a salt", salt)?;
        push_bytes(&mut input, "an adapter", adapter)?;
        Ok(self.keyed(&input))
    }

    /// The hash of one full chunk; offsets of extras count from its first token.
    pub fn chunk(
        &self,
        parent: &ChunkHash,
        tokens: &[u32],
        extras: &[Extra],
    ) -> Result<ChunkHash, HashError> {
        if tokens.len() != self.chunk_tokens as usize {
            return Err(HashError::Tokens {
                expected: self.chunk_tokens,
                actual: tokens.len(),
            });
        }
        let mut extras: Vec<&Extra> = extras.iter().collect();
        extras.sort();
        self.chunk_into(&mut Vec::new(), parent, tokens, &extras, 0)
    }

    /// The hashes of all full chunks of a prompt; offsets of extras count from the prompt's first token. Tokens and
    /// extras after the last full chunk have no hash.
    pub fn chain(
        &self,
        root: &ChunkHash,
        tokens: &[u32],
        extras: &[Extra],
    ) -> Result<Vec<ChunkHash>, HashError> {
        let mut extras: Vec<&Extra> = extras.iter().collect();
        extras.sort();
        if let Some(extra) = extras
            .last()
            .filter(|extra| extra.offset as usize >= tokens.len())
        {
            return Err(HashError::ExtraOffset {
                offset: extra.offset,
                tokens: tokens.len(),
            });
        }
        let chunk_tokens = self.chunk_tokens as usize;
        let mut hashes = Vec::with_capacity(tokens.len() / chunk_tokens);
        let mut input = Vec::with_capacity(64 + 4 * chunk_tokens);
        let mut parent = *root;
        let mut rest = extras.as_slice();
        for (index, tokens) in tokens.chunks_exact(chunk_tokens).enumerate() {
            let start = index * chunk_tokens;
            let here = rest.partition_point(|extra| (extra.offset as usize) < start + chunk_tokens);
            parent = self.chunk_into(&mut input, &parent, tokens, &rest[..here], start)?;
            rest = &rest[here..];
            hashes.push(parent);
        }
        Ok(hashes)
    }

    /// `extras` are in order, their offsets count from `start` tokens before the chunk.
    fn chunk_into(
        &self,
        input: &mut Vec<u8>,
        parent: &ChunkHash,
        tokens: &[u32],
        extras: &[&Extra],
        start: usize,
    ) -> Result<ChunkHash, HashError> {
        input.clear();
        input.push(0x01);
        input.extend_from_slice(&parent.0);
        input.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
        push_len(input, "a list of extras", extras.len())?;
        for extra in extras {
            let offset = extra.offset as usize - start;
            if offset >= tokens.len() {
                return Err(HashError::ExtraOffset {
                    offset: extra.offset,
                    tokens: tokens.len(),
                });
            }
            push_len(input, "an offset", offset)?;
            push_bytes(input, "an extra", &extra.bytes)?;
        }
        Ok(self.keyed(input))
    }

    fn keyed(&self, input: &[u8]) -> ChunkHash {
        ChunkHash(*blake3::keyed_hash(&self.key, input).as_bytes())
    }
}

fn push_len(input: &mut Vec<u8>, what: &'static str, len: usize) -> Result<(), HashError> {
    let len = u32::try_from(len).map_err(|_| HashError::TooLong { what, actual: len })?;
    input.extend_from_slice(&len.to_le_bytes());
    Ok(())
}

fn push_bytes(input: &mut Vec<u8>, what: &'static str, bytes: &[u8]) -> Result<(), HashError> {
    push_len(input, what, bytes.len())?;
    input.extend_from_slice(bytes);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hasher(chunk_tokens: u32) -> ChunkHasher {
        let space = format!(
            r#"{{"model": "m", "revision": "1", "chunk_tokens": {chunk_tokens},
                "mha": {{"layers": 1, "heads": 1, "head_dim": 1}}}}"#
        );
        ChunkHasher::new(&Space::from_json(&space).unwrap(), None).unwrap()
    }

    /// The documented sentence, step by step.
    fn slow_chunk(
        hasher: &ChunkHasher,
        parent: &ChunkHash,
        tokens: &[u32],
        extras: &[(u32, &[u8])],
    ) -> ChunkHash {
        let mut slow = blake3::Hasher::new_keyed(&hasher.key);
        slow.update(&[1]).update(&parent.0);
        for token in tokens {
            slow.update(&token.to_le_bytes());
        }
        slow.update(&(extras.len() as u32).to_le_bytes());
        for (offset, bytes) in extras {
            slow.update(&offset.to_le_bytes())
                .update(&(bytes.len() as u32).to_le_bytes())
                .update(bytes);
        }
        ChunkHash(*slow.finalize().as_bytes())
    }

    prop_compose! {
        fn any_prompt()(
            chunk_tokens in 1_u32..40,
            tokens in prop::collection::vec(any::<u32>(), 1..200),
        )(
            extras in prop::collection::vec(
                (0..tokens.len() as u32, prop::collection::vec(any::<u8>(), 0..9)), 0..6),
            chunk_tokens in Just(chunk_tokens),
            tokens in Just(tokens),
        ) -> (u32, Vec<u32>, Vec<Extra>) {
            let extras = extras.into_iter().map(|(offset, bytes)| Extra { offset, bytes });
            (chunk_tokens, tokens, extras.collect())
        }
    }

    proptest! {
        #[test]
        fn a_chain_is_the_documented_one(
            (chunk_tokens, tokens, extras) in any_prompt(),
            salt in prop::collection::vec(any::<u8>(), 0..20),
        ) {
            let hasher = hasher(chunk_tokens);
            let root = hasher.root(&salt, b"").unwrap();
            let chain = hasher.chain(&root, &tokens, &extras).unwrap();
            prop_assert_eq!(chain.len(), tokens.len() / chunk_tokens as usize);
            let mut parent = root;
            for (i, tokens) in tokens.chunks_exact(chunk_tokens as usize).enumerate() {
                let start = i as u32 * chunk_tokens;
                let mut here: Vec<(u32, &[u8])> = extras
                    .iter()
                    .filter(|extra| (start..start + chunk_tokens).contains(&extra.offset))
                    .map(|extra| (extra.offset - start, extra.bytes.as_slice()))
                    .collect();
                here.sort_unstable();
                parent = slow_chunk(&hasher, &parent, tokens, &here);
                prop_assert_eq!(parent, chain[i]);
            }
        }

        #[test]
        fn a_changed_token_changes_its_chunk_and_all_after_it(
            (chunk_tokens, mut tokens, extras) in any_prompt(),
            at in any::<prop::sample::Index>(),
            flip in 1_u32..,
        ) {
            let hasher = hasher(chunk_tokens);
            let root = hasher.root(b"", b"").unwrap();
            let before = hasher.chain(&root, &tokens, &extras).unwrap();
            let at = at.index(tokens.len());
            tokens[at] ^= flip;
            let after = hasher.chain(&root, &tokens, &extras).unwrap();
            for (i, (before, after)) in before.iter().zip(&after).enumerate() {
                prop_assert_eq!(before == after, i < at / chunk_tokens as usize, "chunk {}", i);
            }
        }

        #[test]
        fn the_order_in_which_extras_come_does_not_matter((chunk_tokens, tokens, extras) in any_prompt()) {
            let hasher = hasher(chunk_tokens);
            let root = hasher.root(b"", b"").unwrap();
            let reversed: Vec<Extra> = extras.iter().rev().cloned().collect();
            prop_assert_eq!(hasher.chain(&root, &tokens, &extras), hasher.chain(&root, &tokens, &reversed));
        }
    }

    #[test]
    fn salt_adapter_and_secret_set_chains_apart() {
        let hasher = hasher(4);
        let roots = [
            (&b""[..], &b""[..]),
            (b"a", b""),
            (b"", b"a"),
            (b"ab", b""),
            (b"a", b"b"),
        ];
        let roots = roots.map(|(salt, adapter)| hasher.root(salt, adapter).unwrap());
        for (i, root) in roots.iter().enumerate() {
            assert!(!roots[..i].contains(root));
        }
        assert_eq!(
            hasher.chunk(&roots[0], &[1, 2, 3], &[]),
            Err(HashError::Tokens {
                expected: 4,
                actual: 3
            })
        );
        let beyond = [Extra {
            offset: 4,
            bytes: vec![],
        }];
        assert!(hasher.chunk(&roots[0], &[1, 2, 3, 4], &beyond).is_err());
        assert!(hasher.chain(&roots[0], &[1, 2, 3, 4], &beyond).is_err());
        assert!(
            TenantSecret::from_hex("short")
                .unwrap_err()
                .to_string()
                .contains("64 hex digits")
        );
    }
}
