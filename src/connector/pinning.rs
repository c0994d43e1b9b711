use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::client::Session;
use crate::copy::Copier;
use crate::copy::cuda::Pinned;

/// The arena, registered with the GPU: anew for each life of the daemon, in the background. Nothing is copied meanwhile,
/// since a copy must not begin in what is registered and end in what is not.
#[derive(Default)]
pub(super) struct Pinning(Mutex<Option<Life>>);

struct Life {
    session: Arc<Session>,
    /// None: a CPU.
    pinned: Arc<OnceLock<Option<Arc<Pinned>>>>,
}

impl Pinning {
    /// What to pin copies to by this session; None: it is not ready yet. Begins what has to be done.
    pub fn of(&self, session: &Arc<Session>, copier: &Arc<Copier>) -> Option<Option<Arc<Pinned>>> {
        let mut life = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(life) = life.as_ref().filter(|life| Arc::ptr_eq(&life.session, session)) {
            return life.pinned.get().cloned();
        }
        let pinned = Arc::<OnceLock<_>>::default();
        *life = Some(Life {
            session: Arc::clone(session),
            pinned: Arc::clone(&pinned),
        });
        if matches!(**copier, Copier::Cpu(_)) {
            return Some(pinned.get_or_init(|| None).clone());
        }
        let (copier, arena) = (Arc::clone(copier), Arc::clone(&session.arena));
        tokio::task::spawn_blocking(move || pinned.set(copier.register(&arena)));
        None
    }
}
