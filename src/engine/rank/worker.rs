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

/// One rank of an engine: loads chunks from the node into its pages ([`load`](Self::load)), and stores them back
/// ([`store`](Self::store)).
pub struct Worker {
    engine: Engine,
    declared: OnceCell<SpaceInfo>,
    pub(super) space: Space,
    /// Copies the whole share of this rank.
    pub(super) load: Arc<Copier>,
    /// Copies the share that this rank owns; made when the node has said which.
    store: OnceLock<(Vec<Share>, Arc<Copier>)>,
    narrow: Narrow,
    pinning: Pinning,
    pub(super) closed: watch::Sender<bool>,
    /// For stores only: a load comes after an answered lookup.
    pub(super) breaker: LookupBreaker,
}

/// Makes a copier of the share that a rank owns.
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
    /// A worker that attaches when needed. `load` has all that the rank has of `space`; `narrow` makes a copier of
    /// its own share.
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

    /// The work that the engine's stream was given so far, for loads and stores that come after it. None: a CPU.
    pub fn mark(&self, engine: EngineStream) -> Result<Option<StreamMark>, CopyError> {
        self.load.mark(engine)
    }

    /// Whether there is a session with the node now; None: an attach is under way.
    pub fn is_attached(&self) -> Option<bool> {
        self.engine.is_attached()
    }

    /// Ends all loads: chunks that are not loaded yet never are.
    pub fn close(&self) {
        self.closed.send_replace(true);
    }

    /// The session with the node, and the registration for its copies. Attaches, and makes the space known, when
    /// needed.
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

    /// The session for a load, with its arena pinned in the copier.
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
        // Declines, so that the other ranks need not wait for this one.
        let declines = LoadRequest {
            declines: true,
            ..request.clone()
        };
        if let Err(error) = session.load(declines).await {
            tracing::debug!(%error, load_id = request.load_id, "a load could not be declined");
        }
        Err(error)
    }

    /// A copier of this rank's own share, kept: the node names the same share for as long as the ranks are the
    /// same.
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

/// Makes copies use this memory from now on; that may have to wait for those under way.
pub(super) async fn pin(copier: Arc<Copier>, pinned: Registered) -> Result<(), WorkerError> {
    let Some(pinned) = pinned else {
        return Ok(());
    };
    Ok(tokio::task::spawn_blocking(move || copier.pin(&pinned)).await??)
}
