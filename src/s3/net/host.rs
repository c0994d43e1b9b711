//! The endpoints of one origin: the addresses that DNS, or the operator, gives for it, and a pool of connections to each.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::future::select_all;
use tokio::sync::{Semaphore, SemaphorePermit, watch};
use tokio::task::AbortHandle;

use super::error::NetError;
use super::http_client::NetOptions;
use super::pool::{Origin, Pool};
use super::stats::NetCounters;
use crate::metrics::{Histogram, Times};
use crate::s3::dns::{AddressSource, NameState, Resolved};
use crate::s3::fanout::{Class, Endpoints, Permit, Route, Start};

/// Connections that are idle for too long are closed after at most this part of the time more.
const SWEEPS: u32 = 8;
const SWEEP_MIN: Duration = Duration::from_millis(50);

/// A place to ask for addresses, and the name that their certificates have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerAddress {
    pub source: AddressSource,
    pub server_name: String,
}

pub(super) struct Host {
    origin: Origin,
    endpoints: Endpoints<Pool>,
    in_use: Semaphore,
    /// For a request that has an endpoint, until it may have a connection.
    turns: Histogram,
    names: Vec<(AddressSource, watch::Receiver<Resolved>)>,
    /// Why there are no addresses.
    trouble: Arc<Mutex<Option<Arc<str>>>>,
    follower: AbortHandle,
}

impl Host {
    /// Needs a tokio runtime.
    pub fn new(origin: Origin, options: &Arc<NetOptions>, counters: &Arc<NetCounters>) -> Self {
        let endpoints = Endpoints::new(options.endpoints);
        let trouble = Arc::default();
        let watched = places(&origin, options).into_iter().map(|place| {
            let told = options.dns.watch(&place.source);
            ((place.server_name, told.clone()), (place.source, told))
        });
        let (watched, names) = watched.unzip();
        let follow = Follow {
            watched,
            fixed: Vec::new(),
            endpoints: endpoints.clone(),
            tls: origin.tls,
            options: Arc::clone(options),
            counters: Arc::clone(counters),
            trouble: Arc::clone(&trouble),
        };
        // Addresses that need no DNS are there from the start.
        let follower = follow.start();
        Self {
            origin,
            endpoints,
            in_use: Semaphore::new(options.connections_max),
            turns: Histogram::default(),
            names,
            trouble,
            follower,
        }
    }

    pub fn endpoints(&self) -> &Endpoints<Pool> {
        &self.endpoints
    }

    /// Waits for a connection, of the requests that had to.
    pub fn turns(&self) -> Times {
        self.turns.read()
    }

    /// The names that the endpoints come from.
    pub fn names(&self) -> Vec<NameState> {
        let names = self.names.iter();
        names
            .map(|(name, told)| NameState::new(name, &told.borrow()))
            .collect()
    }

    /// An endpoint for a request that moves `bytes` of body. `limit` is for the time until the name is resolved.
    pub async fn permit(
        &self,
        class: Class,
        bytes: usize,
        route: &Route,
        limit: Duration,
    ) -> Result<Permit<Pool>, NetError> {
        if route.start() == Start::Hedge {
            return self.endpoints.try_permit(bytes, route).ok_or(NetError::NoRoom);
        }
        let permit = self.endpoints.permit(class, bytes, route);
        if !self.endpoints.is_empty() {
            return Ok(permit.await);
        }
        // Boxed: rare.
        let permit = Box::pin(tokio::time::timeout(limit, permit));
        permit.await.map_err(|_| {
            let trouble = self.trouble.lock().unwrap_or_else(PoisonError::into_inner);
            NetError::Resolve {
                host: self.origin.host.clone(),
                cause: trouble
                    .clone()
                    .unwrap_or_else(|| format!("no answer for {limit:?}").into()),
            }
        })
    }

    /// Waits until one more connection may be used.
    pub async fn turn(&self, permit: &mut Permit<Pool>, route: &Route) -> Option<SemaphorePermit<'_>> {
        if let Ok(turn) = self.in_use.try_acquire() {
            return Some(turn);
        }
        permit.waits(route);
        let turn = self.turns.of(self.in_use.acquire()).await.ok();
        permit.goes(route);
        turn
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.follower.abort();
    }
}

/// The sources of an origin's addresses. For the S3 server's host and the buckets under it they are the operator's; for
/// other origins it is the name itself.
pub(super) fn places(origin: &Origin, options: &NetOptions) -> Vec<ServerAddress> {
    let under = |host: &str| {
        let before = origin.host.strip_suffix(host);
        before.is_some_and(|before| before.is_empty() || before.ends_with('.'))
    };
    match &options.places {
        Some((host, places)) if under(host) => places
            .iter()
            .map(|place| match place.server_name == *host {
                // The bucket may be in the name.
                true => ServerAddress {
                    server_name: origin.host.clone(),
                    source: place.source.clone(),
                },
                false => place.clone(),
            })
            .collect(),
        _ => vec![ServerAddress {
            source: AddressSource::Host {
                name: origin.host.clone(),
                port: origin.port,
            },
            server_name: options.server_name.clone().unwrap_or_else(|| origin.host.clone()),
        }],
    }
}

/// Brings what DNS says to the endpoints.
struct Follow {
    /// With the name that certificates have.
    watched: Vec<(String, watch::Receiver<Resolved>)>,
    /// Addresses that never change.
    fixed: Vec<(String, watch::Receiver<Resolved>)>,
    endpoints: Endpoints<Pool>,
    tls: bool,
    options: Arc<NetOptions>,
    counters: Arc<NetCounters>,
    trouble: Arc<Mutex<Option<Arc<str>>>>,
}

impl Follow {
    fn start(mut self) -> AbortHandle {
        self.update();
        let sweep = (self.options.idle_timeout / SWEEPS).max(SWEEP_MIN);
        let follow = async move {
            loop {
                if tokio::time::timeout(sweep, self.change()).await.is_ok() {
                    self.update();
                }
                self.endpoints.each(Pool::sweep);
            }
        };
        tokio::spawn(follow).abort_handle()
    }

    /// Waits until something may have changed.
    async fn change(&mut self) {
        if self.watched.is_empty() {
            return std::future::pending().await;
        }
        let changes = self
            .watched
            .iter_mut()
            .map(|(_, watched)| Box::pin(watched.changed()));
        let (changed, at, _) = select_all(changes).await;
        if changed.is_err() {
            // A literal address.
            self.fixed.push(self.watched.remove(at));
        }
    }

    fn update(&mut self) {
        let mut names: HashMap<SocketAddr, String> = HashMap::new();
        let mut addresses = Vec::new();
        let mut trouble = None;
        for (name, watched) in self.fixed.iter_mut().chain(&mut self.watched) {
            let resolved = watched.borrow_and_update();
            trouble = trouble.or_else(|| resolved.error.clone());
            for &address in &*resolved.addresses {
                names.entry(address).or_insert_with(|| {
                    addresses.push(address);
                    name.clone()
                });
            }
        }
        *self.trouble.lock().unwrap_or_else(PoisonError::into_inner) = trouble;
        self.endpoints.update(&addresses, |address| {
            Pool::new(
                address,
                self.tls.then(|| names[&address].clone()),
                Arc::clone(&self.options),
                Arc::clone(&self.counters),
            )
        });
    }
}
