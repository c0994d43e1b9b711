//! The tokens of a chunk that a rank has, where an engine deals a prompt's tokens over its ranks (context parallel).
//!
//! The engine gives a run of `interleave` tokens to the first rank, the next run to the next rank, and so on. A rank keeps
//! its own tokens one after the other, as if there were no others. A chunk has as many tokens for each rank, so it begins
//! with the first rank's, and what is said of its tokens holds for those of the prompt.

use std::ops::Range;

use serde::{Deserialize, Serialize};

/// Of `size` runs of `interleave` tokens, one after the other, the one with number `rank`; and so on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TokenShare {
    pub rank: u32,
    pub size: u32,
    /// Tokens of a run.
    pub interleave: u32,
}

impl Default for TokenShare {
    fn default() -> Self {
        Self::ALL
    }
}

impl TokenShare {
    pub const ALL: Self = Self {
        rank: 0,
        size: 1,
        interleave: 1,
    };

    pub fn is_all(&self) -> bool {
        self.size == 1
    }

    pub fn is_valid(&self) -> bool {
        self.rank < self.size && self.interleave > 0
    }

    /// Tokens after which it is the first rank's turn again.
    pub fn round(&self) -> u64 {
        u64::from(self.size) * u64::from(self.interleave)
    }

    /// Whether each rank has as many of so many tokens.
    pub fn deals(&self, tokens: u32) -> bool {
        self.is_all() || u64::from(tokens).is_multiple_of(self.round())
    }

    /// Number of its tokens among a chunk's.
    pub fn count(&self, chunk_tokens: u32) -> u32 {
        chunk_tokens / self.size
    }

    /// Number of its tokens before this one.
    pub fn before(&self, token: u64) -> u64 {
        if self.is_all() {
            return token;
        }
        let (round, run) = (self.round(), u64::from(self.interleave));
        let in_round = (token % round).saturating_sub(u64::from(self.rank) * run);
        token / round * run + in_round.min(run)
    }

    /// Its tokens among these, in runs.
    pub fn runs(self, tokens: Range<u32>) -> impl Iterator<Item = Range<u32>> {
        let (round, run) = match self.is_all() {
            true => (u64::from(u32::MAX), u64::from(u32::MAX)),
            false => (self.round(), u64::from(self.interleave)),
        };
        let (start, end) = (u64::from(tokens.start), u64::from(tokens.end));
        let firsts =
            (start / round..end.div_ceil(round)).map(move |at| at * round + u64::from(self.rank) * run);
        let within = move |first: u64| first.max(start)..(first + run).min(end);
        // They are between `start` and `end`.
        let narrow = |token: u64| u32::try_from(token).unwrap_or(u32::MAX);
        firsts
            .map(within)
            .filter(|run| run.start < run.end)
            .map(move |run| narrow(run.start)..narrow(run.end))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn runs_are_as_the_definition_says(size in 1_u32..6, interleave in 1_u32..9, start in 0_u32..70, len in 0_u32..70) {
            let mut seen = 0;
            for rank in 0..size {
                let share = TokenShare { rank, size, interleave };
                let own: Vec<u32> = share.runs(start..start + len).flatten().collect();
                let expected: Vec<u32> =
                    (start..start + len).filter(|token| token / interleave % size == rank).collect();
                prop_assert_eq!(&own, &expected);
                for token in own {
                    let before = (0..token).filter(|token| token / interleave % size == rank).count();
                    prop_assert_eq!(share.before(token.into()), before as u64);
                }
                seen += expected.len();
            }
            prop_assert_eq!(seen, len as usize);
        }
    }
}
