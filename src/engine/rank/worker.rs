//! One rank of an engine: its session, its copiers, and the loads and stores that go through them.

use std::sync::{Arc, OnceLock};

use tokio::sync::{OnceCell, watch};
use tokio::task::JoinError;

use super::breaker::LookupBreaker;
use super::pinning::{Pinning, Registered};
use crate::arena::AttachedError;
use crate::engine::client::{ApiSession, Client, ClientError, Engine};
use crate::engine::copy::cuda::StreamMark;
use crate::engine::copy::{Copier, CopyError, EngineStream};
use crate::format::Space;
use crate::protocol::Share;
use crate::protocol::{AttachRequest, LoadRequest, SpaceInfo};

/// One rank of an engine: chunks from the node into its pages ([`load`](Self::load)), and back ([`store`](Self::store)).
pub struct Worker {
    engine: Engine,
    declared: OnceCell<SpaceInfo>,
    pub(super) space: Space,
    /// Of everything that this rank has.
    pub(super) load: Arc<Copier>,
    /// Of what it owns; made when the node has said what that is.
    store: OnceLock<(Vec<Share>, Arc<Copier>)>,
    narrow: Narrow,
    pinning: Pinning,
    pub(super) closed: watch::Sender<bool>,
    /// Of stores: a load comes after a lookup that was answered.
    pub(super) breaker: LookupBreaker,
}

/// Makes a copier of what a rank owns.
type Narrow = Box<dyn Fn(&[Share]) -> Result<Copier, CopyError> + Send + Sync>;

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
    #[error("the engine closes")]
    Closed,
    #[error("a copy ended early: {0}")]
    Task(#[from] JoinError),
}

impl Worker {
    /// Attaches when it has to. `load` has all that the rank has of `space`; `narrow` makes a copier of what it owns.
    pub fn new(
        client: &Client,
        attach: AttachRequest,
        space: Space,
        load: Copier,
        narrow: impl Fn(&[Share]) -> Result<Copier, CopyError> + Send + Sync + 'static,
        breaker: LookupBreaker,
    ) -> Self {
        Self {
            engine: client.engine(attach),
            declared: OnceCell::new(),
            space,
            load: Arc::new(load),
            store: OnceLock::new(),
            narrow: Box::new(narrow),
            pinning: Pinning::default(),
            closed: watch::Sender::new(false),
            breaker,
        }
    }

    /// What the engine's stream was given so far, for loads and stores that come after it. None: a CPU.
    pub fn mark(&self, engine: EngineStream) -> Result<Option<StreamMark>, CopyError> {
        self.load.mark(engine)
    }

    /// Whether there is a session with the node now; None: one is being made.
    pub fn is_attached(&self) -> Option<bool> {
        self.engine.is_attached()
    }

    /// No load goes on: what is not loaded yet never is.
    pub fn close(&self) {
        self.closed.send_replace(true);
    }

    /// The session with the node, and what copies by it are pinned to. Attaches, and makes the space known, when it has to.
    pub async fn session(&self) -> Result<(Arc<ApiSession>, Registered), WorkerError> {
        let session = self.attached().await?;
        let pinned = self.pinning.of(&session, &self.load)?;
        Ok((session, pinned))
    }

    async fn attached(&self) -> Result<Arc<ApiSession>, WorkerError> {
        let declare = || self.engine.declare(&self.space);
        self.declared.get_or_try_init(declare).await?;
        Ok(self.engine.session().await?)
    }

    /// The session, for a load: what is loaded is in memory that the device knows.
    pub(super) async fn session_to_load(
        &self,
        request: &LoadRequest,
    ) -> Result<Arc<ApiSession>, WorkerError> {
        let session = self.attached().await?;
        let pinned = match self.pinning.of(&session, &self.load) {
            Ok(pinned) => pin(Arc::clone(&self.load), pinned).await,
            Err(error) => Err(error),
        };
        let Err(error) = pinned else {
            return Ok(session);
        };
        // The other ranks need not wait for this one.
        let declines = LoadRequest {
            declines: true,
            ..request.clone()
        };
        if let Err(error) = session.load(declines).await {
            tracing::debug!(%error, load_id = request.load_id, "a load could not be declined");
        }
        Err(error)
    }

    /// The node says the same each time, for as long as the ranks are the same.
    pub(super) fn store_copier(&self, own: &[Share]) -> Result<Arc<Copier>, CopyError> {
        if let Some((known, copier)) = self.store.get()
            && known == own
        {
            return Ok(Arc::clone(copier));
        }
        let copier = Arc::new((self.narrow)(own)?);
        let kept = self.store.get_or_init(|| (own.to_vec(), Arc::clone(&copier)));
        Ok(if kept.0 == own {
            Arc::clone(&kept.1)
        } else {
            copier
        })
    }
}

/// Copies are from and to this memory from now on; that may have to wait for those under way.
pub(super) async fn pin(copier: Arc<Copier>, pinned: Registered) -> Result<(), WorkerError> {
    let Some(pinned) = pinned else {
        return Ok(());
    };
    Ok(tokio::task::spawn_blocking(move || copier.pin(&pinned)).await??)
}
