//! Latencies: log-linear, as HdrHistogram's. 32 steps an octave, so a percentile is at most 3.2% too high.

use std::time::Duration;

use serde::Serialize;

/// Steps an octave, as a power of two.
const STEP_BITS: u32 = 5;
const STEPS: u64 = 1 << STEP_BITS;

/// Counts times in nanoseconds. Takes memory only for times up to the longest that was met, at most 2000 counters.
#[derive(Debug, Clone, Default)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    sum_ns: u128,
    min_ns: u64,
    max_ns: u64,
}

/// Times of one octave: longer than the bucket before says, up to this.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Bucket {
    pub up_to_us: f64,
    pub count: u64,
}

impl Histogram {
    pub fn record(&mut self, time: Duration) {
        let ns = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        let index = index(ns);
        if self.counts.len() <= index {
            self.counts.resize(index + 1, 0);
        }
        self.counts[index] += 1;
        self.min_ns = if self.total == 0 { ns } else { self.min_ns.min(ns) };
        self.max_ns = self.max_ns.max(ns);
        self.total += 1;
        self.sum_ns += u128::from(ns);
    }

    pub fn add(&mut self, other: &Self) {
        if other.total == 0 {
            return;
        }
        if self.counts.len() < other.counts.len() {
            self.counts.resize(other.counts.len(), 0);
        }
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.min_ns = match self.total {
            0 => other.min_ns,
            _ => self.min_ns.min(other.min_ns),
        };
        self.max_ns = self.max_ns.max(other.max_ns);
        self.total += other.total;
        self.sum_ns += other.sum_ns;
    }

    pub fn count(&self) -> u64 {
        self.total
    }

    pub fn min_us(&self) -> f64 {
        micros(self.min_ns)
    }

    pub fn max_us(&self) -> f64 {
        micros(self.max_ns)
    }

    pub fn mean_us(&self) -> f64 {
        match self.total {
            0 => 0.0,
            total => self.sum_ns as f64 / total as f64 / 1e3,
        }
    }

    /// A time that at least this share of all did not exceed; `share` from 0 to 1.
    pub fn quantile_us(&self, share: f64) -> f64 {
        let rank = share * self.total as f64;
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen > 0 && seen as f64 >= rank {
                return micros(highest(index).clamp(self.min_ns, self.max_ns));
            }
        }
        0.0
    }

    /// By octave, from the first that has some to the last.
    pub fn octaves(&self) -> Vec<Bucket> {
        let mut octaves: Vec<Bucket> = Vec::new();
        let mut octave_end = 0;
        for (index, &count) in self.counts.iter().enumerate() {
            // 2^n is the first of an octave, so the one before ends a nanosecond earlier: nobody minds.
            let end = highest(index).saturating_add(1).checked_next_power_of_two();
            let end = end.unwrap_or(u64::MAX);
            match octaves.last_mut() {
                Some(last) if octave_end == end => last.count += count,
                None if count == 0 => {}
                _ => octaves.push(Bucket {
                    up_to_us: micros(end),
                    count,
                }),
            }
            octave_end = end;
        }
        octaves
    }
}

fn micros(ns: u64) -> f64 {
    ns as f64 / 1e3
}

/// Exact below 2 * STEPS; from there on the highest bits after the leading one choose the step.
fn index(ns: u64) -> usize {
    let octave = ns.max(1).ilog2().saturating_sub(STEP_BITS);
    let step = ns >> octave;
    usize::try_from(u64::from(octave) * STEPS + step).unwrap_or(usize::MAX)
}

/// The longest time that counts at `index`.
fn highest(index: usize) -> u64 {
    let index = index as u64;
    let octave = (index / STEPS).saturating_sub(1);
    let step = index - octave * STEPS;
    ((u128::from(step) + 1) << octave)
        .saturating_sub(1)
        .try_into()
        .unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(times_ns: &[u64]) -> Histogram {
        let mut histogram = Histogram::default();
        for &ns in times_ns {
            histogram.record(Duration::from_nanos(ns));
        }
        histogram
    }

    #[test]
    fn every_time_has_a_place_near_it() {
        let large = (0..64).flat_map(|bit| [(1_u64 << bit) - 1, 1 << bit, (1 << bit) + 1]);
        for ns in (0..5000).chain(large) {
            let high = highest(index(ns));
            assert!(high >= ns && high - ns <= ns / 32, "{ns} counts up to {high}");
        }
        let places: Vec<usize> = (0..5000).map(index).collect();
        assert!(places.windows(2).all(|pair| pair[1] - pair[0] <= 1), "no gaps");
        assert!(index(u64::MAX) < 2000);
        assert_eq!(highest(index(u64::MAX)), u64::MAX);
    }

    #[test]
    fn figures_of_known_times() {
        let times: Vec<u64> = (1..=1000).map(|us| us * 1000).collect();
        let histogram = of(&times);
        assert_eq!((histogram.min_us(), histogram.max_us()), (1.0, 1000.0));
        assert!((histogram.mean_us() - 500.5).abs() < 1e-9);
        for (share, exact) in [
            (0.5, 500.0),
            (0.9, 900.0),
            (0.99, 990.0),
            (0.999, 999.0),
            (1.0, 1000.0),
        ] {
            let found = histogram.quantile_us(share);
            assert!(found >= exact && found <= exact * 1.033, "{share}: {found}");
        }
        assert_eq!(of(&[7_000]).quantile_us(0.5), 7.0, "never beyond the longest");
        let empty = Histogram::default();
        assert_eq!(
            (empty.quantile_us(0.5), empty.mean_us(), empty.count()),
            (0.0, 0.0, 0)
        );
        assert!(empty.octaves().is_empty());
        let octaves = of(&[1_500, 1_600, 9_000]).octaves();
        let shown: Vec<(f64, u64)> = octaves
            .iter()
            .map(|bucket| (bucket.up_to_us, bucket.count))
            .collect();
        assert_eq!(shown, [(2.048, 2), (4.096, 0), (8.192, 0), (16.384, 1)]);
    }

    proptest! {
        #[test]
        fn parts_add_up_to_the_whole(a: Vec<u32>, b: Vec<u32>) {
            let (a, b): (Vec<u64>, Vec<u64>) = (a.into_iter().map(u64::from).collect(), b.into_iter().map(u64::from).collect());
            let mut sum = of(&a);
            sum.add(&of(&b));
            let whole = of(&[a, b].concat());
            prop_assert_eq!(format!("{sum:?}"), format!("{whole:?}"));
            let counted: u64 = whole.octaves().iter().map(|bucket| bucket.count).sum();
            prop_assert_eq!(counted, whole.count());
        }
    }
}
