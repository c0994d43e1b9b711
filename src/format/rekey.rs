//! An object of an older key of its tenant, made anew with the key that writes now. All of it is verified under the older
//! key before anything is signed: nothing that a forger wrote gets a good signature this way.

use super::hash::ChunkHash;
use super::header::{Header, HeaderError};
use super::keyring::{KeyError, KeyId, Keyring, PlaneCheck};
use super::space::Space;

/// What a key is to this node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum KeyState {
    /// It writes.
    Newest,
    /// It is read.
    Old,
    /// It is not here.
    Missing,
}

impl KeyState {
    /// A stable word.
    pub fn word(self) -> &'static str {
        match self {
            Self::Newest => "newest",
            Self::Old => "old",
            Self::Missing => "missing",
        }
    }
}

/// Why an object is not made anew.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NotRekeyed {
    #[error("it is of the key that writes now")]
    Newest,
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("the digest of plane {0} does not match")]
    Digest(usize),
    #[error(transparent)]
    Key(#[from] KeyError),
}

impl Keyring {
    /// What the key is that an object of a protected space names.
    pub fn state(&self, space: &Space, key: KeyId) -> KeyState {
        match self.has_key(space, key) {
            true if self.is_newest(space, Some(key)) => KeyState::Newest,
            true => KeyState::Old,
            false => KeyState::Missing,
        }
    }

    /// Makes a whole object anew in place, as the newest key writes it. After an error its bytes are of no use.
    pub fn rekey(&self, space: &Space, chunk: &ChunkHash, object: &mut [u8]) -> Result<(), NotRekeyed> {
        let layout = space.layout();
        if object.len() != layout.object_len() {
            let (needed, actual) = (layout.object_len(), object.len());
            return Err(HeaderError::Short { needed, actual }.into());
        }
        let header = Header::parse(object)?;
        let written = header.expect(space, chunk, self)?;
        if self.is_newest(space, header.seal.as_ref().map(|seal| seal.key_id)) {
            return Err(NotRekeyed::Newest);
        }
        for (plane, digest) in header.digests.iter().enumerate() {
            let bytes = &mut object[layout.plane(plane)];
            let is_good = match &written {
                PlaneCheck::Digest(of) => of.of(bytes) == *digest,
                PlaneCheck::Open(cipher) => cipher.open(plane, bytes, digest),
            };
            if !is_good {
                return Err(NotRekeyed::Digest(plane));
            }
        }
        // From here on it is the tenant's own KV.
        self.write(space, header, object)?;
        Ok(())
    }

