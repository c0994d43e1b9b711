//! One rank of an engine: its session, its copiers, and the loads and stores that go through them.

use std::sync::Arc;

use tokio::sync::{OnceCell, watch};
use tokio::task::JoinError;

use super::breaker::LookupBreaker;
use super::kind::{KindPages, MakeCopier, RankKind};
use super::pinning::{Pinning, Registered};
use crate::arena::AttachedError;
use crate::engine::client::{ApiSession, Client, ClientError, Engine};
use crate::engine::copy::{Copier, CopyError, EngineStream, Mark, PagedCache};
use crate::protocol::AttachRequest;

/// One rank of an engine: loads chunks from the node into its pages ([`load`](Self::load)), and stores them back
/// ([`store`](Self::store)).
pub struct Worker {
    engine: Arc<Engine>,
    declared: OnceCell<()>,
    pub(super) kinds: Vec<RankKind>,
    /// Makes the copiers of all kinds and groups.
    pub(super) make: MakeCopier,
    pinning: Pinning,
    pub(super) closed: watch::Sender<bool>,
    /// For stores only: a load comes after an answered lookup.
    pub(super) breaker: LookupBreaker,
}

#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Arena(#[from] AttachedError),
    #[error("the arena is still being pinned for the GPU")]
    Pinning,
    #[error("nothing is stored for a while: the gateway did not answer in time")]
    Paused,
    #[error("the engine took its pages back before the gateway had room for them")]
    GivenUp,
    #[error("there is no kind {kind} of KV: this rank has {kinds}")]
    Kind { kind: usize, kinds: usize },
    #[error("kind {kind} has {groups} groups of layers, and a chunk has places in {tables}")]
    Tables {
        kind: usize,
        groups: usize,
        tables: usize,
    },
    #[error("the engine closes")]
    Closed,
    #[error("a copy ended early: {0}")]
    Task(#[from] JoinError),
}

impl Worker {
    /// A worker that attaches when needed. `make` makes a copier of a group's memory, or of the share of it that the
    /// rank owns.
    pub fn new(
        client: &Client,
        attach: AttachRequest,
        kinds: Vec<KindPages>,
        make: impl Fn(PagedCache) -> Result<Copier, CopyError> + Send + Sync + 'static,
        breaker: LookupBreaker,
    ) -> Result<Self, CopyError> {
        Self::on(Arc::new(client.engine(attach)), kinds, make, breaker)
    }

    /// A worker of a process whose other workers have the same session.
    pub fn on(
        engine: Arc<Engine>,
        kinds: Vec<KindPages>,
        make: impl Fn(PagedCache) -> Result<Copier, CopyError> + Send + Sync + 'static,
        breaker: LookupBreaker,
    ) -> Result<Self, CopyError> {
        let make: MakeCopier = Box::new(make);
        let kinds = kinds.into_iter().map(|pages| RankKind::new(pages, &make));
        Ok(Self {
            engine,
            declared: OnceCell::new(),
            kinds: kinds.collect::<Result<_, _>>()?,
            make,
            pinning: Pinning::default(),
            closed: watch::Sender::new(false),
            breaker,
        })
    }

    /// The work that the engine's stream was given so far, for loads and stores that come after it. None: a CPU.
    pub fn mark(&self, engine: Option<EngineStream>) -> Result<Option<Mark>, CopyError> {
        match self.any_copier() {
            Some(copier) => copier.mark(engine),
            None => Ok(None),
        }
    }

    /// Whether the engine can go on without this kind.
    pub fn is_draft(&self, kind: usize) -> bool {
        self.kinds.get(kind).is_some_and(|kind| kind.is_draft)
    }

    /// Whether there is a session with the node now; None: an attach is under way.
    pub fn is_attached(&self) -> Option<bool> {
        self.engine.is_attached()
    }

    /// Ends all loads: chunks that are not loaded yet never are.
    pub fn close(&self) {
        self.closed.send_replace(true);
    }

    /// The session with the node, and the registration for its copies. Attaches, and makes the spaces known, when
    /// needed.
    pub async fn session(&self) -> Result<(Arc<ApiSession>, Registered), WorkerError> {
        let session = self.attached().await?;
        let pinned = self.pinned(&session)?;
        Ok((session, pinned))
    }

    pub(super) async fn attached(&self) -> Result<Arc<ApiSession>, WorkerError> {
        let declare = async || {
            for kind in &self.kinds {
                match self.engine.declare(&kind.space).await {
                    // The model's own kinds go on without it.
                    Err(ClientError::Refused(problem)) if kind.is_draft => {
                        tracing::warn!(problem = problem.detail, "a draft's KV is not kept");
                    }
                    declared => drop(declared?),
                }
            }
            Ok::<(), ClientError>(())
        };
        self.declared.get_or_try_init(declare).await?;
        Ok(self.engine.session().await?)
    }

    /// The registration of the session's arena; an error until it is done.
    pub(super) fn pinned(&self, session: &Arc<ApiSession>) -> Result<Registered, WorkerError> {
        self.pinning.of(session, self.any_copier())
    }

    /// Any copier: all are of one device.
    fn any_copier(&self) -> Option<&Arc<Copier>> {
        self.kinds.iter().find_map(|kind| kind.groups.first())
    }

    /// Checks that each chunk of a kind has places in all of the kind's groups.
    pub(super) fn check_tables(
        &self,
        kind: usize,
        mut tables: impl Iterator<Item = usize>,
    ) -> Result<(), WorkerError> {
        let kinds = self.kinds.len();
        let of = self.kinds.get(kind).ok_or(WorkerError::Kind { kind, kinds })?;
        let groups = of.groups.len();
        match tables.find(|&tables| tables != groups) {
            Some(tables) => Err(WorkerError::Tables { kind, groups, tables }),
            None => Ok(()),
        }
    }
}

/// Makes copies use this memory from now on; that may have to wait for those under way.
pub(super) async fn pin(copiers: Vec<Arc<Copier>>, pinned: Registered) -> Result<(), WorkerError> {
    let Some(pinned) = pinned else {
        return Ok(());
    };
    let pin = move || copiers.iter().try_for_each(|copier| copier.pin(&pinned));
    Ok(tokio::task::spawn_blocking(pin).await??)
}
