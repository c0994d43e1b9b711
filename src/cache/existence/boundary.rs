//! The search for the last place of a prompt where every kind of KV that a model keeps is stored. It goes backwards
//! from the end of the full prefix, asks for several positions a round, and never claims what it did not see. No I/O.

use std::collections::HashSet;
use std::ops::Range;

use super::prefix::ChunkState;
use crate::format::Kind;

/// Finds the largest number of leading chunks after which an engine can go on: for each kind the chunks that it needs
/// there are present.
///
/// Windows are mostly there wherever the full prefix is, so one boundary at a time is tried, then more. Snapshots of a
/// state are few: at the ends of prompts, and at a regular distance where the writers keep such. So states are asked for
/// near the end of the prefix first, then at multiples of that distance, then everywhere else; and windows only where
/// the states are there.
pub struct BoundarySearch {
    kinds: Vec<KindStates>,
    prefix: usize,
    chunk_tokens: u32,
    scope: Scope,
    /// Boundaries that may still be it, the most likely first.
    open: Vec<usize>,
    /// Boundaries without a known state that the next round tries.
    width: usize,
    /// Boundaries whose states are there that the next round tries.
    hopes: usize,
    /// Questions that may still be asked.
    budget: usize,
    /// Of these, those of a boundary's windows: states leave so many, or a snapshot that is found would be of no use.
    of_windows: usize,
}

/// A kind, and what is known of each chunk of the prefix.
struct KindStates {
    kind: Kind,
    states: Vec<ChunkState>,
    /// Chunks that were absent or of no use lately, in order: their neighbours tell nothing of them.
    doubtful: Vec<usize>,
}

/// The questions that a search may ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// All.
    All,
    /// Likely ones, at most `questions`, but always those of the end of the prefix; the middle of a long run is inferred
    /// from its ends. Writers keep a snapshot of a state every `state_every` chunks (0: only at the ends of prompts).
    Likely { questions: usize, state_every: usize },
}

/// Chunks before the end of the prefix at each of which a snapshot is likely: that of a prompt whose answer followed.
const NEAR: usize = 16;
/// States that the first round asks for.
const STATES_AT_FIRST: usize = 8;
/// Of a run of more chunks the middle is inferred.
const WHOLE_RUN: usize = 16;

impl KindStates {
    /// The chunks of a long run from which all of it is inferred: its ends, and the first of the doubtful ones.
    fn tells(&self, run: &Range<usize>) -> impl Iterator<Item = usize> {
        let first = self.doubtful.partition_point(|&chunk| chunk <= run.start);
        let end = run.end - 1;
        let between = self.doubtful[first..].iter().copied();
        [run.start, end]
            .into_iter()
            .chain(between.take_while(move |&chunk| chunk < end).take(WHOLE_RUN))
    }
}

impl BoundarySearch {
    /// `kinds`: each with the known states of the first `prefix` chunks, and its doubtful chunks in order.
    pub fn new(
        kinds: Vec<(Kind, Vec<ChunkState>, Vec<usize>)>,
        prefix: usize,
        chunk_tokens: u32,
        scope: Scope,
    ) -> Self {
        let kinds: Vec<KindStates> = kinds
            .into_iter()
            .map(|(kind, mut states, doubtful)| {
                states.resize(prefix, ChunkState::NotAsked);
                KindStates {
                    kind,
                    states,
                    doubtful,
                }
            })
            .collect();
        let (budget, state_every) = match scope {
            Scope::All => (usize::MAX, 0),
            Scope::Likely {
                questions,
                state_every,
            } => (questions, state_every),
        };
        let is_likely = |boundary: &usize| {
            prefix - boundary < NEAR || (state_every > 0 && boundary.is_multiple_of(state_every))
        };
        let (mut open, rest): (Vec<usize>, Vec<usize>) = (1..=prefix).rev().partition(is_likely);
        open.extend(rest);
        if !kinds.iter().any(|of| of.kind == Kind::State) {
            open = (1..=prefix).rev().collect();
        }
        let mut search = Self {
            kinds,
            prefix,
            chunk_tokens,
            scope,
            open,
            width: STATES_AT_FIRST,
            hopes: 1,
            budget,
            of_windows: 0,
        };
        if scope != Scope::All {
            let of_end = search.questions(prefix, true).len();
            // Without these nothing could be found.
            search.budget = budget.max(of_end);
            search.of_windows = of_end - search.questions(prefix, false).len();
        }
        search
    }

