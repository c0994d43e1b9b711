//! One endpoint, as the others see it: window, estimate, breaker, and the requests in flight.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::breaker::EndpointBreaker;
use super::endpoints::EndpointOptions;
use super::estimate::{Estimate, Estimates, tells};
use super::permit::{Class, Loss, Outcome, PerClass};
use super::route::Start;
use super::state::{EndpointState, Requests};
use super::window::Window;

/// A request that is given up after this time without a byte counts as a failure of its endpoint.
const SILENCE: Duration = Duration::from_secs(2);
/// The same for one whose answer had not even begun: a hedge ends most requests to an endpoint that hangs long before
/// [`SILENCE`], and the next would go there again.
const NO_ANSWER: Duration = Duration::from_millis(250);

/// With each refusal in a row an endpoint costs twice as much, up to so many times: it refuses faster than others answer.
const REFUSALS: u32 = 6;
/// So long: what all refuse, such as a prefix that is denied, must not leave everything to the first that answers otherwise.
const REFUSED: Duration = Duration::from_secs(2);
/// The power by which what is in flight counts beside that. The estimate knows of most of it: with more than this, an idle slow
/// endpoint looks better than busy fast ones.
const LOAD: f64 = 0.25;

/// The most in flight with hedges, in windows.
const HEDGED_WINDOWS: usize = 2;

/// One endpoint, as the others see it under their lock.
pub(super) struct Member<T> {
    pub address: SocketAddr,
    pub payload: Arc<T>,
    pub breaker: EndpointBreaker,
    window: Window,
    estimates: Estimates,
    refusals: PerClass<Refusals>,
    in_flight_bytes: usize,
    carried: Carried,
    /// Requests in flight, by the number of the permit: the oldest is the first.
    flights: BTreeMap<u64, Flight>,
    totals: Requests,
    denied_in_a_row: u64,
}

/// Ranges or uploads that were answered with a status that another endpoint may not answer with.
#[derive(Default)]
struct Refusals {
    in_a_row: u32,
    last: Option<Instant>,
}

impl Refusals {
    fn factor(&self, now: Instant) -> f64 {
        let counts = self.last.is_some_and(|last| now - last <= REFUSED);
        f64::from(1 << if counts { self.in_a_row.min(REFUSALS) } else { 0 })
    }

    fn answered(&mut self, status: u16, now: Instant) {
        match status {
            ..300 => *self = Self::default(),
            // Answers about the object, not the endpoint.
            304 | 404 | 408 | 409 | 412 | 416 => {}
            _ => {
                self.in_a_row = self.in_a_row.saturating_add(1);
                self.last = Some(now);
            }
        }
    }
}

struct Flight {
    class: Class,
    since: Instant,
    /// The bytes that were carried by then.
    carried: f64,
    bytes: usize,
    probe: bool,
}

/// Bytes in flight, summed up over the seconds: between two moments it tells their mean.
struct Carried {
    byte_seconds: f64,
    until: Instant,
}

/// A request whose answer came whole.
pub(super) struct Took {
    pub class: Class,
    pub bytes: usize,
    pub time: Duration,
    /// Mean bytes in flight at its endpoint, its own with them.
    pub load: f64,
}

/// How a permit ended.
pub(super) struct Ending {
    pub permit: u64,
    /// None: given up.
    pub outcome: Option<Outcome>,
    /// It was not sent yet.
    pub waits: bool,
    pub began: Instant,
    /// The answer's first byte.
    pub answered: Option<Instant>,
    /// The last byte that moved.
    pub moved_at: Instant,
    pub moved: usize,
}

impl<T> Member<T> {
    pub fn new(address: SocketAddr, payload: T, options: &EndpointOptions, now: Instant) -> Self {
        Self {
            address,
            payload: Arc::new(payload),
            breaker: EndpointBreaker::new(options.breaker),
            window: Window::new(options.window, now),
            estimates: Estimates::default(),
            refusals: PerClass::default(),
            in_flight_bytes: 0,
            carried: Carried {
                byte_seconds: 0.0,
                until: now,
            },
            flights: BTreeMap::new(),
            totals: Requests::default(),
            denied_in_a_row: 0,
        }
    }

    /// Whether `bytes` more may be in flight. One that is larger than the window goes alone.
    pub fn has_room(&self, bytes: usize) -> bool {
        bytes == 0 || self.in_flight_bytes == 0 || self.in_flight_bytes + bytes <= self.window.bytes()
    }

