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
use super::otlp::Sampled;
use super::problem::ApiProblem;
use crate::cache::gateway::Miss;
use crate::metrics::trace::{Attribute, CallTrace};
use crate::node::{Lent, LoadCall, Session};
use crate::protocol::Tier;

/// See the [module](self).
pub struct Traces {
    loads_max: usize,
    spans_max: usize,
    loads: Mutex<VecDeque<Arc<TracedLoad>>>,
}

/// One load, under way or over.
pub struct TracedLoad {
    pub trace: Arc<CallTrace>,
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
    pub fn new(loads_max: usize, spans_max: usize) -> Self {
        Self {
            loads_max,
            spans_max,
            loads: Mutex::default(),
        }
    }

    /// None: nobody wants to know.
    pub fn begin(
        &self,
        call: &LoadCall,
        session: &Session,
        sampled: Option<Sampled>,
    ) -> Option<Arc<TracedLoad>> {
        if self.loads_max == 0 && sampled.is_none() {
            return None;
        }
        let (load, model, chunks) = (&call.load_id, call.space.model(), call.chunks.len());
        let export = sampled.map(|sampled| {
            let mut about = about(session);
            about.extend([
                ("load", load.clone()),
                ("model", model.to_owned()),
                ("chunks", chunks.to_string()),
            ]);
            sampled.export(about)
        });
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let traced = Arc::new(TracedLoad {
            trace: CallTrace::new(self.spans_max, export),
            load: load.clone(),
            instance: session.instance.clone(),
            rank: session.rank,
            model: model.to_owned(),
            chunks,
            at_ms: u64::try_from(at.as_millis()).unwrap_or(u64::MAX),
            outcome: Mutex::default(),
        });
        let mut loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        if self.loads_max > 0 {
            if loads.len() >= self.loads_max {
                loads.pop_front();
            }
            loads.push_back(Arc::clone(&traced));
        }
        Some(traced)
    }

    /// The oldest first.
    fn latest(&self) -> Vec<Arc<TracedLoad>> {
        let loads = self.loads.lock().unwrap_or_else(PoisonError::into_inner);
        loads.iter().map(Arc::clone).collect()
    }
}

/// What is told of a session in its calls' traces.
pub fn about(session: &Session) -> Vec<Attribute> {
    vec![
        ("instance", session.instance.clone()),
        ("rank", session.rank.to_string()),
    ]
}

impl TracedLoad {
    pub fn came(&self, i: usize, lent: &Lent) {
        *self.outcome().loaded.entry(lent.tier.word()).or_default() += 1;
        // Those in memory come at once, and a span each says nothing.
        if lent.tier != Tier::Memory {
            let (first, end) = lent.planes;
            let about = vec![
                ("index", i.to_string()),
                ("tier", lent.tier.word().to_owned()),
                ("planes", format!("{first}-{}", end - 1)),
            ];
            self.trace.note("came", about);
        }
    }

    pub fn missed(&self, i: usize, miss: &Miss) {
        *self.outcome().missed.entry(miss.code()).or_default() += 1;
        let about = vec![
            ("index", i.to_string()),
            ("miss", miss.code().to_owned()),
            ("error", miss.to_string()),
        ];
        self.trace.note("missed", about);
    }

    /// Counts once: whoever hangs up ends it, too.
    pub fn ended(&self) {
        let seconds = self.trace.elapsed().as_secs_f64();
        let mut outcome = self.outcome();
        outcome.seconds.get_or_insert(seconds);
        let counts = |of: &BTreeMap<&'static str, u64>| {
            let words: Vec<_> = of.iter().map(|(word, count)| format!("{count} {word}")).collect();
            words.join(", ")
        };
        let about = vec![
            ("loaded", counts(&outcome.loaded)),
            ("missed", counts(&outcome.missed)),
        ];
        drop(outcome);
        self.trace.end(about);
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
            let noted = self.trace.noted();
            value["spans"] = json!(noted.spans);
            value["spans_left_out"] = json!(noted.left_out);
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
