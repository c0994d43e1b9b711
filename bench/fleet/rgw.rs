//! A modelled radosgw: its CPU and its NIC are shared by the requests that it has, it answers 503 to more than it takes at
//! a time, and its mood changes while requests are under way.
//!
//! What is shared is dealt out piece by piece: each transfer queues one piece at a time, so all get the same part.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvgate::s3::object::Operation;
use tokio::sync::Notify;
use tokio::time::{Instant, sleep_until, timeout};

use super::scenario::BIN;

/// As `[s3] read_timeout`: nothing comes for this time.
const STALL: Duration = Duration::from_secs(10);
/// Between a gateway and an RGW, there and back.
pub const ROUND_TRIP: Duration = Duration::from_micros(200);
/// In which a body goes over the NIC. More cost time and tell nothing new.
const PIECES: usize = 4;
pub const GIB: f64 = (1 << 30) as f64;

/// The abilities of one RGW.
#[derive(Debug, Clone, Copy)]
pub struct Abilities {
    pub cores: f64,
    pub head: Cost,
    pub get: Cost,
    pub put: Cost,
    pub nic_bytes_per_second: f64,
    /// `rgw_max_concurrent_requests`.
    pub requests_max: usize,
}

/// What a request costs, in seconds.
#[derive(Debug, Clone, Copy)]
pub struct Cost {
    /// CPU time, without its body, and of a GiB of that.
    pub cpu: f64,
    pub gib_cpu: f64,
    /// Time that passes on average, however idle all is. Half of it is always there, the rest has a long tail.
    pub latency: f64,
    /// Time of a GiB, however idle all is.
    pub gib: f64,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mood {
    /// At this part of its speed.
    Serves(f64),
    /// It takes this many requests at a time, and answers 503 to more.
    Takes(usize),
    /// It takes connections and requests, and does nothing.
    Hangs,
    /// Nobody listens: connections are refused, and those that were there break.
    Dead,
}

/// Why a request failed, as the HTTP client tells it apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// No connection.
    Unreached,
    /// The connection broke.
    Lost,
    Timeout,
    Throttled,
}

pub struct Rgw {
    pub address: SocketAddr,
    abilities: Abilities,
    cpu: Share,
    nic: Share,
    mood: Mutex<Mood>,
    /// How often it died.
    deaths: AtomicU64,
    moved_on: Notify,
    requests: AtomicUsize,
    /// Requests that arrived.
    pub arrivals: Bins,
    /// Attempts that failed here, or were given up.
    pub failures: Bins,
    connections: AtomicUsize,
    connections_peak: AtomicUsize,
}

/// A sum for each [`BIN`] of time since the start.
pub struct Bins {
    began: Instant,
    sums: Mutex<Vec<u64>>,
}

impl Bins {
    pub fn new() -> Self {
        Self {
            began: Instant::now(),
            sums: Mutex::default(),
        }
    }

    pub fn add(&self, more: u64) {
        let at = bin(self.began.elapsed());
        let mut sums = lock(&self.sums);
        if sums.len() <= at {
            sums.resize(at + 1, 0);
        }
        sums[at] += more;
    }

    /// From one second to another, `wide` bins in each sum.
    pub fn between(&self, from: f64, to: f64, wide: usize) -> Vec<u64> {
        let [from, to] = [from, to].map(|seconds| bin(Duration::from_secs_f64(seconds)));
        let sums = lock(&self.sums);
        let at = |at: usize| sums.get(at).copied().unwrap_or(0);
        let starts = (from..to).step_by(wide);
        starts.map(|start| (start..start + wide).map(at).sum()).collect()
    }

    pub fn sum(&self, from: f64, to: f64) -> u64 {
        self.between(from, to, 1).iter().sum()
    }
}

fn bin(since: Duration) -> usize {
    (since.as_nanos() / BIN.as_nanos()) as usize
}

/// Something that is shared by what passes through it.
pub struct Share {
    per_second: f64,
    free_at: Mutex<Instant>,
}

impl Share {
    pub fn new(per_second: f64) -> Self {
        Self {
            per_second,
            free_at: Mutex::new(Instant::now()),
        }
    }

    /// When a piece is through that queues from then on.
    pub fn through(&self, from: Instant, piece: f64, speed: f64) -> Instant {
        let mut free_at = lock(&self.free_at);
        let takes = Duration::from_secs_f64(piece / (self.per_second * speed));
        *free_at = (*free_at).max(from) + takes;
        *free_at
    }
}

