//! One chunk's sections: each a ranged GET into its part of the slot, and what the answers say of the chunk. The
//! order of the sections is decided in `whole.rs`, and for layer order in `load/layer_order.rs`.

mod decrypt;
mod digests;
mod from_below;
mod from_disk;
mod from_peer;
mod verify;
mod whole;

use std::ops::Range;
use std::sync::Arc;

use tokio::time::Instant;

use super::bucket::{Bucket, Turn, TurnPosition, Waiting};
use super::chunk::LoadedChunk;
use super::miss::Miss;
use super::tiers::Tiers;
use crate::arena::{Slot, SlotMut};
use crate::cache::existence::Known;
use crate::format::{ChunkHash, ChunkId, KeyId, PlaneDigest, Protection, Section, Space};
use crate::metrics::trace;
use crate::protocol::Tier;
use crate::s3::net::Landing;
use crate::s3::object::{ErrorKind, GetRange, ObjectError, Operation, Version};

use self::digests::Digests;
pub use self::from_disk::{NotRead, read_verified, verify_resident};
pub use self::verify::ObjectHead;
pub use self::whole::WholeFetch;

/// A chunk that is being fetched; shared by the tasks of its GETs.
pub struct ChunkFetch {
    tiers: Arc<Tiers>,
    space: Space,
    chunk: ChunkHash,
    key: String,
    deadline: Instant,
    /// Until a header is read, the best guess at how the object's planes are digested: as this gateway would. None: they
    /// are encrypted.
    guess: Option<PlaneDigest>,
    /// The time of what the answers say of the chunk's existence.
    asked: Instant,
    /// How often keys had changed when it began.
    key_changes: u64,
}

/// One section on its way: its part of the slot and of the object.
pub struct Part {
    slot: SlotMut,
    digests: Digests,
    /// Its position in the queue.
    place: TurnPosition,
    /// Whether it was read a second time already.
    again: bool,
    /// Digests of its decrypted planes, where they were encrypted.
    decrypted: Vec<[u8; 32]>,
}

impl Part {
    fn bytes(&self) -> Range<usize> {
        self.digests.section().bytes.clone()
    }
}

impl ChunkFetch {
    pub fn new(tiers: &Arc<Tiers>, space: &Space, chunk: &ChunkHash, deadline: Instant) -> Self {
        Self {
            tiers: Arc::clone(tiers),
            space: space.clone(),
            chunk: *chunk,
            key: tiers.bucket.object_key(&(space.key(), *chunk)),
            deadline,
            // Without a key nothing of the space is read.
            guess: match space.protection() {
                Protection::Encrypted => None,
                _ => tiers.bucket.options.writes(space).ok(),
            },
            asked: Instant::now(),
            key_changes: tiers.bucket.options.keyring.changes(),
        }
    }

    /// Cuts the slot at the sections' bounds. `place` gives each section's queue position by its number.
    pub fn cut(
        &self,
        slot: SlotMut,
        sections: &[Section],
        place: impl Fn(usize) -> TurnPosition,
    ) -> Vec<Part> {
        let mut slot = slot;
        let cut = |(i, section): (usize, &Section)| {
            let rest = slot.split_off(section.bytes.len());
            Part {
                slot: std::mem::replace(&mut slot, rest),
                digests: Digests::new(self.space.layout(), section.clone()),
                place: place(i),
                again: false,
                decrypted: Vec::new(),
            }
        };
        sections.iter().enumerate().map(cut).collect()
    }

    /// Queues for a section, now.
    pub fn wait(&self, part: &Part) -> Waiting {
        self.bucket().get_turns.wait(part.place, part.bytes().len())
    }

