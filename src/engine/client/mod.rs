//! A client of `kvgate serve`: for the command line, for tests, and for the engines' connectors.
//!
//! Calls go over kept connections; calls at the same time have one each. A call on a kept connection that turns out
//! to be closed is made again on a new one. A call that was sent whole is never repeated: the node may have carried
//! it out.
//!
//! Every wait has a time limit: a stopped or hanging node must not stop its engines.

mod connection;
mod engine;
mod load;
mod owner;
mod session;
mod version;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use futures::future::Either;
use http_body_util::Full;
use hyper::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, HeaderValue, USER_AGENT};
use hyper::{HeaderMap, Method, Request, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use engine::Engine;
pub use load::LoadLines;
pub use owner::Owner;
pub use session::ApiSession;

use self::connection::{ApiConnection, Unanswered};
use crate::arena::AttachedError;
use crate::format::{ChunkHash, Mask, Space};
use crate::protocol::Flushed;
use crate::protocol::{
    BindRequest, ChunksRequest, Count, EventsAnswer, EventsRequest, FLUSH_MAX, FlushRequest, LookupAnswer,
    LookupRequest, Problem, SpaceInfo, VERSION,
};

/// The address of a kvgate daemon.
#[derive(Debug, Clone)]
pub enum DaemonAddress {
    Unix(PathBuf),
    Tcp(SocketAddr),
}

/// See the [module](self). Cheap to clone; clones share the connections.
#[derive(Clone)]
pub struct Client(Arc<Inner>);

struct Inner {
    target: DaemonAddress,
    host: HeaderValue,
    token: Option<HeaderValue>,
    owner: Owner,
    patience: Duration,
    kept: Mutex<Vec<ApiConnection>>,
}

/// A call that was not answered, or refused.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("can't reach kvgate at {at}: {source}. Is `kvgate serve` running, and is this its [api] socket?")]
    Connect { at: String, source: std::io::Error },
    #[error(
        "the socket {at} is user {uid}'s, neither root's nor this user's: whoever that is could hand out wrong KV. If it is \
         your gateway, set [api] socket_owner (KVGATE__API__SOCKET_OWNER) to {uid}"
    )]
    Stranger { at: String, uid: u32 },
    #[error("the call broke off: {0}")]
    Http(#[from] hyper::Error),
    #[error("kvgate did not answer within {0:?}: does its process hang?")]
    Late(Duration),
    #[error("{} ({})", .0.detail, .0.code)]
    Refused(Problem),
    #[error("the answer can't be understood: {0}")]
    Answer(String),
    #[error(transparent)]
    Arena(#[from] AttachedError),
    #[error("{arena}. The daemon is kvgate {daemon}, and its client here is kvgate {VERSION}")]
    OtherVersion { daemon: String, arena: AttachedError },
}

/// Which chunks exist, as [`Client::lookup_hashes`] answers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct FoundChunks {
    pub mask: Mask,
    pub unknown: Mask,
    pub inferred: Mask,
    /// The present chunks in the node's memory and on its disks; all zero without `tiers=true`.
    pub memory: Mask,
    pub disk: Mask,
    /// Length of the leading run in `mask`.
    pub prefix: usize,
    /// Leading chunks after which an engine can go on: all kinds of KV that were asked for have what they need there.
    pub boundary: usize,
    /// Leading chunks that all full kinds have.
    pub full: usize,
    /// A chunk without an answer could have told of more.
    pub is_open: bool,
    /// Of each draft's needed chunks, how many are there.
    pub drafts: Vec<usize>,
}

const OCTETS: HeaderValue = HeaderValue::from_static("application/octet-stream");
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// How long an answer may take beyond the time that the call gives the node: the node answers most calls at once,
/// and keeps its own limits.
const PATIENCE: Duration = Duration::from_mins(1);

impl Client {
    pub fn new(target: DaemonAddress) -> Self {
        Self::with_token(target, None)
    }

