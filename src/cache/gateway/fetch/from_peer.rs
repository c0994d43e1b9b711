//! A chunk from another node's memory: whole, and verified like one from S3. Whatever is wrong with it is the peer's fault
//! and says nothing of the object on S3.

use tokio::time::Instant;

use super::from_disk::Bad;
use super::{ChunkFetch, Part};
use crate::arena::SlotMut;
use crate::cache::gateway::bucket::TurnPosition;
use crate::cache::gateway::chunk::LoadedChunk;
use crate::cache::peers::{Asked, Asking};
use crate::format::{Header, HeaderError, PlaneCheck};
use crate::metrics::trace;
use crate::protocol::Tier;
use crate::s3::net::Landing;

impl ChunkFetch {
    /// The slot comes back where the chunk did not, with the peer that may be asked next.
    pub(super) async fn read_peer(
        &self,
        mut peer: Asking,
        slot: SlotMut,
        place: TurnPosition,
        until: Instant,
    ) -> Result<LoadedChunk, (SlotMut, Option<Asking>)> {
        let whole = self.space.layout().sections(usize::MAX);
        let mut parts = self.cut(slot, &whole, |_| place);
        let mut part = parts.pop().expect("a layout has sections");
        let waiting = self.bucket().peer_turns.wait(place, part.bytes().len());
        let Ok(_turn) = tokio::time::timeout_at(until, waiting).await else {
            return Err((part.slot, None));
        };
        let span = trace::begin("peer");
        let landing = Landing {
            slot: part.slot.split_off(0),
            watch: self.guess().map(|digest| part.digests.watch(digest)),
        };
        let (landing, asked) = peer.get(landing, until).await;
        part.slot = landing.slot;
        trace::end(span, || {
            let (peer, asked) = (peer.address().to_string(), asked.word().to_owned());
            vec![("chunk", self.named()), ("peer", peer), ("answer", asked)]
        });
        match asked {
            Asked::Landed => {}
            Asked::Slow | Asked::Failed if Instant::now() < until => return Err((part.slot, peer.next())),
            Asked::UseS3 => return Err((part.slot, peer.holder())),
            _ => return Err((part.slot, None)),
        }
        let verified = self.verify_peer(&part);
        let verdict = match &verified {
            Ok(()) => Asked::Landed,
            // It may well be good: of a key, or of a version, that is not here.
            Err(Bad::Header(HeaderError::NoKey { .. })) => Asked::UseS3,
            Err(Bad::Header(error)) if error.is_of_another_version() => Asked::UseS3,
            Err(bad) => {
                let told = format_args!("{} from {}: {bad}", self.named(), peer.address());
                self.bucket().warnings.peer.tell(&told);
                Asked::Wrong
            }
        };
        peer.settle(verdict, part.slot.len());
        if verified.is_err() {
            return Err((part.slot, None));
        }
        let chunk = LoadedChunk::whole(&self.space, self.chunk, part.slot.freeze(), Tier::Peer);
        self.keep(&chunk, None);
        Ok(chunk)
    }

    fn verify_peer(&self, part: &Part) -> Result<(), Bad> {
        let header = Header::parse(&part.slot)?;
        let bad = match header.expect(&self.space, &self.chunk, &self.bucket().options.keyring)? {
            PlaneCheck::Digest(digest) => part.digests.bad_plane(&part.slot, &digest, &header.digests),
            // Of an encrypted space: no peer is asked for those.
            PlaneCheck::Open(_) => Some(0),
        };
        bad.map_or(Ok(()), |plane| Err(Bad::Digest(plane)))
    }
}
