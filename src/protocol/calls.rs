//! Bodies and answers of the API's calls, as JSON.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::words::{Order, Strategy, Tier};
use crate::format::{ChunkHash, Plane, SpaceId};

/// Answer of `PUT /v1/spaces`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct SpaceInfo {
    pub space_id: SpaceId,
    pub chunk_tokens: u32,
    /// Bytes of a chunk's payload.
    pub chunk_bytes: usize,
    /// Bytes of its object: header and payload.
    pub object_bytes: usize,
    pub header_bytes: usize,
    pub planes: Vec<PlaneInfo>,
}

/// A plane, and where it is in the payload.
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
    /// Half-open range of layers that this rank has; all if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<(u32, u32)>,
    /// Half-open range of KV heads that this rank has; all if not given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heads: Option<(u32, u32)>,
    /// Every rank has everything (MLA): then neither layers nor heads are given.
    #[serde(default)]
    pub replicated: bool,
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
    /// None: it can't be mapped.
    pub path: Option<String>,
    pub bytes: usize,
    pub boot_id: String,
}

/// Tokens or hashes of a prompt's chunks, and which they are.
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
    /// Keeps those that are in memory there for so long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pin_ms: Option<u64>,
    /// Brings those of the prefix that are not in memory there, in the background.
    #[serde(default)]
    pub prefetch: bool,
}

/// Masks in hex.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LookupAnswer {
    pub chunks: usize,
    pub mask: String,
    pub unknown: String,
    pub inferred: String,
    pub prefix: usize,
    pub tiers: Vec<TierRun>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

/// A run of chunks that are in the same tier.
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
    /// Goes on with the chunks after one that is missing.
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
    /// Planes of a chunk that may be read now.
    Here {
        i: usize,
        slot: usize,
        generation: u64,
        /// In the arena's file.
        offset: usize,
        /// Half-open.
        planes: (usize, usize),
        tier: String,
    },
    Missing {
        i: usize,
        /// Stable word.
        miss: String,
        detail: String,
    },
    /// The last line. A stream without one was cut.
    End { end: bool, loaded: usize, order: Order },
}

/// A slot, as `reserve` and `load` name it.
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

/// A rank's share of a chunk: these heads of these planes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// Half-open.
    pub planes: (usize, usize),
    /// Half-open.
    pub heads: (u32, u32),
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReserveAnswer {
    /// Of every chunk, what this rank has to write.
    pub own: Vec<Share>,
    pub chunks: Vec<ReservedChunk>,
    /// Not all ranks are attached: nobody brings the chunks that are `pending`.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub ranks_missing: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum ReservedChunk {
    /// Write the payload there, then commit.
    Slot {
        slot: usize,
        generation: u64,
        /// Of the payload, in the arena's file.
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
    /// One for each slot, in order.
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

/// Body of `POST /v1/release`: the slots that are named, or all of the load.
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
    /// Of a pin: for how long.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ms: Option<u64>,
}

/// How many chunks that was.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct Count {
    pub chunks: usize,
}

/// A flush that is given no time waits so long.
pub const FLUSH_MAX: Duration = Duration::from_mins(10);

/// Body of `POST /v1/flush`.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FlushRequest {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline_ms: Option<u64>,
    /// Chunks that the caller knows of to have been dropped.
    #[serde(default)]
    pub dropped: u64,
}

/// The outcome of a flush.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Flushed {
    /// Chunks that still wait: 0 when the flush is complete.
    pub pending: u64,
    /// Chunks that were dropped since the start, and will never be stored by this node unless they come again.
    pub dropped: u64,
    /// Chunks that were committed since the start, and that the configuration keeps from S3.
    #[serde(default)]
    pub kept_back: u64,
    /// Disks that could not be used at the start: whether they have what S3 has not is not known.
    #[serde(default)]
    pub unread_disks: u64,
}

/// An error, as RFC 9457 has it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Problem {
    #[serde(rename = "type")]
    pub kind: String,
    pub title: String,
    pub status: u16,
    /// The problem, and what to do.
    pub detail: String,
    /// Stable word.
    pub code: String,
}
