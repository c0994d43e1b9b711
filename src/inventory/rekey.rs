//! Which keys wrote the chunks of protected spaces, and chunks of older keys made anew with the key that writes now. So a
//! key can be taken away, and no KV is lost with it.
//!
//! 1. List the bucket. Of each chunk the first [`KEY_LEN`] bytes are read: they name its key.
//! 2. A chunk of an older key of its tenant is read whole, verified under that key, and made anew in memory
//!    ([`Keyring::rekey`]). What does not verify is left as it is, never signed.
//! 3. It is put back only over the version that was read (`If-Match`). So what another writer puts there meanwhile stays, and
//!    a server that ignores the condition is refused. Wherever a run ends, each chunk is whole: of the old key, or of the new.
//!
//! A later run goes on by itself, since chunks that are done have the new key. Nodes may store with the old one until all of
//! them have taken the new one over, so runs are repeated until none finds anything.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, pin_mut, stream};
use tokio::time::Instant;

use super::{Count, Inventory, Select, SpaceJson, StoredChunk};
use crate::arena::{Arena, ArenaError, ArenaOptions, SLOT_ALIGN, SlotMut};
use crate::format::{
    ChunkHash, Crc64, HeaderError, KEY_LEN, KeyId, KeyState, Keyring, NotRekeyed, Space, SpaceKey, key_of,
};
use crate::protocol::ProbeMode;
use crate::s3::net::Landing;
use crate::s3::object::{Capabilities, Condition, ErrorKind, GetRange, ObjectError, PutExtras};

/// Requests at a time for the first bytes of chunks.
const READS: usize = 64;
/// Chunks at a time that are made anew, if there is room for them.
const REWRITES: usize = 8;

#[derive(Debug, Clone)]
pub struct RekeySpec {
    pub select: Select,
    /// Bytes of chunks to make anew a second, at most. None: nothing is made anew.
    pub rate: Option<u64>,
    /// Bytes of chunks in memory. A larger chunk is alone there.
    pub buffers: usize,
}

/// What was found, and what became of it.
#[derive(Debug, Clone, Default)]
pub struct Rekeyed {
    /// By tenant and key, as the chunks' headers say. That is not verified.
    pub keys: BTreeMap<(String, KeyId), (KeyState, Count)>,
    /// Objects that name no key, so they are no chunks of their space, and those that were removed meanwhile.
    pub keyless: Count,
    /// Chunks of spaces whose readable form is missing or of no use.
    pub unnamed: Count,
    pub rewritten: Count,
    /// Chunks of an old key that do not verify. They are as they were.
    pub refused: Count,
    /// Chunks that others replaced or removed meanwhile.
    pub changed: Count,
    /// Chunks that could not be read or written, and the last reason.
    pub failed: Count,
    pub failure: String,
}

/// Why no chunk is made anew.
#[derive(Debug, thiserror::Error)]
pub enum RekeyError {
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error("no memory for chunks: {0}")]
    Memory(#[from] ArenaError),
    #[error(
        "this S3 server ignores conditional PUTs (If-Match), so what another writer stores meanwhile could be lost: no chunk is \
         written anew. `kvgate gc --key-id` removes what a key wrote"
    )]
    Unconditional,
    #[error(
        "no space in the bucket has all that was selected; `kvgate usage` shows models, revisions and tenants"
    )]
    NothingSelected,
}

/// The end of one chunk.
enum Outcome {
    Rewritten,
    Refused,
    Changed,
    Failed(String),
}

/// How chunks are made anew.
struct Rewriter {
    inventory: Inventory,
    rate: u64,
    buffers: usize,
    /// The server compares checksums.
    checksum: bool,
    /// When the rate allows the next chunk.
    next: Mutex<Instant>,
}

