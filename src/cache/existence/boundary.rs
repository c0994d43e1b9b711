//! The search for the last place of a prompt where every kind of KV that a model keeps is stored. It goes backwards
//! from the end of the full prefix, asks for several positions a round, and never claims what it did not see. No I/O.

use std::collections::HashSet;

use super::prefix::ChunkState;
use crate::format::Kind;

/// Finds the largest number of leading chunks after which an engine can go on: for each kind the chunks that it needs
/// there are present.
///
/// Windows are mostly there wherever the full prefix is, so one boundary at a time is tried, then more. Snapshots of a
/// state are few: at the ends of prompts, and at a regular distance where the writers keep such. So a state is asked for
/// near the end of the prefix, and at multiples of that distance.
pub struct BoundarySearch {
    kinds: Vec<KindStates>,
    prefix: usize,
    chunk_tokens: u32,
    scope: Scope,
    /// Boundaries that the next round tries.
    width: usize,
    /// Questions that may still be asked.
    budget: usize,
}

/// A kind, and what is known of each chunk of the prefix.
struct KindStates {
    kind: Kind,
    states: Vec<ChunkState>,
}

/// Which questions a search may ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// All that could matter.
    All,
    /// Likely ones: at most `questions`, the middle of a long run is inferred from its ends, and states are asked for
    /// near the end of the prefix and at multiples of `state_every` chunks (0: none).
    Likely { questions: usize, state_every: usize },
}

/// Chunks before the end of the prefix at each of which a snapshot is likely: that of a prompt whose answer followed.
const NEAR: usize = 16;
/// From this many chunks on, the middle of a run is inferred.
const LONG_RUN: usize = 4;

impl BoundarySearch {
    /// `kinds`: each with the known states of the first `prefix` chunks.
    pub fn new(kinds: Vec<(Kind, Vec<ChunkState>)>, prefix: usize, chunk_tokens: u32, scope: Scope) -> Self {
        let kinds: Vec<KindStates> = kinds
            .into_iter()
            .map(|(kind, mut states)| {
                states.resize(prefix, ChunkState::NotAsked);
                KindStates { kind, states }
            })
            .collect();
        let has_state = kinds.iter().any(|of| of.kind == Kind::State);
        Self {
            kinds,
            prefix,
            chunk_tokens,
            scope,
            width: if has_state { 8 } else { 1 },
            budget: match scope {
                Scope::All => usize::MAX,
                Scope::Likely { questions, .. } => questions,
            },
        }
    }

    /// The questions of the next round, as kind and chunk: at most about `probes`, but for a single boundary as many as
    /// it takes. Empty when the boundary is found, or no likely question is left.
    pub fn next(&mut self, probes: usize) -> Vec<(usize, usize)> {
        let best = self.boundary();
        let (mut ask, mut asked, mut tried) = (Vec::new(), HashSet::new(), 0);
        for boundary in (best + 1..=self.prefix).rev() {
            if !self.is_likely(boundary) {
                continue;
            }
            let before = ask.len();
            let Some(more) = self.questions(boundary) else {
                continue;
            };
            ask.extend(more.into_iter().filter(|question| asked.insert(*question)));
            if ask.len() == before {
                continue;
            }
            tried += 1;
            let most = probes.max(1);
            if self.scope != Scope::All && (tried >= self.width.min(most) || ask.len() >= most) {
                break;
            }
        }
        self.width = self.width.saturating_mul(2);
        if ask.len() > self.budget {
            ask.clear();
        }
        self.budget -= ask.len();
        ask
    }

    pub fn learn(&mut self, kind: usize, chunk: usize, state: ChunkState) {
        self.kinds[kind].states[chunk] = state;
    }

    /// The largest boundary at which all is known, or inferred, to be there.
    pub fn boundary(&self) -> usize {
        let is_there = |boundary: &usize| {
            self.kinds.iter().all(|of| {
                let run = self.run(of, *boundary);
                let must = self.must_ask(run.clone());
                run.clone().all(|chunk| match of.states[chunk] {
                    ChunkState::Present => true,
                    ChunkState::NotAsked => !must.contains(&chunk),
                    ChunkState::Absent | ChunkState::Unknown => false,
                })
            })
        };
        (0..=self.prefix).rev().find(is_there).unwrap_or(0)
    }

    /// Whether a question that was not answered could have told of a larger boundary.
    pub fn is_open(&self) -> bool {
        let best = self.boundary();
        (best + 1..=self.prefix).any(|boundary| {
            let mut is_unknown = false;
            let could_be = self.kinds.iter().all(|of| {
                self.run(of, boundary).all(|chunk| {
                    is_unknown |= of.states[chunk] == ChunkState::Unknown;
                    of.states[chunk] != ChunkState::Absent
                })
            });
            could_be && is_unknown
        })
    }

    pub fn states(&self, kind: usize) -> &[ChunkState] {
        &self.kinds[kind].states
    }

    fn run(&self, of: &KindStates, boundary: usize) -> std::ops::Range<usize> {
        of.kind.needed(boundary, self.chunk_tokens)
    }

    /// The chunks of a run that are asked for; the others are inferred.
    fn must_ask(&self, run: std::ops::Range<usize>) -> Vec<usize> {
        match self.scope {
            Scope::Likely { .. } if run.len() >= LONG_RUN => vec![run.start, run.end - 1],
            _ => run.collect(),
        }
    }