    /// The questions of the next round, as kind and chunk: at most about `probes`, but for a single boundary as many as
    /// it takes. Empty when the boundary is found, or no question is left.
    pub fn next(&mut self, probes: usize) -> Vec<(usize, usize)> {
        if self.scope == Scope::All {
            let of_kind = |(index, of): (usize, &KindStates)| {
                let not_asked = |chunk: &usize| of.states[*chunk] == ChunkState::NotAsked;
                let chunks: Vec<usize> = (0..self.prefix).filter(not_asked).collect();
                chunks.into_iter().map(move |chunk| (index, chunk))
            };
            return self.kinds.iter().enumerate().flat_map(of_kind).collect();
        }
        let (best, gaps) = (self.boundary(), self.gaps());
        let mut open = std::mem::take(&mut self.open);
        open.retain(|&boundary| boundary > best && self.could_be(boundary, &gaps));
        let (mut ask, mut asked) = (Vec::new(), HashSet::new());
        // The end of the prefix is the most likely: all of it is asked for at once.
        let is_first = self.width == STATES_AT_FIRST;
        let has_hope = open.first().is_some_and(|&first| self.has_states(first));
        let most = match has_hope {
            true => &mut self.hopes,
            false => &mut self.width,
        };
        let tried = std::mem::replace(most, most.saturating_mul(2)).min(probes.max(1));
        for (nth, &boundary) in open.iter().take(tried).enumerate() {
            let whole = (is_first && nth == 0) || self.has_states(boundary);
            let mut more = self.questions(boundary, whole);
            more.retain(|question| !asked.contains(question));
            let left = if whole { 0 } else { self.of_windows };
            if ask.len() + more.len() + left > self.budget || (nth > 0 && ask.len() + more.len() > probes) {
                break;
            }
            asked.extend(more.iter().copied());
            ask.extend(more);
        }
        self.budget -= ask.len();
        self.open = open;
        ask
    }

    pub fn learn(&mut self, kind: usize, chunk: usize, state: ChunkState) {
        self.kinds[kind].states[chunk] = state;
    }

    /// The largest boundary at which all is known, or inferred, to be there.
    pub fn boundary(&self) -> usize {
        let (gaps, not_asked) = (self.gaps(), self.last(|state| state == ChunkState::NotAsked));
        let is_there =
            |&boundary: &usize| self.could_be(boundary, &gaps) && self.is_asked(boundary, &not_asked);
        (0..=self.prefix).rev().find(is_there).unwrap_or(0)
    }

    /// Whether a question that was not answered could have told of a larger boundary.
    pub fn is_open(&self) -> bool {
        let is = |wanted| move |state| state == wanted;
        let (absent, unknown) = (
            self.last(is(ChunkState::Absent)),
            self.last(is(ChunkState::Unknown)),
        );
        (self.boundary() + 1..=self.prefix).any(|boundary| {
            let run = |of: &KindStates| self.run(of, boundary).start;
            let mut kinds = self.kinds.iter().zip(absent.iter().zip(&unknown));
            let could_be = kinds.clone().all(|(of, (absent, _))| absent[boundary] <= run(of));
            could_be && kinds.any(|(of, (_, unknown))| unknown[boundary] > run(of))
        })
    }

    /// What is known of each chunk of a kind.
    pub fn states(&self, kind: usize) -> &[ChunkState] {
        &self.kinds[kind].states
    }

