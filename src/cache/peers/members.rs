//! The fleet as this node sees it: the addresses behind the configured names, kept up to date in the background.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;

use futures::future::select_all;
use serde::Serialize;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tokio::time::Instant;

use super::rendezvous::{score, seed};
use super::transport::Transport;
use super::{Asked, PeerOptions};
use crate::format::ChunkHash;
use crate::s3::dns::{AddressSource, Resolved, Resolver};
use crate::s3::fanout::{BreakerPhase, EndpointBreaker};

/// A node that may be asked.
pub struct Member {
    pub address: SocketAddr,
    seed: u64,
    /// It is this very node, by its address.
    is_here: bool,
    /// When it last said that it is.
    said_own: Mutex<Option<Instant>>,
    breakers: Mutex<Breakers>,
    /// What became of the latest ask that was settled.
    latest: Mutex<Option<Asked>>,
}

/// A member may answer every question, and yet send no chunk that is good: an answer closes the first breaker alone, and a
/// chunk that was verified closes both.
struct Breakers {
    /// Opened by answers that don't come.
    answers: EndpointBreaker,
    /// Opened by chunks that begin to come, and are cut off, late or wrong.
    chunks: EndpointBreaker,
}

/// How long "that is this node itself" is believed: an address may be shared by nodes, and move on.
const OWN: Duration = Duration::from_secs(60);

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
            seed: seed(address),
            is_here: is_here(address, options.listen),
            said_own: Mutex::default(),
            breakers: Mutex::new(Breakers {
                answers: EndpointBreaker::new(options.breaker),
                chunks: EndpointBreaker::new(options.breaker),
            }),
            latest: Mutex::default(),
        }
    }

    pub fn is_self(&self) -> bool {
        let said = *self.said_own.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_here || said.is_some_and(|said| said.elapsed() < OWN)
    }

    pub fn is_up(&self) -> bool {
        let (now, breakers) = (Instant::now(), self.breakers());
        [&breakers.answers, &breakers.chunks]
            .iter()
            .all(|breaker| breaker.phase(now) == BreakerPhase::Closed)
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
        let admits = |now, breakers: &Breakers| breakers.answers.admits(now) && breakers.chunks.admits(now);
        self.is_self() || admits(Instant::now(), &self.breakers())
    }

    /// It is about to be asked something: for a chunk, or a small question.
    pub(super) fn begin(self: &Arc<Self>, asks: Asks) -> Attempt {
        let (now, mut breakers) = (Instant::now(), self.breakers());
        let probes = Probes {
            answer: breakers.answers.begin(now),
            chunk: asks == Asks::Chunk && breakers.chunks.begin(now),
        };
        drop(breakers);
        Attempt {
            member: Arc::clone(self),
            asks,
            probes,
            settled: false,
        }
    }

    fn breakers(&self) -> MutexGuard<'_, Breakers> {
        // No panic can leave them half-changed.
        self.breakers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[cfg(test)]
    pub(super) fn fail_to_answer(&self) {
        self.breakers().answers.failed(false, Instant::now());
    }
}

/// What a member is asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Asks {
    Chunk,
    Question,
}

/// Whether a request is a breaker's probe.
#[derive(Clone, Copy)]
struct Probes {
    answer: bool,
    chunk: bool,
}

/// A request to a member, whose outcome decides on its breakers.
pub struct Attempt {
    pub member: Arc<Member>,
    asks: Asks,
    probes: Probes,
    settled: bool,
}

impl Attempt {
    /// What became of it decides whether the member is asked again. `begun`: an answer had begun to come.
    pub fn settle(&mut self, asked: Asked, begun: bool) {
        self.settled = true;
        let (member, now) = (&self.member, Instant::now());
        *member.latest.lock().unwrap_or_else(PoisonError::into_inner) = Some(asked);
        if asked == Asked::Own {
            *member.said_own.lock().unwrap_or_else(PoisonError::into_inner) = Some(now);
        }
        let mut breakers = member.breakers();
        let answered = match asked {
            Asked::Landed | Asked::UseS3 | Asked::Own | Asked::Wrong => true,
            Asked::Slow | Asked::Failed => begun,
            Asked::Refused => false,
        };
        match answered {
            true => breakers.answers.succeeded(),
            false => breakers.answers.failed(self.probes.answer, now),
        }
        match asked {
            Asked::Landed if self.asks == Asks::Chunk => breakers.chunks.succeeded(),
            Asked::Slow | Asked::Failed | Asked::Wrong if answered => {
                breakers.chunks.failed(self.probes.chunk, now);
            }
            // That says nothing of its chunks.
            _ if self.probes.chunk => breakers.chunks.probe_given_up(now),
            _ => {}
        }
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        let (now, mut breakers) = (Instant::now(), self.member.breakers());
        if self.probes.answer {
            breakers.answers.probe_given_up(now);
        }
        if self.probes.chunk {
            breakers.chunks.probe_given_up(now);
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
    pub fn new(dns: &Resolver, options: &PeerOptions, transport: &Arc<dyn Transport>) -> Self {
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
            transport: Arc::clone(transport),
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

/// The member with the highest score below that of `after`; the next one while it is left alone. Only a few that come next are
/// looked at: where most members are left alone, the rest must not get the chunks of all.
pub fn owner<'a>(
    all: &'a [Arc<Member>],
    chunk: &ChunkHash,
    after: Option<&Member>,
) -> Option<&'a Arc<Member>> {
    let below = after.map(|after| score(after.seed, chunk));
    let mut best: [Option<(u64, &Arc<Member>)>; LOOKED_AT] = [None; LOOKED_AT];
    for member in all {
        let score = score(member.seed, chunk);
        let is_next = below.is_none_or(|below| score < below);
        let place = best.partition_point(|one| one.is_some_and(|(better, _)| better > score));
        if is_next && place < LOOKED_AT {
            best[place..].rotate_right(1);
            best[place] = Some((score, member));
        }
    }
    let mut best = best.iter().flatten().map(|(_, member)| *member);
    best.find(|member| member.may_be_asked())
}

/// Members of a chunk's order that are looked at, at most.
const LOOKED_AT: usize = 8;

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
    transport: Arc<dyn Transport>,
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
        let all = Arc::clone(&self.all.read().unwrap_or_else(PoisonError::into_inner));
        let mut before: HashMap<_, _> = all.iter().map(|one| (one.address, Arc::clone(one))).collect();
        let member = |address| {
            let known = before.remove(&address);
            known.unwrap_or_else(|| Arc::new(Member::new(address, &self.options)))
        };
        let all = addresses.into_iter().map(member).collect();
        *self.all.write().unwrap_or_else(PoisonError::into_inner) = all;
        for gone in before.into_keys() {
            self.transport.forget(gone);
        }
    }
}
