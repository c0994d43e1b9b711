//! A load that all ranks of an engine take part in: each chunk comes once, and stays until every rank has had it.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::ledger::Rank;
use super::load::LoadCall;
use crate::cache::gateway::{LoadStream, LoadedChunk, Miss};
use crate::format::{ChunkHash, SpaceId};
use crate::protocol::Order;

type Outcome = (usize, Result<LoadedChunk, Miss>);

pub(super) struct SharedLoad {
    /// The request, the same for all ranks.
    pub space: SpaceId,
    pub chunks: Vec<ChunkHash>,
    pub order: Order,
    /// The order in which the load is done.
    pub done_in: Order,
    state: Mutex<State>,
    changed: Notify,
}

struct State {
    /// Outcomes that not every rank has had yet; `gone` counts those before them.
    outcomes: VecDeque<Outcome>,
    gone: usize,
    over: bool,
    /// The number of outcomes that each rank has had; ranks that are done, or gone, are not here.
    ranks: BTreeMap<Rank, usize>,
    joined: BTreeSet<Rank>,
}

/// The answer to a rank that wants to join.
pub(super) enum Joined {
    Part(Participant),
    /// The rank takes no part: it came after the wait was over, or attached when the load was under way.
    Late,
    /// The rank has joined before.
    Before,
}

/// One rank's part; it ends when it is dropped.
pub(super) struct Participant {
    load: Arc<SharedLoad>,
    rank: Rank,
}

impl SharedLoad {
    pub fn new(call: &LoadCall, done_in: Order, ranks: impl IntoIterator<Item = Rank>) -> Arc<Self> {
        let state = State {
            outcomes: VecDeque::new(),
            gone: 0,
            over: false,
            ranks: ranks.into_iter().map(|rank| (rank, 0)).collect(),
            joined: BTreeSet::new(),
        };
        Arc::new(Self {
            space: call.space.id(),
            chunks: call.chunks.clone(),
            order: call.order,
            done_in,
            state: Mutex::new(state),
            changed: Notify::new(),
        })
    }

    /// Takes the outcomes, to the end; returns when every rank has had all of them.
    pub async fn drive(&self, mut stream: LoadStream) {
        loop {
            let all_left = self.changed.notified();
            if self.lock().ranks.is_empty() {
                return;
            }
            tokio::select! {
                outcome = stream.next() => match outcome {
                    Some(outcome) => self.lock().outcomes.push_back(outcome),
                    None => break,
                },
                () = all_left => continue,
            }
            self.changed.notify_waiters();
        }
        self.ends();
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable();
            if self.lock().ranks.is_empty() {
                return;
            }
            changed.await;
        }
    }

    /// Ends the load: no more outcomes come.
    pub fn ends(&self) {
        self.lock().over = true;
        self.changed.notify_waiters();
    }

    pub fn join(self: &Arc<Self>, rank: Rank) -> Joined {
        let mut state = self.lock();
        let has_part = state.ranks.contains_key(&rank);
        match (state.joined.insert(rank), has_part) {
            (true, true) => Joined::Part(Participant {
                load: Arc::clone(self),
                rank,
            }),
            (true, false) => Joined::Late,
            (false, _) => Joined::Before,
        }
    }

    /// Leaves out the ranks that have not joined.
    pub fn leave_out(&self) {
        self.change(|state| {
            let State { ranks, joined, .. } = state;
            ranks.retain(|rank, _| joined.contains(rank));
        });
    }

    /// Ends a rank's part.
    pub fn leave(&self, rank: Rank) {
        self.change(|state| state.ranks.remove(&rank));
    }

    /// Ends the part of a rank that releases the whole load. If it is the last that joined, and has not had
    /// everything yet, the ranks that never joined are not waited for: the request was cancelled. True if so.
    pub fn cancel(&self, rank: Rank) -> bool {
        self.change(|state| {
            let end = state.gone + state.outcomes.len();
            let had = state.ranks.remove(&rank);
            let had_all = state.over && had == Some(end);
            let joined = had.is_some() && state.joined.contains(&rank);
            let others = state.ranks.keys().any(|rank| state.joined.contains(rank));
            let is_cancelled = joined && !had_all && !others;
            if is_cancelled {
                state.ranks.clear();
            }
            is_cancelled
        })
    }

    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.lock();
        let changed = change(&mut state);
        let gone = state.prune();
        drop(state);
        drop(gone);
        self.changed.notify_waiters();
        changed
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Takes out the outcomes that every rank has had.
    fn prune(&mut self) -> Vec<Outcome> {
        let end = self.gone + self.outcomes.len();
        let had = self.ranks.values().min().copied().unwrap_or(end);
        let count = had.saturating_sub(self.gone).min(self.outcomes.len());
        self.gone += count;
        self.outcomes.drain(..count).collect()
    }
}

impl Participant {
    pub async fn next(&self) -> Option<Outcome> {
        loop {
            let changed = self.load.changed.notified();
            tokio::pin!(changed);
            // From here on no notification is missed.
            changed.as_mut().enable();
            {
                let mut state = self.load.lock();
                let had = *state.ranks.get(&self.rank)?;
                if let Some(outcome) = state.outcomes.get(had - state.gone).cloned() {
                    state.ranks.insert(self.rank, had + 1);
                    let gone = state.prune();
                    drop(state);
                    drop(gone);
                    return Some(outcome);
                }
                if state.over {
                    return None;
                }
            }
            changed.await;
        }
    }

    pub fn done_in(&self) -> Order {
        self.load.done_in
    }
}

impl Drop for Participant {
    fn drop(&mut self) {
        self.load.leave(self.rank);
    }
}