impl Rgw {
    pub fn new(address: SocketAddr, abilities: Abilities) -> Arc<Self> {
        Arc::new(Self {
            address,
            cpu: Share::new(abilities.cores),
            nic: Share::new(abilities.nic_bytes_per_second),
            abilities,
            mood: Mutex::new(Mood::Serves(1.0)),
            deaths: AtomicU64::new(0),
            moved_on: Notify::new(),
            requests: AtomicUsize::new(0),
            arrivals: Bins::new(),
            failures: Bins::new(),
            connections: AtomicUsize::new(0),
            connections_peak: AtomicUsize::new(0),
        })
    }

    pub fn set(&self, mood: Mood) {
        *lock(&self.mood) = mood;
        if mood == Mood::Dead {
            self.deaths.fetch_add(1, Ordering::Relaxed);
        }
        self.moved_on.notify_waiters();
    }

    pub fn mood(&self) -> Mood {
        *lock(&self.mood)
    }

    pub fn deaths(&self) -> u64 {
        self.deaths.load(Ordering::Relaxed)
    }

    pub fn connections_peak(&self) -> usize {
        self.connections_peak.load(Ordering::Relaxed)
    }

    pub fn opened(&self) {
        let open = self.connections.fetch_add(1, Ordering::Relaxed) + 1;
        self.connections_peak.fetch_max(open, Ordering::Relaxed);
    }

    pub fn closed(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    fn cost(&self, of: Operation) -> Cost {
        match of {
            Operation::Get => self.abilities.get,
            Operation::Put => self.abilities.put,
            _ => self.abilities.head,
        }
    }

    /// A request arrives; until its answer begins.
    pub async fn answer(self: &Arc<Self>, operation: Operation) -> Result<Serving, Fault> {
        let cost = self.cost(operation);
        self.arrivals.add(1);
        let serving = Serving::new(self);
        let most = match self.mood() {
            Mood::Takes(most) => most,
            _ => self.abilities.requests_max,
        };
        if self.requests.load(Ordering::Relaxed) > most {
            return Err(Fault::Throttled);
        }
        self.awake().await?;
        let speed = self.speed();
        let done = self.cpu.through(Instant::now() + ROUND_TRIP, cost.cpu, speed);
        let luck = 0.5 - 0.5 * (1.0 - fastrand::f64()).ln();
        pass_until(done + Duration::from_secs_f64(cost.latency * luck / speed)).await;
        self.awake().await?;
        Ok(serving)
    }

    /// A body, piece by piece: down or up.
    pub async fn carry(
        &self,
        operation: Operation,
        bytes: usize,
        mut moved: impl FnMut(usize),
    ) -> Result<(), Fault> {
        let (cost, mut sent) = (self.cost(operation), 0);
        let mut at = Instant::now();
        for piece in 1..=PIECES {
            let len = bytes * piece / PIECES - sent;
            let (speed, gib) = (self.speed(), len as f64 / GIB);
            // It may have hung.
            at = at.max(Instant::now() - HALF_TICK);
            let computed = self.cpu.through(at, cost.gib_cpu * gib, speed);
            let sent_on = self.nic.through(at, len as f64, speed);
            let alone = at + Duration::from_secs_f64(cost.gib * gib / speed);
            at = sent_on.max(computed).max(alone);
            pass_until(at).await;
            self.awake().await?;
            moved(len);
            sent += len;
        }
        Ok(())
    }

    /// The connection breaks when it dies.
    pub async fn while_alive<T>(&self, work: impl Future<Output = Result<T, Fault>>) -> Result<T, Fault> {
        let deaths = self.deaths();
        let died = async {
            while self.deaths() == deaths {
                self.moved_on.notified().await;
            }
        };
        tokio::select! {
            biased;
            answer = work => answer,
            () = died => Err(Fault::Lost),
        }
    }

    async fn awake(&self) -> Result<(), Fault> {
        while self.mood() == Mood::Hangs {
            let wakes = self.moved_on.notified();
            timeout(STALL, wakes).await.map_err(|_| Fault::Timeout)?;
        }
        Ok(())
    }

    fn speed(&self) -> f64 {
        match self.mood() {
            Mood::Serves(part) => part,
            _ => 1.0,
        }
    }
}

const HALF_TICK: Duration = Duration::from_micros(500);

/// tokio's timers fire at whole milliseconds, late rather than early. This is as often early: the mean stays right.
pub async fn pass_until(at: Instant) {
    sleep_until(at - HALF_TICK).await;
}

/// A request that it has, until this is dropped.
pub struct Serving(Arc<Rgw>);

impl Serving {
    fn new(rgw: &Arc<Rgw>) -> Self {
        rgw.requests.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(rgw))
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.requests.fetch_sub(1, Ordering::Relaxed);
    }
}

pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