    pub fn with_token(target: DaemonAddress, token: Option<&str>) -> Self {
        let token = token.and_then(|token| HeaderValue::from_str(&format!("Bearer {token}")).ok());
        let host = match &target {
            DaemonAddress::Unix(_) => None,
            DaemonAddress::Tcp(address) => HeaderValue::from_str(&address.to_string()).ok(),
        };
        Self(Arc::new(Inner {
            target,
            host: host.unwrap_or(HeaderValue::from_static("kvgate")),
            token,
            owner: Owner::default(),
            patience: PATIENCE,
            kept: Mutex::default(),
        }))
    }

    /// The same client, which also trusts a socket of this user. Otherwise it trusts only those of root and this
    /// process's user.
    #[must_use]
    pub fn trusting(&self, owner: Option<u32>) -> Self {
        self.with(|inner| inner.owner = Owner { told: owner })
    }

    /// The same client, with another patience than a minute, and connections of its own.
    #[must_use]
    pub fn with_patience(&self, patience: Duration) -> Self {
        self.with(|inner| inner.patience = patience)
    }

    fn with(&self, change: impl FnOnce(&mut Inner)) -> Self {
        let mut inner = Inner {
            target: self.0.target.clone(),
            host: self.0.host.clone(),
            token: self.0.token.clone(),
            owner: self.0.owner,
            patience: self.0.patience,
            kept: Mutex::default(),
        };
        change(&mut inner);
        Self(Arc::new(inner))
    }

    /// Makes a space known to the daemon.
    pub async fn declare(&self, space: &Space) -> Result<SpaceInfo, ClientError> {
        let body = Bytes::copy_from_slice(space.canonical_json().as_bytes());
        let (headers, answer) = self.call(Method::PUT, "/v1/spaces", JSON, body, JSON).await?;
        parse(&headers, &answer)
    }

    pub async fn lookup(&self, request: &LookupRequest) -> Result<LookupAnswer, ClientError> {
        let given = Duration::from_millis(request.deadline_ms.unwrap_or_default());
        self.post_for(given, "/v1/lookup", request).await
    }

    /// [`lookup_hashes`](Self::lookup_hashes) of a space that a daemon, perhaps a new one, may not know yet.
    pub async fn lookup_space(
        &self,
        space: &Space,
        hashes: &[ChunkHash],
        query: &str,
    ) -> Result<FoundChunks, ClientError> {
        let id = space.id().to_string();
        match self.lookup_hashes(&id, hashes, query).await {
            Err(ClientError::Refused(problem)) if problem.code == "unknown_space" => {
                self.declare(space).await?;
                self.lookup_hashes(&id, hashes, query).await
            }
            found => found,
        }
    }

    /// The same with hashes, as bytes both ways: the quickest lookup. `query` follows `space`, such as
    /// `strategy=exact&pin_ms=1000`.
    pub async fn lookup_hashes(
        &self,
        space: &str,
        hashes: &[ChunkHash],
        query: &str,
    ) -> Result<FoundChunks, ClientError> {
        let mut body = Vec::with_capacity(hashes.len() * 32);
        hashes
            .iter()
            .for_each(|hash| body.extend_from_slice(hash.as_bytes()));
        let path = format!("/v1/lookup?space={space}&{query}");
        let (headers, answer) = self
            .call(Method::POST, &path, OCTETS, body.into(), OCTETS)
            .await?;
        let chunks = hashes.len();
        let bytes = chunks.div_ceil(8);
        let mask = |number: usize| {
            let bytes = answer
                .get(number * bytes..(number + 1) * bytes)
                .unwrap_or_default();
            Mask::from_bytes(chunks, bytes).map_err(|error| version::not_understood(&headers, error))
        };
        let has_tiers = answer.len() > 3 * bytes;
        let tier = |number| match has_tiers {
            true => mask(number),
            false => Ok(Mask::new(chunks)),
        };
        let header = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let number = |name: &str| header(name).and_then(|value| value.parse::<usize>().ok());
        let number = |name: &str| {
            let missing = || version::not_understood(&headers, format!("it has no number {name}"));
            number(name).ok_or_else(missing)
        };
        let drafts = header("x-kvgate-drafts").unwrap_or_default().split(',');
        Ok(FoundChunks {
            mask: mask(0)?,
            unknown: mask(1)?,
            inferred: mask(2)?,
            memory: tier(3)?,
            disk: tier(4)?,
            prefix: number("x-kvgate-prefix")?.min(chunks),
            boundary: number("x-kvgate-boundary")?.min(chunks),
            full: number("x-kvgate-full")?.min(chunks),
            is_open: number("x-kvgate-open")? != 0,
            drafts: drafts.filter_map(|draft| draft.parse().ok()).collect(),
        })
    }

