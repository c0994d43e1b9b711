//! Reads chunks of a bucket and checks key, header and digests, many at a time.

use std::sync::Arc;

use futures::{Stream, StreamExt, TryStreamExt, stream};
use tokio::time::Instant;

use super::{Inventory, StoredChunk};
use crate::arena::SLOT_ALIGN;
use crate::cache::gateway::{AfterMiss, Gateway, LoadSpec, Miss};
use crate::format::Space;
use crate::protocol::Order;
use crate::s3::object::{ErrorKind, ObjectError, Operation};

/// Chunks that are checked at a time, if the arena has room; small ones need many to keep a link busy.
const CHECKS_MAX: usize = 32;

/// A chunk that was loaded and checked.
#[derive(Debug, Clone)]
pub struct ObjectChecked {
    pub chunk: StoredChunk,
    pub verdict: ObjectVerdict,
}

/// The outcome of a check.
#[derive(Debug, Clone)]
pub enum ObjectVerdict {
    Good,
    /// The object does not match its key.
    Damaged(Miss),
    /// It was removed after it was listed.
    Gone,
    /// It could not be read, or its format is unknown to this kvgate.
    Unknown(Miss),
}

impl ObjectVerdict {
    /// Stable word: `ok`, `gone`, or the miss's code.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Good => "ok",
            Self::Gone => "gone",
            Self::Damaged(miss) | Self::Unknown(miss) => miss.code(),
        }
    }

    fn of(miss: Miss) -> Self {
        match &miss {
            Miss::Absent => Self::Gone,
            Miss::BadHeader(_)
            | Miss::WrongLength(_)
            | Miss::Foreign(_)
            | Miss::Forged(_)
            | Miss::BadDigest { .. }
            | Miss::Quarantined => Self::Damaged(miss),
            // Possibly a later kvgate's format, so it must not count as damaged.
            Miss::Unreadable(_)
            | Miss::NoKey(_)
            | Miss::Replaced
            | Miss::Unknown(_)
            | Miss::ArenaTooSmall { .. }
            | Miss::ArenaFull
            | Miss::NotReleased
            | Miss::JoinedLate
            | Miss::RunEnded { .. } => Self::Unknown(miss),
        }
    }
}

impl Inventory {
    /// Loads every chunk of `space` through the gateway and yields each outcome as its check ends. No chunk keeps
    /// its slot longer than its check. A failed listing ends the stream. Needs a tokio runtime.
    pub fn verify(
        &self,
        gateway: &Gateway,
        space: &Space,
    ) -> impl Stream<Item = Result<ObjectChecked, ObjectError>> + use<> {
        let slot_bytes = space.layout().object_len().next_multiple_of(SLOT_ALIGN);
        let at_once = (gateway.arena().size() / slot_bytes).clamp(1, CHECKS_MAX);
        let (gateway, space, limit) = (gateway.clone(), space.clone(), self.call_timeout);
        self.pages(Some(space.key()))
            .map_ok(|page| stream::iter(page.chunks).map(Ok::<_, ObjectError>))
            .try_flatten()
            .map_ok(move |chunk| {
                let (gateway, space) = (gateway.clone(), space.clone());
                async move {
                    // Each chunk has its own deadline, so that a large space gets the time it needs.
                    let request = LoadSpec {
                        space,
                        chunks: vec![chunk.hash],
                        order: Order::Chunk,
                        after_miss: AfterMiss::Continue,
                        deadline: Instant::now() + limit,
                    };
                    let outcome = gateway.load(request).next().await;
                    let verdict = match outcome {
                        Some((_, Ok(_loaded))) => ObjectVerdict::Good,
                        Some((_, Err(miss))) => ObjectVerdict::of(miss),
                        None => ObjectVerdict::of(Miss::Unknown(Arc::new(ObjectError::new(
                            Operation::Get,
                            "a load",
                            ErrorKind::Broken,
                            "it ended without an outcome",
                        )))),
                    };
                    Ok(ObjectChecked { chunk, verdict })
                }
            })
            .try_buffer_unordered(at_once)
    }
}
