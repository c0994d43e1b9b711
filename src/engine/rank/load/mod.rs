//! A rank's load: chunks arrive in slots, and are copied into the pages as they arrive. Each chunk ends with its
//! outcome. Each kind of KV is a call of its own, and all run at the same time.

mod copies;
mod one_kind;
mod progress;

use std::sync::Arc;

use futures::future::join_all;

pub use self::progress::LoadProgress;
use super::worker::{Worker, WorkerError, pin};
use crate::engine::client::ApiSession;
use crate::engine::copy::{Mark, Spans};
use crate::format::ChunkHash;
use crate::protocol::{LoadRequest, Order};

/// Chunks of a prompt to load into their pages.
pub struct LoadJob<'a> {
    /// The same on all ranks of an engine, and never used twice.
    pub id: &'a str,
    /// Each kind at most once.
    pub kinds: &'a [WantedKind],
    pub order: Order,
    pub deadline_ms: Option<u64>,
    /// The pages are written after the work that the engine's stream was given until here.
    pub after: Option<Mark>,
}

/// Chunks of one kind, in the order of the prompt.
#[derive(Debug, Clone)]
pub struct WantedKind {
    /// Index in the worker's kinds.
    pub kind: usize,
    pub chunks: Vec<WantedChunk>,
}

/// A chunk to load, and the places of its tokens in each of the kind's groups.
#[derive(Debug, Clone)]
pub struct WantedChunk {
    pub hash: ChunkHash,
    pub spans: Vec<Spans>,
}

/// A chunk that was not loaded into its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// Index in the worker's kinds.
    pub kind: usize,
    /// Index in the kind's chunks.
    pub index: usize,
    pub reason: String,
}

impl Worker {
    /// Returns the chunks that were not loaded. After the first miss of a kind no more of that kind are loaded; the
    /// other kinds are.
    pub async fn load(
        &self,
        load: LoadJob<'_>,
        progress: &Arc<LoadProgress>,
    ) -> Result<Vec<Failed>, WorkerError> {
        // However the load ends, no thread waits for more of it.
        let _ends = progress.ends_with_this();
        let session = self.session_to_load(&load).await?;
        let loads = load.kinds.iter().map(|wanted| async {
            let _ends = progress.ends_kind_with_this(wanted.kind);
            let loaded = self.load_kind(&session, &load, wanted, progress).await;
            loaded.unwrap_or_else(|error| {
                let failed = |index| Failed {
                    kind: wanted.kind,
                    index,
                    reason: error.to_string(),
                };
                (0..wanted.chunks.len()).map(failed).collect()
            })
        });
        Ok(join_all(loads).await.concat())
    }

    /// The session for a load that fits the worker, with its arena pinned in the copiers.
    async fn session_to_load(&self, load: &LoadJob<'_>) -> Result<Arc<ApiSession>, WorkerError> {
        let session = self.attached().await?;
        let Err(error) = self.get_ready(&session, load).await else {
            return Ok(session);
        };
        self.decline_kinds(&session, load).await;
        Err(error)
    }

    /// Leaves a load that this rank can't begin, so that the other ranks need not wait for it.
    pub async fn decline_load(&self, load: LoadJob<'_>, progress: &Arc<LoadProgress>) {
        let _ends = progress.ends_with_this();
        match self.attached().await {
            Ok(session) => self.decline_kinds(&session, &load).await,
            // Without a session it takes no part anyway.
            Err(error) => tracing::debug!(%error, load_id = load.id, "a load could not be declined"),
        }
    }

    async fn decline_kinds(&self, session: &ApiSession, load: &LoadJob<'_>) {
        let known = load.kinds.iter().filter(|wanted| wanted.kind < self.kinds.len());
        join_all(known.map(|wanted| self.decline(session, load, wanted))).await;
    }

    async fn get_ready(&self, session: &Arc<ApiSession>, load: &LoadJob<'_>) -> Result<(), WorkerError> {
        for wanted in load.kinds {
            let tables = wanted.chunks.iter().map(|chunk| chunk.spans.len());
            self.check_tables(wanted.kind, tables)?;
        }
        let pinned = self.pinned(session)?;
        let kinds = load.kinds.iter().map(|wanted| &self.kinds[wanted.kind]);
        pin(kinds.flat_map(|kind| kind.groups.clone()).collect(), pinned).await
    }

    /// Says that this rank takes no part, so that the other ranks need not wait for it.
    async fn decline(&self, session: &ApiSession, load: &LoadJob<'_>, wanted: &WantedKind) {
        let declines = LoadRequest {
            declines: true,
            ..self.request(load, wanted)
        };
        let load_id = declines.load_id.clone();
        if let Err(error) = session.load(declines).await {
            tracing::debug!(%error, load_id, "a load could not be declined");
        }
    }

    fn request(&self, load: &LoadJob<'_>, wanted: &WantedKind) -> LoadRequest {
        LoadRequest {
            session: String::new(),
            // A load is of one space, and its name is no other load's.
            load_id: format!("{}/{}", load.id, wanted.kind),
            space: self.kinds[wanted.kind].space.id().to_string(),
            hashes: wanted.chunks.iter().map(|chunk| chunk.hash).collect(),
            order: load.order,
            continue_after_miss: false,
            deadline_ms: load.deadline_ms,
            declines: false,
        }
    }
}
