//! A chunk from the disk: whole, and verified like one from S3. A file that does not verify is removed. Where S3
//! does not have the chunk, the file is the only copy: it is read a second time first, and then moved aside.

use super::ChunkFetch;
use crate::arena::SlotMut;
use crate::cache::gateway::chunk::LoadedChunk;
use crate::cache::gateway::tiers::Tiers;
use crate::cache::tier::{Disk, DiskError, Unsent};
use crate::format::{ChunkHash, Header, HeaderError, Keyring, Space};
use crate::metrics::trace;
use crate::protocol::Tier;

/// The reason why a file is not this chunk.
#[derive(Debug, thiserror::Error)]
pub enum Bad {
    #[error(transparent)]
    Header(#[from] HeaderError),
    #[error("the digest of plane {0} does not match")]
    Digest(usize),
}

/// The reason why the disk gave no chunk.
#[derive(Debug, thiserror::Error)]
enum Unread {
    #[error(transparent)]
    Disk(DiskError),
    #[error(transparent)]
    Bad(Bad),
}

impl ChunkFetch {
    /// Gives the slot back if the disk does not have the chunk, or has other bytes. A disk that hangs keeps the
    /// slot.
    pub async fn read_disk(&self, slot: SlotMut) -> Result<LoadedChunk, Option<SlotMut>> {
        let Some(disk) = self.tiers.disk() else {
            return Err(Some(slot));
        };
        let slot = read_verified(&self.tiers, disk, &self.space, &self.chunk, slot).await?;
        let chunk = LoadedChunk::whole(&self.space, self.chunk, slot.freeze(), Tier::Disk);
        self.keep(&chunk);
        Ok(chunk)
    }
}

/// Reads the whole object; else returns what is left of the slot, as above.
pub async fn read_verified(
    tiers: &Tiers,
    disk: &Disk,
    space: &Space,
    chunk: &ChunkHash,
    slot: SlotMut,
) -> Result<SlotMut, Option<SlotMut>> {
    let (key, warnings) = ((space.key(), *chunk), &tiers.disk_warnings);
    let (mut slot, unread) = match read_once(tiers, disk, space, chunk, slot).await {
        Ok(slot) => return Ok(slot),
        Err(unread) => unread,
    };
    if disk.unsent(&key) == Unsent::No {
        warnings.unreadable.tell(&format_args!("{chunk}: {unread}"));
        if unread.is_bad() {
            disk.remove(&key).await;
        }
        return Err(slot);
    }
    // A bit may have flipped on its way from the disk.
    if let Some(again) = slot.take() {
        let unread;
        (slot, unread) = match read_once(tiers, disk, space, chunk, again).await {
            Ok(slot) => return Ok(slot),
            Err(unread) => unread,
        };
        if unread.condemns() && disk.unsent(&key) == Unsent::Here && disk.set_aside(&key).await {
            tiers.behind.lost([key]);
            warnings.lost.tell(&format_args!("{}-{chunk}: {unread}", key.0));
        }
    }
    Err(slot)
}

async fn read_once(
    tiers: &Tiers,
    disk: &Disk,
    space: &Space,
    chunk: &ChunkHash,
    slot: SlotMut,
) -> Result<SlotMut, (Option<SlotMut>, Unread)> {
    let mut span = trace::begin("disk");
    let read = disk.read(space, chunk, slot).await;
    trace::mark(&mut span, "read");
    let slot = match read {
        (Some(slot), Ok(())) => slot,
        (slot, read) => return Err((slot, Unread::Disk(read.err().unwrap_or(DiskError::Absent)))),
    };
    let verified = verify(&tiers.bucket.options.keyring, space, chunk, &slot).await;
    trace::end(span, || chunk.to_string().chars().take(12).collect::<String>());
    match verified {
        Ok(()) => Ok(slot),
        Err(bad) => Err((Some(slot), Unread::Bad(bad))),
    }
}

impl Unread {
    /// Whether the file is not the chunk. One whose key is not here may well be.
    fn is_bad(&self) -> bool {
        match self {
            Self::Bad(Bad::Header(HeaderError::NoKey { .. })) | Self::Disk(_) => false,
            Self::Bad(_) => true,
        }
    }

    /// Whether the error says that the file is bad; else the fault is elsewhere.
    fn condemns(&self) -> bool {
        match self {
            Self::Bad(_) => self.is_bad(),
            Self::Disk(error) => error.condemns(),
        }
    }
}

pub async fn verify(keys: &Keyring, space: &Space, chunk: &ChunkHash, object: &[u8]) -> Result<(), Bad> {
    let header = Header::parse(object)?;
    let digest = header.expect(space, chunk, keys)?;
    let layout = space.layout();
    for plane in 0..layout.planes() {
        if digest.of(&object[layout.plane(plane)]) != header.digests[plane] {
            return Err(Bad::Digest(plane));
        }
        // Other tasks need the thread too.
        tokio::task::yield_now().await;
    }
    Ok(())
}
