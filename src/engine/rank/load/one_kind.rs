//! The load of one kind: reads the node's lines, begins a copy for each, and has the slots released.

use std::ops::Range;
use std::sync::Arc;

use futures::FutureExt;
use tokio::sync::mpsc;

use super::copies::{Chunk, Copied, Copies, Copying, Step, release};
use super::progress::LoadProgress;
use super::{Failed, LoadJob, WantedKind};
use crate::arena::AttachedSlot;
use crate::engine::client::{ApiSession, ClientError, LoadLines};
use crate::engine::copy::{CopyError, CopyJob, Pending, wait_for_all};
use crate::engine::rank::worker::{Worker, WorkerError};
use crate::protocol::{LoadLine, LoadRequest, SlotName};

/// Copies under way while the load waits for the next chunk.
const COPIES: usize = 4;

impl Worker {
    pub(super) async fn load_kind(
        &self,
        session: &Arc<ApiSession>,
        load: &LoadJob<'_>,
        wanted: &WantedKind,
        progress: &Arc<LoadProgress>,
    ) -> Result<Vec<Failed>, WorkerError> {
        let kind = &self.kinds[wanted.kind];
        if wanted.chunks.is_empty() {
            return Ok(Vec::new());
        }
        if kind.groups.is_empty() {
            self.decline(session, load, wanted).await;
            return Ok(Vec::new());
        }
        let request = self.request(load, wanted);
        let load_id = request.load_id.clone();
        let mut lines = call(session, request).await?;
        let (copying, copied) = mpsc::channel(COPIES);
        let (releases, to_release) = mpsc::unbounded_channel();
        let copies = Copies {
            session: Arc::clone(session),
            kind: wanted.kind,
            progress: Arc::clone(progress),
            chunks: vec![Chunk::default(); wanted.chunks.len()],
            planes: kind.space.layout().planes(),
            releases,
            kept: false,
        };
        let copied = tokio::spawn(copies.run(copied));
        let released = tokio::spawn(release(Arc::clone(session), load_id.clone(), to_release));
        let mut missing = vec![None; wanted.chunks.len()];
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
                    match self.begin(session, offset, planes.clone(), load, wanted, i).await {
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
        // After a panic of that task copies may be under way: their slots end with the process.
        let Copied {
            chunks,
            all_planes: planes,
            kept,
            left,
        } = copied.await?;
        let all_released = released.await.unwrap_or(false);
        // A load that broke off ends with its stream. A session that is over has no slots left.
        drop(lines);
        let rest = broke.is_some() || left || !all_released;
        if rest && !kept {
            let _ = session.release(&load_id, None).await;
        }
        let early = match broke {
            None => "the load ended before it".to_owned(),
            Some(error) => format!("the load broke off: {error}"),
        };
        Ok(failed(wanted.kind, missing, chunks, planes, &early))
    }

    /// Gives the copies of a chunk's planes to the device, one for each group that has some of them; on a CPU they
    /// are done when this returns.
    async fn begin(
        &self,
        session: &Arc<ApiSession>,
        offset: usize,
        planes: Range<usize>,
        load: &LoadJob<'_>,
        wanted: &WantedKind,
        index: usize,
    ) -> Result<Vec<Pending<AttachedSlot>>, WorkerError> {
        let kind = &self.kinds[wanted.kind];
        let layout = kind.space.layout();
        if planes.is_empty() || planes.end > layout.planes() {
            return Err(ClientError::Answer(format!("planes {planes:?} of {}", layout.planes())).into());
        }
        let at = layout.plane(planes.start).start;
        let len = layout.plane(planes.end - 1).end - at;
        let mut jobs = Vec::with_capacity(kind.groups.len());
        for (copier, spans) in kind.groups.iter().zip(&wanted.chunks[index].spans) {
            if spans.tokens() == 0 || !copier.cache().has_some_of(&planes) {
                continue;
            }
            let job = CopyJob {
                planes: planes.clone(),
                spans: spans.clone(),
                at,
            };
            let slot = session.arena.slot(offset, len)?.kept_by(Arc::clone(session));
            jobs.push((Arc::clone(copier), slot, job));
        }
        let after = load.after.clone();
        let begun = tokio::task::spawn_blocking(move || {
            let mut begun = Vec::with_capacity(jobs.len());
            for (copier, slot, job) in jobs {
                match copier.load(slot, &job, after.as_ref()) {
                    Ok(pending) => begun.push(pending),
                    // The slot is the chunk's: it is released only when no group's copy uses it.
                    Err(error) => {
                        return Err(match wait_for_all(begun) {
                            Err(kept @ CopyError::Kept(_)) => kept,
                            _ => error,
                        });
                    }
                }
            }
            Ok(begun)
        });
        Ok(begun.await??)
    }
}

/// Calls the node. Without an answer it may have begun the load, and lent slots that nobody will be told of.
async fn call(session: &ApiSession, request: LoadRequest) -> Result<LoadLines, ClientError> {
    let load_id = request.load_id.clone();
    let lines = session.load(request).await;
    if lines.is_err() {
        let _ = session.release(&load_id, None).await;
    }
    lines
}

/// Chunks of which not all planes were copied, each with the first known reason, or else `early`.
fn failed(
    kind: usize,
    missing: Vec<Option<String>>,
    chunks: Vec<Chunk>,
    planes: usize,
    early: &str,
) -> Vec<Failed> {
    let why = |(missing, chunk): (Option<String>, Chunk)| {
        let whole = chunk.planes == planes;
        missing
            .or(chunk.failed)
            .or_else(|| (!whole).then(|| early.to_owned()))
    };
    let reasons = missing.into_iter().zip(chunks).map(why).enumerate();
    reasons
        .filter_map(|(index, reason)| reason.map(|reason| Failed { kind, index, reason }))
        .collect()
}
