//! The status of a node, for operators.

use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

use serde::Serialize;

use super::Node;
use super::trouble::{Noted, Trouble, troubles};
use crate::arena::ArenaStats;
use crate::cache::gateway::TierStats;
use crate::cache::peers::MemberState;
use crate::format::{HashScheme, Kind, Protection, Shard};
use crate::s3::dns::NameState;
use crate::s3::fanout::{EndpointState, Requests};
use crate::s3::object::{Capabilities, RequestCounts};

/// The status of a node, with all that an operator may want to see.
#[derive(Debug, Clone, Serialize)]
pub struct Status {
    pub version: &'static str,
    pub uptime_seconds: u64,
    /// The reason why it should get no traffic.
    pub not_ready: Option<&'static str>,
    /// What is wrong, and what to do; the worst first.
    pub troubles: Vec<Trouble>,
    pub arena: ArenaStatus,
    pub tiers: TierStats,
    pub s3: S3Status,
    /// The fleet, this node among it; None without `[peers]`.
    pub peers: Option<Vec<MemberState>>,
    pub sessions: Vec<SessionStatus>,
    pub slots: SlotStatus,
    pub spaces: Vec<SpaceStatus>,
}

#[derive(Debug, Clone, Serialize)]
pub struct ArenaStatus {
    pub path: Option<String>,
    pub boot_id: String,
    #[serde(flatten)]
    pub stats: ArenaStats,
    /// The longest run that is free.
    pub free_run_bytes: usize,
}

#[derive(Debug, Clone, Serialize)]
pub struct S3Status {
    pub answered: bool,
    /// The latest PUT was refused because a quota is used up.
    pub over_quota: bool,
    pub capabilities: Capabilities,
    pub requests: RequestCounts,
    pub names: Vec<NameState>,
    pub endpoints: Vec<EndpointState>,
    /// Requests to all endpoints, also to those that have left.
    pub totals: Requests,
    /// The chunks that are known to exist or not.
    pub existence_entries: usize,
}

#[derive(Debug, Clone, Serialize)]
pub struct SessionStatus {
    pub instance: String,
    pub rank: u32,
    pub world_size: u32,
    pub pid: Option<i32>,
    /// Slots that it may write.
    pub writes: usize,
    pub leases: usize,
}

/// The slots that are being filled or read.
#[derive(Debug, Clone, Serialize)]
pub struct SlotStatus {
    pub filling: usize,
    /// Fillings that will not be published, and wait for sessions that may still write there.
    pub spoilt: usize,
    pub leases: usize,
}

#[derive(Debug, Clone, Serialize)]
pub struct SpaceStatus {
    pub space_id: String,
    pub model: String,
    pub revision: String,
    pub tenant: String,
    pub protection: Protection,
    /// The same for all kinds of KV of a model.
    pub model_id: String,
    pub kind: Kind,
    /// The draft model whose layers these are; empty: the model's own.
    pub draft: String,
    pub chunk_tokens: u32,
    pub object_bytes: usize,
    pub dtype: &'static str,
    /// How chunks are named.
    pub hash: HashScheme,
    /// Planes of the same shape together, in words: `2 x layers 0 to 1: kv, 2 heads of 32 bytes`.
    pub planes: Vec<String>,
    pub shard: Shard,
    /// What else the KV depends on.
    pub extra: BTreeMap<String, String>,
}

impl Node {
    pub fn status(&self) -> Status {
        let gateway = &self.0.gateway;
        let arena = gateway.arena();
        let mut sessions: Vec<SessionStatus> = Vec::new();
        for session in &self.0.sessions {
            let (writes, leases) = self.ledger().counts_of(session.id);
            sessions.push(SessionStatus {
                instance: session.instance.clone(),
                rank: session.rank,
                world_size: session.world_size,
                pid: session.process.pid,
                writes,
                leases,
            });
        }
        sessions.sort_by(|a, b| (&a.instance, a.rank).cmp(&(&b.instance, b.rank)));
        let mut spaces: Vec<SpaceStatus> = Vec::new();
        for declared in &self.0.spaces {
            let space = &declared.space;
            spaces.push(SpaceStatus {
                space_id: space.id().to_string(),
                model: space.model().to_owned(),
                revision: space.revision().to_owned(),
                tenant: space.tenant().to_owned(),
                protection: space.protection(),
                model_id: space.model_id().to_string(),
                kind: space.kind(),
                draft: space.draft().to_owned(),
                chunk_tokens: space.chunk_tokens(),
                object_bytes: space.layout().object_len(),
                dtype: space.dtype().name(),
                hash: space.hash(),
                planes: space.planes_in_words(),
                shard: space.shard(),
                extra: space.extra().clone(),
            });
        }
        // The kinds of KV of one model stand together.
        spaces.sort_by(|a, b| {
            let model = |of: &SpaceStatus| (of.model.clone(), of.model_id.clone(), of.draft.clone(), of.kind);
            (model(a), &a.space_id).cmp(&(model(b), &b.space_id))
        });
        let (filling, spoilt, leases) = self.ledger().counts();
        let mut status = Status {
            version: env!("CARGO_PKG_VERSION"),
            uptime_seconds: self.0.started.elapsed().as_secs(),
            not_ready: self.not_ready(),
            troubles: Vec::new(),
            arena: ArenaStatus {
                path: arena.path().map(|path| path.display().to_string()),
                boot_id: arena.boot_id().to_string(),
                stats: arena.stats(),
                free_run_bytes: arena.free_run_bytes(),
            },
            tiers: gateway.tier_stats(),
            s3: S3Status {
                answered: self.0.s3_answered.load(Ordering::Relaxed),
                over_quota: gateway.is_over_quota(),
                capabilities: gateway.capabilities(),
                requests: gateway.requests(),
                names: gateway.names(),
                endpoints: gateway.endpoints(),
                totals: gateway.s3_totals(),
                existence_entries: gateway.existence_entries(),
            },
            peers: gateway
                .peers()
                .map(|peers| peers.members().iter().map(|member| member.state()).collect()),
            sessions,
            slots: SlotStatus {
                filling,
                spoilt,
                leases,
            },
            spaces,
        };
        let noted = Noted {
            keyless: gateway.keyless(),
            reload_refused: self.reload_refused(),
        };
        status.troubles = troubles(&status, gateway.write_behind_max() as u64, noted);
        status
    }
}
