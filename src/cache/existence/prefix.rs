//! The search for the end of a prompt's stored prefix. It asks for several positions a round and narrows the
//! interval in which the run must end. No I/O.

use std::collections::{BTreeMap, HashSet};

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
/// before it are present too; the load confirms it.
///
/// The run goes on from where what is known ends, and most often not at all, or nearly to the end of the prompt. So the
/// first round asks for the first unknown chunk, and at growing distances back from the end. The next two ask around the
/// place where a *run hint* of the last chunk that was found says that its prompt's chunks end, and for the end of what is
/// open. What is then still open is cut evenly, whatever hints say, and so it is where a hint promises more than is there. A
/// hint never counts as an answer.
///
/// Of a *doubtful* chunk, one that was absent or of no use lately, those after it tell nothing: it is asked for before all
/// others.
pub struct PrefixSearch {
    states: Vec<ChunkState>,
    /// In order.
    doubtful: Vec<usize>,
    /// For present chunks, where the prompt that they were stored for leaves this one.
    run_ends: BTreeMap<usize, usize>,
    rounds: usize,
}

/// Distances back from the end at which the first round asks, each with the number of a prompt's chunks from which on it
/// does. On recorded prompts these take the fewest questions and rounds: `kvgate replay`.
const BACK: [(usize, usize); 5] = [(1, 0), (2, 0), (3, 64), (5, 64), (9, 96)];
/// With so few open chunks it asks at a distance of 3 too.
const SHORT: usize = 12;
/// After the first round, so few chunks are all asked for.
const FEW: usize = 3;
/// Positions that the next rounds ask for beside those that a hint or a distance tells.
const SPREAD: usize = 3;

impl PrefixSearch {
    /// Starts from the known states. `doubtful` are positions, in order.
    pub fn new(states: Vec<ChunkState>, doubtful: Vec<usize>) -> Self {
        Self {
            states,
            doubtful,
            run_ends: BTreeMap::new(),
            rounds: 0,
        }
    }

    /// The positions to ask for next, in order, `probes` at most; empty when the end is found or can't be found.
    pub fn next(&mut self, probes: usize) -> Vec<usize> {
        let absent = self.first_absent();
        let is_to_ask = |i: &usize| *i < absent && self.states[*i] == ChunkState::NotAsked;
        let doubtful = self.doubtful.iter().copied().filter(is_to_ask);
        let doubtful: Vec<usize> = doubtful.take(probes.max(1)).collect();
        if !doubtful.is_empty() {
            return doubtful;
        }
        let (first, end) = self.open();
        let open: Vec<usize> = (first..end)
            .filter(|&i| self.states[i] == ChunkState::NotAsked)
            .collect();
        self.rounds += 1;
        let run_end = first.checked_sub(1).and_then(|last| self.run_ends.get(&last));
        // The most important first.
        let mut ask: Vec<usize> = match (self.rounds, run_end) {
            (1, _) => {
                let chunks = self.states.len();
                let is_short = open.len() <= SHORT;
                let asks = |(distance, from): &&(usize, usize)| chunks >= *from || is_short && *distance <= 3;
                let back = BACK.iter().filter(asks);
                let back = back.filter_map(|(distance, _)| open.len().checked_sub(*distance));
                open.first()
                    .copied()
                    .into_iter()
                    .chain(back.map(|i| open[i]))
                    .collect()
            }
            _ if open.len() <= FEW => open.clone(),
            // Not all of its prompt is there: nothing tells where the run ends.
            (2 | 3, Some(&run_end)) if run_end > end => {
                [vec![end - 1], spread(&open, probes.saturating_sub(1))].concat()
            }
            (2, Some(&run_end)) => around(run_end, end),
            (3, Some(&run_end)) => [around(run_end, end), spread(&open, SPREAD)].concat(),
            (2, None) => {
                // A server without metadata has no hints: more questions make up for them.
                let more = match self.run_ends.is_empty() {
                    true => probes.saturating_sub(3).max(SPREAD),
                    false => SPREAD,
                };
                [vec![first], self.further_back(first, end), spread(&open, more)].concat()
            }
            _ => Vec::new(),
        };
        ask.retain(|i| open.binary_search(i).is_ok());
        if ask.is_empty() {
            ask = spread(&open, probes);
        }
        let mut taken = HashSet::new();
        ask.retain(|&i| taken.insert(i));
        ask.truncate(probes.max(1));
        ask.sort_unstable();
        ask
    }

