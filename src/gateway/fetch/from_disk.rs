//! A chunk from the disk: whole, and verified like one from S3. What does not verify is removed there.

use super::Wanted;
use crate::arena::SlotMut;
use crate::chunk::{ChunkHash, Header, HeaderError, Space};
use crate::gateway::LoadedChunk;
use crate::gateway::tiers::Tiers;
use crate::tier::{Disk, Tier};

/// Why a file is not this chunk.
#[derive(Debug, thiserror::Error)]
enum Bad {
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("the digest of plane {0} does not match")]
    Digest(usize),
}

impl Wanted {
    /// Gives the slot back if the disk does not have the chunk, or has something else. One that hangs keeps it.
    pub async fn read_disk(&self, slot: SlotMut) -> Result<LoadedChunk, Option<SlotMut>> {
        let Some(disk) = self.gateway.0.tiers.as_ref().and_then(Tiers::disk) else {
            return Err(Some(slot));
        };
        let slot = read_verified(disk, &self.space, &self.chunk, slot).await?;
        let chunk = self.whole(slot.freeze(), Tier::Disk);
        self.keep(&chunk);
        Ok(chunk)
    }
}

/// The whole object; else what is left of the slot, as above.
pub(in crate::gateway) async fn read_verified(
    disk: &Disk,
    space: &Space,
    chunk: &ChunkHash,
    slot: SlotMut,
) -> Result<SlotMut, Option<SlotMut>> {
    let slot = match disk.read(space, chunk, slot).await {
        (Some(slot), Ok(())) => slot,
        (slot, read) => {
            if let Err(error) = read {
                tracing::warn!(%chunk, %error, "a chunk can't be read from the disk");
            }
            return Err(slot);
        }
    };
    if let Err(bad) = verify(space, chunk, &slot).await {
        tracing::warn!(%chunk, %bad, "a damaged file on the disk is removed");
        disk.remove(&(space.key(), *chunk)).await;
        return Err(Some(slot));
    }
    Ok(slot)
}

async fn verify(space: &Space, chunk: &ChunkHash, object: &SlotMut) -> Result<(), Bad> {
    let header = Header::parse(object)?;
    header.expect(space, chunk)?;
    let layout = space.layout();
    for plane in 0..layout.planes() {
        if header.digest_kind.of(&object[layout.plane(plane)]) != header.digests[plane] {
            return Err(Bad::Digest(plane));
        }
        // Others want the thread too.
        tokio::task::yield_now().await;
    }
    Ok(())
}
