//! The report of a demo: requests, bytes and time of each phase, and every byte that came back different.

use serde::Serialize;

use super::plan::{Plan, stored_chunks};
use super::session::RequestWatch;
use super::synthetic::Position;
use crate::format::{Kind, Space};
use crate::s3::object::{ObjectStore, RequestCounts};

/// One line of the table. A phase that alternates with others is the sum of its turns.
#[derive(Debug, Clone, Serialize)]
pub struct DemoPhase {
    /// One of the words below.
    pub name: &'static str,
    pub seconds: f64,
    /// Bytes of KV.
    pub bytes: u64,
    pub chunks: usize,
    /// Number of chunks found, in phases that look up.
    pub hits: Option<usize>,
    pub requests: RequestCounts,
}

/// A byte that differs from the stored one.
#[derive(Debug, Clone, Serialize)]
pub struct Difference {
    pub conversation: usize,
    pub kind: Kind,
    pub chunk: usize,
    pub layer: u32,
    #[serde(flatten)]
    pub position: Position,
}

/// A chunk that was not found or loaded.
#[derive(Debug, Clone, Serialize)]
pub struct Missed {
    pub conversation: usize,
    pub kind: Kind,
    pub chunk: usize,
    pub code: &'static str,
    pub reason: String,
}

/// A kind of the model's KV.
#[derive(Debug, Clone, Serialize)]
pub struct DemoKind {
    pub kind: Kind,
    pub space: String,
    pub layers: usize,
    /// Of the first layer.
    pub heads: u32,
    /// Of a head of the first layer: of a token, or all of a state.
    pub row_bytes: u32,
    pub chunk_bytes: usize,
    /// Different chunks whose KV of this kind is stored.
    pub stored: usize,
    /// Chunks of this kind that the loads of all conversations need.
    pub needed: usize,
}

/// The results of a demo.
#[derive(Debug, Clone, Serialize)]
pub struct DemoReport {
    pub model: String,
    pub kinds: Vec<DemoKind>,
    pub seed: u64,
    /// The place of the objects, for people.
    pub place: String,
    pub chunk_tokens: u32,
    pub conversations: usize,
    pub tokens: usize,
    pub chunks: usize,
    pub unique_chunks: usize,
    pub shared_chunks: usize,
    pub cache_bytes: usize,
    pub arena_bytes_peak: usize,
    /// Parts of `store` and of `load`.
    pub gather_seconds: f64,
    pub scatter_seconds: f64,
    pub phases: Vec<DemoPhase>,
    pub compared_bytes: u64,
    pub different_bytes: u64,
    pub first_difference: Option<Difference>,
    /// Bytes written to pages outside the conversation.
    pub stray_bytes: u64,
    pub missed: Vec<Missed>,
    /// Whether every byte came back unchanged.
    pub equal: bool,
}

impl DemoPhase {
    pub const OPEN: &'static str = "open";
    pub const LOOKUP: &'static str = "prefill_lookup";
    pub const GENERATE: &'static str = "generate";
    pub const STORE: &'static str = "store";
    pub const FORGET: &'static str = "forget";
    pub const COLD_EXACT: &'static str = "lookup_exact";
    pub const COLD_PREFIX: &'static str = "lookup_prefix";
    pub const WARM: &'static str = "lookup_warm";
    pub const LOAD: &'static str = "load";
    pub const COMPARE: &'static str = "compare";
    pub const REMOVE: &'static str = "remove";

    /// Adds the time and requests since the watch's start.
    pub(super) fn add(&mut self, watch: &RequestWatch, store: &dyn ObjectStore) -> &mut Self {
        let (elapsed, more) = watch.read(store);
        self.seconds += elapsed.as_secs_f64();
        let requests = &mut self.requests;
        requests.head += more.head;
        requests.attributes += more.attributes;
        requests.get += more.get;
        requests.put += more.put;
        requests.list += more.list;
        requests.delete += more.delete;
        requests.bucket += more.bucket;
        self
    }

    pub(super) fn requests_text(&self) -> String {
        let counts = &self.requests;
        let kinds = [
            ("HEAD", counts.head),
            ("ATTRIBUTES", counts.attributes),
            ("GET", counts.get),
            ("PUT", counts.put),
            ("LIST", counts.list),
            ("DELETE", counts.delete),
            ("BUCKET", counts.bucket),
        ];
        let sent = kinds.iter().filter(|(_, count)| *count > 0);
        sent.map(|(kind, count)| format!("{count} {kind}"))
            .collect::<Vec<_>>()
            .join(", ")
    }
}

impl DemoReport {
    pub(super) fn new(spaces: &[Space], plan: &Plan) -> Self {
        let kind = |(space, kept): (&Space, &Vec<usize>)| {
            let plane = space.planes().first();
            DemoKind {
                kind: space.kind(),
                space: space.key().to_string(),
                layers: space.layout().layers(),
                heads: plane.map_or(0, |plane| plane.heads),
                row_bytes: plane.map_or(0, |plane| plane.row_bytes),
                chunk_bytes: space.layout().payload_len(),
                stored: stored_chunks(kept, plan.shared_chunks, plan.shape.conversations),
                needed: plan.needed(space),
            }
        };
        Self {
            model: spaces[0].model().to_owned(),
            kinds: spaces.iter().zip(&plan.kept).map(kind).collect(),
            seed: plan.shape.seed,
            place: String::new(),
            chunk_tokens: spaces[0].chunk_tokens(),
            conversations: plan.shape.conversations,
            tokens: plan.shape.tokens,
            chunks: plan.chunks(),
            unique_chunks: plan.unique_chunks,
            shared_chunks: plan.shared_chunks,
            cache_bytes: 0,
            arena_bytes_peak: 0,
            gather_seconds: 0.0,
            scatter_seconds: 0.0,
            phases: Vec::new(),
            compared_bytes: 0,
            different_bytes: 0,
            first_difference: None,
            stray_bytes: 0,
            missed: Vec::new(),
            equal: false,
        }
    }

    /// Bytes of KV to store.
    pub(super) fn unique_bytes(&self) -> u64 {
        let of_kind = |kind: &DemoKind| (kind.stored * kind.chunk_bytes) as u64;
        self.kinds.iter().map(of_kind).sum()
    }

    /// Bytes of KV that the loads of all conversations need.
    pub(super) fn needed_bytes(&self) -> u64 {
        let of_kind = |kind: &DemoKind| (kind.needed * kind.chunk_bytes) as u64;
        self.kinds.iter().map(of_kind).sum()
    }

    /// The phase of this name, made at its first use.
    pub(super) fn phase(&mut self, name: &'static str) -> &mut DemoPhase {
        let at = self
            .phases
            .iter()
            .position(|phase| phase.name == name)
            .unwrap_or_else(|| {
                self.phases.push(DemoPhase {
                    name,
                    seconds: 0.0,
                    bytes: 0,
                    chunks: 0,
                    hits: None,
                    requests: RequestCounts::default(),
                });
                self.phases.len() - 1
            });
        &mut self.phases[at]
    }

    /// True if every chunk was found, loaded and compared, and no byte differs.
    pub(super) fn is_equal(&self) -> bool {
        let lookups = [DemoPhase::COLD_EXACT, DemoPhase::COLD_PREFIX, DemoPhase::WARM];
        let found = |name| {
            let mut phases = self.phases.iter();
            phases.any(|phase| phase.name == name && phase.hits == Some(self.chunks))
        };
        lookups.into_iter().all(found)
            && self.missed.is_empty()
            && self.compared_bytes == self.needed_bytes()
            && self.different_bytes + self.stray_bytes == 0
    }
}
