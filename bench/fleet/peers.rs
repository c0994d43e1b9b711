//! The network between gateways: a call to a peer is answered by kvgate's own code, called as `src/node/api/peers.rs` calls it.
//! Each gateway has a NIC, which all that it sends shares, and a mood.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Range;
use std::sync::{Arc, Mutex};

use futures::future::BoxFuture;
use kvgate::cache::gateway::{ForPeer, Gateway};
use kvgate::cache::peers::{PeerCall, PeerOptions, Peers, Said, Transport};
use kvgate::config::{Config, PeerName};
use kvgate::format::{ChunkHash, Space};
use kvgate::node::daemon::peer_options;
use kvgate::s3::dns::{AddressSource, Resolver};
use kvgate::s3::fanout::Start;
use kvgate::s3::net::NetError;
use tokio::time::Instant;

use super::bucket::SCALE;
use super::names::{Asks, Names};
use super::rgw::{ROUND_TRIP, Share, lock, pass_until};

/// 100 Gbit/s.
const NIC_BYTES_PER_SECOND: f64 = 12.5e9;
const PORT: u16 = 9181;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PeerMood {
    Answers,
    /// Connections are refused.
    Dead,
    /// It takes calls and does nothing.
    Hangs,
}

/// All gateways, as they reach each other.
pub struct Fabric {
    space: Space,
    sites: Vec<Site>,
}

struct Site {
    gateway: Mutex<Option<Gateway>>,
    nic: Share,
    mood: Mutex<PeerMood>,
}

impl Site {
    fn mood(&self) -> PeerMood {
        *lock(&self.mood)
    }
}

impl Fabric {
    pub fn new(gateways: usize, space: &Space) -> Arc<Self> {
        let site = |_| Site {
            gateway: Mutex::default(),
            nic: Share::new(NIC_BYTES_PER_SECOND),
            mood: Mutex::new(PeerMood::Answers),
        };
        Arc::new(Self {
            space: space.clone(),
            sites: (0..gateways).map(site).collect(),
        })
    }

    /// The peers of one gateway: all of them, itself too.
    pub fn peers_of(self: &Arc<Self>, number: usize, config: &Config, names: &Arc<Names>) -> Arc<Peers> {
        let mut config = config.clone();
        config.peers.members = vec![PeerName::Host("peers.fleet".into(), PORT)];
        let options = peer_options(&config).expect("there are members");
        let options = PeerOptions {
            members: (0..self.sites.len())
                .map(|number| literal(address(number)))
                .collect(),
            listen: address(number),
            serve_bytes: options.serve_bytes / SCALE,
            ..options
        };
        // It is asked nothing: all members are addresses.
        let names = Arc::clone(names);
        let dns = Resolver::over(options.dns.clone(), move |_| Box::new(Asks(Arc::clone(&names))));
        let link = Link {
            fabric: Arc::clone(self),
            from: number,
        };
        Peers::over(options, Arc::new(link), None, &dns).expect("no secrets to read")
    }

    pub fn has_started(&self, number: usize, gateway: &Gateway) {
        *lock(&self.sites[number].gateway) = Some(gateway.clone());
    }

    /// Lets go of the gateways, which hold it.
    pub fn end(&self) {
        self.sites.iter().for_each(|site| *lock(&site.gateway) = None);
    }

    pub fn set(&self, those: Range<usize>, mood: PeerMood) {
        self.sites[those].iter().for_each(|site| *lock(&site.mood) = mood);
    }

    async fn call(&self, from: usize, to: SocketAddr, call: PeerCall<'_>) -> Result<Said, NetError> {
        pass_until(Instant::now() + ROUND_TRIP).await;
        let site = &self.sites[number_of(to)];
        match site.mood() {
            PeerMood::Answers => {}
            PeerMood::Dead => return Err(NetError::Closed),
            PeerMood::Hangs => return std::future::pending().await,
        }
        // One that has not started.
        let gateway = lock(&site.gateway).clone().ok_or(NetError::Closed)?;
        let peers = gateway.peers().expect("it has peers");
        let said = |status| Said { status, holder: None };
        if call.method == "POST" {
            let hashes = call.body.chunks_exact(32).filter_map(|hash| hash.try_into().ok());
            peers.hears_of(address(from), self.space.key(), hashes.map(ChunkHash));
            return Ok(said(204));
        }
        let hash: ChunkHash = call
            .path
            .rsplit('/')
            .next()
            .and_then(|hash| hash.parse().ok())
            .expect("a chunk's path");
        let use_s3 = Said {
            status: 503,
            holder: peers.holder(&(self.space.key(), hash)),
        };
        if call.method == "HEAD" {
            return Ok(if gateway.has_for_peer(&self.space, &hash) {
                said(200)
            } else {
                use_s3
            });
        }
        let asker = address(from).to_string();
        let (flight, here, _serving) = match gateway.for_peer(&self.space, &hash, Some(&asker)) {
            None | Some(ForPeer::UseS3) => return Ok(use_s3),
            Some(ForPeer::Full) => return Ok(said(503)),
            Some(ForPeer::Memory(chunk, serving)) => (None, Some(chunk), serving),
            Some(ForPeer::Arriving(flight, serving) | ForPeer::Fetched(flight, serving)) => {
                (Some(flight), None, serving)
            }
        };
        let mut held = call
            .landing
            .expect("a GET has a landing")
            .handover()
            .claim(Start::First)
            .await;
        held.arrived(0, 0);
        let chunk = match (here, flight) {
            (Some(chunk), _) => Some(chunk),
            (None, Some(flight)) => flight.outcome().await.and_then(Result::ok),
            (None, None) => None,
        };
        let chunk = chunk.ok_or(NetError::Closed)?;
        let object = chunk.object().ok_or(NetError::Closed)?;
        pass_until(
            site.nic
                .through(Instant::now(), (object.len() * SCALE) as f64, 1.0),
        )
        .await;
        if site.mood() != PeerMood::Answers {
            return Err(NetError::Closed);
        }
        held.slot.copy_from_slice(object);
        held.arrived(0, object.len());
        Ok(said(200))
    }
}

/// A gateway's way to the others.
struct Link {
    fabric: Arc<Fabric>,
    from: usize,
}

impl Transport for Link {
    fn call<'a>(&'a self, to: SocketAddr, call: PeerCall<'a>) -> BoxFuture<'a, Result<Said, NetError>> {
        Box::pin(self.fabric.call(self.from, to, call))
    }

    fn forget(&self, _gone: SocketAddr) {}
}

fn address(number: usize) -> SocketAddr {
    let [high, low] = u16::try_from(number).expect("fewer than 65,536").to_be_bytes();
    (Ipv4Addr::new(10, 1, high, low), PORT).into()
}

fn number_of(address: SocketAddr) -> usize {
    let SocketAddr::V4(address) = address else {
        unreachable!("members have IPv4")
    };
    let [_, _, high, low] = address.ip().octets();
    u16::from_be_bytes([high, low]).into()
}

fn literal(address: SocketAddr) -> AddressSource {
    AddressSource::Host {
        name: address.ip().to_string(),
        port: address.port(),
    }
}
