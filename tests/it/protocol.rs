//! The slot protocol, walked through: two engines of two ranks, an arena of four slots, two chunks, and everything that each
//! of them can do next, dying included. The ledger is the real one; the arena and what is in its slots are modelled.
//!
//! It looks for three mistakes: a slot that is used anew while somebody may still write or read it, a published chunk that is not
//! wholly of one engine or changes afterwards, and slots that nobody ever gives back.

use std::collections::{BTreeMap, BTreeSet};

use kvgate::node::ledger::{Committed, Ledger, Offer, SessionId, SlotId};
use stateright::{Checker, Model, Property};

const SLOTS: usize = 4;
const CHUNKS: u8 = 2;
/// Engine and rank of each session.
const SESSIONS: [(&str, u32); 4] = [("a", 0), ("a", 1), ("b", 0), ("b", 1)];

/// The session that wrote a rank's share of a slot last, and its chunk.
type Share = Option<(SessionId, u8)>;

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct State {
    ledger: Ledger<u8, usize, usize>,
    /// Of each slot, the generation that it has now; 0: free.
    generations: [u64; SLOTS],
    next_generation: u64,
    contents: [[Share; 2]; SLOTS],
    /// Where published chunks are, and what was in them then.
    published: BTreeMap<u8, (SlotId, [Share; 2])>,
    /// The slots that each process believes that it may write or read.
    writes: BTreeSet<(SessionId, SlotId, u8)>,
    reads: BTreeSet<(SessionId, SlotId, u8)>,
    alive: BTreeSet<SessionId>,
    wrong: Option<&'static str>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Act {
    Attach(SessionId),
    Reserve(SessionId, u8),
    Write(SessionId, SlotId, u8),
    Commit(SessionId, SlotId, u8),
    Abort(SessionId, SlotId, u8),
    Load(SessionId, u8),
    Release(SessionId, SlotId, u8),
    Evict(u8),
    /// Its time is over.
    Spoil(SlotId),
    Die(SessionId),
}

struct Protocol;

fn rank(session: SessionId) -> usize {
    SESSIONS[usize::try_from(session).unwrap()].1 as usize
}

fn engine(session: SessionId) -> &'static str {
    SESSIONS[usize::try_from(session).unwrap()].0
}

impl State {
    /// As the arena does it: a slot is free when neither a filling, nor a published chunk, nor a lease has it.
    fn free_what_is_not_held(&mut self) {
        for slot in 0..SLOTS {
            let id = (slot, self.generations[slot]);
            let held = self.ledger.reserved(id).is_some()
                || self.published.values().any(|(at, _)| *at == id)
                || self.ledger_lends(id);
            if !held {
                self.generations[slot] = 0;
            }
        }
        let used_anew = |id: SlotId, now: &[u64; SLOTS]| now[id.0] != id.1;
        let all = self.writes.iter().chain(&self.reads);
        for (session, id, _) in all {
            if self.alive.contains(session) && used_anew(*id, &self.generations) {
                self.wrong = Some("a slot was freed while a process may use it");
            }
        }
    }

    fn ledger_lends(&self, id: SlotId) -> bool {
        self.reads.iter().any(|(session, slot, _)| {
            *slot == id && self.alive.contains(session) && {
                let mut ledger = self.ledger.clone();
                !ledger.release(*session, &format!("{}", id.1), id).is_empty()
            }
        })
    }

    fn check_published(&mut self) {
        for (chunk, (slot, then)) in &self.published {
            if self.contents[slot.0] != *then {
                self.wrong = Some("a published chunk changed");
            }
            let writers: Vec<_> = then.iter().flatten().collect();
            let whole = writers.len() == 2 && writers.iter().all(|(_, of)| of == chunk);
            let engines: BTreeSet<_> = writers.iter().map(|(session, _)| engine(*session)).collect();
            if !whole || engines.len() != 1 {
                self.wrong = Some("a published chunk is not wholly of one engine");
            }
        }
    }
}

impl Model for Protocol {
    type State = State;
    type Action = Act;