impl Inventory {
    /// Counts the chunks of protected spaces by their keys, and makes those of old keys anew if there is a rate. Calls `step`
    /// after each page of the listing, and after each chunk that was made anew.
    pub async fn rekey(
        &self,
        spec: &RekeySpec,
        mut step: impl FnMut(&Rekeyed),
    ) -> Result<Rekeyed, RekeyError> {
        let rewriter = match spec.rate {
            Some(rate) => Some(Rewriter::new(self, rate, spec.buffers).await?),
            None => None,
        };
        let wanted = self.model_of(&spec.select).await?;
        let (mut rekeyed, mut is_selected) = (Rekeyed::default(), spec.select.is_all());
        let mut last = None;
        let pages = self.pages(None);
        pin_mut!(pages);
        while let Some(page) = pages.try_next().await? {
            // Keys come space by space.
            for chunks in page.chunks.chunk_by(|one, next| one.space == next.space) {
                let key = chunks[0].space;
                let json = match last.take() {
                    Some((space, json)) if space == key => json,
                    _ => self.read_space(key).await?,
                };
                if let SpaceJson::Good(space) = &json {
                    let takes = spec.select.takes(key, Some(space), wanted);
                    is_selected |= takes;
                    if takes && !space.protection().is_none() {
                        let old = self.count_by_key(space, chunks, &mut rekeyed).await;
                        if let Some(rewriter) = &rewriter {
                            rewriter.rewrite(space, &old, &mut rekeyed, &mut step).await?;
                        }
                    }
                } else {
                    chunks
                        .iter()
                        .for_each(|chunk| rekeyed.unnamed.add(1, chunk.bytes));
                }
                last = Some((key, json));
            }
            step(&rekeyed);
        }
        match is_selected {
            true => Ok(rekeyed),
            false => Err(RekeyError::NothingSelected),
        }
    }

