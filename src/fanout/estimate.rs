use std::time::Duration;

use tokio::time::Instant;

/// Weight of a new sample.
const WEIGHT: f64 = 0.3;
/// Old news after so long.
const STALE: Duration = Duration::from_secs(10);

/// How long requests take: until the answer begins, and for each byte of it.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Estimate {
    latency: Option<f64>,
    seconds_per_byte: Option<f64>,
    sampled: Option<Instant>,
}

impl Estimate {
    /// An answer began.
    pub fn answered(&mut self, after: Duration, now: Instant) {
        blend(&mut self.latency, after.as_secs_f64());
        self.sampled = Some(now);
    }

    /// A body of `bytes`, or an upload, took `time`.
    pub fn transferred(&mut self, bytes: usize, time: Duration, now: Instant) {
        if bytes > 0 {
            blend(&mut self.seconds_per_byte, time.as_secs_f64() / bytes as f64);
            self.sampled = Some(now);
        }
    }

    /// A request for `bytes` was given up after `time`: it would have taken at least so long.
    pub fn gave_up(&mut self, bytes: usize, time: Duration, now: Instant) {
        let least = time.as_secs_f64();
        if self.seconds(bytes).is_none_or(|expected| expected < least) {
            match bytes {
                0 => blend(&mut self.latency, least),
                _ => self.transferred(bytes, time, now),
            }
        }
        self.sampled = Some(now);
    }

    /// Seconds that a request for `bytes` takes. 0 bytes: until its answer begins.
    pub fn seconds(&self, bytes: usize) -> Option<f64> {
        match (bytes, self.latency, self.seconds_per_byte) {
            (0, latency, _) => latency,
            (_, latency, Some(each)) => Some(latency.unwrap_or_default() + each * bytes as f64),
            _ => None,
        }
    }

    /// Until an answer begins.
    pub fn latency(&self) -> Option<Duration> {
        self.latency.map(Duration::from_secs_f64)
    }

    /// Nothing was heard for long: things may have changed.
    pub fn is_stale(&self, now: Instant) -> bool {
        self.sampled.is_none_or(|at| now - at > STALE)
    }
}

fn blend(kept: &mut Option<f64>, sample: f64) {
    *kept = Some(kept.map_or(sample, |kept| kept + WEIGHT * (sample - kept)));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_follows_the_samples() {
        let now = Instant::now();
        let mut estimate = Estimate::default();
        assert_eq!((estimate.seconds(0), estimate.seconds(1)), (None, None));
        estimate.answered(Duration::from_millis(10), now);
        assert_eq!(estimate.seconds(1), None, "latency says nothing of throughput");
        estimate.transferred(1000, Duration::from_secs(1), now);
        let close = |seconds: Option<f64>, to: f64| (seconds.unwrap() - to).abs() < to / 100.0;
        assert!(close(estimate.seconds(2000), 2.01));
        for _ in 0..30 {
            estimate.transferred(1000, Duration::from_secs(3), now);
        }
        assert!(close(estimate.seconds(1000), 3.01));
    }

    #[test]
    fn what_was_given_up_can_only_make_it_slower() {
        let now = Instant::now();
        let mut estimate = Estimate::default();
        estimate.transferred(1000, Duration::from_secs(2), now);
        estimate.gave_up(1000, Duration::from_secs(1), now);
        assert!((estimate.seconds(1000).unwrap() - 2.0).abs() < 0.01);
        estimate.gave_up(1000, Duration::from_secs(10), now);
        assert!(estimate.seconds(1000).unwrap() > 4.0);
    }

    #[test]
    fn old_news_is_stale() {
        let now = Instant::now();
        let mut estimate = Estimate::default();
        assert!(estimate.is_stale(now));
        estimate.answered(Duration::ZERO, now);
        assert!(!estimate.is_stale(now) && estimate.is_stale(now + 2 * STALE));
    }
}
