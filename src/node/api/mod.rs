//! The daemon's HTTP API, over a unix socket and TCP. `docs/API.md` describes it; `docs/openapi.json` does for
//! machines.
//!
//! Mechanism: a task for each connection runs hyper's HTTP/1.1; each call is a file here that reads its body within
//! limits, asks the [`Node`], and writes the answer. Streams (attach, load) are JSON lines that wait for their
//! reader, and end when it takes nothing for `[api] timeout`.
//!
//! A process that can open the unix socket may make every call, and one that can map the arena can read and write
//! every chunk in it: its file has the socket's access rights. Engines of tenants that must not see each other need
//! nodes of their own. `callers` says which calls TCP allows.

mod admin;
mod attach;
mod body;
mod bound_blocks;
mod callers;
mod chunk;
mod connections;
mod events;
mod exposition;
mod figures;
mod history;
mod impatient;
mod load;
mod lookup;
mod metrics;
mod otlp;
mod page;
mod peer_metrics;
mod peers;
mod problem;
mod routers;
mod routes;
mod s3_metrics;
mod server;
mod spaces;
mod store;
mod traces;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use hyper::{HeaderMap, StatusCode};

pub use history::run as keep_history;
pub use otlp::OtlpOptions;
pub use peers::PeerServer;
pub use problem::ApiProblem;
pub use server::{ListenError, Listening, Server};

use self::bound_blocks::BoundBlocks;
use self::connections::Connections;
use self::figures::Figures;
use self::history::History;
use self::otlp::{Otlp, Sampled};
use self::traces::Traces;
use crate::cache::episode::Episode;
use crate::cache::gateway::{Credit, Gateway};
use crate::node::{Node, Process};
use crate::protocol::Strategy;

/// Limits of the API.
#[derive(Debug, Clone)]
pub struct ApiOptions {
    pub connections_max: usize,
    pub body_max: usize,
    pub hashes_max: usize,
    /// Time for a request to come, and for each part of an answer to be taken.
    pub timeout: Duration,
    pub strategy: Strategy,
    /// The longest; a call can ask for less.
    pub lookup_deadline: Duration,
    pub load_deadline: Duration,
    /// Bytes of slots that all answers with a chunk may hold together.
    pub chunk_bytes: usize,
    pub token_file: Option<PathBuf>,
    /// Names that calls by TCP may be made to, besides the address itself.
    pub hosts: Vec<String>,
    /// Bytes that an engine may say of a chunk beside its tokens.
    pub note_bytes: usize,
    /// The longest that a call waits for an event.
    pub event_wait: Duration,
    /// The time that the history has.
    pub history: Duration,
    /// Loads whose traces are kept.
    pub traces_max: usize,
    /// Spans that are kept of a call.
    pub spans_max: usize,
    /// Where sampled calls' spans go.
    pub otlp: Option<OtlpOptions>,
}

/// State that all connections share.
pub struct Api {
    pub node: Node,
    pub options: ApiOptions,
    connections: Arc<Connections>,
    figures: Figures,
    history: History,
    traces: Traces,
    otlp: Option<Otlp>,
    /// Limits the slots of chunk reads, so that a slow reader takes no slots from engines.
    chunks: Credit,
    /// What routers' block hashes mean; at most twice `hashes_max` chunks.
    bound: Mutex<BoundBlocks>,
    token: RwLock<Option<String>>,
    reload: Reload,
    /// Warning: engines whose kvgate is another version.
    other_version: Episode,
}

/// Reloads the daemon's other settings, and the gateway's keys: answers which were reloaded, or why not.
pub type Reload = Box<dyn Fn(&Gateway) -> Result<Vec<String>, String> + Send + Sync>;

/// The origin of a call.
#[derive(Debug, Clone, Copy)]
pub enum Caller {
    Unix(Process),
    Tcp {
        /// The address of this machine that was called.
        local: SocketAddr,
    },
}

impl Api {
    pub fn new(node: Node, options: ApiOptions, reload: Reload) -> Result<Arc<Self>, String> {
        let log_repeat = node.options().log_repeat;
        let api = Self {
            node,
            connections: Connections::new(options.connections_max),
            figures: Figures::default(),
            history: History::new(options.history),
            traces: Traces::new(options.traces_max, options.spans_max),
            otlp: options.otlp.as_ref().map(Otlp::start).transpose()?,
            chunks: Credit::new(options.chunk_bytes),
            bound: Mutex::new(BoundBlocks::new(options.hashes_max)),
            options,
            token: RwLock::new(None),
            reload,
            other_version: Episode::new(
                "an engine's kvgate is another version than this daemon's, and no test has run them together: install the \
                 same on both, and start the engine anew",
                log_repeat,
            ),
        };
        api.read_token()?;
        Ok(Arc::new(api))
    }

    /// Reads again the settings that may have changed; answers which were reloaded. The status tells of a refusal until
    /// the next one is none.
    pub fn reload(&self) -> Result<Vec<String>, String> {
        let reloaded = self.read_again();
        self.node.reloaded(reloaded.as_ref().err().cloned());
        match &reloaded {
            Ok(what) => tracing::info!(?what, "reloaded"),
            Err(error) => tracing::error!("not reloaded: {error}"),
        }
        reloaded
    }

    fn read_again(&self) -> Result<Vec<String>, String> {
        let mut reloaded = (self.reload)(self.node.gateway())?;
        if self.options.token_file.is_some() {
            self.read_token()?;
            reloaded.push("api.token_file".to_owned());
        }
        if let Some(peers) = self.node.gateway().peers() {
            let read = peers.read_again().map_err(|error| error.to_string())?;
            reloaded.extend(read.into_iter().map(str::to_owned));
        }
        Ok(reloaded)
    }

    fn read_token(&self) -> Result<(), String> {
        let Some(path) = &self.options.token_file else {
            return Ok(());
        };
        let text = std::fs::read_to_string(path)
            .map_err(|error| format!("can't read [api] token_file {}: {error}", path.display()))?;
        let text = text.trim();
        if text.is_empty() {
            return Err(format!(
                "[api] token_file {} is empty: write the token there",
                path.display()
            ));
        }
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = Some(text.to_owned());
        Ok(())
    }

    /// None: nobody wants this call's spans.
    fn sample(&self, name: &'static str, headers: &HeaderMap) -> Option<Sampled> {
        self.otlp.as_ref()?.sample(name, headers)
    }

    /// Sends the spans that wait, as far as the collector takes them in time.
    pub async fn end_traces(&self, time: Duration) {
        if let Some(otlp) = &self.otlp {
            otlp.end(time).await;
        }
    }

    fn token(&self) -> Option<String> {
        self.token.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn check_count(&self, chunks: usize) -> Result<(), ApiProblem> {
        let most = self.options.hashes_max;
        match chunks > most {
            true => Err(ApiProblem::new(
                StatusCode::PAYLOAD_TOO_LARGE,
                "too_many_chunks",
                format!("{chunks} chunks in one call; {most} may be ([api] hashes_max): make several calls"),
            )),
            false => Ok(()),
        }
    }
}
