//! The listener for other nodes, which has nothing else, and the API's listeners don't have it:
//!
//! - `GET /v1/peer/{space}/{hash}`: a chunk's object, from memory.
//! - `HEAD`: whether it is here, or who has it.
//! - `POST /v1/peer/{space}`: chunks that the caller has, and that are owned here.
//!
//! 503 says "use S3": the chunk is not here, or there is no room to send it. A chunk that is on its way is answered at once,
//! and its bytes follow when they are verified; if they don't come, the connection closes.

use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures::stream;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{
    ACCEPT_RANGES, AUTHORIZATION, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderValue, IF_MATCH,
    RANGE,
};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;

use super::body::{self, OCTETS};
use super::chunk::range;
use super::connections::{Connected, Connections};
use super::impatient::Impatient;
use super::problem::ApiProblem;
use super::server::{ListenError, WhileSent, stopped};
use crate::arena::Slot;
use crate::cache::gateway::{Flight, ForPeer, LoadedChunk};
use crate::cache::peers::{HOLDER_HEADER, Identity, NODE_HEADER, PORT_HEADER, Peers, Serving, TOLD_MAX};
use crate::format::{ChunkHash, ChunkId, Space, SpaceKey};
use crate::node::Node;

type PeerReply = Response<BoxBody<Bytes, io::Error>>;

/// Bytes of a hash in a message.
const HASH_LEN: usize = 32;
/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// Pause after a failed accept, such as for want of file descriptors.
const PAUSE: Duration = Duration::from_millis(50);

/// The listener, bound but not yet served.
pub struct PeerServer {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
}

struct Shared {
    node: Node,
    peers: Arc<Peers>,
    tls: Option<TlsAcceptor>,
    connections: Arc<Connections>,
    timeout: Duration,
}

impl PeerServer {
    /// `timeout`: for a request to come, and for each part of an answer to be taken.
    pub async fn bind(
        listen: SocketAddr,
        node: Node,
        peers: Arc<Peers>,
        connections: usize,
        timeout: Duration,
    ) -> Result<Self, ListenError> {
        let tls = peers.identity().map(Identity::server).transpose();
        let tls = tls.map_err(ListenError::PeerTls)?;
        let fail = |source| ListenError::Peers {
            address: listen,
            source,
        };
        let listener = TcpListener::bind(listen).await.map_err(fail)?;
        let address = listener.local_addr().map_err(fail)?;
        let shared = Shared {
            node,
            peers,
            tls: tls.map(TlsAcceptor::from),
            connections: Connections::new(connections),
            timeout,
        };
        Ok(Self {
            listener,
            address,
            shared: Arc::new(shared),
        })
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves until `stop`. Answers under way are cut off then: whoever waits for one goes to S3.
    pub async fn serve(self, mut stop: watch::Receiver<bool>) {
        let mut calls = JoinSet::new();
        loop {
            while calls.try_join_next().is_some() {}
            tokio::select! {
                accepted = self.listener.accept() => match accepted {
                    Ok((stream, from)) => {
                        let _ = stream.set_nodelay(true);
                        // Without one, all others have calls under way, and the connection is closed.
                        if let Some(connected) = self.shared.connections.open() {
                            calls.spawn(Arc::clone(&self.shared).connection(from.ip(), stream, connected));
                        }
                    }
                    Err(error) => {
                        tracing::debug!(%error, "a peer's connection can't be accepted");
                        tokio::time::sleep(PAUSE).await;
                    }
                },
                () = stopped(&mut stop) => return,
            }
        }
    }
}

impl Shared {
    async fn connection(self: Arc<Self>, from: IpAddr, stream: TcpStream, connected: Connected) {
        let Some(tls) = &self.tls else {
            return Arc::clone(&self).requests(from, stream, connected).await;
        };
        // A peer without a certificate of the fleet ends here.
        let accepted = tokio::select! {
            accepted = tokio::time::timeout(self.timeout, tls.accept(stream)) => accepted,
            () = connected.must_close() => return,
        };
        match accepted {
            Ok(Ok(stream)) => Arc::clone(&self).requests(from, stream, connected).await,
            Ok(Err(error)) => tracing::debug!(%error, "a peer's TLS was refused"),
            Err(_) => {}
        }
    }

    async fn requests<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
        self: Arc<Self>,
        from: IpAddr,
        stream: S,
        connected: Connected,
    ) {
        let timeout = self.timeout;
        let stream = Impatient::new(stream, timeout, Arc::new(AtomicBool::new(false)));
        let connected = Arc::new(connected);
        let of = Arc::clone(&connected);
        let service = service_fn(move |request| {
            let (shared, busy) = (Arc::clone(&self), of.busy());
            async move {
                let answer = shared.answer(from, request).await;
                let answer = answer.unwrap_or_else(|problem| refusal(&problem));
                Ok::<_, Infallible>(answer.map(|body| WhileSent::new(body, busy)))
            }
        });
        let serve = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(timeout)
            .max_buf_size(HEAD_BYTES_MAX)
            .serve_connection(TokioIo::new(stream), service);
        tokio::select! {
            // The end of a connection is the peer's business.
            _ = serve => {}
            () = connected.must_close() => {}
        }
    }