    pub async fn prefetch(&self, space: &str, hashes: &[ChunkHash]) -> Result<Count, ClientError> {
        self.chunks("/v1/prefetch", space, hashes, None).await
    }

    pub async fn pin(&self, space: &str, hashes: &[ChunkHash], ms: u64) -> Result<Count, ClientError> {
        self.chunks("/v1/pin", space, hashes, Some(ms)).await
    }

    pub async fn unpin(&self, space: &str, hashes: &[ChunkHash]) -> Result<Count, ClientError> {
        self.chunks("/v1/unpin", space, hashes, None).await
    }

    async fn chunks(
        &self,
        path: &str,
        space: &str,
        hashes: &[ChunkHash],
        ms: Option<u64>,
    ) -> Result<Count, ClientError> {
        let request = ChunksRequest {
            space: space.to_owned(),
            hashes: hashes.to_vec(),
            ms,
        };
        self.post(path, &request).await
    }

    /// Says what the engine's own events tell of chunks.
    pub async fn bind(&self, request: &BindRequest) -> Result<Count, ClientError> {
        self.post("/v1/bind", request).await
    }

    /// Which of these chunks came into the node's memory and onto its disks, or left them.
    pub async fn events(&self, request: &EventsRequest) -> Result<EventsAnswer, ClientError> {
        let given = Duration::from_millis(request.wait_ms);
        self.post_for(given, "/v1/events", request).await
    }

    /// Waits until all committed chunks are stored. Refused with code `not_flushed` when the time is over, and with
    /// `dropped` when chunks were dropped since the daemon's start.
    pub async fn flush(&self, deadline_ms: Option<u64>) -> Result<Flushed, ClientError> {
        self.flush_but(deadline_ms, 0).await
    }

    /// The same for a caller that knows of `dropped` dropped chunks: refused if the number differs by now.
    pub async fn flush_but(&self, deadline_ms: Option<u64>, dropped: u64) -> Result<Flushed, ClientError> {
        let given = deadline_ms.map_or(FLUSH_MAX, Duration::from_millis);
        let request = FlushRequest { deadline_ms, dropped };
        self.post_for(given, "/v1/flush", &request).await
    }

    /// The node's status as JSON, since its fields grow with every version.
    pub async fn status(&self) -> Result<serde_json::Value, ClientError> {
        let (headers, answer) = self
            .call(Method::GET, "/v1/status", JSON, Bytes::new(), JSON)
            .await?;
        parse(&headers, &answer)
    }

    /// Any GET, such as `/metrics`.
    pub async fn get(&self, path: &str) -> Result<Bytes, ClientError> {
        let (_, answer) = self.call(Method::GET, path, JSON, Bytes::new(), JSON).await?;
        Ok(answer)
    }

    pub async fn delete(&self, path: &str) -> Result<(), ClientError> {
        self.call(Method::DELETE, path, JSON, Bytes::new(), JSON)
            .await
            .map(drop)
    }

