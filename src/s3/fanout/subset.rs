//! The part of many endpoints that one gateway uses: its own, by chance, so that a fleet uses all of them evenly.
//!
//! Of many endpoints each gateway would hear little: its estimates would be old, and each would have to fail for each gateway
//! before all avoid it. So the endpoints are put in an order of the gateway's own (rendezvous hashing): one that comes or
//! goes moves no other. The first of them that work are used, so the next takes the place of one that fails. Where all
//! are busy or slow, the next one joins, and leaves when it was not needed for a while.

use std::hash::{BuildHasher, Hash};
use std::time::Duration;

use foldhash::fast::FixedState;
use tokio::time::Instant;

/// One that joined leaves when this time has passed without a need for another.
const NEEDED: Duration = Duration::from_secs(1);
/// Up to this many times as many are all used: a part would save little, and they are few.
const ALL: usize = 2;

/// How many of the endpoints are used.
#[derive(Debug)]
pub(super) struct Subset {
    size: usize,
    order: FixedState,
    /// Endpoints that joined, at `widened`.
    more: usize,
    widened: Instant,
}

impl Subset {
    pub fn new(size: usize, now: Instant) -> Self {
        Self {
            size,
            order: FixedState::with_seed(fastrand::u64(..)),
            more: 0,
            widened: now,
        }
    }

    /// The place of an endpoint in this gateway's order; the lower one is used first.
    pub fn place(&self, endpoint: impl Hash) -> u64 {
        self.order.hash_one(endpoint)
    }

    /// So many of `all` are used.
    pub fn len(&self, all: usize, now: Instant) -> usize {
        if all <= self.size.saturating_mul(ALL) {
            return all;
        }
        self.size.saturating_add(self.more_at(now)).min(all)
    }

    /// They have no room: one more is used.
    pub fn widen(&mut self, now: Instant) {
        self.more = self.more_at(now) + 1;
        self.widened = now;
    }

    fn more_at(&self, now: Instant) -> usize {
        let left = (now - self.widened).as_nanos() / NEEDED.as_nanos();
        self.more
            .saturating_sub(usize::try_from(left).unwrap_or(usize::MAX))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_endpoints_are_all_used() {
        let now = Instant::now();
        let subset = Subset::new(16, now);
        assert_eq!([0, 1, 16, 32].map(|all| subset.len(all, now)), [0, 1, 16, 32]);
        assert_eq!([33, 200].map(|all| subset.len(all, now)), [16, 16]);
    }

    #[test]
    fn it_widens_where_there_is_need_and_narrows_when_there_is_none() {
        let now = Instant::now();
        let mut subset = Subset::new(4, now);
        for _ in 0..3 {
            subset.widen(now);
        }
        let after = |seconds| now + Duration::from_secs(seconds);
        let used = [0, 1, 2, 3, 60].map(|seconds| subset.len(20, after(seconds)));
        assert_eq!(used, [7, 6, 5, 4, 4]);
        for _ in 0..100 {
            subset.widen(now);
        }
        assert_eq!(subset.len(20, now), 20);
    }

    /// 1,000 gateways of 16 among 200: 80 each, give or take what chance gives.
    #[test]
    fn a_fleet_uses_all_endpoints_and_one_that_goes_moves_no_other() {
        fastrand::seed(7);
        let (now, mut used) = (Instant::now(), [0; 200]);
        for _ in 0..1000 {
            let subset = Subset::new(16, now);
            let mut endpoints: Vec<usize> = (0..200).collect();
            endpoints.sort_by_key(|endpoint| subset.place(endpoint));
            endpoints[..16].iter().for_each(|&endpoint| used[endpoint] += 1);
            let (first, next) = (endpoints[..16].to_vec(), endpoints[16]);
            let gone = endpoints.remove(3);
            assert!(
                endpoints[..16]
                    .iter()
                    .all(|endpoint| first.contains(endpoint) || *endpoint == next)
            );
            assert!(!endpoints[..16].contains(&gone));
        }
        assert!(used.iter().all(|used| (50..=115).contains(used)), "{used:?}");
    }
}