    /// Gets a section when its turn has come; the turn is over when it is dropped. `digest` is computed on the
    /// way.
    pub async fn get(
        &self,
        part: &mut Part,
        if_match: Option<&str>,
        digest: Option<&PlaneDigest>,
        waiting: Waiting,
    ) -> Result<(Version, Turn), ObjectError> {
        let mut span = trace::begin("GET");
        let turn = self
            .tiers
            .times
            .turn
            .of(tokio::time::timeout_at(self.deadline, waiting));
        let Ok(turn) = turn.await else {
            return Err(self.error(ErrorKind::Deadline, "waiting for its turn"));
        };
        trace::mark(&mut span, "turn");
        let get = GetRange {
            key: &self.key,
            range: part.bytes(),
            object_len: self.space.layout().object_len(),
            if_match,
        };
        let landing = Landing {
            // The part has no bytes until the store gives them back.
            slot: part.slot.split_off(0),
            watch: digest.map(|digest| part.digests.watch(digest)),
        };
        let landed = self.bucket().store.get(get, landing, self.deadline);
        let (landing, meta) = trace::within(span.as_ref(), landed).await;
        part.slot = landing.slot;
        trace::end(span, || {
            let bytes = part.bytes();
            let range = format!("{}-{}", bytes.start, bytes.end - 1);
            let mut about = vec![("chunk", self.named()), ("range", range)];
            about.extend(meta.as_ref().err().map(|error| ("error", error.to_string())));
            about
        });
        Ok((meta?.version, turn))
    }

    /// Neighbouring sections that were verified, to be handed out. Also their bytes with the header, if they have
    /// it.
    pub fn loaded(&self, parts: impl IntoIterator<Item = Part>) -> (LoadedChunk, Slot) {
        let joined = parts.into_iter().map(|part| {
            let planes = part.digests.section().planes.clone();
            (part.slot, planes)
        });
        let joined = joined.reduce(|(mut slot, planes), (rest, more)| {
            slot.join(rest);
            (slot, planes.start..more.end)
        });
        let (slot, planes) = joined.expect("a layout has sections");
        let (slot, layout) = (slot.freeze(), self.space.layout());
        if planes == (0..layout.planes()) {
            return (self.whole(slot.clone()), slot);
        }
        let header_len = match planes.start {
            0 => layout.header_len(),
            _ => 0,
        };
        let chunk = LoadedChunk {
            space: self.space.clone(),
            chunk: self.chunk,
            planes,
            payload: slot.slice(header_len..slot.len()),
            object: None,
            tier: Tier::S3,
            credit: None,
        };
        (chunk, slot)
    }

    /// The whole chunk, verified, from S3.
    pub fn whole(&self, object: Slot) -> LoadedChunk {
        LoadedChunk::whole(&self.space, self.chunk, object, Tier::S3)
    }

    /// Keeps a whole chunk in memory. `key`: the one that decrypted it.
    pub fn keep(&self, chunk: &LoadedChunk, key: Option<KeyId>) {
        self.tiers.keep(chunk, self.asked, self.key_changes, key);
    }

    /// Notes that the object is good, as far as it was read.
    pub fn present(&self, head: &ObjectHead) {
        let known = Known::Present(Arc::clone(&head.version.etag));
        self.bucket().cache.learn(self.cache_key(), known, self.asked);
    }

    /// The miss that a failed GET means for the chunk.
    pub fn missed(&self, error: ObjectError) -> Miss {
        let cache = &self.bucket().cache;
        match error.kind {
            ErrorKind::NotFound => {
                cache.is_gone(&self.cache_key());
                cache.learn(self.cache_key(), Known::Absent, self.asked);
                Miss::Absent
            }
            ErrorKind::Changed => {
                cache.forget(&self.cache_key());
                Miss::Replaced
            }
            // The next lookup's HEAD sees the length too, and the version to quarantine.
            ErrorKind::Length { .. } => {
                cache.forget(&self.cache_key());
                Miss::WrongLength(Arc::new(error))
            }
            _ => Miss::Unknown(Arc::new(error)),
        }
    }

    pub fn error(&self, kind: ErrorKind, detail: &str) -> ObjectError {
        ObjectError::new(Operation::Get, &self.key, kind, detail)
    }

    /// The beginning of its hash, for people.
    fn named(&self) -> String {
        self.chunk.to_string().chars().take(12).collect()
    }

    fn bucket(&self) -> &Bucket {
        &self.tiers.bucket
    }

    fn cache_key(&self) -> ChunkId {
        (self.space.key(), self.chunk)
    }

    pub fn guess(&self) -> Option<&PlaneDigest> {
        self.guess.as_ref()
    }

    /// The ETag of the version that a lookup saw.
    pub fn known_etag(&self) -> Option<Arc<str>> {
        match self.bucket().cache.get(&self.cache_key(), self.asked) {
            Some(Known::Present(etag)) => Some(etag),
            _ => None,
        }
    }
}
