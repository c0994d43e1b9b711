//! Keeps requests away from an endpoint that fails, and lets one probe through now and then.

use std::time::Duration;

use serde::Serialize;
use tokio::time::Instant;

/// When an endpoint is left alone, and for how long.
#[derive(Debug, Clone, Copy)]
pub struct BreakerOptions {
    /// Failures in a row that open it.
    pub failures: u32,
    /// The longest that it stays open at first; doubles each time a probe fails.
    pub open: Duration,
    pub open_max: Duration,
}

/// The phase of a breaker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum BreakerPhase {
    /// Lets them through.
    Closed,
    /// Lets none through.
    Open,
    /// Lets one through, the probe, or waits for how it ends.
    HalfOpen,
}

/// The part of the time that chance takes off it.
const JITTER: f64 = 0.5;

/// Keeps requests away from an endpoint that fails.
#[derive(Debug)]
pub struct EndpointBreaker {
    options: BreakerOptions,
    state: State,
    failures: u32,
    /// See [`opened_in_row`](Self::opened_in_row).
    opened: u32,
}

#[derive(Debug, Clone, Copy)]
enum State {
    Closed,
    Open { until: Instant },
    Probing,
}

impl EndpointBreaker {
    pub fn new(options: BreakerOptions) -> Self {
        Self {
            options,
            state: State::Closed,
            failures: 0,
            opened: 0,
        }
    }

    /// Whether a request may be sent now.
    pub fn admits(&self, now: Instant) -> bool {
        match self.state {
            State::Closed => true,
            State::Open { until } => now >= until,
            State::Probing => false,
        }
    }

    pub fn phase(&self, now: Instant) -> BreakerPhase {
        match self.state {
            State::Closed => BreakerPhase::Closed,
            State::Open { until } if now < until => BreakerPhase::Open,
            _ => BreakerPhase::HalfOpen,
        }
    }

    /// When the next probe may be sent; None while everything may.
    #[cfg(test)]
    pub fn opens_again(&self) -> Option<Instant> {
        match self.state {
            State::Open { until } => Some(until),
            _ => None,
        }
    }

    /// Times in a row that it opened, as long as that makes it stay open for longer; 0 once it works.
    pub fn opened_in_row(&self) -> u32 {
        self.opened
    }

    /// A request is sent. Answers whether it is the probe.
    pub fn begin(&mut self, now: Instant) -> bool {
        let probe = matches!(self.state, State::Open { until } if now >= until);
        if probe {
            self.state = State::Probing;
        }
        probe
    }

    /// An answer came that shows that the endpoint works.
    pub fn succeeded(&mut self) {
        self.state = State::Closed;
        self.failures = 0;
        self.opened = 0;
    }

    /// `probe`: what failed was the probe. Others that were under way when it opened say nothing new.
    pub fn failed(&mut self, probe: bool, now: Instant) {
        self.failures = self.failures.saturating_add(1);
        let opens = match self.state {
            State::Closed => self.failures >= self.options.failures,
            State::Open { .. } => false,
            State::Probing => probe,
        };
        if opens {
            let open = self.options.open.saturating_mul(1 << self.opened.min(16));
            // Two that have failed for long count alike.
            self.opened += u32::from(open < self.options.open_max);
            // Many gateways see the same failure: their probes must not come together.
            let open = open
                .min(self.options.open_max)
                .mul_f64(1.0 - JITTER * fastrand::f64());
            self.state = State::Open { until: now + open };
        }
    }

    /// What opened it may be over: the next probe may be sent now.
    pub fn may_work(&mut self, now: Instant) {
        if let State::Open { until } = &mut self.state {
            *until = now.min(*until);
        }
    }

    /// The probe was given up: another one may be sent.
    pub fn probe_given_up(&mut self, now: Instant) {
        if let State::Probing = self.state {
            self.state = State::Open { until: now };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn breaker() -> EndpointBreaker {
        EndpointBreaker::new(BreakerOptions {
            failures: 3,
            open: SECOND,
            open_max: 3 * SECOND,
        })
    }

    #[test]
    fn failures_in_a_row_open_it_and_one_probe_closes_it() {
        let (mut breaker, now) = (breaker(), Instant::now());
        for _ in 0..5 {
            breaker.failed(false, now);
            breaker.failed(false, now);
            breaker.succeeded();
        }
        assert_eq!(breaker.phase(now), BreakerPhase::Closed, "not in a row");
        for _ in 0..3 {
            assert!(breaker.admits(now));
            breaker.failed(false, now);
        }
        assert_eq!(
            (breaker.phase(now), breaker.admits(now)),
            (BreakerPhase::Open, false)
        );
        let later = now + SECOND;
        assert_eq!(
            (breaker.phase(later), breaker.admits(later)),
            (BreakerPhase::HalfOpen, true)
        );
        assert!(breaker.begin(later));
        assert!(!breaker.admits(later), "one probe at a time");
        breaker.succeeded();
        assert_eq!(breaker.phase(later), BreakerPhase::Closed);
        assert!(!breaker.begin(later));
    }

    #[test]
    fn it_stays_open_longer_each_time_the_probe_fails() {
        let (mut breaker, mut now) = (breaker(), Instant::now());
        for _ in 0..3 {
            breaker.failed(false, now);
        }
        for (open, opened) in [(1, 1), (2, 2), (3, 2), (3, 2)] {
            assert_eq!(breaker.opened_in_row(), opened, "no more than the time grows");
            // Requests that were under way when it opened.
            breaker.failed(false, now);
            let until = breaker.opens_again().unwrap();
            assert!((open * SECOND / 2..=open * SECOND).contains(&(until - now)));
            now = until;
            assert!(breaker.begin(now));
            breaker.failed(false, now);
            assert_eq!(
                breaker.phase(now),
                BreakerPhase::HalfOpen,
                "that was not the probe"
            );
            breaker.failed(true, now);
        }
    }

    /// Of many that open at the same moment, no tenth of the time has much more than a tenth.
    #[test]
    fn breakers_that_open_together_probe_at_different_times() {
        fastrand::seed(7);
        let now = Instant::now();
        let mut probes = [0; 10];
        for _ in 0..1000 {
            let mut breaker = breaker();
            for _ in 0..3 {
                breaker.failed(false, now);
            }
            let after = breaker.opens_again().unwrap() - now;
            let tenth = after.checked_sub(SECOND / 2).unwrap().as_nanos() / (SECOND / 20).as_nanos();
            probes[usize::try_from(tenth).unwrap().min(9)] += 1;
        }
        assert!(
            probes.iter().all(|probes| (60..=140).contains(probes)),
            "{probes:?}"
        );
    }

    #[test]
    fn a_probe_that_was_given_up_is_followed_by_another() {
        let (mut breaker, now) = (breaker(), Instant::now());
        for _ in 0..3 {
            breaker.failed(false, now);
        }
        let later = now + SECOND;
        breaker.begin(later);
        breaker.probe_given_up(later);
        assert!(breaker.admits(later));
    }
}
