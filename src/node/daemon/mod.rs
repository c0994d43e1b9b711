//! `kvgate serve`: starts a node from a configuration, serves it and ends it.
//!
//! The daemon starts without S3: it serves the chunks on the disks at once, and asks S3 for its abilities until S3
//! answers. On SIGTERM or SIGINT it takes no new work, stores what is left within `[store] drain`, and reports the
//! chunks that it dropped. SIGHUP reloads the settings that can be reloaded.

mod gc;
mod notify;
mod options;

pub use options::{arena as arena_options, has_room, peers as peer_options};

use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::watch;
use tokio::time::Instant;

use self::notify::Notify;
use crate::arena::{Arena, ArenaError};
use crate::cache::episode::Episode;
use crate::cache::gateway::{Gateway, GatewayOptions};
use crate::cache::peers::{PeerError, Peers};
use crate::cache::tier::{Disk, DiskError};
use crate::config::{Config, KeysError};
use crate::node::Node;
use crate::node::api::{Api, ListenError, PeerServer, Reload, Server, keep_history};
use crate::s3::fanout::BreakerPhase;
use crate::s3::object::{Capabilities, ErrorKind, ObjectStore};

/// Why the daemon can't start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error(transparent)]
    Disk(#[from] DiskError),
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("{0}")]
    Token(String),
    #[error(transparent)]
    Keys(#[from] KeysError),
    #[error(transparent)]
    Peers(#[from] PeerError),
    #[error("can't start: {0}")]
    System(String),
}

/// A node with its listeners.
pub struct Daemon {
    config: Config,
    node: Node,
    api: Arc<Api>,
    server: Server,
    peer_server: Option<PeerServer>,
    store: Arc<dyn ObjectStore>,
    signals: Signals,
}

/// The chunks that were not stored when the daemon ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ended {
    pub dropped: u64,
}

/// Shortest and longest pause between attempts to reach S3 at the start.
const S3_PAUSE: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(10));
/// How often an address that was left alone is tried while no engine asks for anything.
const TRY: Duration = Duration::from_secs(1);
/// How often expired chunks are looked for.
const EXPIRE: Duration = Duration::from_secs(30);
/// Time for calls under way, after the drain.
const CALLS_GRACE: Duration = Duration::from_secs(1);

impl Daemon {
    /// Opens disks, arena and sockets. Asks S3 nothing yet.
    pub async fn start(
        config: &Config,
        store: Arc<dyn ObjectStore>,
        reload: Reload,
    ) -> Result<Self, StartError> {
        raise_file_limit();
        let gateway = GatewayOptions::with_keys(config).await?;
        // First, so that two daemons don't work on the same files.
        let server = Server::bind(&options::listening(config)).await?;
        let disk = match options::disk(config) {
            None => None,
            Some(disk) => {
                let opened = tokio::task::spawn_blocking(move || Disk::open(&disk)).await;
                Some(opened.map_err(|error| StartError::System(error.to_string()))??)
            }
        };
        let arena = Arena::new(&options::arena(config))?;
        let peers = options::peers(config).map(Peers::new).transpose()?;
        let tiers = options::tiers(config, disk, peers.clone());
        let gateway = Gateway::with_tiers(Arc::clone(&store), arena, gateway, tiers);
        let node = Node::new(gateway, options::node(config));
        let peer_server = match peers {
            None => None,
            Some(peers) => {
                let (listen, connections) = (config.peers.listen, config.peers.connections as usize);
                let timeout = config.api.timeout;
                Some(PeerServer::bind(listen, node.clone(), peers, connections, timeout).await?)
            }
        };
        let api = Api::new(node.clone(), options::api(config), reload).map_err(StartError::Token)?;
        Ok(Self {
            peer_server,
            config: config.clone(),
            node,
            api,
            server,
            store,
            // Before anyone is told that the daemon serves: a SIGHUP would end a process that doesn't take it yet.
            signals: Signals::new().map_err(|error| StartError::System(error.to_string()))?,
        })
    }

    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The TCP address, with the port that the system chose.
    pub fn address(&self) -> Option<std::net::SocketAddr> {
        self.server.address()
    }