    /// A call by its path, JSON both ways.
    pub async fn post<T: DeserializeOwned>(
        &self,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T, ClientError> {
        self.post_for(Duration::ZERO, path, request).await
    }

    /// A call that gives the node `given` to answer.
    async fn post_for<T: DeserializeOwned>(
        &self,
        given: Duration,
        path: &str,
        request: &impl Serialize,
    ) -> Result<T, ClientError> {
        let call = self.call_unlimited(Method::POST, path, JSON, to_body(request)?, JSON);
        let (headers, answer) = in_time(given.saturating_add(self.0.patience), call).await?;
        parse(&headers, &answer)
    }

    async fn call(
        &self,
        method: Method,
        path: &str,
        kind: HeaderValue,
        body: Bytes,
        accept: HeaderValue,
    ) -> Result<(HeaderMap, Bytes), ClientError> {
        let call = self.call_unlimited(method, path, kind, body, accept);
        in_time(self.0.patience, call).await
    }

    async fn call_unlimited(
        &self,
        method: Method,
        path: &str,
        kind: HeaderValue,
        body: Bytes,
        accept: HeaderValue,
    ) -> Result<(HeaderMap, Bytes), ClientError> {
        let request = self.request(&method, path, &kind, body, &accept)?;
        let call = async |connection: &mut ApiConnection, request| connection.call(request).await;
        let (connection, (status, headers, body)) = self.connected(request, call).await?;
        if connection.is_open() {
            self.kept().push(connection);
        }
        check(status, &headers, &body)?;
        Ok((headers, body))
    }

    fn request(
        &self,
        method: &Method,
        path: &str,
        kind: &HeaderValue,
        body: Bytes,
        accept: &HeaderValue,
    ) -> Result<Request<Full<Bytes>>, ClientError> {
        let mut request = Request::builder()
            .method(method)
            .uri(path)
            .header(HOST, &self.0.host)
            .header(USER_AGENT, version::USER_AGENT)
            .header(CONTENT_TYPE, kind)
            .header(ACCEPT, accept);
        if let Some(token) = &self.0.token {
            request = request.header(AUTHORIZATION, token);
        }
        if let Ok(parent) = TRACEPARENT.try_with(Clone::clone) {
            request = request.header("traceparent", parent);
        }
        let request = request.body(Full::new(body));
        request.map_err(|error| ClientError::Answer(error.to_string()))
    }

    /// Makes a call on a kept connection, or else on a new one.
    async fn connected<T>(
        &self,
        request: Request<Full<Bytes>>,
        call: impl AsyncFn(&mut ApiConnection, Request<Full<Bytes>>) -> Result<T, Unanswered>,
    ) -> Result<(ApiConnection, T), ClientError> {
        let kept = self.kept().pop();
        if let Some(mut connection) = kept {
            match call(&mut connection, request.clone()).await {
                Ok(answer) => return Ok((connection, answer)),
                Err(failed) if failed.unsent => {}
                Err(failed) => return Err(failed.error.into()),
            }
        }
        let mut connection = ApiConnection::open(&self.0.target, self.0.owner).await?;
        match call(&mut connection, request).await {
            Ok(answer) => Ok((connection, answer)),
            Err(failed) => Err(failed.error.into()),
        }
    }

    fn kept(&self) -> std::sync::MutexGuard<'_, Vec<ApiConnection>> {
        self.0.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

tokio::task_local! {
    static TRACEPARENT: HeaderValue;
}

/// The same future, whose calls are parts of the trace that `traceparent` names, as W3C has it. What is no header is
/// left out: a trace is never worth a call.
pub fn traced<F: Future>(traceparent: Option<&str>, calls: F) -> impl Future<Output = F::Output> {
    match traceparent.and_then(|parent| HeaderValue::from_str(parent).ok()) {
        Some(parent) => Either::Left(TRACEPARENT.scope(parent, calls)),
        None => Either::Right(calls),
    }
}

async fn in_time<T>(
    time: Duration,
    answer: impl Future<Output = Result<T, ClientError>>,
) -> Result<T, ClientError> {
    let answer = tokio::time::timeout(time, answer).await;
    answer.unwrap_or(Err(ClientError::Late(time)))
}

fn check(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Result<(), ClientError> {
    match status.is_success() {
        true => Ok(()),
        false => Err(match serde_json::from_slice::<Problem>(body) {
            Ok(problem) => version::refused(headers, problem),
            Err(_) => version::not_understood(headers, format!("status {status}, and no problem with it")),
        }),
    }
}

fn to_body(request: &impl Serialize) -> Result<Bytes, ClientError> {
    let text = serde_json::to_vec(request).map_err(|error| ClientError::Answer(error.to_string()))?;
    Ok(text.into())
}

fn parse<T: DeserializeOwned>(headers: &HeaderMap, body: &[u8]) -> Result<T, ClientError> {
    serde_json::from_slice(body).map_err(|error| version::not_understood(headers, error))
}
