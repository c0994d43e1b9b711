//! Bodies and answers of the API's calls, in JSON.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::tokens::TokenShare;
use super::words::{Order, Strategy, Tier};
use crate::format::{ChunkHash, Kind, ModelId, Plane, SpaceId};

/// Answer of `PUT /v1/spaces`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SpaceInfo {
    pub space_id: SpaceId,
    /// The same for all kinds of KV of a model.
    pub model_id: ModelId,
    pub kind: Kind,
    /// The draft model whose layers these are; empty: the model's own.
    pub draft: String,
    pub chunk_tokens: u32,
    /// Bytes of a chunk's payload.
    pub chunk_bytes: usize,
    /// Bytes of its object: header and payload.
    pub object_bytes: usize,
    pub header_bytes: usize,
    pub planes: Vec<PlaneInfo>,
}

/// A plane, and its place in the payload.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct PlaneInfo {
    #[serde(flatten)]
    pub plane: Plane,
    pub offset: usize,
    pub bytes: usize,
}

/// Body of `POST /v1/attach`.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AttachRequest {
    pub instance: String,
    #[serde(default)]
    pub rank: u32,
    #[serde(default = "one")]
    pub world_size: u32,
    /// Half-open range of this rank's layers (a pipeline stage); all if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<(u32, u32)>,
    /// The tensor-parallel rank, and how many there are; `[0, 1]` if not given. The node works out the heads that this
    /// rank has of each plane.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tp: Option<(u32, u32)>,
    /// The tokens of each chunk that this rank has (context parallel); all if not given. States are not cut by it.
    #[serde(default, skip_serializing_if = "TokenShare::is_all")]
    pub tokens: TokenShare,
}

fn one() -> u32 {
    1
}

/// First line of an attach's stream.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Attached {
    pub session: String,
    pub arena: ArenaInfo,
    pub version: String,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ArenaInfo {
    /// None: the arena can't be mapped.
    pub path: Option<String>,
    pub bytes: usize,
    pub boot_id: String,
}

/// A prompt's chunks, as tokens or hashes.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LookupRequest {
    pub space: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hashes: Option<Vec<ChunkHash>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<Vec<u32>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub salt: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub adapter: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub strategy: Option<Strategy>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// Keeps chunks that are in memory there for this long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin_ms: Option<u64>,
    /// Loads the prefix's chunks that are not in memory, in the background.
    #[serde(default)]
    pub prefetch: bool,
    /// The other kinds of KV that the model's layers keep, each a space: the answer's `boundary` holds for all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub with: Vec<String>,
    /// Spaces of a draft model, which an engine can go on without.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drafts: Vec<String>,
    /// Chunks between the snapshots that writers keep of a state; 0: only at the ends of prompts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub state_every: Option<usize>,
    /// Chunks of the full kinds that must be there beyond the boundary: 1 for an engine that drops the last one, as with
    /// EAGLE and MTP drafts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lookahead: Option<usize>,
}

/// The answer of a lookup; masks in hex.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LookupAnswer {
    pub chunks: usize,
    pub mask: String,
    pub unknown: String,
    pub inferred: String,
    pub prefix: usize,
    pub tiers: Vec<TierRun>,
    /// Leading chunks after which an engine can go on: all kinds of KV have what they need there.
    pub boundary: usize,
    /// Leading chunks that all full kinds have.
    pub full: usize,
    /// A chunk without an answer could have told of more.
    pub open: bool,
    /// The chunks that each kind needs there: of the spaces in the order of the request, then of the drafts.
    pub needed: Vec<Needed>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// The chunks of one kind of KV that an engine needs to go on at the answer's boundary.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needed {
    pub space: SpaceId,
    pub kind: Kind,
    /// Half-open.
    pub chunks: (usize, usize),
    pub tiers: Vec<TierRun>,
    /// Those of them that were inferred from their neighbours, in half-open runs: the load confirms them.
    #[serde(default)]
    pub inferred: Vec<(usize, usize)>,
    /// A draft's chunks that are there may be fewer.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub draft: bool,
}

/// A run of chunks in the same tier.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierRun {
    pub tier: Tier,
    pub from: usize,
    pub count: usize,
}

/// Body of `POST /v1/load`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LoadRequest {
    pub session: String,
    pub load_id: String,
    pub space: String,
    pub hashes: Vec<ChunkHash>,
    #[serde(default)]
    pub order: Order,
    /// Goes on after a missing chunk.
    #[serde(default)]
    pub continue_after_miss: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// This rank takes no part: the others need not wait for it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub declines: bool,
}

/// A line of a load's stream.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum LoadLine {
    /// Planes of a chunk that may now be read.
    Here {
        i: usize,
        slot: usize,
        generation: u64,
        /// Offset in the arena's file.
        offset: usize,
        /// Half-open.
        planes: (usize, usize),
        tier: String,
    },
    Missing {
        i: usize,
        /// A stable word.
        miss: String,
        detail: String,
    },
    /// The last line. A stream without it was cut.
    End { end: bool, loaded: usize, order: Order },
}

/// A slot, as named by `reserve` and `load`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SlotName {
    pub slot: usize,
    pub generation: u64,
}

