//! A GPU node: a [`Gateway`] with its tiers, and the engine processes that are attached to it.
//!
//! Engines share the arena, so no engine may ever harm another: the [`ledger`] keeps which slot belongs to which
//! session, [`owners`] says which bytes of a chunk a rank writes, and a load that several ranks take part in is one
//! load (`shared_load`). A session ends when its process is gone; until then nothing takes its slots away.
//!
//! Not here: HTTP (see `api`), and the content of chunks.

pub mod api;
pub mod daemon;
mod error;
mod gc_stats;
pub mod ledger;
mod load;
pub mod owners;
mod peer_process;
mod session;
mod shared_load;
mod status;
mod store;
mod trouble;
mod unwritten;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dashmap::DashMap;
use tokio::sync::{Semaphore, mpsc};
use tokio::time::Instant;

pub use error::NodeError;
pub use gc_stats::GcStats;
pub use ledger::{AttachError, SlotError};
pub use load::{EngineLoad, Lent, LoadCall};
pub use owners::Has;
pub use session::{Attach, Session, SessionEvent};
pub use status::Status;
pub use store::{Reservations, ReserveOutcome, ToStore};
pub use trouble::Trouble;

pub use peer_process::Process;

use self::ledger::{Ledger, SessionId, SlotId};
use self::peer_process::PeerProcess;
use self::shared_load::SharedLoad;
use self::store::Filled;
use crate::arena::SLOT_ALIGN;
use crate::cache::episode::Episode;
use crate::cache::gateway::{AfterMiss, Credit, Gateway, LoadSpec, LoadedChunk};
use crate::format::{ChunkHash, ChunkId, Space, SpaceKey};
use crate::protocol::{Flushed, Order};

/// This machine's, for people who look at several.
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Limits of a node.
#[derive(Debug, Clone, Copy)]
pub struct NodeOptions {
    pub sessions_max: usize,
    pub spaces_max: usize,
    /// Bytes of slots that one load may hold.
    pub load_window_bytes: usize,
    /// Bytes of slots that one engine may hold, in all of its loads and stores.
    pub engine_bytes: usize,
    /// Time for a rank to join a load that another rank began.
    pub join_grace: Duration,
    /// Time since an engine's latest call, after which no load waits for what the engine holds.
    pub stalled: Duration,
    /// Time for all ranks to commit a chunk, after which it is not stored.
    pub commit_timeout: Duration,
    /// Time that a session outlives its stream, while its process is there.
    pub grace: Duration,
    /// Maximum time that a lookup or pin keeps chunks in memory.
    pub pin_max: Duration,
    /// Limit of prefetches at a time.
    pub prefetches: usize,
    /// Whether the node may be ready before S3 has answered.
    pub may_start_without_s3: bool,
    /// Interval at which a repeated warning is logged, at most.
    pub log_repeat: Duration,
}

/// See the [module](self). Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct Node(Arc<Inner>);

struct Inner {
    gateway: Gateway,
    options: NodeOptions,
    started: Instant,
    spaces: DashMap<SpaceKey, Declared>,
    ledger: Mutex<Ledger<ChunkId, Filled, LoadedChunk>>,
    sessions: DashMap<String, Arc<Session>>,
    by_id: DashMap<SessionId, Arc<Session>>,
    ids: AtomicU64,
    shared_loads: DashMap<(String, String), Arc<SharedLoad>>,
    prefetches: Arc<Semaphore>,
    prefetches_waiting: Arc<Semaphore>,
    running: DashMap<(SessionId, String), Arc<AtomicBool>>,
    draining: AtomicBool,
    s3_answered: AtomicBool,
    /// Why the last reload was refused.
    reload_refused: Mutex<Option<String>>,
    gc: GcStats,
    /// Warning: chunks that were not committed in time.
    late: Episode,
    /// Warning: commits of slots that were not written.
    unwritten: Episode,
}

/// A space, and the time of its last use.
struct Declared {
    space: Space,
    used: AtomicU64,
}

/// Limit of prefetches that are under way or wait.
const PREFETCHES_WAITING: usize = 64;
/// Interval of the checks of processes and fillings.
const TICK: Duration = Duration::from_millis(100);