    fn run(&self, of: &KindStates, boundary: usize) -> Range<usize> {
        of.kind.needed(boundary, self.chunk_tokens)
    }

    /// For each kind and number of leading chunks, the end of the last of them whose state is such; 0 if there is none.
    fn last(&self, is: impl Fn(ChunkState) -> bool) -> Vec<Vec<usize>> {
        let of_kind = |of: &KindStates| {
            let mut last = 0;
            let ends = of.states.iter().enumerate().map(|(chunk, &state)| {
                if is(state) {
                    last = chunk + 1;
                }
                last
            });
            std::iter::once(0).chain(ends).collect()
        };
        self.kinds.iter().map(of_kind).collect()
    }

    /// For each kind and number of leading chunks, the end of the last of them that can't be used.
    fn gaps(&self) -> Vec<Vec<usize>> {
        self.last(|state| matches!(state, ChunkState::Absent | ChunkState::Unknown))
    }

    /// Whether nothing that this boundary needs is known to be missing.
    fn could_be(&self, boundary: usize, gaps: &[Vec<usize>]) -> bool {
        let mut kinds = self.kinds.iter().zip(gaps);
        kinds.all(|(of, gaps)| gaps[boundary] <= self.run(of, boundary).start)
    }

    /// Whether no question is left for this boundary. It takes no longer for a long run than for a short one.
    fn is_asked(&self, boundary: usize, not_asked: &[Vec<usize>]) -> bool {
        let mut kinds = self.kinds.iter().zip(not_asked);
        kinds.all(|(of, not_asked)| {
            let run = self.run(of, boundary);
            match self.infers(&run) {
                true => of
                    .tells(&run)
                    .all(|chunk| of.states[chunk] != ChunkState::NotAsked),
                false => not_asked[boundary] <= run.start,
            }
        })
    }

    /// Whether the middle of a run is inferred from its ends.
    fn infers(&self, run: &Range<usize>) -> bool {
        self.scope != Scope::All && run.len() > WHOLE_RUN
    }

    /// Whether all states of this boundary are there.
    fn has_states(&self, boundary: usize) -> bool {
        let mut states = self.kinds.iter().filter(|of| of.kind == Kind::State);
        states.all(|of| of.states[boundary - 1] == ChunkState::Present)
    }