    /// The same for a hedge, which may go beyond the window: it waits for nobody, or it would never go where all windows are
    /// full, and that is where something hangs. There are few of them.
    pub fn has_room_for_hedge(&self, bytes: usize) -> bool {
        self.has_room(bytes) || self.in_flight_bytes + bytes <= HEDGED_WINDOWS * self.window.bytes()
    }

    /// It has such a request already: as long as there are others, the next one of a subset joins. A gateway that loads much at
    /// a time is not held up by the speed of a few.
    pub fn is_busy(&self, bytes: usize) -> bool {
        bytes > 0 && self.in_flight_bytes >= bytes
    }

    pub fn window_bytes(&self) -> usize {
        self.window.bytes()
    }

    /// A request for `bytes` has to wait, or to go elsewhere.
    pub fn is_full(&mut self, bytes: usize) {
        self.window.is_full(self.in_flight_bytes + bytes);
    }

    /// The cost of a request for `bytes` here, in seconds: what one takes there lately, with what was in flight then
    /// scaled to what would be in flight now; and more if the oldest under way takes longer than that.
    ///
    /// `typical` seconds are assumed of an endpoint that is new, and of one that was idle for long: it may have recovered,
    /// and gets one request that shows whether it has.
    pub fn cost(&self, class: Class, bytes: usize, typical: &Estimates, now: Instant) -> f64 {
        let known = self.known(class, bytes, typical, now);
        let mut flights = self.flights.values();
        let oldest = flights.find(|flight| tells(flight.class, flight.bytes));
        let late = oldest.map_or(1.0, |oldest| {
            let known = self.known(oldest.class, oldest.bytes, typical, now);
            let expected = known.seconds(oldest.bytes).unwrap_or(1.0);
            let expected = expected * known.loaded(self.load_of(oldest, now)).max(1.0);
            ((now - oldest.since).as_secs_f64() / expected.max(1e-6)).max(1.0)
        });
        let seconds = known.seconds(bytes).unwrap_or(1.0) * late;
        if bytes == 0 {
            return seconds * (self.flights.len() as f64 + 1.0);
        }
        let in_flight = (self.in_flight_bytes + bytes) as f64;
        let load = known.grown(in_flight) * (in_flight / bytes as f64).powf(LOAD);
        seconds * load * self.refusals.of(class).factor(now)
    }

    /// What is known of requests of this kind: here, or else of all endpoints.
    fn known<'a>(&'a self, class: Class, bytes: usize, typical: &'a Estimates, now: Instant) -> &'a Estimate {
        let own = self.estimates.of(class);
        let is_alike = |flight: &Flight| flight.class == class && (flight.bytes > 0) == (bytes > 0);
        let forgotten = own.is_stale(bytes, now) && !self.flights.values().any(is_alike);
        match forgotten || own.seconds(bytes).is_none() {
            true => typical.of(class),
            false => own,
        }
    }

    /// Mean bytes in flight here since a request was sent.
    pub fn load(&self, permit: u64, now: Instant) -> Option<f64> {
        self.flights.get(&permit).map(|flight| self.load_of(flight, now))
    }

    fn load_of(&self, flight: &Flight, now: Instant) -> f64 {
        let seconds = (now - flight.since).as_secs_f64();
        match seconds > 0.0 {
            true => (self.carried_by(now) - flight.carried) / seconds,
            false => self.in_flight_bytes as f64,
        }
    }

    fn carried_by(&self, now: Instant) -> f64 {
        let seconds = (now - self.carried.until).as_secs_f64();
        self.carried.byte_seconds + self.in_flight_bytes as f64 * seconds
    }

    /// The bytes in flight are about to change.
    fn carry(&mut self, now: Instant) -> f64 {
        self.carried.byte_seconds = self.carried_by(now);
        self.carried.until = now;
        self.carried.byte_seconds
    }

    pub fn begin(&mut self, permit: u64, class: Class, bytes: usize, start: Start, now: Instant) {
        let probe = self.breaker.begin(now);
        if bytes > 0 {
            self.window.works(now);
        }
        let carried = self.carry(now);
        self.in_flight_bytes += bytes;
        let flight = Flight {
            class,
            since: now,
            carried,
            bytes,
            probe,
        };
        self.flights.insert(permit, flight);
        match start {
            Start::First => {}
            Start::Retry => self.totals.retries += 1,
            Start::Hedge => self.totals.hedges += 1,
        }
    }

