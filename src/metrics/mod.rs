//! What is counted and timed on the way of a chunk: atomics that `/metrics` reads. A count is one relaxed add, a time three.

pub mod trace;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Upper bounds of the buckets, in microseconds: from a hit in memory to a load that gives up.
pub const BOUNDS_US: [u64; 18] = [
    50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 500_000, 1_000_000,
    2_500_000, 5_000_000, 10_000_000, 30_000_000,
];

/// Finer buckets, of a native histogram of Prometheus: each ends at 2^(1/4) of the one before.
pub const FINE_SCHEMA: i32 = 2;
/// The first of them, from 1 us; bucket 0 ends at 1 s.
pub const FINE_FIRST: i32 = -79;
/// Their number; the last one has what is above 64 s, too.
pub const FINE: usize = 105;

/// Times, by bucket.
#[derive(Debug)]
pub struct Histogram {
    /// The last one has what is above all bounds.
    buckets: [AtomicU64; BOUNDS_US.len() + 1],
    fine: [AtomicU64; FINE],
    /// Times below a microsecond.
    none: AtomicU64,
    sum_us: AtomicU64,
}

impl Default for Histogram {
    fn default() -> Self {
        let zero = |_| AtomicU64::new(0);
        Self {
            buckets: std::array::from_fn(zero),
            fine: std::array::from_fn(zero),
            none: AtomicU64::new(0),
            sum_us: AtomicU64::new(0),
        }
    }
}

/// What a [`Histogram`] had at one time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Times {
    pub buckets: [u64; BOUNDS_US.len() + 1],
    /// From [`FINE_FIRST`] on.
    pub fine: [u64; FINE],
    /// Below a microsecond.
    pub none: u64,
    pub sum_us: u64,
}

impl Default for Times {
    fn default() -> Self {
        Self {
            buckets: [0; BOUNDS_US.len() + 1],
            fine: [0; FINE],
            none: 0,
            sum_us: 0,
        }
    }
}

/// The fine bucket of a time that is not 0.
fn fine_of(us: u64) -> usize {
    let bucket = ((us as f64).log2() - 1e6f64.log2()) * 4.0;
    // Rounded, so that a bound is not above itself.
    let bucket = ((bucket * 1e9).round() / 1e9).ceil();
    #[expect(clippy::cast_possible_truncation, reason = "it is between -80 and 177")]
    let at = bucket as i32 - FINE_FIRST;
    usize::try_from(at).unwrap_or(0).min(FINE - 1)
}

impl Histogram {
    pub fn observe(&self, time: Duration) {
        let us = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let bucket = BOUNDS_US.partition_point(|bound| *bound < us);
        self.buckets[bucket].fetch_add(1, Ordering::Relaxed);
        let fine = match us {
            0 => &self.none,
            _ => &self.fine[fine_of(us)],
        };
        fine.fetch_add(1, Ordering::Relaxed);
        self.sum_us.fetch_add(us, Ordering::Relaxed);
    }

    pub fn since(&self, began: Instant) {
        self.observe(began.elapsed());
    }

    /// Of a future that is awaited; nothing, if it is dropped before its end.
    pub async fn of<T>(&self, future: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let result = future.await;
        self.since(began);
        result
    }

    pub fn read(&self) -> Times {
        Times {
            buckets: std::array::from_fn(|bucket| self.buckets[bucket].load(Ordering::Relaxed)),
            fine: std::array::from_fn(|bucket| self.fine[bucket].load(Ordering::Relaxed)),
            none: self.none.load(Ordering::Relaxed),
            sum_us: self.sum_us.load(Ordering::Relaxed),
        }
    }
}

impl Times {
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// What came after `before`, of the same histogram.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        Self {
            buckets: std::array::from_fn(|bucket| {
                self.buckets[bucket].saturating_sub(before.buckets[bucket])
            }),
            fine: std::array::from_fn(|bucket| self.fine[bucket].saturating_sub(before.fine[bucket])),
            none: self.none.saturating_sub(before.none),
            sum_us: self.sum_us.saturating_sub(before.sum_us),
        }
    }

    /// In seconds, as exact as the buckets are; None: there is no time. Beyond the last bound it is that bound.
    pub fn quantile(&self, share: f64) -> Option<f64> {
        let wanted = share * self.count() as f64;
        let mut below = 0.0;
        for (bucket, count) in self.buckets.iter().map(|count| *count as f64).enumerate() {
            if count > 0.0 && below + count >= wanted {
                let bound = |at: usize| BOUNDS_US[at.min(BOUNDS_US.len() - 1)] as f64 / 1e6;
                let low = bucket.checked_sub(1).map_or(0.0, bound);
                return Some(low + (bound(bucket) - low) * ((wanted - below) / count).clamp(0.0, 1.0));
            }
            below += count;
        }
        None
    }
}

/// A count for each of a few words that are known from the start: no series appears late.
#[derive(Debug)]
pub struct Counts {
    words: &'static [&'static str],
    counts: Box<[AtomicU64]>,
}

impl Counts {
    pub fn new(words: &'static [&'static str]) -> Self {
        Self {
            words,
            counts: words.iter().map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// A word that is not among them is the last one's.
    pub fn add(&self, word: &str, count: u64) {
        let at = self.words.iter().position(|one| *one == word);
        if let Some(counter) = self.counts.get(at.unwrap_or(self.words.len().saturating_sub(1))) {
            counter.fetch_add(count, Ordering::Relaxed);
        }
    }

    pub fn read(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let counts = self.counts.iter().map(|count| count.load(Ordering::Relaxed));
        self.words.iter().copied().zip(counts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_in_the_first_bucket_whose_bound_it_does_not_exceed() {
        let histogram = Histogram::default();
        for us in [0, 50, 51, 30_000_000, 30_000_001] {
            histogram.observe(Duration::from_micros(us));
        }
        let times = histogram.read();
        assert_eq!(times.buckets[..3], [2, 1, 0]);
        assert_eq!(times.buckets[BOUNDS_US.len() - 1..], [1, 1]);
        assert_eq!((times.count(), times.sum_us), (5, 60_000_102));
    }

    #[test]
    fn a_quantile_lies_in_its_bucket() {
        let histogram = Histogram::default();
        assert_eq!(histogram.read().quantile(0.5), None);
        for us in [40, 60, 80, 40_000_000] {
            histogram.observe(Duration::from_micros(us));
        }
        let times = histogram.read();
        let of = |share| times.quantile(share).unwrap();
        assert!(of(0.1) < 50e-6 && (50e-6..100e-6).contains(&of(0.5)));
        assert_eq!(of(0.99), 30.0);
        histogram.observe(Duration::from_millis(2));
        let later = histogram.read().since(&times);
        assert_eq!((later.count(), later.sum_us), (1, 2000));
    }

    #[test]
    fn a_word_that_is_not_known_counts_as_the_last_one() {
        let counts = Counts::new(&["a", "other"]);
        for (word, count) in [("a", 2), ("b", 1), ("other", 1)] {
            counts.add(word, count);
        }
        assert_eq!(counts.read().collect::<Vec<_>>(), [("a", 2), ("other", 2)]);
    }
}
