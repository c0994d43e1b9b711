//! A rank's load: chunks arrive in slots, and are copied into the pages as they arrive. Each chunk ends with its
//! outcome.

use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use futures::FutureExt;
use tokio::sync::mpsc;

use super::worker::{Worker, WorkerError};
use crate::arena::{AttachedArena, AttachedSlot};
use crate::engine::client::{ApiSession, ClientError};
use crate::engine::copy::cuda::StreamMark;
use crate::engine::copy::{CopyError, CopyJob, Pending, Spans};
use crate::format::ChunkHash;
use crate::protocol::Order;
use crate::protocol::{LoadLine, LoadRequest, SlotName};

/// Copies under way while the load waits for the next chunk.
const COPIES: usize = 4;
/// Chunks that are released together while more are copied: few calls, and the node's window is freed soon.
const RELEASES: usize = 4;

/// Chunks of a prompt, in its order, to load into their pages.
pub struct LoadJob<'a> {
    /// The same on all ranks of an engine, and never used twice.
    pub id: &'a str,
    pub wanted: &'a [WantedChunk],
    pub order: Order,
    pub deadline_ms: Option<u64>,
    /// The pages are written after the work that the engine's stream was given until here.
    pub after: Option<StreamMark>,
}

/// A chunk to load, and the places of its tokens.
#[derive(Debug, Clone)]
pub struct WantedChunk {
    pub hash: ChunkHash,
    pub spans: Spans,
}

/// A chunk that was not loaded into its pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// Index in `wanted`.
    pub index: usize,
    pub reason: String,
}

/// The planes of a load that are in the pages, for an engine that computes layer by layer.
pub struct LoadProgress {
    /// For each plane, the number of chunks that still miss it.
    left: Mutex<Vec<usize>>,
    changed: Condvar,
}

/// A copy under way: loaded planes of a chunk.
struct Copying {
    index: usize,
    name: SlotName,
    planes: Range<usize>,
    pending: Pending<AttachedSlot>,
}

/// The state of a chunk of a load.
#[derive(Clone, Default)]
struct Chunk {
    /// Number of planes in the pages.
    planes: usize,
    /// The first reason for its failure.
    failed: Option<String>,
}

/// Chunks of which not all planes were copied, each with the first known reason, or else `early`.
fn failed(missing: Vec<Option<String>>, chunks: Vec<Chunk>, planes: usize, early: &str) -> Vec<Failed> {
    let why = |(missing, chunk): (Option<String>, Chunk)| {
        let whole = chunk.planes == planes;
        missing
            .or(chunk.failed)
            .or_else(|| (!whole).then(|| early.to_owned()))
    };
    let reasons = missing.into_iter().zip(chunks).map(why).enumerate();
    reasons
        .filter_map(|(index, reason)| reason.map(|reason| Failed { index, reason }))
        .collect()
}

impl Worker {
    /// Returns the chunks that were not loaded. After the first miss none is loaded.
    pub async fn load(
        &self,
        load: LoadJob<'_>,
        progress: &Arc<LoadProgress>,
    ) -> Result<Vec<Failed>, WorkerError> {
        // However the load ends, no thread waits for more of it.
        let _ends = Ends(Arc::clone(progress));
        let request = LoadRequest {
            session: String::new(),
            load_id: load.id.to_owned(),
            space: self.space.id().to_string(),
            hashes: load.wanted.iter().map(|chunk| chunk.hash).collect(),
            order: load.order,
            continue_after_miss: false,
            deadline_ms: load.deadline_ms,
            declines: false,
        };
        let session = self.session_to_load(&request).await?;
        let mut lines = session.load(request).await?;
        let (copying, copied) = mpsc::channel(COPIES);
        let (releases, to_release) = mpsc::unbounded_channel();
        let copies = Copies {
            session: Arc::clone(&session),
            progress: Arc::clone(progress),
            chunks: vec![Chunk::default(); load.wanted.len()],
            planes: self.space.layout().planes(),
            releases,
            kept: false,
        };
        let copied = tokio::spawn(copies.run(copied));
        let released = tokio::spawn(release(Arc::clone(&session), load.id.to_owned(), to_release));
        let mut missing = vec![None; load.wanted.len()];
        let mut closed = self.closed.subscribe();
        let broke = loop {
            let line = if let Some(line) = lines.next().now_or_never() {
                line
            } else {
                // The node may wait for the slots of finished copies.
                let _ = copying.send(Step::Pause).await;
                tokio::select! {
                    line = lines.next() => line,
                    _ = closed.wait_for(|&closed| closed) => break Some(WorkerError::Closed),
                }
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
                            // The channel closes only when this end is dropped.
                            let copy = Copying {
                                index: i,
                                name,
                                planes,
                                pending,
                            };
                            let _ = copying.send(Step::Copy(copy)).await;
                        }
                        Err(error) => {
                            missing[i] = Some(error.to_string());
                            let kept = matches!(
                                error,
                                WorkerError::Copy(CopyError::Kept(_)) | WorkerError::Task(_)
                            );
                            let _ = copying.send(Step::Failed { kept }).await;
                        }
                    }
                }
                Ok(Some(_)) => {}
                Ok(None) => break None,
                Err(error) => break Some(error.into()),
            }
        };
        drop(copying);
        let Copied {
            chunks,
            all_planes: planes,
            kept,
            left,
        } = copied.await?;
        let all_released = released.await?;
        // A load that broke off ends with its stream. A session that is over has no slots left.
        drop(lines);
        let rest = broke.is_some() || left || !all_released;
        if rest && !kept {
            let _ = session.release(load.id, None).await;
        }
        let early = match broke {
            None => "the load ended before it".to_owned(),
            Some(error) => format!("the load broke off: {error}"),
        };
        Ok(failed(missing, chunks, planes, &early))
    }

    /// Gives the copy of a chunk's planes to the device; on a CPU the copy is done when this returns.
    async fn begin(
        &self,
        session: &Arc<ApiSession>,
        offset: usize,
        planes: Range<usize>,
        load: &LoadJob<'_>,
        index: usize,
    ) -> Result<Pending<AttachedSlot>, WorkerError> {
        let layout = self.space.layout();
        if planes.is_empty() || planes.end > layout.planes() {
            return Err(ClientError::Answer(format!("planes {planes:?} of {}", layout.planes())).into());
        }
        let at = layout.plane(planes.start).start;
        let len = layout.plane(planes.end - 1).end - at;
        let slot = session.arena.slot(offset, len)?.kept_by(Arc::clone(session));
        let job = CopyJob {
            planes,
            spans: load.wanted[index].spans.clone(),
            at,
        };
        let (copier, after) = (Arc::clone(&self.load), load.after.clone());
        let begun = tokio::task::spawn_blocking(move || copier.load(slot, &job, after.as_ref())).await?;
        Ok(begun?)
    }
}