    async fn answer(&self, from: IpAddr, request: Request<Incoming>) -> Result<PeerReply, ApiProblem> {
        self.check_token(&request)?;
        if request
            .headers()
            .get(NODE_HEADER)
            .is_some_and(|id| id == self.peers.id())
        {
            let (status, told) = (StatusCode::MISDIRECTED_REQUEST, "this node asked itself");
            return Err(ApiProblem::new(status, "own_node", told));
        }
        let path = request.uri().path().to_owned();
        let segments: Vec<&str> = path.split('/').skip(1).collect();
        let space_of =
            |name: &str| SpaceKey::from_hex(name).ok_or_else(|| ApiProblem::bad("a space is 32 hex digits"));
        match (request.method().as_str(), segments.as_slice()) {
            ("GET", ["v1", "peer", space, hash]) => {
                let key = (space_of(space)?, hash.parse().map_err(ApiProblem::bad)?);
                self.chunk(key, request.headers())
            }
            ("HEAD", ["v1", "peer", space, hash]) => {
                let key = (space_of(space)?, hash.parse().map_err(ApiProblem::bad)?);
                Ok(self.whether(key))
            }
            ("POST", ["v1", "peer", space]) => self.hears(space_of(space)?, from, request).await,
            _ => Err(ApiProblem::not_found(
                "peers are answered GET and HEAD /v1/peer/{space}/{hash}, and POST /v1/peer/{space}",
            )),
        }
    }

    /// Notes the chunks that another node has.
    async fn hears(
        &self,
        space: SpaceKey,
        from: IpAddr,
        request: Request<Incoming>,
    ) -> Result<PeerReply, ApiProblem> {
        let port = request.headers().get(PORT_HEADER);
        let port = port
            .and_then(|port| port.to_str().ok())
            .and_then(|port| port.parse().ok())
            .ok_or_else(|| {
                ApiProblem::bad(format!("the header {PORT_HEADER} says where the caller is asked"))
            })?;
        let body = body::read(request, TOLD_MAX * HASH_LEN, self.timeout).await?;
        let hashes = body
            .chunks_exact(HASH_LEN)
            .filter_map(|hash| hash.try_into().ok());
        let from = SocketAddr::new(from.to_canonical(), port);
        self.peers.hears_of(from, space, hashes.map(ChunkHash));
        Ok(empty(StatusCode::NO_CONTENT))
    }

    /// Whether a chunk is here, or who has it.
    fn whether(&self, key: ChunkId) -> PeerReply {
        let space = self.node.space(key.0).ok();
        let is_here = |space: &Space| self.node.gateway().has_for_peer(space, &key.1);
        match space.as_ref().is_some_and(is_here) {
            true => empty(StatusCode::OK),
            false => self.pointed(empty(StatusCode::SERVICE_UNAVAILABLE), &key),
        }
    }

    /// An answer without the chunk says who has it, as far as is known.
    fn pointed(&self, mut reply: PeerReply, key: &ChunkId) -> PeerReply {
        if let Some(holder) = self.peers.holder(key)
            && let Ok(holder) = HeaderValue::from_str(&holder.to_string())
        {
            reply.headers_mut().insert(HOLDER_HEADER, holder);
        }
        reply
    }

