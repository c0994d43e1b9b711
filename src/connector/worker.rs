use std::ops::Range;
use std::sync::{Arc, OnceLock};

use tokio::sync::mpsc;
use tokio::task::JoinError;

use super::pinning::{Pinning, Registered};
use crate::api::wire::{
    AttachRequest, CommitOutcome, LoadLine, LoadRequest, ReserveChunk, ReservedChunk, SlotName,
};
use crate::arena::{AttachedArena, AttachedError, AttachedSlot};
use crate::chunk::{ChunkHash, Space};
use crate::client::{Client, ClientError, Engine, Session};
use crate::copy::{Copier, CopyError, EngineStream, Job, Pending, Spans};
use crate::gateway::Order;
use crate::node::Share;

/// Copies that are on their way while the next chunk is waited for.
const COPIES: usize = 4;

/// One rank of an engine: chunks from the node into its pages, and back.
pub struct Worker {
    client: Client,
    engine: Engine,
    space: Space,
    /// Of everything that this rank has.
    load: Arc<Copier>,
    /// Of what it owns; made when the node has said what that is.
    store: OnceLock<(Vec<Share>, Arc<Copier>)>,
    narrow: Narrow,
    pinning: Pinning,
}

/// Makes a copier of what a rank owns.
type Narrow = Box<dyn Fn(&[Share]) -> Result<Copier, CopyError> + Send + Sync>;

/// A chunk to load, and where its tokens go.
#[derive(Debug, Clone)]
pub struct Wanted {
    pub hash: ChunkHash,
    pub spans: Spans,
}

/// A chunk that was computed, and where it is.
#[derive(Debug, Clone)]
pub struct NewChunk {
    pub hash: ChunkHash,
    /// The chunk before, or the root.
    pub parent: ChunkHash,
    pub spans: Spans,
}

/// A chunk that is not in its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// In what was wanted.
    pub index: usize,
    pub reason: String,
}

/// What became of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stored {
    /// Handed over by this rank.
    pub stored: usize,
    /// There already, or another rank's or engine's to hand over.
    pub skipped: usize,
    /// For which the node had no room.
    pub refused: usize,
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
    #[error("a copy ended early: {0}")]
    Task(#[from] JoinError),
}

/// A copy of a chunk that was loaded.
struct Copying {
    index: usize,
    name: SlotName,
    pending: Pending<AttachedSlot>,
}

impl Worker {
    /// Attaches when it has to. `load` has all that the rank has of `space`; `narrow` makes a copier of what it owns.
    pub fn new(
        client: &Client,
        attach: AttachRequest,
        space: Space,
        load: Copier,
        narrow: impl Fn(&[Share]) -> Result<Copier, CopyError> + Send + Sync + 'static,
    ) -> Self {
        Self {
            client: client.clone(),
            engine: client.engine(attach),
            space,
            load: Arc::new(load),
            store: OnceLock::new(),
            narrow: Box::new(narrow),
            pinning: Pinning::default(),
        }
    }

    /// Makes the space known and attaches.
    pub async fn start(&self) -> Result<(), WorkerError> {
        self.engine.declare(&self.space).await?;
        self.session().await.map(drop)
    }