    /// A request that could not be sent when its permit began.
    pub fn goes(&mut self, permit: u64, now: Instant) {
        let carried = self.carried_by(now);
        if let Some(flight) = self.flights.get_mut(&permit) {
            flight.since = now;
            flight.carried = carried;
        }
    }

    /// Learns from how a request ended. Answers what it took, if its answer came whole.
    pub fn end(&mut self, ending: &Ending, now: Instant) -> Option<Took> {
        self.totals.end(ending);
        let flight = self.flights.remove(&ending.permit)?;
        let load = self.load_of(&flight, now);
        let Flight {
            class, bytes, probe, ..
        } = flight;
        self.carry(now);
        self.in_flight_bytes -= bytes;
        let patience = if ending.answered.is_some() {
            SILENCE
        } else {
            NO_ANSWER
        };
        let silent = now - ending.moved_at >= patience;
        if let Some(Outcome::Answered { status }) = ending.outcome
            && bytes > 0
        {
            self.refusals.of_mut(class).answered(status, now);
        }
        let took = match ending.outcome {
            Some(Outcome::Answered { status }) => self.answered(ending, status, (class, probe), load, now),
            Some(Outcome::Lost(loss)) => {
                if loss == Loss::Timeout {
                    self.window.shrink(now);
                }
                self.breaker.failed(probe, now);
                None
            }
            None if ending.waits => {
                if probe {
                    self.breaker.probe_given_up(now);
                }
                None
            }
            None => {
                let whole = now - ending.began;
                let each = match ending.moved {
                    0 => whole,
                    moved => whole.mul_f64((bytes as f64 / moved as f64).max(1.0)),
                };
                let estimate = self.estimates.of_mut(class);
                // Given up at once, it would make a new endpoint look fast.
                let is_known = ending.moved > 0 || silent || estimate.seconds(bytes).is_some();
                if is_known && tells(class, bytes) {
                    estimate.gave_up(bytes, each, load, now);
                }
                match (silent, probe) {
                    (true, _) => self.breaker.failed(probe, now),
                    (false, true) => self.breaker.probe_given_up(now),
                    (false, false) => {}
                }
                None
            }
        };
        if self.in_flight_bytes == 0 {
            self.window.idles(now);
        }
        took
    }

    fn answered(
        &mut self,
        ending: &Ending,
        status: u16,
        (class, probe): (Class, bool),
        load: f64,
        now: Instant,
    ) -> Option<Took> {
        match status {
            429 | 503 => {
                self.window.shrink(now);
                self.breaker.failed(probe, now);
                return None;
            }
            500 | 502.. => {
                self.breaker.failed(probe, now);
                return None;
            }
            401 | 403 => self.denied_in_a_row += 1,
            _ => self.denied_in_a_row = 0,
        }
        self.breaker.succeeded();
        let first = ending.answered.unwrap_or(now);
        let moved = ending.moved;
        // An upload may be refused before its body is sent.
        if !tells(class, moved) || (status >= 300 && moved > 0) {
            return None;
        }
        let estimate = self.estimates.of_mut(class);
        match class {
            Class::Load => estimate.answered(first - ending.began, moved, now - first, load, now),
            // It is through before its answer begins, and its time is all one.
            Class::Store => estimate.moved(moved, now - ending.began, load, now),
        }
        if moved > 0 {
            self.window.came(moved, now);
        }
        let (bytes, time) = (moved, now - ending.began);
        (status < 300).then_some(Took {
            class,
            bytes,
            time,
            load,
        })
    }

    pub fn totals(&self) -> Requests {
        self.totals
    }

    pub fn state(&self, now: Instant) -> EndpointState {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a positive rate"
        )]
        let bytes_per_second = self.window.throughput() as u64;
        let latency = self.estimates.of(Class::Load).latency();
        EndpointState {
            address: self.address,
            breaker: self.breaker.phase(now),
            window_bytes: self.window.bytes(),
            in_flight_bytes: self.in_flight_bytes,
            in_flight: self.flights.len(),
            latency_us: latency.map(|latency| u64::try_from(latency.as_micros()).unwrap_or(u64::MAX)),
            bytes_per_second,
            denied_in_a_row: self.denied_in_a_row,
            totals: self.totals(),
        }
    }
}
