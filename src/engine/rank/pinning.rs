//! Registers the arena with the GPU in the background, anew for each life of the daemon.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::worker::WorkerError;
use crate::engine::client::ApiSession;
use crate::engine::copy::Copier;
use crate::engine::copy::cuda::Pinned;

/// The arena's registration with the GPU: anew for each life of the daemon, in the background. Nothing is copied
/// meanwhile, since a copy must not begin in registered memory and end in unregistered memory.
#[derive(Default)]
pub(super) struct Pinning(Arc<Mutex<Option<Life>>>);

struct Life {
    session: Arc<ApiSession>,
    registered: Arc<OnceLock<Registered>>,
}

/// None: a device that needs no registration.
pub type Registered = Option<Arc<Pinned>>;

impl Pinning {
    /// The registration for copies of this session. Begins it if needed; until it is done it is an error.
    pub fn of(
        &self,
        session: &Arc<ApiSession>,
        copier: Option<&Arc<Copier>>,
    ) -> Result<Registered, WorkerError> {
        let mut life = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(life) = life.as_ref().filter(|life| Arc::ptr_eq(&life.session, session)) {
            return life.registered.get().cloned().ok_or(WorkerError::Pinning);
        }
        let registered = Arc::<OnceLock<_>>::default();
        *life = Some(Life {
            session: Arc::clone(session),
            registered: Arc::clone(&registered),
        });
        let (ended, of) = (session.ended(), Arc::downgrade(&self.0));
        tokio::spawn(async move {
            ended.await;
            let over = of.upgrade().and_then(|life| {
                let mut life = life.lock().unwrap_or_else(PoisonError::into_inner);
                life.take_if(|life| life.session.is_over())
            });
            // To unregister takes a while: not on this thread, and without the lock.
            tokio::task::spawn_blocking(move || drop(over));
        });
        let Some(copier) = copier.filter(|copier| copier.registers()) else {
            return Ok(registered.get_or_init(|| None).clone());
        };
        let (copier, arena) = (Arc::clone(copier), Arc::clone(&session.arena));
        tokio::task::spawn_blocking(move || registered.set(copier.register(&arena)));
        Err(WorkerError::Pinning)
    }
}
