//! The queue of requests that wait for room: loads first, without starving stores.

use std::collections::VecDeque;

use tokio::sync::oneshot;

use super::permit::{Class, Permit};
use super::route::Route;

/// A store goes first once this many times its bytes of loads went before it.
const LOADS_PER_STORE: usize = 3;

/// The requests that wait for room. Loads go first, but stores are not starved; within a class the first come is the first
/// served.
pub(super) struct PermitQueue<T> {
    loads: VecDeque<Waiter<T>>,
    stores: VecDeque<Waiter<T>>,
    /// Bytes of loads that went while a store waited.
    went_before: usize,
}

pub(super) struct Waiter<T> {
    pub number: u64,
    pub class: Class,
    pub bytes: usize,
    pub route: Route,
    pub sender: oneshot::Sender<Permit<T>>,
}

impl<T> PermitQueue<T> {
    pub fn new() -> Self {
        Self {
            loads: VecDeque::new(),
            stores: VecDeque::new(),
            went_before: 0,
        }
    }

    pub fn is_empty(&self) -> bool {
        self.loads.is_empty() && self.stores.is_empty()
    }

    pub fn push(&mut self, waiter: Waiter<T>) {
        self.of(waiter.class).push_back(waiter);
    }

    /// The request whose turn it is.
    pub fn first(&self) -> Option<&Waiter<T>> {
        match (self.loads.front(), self.stores.front()) {
            (Some(_), Some(store)) if self.went_before >= LOADS_PER_STORE.saturating_mul(store.bytes) => {
                Some(store)
            }
            (load, store) => load.or(store),
        }
    }

    /// Takes the one out whose turn it is.
    pub fn pop(&mut self) -> Option<Waiter<T>> {
        let (class, bytes) = self.first().map(|first| (first.class, first.bytes))?;
        match class {
            Class::Load if self.stores.is_empty() => {}
            Class::Load => self.went_before += bytes,
            Class::Store => self.went_before = 0,
        }
        self.of(class).pop_front()
    }

    /// Removes a request that gave up. Returns whether it was in the queue.
    pub fn leave(&mut self, class: Class, number: u64) -> bool {
        let queue = self.of(class);
        let at = queue.iter().position(|waiter| waiter.number == number);
        at.and_then(|at| queue.remove(at)).is_some()
    }

    fn of(&mut self, class: Class) -> &mut VecDeque<Waiter<T>> {
        match class {
            Class::Load => &mut self.loads,
            Class::Store => &mut self.stores,
        }
    }
}