    /// The end is nearer than all that the last round asked for: twice and four times as far from the prompt's end.
    fn further_back(&self, first: usize, end: usize) -> Vec<usize> {
        let distance = self.states.len() - end;
        let back = |times| end.saturating_sub(times * distance).max(first);
        [1, 3].map(back).to_vec()
    }

    /// A hint of a present chunk: chunks until `run_end` were in the prompt that it was stored for.
    pub fn hint(&mut self, position: usize, run_end: usize) {
        self.run_ends.insert(position, run_end);
    }

    pub fn learn(&mut self, position: usize, state: ChunkState) {
        self.states[position] = state;
    }

    /// The interval in which the run ends, as far as questions can tell: from the position after the last present chunk
    /// before the first absent one, up to that absent one. What comes after a doubtful chunk without an answer is left out.
    fn open(&self) -> (usize, usize) {
        let is_told = |i: &usize| matches!(self.states[*i], ChunkState::Present | ChunkState::Absent);
        let lost = self.doubtful.iter().copied().find(|i| !is_told(i));
        let end = self.first_absent().min(lost.unwrap_or(usize::MAX));
        let first = self.states[..end]
            .iter()
            .rposition(|&state| state == ChunkState::Present)
            .map_or(0, |last| last + 1);
        (first, end)
    }

    /// Its position; the prompt's end if none is known to be absent.
    fn first_absent(&self) -> usize {
        let absent = self.states.iter().position(|&state| state == ChunkState::Absent);
        absent.unwrap_or(self.states.len())
    }

    /// The chunks before `.0` are taken as present, those from `.1` on as absent; those between are unknown.
    pub fn run(&self) -> (usize, usize) {
        (self.open().0, self.first_absent())
    }

    pub fn states(&self) -> &[ChunkState] {
        &self.states
    }
}

/// Where the run most likely ends if a hint says `run_end`, the most likely first: there, a chunk or two later, for a prompt
/// that went on from there, or at the end of what is open.
fn around(run_end: usize, end: usize) -> Vec<usize> {
    vec![run_end - 1, run_end, run_end + 1, end - 1, run_end + 2]
}

