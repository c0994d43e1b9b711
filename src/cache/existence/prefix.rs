//! The search for the end of a prompt's stored prefix. It asks for several positions a round and narrows the
//! interval in which the run must end. No I/O.

/// The state of one chunk of a prompt, as far as it is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChunkState {
    NotAsked,
    Present,
    Absent,
    /// Asked, without an answer.
    Unknown,
}

/// Finds the end of the leading run of present chunks, asking for several positions a round.
///
/// Chunks are stored in order and removed with their descendants, so a present chunk nearly always means that those
/// before it are present too; the load confirms it. With k positions a round, n chunks take about log(n) / log(k +
/// 1) rounds of k questions instead of n questions.
pub struct PrefixSearch {
    states: Vec<ChunkState>,
}

impl PrefixSearch {
    /// Starts from the known states.
    pub fn new(states: Vec<ChunkState>) -> Self {
        Self { states }
    }

    /// The positions to ask for next, in order; empty when the end is found or can't be found.
    pub fn next(&self, probes: usize) -> Vec<usize> {
        let (first, end) = self.open();
        let open: Vec<usize> = (first..end)
            .filter(|&i| self.states[i] == ChunkState::NotAsked)
            .collect();
        if open.len() <= probes {
            return open;
        }
        let bounded = end < self.states.len();
        let mut ask: Vec<usize> = if first == 0 || !bounded {
            // Whole hits and whole misses are the most common: ask for both ends.
            let last = open.len() - 1;
            (0..=probes).map(|i| open[i * last / probes]).collect()
        } else {
            (1..=probes)
                .map(|i| open[i * open.len() / (probes + 1)])
                .collect()
        };
        ask.dedup();
        ask
    }

    pub fn learn(&mut self, position: usize, state: ChunkState) {
        self.states[position] = state;
    }

    /// The interval in which the run ends: from the position after the last present chunk before the first absent
    /// one, up to that absent one.
    fn open(&self) -> (usize, usize) {
        let is = |state| move |&seen: &ChunkState| seen == state;
        let end = self
            .states
            .iter()
            .position(is(ChunkState::Absent))
            .unwrap_or(self.states.len());
        let first = self.states[..end]
            .iter()
            .rposition(is(ChunkState::Present))
            .map_or(0, |last| last + 1);
        (first, end)
    }

    /// The chunks before `.0` are taken as present, those from `.1` on as absent; those between are unknown.
    pub fn run(&self) -> (usize, usize) {
        self.open()
    }

    pub fn states(&self) -> &[ChunkState] {
        &self.states
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Asks `answer` for every position; returns the run and the number of questions and rounds.
    fn search(
        n: usize,
        probes: usize,
        answer: impl Fn(usize) -> ChunkState,
    ) -> ((usize, usize), usize, usize) {
        let mut search = PrefixSearch::new(vec![ChunkState::NotAsked; n]);
        let (mut asked, mut rounds) = (0, 0);
        loop {
            let ask = search.next(probes);
            if ask.is_empty() {
                return (search.run(), asked, rounds);
            }
            assert!(rounds > 0 || ask[0] == 0, "chunk 0 is always asked");
            assert!(ask.is_sorted_by(|a, b| a < b));
            (asked, rounds) = (asked + ask.len(), rounds + 1);
            ask.into_iter().for_each(|i| search.learn(i, answer(i)));
        }
    }

    fn state(present: bool) -> ChunkState {
        if present {
            ChunkState::Present
        } else {
            ChunkState::Absent
        }
    }

    #[test]
    fn the_end_of_3000_among_4096_is_cheap_to_find() {
        let (run, asked, rounds) = search(4096, 15, |i| state(i < 3000));
        assert_eq!(run, (3000, 3000));
        assert!(asked <= 64 && rounds <= 4, "{asked} questions in {rounds} rounds");
    }

    #[test]
    fn whole_hits_and_whole_misses_take_one_round() {
        assert_eq!(search(4096, 15, |_| ChunkState::Absent), ((0, 0), 16, 1));
        let (run, asked, _) = search(4096, 15, |_| ChunkState::Present);
        assert_eq!((run, asked), ((4096, 4096), 16));
        assert_eq!(search(0, 15, |_| unreachable!()), ((0, 0), 0, 0));
    }

    proptest! {
        #[test]
        fn without_holes_it_finds_the_end(n in 0_usize..3000, end in 0_usize..3000, probes in 1_usize..40) {
            let end = end.min(n);
            let (run, asked, _) = search(n, probes, |i| state(i < end));
            prop_assert_eq!(run, (end, end));
            // Each round leaves a share of 1 / (k + 1): k questions for each such digit of n, and one round to
            // spare.
            let rounds = (n.max(1) as f64).log((probes + 1) as f64).ceil() as usize + 2;
            prop_assert!(asked <= (probes + 1) * rounds, "{asked} questions for {n}");
        }

        #[test]
        fn with_holes_and_errors_it_never_claims_past_what_it_saw(
            states in prop::collection::vec(prop_oneof![
                4 => Just(ChunkState::Present), 1 => Just(ChunkState::Absent), 1 => Just(ChunkState::Unknown),
            ], 0..300),
            probes in 1_usize..20,
        ) {
            let ((present, end), _, _) = search(states.len(), probes, |i| states[i]);
            prop_assert!(present <= end);
            prop_assert!(present == 0 || states[present - 1] == ChunkState::Present);
            prop_assert!(end == states.len() || states[end] == ChunkState::Absent);
            // The chunks between were asked for, without an answer.
            prop_assert!(states[present..end].iter().all(|&state| state == ChunkState::Unknown));
        }
    }
}