    fn chunk(&self, key: ChunkId, headers: &HeaderMap) -> Result<PeerReply, ApiProblem> {
        let hash = key.1;
        // A tenant whose key is not here, or was taken away, is not served.
        let space = match self.node.space(key.0) {
            Ok(space) => space,
            Err(error) => return Ok(self.use_s3(&error.to_string(), &key)),
        };
        let len = space.layout().object_len();
        let wanted = match headers.get(RANGE) {
            Some(value) => Some(range(value, len)?),
            None => None,
        };
        let asker = headers.get(NODE_HEADER).and_then(|id| id.to_str().ok());
        let answer = self.node.gateway().for_peer(&space, &hash, asker);
        let (word, etag, body) = match answer {
            None | Some(ForPeer::UseS3) => {
                return Ok(self.use_s3("the chunk is not in this node's memory", &key));
            }
            Some(ForPeer::Full) => {
                self.peers.figures.answered.add("full", 1);
                let told = "there is no room to send the chunk now ([peers] budget): use S3";
                return Err(ApiProblem::new(StatusCode::SERVICE_UNAVAILABLE, "use_s3", told));
            }
            Some(ForPeer::Memory(chunk, serving)) => {
                let etag = etag_of(&chunk);
                let sent = Sent::of(&chunk, wanted.clone(), serving);
                ("memory", etag, Full::new(sent).map_err(infallible).boxed())
            }
            // Which bytes it will have is not known yet: the ETag is the chunk's, and weak.
            Some(ForPeer::Arriving(flight, serving)) => {
                ("arriving", weak(&hash), later(flight, wanted.clone(), serving))
            }
            Some(ForPeer::Fetched(flight, serving)) => {
                ("fetched", weak(&hash), later(flight, wanted.clone(), serving))
            }
        };
        if headers
            .get(IF_MATCH)
            .is_some_and(|wanted| wanted.as_bytes() != etag.as_bytes())
        {
            return Err(ApiProblem::new(
                StatusCode::PRECONDITION_FAILED,
                "other_version",
                "the chunk has another ETag here: use S3",
            ));
        }
        let figures = &self.peers.figures;
        figures.answered.add(word, 1);
        let of = wanted.clone().unwrap_or(0..len);
        figures
            .answered_bytes
            .fetch_add(of.len() as u64, Ordering::Relaxed);
        let mut reply = Response::new(body);
        let headers = reply.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static(OCTETS));
        headers.insert(ACCEPT_RANGES, HeaderValue::from_static("bytes"));
        headers.insert(CONTENT_LENGTH, HeaderValue::from(of.len()));
        let content_range = format!("bytes {}-{}/{len}", of.start, of.end.saturating_sub(1));
        for (name, value, is_there) in [
            (ETAG, etag, true),
            (CONTENT_RANGE, content_range, wanted.is_some()),
        ] {
            if is_there && let Ok(value) = HeaderValue::from_str(&value) {
                headers.insert(name, value);
            }
        }
        if wanted.is_some() {
            *reply.status_mut() = StatusCode::PARTIAL_CONTENT;
        }
        Ok(reply)
    }

    fn check_token(&self, request: &Request<Incoming>) -> Result<(), ApiProblem> {
        let Some(token) = self.peers.token() else {
            return Ok(());
        };
        let given = request.headers().get(AUTHORIZATION).map(HeaderValue::as_bytes);
        let given = given.and_then(|given| given.strip_prefix(b"Bearer "));
        // Digests, so the time taken says nothing of the token.
        match given.is_some_and(|given| blake3::hash(given) == blake3::hash(token.as_bytes())) {
            true => Ok(()),
            false => Err(ApiProblem::new(
                StatusCode::UNAUTHORIZED,
                "wrong_token",
                "the fleet's token is another one here: [peers] token_file must be the same on all nodes",
            )),
        }
    }

    fn use_s3(&self, why: &str, key: &ChunkId) -> PeerReply {
        self.peers.figures.answered.add("use_s3", 1);
        let told = format!("{why}: use S3");
        let problem = ApiProblem::new(StatusCode::SERVICE_UNAVAILABLE, "use_s3", told);
        self.pointed(refusal(&problem), key)
    }
}

/// The bytes of a header say which bytes an object has.
fn etag_of(chunk: &LoadedChunk) -> String {
    let header_len = chunk.space().layout().header_len();
    let header = chunk.object().map(|object| blake3::hash(&object[..header_len]));
    format!(
        "\"{}\"",
        header.map_or_else(String::new, |hash| hash.to_hex()[..32].to_owned())
    )
}

fn weak(hash: &ChunkHash) -> String {
    format!("W/\"{hash}\"")
}

/// The body of a chunk that is on its way.
fn later(
    flight: Arc<Flight>,
    wanted: Option<Range<usize>>,
    serving: Arc<Serving>,
) -> BoxBody<Bytes, io::Error> {
    let body = stream::once(async move {
        match flight.outcome().await {
            Some(Ok(chunk)) if chunk.object().is_some() => Ok(Frame::data(Sent::of(&chunk, wanted, serving))),
            // Closes the connection, which says as much.
            _ => Err(io::Error::other("the chunk did not come")),
        }
    });
    BodyExt::boxed(StreamBody::new(body))
}

/// Bytes of an object, and their share of the budget until they are sent.
struct Sent {
    bytes: Slot,
    _serving: Arc<Serving>,
}

impl Sent {
    /// Of a chunk with its header.
    fn of(chunk: &LoadedChunk, wanted: Option<Range<usize>>, serving: Arc<Serving>) -> Bytes {
        let Some(object) = chunk.object() else {
            return Bytes::new();
        };
        let bytes = object.slice(wanted.unwrap_or(0..object.len()));
        Bytes::from_owner(Self {
            bytes,
            _serving: serving,
        })
    }
}

impl AsRef<[u8]> for Sent {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

fn refusal(problem: &ApiProblem) -> PeerReply {
    let text = serde_json::to_vec(&problem.wire()).unwrap_or_default();
    let mut reply = Response::new(Full::new(Bytes::from(text)).map_err(infallible).boxed());
    *reply.status_mut() = problem.status;
    let kind = HeaderValue::from_static("application/problem+json");
    reply.headers_mut().insert(CONTENT_TYPE, kind);
    reply
}

fn empty(status: StatusCode) -> PeerReply {
    let mut reply = Response::new(Full::new(Bytes::new()).map_err(infallible).boxed());
    *reply.status_mut() = status;
    reply
}

fn infallible(never: Infallible) -> io::Error {
    match never {}
}