/// So many of them, evenly.
fn spread(open: &[usize], positions: usize) -> Vec<usize> {
    let at = |i| open.get(i * open.len() / (positions + 1)).copied();
    (1..=positions).filter_map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Asks `answer` for every position, and `hint` for where it says that the run ends; returns the run and the number
    /// of questions and rounds.
    fn search_with(
        states: Vec<ChunkState>,
        probes: usize,
        answer: impl Fn(usize) -> ChunkState,
        hint: impl Fn(usize) -> Option<usize>,
    ) -> ((usize, usize), usize, usize) {
        let mut search = PrefixSearch::new(states, Vec::new());
        let (first, _) = search.open();
        let (mut asked, mut rounds) = (0, 0);
        loop {
            let ask = search.next(probes);
            if ask.is_empty() {
                return (search.run(), asked, rounds);
            }
            assert!(
                rounds > 0 || ask[0] == first,
                "the first unknown chunk is always asked"
            );
            assert!(ask.is_sorted_by(|a, b| a < b) && ask.len() <= probes);
            (asked, rounds) = (asked + ask.len(), rounds + 1);
            for i in ask {
                assert_eq!(search.states()[i], ChunkState::NotAsked, "no question twice");
                search.learn(i, answer(i));
                if let Some(run_end) = hint(i).filter(|_| answer(i) == ChunkState::Present) {
                    search.hint(i, run_end);
                }
            }
        }
    }

    /// The same of a prompt of which nothing is known, without hints.
    fn search(
        n: usize,
        probes: usize,
        answer: impl Fn(usize) -> ChunkState,
    ) -> ((usize, usize), usize, usize) {
        search_with(vec![ChunkState::NotAsked; n], probes, answer, |_| None)
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
        assert!(asked <= 64 && rounds <= 5, "{asked} questions in {rounds} rounds");
    }

    #[test]
    fn whole_hits_and_whole_misses_take_one_round() {
        assert_eq!(search(4096, 15, |_| ChunkState::Absent), ((0, 0), 6, 1));
        assert_eq!(search(4096, 15, |_| ChunkState::Present), ((4096, 4096), 6, 1));
        assert_eq!(search(0, 15, |_| unreachable!()), ((0, 0), 0, 0));
    }

    #[test]
    fn a_prompt_with_one_new_chunk_takes_three_questions() {
        let mut states = vec![ChunkState::NotAsked; 30];
        states[..10].fill(ChunkState::Present);
        let found = search_with(states, 15, |i| state(i < 29), |_| None);
        assert_eq!(found, ((29, 29), 3, 1));
    }

    /// Of a long prompt also where little of it is open, and of the last twelve open chunks of a short one.
    #[test]
    fn how_far_back_the_first_round_asks_is_up_to_the_prompt() {
        let first_round = |chunks: usize, known: usize| {
            let mut states = vec![ChunkState::NotAsked; chunks];
            states[..known].fill(ChunkState::Present);
            PrefixSearch::new(states, Vec::new()).next(15)
        };
        assert_eq!(first_round(200, 180), [180, 191, 195, 197, 198, 199]);
        assert_eq!(first_round(70, 50), [50, 65, 67, 68, 69]);
        assert_eq!(first_round(30, 18), [18, 27, 28, 29]);
        assert_eq!(first_round(30, 17), [17, 28, 29]);
    }

    #[test]
    fn a_hint_leads_to_the_end() {
        let cold = || vec![ChunkState::NotAsked; 200];
        let found = search_with(cold(), 15, |i| state(i < 150), |_| Some(150));
        // Six at first; then the last chunk that the hint promises, three after it, and the last.
        assert_eq!(found, ((150, 150), 11, 2));
        // A prompt that went on from there added one chunk.
        let found = search_with(cold(), 15, |i| state(i < 151), |i| (i < 150).then_some(150));
        assert_eq!(found, ((151, 151), 11, 2));
        // The writer has stored half of it so far.
        let (run, asked, rounds) = search_with(cold(), 15, |i| state(i < 100), |_| Some(200));
        assert_eq!(run, (100, 100));
        assert!(asked <= 40 && rounds <= 4, "{asked} questions in {rounds} rounds");
        // The writer gave up the last ten.
        let (run, asked, rounds) = search_with(cold(), 15, |i| state(i < 140), |_| Some(150));
        assert_eq!(run, (140, 140));
        assert!(asked <= 40 && rounds <= 4, "{asked} questions in {rounds} rounds");
        // Another prompt went on from where the first writer's ends.
        let (run, asked, rounds) = search_with(cold(), 15, |i| state(i < 170), |i| (i < 60).then_some(60));
        assert_eq!(run, (170, 170));
        assert!(asked <= 40 && rounds <= 5, "{asked} questions in {rounds} rounds");
    }

    /// Asks until the search is over; returns the run and all questions.
    fn search_doubting(
        states: Vec<ChunkState>,
        doubtful: Vec<usize>,
        probes: usize,
        answer: impl Fn(usize) -> ChunkState,
    ) -> ((usize, usize), Vec<Vec<usize>>) {
        let (mut search, mut asked) = (PrefixSearch::new(states, doubtful), Vec::new());
        loop {
            let ask = search.next(probes);
            if ask.is_empty() {
                return (search.run(), asked);
            }
            assert!(ask.is_sorted_by(|a, b| a < b) && ask.len() <= probes);
            for &i in &ask {
                assert_eq!(search.states()[i], ChunkState::NotAsked, "no question twice");
                search.learn(i, answer(i));
            }
            asked.push(ask);
        }
    }

    /// All others are known to be present, so that nothing else would be asked for.
    #[test]
    fn a_doubtful_chunk_is_asked_for_itself() {
        let mut states = vec![ChunkState::Present; 20];
        states[5] = ChunkState::NotAsked;
        let asked = |answer| search_doubting(states.clone(), vec![5], 15, |_| answer);
        assert_eq!(asked(ChunkState::Absent), ((5, 5), vec![vec![5]]));
        assert_eq!(asked(ChunkState::Present), ((20, 20), vec![vec![5]]));
        // Nobody can tell, and a chunk after it least of all.
        assert_eq!(asked(ChunkState::Unknown), ((5, 20), vec![vec![5]]));
        // Before it was asked for, it is no hit either.
        assert_eq!(PrefixSearch::new(states, vec![5]).run(), (5, 20));
    }

    #[test]
    fn doubtful_chunks_after_an_absent_one_are_no_question() {
        let mut states = vec![ChunkState::NotAsked; 20];
        (states[2], states[4]) = (ChunkState::Present, ChunkState::Absent);
        let (run, asked) = search_doubting(states, vec![3, 6, 7], 15, |_| ChunkState::Present);
        assert_eq!((run, asked), ((4, 4), vec![vec![3]]));
    }

    #[test]
    fn without_an_answer_of_a_doubtful_chunk_the_search_goes_on_before_it() {
        let cold = vec![ChunkState::NotAsked; 200];
        let unknown_at_100 = |i| match i {
            100 => ChunkState::Unknown,
            _ => ChunkState::Present,
        };
        let (run, asked) = search_doubting(cold, vec![100], 15, unknown_at_100);
        assert_eq!(run, (100, 200));
        assert!(asked.iter().flatten().all(|&i| i <= 100), "{asked:?}");
    }

    /// From the fourth round on each leaves a share of 1 / (k + 1). The last few chunks are asked for k at a time.
    fn rounds_max(n: usize, probes: usize) -> usize {
        (n.max(1) as f64).log((probes + 1) as f64).ceil() as usize + 4 + FEW.div_ceil(probes)
    }

    proptest! {
        #[test]
        fn without_holes_it_finds_the_end(n in 0_usize..3000, end in 0_usize..3000, probes in 1_usize..40) {
            let end = end.min(n);
            let (run, asked, _) = search(n, probes, |i| state(i < end));
            prop_assert_eq!(run, (end, end));
            prop_assert!(asked <= probes * rounds_max(n, probes), "{asked} questions for {n}");
        }

        #[test]
        fn whatever_hints_say_it_finds_the_same_and_is_not_held_up(
            n in 0_usize..3000,
            end in 0_usize..3000,
            probes in 1_usize..40,
            known in 0_usize..3000,
            hints in prop::collection::vec(prop::option::of(0_usize..4000), 1..20),
        ) {
            let end = end.min(n);
            let mut states = vec![ChunkState::NotAsked; n];
            states[..known.min(end)].fill(ChunkState::Present);
            // A hint never ends before the chunk after its own.
            let hint = |i: usize| hints[i % hints.len()].map(|end| (i + 1).max(end).min(n));
            let (run, _, rounds) = search_with(states, probes, |i| state(i < end), hint);
            prop_assert_eq!(run, (end, end));
            prop_assert!(rounds <= rounds_max(n, probes), "{rounds} rounds for {n}");
        }

        #[test]
        fn no_hole_that_is_doubtful_is_promised(
            is_there in prop::collection::vec(prop::bool::weighted(0.9), 0..300),
            known in prop::collection::vec(any::<bool>(), 300),
            also_doubtful in 1_usize..20,
            probes in 1_usize..20,
        ) {
            let known = |i: usize| if is_there[i] && known[i] { ChunkState::Present } else { ChunkState::NotAsked };
            let states: Vec<_> = (0..is_there.len()).map(known).collect();
            let doubtful = (0..is_there.len()).filter(|i| !is_there[*i] || i % also_doubtful == 0).collect();
            let (run, _) = search_doubting(states, doubtful, probes, |i| state(is_there[i]));
            let leading = is_there.iter().take_while(|is_there| **is_there).count();
            prop_assert_eq!(run, (leading, leading));
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
