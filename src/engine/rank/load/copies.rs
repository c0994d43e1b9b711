//! The copies of a load that are under way, and the release of their slots.

use std::ops::Range;
use std::sync::Arc;

use tokio::sync::mpsc;

use super::progress::LoadProgress;
use crate::arena::{AttachedArena, AttachedSlot};
use crate::engine::client::ApiSession;
use crate::engine::copy::{CopyError, Pending, wait_for_all};
use crate::protocol::SlotName;

/// Chunks that are released together while more are copied: few calls, and the node's window is freed soon.
const RELEASES: usize = 4;

/// A copy under way: loaded planes of a chunk.
pub(super) struct Copying {
    /// Of the chunk, in the kind's.
    pub index: usize,
    pub name: SlotName,
    pub planes: Range<usize>,
    /// One for each group that has some of the planes.
    pub pending: Vec<Pending<AttachedSlot>>,
}

/// The state of a chunk of a load.
#[derive(Clone, Default)]
pub(super) struct Chunk {
    /// Number of planes in the pages.
    pub planes: usize,
    /// The first reason for its failure.
    pub failed: Option<String>,
}

/// Messages to the task that waits for a load's copies.
pub(super) enum Step {
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
pub(super) struct Copies {
    pub session: Arc<ApiSession>,
    pub kind: usize,
    pub progress: Arc<LoadProgress>,
    pub chunks: Vec<Chunk>,
    /// Planes of each chunk.
    pub planes: usize,
    pub releases: mpsc::UnboundedSender<Vec<SlotName>>,
    pub kept: bool,
}

/// The outcome of a load's copies.
pub(super) struct Copied {
    pub chunks: Vec<Chunk>,
    /// Planes of a chunk.
    pub all_planes: usize,
    /// The device may still read some slots: they are not released while this process lives.
    pub kept: bool,
    /// Some slots are still to be released.
    pub left: bool,
}

impl Copies {
    pub async fn run(mut self, mut steps: mpsc::Receiver<Step>) -> Copied {
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
        let done = tokio::task::spawn_blocking(move || wait_for_all(pending)).await;
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
                self.progress.copied(self.kind, planes);
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
pub(super) async fn release(
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
