//! A chunk from the disk: whole, and verified like one from S3. A file that does not verify is removed. Where S3
//! does not have the chunk, the file is the only copy: it is read a second time first, and then moved aside.

use super::ChunkFetch;
use super::decrypt::{decrypt, plain_header};
use crate::arena::SlotMut;
use crate::cache::gateway::chunk::LoadedChunk;
use crate::cache::gateway::tiers::Tiers;
use crate::cache::tier::{Disk, DiskError, Unsent};
use crate::format::{
    ChunkHash, Header, HeaderError, Keyring, PlaneCheck, PlaneDigest, Protection, Section, Space,
};
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

/// The disk does not have the chunk, or has other bytes.
pub struct NotRead {
    /// None: a disk that hangs keeps it.
    pub slot: Option<SlotMut>,
    /// The file is of a key that is not here.
    pub no_key: Option<HeaderError>,
}

impl ChunkFetch {
    pub async fn read_disk(&self, slot: SlotMut) -> Result<LoadedChunk, NotRead> {
        let Some(disk) = self.tiers.disk() else {
            let (slot, no_key) = (Some(slot), None);
            return Err(NotRead { slot, no_key });
        };
        let read = read_verified(&self.tiers, disk, &self.space, &self.chunk, slot).await;
        let slot = read.inspect_err(|not_read| {
            if not_read.no_key.is_some() {
                disk.pass_over(self.cache_key());
                // After it is there: one that comes before the change is taken back with the others.
                if self.tiers.bucket.options.keyring.changes() != self.key_changes {
                    disk.all_of_use();
                }
            }
        })?;
        let chunk = LoadedChunk::whole(&self.space, self.chunk, slot.freeze(), Tier::Disk);
        self.keep(&chunk, None);
        Ok(chunk)
    }
}

/// Reads the whole object.
pub async fn read_verified(
    tiers: &Tiers,
    disk: &Disk,
    space: &Space,
    chunk: &ChunkHash,
    slot: SlotMut,
) -> Result<SlotMut, NotRead> {
    let (key, warnings) = ((space.key(), *chunk), &tiers.disk_warnings);
    let (mut slot, unread) = match read_once(tiers, disk, space, chunk, slot).await {
        Ok(slot) => return Ok(slot),
        Err((slot, Unread::Bad(Bad::Header(error @ HeaderError::NoKey { .. })))) => {
            // The file may well be good.
            tiers.bucket.warnings.keyless.tell(&error);
            let no_key = Some(error);
            return Err(NotRead { slot, no_key });
        }
        Err(unread) => unread,
    };
    let not_read = |slot| NotRead { slot, no_key: None };
    if disk.unsent(&key) == Unsent::No {
        warnings.unreadable.tell(&format_args!("{chunk}: {unread}"));
        if unread.is_bad() {
            disk.remove(&key).await;
        }
        return Err(not_read(slot));
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
    Err(not_read(slot))
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
    let named = || ("chunk", chunk.to_string().chars().take(12).collect());
    let mut slot = match read {
        (Some(slot), Ok(())) => slot,
        (slot, read) => {
            let error = read.err().unwrap_or(DiskError::Absent);
            trace::end(span, || vec![named(), ("error", error.to_string())]);
            return Err((slot, Unread::Disk(error)));
        }
    };
    let verified = verify(tiers, space, chunk, &mut slot).await;
    trace::end(span, || match &verified {
        Ok(()) => vec![named()],
        Err(bad) => vec![named(), ("error", bad.to_string())],
    });
    match verified {
        Ok(()) => Ok(slot),
        Err(bad) => Err((Some(slot), Unread::Bad(bad))),
    }
}

impl Unread {
    /// Whether the file is not the chunk. One whose key is not here may well be, and one of another version of kvgate.
    fn is_bad(&self) -> bool {
        match self {
            Self::Bad(Bad::Header(HeaderError::NoKey { .. })) | Self::Disk(_) => false,
            Self::Bad(Bad::Header(error)) => !error.is_of_another_version(),
            Self::Bad(Bad::Digest(_)) => true,
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

/// Verifies a whole object as it was written, and decrypts it where it is encrypted.
async fn verify(tiers: &Tiers, space: &Space, chunk: &ChunkHash, object: &mut [u8]) -> Result<(), Bad> {
    let options = &tiers.bucket.options;
    let header = Header::parse(object)?;
    let cipher = match header.expect(space, chunk, &options.keyring)? {
        PlaneCheck::Digest(digest) => return check_planes(space, &header, &digest, object).await,
        PlaneCheck::Open(cipher) => cipher,
    };
    let (layout, plain) = (space.layout(), PlaneDigest::open(options.digest));
    let mut digests = Vec::with_capacity(layout.planes());
    for plane in 0..layout.planes() {
        let section = Section {
            bytes: layout.plane(plane),
            planes: plane..plane + 1,
        };
        let (bytes, of) = (&mut object[section.bytes.clone()], (&cipher, &header.digests[..]));
        digests.extend(decrypt(layout, &section, bytes, of, &plain).map_err(Bad::Digest)?);
        // Other tasks need the thread too.
        tokio::task::yield_now().await;
    }
    plain_header(&header, &plain, digests).write(object);
    Ok(())
}

/// Verifies a chunk in memory, which is never encrypted.
pub async fn verify_resident(
    keys: &Keyring,
    space: &Space,
    chunk: &ChunkHash,
    object: &[u8],
) -> Result<(), Bad> {
    let header = Header::parse(object)?;
    let digest = match space.protection() {
        Protection::Encrypted => PlaneDigest::open(header.digest_kind),
        _ => match header.expect(space, chunk, keys)? {
            PlaneCheck::Digest(digest) => digest,
            PlaneCheck::Open(_) => return Ok(()),
        },
    };
    check_planes(space, &header, &digest, object).await
}

async fn check_planes(
    space: &Space,
    header: &Header,
    digest: &PlaneDigest,
    object: &[u8],
) -> Result<(), Bad> {
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
