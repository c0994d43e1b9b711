//! Chunks as they leave the node for disks and S3. Those of encrypted spaces are encrypted into a buffer: engines read
//! the slot meanwhile. The buffers are at most `[store] in_flight` bytes together, and are there once they are needed.

use std::sync::Arc;

use super::Bucket;
use crate::arena::{Arena, ArenaOptions, SLOT_ALIGN, Slot};
use crate::format::{ChunkHash, DigestKind, Header, HeaderError, KeyId, PlaneCipher, Protection, Space};
use crate::s3::object::{ErrorKind, ObjectError, Operation};

impl Bucket {
    /// Whether chunks of a space may leave the node, and can.
    pub fn may_leave(&self, space: &Space) -> Result<(), String> {
        let keyring = &self.options.keyring;
        keyring.check(space).map_err(|error| error.to_string())?;
        let (most, object_bytes) = (self.options.put_bytes_max, space.layout().object_len());
        if space.protection() == Protection::Encrypted && object_bytes > most {
            return Err(format!(
                "an object has {object_bytes} bytes, and [store] in_flight is {most}: raise that to encrypt it"
            ));
        }
        Ok(())
    }

    /// The object of a chunk in memory: itself, or encrypted. Waits for a buffer.
    pub async fn outgoing(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        object: &Slot,
    ) -> Result<Slot, Arc<ObjectError>> {
        self.outgoing_of(space, chunk, object, None).await
    }

    /// The same of a chunk that was read with that key: with a newer one it would seem to be the newer one's.
    pub async fn outgoing_of(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        object: &Slot,
        key: Option<KeyId>,
    ) -> Result<Slot, Arc<ObjectError>> {
        let broken = |why: String| {
            let key = self.object_key(&(space.key(), *chunk));
            Arc::new(ObjectError::new(Operation::Put, &key, ErrorKind::Broken, why))
        };
        let cipher = self.options.keyring.encrypts(space, chunk, key);
        let Some(cipher) = cipher.map_err(|error| broken(error.to_string()))? else {
            return Ok(object.clone());
        };
        self.may_leave(space).map_err(broken)?;
        let buffers = self.buffers().map_err(broken)?;
        let mut buffer = buffers.ticket().await.reserve(object.len()).await;
        let (space, plain) = (space.clone(), object.clone());
        let work = tokio::task::spawn_blocking(move || {
            let encrypted = encrypt(&cipher, &space, &plain, &mut buffer);
            encrypted.map(|()| buffer.freeze())
        });
        match work.await {
            Ok(encrypted) => encrypted.map_err(|error| broken(error.to_string())),
            Err(_) => Err(broken("its encryption ended early".to_owned())),
        }
    }

    fn buffers(&self) -> Result<Arena, String> {
        let most = self.options.put_bytes_max;
        let mut buffers = self
            .buffers
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if let Some(buffers) = &*buffers {
            return Ok(buffers.clone());
        }
        let made = Arena::new(&ArenaOptions {
            size: most.next_multiple_of(SLOT_ALIGN),
            ..ArenaOptions::default()
        });
        let made = made.map_err(|error| error.to_string())?;
        Ok(buffers.insert(made).clone())
    }
}

fn encrypt(cipher: &PlaneCipher, space: &Space, plain: &[u8], out: &mut [u8]) -> Result<(), HeaderError> {
    let (header, layout) = (Header::parse(plain)?, space.layout());
    let planes = (0..layout.planes()).map(|plane| {
        let bytes = layout.plane(plane);
        out[bytes.clone()].copy_from_slice(&plain[bytes.clone()]);
        cipher.seal(plane, &mut out[bytes])
    });
    let encrypted = Header {
        digests: planes.collect(),
        digest_kind: DigestKind::Aes256Gcm,
        ..header
    };
    cipher.sealed(encrypted).write(out);
    Ok(())
}
