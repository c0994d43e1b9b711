//! Bytes of slots that one engine, or one load, may hold. A load waits for its credit before it asks the arena for
//! room.

use std::sync::Arc;

use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bytes of slots that a load may hold at a time, including slots handed out and not yet released. A load that has
/// spent its credit waits for its own client, and leaves the arena to other loads meanwhile.
///
/// An engine has a credit, too, which all of its loads and stores spend from. So an engine that never gives slots back
/// leaves room for the others.
#[derive(Clone)]
pub struct Credit {
    kib: Arc<Semaphore>,
    most: u32,
    /// The credit that this one is a part of.
    engine: Option<Arc<Credit>>,
}

/// Spent credit; it goes back when it is dropped.
pub type Spent = Arc<Permits>;

#[derive(Debug)]
pub struct Permits {
    _own: OwnedSemaphorePermit,
    _engine: Option<OwnedSemaphorePermit>,
}

impl Credit {
    pub fn new(bytes: usize) -> Self {
        let most = kib(bytes).max(1);
        Self {
            kib: Arc::new(Semaphore::new(most as usize)),
            most,
            engine: None,
        }
    }

    /// A credit of `bytes` within this one, for a load.
    #[must_use]
    pub fn part(&self, bytes: usize) -> Self {
        Self {
            engine: Some(Arc::new(self.clone())),
            ..Self::new(bytes)
        }
    }

    pub fn bytes(&self) -> usize {
        let most = self.engine.as_ref().map_or(self.most, |engine| engine.most);
        self.most.min(most) as usize * 1024
    }

    /// Spends now, or not at all. A chunk that is larger than the whole credit goes alone.
    pub fn try_spend(&self, bytes: usize) -> Option<Spent> {
        let of = |credit: &Self| {
            let kib = Arc::clone(&credit.kib);
            kib.try_acquire_many_owned(credit.kib_of(bytes)).ok()
        };
        let own = of(self)?;
        let engine = match &self.engine {
            Some(engine) => Some(of(engine)?),
            None => None,
        };
        Some(Arc::new(Permits {
            _own: own,
            _engine: engine,
        }))
    }

    /// Spends for `chunks` chunks together: all or nothing, so two loads never wait for each other's half.
    pub async fn spend(&self, bytes: usize, chunks: usize) -> Vec<Spent> {
        let mut own = self.acquire(bytes, chunks).await;
        let mut engine = match &self.engine {
            Some(engine) => engine.acquire(bytes, chunks).await.map(Some),
            None => Some(None),
        };
        let split = |permit: &mut OwnedSemaphorePermit, credit: &Self| {
            let kib = (credit.kib_of(bytes) as usize).min(permit.num_permits());
            permit.split(kib)
        };
        let mut spent = Vec::with_capacity(chunks);
        for _ in 0..chunks {
            let (Some(own), Some(engine)) = (&mut own, &mut engine) else {
                break;
            };
            let of_engine = match (engine, &self.engine) {
                (Some(permit), Some(of)) => split(permit, of),
                _ => None,
            };
            let Some(own) = split(own, self) else { break };
            spent.push(Arc::new(Permits {
                _own: own,
                _engine: of_engine,
            }));
        }
        spent
    }

    /// None if the semaphore was closed, which never happens.
    async fn acquire(&self, bytes: usize, chunks: usize) -> Option<OwnedSemaphorePermit> {
        let chunks = u32::try_from(chunks).unwrap_or(u32::MAX);
        let kib = self.kib_of(bytes).saturating_mul(chunks).min(self.most);
        Arc::clone(&self.kib).acquire_many_owned(kib).await.ok()
    }

    fn kib_of(&self, bytes: usize) -> u32 {
        kib(bytes).clamp(1, self.most)
    }
}

/// Converts bytes to the KiB that semaphores count in: a permit each byte would not fit in 32 bits.
pub fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}
