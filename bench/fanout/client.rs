//! The clients that load prompts: with kvgate's fan-out, called as `s3/net/http_client.rs` and `s3/object/s3.rs` call it,
//! and without it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvgate::s3::fanout::{
    AttemptPolicy, Attempts, BreakerOptions, Class, EndpointOptions, Endpoints, Handover, Loss, Outcome,
    Permit, Route, Start, WindowOptions,
};
use tokio::sync::{Semaphore, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout_at};

use super::scenario::Workload;
use super::server::{Fault, Server};

/// Of a load, and of one attempt; as the configuration has them unless told.
pub const DEADLINE: Duration = Duration::from_secs(30);
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// More than ranges in flight, or hedges would wait for a connection.
const CONNECTIONS: usize = 1024;

const MIB: usize = 1 << 20;

const ATTEMPTS: AttemptPolicy = AttemptPolicy {
    retries: 4,
    base: Duration::from_millis(50),
    max: Duration::from_secs(2),
    // Twice the ranges in flight.
    budget: 512,
    hedges: 10,
};
const OPTIONS: EndpointOptions = EndpointOptions {
    window: WindowOptions {
        start: 64 * MIB,
        min: 8 * MIB,
        max: 1024 * MIB,
    },
    breaker: BreakerOptions {
        failures: 5,
        open: Duration::from_secs(1),
        open_max: Duration::from_secs(30),
    },
    hedge_min: Duration::from_millis(20),
    subset: 16,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    FanOut,
    /// One endpoint after the other, each as often; retries as everywhere.
    RoundRobin,
    /// The first, which is one of those that something happens to; retries as everywhere.
    Single,
}

impl Policy {
    pub const ALL: [Self; 3] = [Self::FanOut, Self::RoundRobin, Self::Single];

    pub fn name(self) -> &'static str {
        match self {
            Self::FanOut => "fan-out",
            Self::RoundRobin => "round robin",
            Self::Single => "one endpoint",
        }
    }
}

pub struct Client {
    policy: Policy,
    workload: Workload,
    endpoints: Endpoints<Arc<Server>>,
    /// For those that do not choose.
    listed: Mutex<Vec<Arc<Server>>>,
    next: AtomicUsize,
    attempts: Attempts,
    connections: Semaphore,
    turns: Mutex<Turns>,
    pub counts: Counts,
}

#[derive(Default)]
pub struct Counts {
    pub requests: AtomicU64,
    pub retries: AtomicU64,
    pub hedges: AtomicU64,
    /// Of ranges that arrived.
    pub bytes: AtomicU64,
}

/// The order of ranges that wait: the earliest load's first range goes next, as in `cache/gateway/bucket/turns.rs`.
#[derive(Default)]
struct Turns {
    in_flight_bytes: usize,
    line: BTreeMap<(u64, usize), oneshot::Sender<Turn>>,
}

/// A range that is under way, until this is dropped.
struct Turn(Arc<Client>);

impl Client {
    pub fn new(policy: Policy, workload: Workload) -> Self {
        Self {
            policy,
            workload,
            endpoints: Endpoints::new(OPTIONS),
            listed: Mutex::default(),
            next: AtomicUsize::new(0),
            attempts: Attempts::new(ATTEMPTS),
            connections: Semaphore::new(CONNECTIONS),
            turns: Mutex::default(),
            counts: Counts::default(),
        }
    }

    /// From here on these are the addresses.
    pub fn update(&self, servers: &[Arc<Server>]) {
        let addresses: Vec<_> = servers.iter().map(|server| server.address).collect();
        let of = |address| servers.iter().find(|server| server.address == address);
        let of = |address| Arc::clone(of(address).expect("one of those"));
        self.endpoints.update(&addresses, of);
        *lock(&self.listed) = servers.to_vec();
    }

    /// A whole prompt; fails with the first of its ranges.
    pub async fn load(self: &Arc<Self>, number: u64) -> Result<(), Fault> {
        let deadline = Instant::now() + DEADLINE;
        let mut ranges = JoinSet::new();
        for range in 0..self.workload.ranges {
            let client = Arc::clone(self);
            ranges.spawn(async move {
                let _turn = timeout_at(deadline, client.turn(number, range)).await;
                client.get(deadline).await
            });
        }
        while let Some(got) = ranges.join_next().await {
            got.expect("no panic")?;
        }
        Ok(())
    }