    /// Brings chunks, of a prompt and in its order, into their pages; answers which are not there. After the first that
    /// misses none is loaded.
    pub async fn load(
        &self,
        load_id: &str,
        wanted: &[Wanted],
        deadline_ms: Option<u64>,
        engine: Option<EngineStream>,
    ) -> Result<Vec<Failed>, WorkerError> {
        let (session, pinned) = self.session().await?;
        pin(Arc::clone(&self.load), pinned).await?;
        let request = LoadRequest {
            session: String::new(),
            load_id: load_id.to_owned(),
            space: self.space.id().to_string(),
            hashes: wanted.iter().map(|chunk| chunk.hash).collect(),
            order: Order::Chunk,
            continue_after_miss: false,
            deadline_ms,
        };
        let mut lines = session.load(request).await?;
        let (copying, copied) = mpsc::channel(COPIES);
        let released = tokio::spawn(release(Arc::clone(&session), load_id.to_owned(), copied));
        let mut failed: Vec<Option<String>> = vec![Some("the load ended before it".to_owned()); wanted.len()];
        let mut broke = None;
        loop {
            match lines.next().await {
                Ok(Some(LoadLine::Missing { i, miss, detail })) if i < failed.len() => {
                    failed[i] = Some(format!("{miss}: {detail}"));
                }
                Ok(Some(LoadLine::Here {
                    i,
                    slot,
                    generation,
                    offset,
                    planes,
                    ..
                })) if i < wanted.len() => {
                    let name = SlotName { slot, generation };
                    let planes = planes.0..planes.1;
                    match self
                        .begin(&session, offset, planes, &wanted[i].spans, engine)
                        .await
                    {
                        Ok(pending) => {
                            failed[i] = None;
                            let copy = Copying {
                                index: i,
                                name,
                                pending,
                            };
                            // It ends only when this end is dropped.
                            let _ = copying.send(copy).await;
                        }
                        Err(error) => failed[i] = Some(error.to_string()),
                    }
                }
                Ok(Some(_)) => {}
                Ok(None) => break,
                Err(error) => {
                    broke = Some(error);
                    break;
                }
            }
        }
        drop(copying);
        for (index, reason) in released.await? {
            failed[index] = Some(reason);
        }
        // Whatever was not released one by one. A session that is over has nothing left.
        let _ = session.release(load_id, None).await;
        if let Some(error) = broke {
            tracing::warn!(%error, load_id, "a load broke off");
        }
        let failed = failed.into_iter().enumerate();
        Ok(failed
            .filter_map(|(index, reason)| {
                Some(Failed {
                    index,
                    reason: reason?,
                })
            })
            .collect())
    }

    /// Hands over chunks, of a prompt and in its order, out of their pages.
    pub async fn store(
        &self,
        chunks: &[NewChunk],
        engine: Option<EngineStream>,
    ) -> Result<Stored, WorkerError> {
        let (session, pinned) = self.session().await?;
        let reserve = chunks.iter().map(|chunk| ReserveChunk {
            hash: chunk.hash,
            parent: chunk.parent,
            tokens: None,
        });
        let space = self.space.id().to_string();
        let reserved = session.reserve(&space, reserve.collect()).await?;
        let mut stored = Stored::default();
        let mut named = Vec::new();
        for (chunk, reserved) in chunks.iter().zip(reserved.chunks) {
            match reserved {
                ReservedChunk::Slot {
                    slot,
                    generation,
                    offset,
                } => named.push((chunk, SlotName { slot, generation }, offset)),
                ReservedChunk::Skip { skip } if skip == "full" => stored.refused += 1,
                ReservedChunk::Skip { .. } => stored.skipped += 1,
            }
        }
        let gathered = self.gather(&session, pinned, &reserved.own, &named, engine).await;
        let names = |range: Range<usize>| named[range].iter().map(|&(_, name, _)| name).collect::<Vec<_>>();
        let (good, error) = gathered;
        if good < named.len() {
            session.abort(names(good..named.len())).await?;
        }
        let committed = session.commit(names(0..good)).await?;
        let is_ok = |outcome: &&CommitOutcome| matches!(outcome, CommitOutcome::Ok { .. });
        stored.stored = committed.slots.iter().filter(is_ok).count();
        match error {
            Some(error) => Err(error),
            None => Ok(stored),
        }
    }

    pub fn copier(&self) -> &Copier {
        &self.load
    }

    pub fn client(&self) -> &Client {
        &self.client
    }

    /// With what copies by it are pinned to.
    async fn session(&self) -> Result<(Arc<Session>, Registered), WorkerError> {
        let session = self.engine.session().await?;
        let pinned = self.pinning.of(&session, &self.load)?;
        Ok((session, pinned))
    }