    /// Serves until `stop`, or a signal; then drains.
    pub async fn run(self, stop: impl Future<Output = ()>) -> Result<Ended, StartError> {
        let Self {
            config,
            node,
            api,
            server,
            peer_server,
            store,
            signals,
        } = self;
        let notify = Arc::new(Notify::from_env());
        let gc = tokio::spawn(gc::collect(config.clone(), node.clone(), Arc::clone(&store)));
        let keys = GatewayOptions::from(&config).keys;
        let tries = tokio::spawn(try_addresses(
            node.clone(),
            Arc::clone(&store),
            keys.own("probe-address"),
        ));
        let reach = tokio::spawn(reach(config.clone(), node.clone(), store, Arc::clone(&notify)));
        let watchdog = tokio::spawn(watchdog(Arc::clone(&notify)));
        let expire = tokio::spawn(expire(node.clone()));
        let history = tokio::spawn(keep_history(Arc::clone(&api)));
        let backlog = tokio::spawn(node.gateway().send_more());
        let disks = tokio::spawn({
            let gateway = node.gateway().clone();
            async move { gateway.retry_disks().await }
        });
        let refresh = tokio::spawn({
            let (gateway, options) = (node.gateway().clone(), options::refresh(&config));
            async move {
                if let Some(options) = options {
                    gateway.refresh_used(options).await;
                }
            }
        });
        if config.api.degraded {
            notify.tell("READY=1");
        }
        let (end, ended) = watch::channel(false);
        let peers = peer_server.map(|server| tokio::spawn(server.serve(ended.clone())));
        let serving = tokio::spawn(server.serve(Arc::clone(&api), ended, CALLS_GRACE));
        signals.wait(&api, stop).await;
        notify.tell("STOPPING=1");
        drain(&node, config.store.drain).await;
        end.send_replace(true);
        // A panic of a connection's task ends that task only.
        let _ = serving.await;
        if let Some(peers) = peers {
            let _ = peers.await;
        }
        // Stores chunks that a rank had reserved before and committed in the last moment.
        let declined = node.flush(Instant::now() + CALLS_GRACE).await.declined;
        api.end_traces(CALLS_GRACE).await;
        let (dropped, kept) = node.gateway().give_up();
        backlog.abort();
        disks.abort();
        refresh.abort();
        gc.abort();
        tell(dropped, kept, declined, config.store.drain);
        // Tasks that still have the arena would keep its file.
        node.gateway().arena().unlink();
        reach.abort();
        watchdog.abort();
        expire.abort();
        history.abort();
        tries.abort();
        Ok(Ended { dropped })
    }
}

/// The signals that a daemon takes, from the moment that this is made.
struct Signals {
    term: Signal,
    int: Signal,
    hup: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for the signal that ends the daemon, and reloads on SIGHUP meanwhile.
    async fn wait(mut self, api: &Api, stop: impl Future<Output = ()>) {
        tokio::pin!(stop);
        loop {
            tokio::select! {
                () = &mut stop => return,
                _ = self.term.recv() => return,
                _ = self.int.recv() => return,
                _ = self.hup.recv() => drop(api.reload()),
            }
        }
    }
}

/// Stores the chunks that are left, and those that come meanwhile.
async fn drain(node: &Node, time: Duration) {
    node.drain();
    let deadline = Instant::now() + time;
    let waits = || {
        let behind = node.gateway().tier_stats().write_behind;
        behind.waiting_chunks + behind.backlog_chunks > 0
    };
    while waits() && Instant::now() < deadline {
        node.flush(deadline).await;
    }
}

fn tell(dropped: u64, kept: u64, declined: u64, time: Duration) {
    if dropped + kept == 0 {
        if declined == 0 {
            tracing::info!("everything committed is stored");
        } else {
            tracing::info!(
                declined,
                "everything committed is stored, but for what [store] admit declined"
            );
        }
    }
    if kept > 0 {
        tracing::warn!(
            chunks = kept,
            "chunks are on the disks, and were not stored within [store] drain, {time:?}: the next start sends them"
        );
    }
    if dropped > 0 {
        tracing::error!(
            dropped,
            "chunks were not stored within [store] drain, {time:?}: they are lost"
        );
    }
}

/// Asks S3 for its abilities until it answers.
async fn reach(config: Config, node: Node, store: Arc<dyn ObjectStore>, notify: Arc<Notify>) {
    let options = GatewayOptions::from(&config);
    let mut pause = S3_PAUSE.0;
    let silent = Episode::new("S3 does not answer; serving what is here", config.log.repeat);
    let full = Episode::new(
        "S3 answers and takes no chunks: loads work, stores wait",
        config.log.repeat,
    );
    loop {
        let deadline = Instant::now() + 2 * config.s3.request_timeout;
        let probe_key = options.keys.own(&format!("probe-{:016x}", fastrand::u64(..)));
        let found = async {
            store.check_bucket(deadline).await?;
            Capabilities::probe(&*store, &probe_key, config.s3.probe, deadline).await
        };
        match found.await {
            Ok(capabilities) => {
                node.gateway().found_capabilities(capabilities);
                node.s3_answered();
                tracing::info!(?capabilities, "S3 answers");
                notify.tell("READY=1");
                return;
            }
            // What the server can do is tried when it takes PUTs again.
            Err(error) if error.kind == ErrorKind::Quota => {
                full.tell(&error);
                node.s3_answered();
                notify.tell("READY=1");
            }
            Err(error) => silent.tell(&error),
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(S3_PAUSE.1);
    }
}

/// Asks for an object that is not there while an address waits for a request that tries it. Without engines there would
/// be none, and the address would stay out.
async fn try_addresses(node: Node, store: Arc<dyn ObjectStore>, key: String) {
    loop {
        tokio::time::sleep(TRY).await;
        let endpoints = node.gateway().endpoints();
        if endpoints.iter().any(|one| one.breaker == BreakerPhase::HalfOpen) {
            let asked = store.head(&key, Instant::now() + CALLS_GRACE).await;
            tracing::debug!(?asked, "an address that was left alone is tried");
        }
    }
}

async fn watchdog(notify: Arc<Notify>) {
    let Some(pause) = Notify::watchdog() else { return };
    loop {
        notify.tell("WATCHDOG=1");
        tokio::time::sleep(pause).await;
    }
}

async fn expire(node: Node) {
    loop {
        tokio::time::sleep(EXPIRE).await;
        node.gateway().expire().await;
    }
}

/// Raises the limit of open files: every connection is a file. A failure shows when files run out.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let _ = setrlimit(
        Resource::Nofile,
        Rlimit {
            current: limit.maximum,
            maximum: limit.maximum,
        },
    );
}