/// Messages to the task that waits for a load's copies.
enum Step {
    Copy(Copying),
    /// A copy that could not be begun.
    Failed {
        kept: bool,
    },
    /// No further chunk is here for now.
    Pause,
}

/// Waits for copies in the order of their beginning, and has their slots released: some at a time, all when the
/// load waits for the node.
struct Copies {
    session: Arc<ApiSession>,
    progress: Arc<LoadProgress>,
    chunks: Vec<Chunk>,
    /// Planes of each chunk.
    planes: usize,
    releases: mpsc::UnboundedSender<Vec<SlotName>>,
    kept: bool,
}

/// The outcome of a load's copies.
struct Copied {
    chunks: Vec<Chunk>,
    /// Planes of a chunk.
    all_planes: usize,
    /// The device may still read some slots: they are not released while this process lives.
    kept: bool,
    /// Some slots are still to be released.
    left: bool,
}

impl Copies {
    async fn run(mut self, mut steps: mpsc::Receiver<Step>) -> Copied {
        let (mut done, mut left) = (Vec::new(), false);
        while let Some(step) = steps.recv().await {
            let copying = match step {
                Step::Copy(copying) => copying,
                Step::Failed { kept } => {
                    self.kept |= kept;
                    left = true;
                    continue;
                }
                Step::Pause => {
                    self.release(&mut done);
                    continue;
                }
            };
            let (index, name) = (copying.index, copying.name);
            self.copied(copying).await;
            let chunk = &self.chunks[index];
            // The slot of a failed copy is released with the load.
            if chunk.planes == self.planes {
                done.push(name);
            }
            left |= chunk.failed.is_some();
            if done.len() >= RELEASES {
                self.release(&mut done);
            }
        }
        self.release(&mut done);
        Copied {
            left: left
                || self
                    .chunks
                    .iter()
                    .any(|chunk| (1..self.planes).contains(&chunk.planes)),
            chunks: self.chunks,
            all_planes: self.planes,
            kept: self.kept,
        }
    }

    async fn copied(&mut self, copying: Copying) {
        let Copying {
            index,
            name,
            planes,
            pending,
        } = copying;
        let done = tokio::task::spawn_blocking(move || pending.wait().map(drop)).await;
        self.kept |= matches!(&done, Ok(Err(CopyError::Kept(_))) | Err(_));
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
    }

    fn release(&self, done: &mut Vec<SlotName>) {
        if !done.is_empty() {
            // The channel closes only when this end is dropped.
            let _ = self.releases.send(std::mem::take(done));
        }
    }
}

/// Releases slots while copies go on: each call has all slots since the last one. True if all calls were answered.
async fn release(
    session: Arc<ApiSession>,
    load_id: String,
    mut done: mpsc::UnboundedReceiver<Vec<SlotName>>,
) -> bool {
    let mut all = true;
    while let Some(mut slots) = done.recv().await {
        while let Ok(more) = done.try_recv() {
            slots.extend(more);
        }
        if let Err(error) = session.release(&load_id, Some(slots)).await {
            tracing::debug!(%error, load_id, "slots could not be released");
            all = false;
        }
    }
    all
}

/// Whether the slot still had the meant generation when the copy ended.
fn is_still(arena: &AttachedArena, name: SlotName) -> Result<(), String> {
    match arena.generation(name.slot) {
        Ok(generation) if generation == name.generation => Ok(()),
        Ok(_) => Err("its slot was another chunk's when the copy ended".into()),
        Err(error) => Err(error.to_string()),
    }
}

impl LoadProgress {
    pub fn new(planes: usize, chunks: usize) -> Self {
        Self {
            left: Mutex::new(vec![chunks; planes]),
            changed: Condvar::new(),
        }
    }

    /// Blocks until this plane of all chunks is in the pages, or the load has ended without it.
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

struct Ends(Arc<LoadProgress>);

impl Drop for Ends {
    fn drop(&mut self) {
        self.0.lock().fill(0);
        self.0.changed.notify_all();
    }
}
