//! `GET /v1/traces`: the latest loads of this node, and where the time of each went.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use hyper::Request;
use hyper::body::Incoming;
use percent_encoding::percent_decode_str;
use serde::Serialize;
use serde_json::{Value, json};

use super::Api;
use super::body::{self, Reply};
use super::problem::ApiProblem;
use crate::cache::gateway::Miss;
use crate::metrics::trace::LoadTrace;
use crate::node::{Lent, Session};
use crate::protocol::Tier;

/// Spans of a load; a long prompt from S3 has more than anybody reads.
const SPANS_MAX: usize = 500;

/// See the [module](self).
#[derive(Debug)]
pub struct Traces {
    loads_max: usize,
    loads: Mutex<VecDeque<Arc<TracedLoad>>>,
}

/// One load, under way or over.
#[derive(Debug)]
pub struct TracedLoad {
    pub trace: Arc<LoadTrace>,
    load: String,
    instance: String,
    rank: u32,
    model: String,
    chunks: usize,
    at_ms: u64,
    outcome: Mutex<TracedOutcome>,
}

#[derive(Debug, Clone, Default, Serialize)]
struct TracedOutcome {
    /// None: it is under way.
    seconds: Option<f64>,
    /// Chunks, or groups of layers, by tier.
    loaded: BTreeMap<&'static str, u64>,
    missed: BTreeMap<&'static str, u64>,
}

impl Traces {
    pub fn new(loads_max: usize) -> Self {
        Self {
            loads_max,
            loads: Mutex::default(),
        }
    }

    /// None: no loads are kept.
    pub fn begin(
        &self,
        load: &str,
        session: &Session,
        model: &str,
        chunks: usize,
    ) -> Option<Arc<TracedLoad>> {
        if self.loads_max == 0 {
            return None;
        }
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let traced = Arc::new(TracedLoad {
            trace: LoadTrace::new(SPANS_MAX),
            load: load.to_owned(),
            instance: session.instance.clone(),
            rank: session.rank,
            model: model.to_owned(),
            chunks,
            at_ms: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
            outcome: Mutex::default(),
        });
        let mut loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        if loads.len() >= self.loads_max {
            loads.pop_front();
        }
        loads.push_back(Arc::clone(&traced));
        Some(traced)
    }

    /// The oldest first.
    fn latest(&self) -> Vec<Arc<TracedLoad>> {
        let loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        loads.iter().map(Arc::clone).collect()
    }
}

impl TracedLoad {
    pub fn came(&self, i: usize, lent: &Lent) {
        *self.outcome().loaded.entry(lent.tier.word()).or_default() += 1;
        // Those in memory come at once, and a span each says nothing.
        if lent.tier != Tier::Memory {
            let (first, end) = lent.planes;
            self.trace.note(
                "came",
                format_args!("chunk {i} from {}, planes {first} to {end}", lent.tier.word()),
            );
        }
    }

    pub fn missed(&self, i: usize, miss: &Miss) {
        *self.outcome().missed.entry(miss.code()).or_default() += 1;
        self.trace.note("missed", format_args!("chunk {i}: {miss}"));
    }

    /// Counts once: whoever hangs up ends it, too.
    pub fn ended(&self) {
        let seconds = self.trace.elapsed().as_secs_f64();
        self.outcome().seconds.get_or_insert(seconds);
    }

    fn outcome(&self) -> std::sync::MutexGuard<'_, TracedOutcome> {
        self.outcome.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An engine's load of a request is named after it: `REQUEST#3`.
    fn is_named(&self, name: &str) -> bool {
        let rest = self.load.strip_prefix(name);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('#'))
    }

    fn json(&self, with_spans: bool) -> Value {
        let outcome = self.outcome().clone();
        let mut value = json!({
            "load": self.load,
            "instance": self.instance,
            "rank": self.rank,
            "model": self.model,
            "chunks": self.chunks,
            "at_ms": self.at_ms,
            "seconds": outcome.seconds,
            "loaded": outcome.loaded,
            "missed": outcome.missed,
        });
        if with_spans {
            value["spans"] = json!(self.trace.spans());
        }
        value
    }
}

/// `GET /v1/traces`: all of them; with `?load=NAME` those of a request or a load, with their spans.
pub fn traces(api: &Api, request: &Request<Incoming>) -> Result<Reply, ApiProblem> {
    let query = request.uri().query().unwrap_or_default();
    let name = match query.split_once('=') {
        None if query.is_empty() => None,
        Some(("load", name)) => Some(percent_decode_str(name).decode_utf8_lossy().into_owned()),
        _ => return Err(ApiProblem::bad("the query may have `load=NAME` alone")),
    };
    let latest = api.traces.latest();
    let named = |load: &&Arc<TracedLoad>| name.as_ref().is_none_or(|name| load.is_named(name));
    let loads: Vec<Value> = latest
        .iter()
        .filter(named)
        .map(|load| load.json(name.is_some()))
        .collect();
    Ok(body::json(&json!({ "loads": loads })))
}
