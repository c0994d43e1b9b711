//! Figures of an endpoint, for the status page and the metrics.

use std::net::SocketAddr;

use serde::Serialize;

use super::breaker::BreakerPhase;
use super::member::Ending;
use super::permit::{Loss, Outcome};

/// The state of one endpoint, for `bench`, the status page and the metrics.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct EndpointState {
    pub address: SocketAddr,
    pub breaker: BreakerPhase,
    /// Bytes that it may have in flight.
    pub window_bytes: usize,
    pub in_flight_bytes: usize,
    /// Requests.
    pub in_flight: usize,
    /// Time until an answer begins, lately; None before the first.
    pub latency_us: Option<u64>,
    /// Throughput of bodies and uploads, lately; 0 before the first.
    pub bytes_per_second: u64,
    /// The latest answers that were 401 or 403, in a row.
    pub denied_in_a_row: u64,
    #[serde(flatten)]
    pub totals: Requests,
}

impl EndpointState {
    /// Its breaker is closed.
    pub fn works(&self) -> bool {
        self.breaker == BreakerPhase::Closed
    }
}

/// The requests of an endpoint, and how they ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct Requests {
    /// 2xx and 3xx.
    pub ok: u64,
    /// 4xx, and 501: it works, and said no.
    pub refused: u64,
    /// 401 and 403: it does not accept the keys, or they may not do this.
    pub denied: u64,
    /// 429 and 503.
    pub throttled: u64,
    /// Other 5xx.
    pub failed: u64,
    /// No connection, a broken one, or an answer that was none.
    pub lost: u64,
    pub timed_out: u64,
    /// Nobody waited for the answer any more.
    pub given_up: u64,
    /// Requests that were sent here after an attempt had failed.
    pub retries: u64,
    /// Requests that were sent here because another endpoint was slow.
    pub hedges: u64,
    /// Bytes of bodies and uploads.
    pub bytes: u64,
}

impl Requests {
    /// All that have ended.
    pub fn total(&self) -> u64 {
        self.ok
            + self.refused
            + self.denied
            + self.throttled
            + self.failed
            + self.lost
            + self.timed_out
            + self.given_up
    }

    /// A request ended.
    pub(super) fn end(&mut self, ending: &Ending) {
        self.bytes += ending.moved as u64;
        let count = match ending.outcome {
            None => &mut self.given_up,
            Some(Outcome::Lost(Loss::Connection)) => &mut self.lost,
            Some(Outcome::Lost(Loss::Timeout)) => &mut self.timed_out,
            Some(Outcome::Answered { status }) => match status {
                429 | 503 => &mut self.throttled,
                401 | 403 => &mut self.denied,
                // "Not implemented" is what the probe of capabilities may hear from a server that is well.
                400..500 | 501 => &mut self.refused,
                500.. => &mut self.failed,
                _ => &mut self.ok,
            },
        };
        *count += 1;
    }

    /// Both together.
    #[must_use]
    pub fn and(&self, other: &Self) -> Self {
        Self {
            ok: self.ok + other.ok,
            refused: self.refused + other.refused,
            denied: self.denied + other.denied,
            throttled: self.throttled + other.throttled,
            failed: self.failed + other.failed,
            lost: self.lost + other.lost,
            timed_out: self.timed_out + other.timed_out,
            given_up: self.given_up + other.given_up,
            retries: self.retries + other.retries,
            hedges: self.hedges + other.hedges,
            bytes: self.bytes + other.bytes,
        }
    }

    /// The difference since `earlier`. An address that went and came back counts from zero: then it may be less than
    /// there was.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        Self {
            ok: self.ok.saturating_sub(earlier.ok),
            refused: self.refused.saturating_sub(earlier.refused),
            denied: self.denied.saturating_sub(earlier.denied),
            throttled: self.throttled.saturating_sub(earlier.throttled),
            failed: self.failed.saturating_sub(earlier.failed),
            lost: self.lost.saturating_sub(earlier.lost),
            timed_out: self.timed_out.saturating_sub(earlier.timed_out),
            given_up: self.given_up.saturating_sub(earlier.given_up),
            retries: self.retries.saturating_sub(earlier.retries),
            hedges: self.hedges.saturating_sub(earlier.hedges),
            bytes: self.bytes.saturating_sub(earlier.bytes),
        }
    }
}
