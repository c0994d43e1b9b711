//! Latencies.

use std::time::Duration;

use serde::Serialize;

/// Longer times count as this.
const LONGEST: Duration = Duration::from_secs(3600);
/// Figures are at most 1% off.
const DIGITS: u8 = 2;

/// Counts times in nanoseconds. Its 18 KiB are allocated at the start, so that nothing grows while the clock runs.
#[derive(Debug, Clone)]
pub(super) struct Histogram {
    counts: hdrhistogram::Histogram<u32>,
    /// Exact, so that no request seems longer than its phase.
    longest: u64,
}

/// Times of one octave: longer than the bucket before, up to this.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct HistogramBucket {
    pub up_to_us: f64,
    pub count: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        let counts = hdrhistogram::Histogram::new_with_bounds(1, nanos(LONGEST), DIGITS);
        Self {
            counts: counts.expect("good bounds"),
            longest: 0,
        }
    }
}

impl Histogram {
    pub fn record(&mut self, time: Duration) {
        self.counts.saturating_record(nanos(time));
        self.longest = self.longest.max(nanos(time));
    }

    pub fn add(&mut self, other: &Self) {
        self.counts += &other.counts;
        self.longest = self.longest.max(other.longest);
    }

    pub fn count(&self) -> u64 {
        self.counts.len()
    }

    pub fn mean_us(&self) -> f64 {
        self.counts.mean() / 1e3
    }

    /// A time that at least this share of all times did not exceed; `share` from 0, the shortest, to 1, the
    /// longest.
    pub fn quantile_us(&self, share: f64) -> f64 {
        micros(self.counts.value_at_quantile(share).min(self.longest))
    }

    /// The octaves from the first with a time to the last.
    pub fn octaves(&self) -> Vec<HistogramBucket> {
        let octaves = self.counts.iter_log(1, 2.0).map(|octave| HistogramBucket {
            // 2^n is the first of the next octave; the nanosecond does not matter.
            up_to_us: micros(octave.value_iterated_to() + 1),
            count: octave.count_since_last_iteration(),
        });
        octaves.skip_while(|bucket| bucket.count == 0).collect()
    }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(times_ns: impl IntoIterator<Item = u64>) -> Histogram {
        let mut histogram = Histogram::default();
        for ns in times_ns {
            histogram.record(Duration::from_nanos(ns));
        }
        histogram
    }

    #[test]
    fn figures_of_known_times() {
        let mut histogram = of((1..=500).map(|us| us * 1000));
        histogram.add(&of((501..=1000).map(|us| us * 1000)));
        assert_eq!(histogram.count(), 1000);
        assert_eq!(histogram.quantile_us(1.0).to_bits(), 1000.0_f64.to_bits());
        let quantiles = [0.0, 0.5, 0.9, 0.99, 0.999, 1.0].map(|share| histogram.quantile_us(share));
        let exact = [1.0, 500.0, 900.0, 990.0, 999.0, 1000.0];
        for (found, exact) in quantiles
            .into_iter()
            .zip(exact)
            .chain([(histogram.mean_us(), 500.5)])
        {
            assert!((found / exact - 1.0).abs() < 0.01, "{found}, not {exact}");
        }
        let hour_us = of([u64::MAX]).quantile_us(1.0);
        assert!((hour_us / 3.6e9 - 1.0).abs() < 0.01, "{hour_us}");
    }

    #[test]
    fn octaves_of_known_times() {
        assert!(of([]).octaves().is_empty());
        let octaves = of([1_500, 1_600, 2_047, 9_000]).octaves();
        let shown: Vec<(f64, u64)> = octaves
            .iter()
            .map(|bucket| (bucket.up_to_us, bucket.count))
            .collect();
        assert_eq!(shown, [(2.048, 3), (4.096, 0), (8.192, 0), (16.384, 1)]);
        for times in [
            vec![0],
            vec![u64::MAX],
            vec![1, 255, 256, 1 << 20, (1 << 30) - 1, 1 << 41],
        ] {
            let len = times.len() as u64;
            let counted: u64 = of(times).octaves().iter().map(|bucket| bucket.count).sum();
            assert_eq!(counted, len);
        }
    }
}
