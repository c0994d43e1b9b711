//! An engine process's connection through all lives of its daemon: it attaches when needed, and again after a
//! restart.

use std::sync::Arc;

use tokio::sync::{Mutex, MutexGuard};

use super::{ApiSession, Client, ClientError, in_time};
use crate::format::Space;
use crate::protocol::{AttachRequest, SpaceInfo};

/// An engine process through all lives of its daemon: it attaches when needed, and anew after a restart.
///
/// Slots, leases and the arena belong to one life, and go by its [`ApiSession`]. Those of an ended session are
/// gone, and calls by it are refused with `no_session`; so nothing is ever read or written by the offsets of
/// another arena.
pub struct Engine {
    client: Client,
    request: AttachRequest,
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    session: Option<Arc<ApiSession>>,
    spaces: Vec<Space>,
}

impl Client {
    /// An engine that attaches when its session is first asked for.
    pub fn engine(&self, request: AttachRequest) -> Engine {
        Engine {
            client: self.clone(),
            request,
            state: Arc::default(),
        }
    }
}

impl Engine {
    /// The session with the daemon of now. Fails while there is none: until then every chunk is a miss.
    pub async fn session(&self) -> Result<Arc<ApiSession>, ClientError> {
        let mut state = self.state().await?;
        if let Some(session) = state.session.as_ref().filter(|session| !session.is_over()) {
            return Ok(Arc::clone(session));
        }
        state.session = None;
        let session = Arc::new(self.client.attach(&self.request).await?);
        for space in &state.spaces {
            self.client.declare(space).await?;
        }
        state.session = Some(Arc::clone(&session));
        // The old arena goes with it: while this process has that mapped, a new daemon may find no room for its own.
        let (ended, of) = (session.ended(), Arc::downgrade(&self.state));
        tokio::spawn(async move {
            ended.await;
            if let Some(state) = of.upgrade() {
                let mut state = state.lock().await;
                state.session.take_if(|session| session.is_over());
            }
        });
        Ok(session)
    }

    /// Whether there is a session now; None: an attach is under way.
    pub fn is_attached(&self) -> Option<bool> {
        let state = self.state.try_lock().ok()?;
        Some(state.session.as_ref().is_some_and(|session| !session.is_over()))
    }

    /// Makes a space known, to the daemon's later lives as well.
    pub async fn declare(&self, space: &Space) -> Result<SpaceInfo, ClientError> {
        let mut state = self.state().await?;
        let info = self.client.declare(space).await?;
        if !state.spaces.iter().any(|known| known.id() == space.id()) {
            state.spaces.push(space.clone());
        }
        Ok(info)
    }

    /// Callers that come during a failing attach need not each try by themselves.
    async fn state(&self) -> Result<MutexGuard<'_, State>, ClientError> {
        in_time(self.client.0.patience, async { Ok(self.state.lock().await) }).await
    }
}