    /// Chunks that are still to be asked for before this is a boundary; of all kinds, or of states only.
    fn questions(&self, boundary: usize, whole: bool) -> Vec<(usize, usize)> {
        let mut ask = Vec::new();
        for (index, of) in self.kinds.iter().enumerate() {
            if !whole && of.kind != Kind::State {
                continue;
            }
            let run = self.run(of, boundary);
            let mut ask_for = |chunk: usize| {
                if of.states[chunk] == ChunkState::NotAsked {
                    ask.push((index, chunk));
                }
            };
            match self.infers(&run) {
                true => of.tells(&run).for_each(&mut ask_for),
                false => run.for_each(&mut ask_for),
            }
        }
        ask
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const CHUNK: u32 = 16;

    /// Asks `answer` until the search is over; returns the boundary and the number of questions.
    fn search(
        kinds: &[Kind],
        prefix: usize,
        scope: Scope,
        answer: impl Fn(usize, usize) -> ChunkState,
    ) -> (usize, usize) {
        search_doubting(kinds, &[], prefix, scope, answer)
    }

    fn search_doubting(
        kinds: &[Kind],
        doubtful: &[usize],
        prefix: usize,
        scope: Scope,
        answer: impl Fn(usize, usize) -> ChunkState,
    ) -> (usize, usize) {
        let mut search = BoundarySearch::new(unknown(kinds, doubtful), prefix, CHUNK, scope);
        let mut asked = 0;
        loop {
            let ask = search.next(15);
            if ask.is_empty() {
                return (search.boundary(), asked);
            }
            asked += ask.len();
            for (kind, chunk) in ask {
                assert_eq!(
                    search.states(kind)[chunk],
                    ChunkState::NotAsked,
                    "no question twice"
                );
                search.learn(kind, chunk, answer(kind, chunk));
            }
        }
    }

    fn unknown(kinds: &[Kind], doubtful: &[usize]) -> Vec<(Kind, Vec<ChunkState>, Vec<usize>)> {
        let of_kind = |&kind| (kind, Vec::new(), doubtful.to_vec());
        kinds.iter().map(of_kind).collect()
    }

    fn state(is_present: bool) -> ChunkState {
        match is_present {
            true => ChunkState::Present,
            false => ChunkState::Absent,
        }
    }

    const LIKELY: Scope = Scope::Likely {
        questions: 80,
        state_every: 8,
    };

    #[test]
    fn what_is_there_costs_few_questions() {
        let kinds = [Kind::Window(10), Kind::Chunked(48)];
        assert_eq!(
            search(&kinds, 4096, LIKELY, |_, _| ChunkState::Present),
            (4096, 2)
        );
        // All of a window of 16 chunks, and the two ends of one that has more.
        let of_window = |chunks| {
            search(&[Kind::Window(chunks * CHUNK)], 4096, LIKELY, |_, _| {
                ChunkState::Present
            })
        };
        assert_eq!(of_window(16), (4096, 16));
        assert_eq!(of_window(17), (4096, 2));
        let (boundary, asked) = search(&[Kind::Window(10), Kind::State], 4096, LIKELY, |_, _| {
            ChunkState::Present
        });
        assert_eq!((boundary, asked), (4096, 1 + STATES_AT_FIRST));
    }

    #[test]
    fn a_doubtful_chunk_in_the_middle_of_a_window_is_asked_for() {
        let window = [Kind::Window(40 * CHUNK)];
        let with_a_gap = |_, chunk: usize| state(chunk != 80);
        // From its ends alone the window would be promised.
        assert_eq!(search(&window, 100, LIKELY, with_a_gap), (100, 2));
        assert_eq!(search_doubting(&window, &[80], 100, LIKELY, with_a_gap).0, 80);
        let all_there = |_, _| ChunkState::Present;
        assert_eq!(search_doubting(&window, &[80], 100, LIKELY, all_there), (100, 3));
        let many: Vec<usize> = (0..100).collect();
        let (boundary, asked) = search_doubting(&window, &many, 100, LIKELY, all_there);
        assert_eq!((boundary, asked), (100, 2 + WHOLE_RUN));
    }

    #[test]
    fn what_was_never_stored_costs_no_more_than_the_budget() {
        for kinds in [
            [Kind::Window(100), Kind::State],
            [Kind::State, Kind::State],
            [Kind::Window(10), Kind::Window(1 << 30)],
        ] {
            let (boundary, asked) = search(&kinds, 4096, LIKELY, |_, _| ChunkState::Absent);
            assert_eq!(boundary, 0);
            assert!(asked <= 80, "{asked}");
        }
    }

    #[test]
    fn the_end_of_the_prefix_is_asked_for_whatever_the_budget_is() {
        let scope = Scope::Likely {
            questions: 1,
            state_every: 0,
        };
        let kinds = [Kind::Window(16 * CHUNK), Kind::State];
        assert_eq!(search(&kinds, 60, scope, |_, _| ChunkState::Present), (60, 17));
    }

    #[test]
    fn windows_are_asked_for_only_where_a_snapshot_is() {
        let kinds = [Kind::Window(17), Kind::State];
        let (boundary, asked) = search(&kinds, 60, LIKELY, |kind, chunk| state(kind == 0 || chunk == 40));
        assert_eq!(boundary, 41);
        // A window is two chunks: at the end, and at the snapshot.
        let states = asked - 2 * 2;
        assert!((60 - 41..60).contains(&states), "{asked}");
    }

    #[test]
    fn any_snapshot_of_a_short_prompt_is_found() {
        let scope = Scope::Likely {
            questions: 72,
            state_every: 0,
        };
        for there in 1..=64 {
            let (found, _) = search(&[Kind::Window(30), Kind::State], 64, scope, |kind, chunk| {
                state(kind == 0 || chunk + 1 == there)
            });
            assert_eq!(found, there);
        }
    }

    /// The states had used up what the window would have cost.
    #[test]
    fn a_snapshot_that_is_found_is_not_lost_for_want_of_questions_about_its_window() {
        let scope = Scope::Likely {
            questions: 80,
            state_every: 0,
        };
        let kinds = [Kind::Window(16 * CHUNK), Kind::State];
        for there in 17..=64 {
            let (found, asked) = search(&kinds, 64, scope, |kind, chunk| {
                state(kind == 0 || chunk + 1 == there)
            });
            assert_eq!(found, there);
            assert!(asked <= 80, "{asked}");
        }
    }

    #[test]
    fn snapshots_of_a_long_prompt_are_found_near_the_end_and_at_the_regular_distance() {
        let at = |there: usize| search(&[Kind::State], 1000, LIKELY, |_, chunk| state(chunk + 1 == there)).0;
        assert_eq!(at(1000), 1000);
        assert_eq!(at(986), 986);
        assert_eq!(at(984), 984);
        assert_eq!(at(800), 800);
        // Nobody would have looked there.
        assert_eq!(at(801), 0);
    }

    #[test]
    fn a_prompt_of_any_length_takes_no_time() {
        let kinds = [Kind::Window(1 << 30), Kind::Chunked(1 << 30), Kind::State];
        let started = std::time::Instant::now();
        for scope in [LIKELY, Scope::All] {
            search(&kinds, 1 << 16, scope, |_, chunk| state(chunk % 1000 != 0));
            // One that its deadline ends before the first answer.
            let search = BoundarySearch::new(unknown(&kinds, &[]), 1 << 16, CHUNK, scope);
            assert_eq!(search.boundary(), 0);
        }
        assert!(started.elapsed().as_secs() < 10, "{:?}", started.elapsed());
    }

    prop_compose! {
        /// Kinds, and what is stored of each chunk of a prompt: present, absent, or without an answer.
        fn any_store(span_max: u32)(
            kinds in prop::collection::vec(prop_oneof![
                (1..span_max).prop_map(Kind::Window), (1..span_max).prop_map(Kind::Chunked), Just(Kind::State),
            ], 1..4),
            prefix in 0_usize..60,
            share in 0_u8..=100,
            unknown in 0_u8..10,
            seed in any::<u64>(),
        ) -> (Vec<Kind>, usize, Vec<Vec<ChunkState>>) {
            let mut rng = seed | 1;
            let mut draw = || {
                rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (rng >> 33) % 100
            };
            let stored = kinds.iter().map(|_| (0..prefix).map(|_| match draw() {
                drawn if drawn < unknown.into() => ChunkState::Unknown,
                _ => state(draw() < share.into()),
            }).collect()).collect();
            (kinds, prefix, stored)
        }
    }

    /// The largest boundary at which everything that is attended to is there, token by token.
    fn brute_force(kinds: &[Kind], prefix: usize, stored: &[Vec<ChunkState>]) -> usize {
        let attends = |kind: Kind, next: u64, token: u64| match kind {
            Kind::Full => true,
            Kind::Window(window) => token + u64::from(window) > next,
            Kind::Chunked(size) => token / u64::from(size) == next / u64::from(size),
            Kind::State => token + 1 == next,
        };
        let is_there = |boundary: &usize| {
            let next = *boundary as u64 * u64::from(CHUNK);
            kinds.iter().zip(stored).all(|(&kind, stored)| {
                (0..next)
                    .filter(|&token| attends(kind, next, token))
                    .all(|token| stored[(token / u64::from(CHUNK)) as usize] == ChunkState::Present)
            })
        };
        (0..=prefix).rev().find(is_there).unwrap_or(0)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10_000))]
        #[test]
        fn it_finds_what_brute_force_finds((kinds, prefix, stored) in any_store(100)) {
            let best = brute_force(&kinds, prefix, &stored);
            let (found, _) = search(&kinds, prefix, Scope::All, |kind, chunk| stored[kind][chunk]);
            prop_assert_eq!(found, best);
        }

        #[test]
        fn the_likely_questions_never_find_too_much(
            (kinds, prefix, stored) in any_store(600), every in 0_usize..9, questions in 0_usize..80, probes in 1_usize..20,
        ) {
            let scope = Scope::Likely { questions, state_every: every };
            let mut search = BoundarySearch::new(unknown(&kinds, &[]), prefix, CHUNK, scope);
            let mut asked = 0;
            loop {
                let ask = search.next(probes);
                if ask.is_empty() {
                    break;
                }
                asked += ask.len();
                ask.into_iter().for_each(|(kind, chunk)| search.learn(kind, chunk, stored[kind][chunk]));
            }
            let most = questions.max(kinds.iter().map(|kind| kind.needed(prefix, CHUNK).len()).sum());
            prop_assert!(asked <= most);
            let boundary = search.boundary();
            for (index, &kind) in kinds.iter().enumerate() {
                let run = kind.needed(boundary, CHUNK);
                let inferred = |chunk: usize| {
                    run.len() > WHOLE_RUN && chunk != run.start && chunk + 1 != run.end
                        && search.states(index)[chunk] == ChunkState::NotAsked
                };
                // Only the middle of a long run is inferred, which the load confirms.
                prop_assert!(run.clone().all(|chunk| stored[index][chunk] == ChunkState::Present || inferred(chunk)));
            }
        }

        #[test]
        fn with_all_questions_it_is_open_only_if_an_answer_could_tell_of_more((kinds, prefix, stored) in any_store(100)) {
            let states = kinds.iter().zip(&stored).map(|(&kind, stored)| (kind, stored.clone(), Vec::new())).collect();
            let mut search = BoundarySearch::new(states, prefix, CHUNK, Scope::All);
            prop_assert_eq!(search.next(15), []);
            let optimist = |&is: &ChunkState| if is == ChunkState::Unknown { ChunkState::Present } else { is };
            let hoped: Vec<Vec<ChunkState>> = stored.iter().map(|of| of.iter().map(optimist).collect()).collect();
            let could_be_more = brute_force(&kinds, prefix, &hoped) > brute_force(&kinds, prefix, &stored);
            prop_assert_eq!(search.is_open(), could_be_more);
        }

        #[test]
        fn what_writers_store_is_found_with_likely_questions(
            window in 1_u32..100, stored_to in 0_usize..60, prefix in 0_usize..60,
            ends in prop::collection::vec(0_usize..60, 0..4), every in 0_usize..9,
        ) {
            // Writers store every window; and snapshots at multiples, at the ends of their prompts and where these
            // branched off.
            let prefix = prefix.min(stored_to);
            let kinds = [Kind::Window(window), Kind::State];
            let is_there = |kind: usize, chunk: usize| {
                let at = chunk + 1;
                chunk < stored_to && (kind == 0 || (every > 0 && at.is_multiple_of(every)) || ends.contains(&at))
            };
            let stored: Vec<Vec<ChunkState>> = (0..2)
                .map(|kind| (0..prefix).map(|chunk| state(is_there(kind, chunk))).collect())
                .collect();
            let scope = Scope::Likely { questions: 80, state_every: every };
            let (found, _) = search(&kinds, prefix, scope, |kind, chunk| stored[kind][chunk]);
            prop_assert_eq!(found, brute_force(&kinds, prefix, &stored));
        }
    }
}
