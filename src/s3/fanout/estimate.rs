//! How long requests take at an endpoint, scaled by what is in flight there.

use std::time::Duration;

use tokio::time::Instant;

use super::permit::{Class, PerClass};

/// Weight of a new sample.
const WEIGHT: f64 = 0.3;
/// A sample older than this no longer counts.
const STALE: Duration = Duration::from_secs(10);

/// Uploads of less say nothing of throughput: nearly all of their time is the server's. A lease has a hundred bytes.
const UPLOAD_MIN: usize = 1 << 18;
/// The power by which time is taken to grow with what is in flight. Where an endpoint is saturated 1 would be right, where it is
/// not, 0. With more than this, an idle one that hangs looks better than busy ones that work.
const GROWTH: f64 = 0.5;

/// Whether the time of such a request says something of its endpoint.
pub(super) fn tells(class: Class, bytes: usize) -> bool {
    class == Class::Load || bytes >= UPLOAD_MIN
}

/// A PUT takes another time than a range of as many bytes.
pub(super) type Estimates = PerClass<Estimate>;

/// How long requests take, until the answer begins and for each byte of it; and how much was in flight at their endpoint
/// then, which is what they shared its speed with.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Estimate {
    latency: Option<f64>,
    seconds_per_byte: Option<f64>,
    /// Bytes in flight.
    load: Option<f64>,
    /// The last sample of a latency.
    answered_at: Option<Instant>,
    /// The last sample of a body. Requests without one say nothing of bodies, however often they come.
    moved_at: Option<Instant>,
}

impl Estimate {
    /// An answer began after `latency`; its body of `bytes` took `time`, under `load`.
    pub fn answered(&mut self, latency: Duration, bytes: usize, time: Duration, load: f64, now: Instant) {
        let weight = self.weight(0, now);
        blend(&mut self.latency, latency.as_secs_f64(), weight);
        self.answered_at = Some(now);
        if bytes > 0 {
            self.moved(bytes, time, load, now);
        }
    }

    /// `bytes` took `time`; of an upload, answer included.
    pub fn moved(&mut self, bytes: usize, time: Duration, load: f64, now: Instant) {
        let (weight, each) = (self.weight(bytes, now), time.as_secs_f64() / bytes as f64);
        blend(&mut self.load, load, weight);
        blend(&mut self.seconds_per_byte, each, weight);
        self.moved_at = Some(now);
    }

    /// A request for `bytes` was given up after `time` under `load`: it would have taken at least that time.
    pub fn gave_up(&mut self, bytes: usize, time: Duration, load: f64, now: Instant) {
        let (weight, least) = (self.weight(bytes, now), time.as_secs_f64());
        let is_more = self.seconds(bytes).is_none_or(|expected| expected < least);
        if bytes == 0 {
            if is_more {
                blend(&mut self.latency, least, weight);
            }
            self.answered_at = Some(now);
        } else {
            if is_more {
                blend(&mut self.load, load, weight);
                blend(&mut self.seconds_per_byte, least / bytes as f64, weight);
            }
            self.moved_at = Some(now);
        }
    }

    /// Old news don't count.
    fn weight(&self, bytes: usize, now: Instant) -> f64 {
        if self.is_stale(bytes, now) { 1.0 } else { WEIGHT }
    }

    /// Seconds that a request for `bytes` takes. 0 bytes: until its answer begins.
    pub fn seconds(&self, bytes: usize) -> Option<f64> {
        match (bytes, self.latency, self.seconds_per_byte) {
            (0, latency, _) => latency,
            (_, latency, Some(each)) => Some(latency.unwrap_or_default() + each * bytes as f64),
            _ => None,
        }
    }

    /// How many times as much is in flight as when that was measured, at `load` bytes.
    pub fn loaded(&self, load: f64) -> f64 {
        self.load
            .filter(|usual| *usual > 0.0)
            .map_or(1.0, |usual| load / usual)
    }

    /// How many times as long as usual a request is taken to take there, with `load` bytes in flight.
    pub fn grown(&self, load: f64) -> f64 {
        self.loaded(load).powf(GROWTH)
    }

    /// The time until an answer begins.
    pub fn latency(&self) -> Option<Duration> {
        self.latency.map(Duration::from_secs_f64)
    }

    /// Nothing was heard for long of requests for `bytes`, with a body or without: things may have changed.
    pub fn is_stale(&self, bytes: usize, now: Instant) -> bool {
        let sampled = if bytes == 0 {
            self.answered_at
        } else {
            self.moved_at
        };
        sampled.is_none_or(|at| now - at > STALE)
    }
}

fn blend(kept: &mut Option<f64>, sample: f64, weight: f64) {
    *kept = Some(kept.map_or(sample, |kept| kept + weight * (sample - kept)));
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn close(seconds: Option<f64>, to: f64) -> bool {
        (seconds.unwrap() - to).abs() < to / 100.0
    }

    #[test]
    fn it_follows_the_samples() {
        let now = Instant::now();
        let mut estimate = Estimate::default();
        assert_eq!((estimate.seconds(0), estimate.seconds(1)), (None, None));
        estimate.answered(Duration::from_millis(10), 0, Duration::ZERO, 0.0, now);
        assert_eq!(estimate.seconds(1), None, "latency says nothing of throughput");
        estimate.moved(1000, SECOND, 1000.0, now);
        assert!(close(estimate.seconds(2000), 2.01));
        for _ in 0..30 {
            estimate.answered(Duration::from_millis(10), 1000, 3 * SECOND, 4000.0, now);
        }
        assert!(close(estimate.seconds(1000), 3.01));
        assert!(close(Some(estimate.loaded(8000.0)), 2.0));
    }

    #[test]
    fn a_request_that_was_given_up_can_only_make_it_slower() {
        let now = Instant::now();
        let mut estimate = Estimate::default();
        estimate.moved(1000, 2 * SECOND, 1000.0, now);
        estimate.gave_up(1000, SECOND, 1000.0, now);
        assert!(close(estimate.seconds(1000), 2.0));
        estimate.gave_up(1000, 10 * SECOND, 1000.0, now);
        assert!(estimate.seconds(1000).unwrap() > 4.0);
    }

    #[test]
    fn old_news_is_forgotten() {
        let now = Instant::now();
        let mut estimate = Estimate::default();
        assert!(estimate.is_stale(1, now));
        estimate.moved(1000, 10 * SECOND, 1000.0, now);
        let later = now + 2 * STALE;
        assert!(!estimate.is_stale(1, now) && estimate.is_stale(1, later));
        estimate.moved(1000, SECOND, 1000.0, later);
        assert!(close(estimate.seconds(1000), 1.0));
        // Of bodies, also where requests without one come all the time.
        let answered =
            |estimate: &mut Estimate, at| estimate.answered(SECOND / 1000, 0, Duration::ZERO, 0.0, at);
        answered(&mut estimate, later + STALE);
        let later = later + 2 * STALE;
        answered(&mut estimate, later);
        assert!(!estimate.is_stale(0, later) && estimate.is_stale(1, later));
        estimate.moved(1000, 5 * SECOND, 1000.0, later);
        assert!(close(estimate.seconds(1000), 5.001));
    }
}
