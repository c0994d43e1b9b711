//! Other nodes' memories, asked before S3. `docs/PEERS.md` describes it for operators.
//!
//! Mechanism: DNS or the operator names the members. Each chunk has one *owner* among them, by rendezvous hashing, and a
//! node that lacks a chunk asks its owner alone. The owner answers from memory, or from a fetch that is under way. A chunk
//! that is asked for twice within `[peers] hot` is worth a fetch of the owner's own, which then answers all. For anything
//! else the answer is 503: use S3. So S3 sends a chunk that all nodes want at once about twice, and a chunk that one node
//! wants costs one small request.
//!
//! The bytes are the object's, header and planes, and are verified like those from S3. No node has to be there, and views
//! may differ: two owners of a chunk fetch it twice, and S3 serves whatever no peer does. A peer that is slow, gone or
//! sends wrong bytes is left alone for a while.
//!
//! No circle of nodes can wait for each other: a node never waits for a peer on behalf of a peer.
//!
//! Not here: what a node answers to a peer (`gateway/for_peer.rs`, `node/api/peers.rs`).

mod asking;
mod budget;
mod holders;
mod hot;
mod members;
mod rendezvous;
#[cfg(test)]
mod tests;
mod tls;
mod transport;

use std::hash::BuildHasher;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use dashmap::DashMap;
use foldhash::fast::FixedState;
use tokio::time::Instant;

pub use self::asking::{Asked, Asking, HOLDER_HEADER, NODE_HEADER, PORT_HEADER};
pub use self::budget::{ServeBudget, Serving};
pub use self::holders::TOLD_MAX;
use self::holders::{Holders, Question};
use self::hot::HotChunks;
use self::members::Members;
pub use self::members::{Member, MemberState};
pub use self::tls::{Identity, PeerTls, PeerTlsError};
use self::transport::Http;
pub use self::transport::{PeerCall, Said, Transport};
use crate::format::ChunkId;
use crate::metrics::Counts;
use crate::s3::dns::{AddressSource, DnsOptions, Resolver};
use crate::s3::fanout::{BreakerOptions, EndpointOptions, WindowOptions};
use crate::s3::net::{NetClient, NetOptions, client_config};

/// Who the peers are, and the limits of what is asked of them and answered to them.
#[derive(Debug, Clone)]
pub struct PeerOptions {
    pub members: Vec<AddressSource>,
    /// Where this node is asked: it owns what the member there owns.
    pub listen: SocketAddr,
    pub token_file: Option<PathBuf>,
    pub tls: Option<PeerTls>,
    /// The longest time until an answer begins, connecting included.
    pub first_byte: Duration,
    /// The longest time without a byte of an answer that has begun.
    pub stall: Duration,
    pub connections_max: usize,
    pub idle_timeout: Duration,
    pub breaker: BreakerOptions,
    /// Members that are asked for a chunk, one after the other, where they don't answer.
    pub owners: u32,
    /// Two askers within this time make a chunk hot.
    pub hot: Duration,
    /// Chunks whose last asker is remembered, and as many whose holder is.
    pub hot_chunks: usize,
    /// How long a node counts as having a chunk.
    pub holder_ttl: Duration,
    /// How long none does after a load that did not get it.
    pub denied_ttl: Duration,
    /// Bytes of slots that answers to peers may hold.
    pub serve_bytes: usize,
    pub dns: DnsOptions,
}

/// Why peers can't be used.
#[derive(Debug, thiserror::Error)]
pub enum PeerError {
    #[error("can't read [peers] token_file {}: {reason}", path.display())]
    Token { path: PathBuf, reason: String },
    #[error(transparent)]
    Tls(#[from] PeerTlsError),
}

/// See the [module](self).
pub struct Peers {
    options: PeerOptions,
    members: Members,
    transport: Arc<dyn Transport>,
    /// Tells this node from others, also where it does not know its own address.
    id: String,
    token: RwLock<Option<String>>,
    identity: Option<Arc<Identity>>,
    /// Chunks that a peer is being asked for.
    asking: DashMap<ChunkId, usize>,
    /// Chunks that lookups ask about just now.
    questions: DashMap<ChunkId, Question>,
    hot: HotChunks,
    holders: Holders,
    pub budget: ServeBudget,
    pub figures: PeerFigures,
}

/// What became of asks and answers, for `/metrics`.
pub struct PeerFigures {
    /// By [`Asked`].
    pub asked: Counts,
    /// Of chunks that came from peers.
    pub asked_bytes: AtomicU64,
    /// Small requests, by [`Asked`]: who has a chunk, and which ones this node has.
    pub questions: Counts,
    /// By [`ANSWERS`].
    pub answered: Counts,
    pub answered_bytes: AtomicU64,
}

/// The words of answers to peers.
pub const ANSWERS: &[&str] = &["memory", "arriving", "fetched", "use_s3", "full"];

impl Peers {
    /// Needs a tokio runtime.
    pub fn new(options: PeerOptions) -> Result<Arc<Self>, PeerError> {
        let identity = options.tls.clone().map(Identity::new).transpose()?.map(Arc::new);
        let dns = Resolver::new(options.dns.clone());
        let transport = Http {
            client: NetClient::new(net_options(&options, identity.as_ref(), &dns)?),
            is_tls: identity.is_some(),
            timeout: options.first_byte,
        };
        Self::over(options, Arc::new(transport), identity, &dns)
    }

