//! Encrypted planes become plain ones in their slot, before anything else sees it. In memory a chunk of an encrypted
//! space is as any other: its header has ordinary digests of what was decrypted.

use std::sync::Arc;

use super::{ChunkFetch, Part};
use crate::cache::gateway::miss::Miss;
use crate::format::{Header, Layout, PlaneCipher, PlaneDigest, Section};
use crate::s3::object::ErrorKind;

/// Decrypts the planes of a section; returns their digests, or the first plane that is not what was encrypted.
pub fn decrypt(
    layout: &Layout,
    section: &Section,
    bytes: &mut [u8],
    (cipher, tags): (&PlaneCipher, &[[u8; 32]]),
    plain: &PlaneDigest,
) -> Result<Vec<[u8; 32]>, usize> {
    let start = section.bytes.start;
    let planes = section.planes.clone().map(|plane| {
        let of_plane = layout.plane(plane);
        let bytes = &mut bytes[of_plane.start - start..of_plane.end - start];
        match cipher.open(plane, bytes, &tags[plane]) {
            true => Ok(plain.of(bytes)),
            false => Err(plane),
        }
    });
    planes.collect()
}

/// The header of the decrypted chunk.
pub fn plain_header(header: &Header, plain: &PlaneDigest, digests: Vec<[u8; 32]>) -> Header {
    Header {
        digest_kind: plain.kind(),
        digests,
        seal: None,
        ..header.clone()
    }
}

impl ChunkFetch {
    /// Decrypts a section, off the runtime; returns the first plane that is not what was encrypted.
    pub(super) async fn decrypt(
        &self,
        part: &mut Part,
        cipher: &PlaneCipher,
        header: &Arc<Header>,
    ) -> Result<Option<usize>, Miss> {
        let (space, section) = (self.space.clone(), part.digests.section().clone());
        let (cipher, header, plain) = (cipher.clone(), Arc::clone(header), self.plain());
        // The part has no bytes until they come back.
        let mut slot = part.slot.split_off(0);
        let work = tokio::task::spawn_blocking(move || {
            let of = (&cipher, &header.digests[..]);
            let decrypted = decrypt(space.layout(), &section, &mut slot, of, &plain);
            (slot, decrypted)
        });
        let (slot, decrypted) = work.await.map_err(|_| {
            let error = self.error(ErrorKind::Broken, "its decryption ended early");
            Miss::Unknown(Arc::new(error))
        })?;
        part.slot = slot;
        Ok(match decrypted {
            Ok(digests) => {
                part.decrypted = digests;
                None
            }
            Err(plane) => Some(plane),
        })
    }

    /// Writes the header of the decrypted chunk in place of the encrypted one's.
    pub(super) fn write_plain_header(&self, parts: &mut [Part], header: &Header) {
        let digests = parts
            .iter()
            .flat_map(|part| part.decrypted.iter().copied())
            .collect();
        plain_header(header, &self.plain(), digests).write(&mut parts[0].slot);
    }

    /// The digest of decrypted planes.
    fn plain(&self) -> PlaneDigest {
        PlaneDigest::open(self.bucket().options.digest)
    }
}
