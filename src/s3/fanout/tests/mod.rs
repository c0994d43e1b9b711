//! Simulated endpoints for the tests, under a paused clock.

mod attempts;
mod cost;
mod endpoints;
mod subset;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use super::*;

const MIB: usize = 1 << 20;
const SECOND: Duration = Duration::from_secs(1);

const OPTIONS: EndpointOptions = EndpointOptions {
    window: WindowOptions {
        start: 32 * MIB,
        min: 8 * MIB,
        max: 256 * MIB,
    },
    breaker: BreakerOptions {
        failures: 3,
        open: SECOND,
        open_max: Duration::from_secs(8),
    },
    hedge_min: Duration::from_millis(20),
    subset: 16,
};

const POLICY: AttemptPolicy = AttemptPolicy {
    retries: 4,
    base: Duration::from_millis(20),
    max: Duration::from_millis(200),
    budget: 1000,
    hedges: 10,
};

/// The behaviour of an endpoint.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Does {
    /// Answers after 5 ms; the transfers in flight share this many MiB a second.
    Serve(usize),
    /// Answers, and then this many bytes come, and no more.
    StopAfter(usize),
    Hang,
    Refuse,
    Throttle,
    /// Answers 403 at once.
    Deny,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Failed {
    Lost,
    Unreached,
    Throttled,
    NotFound,
    Denied,
    Late,
}

impl Failure for Failed {
    fn verdict(&self) -> AttemptVerdict {
        match self {
            Self::Lost => AttemptVerdict::Lost,
            Self::Unreached => AttemptVerdict::Unreached,
            Self::Throttled => AttemptVerdict::Again,
            Self::NotFound | Self::Denied => AttemptVerdict::Final,
            Self::Late => AttemptVerdict::Late,
        }
    }
}

/// Endpoints 0, 1, 2, ...
#[derive(Clone)]
struct Fleet {
    endpoints: Endpoints<()>,
    script: Arc<Mutex<HashMap<SocketAddr, Does>>>,
    /// Bytes that came from each.
    came: Arc<Mutex<HashMap<SocketAddr, usize>>>,
}

fn address(number: usize) -> SocketAddr {
    ([10, 0, 0, u8::try_from(number).unwrap()], 80).into()
}

impl Fleet {
    fn new(script: &[Does]) -> Self {
        fastrand::seed(7);
        let fleet = Self {
            endpoints: Endpoints::new(OPTIONS),
            script: Arc::default(),
            came: Arc::default(),
        };
        for (number, &does) in script.iter().enumerate() {
            fleet.set(number, does);
        }
        let addresses: Vec<_> = (0..script.len()).map(address).collect();
        fleet.endpoints.update(&addresses, |_| ());
        fleet
    }

    fn set(&self, number: usize, does: Does) {
        self.script.lock().unwrap().insert(address(number), does);
    }

    /// Part of all bytes.
    fn share(&self, number: usize) -> f64 {
        let came = self.came.lock().unwrap();
        let all: usize = came.values().sum();
        came.get(&address(number)).copied().unwrap_or(0) as f64 / all as f64
    }

    fn state(&self, number: usize) -> EndpointState {
        let states = self.endpoints.states();
        states
            .into_iter()
            .find(|state| state.address == address(number))
            .unwrap()
    }

    fn totals(&self) -> Requests {
        let mut sum = Requests::default();
        for Requests {
            retries, hedges, ok, ..
        } in self.endpoints.states().iter().map(|state| state.totals)
        {
            sum.retries += retries;
            sum.hedges += hedges;
            sum.ok += ok;
        }
        sum
    }

