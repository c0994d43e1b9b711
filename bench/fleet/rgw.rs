//! A modelled radosgw: its CPU and its NIC are shared by the requests that it has, it answers 503 to more than it takes at
//! a time, and its mood changes while requests are under way.
//!
//! What is shared is dealt out piece by piece: each transfer queues one piece at a time, so all get the same part.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use super::scenario::BIN;

/// As `[s3] read_timeout`: nothing comes for this time.
const STALL: Duration = Duration::from_secs(10);
/// Between a gateway and an RGW, there and back.
pub const ROUND_TRIP: Duration = Duration::from_micros(200);
/// In which a body goes over the NIC. More cost time and tell nothing new.
const PIECES: usize = 4;
const GIB: f64 = (1 << 30) as f64;

/// The abilities of one RGW.
#[derive(Debug, Clone, Copy)]
pub struct Abilities {
    pub cores: f64,
    /// CPU time of a request, and of a GiB of its body.
    pub request: Duration,
    pub gib: Duration,
    /// The time that RADOS takes, on average, however idle all is. Half of it is always there, the rest has a long tail.
    pub latency: Duration,
    pub nic_bytes_per_second: f64,
    /// However idle the NIC is.
    pub connection_bytes_per_second: f64,
    /// `rgw_max_concurrent_requests`.
    pub requests_max: usize,
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

    /// When a piece is through that queues now.
    pub fn through(&self, piece: f64, speed: f64) -> Instant {
        let mut free_at = lock(&self.free_at);
        let takes = Duration::from_secs_f64(piece / (self.per_second * speed));
        *free_at = (*free_at).max(Instant::now()) + takes;
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

    /// A request arrives; until its answer begins.
    pub async fn answer(self: &Arc<Self>) -> Result<Serving, Fault> {
        self.arrivals.add(1);
        let serving = Serving::new(self);
        sleep(ROUND_TRIP).await;
        let most = match self.mood() {
            Mood::Takes(most) => most,
            _ => self.abilities.requests_max,
        };
        if self.requests.load(Ordering::Relaxed) > most {
            return Err(Fault::Throttled);
        }
        self.awake().await?;
        let speed = self.speed();
        let done = self.cpu.through(self.abilities.request.as_secs_f64(), speed);
        sleep_until(done).await;
        let luck = 0.5 - 0.5 * (1.0 - fastrand::f64()).ln();
        sleep(self.abilities.latency.mul_f64(luck / speed)).await;
        self.awake().await?;
        Ok(serving)
    }

    /// A body, piece by piece: down or up.
    pub async fn carry(&self, bytes: usize, mut moved: impl FnMut(usize)) -> Result<(), Fault> {
        let mut sent = 0;
        for piece in 1..=PIECES {
            let len = bytes * piece / PIECES - sent;
            let speed = self.speed();
            let alone =
                Duration::from_secs_f64(len as f64 / (self.abilities.connection_bytes_per_second * speed));
            let alone = Instant::now() + alone;
            let work = self.abilities.gib.as_secs_f64() * len as f64 / GIB;
            let computed = self.cpu.through(work, speed);
            sleep_until(self.nic.through(len as f64, speed).max(computed).max(alone)).await;
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