    /// Gives the copy of a chunk's planes to the device; a CPU has made it when this returns.
    async fn begin(
        &self,
        session: &Arc<Session>,
        offset: usize,
        planes: Range<usize>,
        spans: &Spans,
        engine: Option<EngineStream>,
    ) -> Result<Pending<AttachedSlot>, WorkerError> {
        let layout = self.space.layout();
        if planes.is_empty() || planes.end > layout.planes() {
            return Err(ClientError::Answer(format!("planes {planes:?} of {}", layout.planes())).into());
        }
        let at = layout.plane(planes.start).start;
        let len = layout.plane(planes.end - 1).end - at;
        let slot = session.arena.slot(offset, len)?.kept_by(Arc::clone(session));
        let job = Job {
            planes,
            spans: spans.clone(),
            at,
        };
        let copier = Arc::clone(&self.load);
        let begun = tokio::task::spawn_blocking(move || copier.load(slot, &job, engine)).await?;
        Ok(begun?)
    }

    /// Copies what is owned of each chunk into its slot. How many are there, and why not more.
    async fn gather(
        &self,
        session: &Arc<Session>,
        pinned: Registered,
        own: &[Share],
        named: &[(&NewChunk, SlotName, usize)],
        engine: Option<EngineStream>,
    ) -> (usize, Option<WorkerError>) {
        let copier = match self.store_copier(own) {
            Ok(copier) => copier,
            Err(error) => return (0, Some(error.into())),
        };
        if let Err(error) = pin(Arc::clone(&copier), pinned).await {
            return (0, Some(error));
        }
        let layout = self.space.layout();
        let mut jobs = Vec::with_capacity(named.len());
        for &(chunk, _, offset) in named {
            let job = Job {
                planes: 0..layout.planes(),
                spans: chunk.spans.clone(),
                at: layout.header_len(),
            };
            match session.arena.slot(offset, layout.payload_len()) {
                Ok(slot) => jobs.push((slot.kept_by(Arc::clone(session)), job)),
                Err(error) => return (0, Some(error.into())),
            }
        }
        let copied = tokio::task::spawn_blocking(move || {
            let begin = |(slot, job): (AttachedSlot, Job)| copier.store(slot, &job, engine);
            let pending: Vec<Result<Pending<AttachedSlot>, CopyError>> =
                jobs.into_iter().map(begin).collect();
            let mut good = 0;
            for copy in pending {
                match copy.and_then(Pending::wait) {
                    Ok(_) => good += 1,
                    Err(error) => return (good, Some(error.into())),
                }
            }
            (good, None)
        });
        copied.await.unwrap_or_else(|error| (0, Some(error.into())))
    }

    /// The node says the same each time, for as long as the ranks are the same.
    fn store_copier(&self, own: &[Share]) -> Result<Arc<Copier>, CopyError> {
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
async fn pin(copier: Arc<Copier>, pinned: Registered) -> Result<(), WorkerError> {
    let Some(pinned) = pinned else {
        return Ok(());
    };
    Ok(tokio::task::spawn_blocking(move || copier.pin(&pinned)).await??)
}

/// Waits for copies in the order in which they were begun, and gives their slots back. Which failed.
async fn release(
    session: Arc<Session>,
    load_id: String,
    mut copied: mpsc::Receiver<Copying>,
) -> Vec<(usize, String)> {
    let mut failed = Vec::new();
    while let Some(Copying { index, name, pending }) = copied.recv().await {
        let done = tokio::task::spawn_blocking(move || pending.wait().map(drop)).await;
        let reason = match done {
            Ok(Ok(())) => is_still(&session.arena, name).err(),
            Ok(Err(error)) => Some(error.to_string()),
            Err(error) => Some(error.to_string()),
        };
        failed.extend(reason.map(|reason| (index, reason)));
        if let Err(error) = session.release(&load_id, Some(vec![name])).await {
            tracing::debug!(%error, load_id, "a slot could not be released; its session's end will");
        }
    }
    failed
}

/// Whether what was copied was the slot that was meant, all the time.
fn is_still(arena: &AttachedArena, name: SlotName) -> Result<(), String> {
    match arena.generation(name.slot) {
        Ok(generation) if generation == name.generation => Ok(()),
        Ok(_) => Err("its slot was another chunk's when the copy ended".into()),
        Err(error) => Err(error.to_string()),
    }
}
