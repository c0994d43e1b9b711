//! What keeping a key is worth: reuses a second, by its class and its age.
//!
//! A key of a class with chance `p` is used again at all with that chance; if so, at an age that follows one shape for all
//! classes. Both are counted. A key that has waited for an age, in vain so far, counts as a failed trial as far as the
//! shape says that it would have been used by then; so a young table does not take all keys for sure hits.
//!
//! The worth at an age is that of the best plan to keep the key until some later age and then let it go: the reuses that
//! this brings, divided by the time that the key has room. (It is the index by which Gittins showed that such choices are
//! best made.) Ages are in bins a factor of the square root of 2 apart.

use super::classes::{CLASSES, HELD, same_uses};

/// From a millisecond to 49 days.
const BINS: usize = 64;
/// Without data a key is used again at a rate of 1/age, from this bin on: 128 ms.
const PRIOR_FROM: usize = 14;
/// Reuses that this assumption weighs.
const PRIOR_REUSES: f64 = 50.0;
/// Keys that the chance of the wider class weighs: all of one prompt share their fate, so these are few prompts.
const PRIOR_KEYS: f64 = 100.0;
/// The chance that a key in use is used again, as a class of its own.
const HELD_CHANCE: f64 = 0.95;
/// Uses from one calculation to the next; at first, when a quarter more is known.
const EVERY_MIN: u32 = 256;
const EVERY_MAX: u32 = 4096;

/// Keys that wait for their next use, or waited in vain: by class and age.
pub type Waits = Box<[[f64; BINS]; CLASSES]>;

pub struct Table {
    /// Keys that were used again, by the class that they had.
    reused: [f64; CLASSES],
    /// The ages at which they were.
    ages: [f64; BINS],
    /// Keys that were forgotten before.
    ended: Waits,
    chances: [f64; CLASSES],
    worth: Box<[[f32; BINS]; HELD + 1]>,
    /// Uses since the last calculation, and in all.
    since: u32,
    uses: u32,
}

pub fn no_waits() -> Waits {
    Box::new([[0.0; BINS]; CLASSES])
}

/// The bin of an age: two for each factor of 2.
pub fn bin(age_ms: u64) -> usize {
    let age = age_ms.max(1);
    let log = age.ilog2();
    // The square root of 2 as a 64-bit mantissa.
    let is_upper = age << (63 - log) >= 0xB504_F333_F9DE_6484;
    (2 * log as usize + usize::from(is_upper)).min(BINS - 1)
}

/// Where a bin begins, in seconds.
fn begin_s(bin: usize) -> f64 {
    (bin as f64 / 2.0).exp2() / 1000.0
}

impl Table {
    pub fn new() -> Self {
        let mut table = Self {
            reused: [0.0; CLASSES],
            ages: [0.0; BINS],
            ended: no_waits(),
            chances: [0.0; CLASSES],
            worth: Box::new([[0.0; BINS]; HELD + 1]),
            since: 0,
            uses: 0,
        };
        table.learn(&no_waits());
        table
    }

    pub fn reused(&mut self, class: usize, age_ms: u64) {
        self.reused[class] += 1.0;
        self.ages[bin(age_ms)] += 1.0;
    }

    pub fn ended(&mut self, class: usize, age_ms: u64) {
        self.ended[class][bin(age_ms)] += 1.0;
    }

    pub fn worth(&self, class: usize, age_ms: u64) -> f32 {
        self.worth[class][bin(age_ms)]
    }

    /// The chance that a key is used again; none while nothing is known.
    pub fn chance_of(&self, class: usize) -> Option<f64> {
        (self.uses > 0).then(|| self.chances[class])
    }

    /// Counts a use. Whether the table is to be calculated anew.
    pub fn is_due(&mut self) -> bool {
        self.since += 1;
        let due = self.since >= (self.uses / 4).clamp(EVERY_MIN, EVERY_MAX);
        if due {
            self.uses = self.uses.saturating_add(self.since);
            self.since = 0;
        }
        due
    }

    /// Halves what is known, so that what was long ago counts less.
    pub fn fade(&mut self) {
        let ended = self.ended.iter_mut().flatten();
        for count in self.reused.iter_mut().chain(&mut self.ages).chain(ended) {
            *count /= 2.0;
        }
    }

    /// Calculates chances and worths. `waiting`: the keys that wait for their next use now.
    pub fn learn(&mut self, waiting: &Waits) {
        let shape = self.shape();
        self.learn_chances(&shape, waiting);
        // Of those that are used again, the share that still waits when a bin begins.
        let mut waits = [0.0; BINS + 1];
        for bin in (0..BINS).rev() {
            waits[bin] = waits[bin + 1] + shape[bin];
        }
        for class in 0..=HELD {
            let chance = self.chances.get(class).copied().unwrap_or(HELD_CHANCE);
            for from in 0..BINS {
                let (mut reuses, mut seconds, mut best) = (0.0, 0.0, 0.0_f64);
                for bin in from..BINS {
                    reuses += chance * shape[bin];
                    let is_here = chance * f64::midpoint(waits[bin], waits[bin + 1]) + 1.0 - chance;
                    seconds += is_here * (begin_s(bin + 1) - begin_s(bin));
                    best = best.max(reuses / seconds);
                }
                #[expect(clippy::cast_possible_truncation, reason = "the order is enough")]
                let best = best as f32;
                self.worth[class][from] = best;
            }
        }
    }

    /// Of the keys that are used again, the share in each bin of ages.
    fn shape(&self) -> [f64; BINS] {
        let mut shape = self.ages;
        for (bin, share) in shape.iter_mut().enumerate().skip(PRIOR_FROM) {
            let left = (-((bin - PRIOR_FROM) as f64) / 2.0).exp2();
            *share += PRIOR_REUSES * left * (1.0 - 0.5_f64.sqrt());
        }
        let sum: f64 = shape.iter().sum();
        shape.map(|share| share / sum)
    }

    fn learn_chances(&mut self, shape: &[f64; BINS], waiting: &Waits) {
        let failed: [f64; CLASSES] = std::array::from_fn(|class| {
            let mut before = 0.0;
            let waits = self.ended[class].iter().zip(&waiting[class]).zip(shape);
            waits
                .map(|((ended, waiting), share)| {
                    before += share;
                    (ended + waiting) * (before - share / 2.0)
                })
                .sum()
        });
        let of =
            |counts: &[f64; CLASSES], classes: std::ops::Range<usize>| counts[classes].iter().sum::<f64>();
        let (reused, trials) = (of(&self.reused, 0..CLASSES), of(&failed, 0..CLASSES));
        let of_all = (reused + 1.0) / (reused + trials + 2.0);
        for class in 0..CLASSES {
            let (reused, failed_here) = (of(&self.reused, same_uses(class)), of(&failed, same_uses(class)));
            let of_uses = (reused + PRIOR_KEYS * of_all) / (reused + failed_here + PRIOR_KEYS);
            let trials = self.reused[class] + failed[class];
            self.chances[class] = (self.reused[class] + PRIOR_KEYS * of_uses) / (trials + PRIOR_KEYS);
        }
    }
}
