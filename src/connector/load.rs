use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use tokio::sync::mpsc;

use super::worker::{Worker, WorkerError, pin};
use crate::api::wire::{LoadLine, LoadRequest, SlotName};
use crate::arena::{AttachedArena, AttachedSlot};
use crate::chunk::ChunkHash;
use crate::client::{ClientError, Session};
use crate::copy::cuda::Mark;
use crate::copy::{Job, Pending, Spans};
use crate::gateway::Order;

/// Copies that are on their way while the next chunk is waited for.
const COPIES: usize = 4;

/// Chunks of a prompt, in its order, to bring into their pages.
pub struct Load<'a> {
    /// The same on all ranks of an engine, and never used twice.
    pub id: &'a str,
    pub wanted: &'a [Wanted],
    pub order: Order,
    pub deadline_ms: Option<u64>,
    /// What the engine's stream was given until here comes before the pages are written.
    pub after: Option<Mark>,
}

/// A chunk to load, and where its tokens go.
#[derive(Debug, Clone)]
pub struct Wanted {
    pub hash: ChunkHash,
    pub spans: Spans,
}

/// A chunk that is not in its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// In what was wanted.
    pub index: usize,
    pub reason: String,
}

/// Which planes of a load are in the pages, for an engine that computes layer by layer.
pub struct Progress {
    /// For each plane, chunks of which it is not.
    left: Mutex<Vec<usize>>,
    changed: Condvar,
}

/// A copy of planes of a chunk that were loaded.
struct Copying {
    index: usize,
    name: SlotName,
    planes: Range<usize>,
    pending: Pending<AttachedSlot>,
}

/// What is known of a chunk of a load.
#[derive(Clone, Default)]
struct Chunk {
    /// Planes that are in the pages.
    planes: usize,
    /// The first reason why it is not there.
    failed: Option<String>,
}

impl Worker {
    /// Answers which chunks are not there. After the first that misses none is loaded.
    pub async fn load(&self, load: Load<'_>, progress: &Arc<Progress>) -> Result<Vec<Failed>, WorkerError> {
        // However it ends, nobody waits for more.
        let _ends = Ends(Arc::clone(progress));
        let (session, pinned) = self.session().await?;
        pin(Arc::clone(&self.load), pinned).await?;
        let request = LoadRequest {
            session: String::new(),
            load_id: load.id.to_owned(),
            space: self.space.id().to_string(),
            hashes: load.wanted.iter().map(|chunk| chunk.hash).collect(),
            order: load.order,
            continue_after_miss: false,
            deadline_ms: load.deadline_ms,
        };
        let mut lines = session.load(request).await?;
        let (copying, copied) = mpsc::channel(COPIES);
        let releaser = Releaser {
            session: Arc::clone(&session),
            load_id: load.id.to_owned(),
            progress: Arc::clone(progress),
            chunks: vec![Chunk::default(); load.wanted.len()],
            planes: self.space.layout().planes(),
        };
        let released = tokio::spawn(releaser.run(copied));
        let mut missing = vec![None; load.wanted.len()];
        let mut closed = self.closed.subscribe();
        let broke = loop {
            let line = tokio::select! {
                line = lines.next() => line,
                _ = closed.wait_for(|&closed| closed) => break Some(WorkerError::Closed),
            };
            match line {
                Ok(Some(LoadLine::Missing { i, miss, detail })) if i < missing.len() => {
                    missing[i] = Some(format!("{miss}: {detail}"));
                }
                Ok(Some(LoadLine::Here {
                    i,
                    slot,
                    generation,
                    offset,
                    planes,
                    ..
                })) if i < missing.len() => {
                    let planes = planes.0..planes.1;
                    match self.begin(&session, offset, planes.clone(), &load, i).await {
                        Ok(pending) => {
                            let name = SlotName { slot, generation };
                            // It ends only when this end is dropped.
                            let _ = copying
                                .send(Copying {
                                    index: i,
                                    name,
                                    planes,
                                    pending,
                                })
                                .await;
                        }
                        Err(error) => missing[i] = Some(error.to_string()),
                    }
                }
                Ok(Some(_)) => {}
                Ok(None) => break None,
                Err(error) => break Some(error.into()),
            }
        };
        drop(copying);
        let (chunks, planes) = released.await?;
        // Whatever was not released one by one. A session that is over has nothing left.
        let _ = session.release(load.id, None).await;
        let early = match broke {
            None => "the load ended before it".to_owned(),
            Some(error) => format!("the load broke off: {error}"),
        };
        let why = |(missing, chunk): (Option<String>, Chunk)| {
            let whole = chunk.planes == planes;
            missing.or(chunk.failed).or((!whole).then(|| early.clone()))
        };
        let reasons = missing.into_iter().zip(chunks).map(why).enumerate();
        Ok(reasons
            .filter_map(|(index, reason)| reason.map(|reason| Failed { index, reason }))
            .collect())
    }

