//! A session with the daemon: the calls of the slot protocol, and the arena that both map.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use hyper::Method;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::connection::ApiConnection;
use super::load::{LoadLines, StreamedLines};
use super::{Client, ClientError, JSON, in_time, to_body};
use crate::arena::{AttachedArena, AttachedError, BootId};
use crate::protocol::{
    AttachRequest, Attached, CommitAnswer, CommitRequest, LoadRequest, ReleaseAnswer, ReleaseRequest,
    ReserveAnswer, ReserveChunk, ReserveRequest, SlotName,
};

/// This process's session with the node, and the arena that both share. Over when it is dropped.
pub struct ApiSession {
    client: Client,
    pub name: String,
    pub arena: Arc<AttachedArena>,
    over: Arc<watch::Sender<bool>>,
    stream: JoinHandle<()>,
}

impl Client {
    /// Attaches this process, and maps the arena.
    pub async fn attach(&self, request: &AttachRequest) -> Result<ApiSession, ClientError> {
        let (mut lines, attached) = in_time(self.0.patience, async {
            let mut lines = self.lines("/v1/attach", request).await?;
            let attached: Option<Attached> = lines.next().await?;
            Ok((lines, attached))
        })
        .await?;
        let attached = attached.ok_or_else(|| ClientError::Answer("the attach ended at once".into()))?;
        let (path, boot_id) = (&attached.arena.path, &attached.arena.boot_id);
        let boot_id = BootId::from_hex(boot_id)
            .ok_or_else(|| ClientError::Answer(format!("{boot_id:?} is not a boot id")))?;
        let path = path
            .as_deref()
            .ok_or_else(|| ClientError::Answer("the arena has no file".into()))?;
        let arena = AttachedArena::map(Path::new(path), boot_id).map_err(|error| match error {
            AttachedError::Version { .. } => ClientError::OtherVersion {
                daemon: attached.version.clone(),
                arena: error,
            },
            error => error.into(),
        })?;
        let arena = Arc::new(arena);
        let over: Arc<watch::Sender<bool>> = Arc::default();
        let ends = Arc::clone(&over);
        let stream = tokio::spawn(async move {
            // Events such as revocations: the calls report them too.
            while let Ok(Some(event)) = lines.next::<serde_json::Value>().await {
                tracing::debug!(%event, "told by the node");
            }
            ends.send_replace(true);
        });
        Ok(ApiSession {
            client: self.clone(),
            name: attached.session,
            arena,
            over,
            stream,
        })
    }

    async fn lines(&self, path: &str, request: &impl serde::Serialize) -> Result<StreamedLines, ClientError> {
        let request = self.request(&Method::POST, path, &JSON, to_body(request)?, &JSON)?;
        let call = async |connection: &mut ApiConnection, request| connection.stream(request).await;
        let (connection, answer) = self.connected(request, call).await?;
        StreamedLines::new(connection, answer).await
    }
}

impl ApiSession {
    /// True when the node is gone or has ended the session: attach again, as [`Engine`](super::Engine) does.
    pub fn is_over(&self) -> bool {
        *self.over.borrow()
    }

    /// Until the session is over.
    pub fn ended(&self) -> impl Future<Output = ()> + Send + use<> {
        let mut over = self.over.subscribe();
        async move {
            // An error: the session was dropped.
            let _ = over.wait_for(|over| *over).await;
        }
    }

    /// Loads chunks into slots. The request's session is filled in. Without a deadline the node's own holds.
    pub async fn load(&self, request: LoadRequest) -> Result<LoadLines, ClientError> {
        let request = LoadRequest {
            session: self.name.clone(),
            ..request
        };
        let patience = self.client.0.patience;
        let given = request.deadline_ms.map(Duration::from_millis);
        let until = given.and_then(|given| Instant::now().checked_add(given.saturating_add(patience)));
        let lines = in_time(patience, self.client.lines("/v1/load", &request)).await;
        Ok(LoadLines {
            lines: Some(self.noted(lines)?),
            client: self.client.clone(),
            until,
            over: Arc::clone(&self.over),
        })
    }

    /// Gives back slots of a load; None: all its slots.
    pub async fn release(&self, load_id: &str, slots: Option<Vec<SlotName>>) -> Result<usize, ClientError> {
        let request = ReleaseRequest {
            session: self.name.clone(),
            load_id: load_id.to_owned(),
            slots,
        };
        let answer: ReleaseAnswer = self.noted(self.client.post("/v1/release", &request).await)?;
        Ok(answer.released)
    }

    pub async fn reserve(
        &self,
        space: &str,
        chunks: Vec<ReserveChunk>,
    ) -> Result<ReserveAnswer, ClientError> {
        let request = ReserveRequest {
            session: self.name.clone(),
            space: space.to_owned(),
            chunks,
        };
        self.noted(self.client.post("/v1/store/reserve", &request).await)
    }

    pub async fn commit(&self, slots: Vec<SlotName>) -> Result<CommitAnswer, ClientError> {
        self.slots("/v1/store/commit", slots).await
    }

    pub async fn abort(&self, slots: Vec<SlotName>) -> Result<CommitAnswer, ClientError> {
        self.slots("/v1/store/abort", slots).await
    }

    async fn slots(&self, path: &str, slots: Vec<SlotName>) -> Result<CommitAnswer, ClientError> {
        let request = CommitRequest {
            session: self.name.clone(),
            slots,
        };
        self.noted(self.client.post(path, &request).await)
    }

    /// Notes an ended session: a call may learn of the end before the stream does. A call without an answer may
    /// have got slots that this process does not know: they end with the session.
    fn noted<T>(&self, answer: Result<T, ClientError>) -> Result<T, ClientError> {
        let is_over = match &answer {
            Err(ClientError::Refused(problem)) => problem.code == "no_session",
            Err(ClientError::Late(_)) => true,
            _ => false,
        };
        if is_over {
            self.over.send_replace(true);
        }
        answer
    }
}

impl Drop for ApiSession {
    fn drop(&mut self) {
        self.stream.abort();
    }
}
