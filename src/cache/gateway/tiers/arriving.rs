//! Chunks that are on their way into memory, so that several loads of the same chunk read it once.
//!
//! A *flight* is one chunk's fetch. It goes on as long as any load waits for it, whichever began it, and all of
//! them get its outcome.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use tokio::sync::watch;

use crate::cache::gateway::chunk::LoadedChunk;
use crate::cache::gateway::miss::Miss;
use crate::cache::gateway::task::Task;
use crate::format::ChunkId;

type Outcome = Result<LoadedChunk, Miss>;

#[derive(Default)]
pub struct Arriving {
    flights: DashMap<ChunkId, (u64, Weak<Flight>)>,
    numbers: AtomicU64,
}

/// A fetch that other loads may wait for too.
pub struct Flight {
    told: watch::Receiver<Option<Outcome>>,
    /// None where a load in layer order does the fetch.
    _task: Option<Task<()>>,
}

/// The right and the duty to fetch a chunk. If it is dropped before it tells, the waiting loads go on by
/// themselves.
pub struct Announcement {
    arriving: Arc<Arriving>,
    key: ChunkId,
    number: u64,
    tell: watch::Sender<Option<Outcome>>,
    /// Keeps the flight that other loads join.
    flight: Option<Arc<Flight>>,
}

impl Arriving {
    pub fn join(&self, key: &ChunkId) -> Option<Arc<Flight>> {
        self.flights.get(key)?.1.upgrade()
    }

    /// Joins the flight of the chunk, or announces that the caller fetches it.
    pub fn announce(self: &Arc<Self>, key: ChunkId) -> Result<Announcement, Arc<Flight>> {
        let entry = self.flights.entry(key);
        if let Entry::Occupied(entry) = &entry
            && let Some(flight) = entry.get().1.upgrade()
        {
            return Err(flight);
        }
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let (tell, told) = watch::channel(None);
        let flight = Arc::new(Flight { told, _task: None });
        entry.insert((number, Arc::downgrade(&flight)));
        Ok(Announcement {
            arriving: Arc::clone(self),
            key,
            number,
            tell,
            flight: Some(flight),
        })
    }
}

impl Announcement {
    /// Fetches in a task that lives as long as any load waits for it.
    pub fn fly(mut self, fetch: impl Future<Output = Outcome> + Send + 'static) -> Arc<Flight> {
        let told = self.tell.subscribe();
        let (arriving, key, number) = (Arc::clone(&self.arriving), self.key, self.number);
        // The waiting loads own the flight, not the fetch itself.
        let before = self.flight.take();
        let task = Task::spawn(async move {
            let outcome = fetch.await;
            self.tell(outcome);
        });
        let flight = Arc::new(Flight {
            told,
            _task: Some(task),
        });
        if let Some(mut entry) = arriving.flights.get_mut(&key)
            && entry.0 == number
        {
            entry.1 = Arc::downgrade(&flight);
        }
        drop(before);
        flight
    }

    pub fn tell(self, outcome: Outcome) {
        // Loads from here on find it in memory, or ask anew.
        self.arriving.leave(&self.key, self.number);
        self.tell.send_replace(Some(outcome));
    }
}

impl Drop for Announcement {
    fn drop(&mut self) {
        self.arriving.leave(&self.key, self.number);
    }
}

impl Arriving {
    /// From here on no load joins the flight of the chunk.
    pub fn forget(&self, key: &ChunkId) {
        self.flights.remove(key);
    }

    /// From here on no load joins any flight of now.
    pub fn forget_all(&self) {
        self.flights.clear();
    }

    fn leave(&self, key: &ChunkId, number: u64) {
        self.flights.remove_if(key, |_, entry| entry.0 == number);
    }
}

impl Flight {
    /// Waits for the outcome; None if the fetch was given up.
    pub async fn outcome(&self) -> Option<Outcome> {
        let mut told = self.told.clone();
        let outcome = told.wait_for(Option::is_some).await.ok()?;
        outcome.clone()
    }
}