    /// The key that a chunk's header names, which is not verified. None: no key, no chunk, or it is gone.
    pub(super) async fn named_key(
        &self,
        space: SpaceKey,
        chunk: &ChunkHash,
    ) -> Result<Option<KeyId>, ObjectError> {
        let key = self.keys.chunk(space, chunk);
        match self.store.read_front(&key, KEY_LEN, self.deadline()).await {
            Ok(front) => Ok(key_of(&front)),
            Err(error) if matches!(error.kind, ErrorKind::NotFound | ErrorKind::Length { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the chunks of old keys.
    async fn count_by_key<'a>(
        &self,
        space: &Space,
        chunks: &'a [StoredChunk],
        rekeyed: &mut Rekeyed,
    ) -> Vec<&'a StoredChunk> {
        let read =
            |chunk: &'a StoredChunk| async move { (chunk, self.named_key(chunk.space, &chunk.hash).await) };
        let named = stream::iter(chunks).map(read).buffered(READS);
        pin_mut!(named);
        let mut old = Vec::new();
        while let Some((chunk, key)) = named.next().await {
            let key = match key {
                Ok(Some(key)) => key,
                Ok(None) => {
                    rekeyed.keyless.add(1, chunk.bytes);
                    continue;
                }
                Err(error) => {
                    rekeyed.add(chunk.bytes, Outcome::Failed(error.to_string()));
                    continue;
                }
            };
            let state = self.keyring.state(space, key);
            let of_key = rekeyed.keys.entry((space.tenant().to_owned(), key));
            of_key.or_insert((state, Count::default())).1.add(1, chunk.bytes);
            if state == KeyState::Old {
                old.push(chunk);
            }
        }
        old
    }
}

impl Rekeyed {
    fn add(&mut self, bytes: u64, outcome: Outcome) {
        let count = match outcome {
            Outcome::Rewritten => &mut self.rewritten,
            Outcome::Refused => &mut self.refused,
            Outcome::Changed => &mut self.changed,
            Outcome::Failed(reason) => {
                self.failure = reason;
                &mut self.failed
            }
        };
        count.add(1, bytes);
    }

    /// All chunks whose key is this to the node.
    pub fn of(&self, state: KeyState) -> Count {
        let mut sum = Count::default();
        let counts = self.keys.values().filter(|of| of.0 == state);
        counts.for_each(|(_, count)| sum.add(count.chunks, count.bytes));
        sum
    }
}

impl Rewriter {
    async fn new(inventory: &Inventory, rate: u64, buffers: usize) -> Result<Self, RekeyError> {
        let probe = inventory.keys.own(&format!("probe-{:016x}", fastrand::u64(..)));
        let deadline = inventory.deadline();
        let capabilities = Capabilities::probe(&*inventory.store, &probe, ProbeMode::Head, deadline).await?;
        if !capabilities.if_match {
            return Err(RekeyError::Unconditional);
        }
        Ok(Self {
            inventory: inventory.clone(),
            rate: rate.max(1),
            buffers,
            checksum: capabilities.checksum,
            next: Mutex::new(Instant::now()),
        })
    }

    async fn rewrite(
        &self,
        space: &Space,
        chunks: &[&StoredChunk],
        rekeyed: &mut Rekeyed,
        step: &mut impl FnMut(&Rekeyed),
    ) -> Result<(), RekeyError> {
        if chunks.is_empty() {
            return Ok(());
        }
        let arena = Arena::new(&ArenaOptions {
            size: self
                .buffers
                .max(space.layout().object_len())
                .next_multiple_of(SLOT_ALIGN),
            ..ArenaOptions::default()
        })?;
        let one = |chunk: &StoredChunk| {
            let (chunk, arena) = (chunk.clone(), arena.clone());
            async move { (chunk.bytes, self.one(space, &chunk, &arena).await) }
        };
        let outcomes = stream::iter(chunks)
            .map(|chunk| one(chunk))
            .buffer_unordered(REWRITES);
        pin_mut!(outcomes);
        while let Some((bytes, outcome)) = outcomes.next().await {
            rekeyed.add(bytes, outcome);
            step(rekeyed);
        }
        Ok(())
    }

    async fn one(&self, space: &Space, chunk: &StoredChunk, arena: &Arena) -> Outcome {
        let Inventory {
            store, keys, keyring, ..
        } = &self.inventory;
        let (key, object_len) = (keys.chunk(chunk.space, &chunk.hash), space.layout().object_len());
        self.wait_for_rate(object_len as u64).await;
        let slot = arena.ticket().await.reserve(object_len).await;
        let get = GetRange {
            key: &key,
            range: 0..object_len,
            object_len,
            if_match: None,
        };
        let (landing, got) = store
            .get(get, Landing::new(slot), self.inventory.deadline())
            .await;
        let version = match got {
            Ok(meta) => meta.version,
            Err(error) => return outcome_of(&error),
        };
        let made = make_anew(keyring.clone(), space.clone(), chunk, landing.slot).await;
        let body = match made {
            Ok(body) => body,
            Err(outcome) => return outcome,
        };
        let (when, deadline) = (Condition::IfMatch(&version.etag), self.inventory.deadline());
        // The hint goes on with its object. A GET does not bring it, and without it lookups ask more.
        let head = store.head(&key, deadline).await.ok();
        let run = head.and_then(|meta| meta.run);
        let extras = PutExtras {
            crc64: self.checksum.then(|| Crc64::of(&body)),
            run: run.as_deref(),
        };
        let put = store.put_with(&key, body, extras, when, deadline).await;
        put.map_or_else(|error| outcome_of(&error), |_| Outcome::Rewritten)
    }

    async fn wait_for_rate(&self, bytes: u64) {
        let due = {
            let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
            // Time in which there was nothing to do is not made up for.
            let due = next.max(Instant::now());
            *next = due + Duration::from_secs_f64(bytes as f64 / self.rate as f64);
            due
        };
        tokio::time::sleep_until(due).await;
    }
}

/// Off the runtime: it reads and writes every byte.
async fn make_anew(
    keyring: Keyring,
    space: Space,
    chunk: &StoredChunk,
    mut slot: SlotMut,
) -> Result<Bytes, Outcome> {
    let hash = chunk.hash;
    let work = tokio::task::spawn_blocking(move || {
        let made = keyring.rekey(&space, &hash, &mut slot);
        made.map(|()| Bytes::from_owner(slot.freeze()))
    });
    match work.await {
        Ok(Ok(body)) => Ok(body),
        // Another one has come since its first bytes were read.
        Ok(Err(NotRekeyed::Newest | NotRekeyed::Header(HeaderError::NoKey { .. }))) => Err(Outcome::Changed),
        Ok(Err(NotRekeyed::Header(_) | NotRekeyed::Digest(_))) => Err(Outcome::Refused),
        Ok(Err(error @ NotRekeyed::Key(_))) => Err(Outcome::Failed(error.to_string())),
        Err(error) => Err(Outcome::Failed(error.to_string())),
    }
}

fn outcome_of(error: &ObjectError) -> Outcome {
    match error.kind {
        ErrorKind::Changed | ErrorKind::NotFound => Outcome::Changed,
        ErrorKind::Length { .. } => Outcome::Refused,
        _ => Outcome::Failed(error.to_string()),
    }
}
