//! An engine process that is attached. Its session ends with the process, which a pidfd watches.

use std::collections::HashSet;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::rand::GetRandomFlags;
use serde::Serialize;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::NodeError;
use super::ledger::{Rank, SessionId};
use super::owners::Has;
use super::peer_process::{PeerProcess, Process};
use crate::cache::gateway::Credit;
use crate::format::SpaceKey;

/// The description that an engine process gives of itself when it attaches.
#[derive(Debug, Clone)]
pub struct Attach {
    /// The engine's name: the same for all of its ranks, and no other engine's.
    pub instance: String,
    pub rank: Rank,
    pub world_size: u32,
    pub has: Has,
    pub process: Process,
}

/// An engine process that is attached.
pub struct Session {
    pub(super) id: SessionId,
    /// The name in its calls; nobody else can guess it.
    pub name: String,
    pub instance: String,
    pub rank: Rank,
    pub world_size: u32,
    pub(super) has: Has,
    pub process: Process,
    pub(super) peer: Option<PeerProcess>,
    /// The credit for slots, for all ranks of its engine together.
    pub(super) credit: Credit,
    /// The spaces that it loads from or stores to.
    spaces: Mutex<HashSet<SpaceKey>>,
    called: Mutex<Instant>,
    pub(super) events: mpsc::Sender<SessionEvent>,
    ended: watch::Sender<bool>,
}

/// An event on the stream of an attach.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum SessionEvent {
    /// A slot that the session fills will not be published any more: it took too long.
    Revoked { slot: usize, generation: u64 },
    /// This kvgate is going down: no new loads and stores.
    Draining,
}

/// Limit of events that wait for a client that does not read; later ones are lost, but the calls say the same.
const EVENTS_MAX: usize = 64;

impl Session {
    pub(super) fn new(
        id: SessionId,
        attach: Attach,
        credit: Credit,
    ) -> Result<(Arc<Self>, mpsc::Receiver<SessionEvent>), NodeError> {
        let (events, receiver) = mpsc::channel(EVENTS_MAX);
        let refused = |source: io::Error| NodeError::System(Arc::new(source));
        let session = Self {
            id,
            name: unguessable().map_err(refused)?,
            instance: attach.instance,
            rank: attach.rank,
            world_size: attach.world_size,
            has: attach.has,
            peer: PeerProcess::new(attach.process).map_err(refused)?,
            process: attach.process,
            credit,
            spaces: Mutex::default(),
            called: Mutex::new(Instant::now()),
            events,
            ended: watch::Sender::new(false),
        };
        Ok((Arc::new(session), receiver))
    }

    /// Whether its process is watched: then the session does not depend on its stream.
    pub fn is_seen(&self) -> bool {
        self.peer.is_some()
    }

    /// Notes a call.
    pub(super) fn called(&self) {
        *self.called.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
    }

    /// The time since its latest call.
    pub(super) fn silence(&self) -> Duration {
        self.called
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .elapsed()
    }

    pub(super) fn uses(&self, space: SpaceKey) {
        self.spaces
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(space);
    }

    pub(super) fn spaces(&self) -> Vec<SpaceKey> {
        let spaces = self.spaces.lock().unwrap_or_else(PoisonError::into_inner);
        spaces.iter().copied().collect()
    }

    pub(super) fn tell(&self, event: SessionEvent) {
        // A full stream is the client's own fault.
        let _ = self.events.try_send(event);
    }

    pub(super) fn end(&self) {
        self.ended.send_replace(true);
    }

    /// Waits until the session is over.
    pub async fn over(&self) {
        let mut ended = self.ended.subscribe();
        // No error: `self` holds the sender.
        let _ = ended.wait_for(|ended| *ended).await;
    }
}

/// 128 bits of the system's randomness, in hex.
fn unguessable() -> io::Result<String> {
    let mut bytes = [0; 16];
    let filled = rustix::rand::getrandom(&mut bytes, GetRandomFlags::empty())?;
    match filled == bytes.len() {
        true => Ok(format!("{:032x}", u128::from_le_bytes(bytes))),
        false => Err(io::Error::other("the system gave too few random bytes")),
    }
}