/// Body of `POST /v1/store/reserve`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReserveRequest {
    pub session: String,
    pub space: String,
    pub chunks: Vec<ReserveChunk>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReserveChunk {
    pub hash: ChunkHash,
    pub parent: ChunkHash,
    /// Full chunks only: the space's `chunk_tokens`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<u32>,
}

/// A rank's own share of a chunk: these tokens of these heads of these planes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Half-open.
    pub planes: (usize, usize),
    /// Half-open.
    pub heads: (u32, u32),
    /// The same in all shares of a rank.
    #[serde(default, skip_serializing_if = "TokenShare::is_all")]
    pub tokens: TokenShare,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReserveAnswer {
    /// The share of every chunk that this rank has to write.
    pub own: Vec<Share>,
    pub chunks: Vec<ReservedChunk>,
    /// Not all ranks are attached: no rank stores the chunks that are `pending`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ranks_missing: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ReservedChunk {
    /// A slot to write the payload to, before the commit.
    Slot {
        slot: usize,
        generation: u64,
        /// Offset of the payload in the arena's file.
        offset: usize,
    },
    /// `present`, `pending`, `full`, or `other_rank`.
    Skip { skip: String },
}

/// Body of `POST /v1/store/commit` and `/v1/store/abort`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CommitRequest {
    pub session: String,
    pub slots: Vec<SlotName>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CommitAnswer {
    /// One outcome for each slot, in order.
    pub slots: Vec<CommitOutcome>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum CommitOutcome {
    /// `published`: the chunk is a hit; else other ranks are still to commit.
    Ok {
        published: bool,
    },
    Refused {
        code: String,
        detail: String,
    },
}

/// Body of `POST /v1/release`: releases the named slots, or all of the load.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseRequest {
    pub session: String,
    pub load_id: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slots: Option<Vec<SlotName>>,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct ReleaseAnswer {
    pub released: usize,
}

/// Body of `POST /v1/prefetch`, `/v1/pin` and `/v1/unpin`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ChunksRequest {
    pub space: String,
    pub hashes: Vec<ChunkHash>,
    /// For a pin: how long it holds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<u64>,
}

/// Body of `POST /v1/bind`: chunks of one prompt, parents first, as an engine's own events name them.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BindRequest {
    pub space: String,
    /// Engines with the same hash blocks alike.
    pub scheme: String,
    pub chunks: Vec<BoundChunk>,
    /// Tokens of a router's block; not given: no router asks for these chunks by its own hashes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block_size: Option<usize>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub lora_name: String,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub cache_salt: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BoundChunk {
    pub hash: ChunkHash,
    /// None: it is the prompt's first.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub parent: Option<ChunkHash>,
    pub tokens: Vec<u32>,
    /// What else the engine's events say of it. The gateway does not read it.
    pub event: String,
}

/// Body of `POST /v1/events`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EventsRequest {
    pub space: String,
    pub scheme: String,
    /// Of the answer before; not given: from what is there now.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cursor: Option<String>,
    /// How long to wait for an event where there is none.
    #[serde(default)]
    pub wait_ms: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventsAnswer {
    pub cursor: String,
    /// The cursor was of an earlier daemon, or too old: the events are of what is there now, and all else is gone.
    #[serde(rename = "lost")]
    pub is_lost: bool,
    /// There are no more for now.
    #[serde(rename = "end")]
    pub is_end: bool,
    pub events: Vec<KvEvent>,
}

/// A chunk came into a tier, or left it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct KvEvent {
    pub hash: ChunkHash,
    pub tier: Tier,
    /// None: it left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored: Option<BoundChunk>,
}

impl KvEvent {
    #[must_use]
    pub fn stored(tier: Tier, bound: &BoundChunk) -> Self {
        Self {
            hash: bound.hash,
            tier,
            stored: Some(bound.clone()),
        }
    }

    #[must_use]
    pub fn removed(tier: Tier, hash: ChunkHash) -> Self {
        Self {
            hash,
            tier,
            stored: None,
        }
    }
}

/// The number of chunks of a call.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Count {
    pub chunks: usize,
}

/// The time of a flush without a deadline.
pub const FLUSH_MAX: Duration = Duration::from_mins(10);

/// Body of `POST /v1/flush`.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlushRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// Dropped chunks that the caller knows of.
    #[serde(default)]
    pub dropped: u64,
}

/// The answer of a flush.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flushed {
    /// Chunks that still wait: 0 when the flush is complete.
    pub pending: u64,
    /// Chunks that were dropped since the start. This node never stores them unless they come again.
    pub dropped: u64,
    /// Chunks that were committed since the start, but that the configuration keeps from S3.
    #[serde(default)]
    pub kept_back: u64,
    /// Chunks that `[store] admit = "auto"` has not given to S3, as far as the node remembers them, or its disks have them.
    #[serde(default)]
    pub declined: u64,
    /// Chunks that were declined since the start, and that the node does not remember any more. Some count as declined again,
    /// or are on S3 by now.
    #[serde(default)]
    pub forgotten: u64,
    /// Disks that could not be used at the start: they may hold chunks that S3 lacks.
    #[serde(default)]
    pub unread_disks: u64,
}

/// An error in the format of RFC 9457.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    #[serde(rename = "type")]
    pub kind: String,
    pub title: String,
    pub status: u16,
    /// The cause, and the remedy.
    pub detail: String,
    /// A stable word.
    pub code: String,
}