    fn init_states(&self) -> Vec<State> {
        vec![State {
            ledger: Ledger::default(),
            generations: [0; SLOTS],
            next_generation: 1,
            contents: [[None; 2]; SLOTS],
            published: BTreeMap::new(),
            writes: BTreeSet::new(),
            reads: BTreeSet::new(),
            alive: BTreeSet::new(),
            wrong: None,
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Act>) {
        for session in 0..SESSIONS.len() as SessionId {
            if !state.alive.contains(&session) {
                // A process attaches once; the next one is another.
                actions.push(Act::Attach(session));
                continue;
            }
            actions.push(Act::Die(session));
            for chunk in 0..CHUNKS {
                actions.push(Act::Reserve(session, chunk));
                if state.published.contains_key(&chunk) {
                    actions.push(Act::Load(session, chunk));
                }
            }
        }
        for (session, slot, chunk) in &state.writes {
            actions.push(Act::Write(*session, *slot, *chunk));
            actions.push(Act::Commit(*session, *slot, *chunk));
            actions.push(Act::Abort(*session, *slot, *chunk));
            actions.push(Act::Spoil(*slot));
        }
        for (session, slot, chunk) in &state.reads {
            actions.push(Act::Release(*session, *slot, *chunk));
        }
        actions.extend(state.published.keys().map(|chunk| Act::Evict(*chunk)));
    }

    fn next_state(&self, last: &State, action: Act) -> Option<State> {
        let mut state = last.clone();
        match action {
            Act::Attach(session) => {
                let (instance, rank) = SESSIONS[usize::try_from(session).unwrap()];
                state.ledger.attach(session, instance, rank, 2).ok()?;
                state.alive.insert(session);
            }
            Act::Reserve(session, chunk) => {
                if !state.ledger.is_complete(session) || state.published.contains_key(&chunk) {
                    return None;
                }
                let slot = match state.ledger.offer(session, &chunk).ok()? {
                    Offer::Pending => return None,
                    Offer::Join(slot) => slot,
                    Offer::New => {
                        let free = state.generations.iter().position(|generation| *generation == 0)?;
                        let slot = (free, state.next_generation);
                        state.next_generation += 1;
                        state.generations[free] = slot.1;
                        // The bytes from before may be anybody's.
                        let owners = BTreeSet::from([0, 1]);
                        state.ledger.fill(session, chunk, slot, free, owners).ok()?;
                        slot
                    }
                };
                state.writes.insert((session, slot, chunk));
            }
            Act::Write(session, slot, chunk) => {
                state.contents[slot.0][rank(session)] = Some((session, chunk));
            }
            Act::Commit(session, slot, chunk) => {
                // A session writes before it commits.
                state.contents[slot.0][rank(session)] = Some((session, chunk));
                state.writes.remove(&(session, slot, chunk));
                if let Ok(Committed::Whole { chunk, reserved }) = state.ledger.commit(session, slot) {
                    if reserved != slot.0 {
                        state.wrong = Some("another slot was published");
                    }
                    let contents = state.contents[slot.0];
                    if state.published.insert(chunk, (slot, contents)).is_some() {
                        state.wrong = Some("a chunk was published twice");
                    }
                }
            }
            Act::Abort(session, slot, chunk) => {
                state.writes.remove(&(session, slot, chunk));
                state.ledger.abort(session, slot).ok()?;
            }
            Act::Load(session, chunk) => {
                let slot = state.published.get(&chunk)?.0;
                if !state.reads.insert((session, slot, chunk)) {
                    return None;
                }
                state.ledger.lend(session, &format!("{}", slot.1), slot, slot.0);
            }
            Act::Release(session, slot, chunk) => {
                state.reads.remove(&(session, slot, chunk));
                state.ledger.release(session, &format!("{}", slot.1), slot);
            }
            Act::Evict(chunk) => {
                let (slot, _) = state.published[&chunk];
                // As the memory tier does: not while anybody reads it.
                if state.ledger_lends(slot) {
                    return None;
                }
                state.published.remove(&chunk);
            }
            Act::Spoil(slot) => state.ledger.spoil(slot),
            Act::Die(session) => {
                state.alive.remove(&session);
                state.writes.retain(|(of, _, _)| *of != session);
                state.reads.retain(|(of, _, _)| *of != session);
                state.ledger.end(session);
            }
        }
        state.check_published();
        state.free_what_is_not_held();
        Some(state)
    }

    fn within_boundary(&self, state: &State) -> bool {
        state.next_generation <= 4
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(
                "nothing is used anew too early, mixed or changed",
                |_, state: &State| state.wrong.is_none(),
            ),
            Property::always(
                "when all processes are gone nothing is held",
                |_, state: &State| {
                    let mut ledger = state.ledger.clone();
                    for session in 0..SESSIONS.len() as SessionId {
                        ledger.end(session);
                    }
                    ledger.counts() == (0, 0, 0)
                },
            ),
            Property::always("who wants to store never waits for good", |_, state: &State| {
                // A slot that is neither free nor published is a living process's to give back.
                (0..SLOTS).all(|slot| {
                    let id = (slot, state.generations[slot]);
                    id.1 == 0
                        || state.published.values().any(|(at, _)| *at == id)
                        || state
                            .writes
                            .iter()
                            .chain(&state.reads)
                            .any(|(_, of, _)| *of == id)
                        || state.ledger.reserved(id).is_some()
                })
            }),
            Property::sometimes("chunks are published", |_, state: &State| {
                !state.published.is_empty()
            }),
            Property::sometimes("a spoilt slot waits for its writer", |_, state: &State| {
                state.ledger.counts().1 > 0
            }),
        ]
    }
}

#[test]
fn nothing_that_two_engines_do_breaks_the_slot_protocol() {
    let full = std::env::var_os("KVGATE_TEST_FULL").is_some();
    let depth = if full { 14 } else { 10 };
    let checker = Protocol
        .checker()
        .threads(2)
        .target_max_depth(depth)
        .spawn_bfs()
        .join();
    eprintln!("{} states", checker.unique_state_count());
    checker.assert_no_discovery("nothing is used anew too early, mixed or changed");
    checker.assert_no_discovery("when all processes are gone nothing is held");
    checker.assert_no_discovery("who wants to store never waits for good");
    checker.assert_any_discovery("chunks are published");
    checker.assert_any_discovery("a spoilt slot waits for its writer");
}