    /// The same over a transport of another kind.
    pub fn over(
        options: PeerOptions,
        transport: Arc<dyn Transport>,
        identity: Option<Arc<Identity>>,
        dns: &Resolver,
    ) -> Result<Arc<Self>, PeerError> {
        let (holders, committed) = Holders::new(&options);
        let peers = Self {
            members: Members::new(dns, &options, &transport),
            transport,
            id: format!("{:016x}{:016x}", fastrand::u64(..), fastrand::u64(..)),
            token: RwLock::new(None),
            identity,
            asking: DashMap::new(),
            questions: DashMap::new(),
            hot: HotChunks::new(options.hot, options.hot_chunks),
            holders,
            budget: ServeBudget::new(options.serve_bytes),
            figures: PeerFigures {
                asked: Counts::new(Asked::WORDS),
                asked_bytes: AtomicU64::new(0),
                questions: Counts::new(Asked::WORDS),
                answered: Counts::new(ANSWERS),
                answered_bytes: AtomicU64::new(0),
            },
            options,
        };
        peers.read_token()?;
        let peers = Arc::new(peers);
        tokio::spawn(Self::tell(Arc::downgrade(&peers), committed));
        Ok(peers)
    }

    fn read_token(&self) -> Result<bool, PeerError> {
        let Some(path) = &self.options.token_file else {
            return Ok(false);
        };
        let error = |reason: String| PeerError::Token {
            path: path.clone(),
            reason,
        };
        let text = std::fs::read_to_string(path).map_err(|cause| error(cause.to_string()))?;
        let text = text.trim();
        if text.is_empty() || text.bytes().any(|byte| !byte.is_ascii_graphic()) {
            let what = "it must hold one line of printable ASCII without spaces, the same on all nodes";
            return Err(error(what.to_owned()));
        }
        *self.token.write().unwrap_or_else(PoisonError::into_inner) = Some(text.to_owned());
        Ok(true)
    }

    /// The fleet's token. None: certificates prove who a peer is.
    pub fn token(&self) -> Option<String> {
        self.token.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// This node's name among peers, of this life.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// What this node shows to others, where they want a certificate.
    pub fn identity(&self) -> Option<&Arc<Identity>> {
        self.identity.as_ref()
    }

    /// Reads the token and the certificate again. Answers the settings that are there.
    pub fn read_again(&self) -> Result<Vec<&'static str>, PeerError> {
        let mut read = Vec::new();
        if self.read_token()? {
            read.push("peers.token_file");
        }
        if let Some(identity) = &self.identity {
            identity.read_again()?;
            read.push("peers.cert_file");
        }
        Ok(read)
    }

    /// All members, as this node sees them; itself among them.
    pub fn members(&self) -> Vec<Arc<Member>> {
        self.members.all().to_vec()
    }

    /// Whether another node asked for a chunk shortly before. Remembers that it is asked for now. `asker`: the other node's
    /// [`id`](Self::id).
    pub fn is_hot(&self, chunk: ChunkId, asker: Option<&str>) -> bool {
        let asker = asker.map(|id| FixedState::default().hash_one(id));
        self.hot.asked(chunk, asker, Instant::now())
    }
}

fn net_options(
    options: &PeerOptions,
    identity: Option<&Arc<Identity>>,
    dns: &Resolver,
) -> Result<NetOptions, PeerError> {
    let no_window = WindowOptions {
        start: usize::MAX,
        min: usize::MAX,
        max: usize::MAX,
    };
    Ok(NetOptions {
        tls: match identity {
            Some(identity) => identity.client()?,
            None => client_config(None).map_err(PeerTlsError::from)?,
        },
        connect_timeout: options.first_byte,
        stall_timeout: options.stall,
        idle_timeout: options.idle_timeout,
        connections_max: options.connections_max,
        // Refusals alone.
        answer_bytes_max: 64 << 10,
        endpoints: EndpointOptions {
            window: no_window,
            breaker: options.breaker,
            hedge_min: options.stall,
            // Each member is an origin of its own.
            subset: 1,
        },
        dns: dns.clone(),
        places: None,
        server_name: options.tls.as_ref().map(|tls| tls.name.clone()),
    })
}
