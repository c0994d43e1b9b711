//! Checks of loaded bytes; nothing that fails them leaves the gateway: the header is this chunk's, and every plane
//! has the digest in the header. Bytes that don't match are read once more before an object counts as damaged.

use std::sync::Arc;

use super::{ChunkFetch, Part};
use crate::cache::existence::{Known, Useless};
use crate::cache::gateway::miss::Miss;
use crate::format::{Header, HeaderError, PlaneCheck, PlaneDigest};
use crate::metrics::trace;
use crate::s3::object::Version;

/// The facts that the first section tells of the whole object.
#[derive(Clone)]
pub struct ObjectHead {
    pub header: Arc<Header>,
    /// How its planes are checked.
    pub check: PlaneCheck,
    pub version: Version,
}

impl ChunkFetch {
    /// Checks the header, at the front of the first section.
    pub async fn head(&self, part: &mut Part, mut version: Version) -> Result<ObjectHead, Miss> {
        let cache = &self.bucket().cache;
        if cache.useless(&self.cache_key()) == Some((version.clone(), Useless::Damaged)) {
            cache.learn(self.cache_key(), Known::Absent, self.asked);
            return Err(Miss::Quarantined);
        }
        let mut header = self.header(part);
        if matches!(header, Err(Miss::BadHeader(_)))
            && let Some(same) = self.again(part, &version, self.guess()).await?
        {
            (header, version) = (self.header(part), same);
        }
        match header {
            Ok((header, check)) => Ok(ObjectHead {
                header: Arc::new(header),
                check,
                version,
            }),
            Err(Miss::NoKey(error)) => {
                self.bucket().warnings.keyless.tell(&error);
                self.leave(version, &error);
                Err(Miss::NoKey(error))
            }
            Err(Miss::Unreadable(error)) => {
                self.leave(version, &error);
                Err(Miss::Unreadable(error))
            }
            Err(miss) => Err(self.damaged(miss, version)),
        }
    }

    fn header(&self, part: &Part) -> Result<(Header, PlaneCheck), Miss> {
        let header = Header::parse(&part.slot).map_err(|error| match error.is_of_another_version() {
            true => Miss::Unreadable(error),
            false => Miss::BadHeader(error),
        })?;
        match header.expect(&self.space, &self.chunk, &self.bucket().options.keyring) {
            Ok(check) => Ok((header, check)),
            Err(error @ (HeaderError::OtherSpace(_) | HeaderError::OtherChunk(_))) => {
                Err(Miss::Foreign(error))
            }
            Err(error @ (HeaderError::Protection { .. } | HeaderError::Forged(_))) => {
                Err(Miss::Forged(error))
            }
            Err(error @ HeaderError::NoKey { .. }) => Err(Miss::NoKey(error)),
            Err(error) => Err(Miss::BadHeader(error)),
        }
    }

    /// Checks the planes of a section, and decrypts them where they are encrypted.
    pub async fn check(&self, part: &mut Part, head: &ObjectHead) -> Result<(), Miss> {
        let mut version = head.version.clone();
        let span = trace::begin("verify");
        let mut plane = self.bad_plane(part, head).await?;
        trace::end(span, || vec![("chunk", self.named())]);
        if plane.is_some()
            && let Some(same) = self.again(part, &version, head.check.digest()).await?
        {
            (plane, version) = (self.bad_plane(part, head).await?, same);
            // The header came a second time too, and nobody has checked that one.
            if part.bytes().start == 0 {
                head.header.write(&mut part.slot);
            }
        }
        match plane {
            None => Ok(()),
            Some(plane) => Err(self.damaged(Miss::BadDigest { plane }, version)),
        }
    }

    async fn bad_plane(&self, part: &mut Part, head: &ObjectHead) -> Result<Option<usize>, Miss> {
        match &head.check {
            PlaneCheck::Digest(digest) => {
                let Part { digests, slot, .. } = part;
                Ok(digests.bad_plane(slot, digest, &head.header.digests))
            }
            PlaneCheck::Open(cipher) => self.decrypt(part, cipher, &head.header).await,
        }
    }

    /// Reads a section whose bytes don't match once more: they may have been damaged on the way, which TCP's
    /// checksum does not always see, and the object is good. None if that was done already. An object that can't be
    /// read again does not count as damaged after one reading: its state is unknown.
    async fn again(
        &self,
        part: &mut Part,
        version: &Version,
        digest: Option<&PlaneDigest>,
    ) -> Result<Option<Version>, Miss> {
        if std::mem::replace(&mut part.again, true) {
            return Ok(None);
        }
        let range = part.bytes();
        let warnings = &self.bucket().warnings;
        warnings
            .read_again
            .tell(&format_args!("bytes {range:?} of {}", self.key));
        let waiting = self.wait(part);
        let got = self.get(part, Some(&version.etag), digest, waiting).await;
        got.map(|(version, _turn)| Some(version))
            .map_err(|error| self.missed(error))
    }

    fn damaged(&self, miss: Miss, version: Version) -> Miss {
        let damaged = format_args!("{} with ETag {}: {miss}", self.key, version.etag);
        self.bucket().warnings.damaged.tell(&damaged);
        let cache = &self.bucket().cache;
        cache.pass_over(self.cache_key(), version, Useless::Damaged, self.asked);
        miss
    }

    /// Lookups pass the version over, and stores leave it as it is.
    fn leave(&self, version: Version, why: &HeaderError) {
        let cache = &self.bucket().cache;
        cache.pass_over(self.cache_key(), version, Useless::Left(why.clone()), self.asked);
        // After it is there: one that comes before the change is taken back with the others.
        if self.bucket().options.keyring.changes() != self.key_changes {
            cache.keys_changed();
        }
    }
}
