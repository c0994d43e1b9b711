//! Loads of attached engines: slots are lent to sessions, with one load for all ranks of an engine.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::time::Instant;

use super::ledger::SessionId;
use super::shared_load::{Joined, Participant, SharedLoad};
use super::{Node, NodeError, Session};
use crate::cache::gateway::{AfterMiss, LoadSpec, LoadStream, LoadedChunk, Miss};
use crate::format::{ChunkHash, Space};
use crate::protocol::Order;
use crate::protocol::Tier;

/// The chunks that an engine wants to have in slots.
#[derive(Debug, Clone)]
pub struct LoadCall {
    /// The load's id: the same for all ranks of one request, and of no other load meanwhile.
    pub load_id: String,
    pub space: Space,
    /// In the order of the prompt.
    pub chunks: Vec<ChunkHash>,
    pub order: Order,
    pub after_miss: AfterMiss,
    pub deadline: Instant,
    /// Whether the rank takes no part: the others need not wait for it.
    pub declines: bool,
}

/// Planes of a chunk that the session may read from now on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lent {
    /// The slot's offset in the arena's file, and its generation: a release names both.
    pub slot: usize,
    pub generation: u64,
    /// The offset of the first plane in the arena's file.
    pub offset: usize,
    /// Half-open.
    pub planes: (usize, usize),
    pub bytes: usize,
    pub tier: Tier,
}

/// A load under way; dropping it gives up the chunks that have not come. A lent slot stays lent until its release.
pub struct EngineLoad {
    node: Node,
    session: Arc<Session>,
    load_id: String,
    running: Running,
    from: From,
}

/// The mark of a load that is under way, until this is dropped.
struct Running {
    node: Node,
    key: (SessionId, String),
    /// Whether the load was released as a whole: none of its slots is lent any more.
    over: Arc<AtomicBool>,
}

impl Drop for Running {
    fn drop(&mut self) {
        self.node.0.running.remove(&self.key);
    }
}

enum From {
    Alone(Box<LoadStream>),
    Shared(Participant),
    /// The other ranks went on without this one; the number of chunks, and the next one to report.
    Late {
        next: usize,
        chunks: usize,
    },
    Nothing,
}

impl Node {
    /// Starts a load, or joins the one that another rank of the same engine started under this id.
    pub fn load(&self, session: &Arc<Session>, call: LoadCall) -> Result<EngineLoad, NodeError> {
        self.takes_work()?;
        let load_id = call.load_id.clone();
        let running = self.run(session, &load_id)?;
        session.uses(call.space.key());
        let from = match (session.world_size, call.declines) {
            (1, true) => From::Nothing,
            (1, false) => From::Alone(Box::new(self.stream(session, call))),
            (_, true) => {
                // Declining still joins: the first rank that comes begins the load for all.
                self.join(session, &call)?;
                From::Nothing
            }
            (_, false) => match self.join(session, &call)? {
                Some(participant) => From::Shared(participant),
                None => From::Late {
                    next: 0,
                    chunks: call.chunks.len(),
                },
            },
        };
        Ok(EngineLoad {
            node: self.clone(),
            session: Arc::clone(session),
            load_id,
            running,
            from,
        })
    }

    /// Notes that a session's load is under way.
    fn run(&self, session: &Session, load_id: &str) -> Result<Running, NodeError> {
        let key = (session.id, load_id.to_owned());
        match self.0.running.entry(key.clone()) {
            dashmap::Entry::Occupied(_) => Err(NodeError::LoadTaken(load_id.to_owned())),
            dashmap::Entry::Vacant(entry) => {
                let over: Arc<AtomicBool> = Arc::default();
                entry.insert(Arc::clone(&over));
                let node = self.clone();
                Ok(Running { node, key, over })
            }
        }
    }

    fn stream(&self, session: &Session, call: LoadCall) -> LoadStream {
        let request = LoadSpec {
            space: call.space,
            chunks: call.chunks,
            order: call.order,
            after_miss: call.after_miss,
            deadline: call.deadline,
        };
        let credit = session.credit.part(self.0.options.load_window_bytes);
        self.0.gateway.load_on_credit(request, credit)
    }

