//! The fleet as this node sees it: the addresses behind the configured names, kept up to date in the background.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use futures::future::select_all;
use serde::Serialize;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::rendezvous::{score, seed};
use super::{Asked, PeerOptions};
use crate::format::ChunkHash;
use crate::s3::dns::{AddressSource, Resolved, Resolver};
use crate::s3::fanout::{BreakerPhase, EndpointBreaker};
use crate::s3::net::{NetClient, Origin};

/// A node that may be asked.
pub struct Member {
    pub address: SocketAddr,
    pub(super) origin: Origin,
    seed: u64,
    /// It is this very node: by its address, or as it has said itself.
    is_self: AtomicBool,
    breaker: Mutex<EndpointBreaker>,
    /// What became of the latest ask that was settled.
    latest: Mutex<Option<Asked>>,
}

/// A member as the node sees it, for the status.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct MemberState {
    pub address: SocketAddr,
    pub is_self: bool,
    /// It is asked; otherwise it is left alone, but for a try now and then.
    pub is_up: bool,
    /// What became of the latest ask.
    pub latest: Option<&'static str>,
}

impl Member {
    pub fn new(address: SocketAddr, options: &PeerOptions) -> Self {
        Self {
            address,
            origin: Origin {
                tls: options.tls.is_some(),
                host: address.ip().to_string(),
                port: address.port(),
            },
            seed: seed(address),
            is_self: AtomicBool::new(is_here(address, options.listen)),
            breaker: Mutex::new(EndpointBreaker::new(options.breaker)),
            latest: Mutex::default(),
        }
    }

    pub fn is_self(&self) -> bool {
        self.is_self.load(Ordering::Relaxed)
    }

    pub fn is_up(&self) -> bool {
        self.breaker().phase(Instant::now()) == BreakerPhase::Closed
    }

    pub fn state(&self) -> MemberState {
        let latest = *self.latest.lock().unwrap_or_else(PoisonError::into_inner);
        MemberState {
            address: self.address,
            is_self: self.is_self(),
            is_up: self.is_up(),
            latest: latest.map(Asked::word),
        }
    }

    pub(super) fn may_be_asked(&self) -> bool {
        self.is_self() || self.breaker().admits(Instant::now())
    }

    /// It is about to be asked something.
    pub(super) fn begin(self: &Arc<Self>) -> Attempt {
        let probe = self.breaker().begin(Instant::now());
        Attempt {
            member: Arc::clone(self),
            probe,
            settled: false,
        }
    }

    /// What became of a request decides whether it is asked again. `probe`: it was the breaker's.
    fn settle(&self, asked: Asked, probe: bool) {
        *self.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(asked);
        if asked == Asked::Own {
            self.is_self.store(true, Ordering::Relaxed);
        }
        match asked {
            Asked::Landed | Asked::UseS3 | Asked::Own => self.breaker().succeeded(),
            Asked::Slow | Asked::Failed | Asked::Refused | Asked::Wrong => {
                self.breaker().failed(probe, Instant::now());
            }
        }
    }

    pub(super) fn breaker(&self) -> MutexGuard<'_, EndpointBreaker> {
        // No panic can leave it half-changed.
        self.breaker.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request to a member, whose outcome decides on its breaker.
pub struct Attempt {
    pub member: Arc<Member>,
    probe: bool,
    settled: bool,
}

impl Attempt {
    pub fn settle(&mut self, asked: Asked) {
        self.settled = true;
        self.member.settle(asked, self.probe);
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if !self.settled && self.probe {
            self.member.breaker().probe_given_up(Instant::now());
        }
    }
}

/// Whether that is where this node listens.
fn is_here(address: SocketAddr, listen: SocketAddr) -> bool {
    match listen.ip().is_unspecified() {
        true => address.port() == listen.port() && is_of_this_machine(address.ip()),
        false => address == listen,
    }
}

/// A datagram to an own address would come from it; nothing is sent.
fn is_of_this_machine(ip: IpAddr) -> bool {
    let any: IpAddr = match ip {
        IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    let from = || {
        let socket = UdpSocket::bind((any, 0))?;
        socket.connect((ip, 9))?;
        socket.local_addr()
    };
    ip.is_loopback() || from().is_ok_and(|from| from.ip() == ip)
}

pub struct Members {
    all: Arc<RwLock<Arc<[Arc<Member>]>>>,
    follower: Option<AbortHandle>,
}

impl Members {
    /// Needs a tokio runtime.
    pub fn new(dns: &Resolver, options: &PeerOptions, http: &NetClient) -> Self {
        let all = Arc::default();
        let literal: BTreeSet<_> = options
            .members
            .iter()
            .filter_map(AddressSource::literal)
            .collect();
        let names = options.members.iter().filter(|one| one.literal().is_none());
        let watched: Vec<_> = names.map(|name| dns.watch(name)).collect();
        let mut follow = Follow {
            all: Arc::clone(&all),
            literal,
            watched,
            options: options.clone(),
            http: http.clone(),
        };
        follow.update();
        let follower = (!follow.watched.is_empty()).then(|| tokio::spawn(follow.run()).abort_handle());
        Self { all, follower }
    }

    pub fn all(&self) -> Arc<[Arc<Member>]> {
        Arc::clone(&self.all.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// The chunk's owner, of those that may be asked now; or the one that is its owner without `after` and all before it.
    pub fn owner(&self, chunk: &ChunkHash, after: Option<&Member>) -> Option<Arc<Member>> {
        owner(&self.all(), chunk, after).cloned()
    }
}

/// The member with the highest score below that of `after`; the next one while its breaker is open.
pub fn owner<'a>(
    all: &'a [Arc<Member>],
    chunk: &ChunkHash,
    after: Option<&Member>,
) -> Option<&'a Arc<Member>> {
    let of = |member: &Member| score(member.seed, chunk);
    let mut below = after.map(of);
    loop {
        let scores = all.iter().map(|member| (of(member), member));
        let lower = scores.filter(|(score, _)| below.is_none_or(|below| *score < below));
        let (score, best) = lower.max_by_key(|(score, _)| *score)?;
        if best.may_be_asked() {
            return Some(best);
        }
        below = Some(score);
    }
}

impl Drop for Members {
    fn drop(&mut self) {
        if let Some(follower) = &self.follower {
            follower.abort();
        }
    }
}

/// Brings what DNS says to the members.
struct Follow {
    all: Arc<RwLock<Arc<[Arc<Member>]>>>,
    literal: BTreeSet<SocketAddr>,
    watched: Vec<watch::Receiver<Resolved>>,
    options: PeerOptions,
    http: NetClient,
}

impl Follow {
    async fn run(mut self) {
        loop {
            let changes = self.watched.iter_mut().map(|watched| Box::pin(watched.changed()));
            if select_all(changes).await.0.is_err() {
                // The resolver is gone, and the process with it.
                return;
            }
            self.update();
        }
    }

    /// Members that stay keep what is known of them.
    fn update(&mut self) {
        let mut addresses = self.literal.clone();
        for watched in &mut self.watched {
            addresses.extend(watched.borrow_and_update().addresses.iter());
        }
        let mut all = self.all.write().unwrap_or_else(PoisonError::into_inner);
        let mut before: HashMap<_, _> = all.iter().map(|one| (one.address, Arc::clone(one))).collect();
        let member = |address| {
            let known = before.remove(&address);
            known.unwrap_or_else(|| Arc::new(Member::new(address, &self.options)))
        };
        *all = addresses.into_iter().map(member).collect();
        drop(all);
        for gone in before.values() {
            self.http.forget(&gone.origin);
        }
    }
}
