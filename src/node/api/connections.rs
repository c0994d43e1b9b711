//! The API's open connections, limited in number. At the limit, a new connection closes the one that has been idle
//! longest.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// All connections.
pub struct Connections {
    most: usize,
    state: Mutex<State>,
    total: AtomicU64,
    closed_idle: AtomicU64,
}

#[derive(Default)]
struct State {
    /// Counts up; orders the connections without a request by when they last had one.
    clock: u64,
    all: BTreeMap<u64, Arc<ServedConnection>>,
    idle: BTreeMap<u64, u64>,
}

/// An open connection, until it is dropped.
pub struct Connected {
    connections: Arc<Connections>,
    id: u64,
    pub connection: Arc<ServedConnection>,
}

pub struct ServedConnection {
    close: Notify,
    /// Its place among the idle connections; 0 while it has a request.
    idle_since: AtomicU64,
}

/// A request under way.
pub struct Busy {
    connections: Arc<Connections>,
    id: u64,
}

impl Connections {
    pub fn new(most: usize) -> Arc<Self> {
        Arc::new(Self {
            most,
            state: Mutex::default(),
            total: AtomicU64::new(0),
            closed_idle: AtomicU64::new(0),
        })
    }

    /// Adds a connection. None if all others are busy.
    pub fn open(self: &Arc<Self>) -> Option<Connected> {
        let id = self.total.fetch_add(1, Ordering::Relaxed) + 1;
        let mut state = self.lock();
        if state.all.len() >= self.most {
            let (_, oldest) = state.idle.pop_first()?;
            if let Some(oldest) = state.all.remove(&oldest) {
                oldest.close.notify_one();
                self.closed_idle.fetch_add(1, Ordering::Relaxed);
            }
        }
        state.clock += 1;
        let connection = Arc::new(ServedConnection {
            close: Notify::new(),
            idle_since: AtomicU64::new(state.clock),
        });
        let clock = state.clock;
        state.idle.insert(clock, id);
        state.all.insert(id, Arc::clone(&connection));
        Some(Connected {
            connections: Arc::clone(self),
            id,
            connection,
        })
    }

    pub fn count(&self) -> usize {
        self.lock().all.len()
    }

    pub fn total(&self) -> u64 {
        self.total.load(Ordering::Relaxed)
    }

    pub fn closed_idle(&self) -> u64 {
        self.closed_idle.load(Ordering::Relaxed)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Connected {
    /// A request begins.
    pub fn busy(&self) -> Busy {
        let mut state = self.connections.lock();
        let since = self.connection.idle_since.swap(0, Ordering::Relaxed);
        state.idle.remove(&since);
        Busy {
            connections: Arc::clone(&self.connections),
            id: self.id,
        }
    }

    /// Waits until the connection must make room.
    pub async fn must_close(&self) {
        self.connection.close.notified().await;
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        let mut state = self.connections.lock();
        state.clock += 1;
        let clock = state.clock;
        if let Some(connection) = state.all.get(&self.id) {
            connection.idle_since.store(clock, Ordering::Relaxed);
            state.idle.insert(clock, self.id);
        }
    }
}

impl Drop for Connected {
    fn drop(&mut self) {
        let mut state = self.connections.lock();
        state
            .idle
            .remove(&self.connection.idle_since.load(Ordering::Relaxed));
        state.all.remove(&self.id);
    }
}