    /// Digests the planes of an object with the newest key, or encrypts them, and writes its header.
    fn write(&self, space: &Space, header: Header, object: &mut [u8]) -> Result<(), KeyError> {
        let layout = space.layout();
        let header = if let Some(cipher) = self.encrypts(space, &header.chunk, None)? {
            let seal = |plane| cipher.seal(plane, &mut object[layout.plane(plane)]);
            let digests = (0..layout.planes()).map(seal).collect();
            cipher.sealed(Header { digests, ..header })
        } else {
            let digest = self.writes(space, header.digest_kind)?;
            let of = |plane| digest.of(&object[layout.plane(plane)]);
            let digests = (0..layout.planes()).map(of).collect();
            digest.seal(Header { digests, ..header })
        };
        header.write(object);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{DigestKind, Protection, TenantKeys, TenantSecret};

    fn ring(keys: &[u8]) -> Keyring {
        let acme = TenantKeys {
            keys: keys.iter().map(|&key| TenantSecret::new([key; 32])).collect(),
            ..TenantKeys::default()
        };
        Keyring::new([("acme".to_owned(), acme)].into())
    }

    fn space(protection: Protection) -> Space {
        Space::from_json(&format!(
            r#"{{"model": "m", "revision": "1", "dtype": "float16", "chunk_tokens": 16, "tenant": "acme",
                "protection": "{protection}", "mha": {{"layers": 3, "heads": 2, "head_dim": 16}}}}"#
        ))
        .unwrap()
    }

    const CHUNK: ChunkHash = ChunkHash([7; 32]);

    /// A chunk with known KV, as the ring's first key writes it.
    fn object(space: &Space, keys: &Keyring) -> Vec<u8> {
        let layout = space.layout();
        let mut object: Vec<u8> = (0..layout.object_len()).map(|i| (i * 31 % 251) as u8).collect();
        let header = Header {
            space_id: space.id(),
            chunk: CHUNK,
            parent: ChunkHash([8; 32]),
            tokens: 16,
            payload_len: layout.payload_len() as u64,
            kind: space.kind(),
            is_draft: false,
            digest_kind: match space.protection() {
                Protection::Encrypted => DigestKind::Aes256Gcm,
                _ => DigestKind::KeyedBlake3,
            },
            digests: Vec::new(),
            seal: None,
        };
        keys.write(space, header, &mut object).unwrap();
        object
    }

    /// The KV of an object, as a reader with these keys gets it.
    fn plain(space: &Space, keys: &Keyring, object: &[u8]) -> Result<Vec<u8>, HeaderError> {
        let (header, layout) = (Header::parse(object)?, space.layout());
        let check = header.expect(space, &CHUNK, keys)?;
        let mut plain = object.to_vec();
        for (plane, digest) in header.digests.iter().enumerate() {
            let bytes = &mut plain[layout.plane(plane)];
            assert!(match &check {
                PlaneCheck::Digest(of) => of.of(bytes) == *digest,
                PlaneCheck::Open(cipher) => cipher.open(plane, bytes, digest),
            });
        }
        Ok(plain.split_off(layout.header_len()))
    }

    #[test]
    fn the_new_key_alone_reads_the_same_kv() {
        for protection in [Protection::Signed, Protection::Encrypted] {
            let space = space(protection);
            let mut object = object(&space, &ring(&[1]));
            let before = (
                Header::parse(&object).unwrap(),
                plain(&space, &ring(&[1]), &object),
            );
            assert!(plain(&space, &ring(&[2]), &object).is_err());
            ring(&[2, 1]).rekey(&space, &CHUNK, &mut object).unwrap();
            assert_eq!(plain(&space, &ring(&[2]), &object), before.1, "{protection}");
            assert!(plain(&space, &ring(&[1]), &object).is_err());
            let after = Header::parse(&object).unwrap();
            assert_eq!(
                after.seal.as_ref().unwrap().key_id,
                KeyId::of(&TenantSecret::new([2; 32]))
            );
            let same = |header: Header| Header {
                seal: None,
                digests: Vec::new(),
                ..header
            };
            assert_eq!(same(after), same(before.0));
            let again = ring(&[2, 1]).rekey(&space, &CHUNK, &mut object);
            assert_eq!(again, Err(NotRekeyed::Newest));
        }
    }

    /// Any byte that differs, and any digest made without the key, leaves it unsigned.
    #[test]
    fn nothing_forged_is_signed() {
        for protection in [Protection::Signed, Protection::Encrypted] {
            let space = space(protection);
            let layout = space.layout();
            let good = object(&space, &ring(&[1]));
            let refused = |mut object: Vec<u8>| ring(&[2, 1]).rekey(&space, &CHUNK, &mut object).unwrap_err();
            for plane in 0..layout.planes() {
                let mut forged = good.clone();
                forged[layout.plane(plane).end - 1] ^= 1;
                assert_eq!(refused(forged.clone()), NotRekeyed::Digest(plane), "{protection}");
                let mut header = Header::parse(&forged).unwrap();
                let width = header.digest_kind.width();
                let digest = *blake3::hash(&forged[layout.plane(plane)]).as_bytes();
                header.digests[plane][..width].copy_from_slice(&digest[..width]);
                header.write(&mut forged);
                let old = KeyId::of(&TenantSecret::new([1; 32]));
                assert_eq!(refused(forged), NotRekeyed::Header(HeaderError::Forged(old)));
            }
            assert!(matches!(
                refused(good[..good.len() - 1].to_vec()),
                NotRekeyed::Header(_)
            ));
            let elsewhere = ring(&[2, 1]).rekey(&space, &ChunkHash([9; 32]), &mut good.clone());
            assert!(matches!(
                elsewhere,
                Err(NotRekeyed::Header(HeaderError::OtherChunk(_)))
            ));
            let keyless = ring(&[2]).rekey(&space, &CHUNK, &mut good.clone());
            assert!(matches!(
                keyless,
                Err(NotRekeyed::Header(HeaderError::NoKey { .. }))
            ));
        }
    }
}
