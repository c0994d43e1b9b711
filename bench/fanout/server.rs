//! A scripted endpoint: its speed is shared by what is on its way, and its mood changes while requests are under way.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvgate::s3::fanout::{AttemptVerdict, Failure};
use tokio::sync::{Notify, oneshot, watch};
use tokio::time::{Instant, sleep, sleep_until, timeout};

/// As `[s3] read_timeout`.
const STALL: Duration = Duration::from_secs(10);
/// After which a connection is refused.
const ROUND_TRIP: Duration = Duration::from_millis(1);
/// In which a body arrives. More cost time and tell nothing new.
const PIECES: usize = 8;
/// Bytes of rounding.
const NEARLY: f64 = 1.0;

/// The abilities of one endpoint.
#[derive(Debug, Clone, Copy)]
pub struct Speed {
    pub bytes_per_second: f64,
    /// However idle it is.
    pub connection_bytes_per_second: f64,
    pub latency: Duration,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Mood {
    /// At this part of its speed.
    Serves(f64),
    /// 503.
    Refuses,
    /// Connections break: one half at once, the other half in the middle of a body.
    Breaks,
    /// It accepts requests and does nothing, as a paused process.
    Hangs,
    /// Nobody listens.
    Gone,
}

/// Why a request failed, as `object::ErrorKind` tells it apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    Status(u16),
    /// No connection.
    Unreached,
    Lost,
    Timeout,
    /// A hedge found no endpoint that has room.
    NoRoom,
    Deadline,
}

impl Failure for Fault {
    fn verdict(&self) -> AttemptVerdict {
        match self {
            Self::Unreached => AttemptVerdict::Unreached,
            Self::Lost => AttemptVerdict::Lost,
            Self::Status(_) | Self::Timeout | Self::NoRoom => AttemptVerdict::Again,
            Self::Deadline => AttemptVerdict::Final,
        }
    }
}

pub struct Server {
    pub address: SocketAddr,
    speed: Speed,
    mood: watch::Sender<Mood>,
    state: Mutex<State>,
    /// The first in `waiting` may be another one.
    changed: Notify,
}

struct State {
    /// Bytes that something that was on its way all the time would have got by `at`.
    served: f64,
    at: Instant,
    mood: Mood,
    /// Transfers under way, in the order in which their next pieces are served.
    waiting: BTreeMap<Due, oneshot::Sender<()>>,
    numbers: u64,
    /// Bytes of bodies.
    sent: u64,
}

/// Positive floats, which their bits order too; and a number, since two may be due at once.
type Due = (u64, u64);

impl Server {
    /// Starts the task that serves; needs a tokio runtime.
    pub fn start(address: SocketAddr, speed: Speed) -> Arc<Self> {
        let mood = Mood::Serves(1.0);
        let state = State {
            served: 0.0,
            at: Instant::now(),
            mood,
            waiting: BTreeMap::new(),
            numbers: 0,
            sent: 0,
        };
        let server = Arc::new(Self {
            address,
            speed,
            mood: watch::Sender::new(mood),
            state: Mutex::new(state),
            changed: Notify::new(),
        });
        let serving = Arc::clone(&server);
        tokio::spawn(async move { serving.serve().await });
        server
    }

    pub fn set(&self, mood: Mood) {
        let mut state = self.now();
        state.mood = mood;
        if mood == Mood::Gone {
            // A transfer that waits for a piece sees that its sender is gone.
            state.waiting.clear();
        }
        drop(state);
        self.mood.send_replace(mood);
        self.changed.notify_one();
    }

    pub fn sent(&self) -> u64 {
        self.lock().sent
    }