    /// Joins the engine's load, or begins it. None if the rank comes too late.
    fn join(&self, session: &Session, call: &LoadCall) -> Result<Option<Participant>, NodeError> {
        let taken = || NodeError::LoadTaken(call.load_id.clone());
        let key = (session.instance.clone(), call.load_id.clone());
        let entry = self.0.shared_loads.entry(key.clone());
        let shared = match entry {
            dashmap::Entry::Occupied(entry) => {
                let shared = Arc::clone(entry.get());
                let is_same = shared.space == call.space.id()
                    && shared.chunks == call.chunks
                    && shared.order == call.order;
                if !is_same {
                    return Err(taken());
                }
                shared
            }
            dashmap::Entry::Vacant(entry) => {
                // A rank that is not attached now takes no part.
                let ranks = self.ledger().ranks(session.id).into_keys();
                let deadline = call.deadline;
                let stream = self.stream(session, call.clone());
                let shared = SharedLoad::new(call, stream.order(), ranks);
                entry.insert(Arc::clone(&shared));
                let (node, load) = (self.clone(), Arc::clone(&shared));
                tokio::spawn(async move {
                    // A rank that has joined keeps the others' chunks no longer than this.
                    let end = deadline + node.0.options.commit_timeout;
                    let late = async {
                        tokio::time::sleep(node.0.options.join_grace).await;
                        load.leave_out();
                        std::future::pending::<()>().await;
                    };
                    tokio::select! {
                        () = load.drive(stream) => {}
                        () = tokio::time::sleep_until(end) => {}
                        () = late => {}
                    }
                    load.ends();
                    node.forget_shared(&key, &load);
                });
                shared
            }
        };
        match shared.join(session.rank) {
            Joined::Part(participant) => Ok(Some(participant)),
            Joined::Late => Ok(None),
            Joined::Before => Err(taken()),
        }
    }

    fn forget_shared(&self, name: &(String, String), load: &Arc<SharedLoad>) {
        let is_it = |_: &_, other: &Arc<SharedLoad>| Arc::ptr_eq(other, load);
        self.0.shared_loads.remove_if(name, is_it);
    }

    /// Takes a session's rank out of all loads of its engine.
    pub(super) fn leave_loads(&self, session: &Session) {
        let of: Vec<Arc<SharedLoad>> = self
            .0
            .shared_loads
            .iter()
            .filter(|entry| entry.key().0 == session.instance)
            .map(|entry| Arc::clone(entry.value()))
            .collect();
        of.iter().for_each(|load| load.leave(session.rank));
    }

    fn lend(&self, session: &Session, load_id: &str, running: &Running, chunk: LoadedChunk) -> Option<Lent> {
        let payload = chunk.payload();
        let planes = chunk.planes();
        let lent = Lent {
            slot: payload.slot_offset(),
            generation: payload.generation(),
            offset: payload.offset(),
            planes: (planes.start, planes.end),
            bytes: payload.len(),
            tier: chunk.tier(),
        };
        let slot = (lent.slot, lent.generation);
        let mut ledger = self.ledger();
        if running.over.load(Ordering::Relaxed) {
            return None;
        }
        ledger.lend(session.id, load_id, slot, chunk).then_some(lent)
    }

    /// Ends a session's leases of these slots for this load. Returns how many it had.
    pub fn release(&self, session: &Session, load_id: &str, slots: &[(usize, u64)]) -> usize {
        let released: Vec<_> = {
            let mut ledger = self.ledger();
            let release = |slot: &(usize, u64)| ledger.release(session.id, load_id, *slot);
            slots.iter().map(release).filter(|of| !of.is_empty()).collect()
        };
        released.len()
    }

    /// Ends a session's leases of all slots of a load, and the load if it is still under way.
    pub fn release_load(&self, session: &Session, load_id: &str) -> usize {
        let name = (session.instance.clone(), load_id.to_owned());
        let shared = self.0.shared_loads.get(&name).map(|load| Arc::clone(&load));
        if let Some(shared) = shared
            && shared.cancel(session.rank)
        {
            // A rank that comes later begins the load anew.
            self.forget_shared(&name, &shared);
        }
        let key = (session.id, load_id.to_owned());
        let running = self.0.running.get(&key).map(|over| Arc::clone(&over));
        let mut ledger = self.ledger();
        if let Some(over) = running {
            over.store(true, Ordering::Relaxed);
        }
        let released = ledger.release_load(session.id, load_id);
        drop(ledger);
        released.len()
    }
}

impl EngineLoad {
    /// The order in which the load is done.
    pub fn order(&self) -> Order {
        match &self.from {
            From::Alone(stream) => stream.order(),
            From::Shared(participant) => participant.done_in(),
            From::Late { .. } | From::Nothing => Order::Chunk,
        }
    }

    /// The next outcome, with the chunk's position in the call; None after the last, and when the session is over.
    pub async fn next(&mut self) -> Option<(usize, Result<Lent, Miss>)> {
        let (index, outcome) = match &mut self.from {
            From::Alone(stream) => stream.next().await?,
            From::Shared(participant) => participant.next().await?,
            From::Late { next, chunks } if *next < *chunks => {
                *next += 1;
                (*next - 1, Err(Miss::JoinedLate))
            }
            From::Late { .. } | From::Nothing => return None,
        };
        match outcome {
            Ok(chunk) => {
                let lent = self
                    .node
                    .lend(&self.session, &self.load_id, &self.running, chunk)?;
                Some((index, Ok(lent)))
            }
            Err(miss) => Some((index, Err(miss))),
        }
    }
}