    fn is_likely(&self, boundary: usize) -> bool {
        let Scope::Likely { state_every, .. } = self.scope else {
            return true;
        };
        self.kinds.iter().filter(|of| of.kind == Kind::State).all(|of| {
            of.states[boundary - 1] == ChunkState::Present
                || self.prefix - boundary < NEAR
                || (state_every > 0 && boundary.is_multiple_of(state_every))
        })
    }

    /// What is still to be asked for this boundary; None if it can't be one.
    fn questions(&self, boundary: usize) -> Option<Vec<(usize, usize)>> {
        let mut ask = Vec::new();
        for (index, of) in self.kinds.iter().enumerate() {
            let run = self.run(of, boundary);
            if run
                .clone()
                .any(|chunk| matches!(of.states[chunk], ChunkState::Absent | ChunkState::Unknown))
            {
                return None;
            }
            for chunk in self.must_ask(run) {
                if of.states[chunk] == ChunkState::NotAsked {
                    ask.push((index, chunk));
                }
            }
        }
        Some(ask)
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
        let states = kinds.iter().map(|&kind| (kind, Vec::new())).collect();
        let mut search = BoundarySearch::new(states, prefix, CHUNK, scope);
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

    fn state(is_present: bool) -> ChunkState {
        match is_present {
            true => ChunkState::Present,
            false => ChunkState::Absent,
        }
    }

    const LIKELY: Scope = Scope::Likely {
        questions: 64,
        state_every: 8,
    };

    #[test]
    fn windows_that_are_there_cost_one_question_each() {
        let kinds = [Kind::Window(10), Kind::Chunked(24)];
        assert_eq!(
            search(&kinds, 4095, LIKELY, |_, _| ChunkState::Present),
            (4095, 2)
        );
    }

    #[test]
    fn what_was_never_stored_costs_no_more_than_the_budget() {
        for kinds in [
            [Kind::Window(100), Kind::State],
            [Kind::Window(10), Kind::Window(17)],
        ] {
            let (boundary, asked) = search(&kinds, 4096, LIKELY, |_, _| ChunkState::Absent);
            assert_eq!(boundary, 0);
            assert!(asked <= 64, "{asked}");
        }
    }

    #[test]
    fn snapshots_are_found_near_the_end_and_at_the_regular_distance() {
        let at = |there: usize| search(&[Kind::State], 1000, LIKELY, |_, chunk| state(chunk + 1 == there)).0;
        assert_eq!(at(1000), 1000);
        assert_eq!(at(986), 986);
        assert_eq!(at(984), 984);
        assert_eq!(at(800), 800);
        // Nobody would have looked there.
        assert_eq!(at(801), 0);
    }

    prop_compose! {
        /// Kinds, and what is stored of each chunk of a prompt: present, absent, or without an answer.
        fn any_store()(
            kinds in prop::collection::vec(prop_oneof![
                (1_u32..100).prop_map(Kind::Window), (1_u32..100).prop_map(Kind::Chunked), Just(Kind::State),
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
        fn it_finds_what_brute_force_finds((kinds, prefix, stored) in any_store()) {
            let best = brute_force(&kinds, prefix, &stored);
            let (found, _) = search(&kinds, prefix, Scope::All, |kind, chunk| stored[kind][chunk]);
            prop_assert_eq!(found, best);
        }

        #[test]
        fn the_likely_questions_never_find_too_much((kinds, prefix, stored) in any_store(), every in 0_usize..9) {
            let scope = Scope::Likely { questions: 64, state_every: every };
            // What is inferred is left to the load: here the middle of each run is taken as it is told.
            let states = kinds.iter().map(|&kind| (kind, Vec::new())).collect();
            let mut search = BoundarySearch::new(states, prefix, CHUNK, scope);
            let mut asked = 0;
            loop {
                let ask = search.next(15);
                if ask.is_empty() {
                    break;
                }
                asked += ask.len();
                ask.into_iter().for_each(|(kind, chunk)| search.learn(kind, chunk, stored[kind][chunk]));
            }
            let boundary = search.boundary();
            prop_assert!(asked <= 64);
            for (index, &kind) in kinds.iter().enumerate() {
                let run = kind.needed(boundary, CHUNK);
                if let (Some(&first), Some(last)) = (run.clone().collect::<Vec<_>>().first(), run.clone().last()) {
                    prop_assert_eq!(stored[index][first], ChunkState::Present);
                    prop_assert_eq!(stored[index][last], ChunkState::Present);
                }
                let none_absent = run.clone().all(|chunk| search.states(index)[chunk] != ChunkState::Absent);
                prop_assert!(run.len() < LONG_RUN || none_absent);
            }
        }

        #[test]
        fn what_writers_store_is_found_with_likely_questions(
            window in 1_u32..100, stored_to in 0_usize..60, prefix in 0_usize..60, end in 0_usize..12,
        ) {
            // Writers store every window, and snapshots at multiples of 8 chunks and at the end of the prompt.
            let ends = stored_to.saturating_sub(end);
            let prefix = prefix.min(stored_to);
            let kinds = [Kind::Window(window), Kind::State];
            let is_there = |kind: usize, chunk: usize| {
                chunk < stored_to && (kind == 0 || (chunk + 1).is_multiple_of(8) || chunk + 1 == ends)
            };
            let stored: Vec<Vec<ChunkState>> = (0..2)
                .map(|kind| (0..prefix).map(|chunk| state(is_there(kind, chunk))).collect())
                .collect();
            let (found, _) = search(&kinds, prefix, LIKELY, |kind, chunk| stored[kind][chunk]);
            prop_assert_eq!(found, brute_force(&kinds, prefix, &stored));
        }
    }
}
