//! An engine process that is attached. Its session ends with the process, which a pidfd watches.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::rand::GetRandomFlags;
use serde::Serialize;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

use super::NodeError;
use super::ledger::{Rank, SessionId};
use super::owners::{Has, Shares, Uncovered, shares};
use super::peer_process::{PeerProcess, Process};
use crate::cache::gateway::Credit;
use crate::format::{Space, SpaceKey};

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
    /// For each space that it stores to, the shares of all ranks of its engine.
    shares: Mutex<HashMap<SpaceKey, OfRanks>>,
    called: Mutex<Instant>,
    pub(super) events: mpsc::Sender<SessionEvent>,
    ended: watch::Sender<bool>,
}

/// The shares of ranks, and what the ranks have.
struct OfRanks {
    has: BTreeMap<Rank, Has>,
    shares: Arc<Shares>,
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
            shares: Mutex::default(),
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

    /// The shares of a space's chunks that these ranks own: worked out once, for as long as the ranks are the same.
    pub(super) fn shares(&self, space: &Space, has: BTreeMap<Rank, Has>) -> Result<Arc<Shares>, Uncovered> {
        let mut of_spaces = self.shares.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(known) = of_spaces.get(&space.key()).filter(|known| known.has == has) {
            return Ok(Arc::clone(&known.shares));
        }
        let shares = Arc::new(shares(space, &has)?);
        let known = OfRanks {
            has,
            shares: Arc::clone(&shares),
        };
        of_spaces.insert(space.key(), known);
        Ok(shares)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::TokenShare;

    #[test]
    fn shares_are_worked_out_once_for_each_space_and_set_of_ranks() {
        let attach = Attach {
            instance: "engine".into(),
            rank: 0,
            world_size: 2,
            has: Has::default(),
            process: Process { pid: None, uid: 0 },
        };
        let (session, _events) = Session::new(1, attach, Credit::new(1)).unwrap();
        let space = |heads| {
            Space::from_json(&format!(
                r#"{{"model": "m", "revision": "1", "mha": {{"layers": 2, "heads": {heads}, "head_dim": 8}}}}"#
            ))
            .unwrap()
        };
        let ranks = |size| -> BTreeMap<Rank, Has> {
            let has = |rank| Has {
                tp: Some((rank, size)),
                layers: None,
                tokens: TokenShare::ALL,
            };
            (0..size).map(|rank| (rank, has(rank))).collect()
        };
        let (two, four) = (space(2), space(4));
        let first = session.shares(&two, ranks(2)).unwrap();
        let other = session.shares(&four, ranks(2)).unwrap();
        assert_ne!(first, other);
        assert!(Arc::ptr_eq(&first, &session.shares(&two, ranks(2)).unwrap()));
        assert!(Arc::ptr_eq(&other, &session.shares(&four, ranks(2)).unwrap()));
        let alone = session.shares(&two, ranks(1)).unwrap();
        assert_eq!(alone.len(), 1, "of the ranks that there are now");
    }
}
