//! A token bucket, for the budgets of retries and hedges.

use std::sync::atomic::{AtomicU64, Ordering};

/// Tokens that are earned in hundredths and spent whole.
#[derive(Debug)]
pub(super) struct TokenBucket {
    hundredths: AtomicU64,
    most: u64,
}

impl TokenBucket {
    /// The most tokens that it holds.
    pub fn full(tokens: u32) -> Self {
        let most = u64::from(tokens) * 100;
        Self {
            hundredths: AtomicU64::new(most),
            most,
        }
    }

    pub fn empty(most: u32) -> Self {
        let full = Self::full(most);
        full.hundredths.store(0, Ordering::Relaxed);
        full
    }

    pub fn earn(&self, hundredths: u32) {
        let earn = |held: u64| (held < self.most).then_some((held + u64::from(hundredths)).min(self.most));
        // An error only says that it is full.
        let _ = self
            .hundredths
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, earn);
    }

    /// Takes a token, if there is one.
    pub fn spend(&self) -> bool {
        let spend = |held: u64| held.checked_sub(100);
        self.hundredths
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, spend)
            .is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_tokens_are_spent_and_no_more_than_it_holds() {
        let full = TokenBucket::full(2);
        full.earn(100);
        assert_eq!([full.spend(), full.spend(), full.spend()], [true, true, false]);
        let empty = TokenBucket::empty(1);
        for _ in 0..9 {
            empty.earn(10);
            assert!(!empty.spend());
        }
        empty.earn(10);
        assert!(empty.spend() && !empty.spend());
        assert!(!TokenBucket::full(0).spend());
    }
}