    /// One attempt at a range, as the HTTP client makes it.
    async fn get(&self, bytes: usize, into: &Handover<()>, route: Route) -> Result<SocketAddr, Failed> {
        let mut permit = match route.start() {
            Start::Hedge => self
                .endpoints
                .try_permit(bytes, &route)
                .ok_or(Failed::Throttled)?,
            _ => self.endpoints.permit(Class::Load, bytes, &route).await,
        };
        let at = permit.address();
        let does = || self.script.lock().unwrap()[&at];
        // With hedges, twice the window.
        let fits = |state: &EndpointState| {
            state.in_flight_bytes <= 2 * state.window_bytes || state.in_flight_bytes == bytes
        };
        assert!(
            does() == Does::Throttle || self.endpoints.states().iter().all(fits),
            "a window overflows: {:#?}",
            self.endpoints.states()
        );
        match does() {
            Does::Refuse => {
                permit.end(Outcome::Lost(Loss::Connection));
                return Err(Failed::Lost);
            }
            Does::Throttle => {
                sleep(Duration::from_millis(5)).await;
                permit.end(Outcome::Answered { status: 503 });
                return Err(Failed::Throttled);
            }
            Does::Deny => {
                sleep(Duration::from_millis(1)).await;
                permit.answered(0);
                permit.end(Outcome::Answered { status: 403 });
                return Err(Failed::Denied);
            }
            Does::Hang => std::future::pending().await,
            Does::Serve(_) | Does::StopAfter(_) => sleep(Duration::from_millis(5)).await,
        }
        permit.answered(0);
        let held = into.claim(route.start()).await;
        let (mut came, step) = (0, bytes.div_ceil(16).max(1));
        while came < bytes {
            match does() {
                Does::Serve(mib) => {
                    let number = self.endpoints.states();
                    let sharing = number.iter().find(|state| state.address == at);
                    let sharing = sharing.map_or(1, |state| state.in_flight.max(1));
                    sleep(Duration::from_secs_f64(
                        (step * sharing) as f64 / (mib * MIB) as f64,
                    ))
                    .await;
                }
                Does::StopAfter(most) if came < most => sleep(Duration::from_millis(5)).await,
                Does::Refuse => {
                    permit.end(Outcome::Lost(Loss::Connection));
                    return Err(Failed::Lost);
                }
                _ => std::future::pending().await,
            }
            let more = step.min(bytes - came);
            came += more;
            permit.moved(more);
            held.progress(came, bytes);
            *self.came.lock().unwrap().entry(at).or_default() += more;
        }
        permit.end(Outcome::Answered { status: 206 });
        Ok(at)
    }

    /// A range as a store gets it: with retries and hedges.
    async fn load(&self, attempts: &Attempts, bytes: usize) -> Result<SocketAddr, Failed> {
        let into = Handover::new(());
        let hedge = self.endpoints.hedge(bytes);
        let deadline = Instant::now() + 60 * SECOND;
        let attempt = |route| self.get(bytes, &into, route);
        let answer = attempts.run_hedged(deadline, &hedge, Some(&into), attempt).await;
        assert!(into.take().is_some(), "it is given back");
        answer
    }

    /// Loads `ranges` ranges, `at_a_time` of them in flight.
    async fn load_many(&self, attempts: &Arc<Attempts>, ranges: usize, at_a_time: usize) -> Vec<Duration> {
        let turns = Arc::new(tokio::sync::Semaphore::new(at_a_time));
        let tasks: Vec<_> = (0..ranges)
            .map(|_| {
                let (fleet, attempts, turns) = (self.clone(), Arc::clone(attempts), Arc::clone(&turns));
                tokio::spawn(async move {
                    let _turn = turns.acquire().await.unwrap();
                    let began = Instant::now();
                    fleet.load(&attempts, 4 * MIB).await.unwrap();
                    began.elapsed()
                })
            })
            .collect();
        let mut took = Vec::new();
        for task in tasks {
            took.push(task.await.unwrap());
        }
        took
    }
}

fn attempts(policy: AttemptPolicy) -> Arc<Attempts> {
    Arc::new(Attempts::new(policy))
}

/// So many endpoints of which nothing is known.
fn unseen(count: usize) -> Endpoints<()> {
    fastrand::seed(7);
    let endpoints = Endpoints::new(OPTIONS);
    endpoints.update(&(0..count).map(address).collect::<Vec<_>>(), |_| ());
    endpoints
}

/// Endpoints whose breaker is closed.
fn closed(endpoints: &Endpoints<()>) -> usize {
    let states = endpoints.states().into_iter();
    states
        .filter(|state| state.breaker == BreakerPhase::Closed)
        .count()
}

/// Where a HEAD goes whose answer takes so long.
async fn head(endpoints: &Endpoints<()>, takes: impl Fn(SocketAddr) -> Duration) -> SocketAddr {
    let mut permit = endpoints.permit(Class::Load, 0, &Route::default()).await;
    let at = permit.address();
    sleep(takes(at)).await;
    permit.answered(0);
    permit.end(Outcome::Answered { status: 200 });
    at
}

/// Where a request goes that moves `bytes` and takes so long.
async fn moves(endpoints: &Endpoints<()>, class: Class, bytes: usize, takes: Duration) -> SocketAddr {
    let mut permit = endpoints.permit(class, bytes, &Route::default()).await;
    match class {
        Class::Load => {
            permit.answered(0);
            sleep(takes).await;
            permit.moved(bytes);
        }
        Class::Store => {
            sleep(takes).await;
            permit.answered(bytes);
        }
    }
    let at = permit.address();
    permit.end(Outcome::Answered { status: 200 });
    at
}

/// Of two endpoints, by two requests at the same time.
async fn both_are_used(endpoints: &Endpoints<()>, class: Class) -> bool {
    let request = async || endpoints.permit(class, MIB, &Route::default()).await;
    let (one, other) = (request().await, request().await);
    one.address() != other.address()
}