    /// As `S3::get`.
    async fn get(&self, deadline: Instant) -> Result<(), Fault> {
        let bytes = self.workload.range_bytes;
        let landing = Handover::new(());
        let attempt = |route| {
            let landing = landing.clone();
            async move {
                let now = Instant::now();
                if deadline <= now {
                    return Err(Fault::Deadline);
                }
                let limit = now + REQUEST_TIMEOUT;
                match timeout_at(limit.min(deadline), self.request(bytes, &route, &landing)).await {
                    Ok(result) => result,
                    Err(_) if limit < deadline => Err(Fault::Timeout),
                    Err(_) => Err(Fault::Deadline),
                }
            }
        };
        let got = match self.policy {
            Policy::FanOut => {
                let hedge = self.endpoints.hedge(bytes);
                let attempts = self
                    .attempts
                    .run_hedged(deadline, &hedge, Some(&landing), attempt);
                attempts.await
            }
            Policy::RoundRobin | Policy::Single => self.attempts.run(deadline, attempt).await,
        };
        if got.is_ok() {
            self.counts.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        }
        got
    }

    async fn request(&self, bytes: usize, route: &Route, landing: &Handover<()>) -> Result<(), Fault> {
        match self.policy {
            Policy::FanOut => self.leased(bytes, route, landing).await,
            Policy::RoundRobin | Policy::Single => {
                let _connection = self.connections.acquire().await;
                self.count(route);
                let server = self.next();
                let breaks = server.answer().await?;
                server.send(bytes, breaks, |_| {}).await
            }
        }
    }

    /// As `NetClient::send`.
    async fn leased(&self, bytes: usize, route: &Route, landing: &Handover<()>) -> Result<(), Fault> {
        let mut permit = match route.start() {
            Start::Hedge => self.endpoints.try_permit(bytes, route).ok_or(Fault::NoRoom)?,
            _ => self.endpoints.permit(Class::Load, bytes, route).await,
        };
        let _connection = self.connections.acquire().await;
        self.count(route);
        let sent = land(&mut permit, bytes, route, landing).await;
        match sent {
            Ok(()) => permit.end(Outcome::Answered { status: 206 }),
            Err(Fault::Status(status)) => permit.end(Outcome::Answered { status }),
            Err(Fault::Unreached | Fault::Lost) => permit.end(Outcome::Lost(Loss::Connection)),
            Err(Fault::Timeout) => permit.end(Outcome::Lost(Loss::Timeout)),
            Err(Fault::NoRoom | Fault::Deadline) => drop(permit),
        }
        sent
    }

    fn next(&self) -> Arc<Server> {
        let listed = lock(&self.listed);
        let at = match self.policy {
            Policy::Single => 0,
            _ => self.next.fetch_add(1, Ordering::Relaxed),
        };
        Arc::clone(&listed[at % listed.len()])
    }

    fn count(&self, route: &Route) {
        let add = |counter: &AtomicU64| counter.fetch_add(1, Ordering::Relaxed);
        add(&self.counts.requests);
        match route.start() {
            Start::First => 0,
            Start::Retry => add(&self.counts.retries),
            Start::Hedge => add(&self.counts.hedges),
        };
    }

    async fn turn(self: &Arc<Self>, load: u64, range: usize) -> Option<Turn> {
        let (sender, turn) = oneshot::channel();
        lock(&self.turns).line.insert((load, range), sender);
        self.grant();
        turn.await.ok()
    }

    fn grant(self: &Arc<Self>) {
        let bytes = self.workload.range_bytes;
        let limit = match self.policy {
            Policy::FanOut => self.workload.in_flight_bytes.min(self.endpoints.window_bytes()),
            _ => self.workload.in_flight_bytes,
        };
        let mut granted = Vec::new();
        {
            let mut turns = lock(&self.turns);
            while turns.in_flight_bytes == 0 || turns.in_flight_bytes + bytes <= limit {
                let Some((_, first)) = turns.line.pop_first() else {
                    break;
                };
                turns.in_flight_bytes += bytes;
                granted.push(first);
            }
        }
        for first in granted {
            // One that nobody takes ends here.
            drop(first.send(Turn(Arc::clone(self))));
        }
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        lock(&self.0.turns).in_flight_bytes -= self.0.workload.range_bytes;
        self.0.grant();
    }
}

/// As `NetClient::send_over` and `NetClient::land`.
async fn land(
    permit: &mut Permit<Arc<Server>>,
    bytes: usize,
    route: &Route,
    landing: &Handover<()>,
) -> Result<(), Fault> {
    let server = Arc::clone(permit.payload());
    let breaks = server.answer().await?;
    permit.answered(0);
    let held = landing.claim(route.start()).await;
    let mut landed = 0;
    let progress = |moved: usize| {
        landed += moved;
        held.progress(landed, bytes);
        permit.moved(moved);
    };
    server.send(bytes, breaks, progress).await
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