impl Node {
    /// Needs a tokio runtime.
    pub fn new(gateway: Gateway, options: NodeOptions) -> Self {
        let node = Self(Arc::new(Inner {
            gateway,
            options,
            started: Instant::now(),
            spaces: DashMap::new(),
            ledger: Mutex::default(),
            sessions: DashMap::new(),
            by_id: DashMap::new(),
            ids: AtomicU64::new(1),
            shared_loads: DashMap::new(),
            prefetches: Arc::new(Semaphore::new(options.prefetches.max(1))),
            prefetches_waiting: Arc::new(Semaphore::new(PREFETCHES_WAITING)),
            running: DashMap::new(),
            draining: AtomicBool::new(false),
            gc: GcStats::default(),
            s3_answered: AtomicBool::new(false),
            reload_refused: Mutex::default(),
            late: Episode::new(
                "chunks were not committed by all ranks within [store] commit_timeout, and are not stored",
                options.log_repeat,
            ),
            unwritten: Episode::new(
                "a commit of a slot that was not written was refused",
                options.log_repeat,
            ),
        }));
        let inner = Arc::downgrade(&node.0);
        node.gateway()
            .arena()
            .on_stuck(move || inner.upgrade().is_some_and(|inner| Node(inner).is_stuck()));
        let weak = Arc::downgrade(&node.0);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(TICK).await;
                let Some(inner) = weak.upgrade() else { return };
                let node = Node(inner);
                node.end_gone();
                node.spoil_late();
                // Pins end by time, without a notification.
                node.0.gateway.arena().nudge();
            }
        });
        node
    }

    pub fn gateway(&self) -> &Gateway {
        &self.0.gateway
    }

    pub fn options(&self) -> &NodeOptions {
        &self.0.options
    }

    /// Makes a space known. Idempotent. Where there are too many, the least recently used one is forgotten, of
    /// those that no attached engine uses.
    pub fn declare(&self, space: Space) -> Result<Space, NodeError> {
        self.0.gateway.keyring().check(&space)?;
        self.0.gateway.knows(&space);
        if let Ok(known) = self.declared(space.key()) {
            return Ok(known);
        }
        let most = self.0.options.spaces_max;
        if self.0.spaces.len() >= most && !self.forget_space() {
            let (what, key) = ("spaces in use", "spaces");
            return Err(NodeError::TooMany { what, key, most });
        }
        let declared = Declared {
            space: space.clone(),
            used: AtomicU64::new(self.0.ids.fetch_add(1, Ordering::Relaxed)),
        };
        self.0.spaces.insert(space.key(), declared);
        Ok(space)
    }

    /// Loads under way, and chunks still to be sent, have the space by themselves.
    fn forget_space(&self) -> bool {
        let mut used = HashSet::new();
        for session in &self.0.sessions {
            used.extend(session.spaces());
        }
        let spaces = self.0.spaces.iter();
        let may_go = spaces.filter(|declared| !used.contains(declared.key()));
        let oldest = may_go.min_by_key(|declared| declared.used.load(Ordering::Relaxed));
        let Some(oldest) = oldest.map(|declared| *declared.key()) else {
            return false;
        };
        self.0.spaces.remove(&oldest).is_some()
    }

    /// All spaces that are declared and may be served.
    pub fn spaces(&self) -> Vec<Space> {
        let declared = self.0.spaces.iter().map(|declared| declared.space.clone());
        declared
            .filter(|space| self.0.gateway.keyring().check(space).is_ok())
            .collect()
    }

    /// The spaces that each attached engine has loaded from or stored to.
    pub fn engines(&self) -> BTreeMap<String, HashSet<SpaceKey>> {
        let mut engines = BTreeMap::<String, HashSet<SpaceKey>>::new();
        for session in &self.0.sessions {
            let used = engines.entry(session.instance.clone()).or_default();
            used.extend(session.spaces());
        }
        engines
    }

    /// A space that is declared and may be served: keys change by a reload.
    pub fn space(&self, key: SpaceKey) -> Result<Space, NodeError> {
        let space = self.declared(key)?;
        self.0.gateway.keyring().check(&space)?;
        Ok(space)
    }

    /// A space that is declared, also where a reload has taken its key away.
    pub fn declared(&self, key: SpaceKey) -> Result<Space, NodeError> {
        let declared = self.0.spaces.get(&key);
        let declared = declared.ok_or_else(|| NodeError::UnknownSpace(key.to_string()))?;
        let now = self.0.ids.fetch_add(1, Ordering::Relaxed);
        declared.used.store(now, Ordering::Relaxed);
        Ok(declared.space.clone())
    }

    /// Attaches a process, until it is gone. Also returns the events that it will be told.
    pub fn attach(&self, attach: Attach) -> Result<(Arc<Session>, mpsc::Receiver<SessionEvent>), NodeError> {
        self.takes_work()?;
        if attach.rank >= attach.world_size {
            return Err(NodeError::Rank(format!(
                "rank {} of {} can't be: ranks count from 0",
                attach.rank, attach.world_size
            )));
        }
        let most = self.0.options.sessions_max;
        if attach.world_size as usize > most {
            return Err(NodeError::Rank(format!(
                "{} ranks can't all attach: {most} sessions may ([api] sessions)",
                attach.world_size
            )));
        }
        if self.0.sessions.len() >= most {
            let (what, key) = ("sessions", "sessions");
            return Err(NodeError::TooMany { what, key, most });
        }
        let id = self.0.ids.fetch_add(1, Ordering::Relaxed);
        let credit = self.credit_of(&attach.instance);
        let (session, events) = Session::new(id, attach, credit)?;
        self.0.by_id.insert(id, Arc::clone(&session));
        if let Err(error) = self.join_ranks(&session) {
            self.0.by_id.remove(&id);
            return Err(error);
        }
        self.0.sessions.insert(session.name.clone(), Arc::clone(&session));
        tracing::info!(
            instance = session.instance,
            rank = session.rank,
            pid = session.process.pid,
            "attached"
        );
        if !session.is_seen() {
            tracing::warn!(
                instance = session.instance,
                "its process can't be watched (another PID namespace?): its slots are free [api] grace after its stream \
                 closes, whether it still copies or not. Run kvgate in the engines' PID namespace (hostPID)"
            );
        }
        Ok((session, events))
    }

    /// Notes a rank of an engine. All of its ranks cut heads and deal tokens in the same way.
    fn join_ranks(&self, session: &Session) -> Result<(), NodeError> {
        let Session {
            id,
            instance,
            rank,
            world_size,
            has,
            ..
        } = session;
        let mut ledger = self.ledger();
        ledger.attach(*id, instance, *rank, *world_size)?;
        let others = ledger.ranks(*id).into_values();
        let cuts = |has: &Has| (has.tp_size(), has.dealt());
        let mut others = others.filter_map(|id| Some(cuts(&self.0.by_id.get(&id)?.has)));
        let own = cuts(has);
        let Some(there) = others.find(|there| *there != own) else {
            return Ok(());
        };
        ledger.end(*id);
        let told = |(heads, (size, interleave))| {
            format!("heads for {heads} ranks, and tokens for {size} in runs of {interleave}")
        };
        Err(NodeError::Rank(format!(
            "rank {rank} of {instance:?} cuts {}; its other ranks cut {}: give all ranks of an engine the same size in `tp`, and the same size and interleave in `tokens`",
            told(own),
            told(there)
        )))
    }

    /// The credit of an engine, one for all of its ranks: they hold the same slots.
    fn credit_of(&self, instance: &str) -> Credit {
        let sessions = self.0.sessions.iter();
        let of = sessions
            .filter(|session| session.instance == instance)
            .map(|session| session.credit.clone());
        of.last()
            .unwrap_or_else(|| Credit::new(self.0.options.engine_bytes))
    }

    /// Whether engines that hang hold all taken slots of the arena: no slot comes free by waiting.
    fn is_stuck(&self) -> bool {
        let hangs = |session: SessionId| {
            let session = self.0.by_id.get(&session);
            session.is_some_and(|session| session.silence() > self.0.options.stalled)
        };
        let bytes = |space: &Space| space.layout().object_len().next_multiple_of(SLOT_ALIGN);
        let ledger = self.ledger();
        let fillings = ledger.fillings_of(hangs);
        let fillings = fillings.map(|(slot, filled)| (slot, bytes(filled.reserved.slot.space())));
        let leases = ledger.leases_of(hangs);
        let leases = leases.map(|(slot, chunk)| (slot, bytes(chunk.space())));
        let held: HashMap<SlotId, usize> = fillings.chain(leases).collect();
        let held = held.values().sum::<usize>();
        held > 0 && self.0.gateway.arena().stats().used_bytes <= held
    }

    /// Ends a session whose stream is closed, after `[api] grace`, in which it may end its work. A process that
    /// hangs does not close its stream.
    pub fn stream_closed(&self, session: &Arc<Session>) {
        let (node, session) = (self.clone(), Arc::clone(session));
        tokio::spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(node.0.options.grace) => node.end(&session, "its stream is closed"),
                () = session.over() => {}
            }
        });
    }

    fn end_gone(&self) {
        let sessions = self.0.sessions.iter();
        let gone = sessions.filter(|session| session.peer.as_ref().is_some_and(PeerProcess::is_gone));
        let gone: Vec<Arc<Session>> = gone.map(|session| Arc::clone(&session)).collect();
        for session in gone {
            self.end(&session, "its process is gone");
        }
    }

    fn end(&self, session: &Session, why: &str) {
        if self.0.sessions.remove(&session.name).is_none() {
            return;
        }
        session.end();
        self.leave_loads(session);
        let leases = self.ledger().end(session.id);
        self.0.by_id.remove(&session.id);
        tracing::info!(
            instance = session.instance,
            rank = session.rank,
            leases = leases.len(),
            "detached: {why}"
        );
    }

    pub fn session(&self, name: &str) -> Result<Arc<Session>, NodeError> {
        let session = self.0.sessions.get(name).map(|session| Arc::clone(&session));
        let session = session.ok_or_else(|| NodeError::NoSession(name.chars().take(64).collect()))?;
        session.called();
        Ok(session)
    }

    /// Brings chunks up to memory, in the background, as far as there is room.
    pub fn prefetch(&self, space: Space, chunks: Vec<ChunkHash>, deadline: Instant) {
        // A prefetch is a hint: it is dropped where too many wait already.
        let Ok(waiting) = Arc::clone(&self.0.prefetches_waiting).try_acquire_owned() else {
            return;
        };
        let node = self.clone();
        tokio::spawn(async move {
            let _waiting = waiting;
            let permits = Arc::clone(&node.0.prefetches);
            let Ok(Ok(_permit)) = tokio::time::timeout_at(deadline, permits.acquire()).await else {
                return;
            };
            let request = LoadSpec {
                space,
                chunks,
                order: Order::Chunk,
                after_miss: AfterMiss::Stop,
                deadline,
            };
            let credit = Credit::new(node.0.options.load_window_bytes);
            let mut load = node.0.gateway.load_on_credit(request, credit);
            while load.next().await.is_some() {}
        });
    }

    pub async fn flush(&self, deadline: Instant) -> Flushed {
        self.0.gateway.flush(deadline).await
    }

    /// Notes that S3 answered: objects can be read.
    pub fn s3_answered(&self) {
        self.0.s3_answered.store(true, Ordering::Relaxed);
    }

    /// Notes how the last reload of settings went.
    pub fn reloaded(&self, refused: Option<String>) {
        *self
            .0
            .reload_refused
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = refused;
    }

    /// Why the last reload was refused; None: it was not.
    pub fn reload_refused(&self) -> Option<String> {
        let refused = self.0.reload_refused.lock();
        refused.unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What this node does for `[gc]`.
    pub fn gc(&self) -> &GcStats {
        &self.0.gc
    }

    /// Refuses new work from here on; attached sessions are told.
    pub fn drain(&self) {
        self.0.draining.store(true, Ordering::Relaxed);
        self.0.gateway.events().wake();
        for session in &self.0.sessions {
            session.tell(SessionEvent::Draining);
        }
    }

    /// The reason why this node should get no traffic, if there is one.
    pub fn not_ready(&self) -> Option<&'static str> {
        let s3 = self.0.s3_answered.load(Ordering::Relaxed) || self.0.options.may_start_without_s3;
        match (self.0.draining.load(Ordering::Relaxed), s3) {
            (true, _) => Some("it is going down"),
            (false, false) => Some("S3 has not answered yet"),
            (false, true) => None,
        }
    }

    pub fn is_draining(&self) -> bool {
        self.0.draining.load(Ordering::Relaxed)
    }

    fn takes_work(&self) -> Result<(), NodeError> {
        match self.0.draining.load(Ordering::Relaxed) {
            true => Err(NodeError::Draining),
            false => Ok(()),
        }
    }

    /// No panic can leave the ledger half-changed, so a poisoned lock is still usable.
    fn ledger(&self) -> MutexGuard<'_, Ledger<ChunkId, Filled, LoadedChunk>> {
        self.0.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
