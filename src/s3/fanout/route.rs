//! The endpoints that the attempts of one call went to, so that the next goes elsewhere.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::time::Instant;

/// Why a request is sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    First,
    /// An earlier attempt failed.
    Retry,
    /// An earlier attempt is slow.
    Hedge,
}

/// The way of one call through its attempts: where they went, so that the next goes elsewhere. Clones share it.
#[derive(Debug, Clone)]
pub struct Route {
    start: Start,
    taken: Arc<Mutex<Taken>>,
}

#[derive(Debug, Default)]
struct Taken {
    addresses: Vec<SocketAddr>,
    /// The time at which the last attempt was sent.
    sent: Option<Instant>,
    /// Its number.
    permit: u64,
    /// There was another endpoint then.
    others: bool,
}

impl Default for Route {
    fn default() -> Self {
        Self {
            start: Start::First,
            taken: Arc::default(),
        }
    }
}

impl Route {
    /// For an attempt after this one.
    #[must_use]
    pub fn then(&self, start: Start) -> Self {
        Self {
            start,
            taken: Arc::clone(&self.taken),
        }
    }

    pub fn start(&self) -> Start {
        self.start
    }

    /// When the last attempt was sent; None while it waits for an endpoint, or for a connection.
    pub fn sent(&self) -> Option<Instant> {
        self.lock().sent
    }

    /// Where the call has been.
    pub(super) fn taken(&self) -> Vec<SocketAddr> {
        self.lock().addresses.clone()
    }

    /// Where the last attempt is, and its permit.
    pub(super) fn last(&self) -> Option<(SocketAddr, u64)> {
        let taken = self.lock();
        taken.addresses.last().map(|&address| (address, taken.permit))
    }

    /// Whether the next attempt has another endpoint to go to.
    pub fn can_move(&self) -> bool {
        self.lock().others
    }

    pub(super) fn take(&self, address: SocketAddr, permit: u64, others: bool, now: Instant) {
        let mut taken = self.lock();
        taken.addresses.push(address);
        taken.sent = Some(now);
        taken.permit = permit;
        taken.others = others;
    }

    pub(super) fn waits(&self) {
        self.lock().sent = None;
    }

    pub(super) fn goes(&self, now: Instant) {
        self.lock().sent = Some(now);
    }

    /// All endpoints may be taken again.
    pub(super) fn forget(&self) {
        self.lock().addresses.clear();
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
