//! The right to send one request to one endpoint. It reports what came of it.

use std::net::SocketAddr;
use std::sync::Arc;

use tokio::time::Instant;

use super::endpoints::Endpoints;
use super::member::Ending;
use super::route::Route;

/// Requests that wait for room go by their class. A store has a body, a load has none: it may be a HEAD.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Class {
    Load,
    Store,
}

/// One value for loads and one for stores.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PerClass<V> {
    load: V,
    store: V,
}

impl<V> PerClass<V> {
    pub fn of(&self, class: Class) -> &V {
        match class {
            Class::Load => &self.load,
            Class::Store => &self.store,
        }
    }

    pub fn of_mut(&mut self, class: Class) -> &mut V {
        match class {
            Class::Load => &mut self.load,
            Class::Store => &mut self.store,
        }
    }
}

/// How a request ended, as far as it tells something of its endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The answer came whole.
    Answered {
        status: u16,
    },
    Lost(Loss),
}

/// Why there was no answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// None could be made, it broke, or what came was no answer.
    Connection,
    Timeout,
}

/// The right to send one request to one endpoint. It is given back with what came of it; dropping it says that the
/// request was given up.
pub struct Permit<T> {
    endpoints: Endpoints<T>,
    payload: Arc<T>,
    address: SocketAddr,
    ending: Ending,
}

impl<T> Permit<T> {
    pub(super) fn new(
        endpoints: Endpoints<T>,
        payload: Arc<T>,
        address: SocketAddr,
        number: u64,
        now: Instant,
    ) -> Self {
        let ending = Ending {
            permit: number,
            outcome: None,
            waits: false,
            began: now,
            answered: None,
            moved_at: now,
            moved: 0,
        };
        Self {
            endpoints,
            payload,
            address,
            ending,
        }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// The state that goes with the endpoint.
    pub fn payload(&self) -> &Arc<T> {
        &self.payload
    }

    /// It can't be sent yet, for a reason of our own: until it [goes](Self::goes), time says nothing of the endpoint.
    pub fn waits(&mut self, route: &Route) {
        self.ending.waits = true;
        route.waits();
    }

    /// Nothing holds it up any more.
    pub fn goes(&mut self, route: &Route) {
        let now = Instant::now();
        self.ending.waits = false;
        self.ending.began = now;
        self.ending.moved_at = now;
        self.endpoints.goes(self.address, self.ending.permit, now);
        route.goes(now);
    }

    /// The answer begins, to a request with `sent` bytes of body.
    pub fn answered(&mut self, sent: usize) {
        let now = Instant::now();
        self.ending.moved += sent;
        self.ending.answered = Some(now);
        self.ending.moved_at = now;
    }

    /// Bytes of a body moved, either way.
    pub fn moved(&mut self, bytes: usize) {
        self.ending.moved += bytes;
        self.ending.moved_at = Instant::now();
    }

    pub fn end(mut self, outcome: Outcome) {
        self.ending.outcome = Some(outcome);
    }
}

impl<T> Drop for Permit<T> {
    fn drop(&mut self) {
        self.endpoints.end(self.address, &self.ending);
    }
}