    /// Gives the copy of a chunk's planes to the device; a CPU has made it when this returns.
    async fn begin(
        &self,
        session: &Arc<Session>,
        offset: usize,
        planes: Range<usize>,
        load: &Load<'_>,
        index: usize,
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
            spans: load.wanted[index].spans.clone(),
            at,
        };
        let (copier, after) = (Arc::clone(&self.load), load.after.clone());
        let begun = tokio::task::spawn_blocking(move || copier.load(slot, &job, after.as_ref())).await?;
        Ok(begun?)
    }
}

/// Waits for copies in the order in which they were begun, and gives their slots back.
struct Releaser {
    session: Arc<Session>,
    load_id: String,
    progress: Arc<Progress>,
    chunks: Vec<Chunk>,
    /// Of each chunk.
    planes: usize,
}

impl Releaser {
    /// What became of each chunk, and how many planes one has.
    async fn run(mut self, mut copied: mpsc::Receiver<Copying>) -> (Vec<Chunk>, usize) {
        while let Some(copying) = copied.recv().await {
            let Copying {
                index,
                name,
                planes,
                pending,
            } = copying;
            let done = tokio::task::spawn_blocking(move || pending.wait().map(drop)).await;
            let done = match done {
                Ok(Ok(())) => is_still(&self.session.arena, name),
                Ok(Err(error)) => Err(error.to_string()),
                Err(error) => Err(error.to_string()),
            };
            let chunk = &mut self.chunks[index];
            match done {
                Ok(()) => {
                    chunk.planes += planes.len();
                    self.progress.copied(planes);
                }
                Err(reason) => chunk.failed = chunk.failed.take().or(Some(reason)),
            }
            // One that failed goes with the load.
            if chunk.planes == self.planes
                && let Err(error) = self.session.release(&self.load_id, Some(vec![name])).await
            {
                tracing::debug!(%error, load_id = self.load_id, "a slot could not be released; its session's end will");
            }
        }
        (self.chunks, self.planes)
    }
}

/// Whether what was copied was the slot that was meant, all the time.
fn is_still(arena: &AttachedArena, name: SlotName) -> Result<(), String> {
    match arena.generation(name.slot) {
        Ok(generation) if generation == name.generation => Ok(()),
        Ok(_) => Err("its slot was another chunk's when the copy ended".into()),
        Err(error) => Err(error.to_string()),
    }
}

impl Progress {
    pub fn new(planes: usize, chunks: usize) -> Self {
        Self {
            left: Mutex::new(vec![chunks; planes]),
            changed: Condvar::new(),
        }
    }

    /// Blocks until this plane of all chunks is in the pages, or the load has ended without.
    pub fn wait(&self, plane: usize) {
        let mut left = self.lock();
        while left.get(plane).is_some_and(|&left| left > 0) {
            left = self.changed.wait(left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn copied(&self, planes: Range<usize>) {
        for left in self.lock().get_mut(planes).into_iter().flatten() {
            *left = left.saturating_sub(1);
        }
        self.changed.notify_all();
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<usize>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Ends(Arc<Progress>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.lock().fill(0);
        self.0.changed.notify_all();
    }
}