    /// Until an answer's head is there. Whether its body will break off.
    pub async fn answer(&self) -> Result<bool, Fault> {
        let mood = self.lock().mood;
        let part = match mood {
            Mood::Gone => {
                sleep(ROUND_TRIP).await;
                return Err(Fault::Unreached);
            }
            Mood::Serves(part) => part,
            _ => 1.0,
        };
        // Half of it is always there, the rest has a long tail.
        let luck = 0.5 - 0.5 * (1.0 - fastrand::f64()).ln();
        sleep(self.speed.latency.mul_f64(luck / part)).await;
        let mut mood = self.mood.subscribe();
        let moves = mood.wait_for(|mood| *mood != Mood::Hangs);
        let Ok(Ok(mood)) = timeout(STALL, moves).await.map(|mood| mood.map(|mood| *mood)) else {
            return Err(Fault::Timeout);
        };
        match mood {
            Mood::Gone => Err(Fault::Lost),
            Mood::Refuses => Err(Fault::Status(503)),
            Mood::Breaks if fastrand::bool() => Err(Fault::Lost),
            Mood::Breaks => Ok(true),
            Mood::Serves(_) | Mood::Hangs => Ok(false),
        }
    }

    /// A body, piece by piece.
    pub async fn send(&self, bytes: usize, breaks: bool, mut moved: impl FnMut(usize)) -> Result<(), Fault> {
        // No two disks are alike.
        let effort = 0.85 + 0.3 * fastrand::f64();
        let mut due = self.now().served;
        let mut sent = 0;
        for piece in 1..=PIECES {
            let len = bytes * piece / PIECES - sent;
            due += len as f64 * effort;
            match timeout(STALL, self.wait(due)).await {
                Err(_) => return Err(Fault::Timeout),
                Ok(false) => return Err(Fault::Lost),
                Ok(true) => {}
            }
            self.lock().sent += len as u64;
            moved(len);
            sent += len;
            if breaks && piece == PIECES / 2 {
                return Err(Fault::Lost);
            }
        }
        Ok(())
    }

    /// Until so much was served. Whether it was.
    async fn wait(&self, due: f64) -> bool {
        let (mut waiting, is_first) = {
            let mut state = self.now();
            if state.mood == Mood::Gone {
                return false;
            }
            state.numbers += 1;
            let key = (due.max(0.0).to_bits(), state.numbers);
            let (sender, receiver) = oneshot::channel();
            state.waiting.insert(key, sender);
            let is_first = state
                .waiting
                .first_key_value()
                .is_some_and(|(first, _)| *first == key);
            (
                Waiting {
                    server: self,
                    key,
                    receiver,
                },
                is_first,
            )
        };
        if is_first {
            self.changed.notify_one();
        }
        (&mut waiting.receiver).await.is_ok()
    }

    async fn serve(&self) {
        loop {
            let next = {
                let mut state = self.now();
                let served = state.served;
                while let Some(first) = state.waiting.first_entry()
                    && f64::from_bits(first.key().0) <= served + NEARLY
                {
                    // One that nobody waits for any more is as good.
                    let _ = first.remove().send(());
                }
                let rate = self.rate(&state);
                let due = state
                    .waiting
                    .first_key_value()
                    .map(|(due, _)| f64::from_bits(due.0));
                due.filter(|_| rate > 0.0)
                    .map(|due| state.at + Duration::from_secs_f64((due - served) / rate))
            };
            tokio::select! {
                biased;
                () = self.changed.notified() => {}
                () = sleep_until(next.unwrap_or_else(Instant::now)), if next.is_some() => {}
            }
        }
    }

    /// The state as it is now.
    fn now(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        let now = Instant::now();
        state.served += self.rate(&state) * (now - state.at).as_secs_f64();
        state.at = now;
        state
    }

    /// Bytes a second for each that is on its way.
    fn rate(&self, state: &State) -> f64 {
        let part = match state.mood {
            Mood::Hangs | Mood::Gone => 0.0,
            Mood::Serves(part) => part,
            Mood::Refuses | Mood::Breaks => 1.0,
        };
        let shared = self.speed.bytes_per_second / state.waiting.len().max(1) as f64;
        part * shared.min(self.speed.connection_bytes_per_second)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// On its way until this is dropped.
struct Waiting<'a> {
    server: &'a Server,
    key: Due,
    receiver: oneshot::Receiver<()>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        if self.server.now().waiting.remove(&self.key).is_some() {
            self.server.changed.notify_one();
        }
    }
}
