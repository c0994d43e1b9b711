//! Copies between objects and pages, by the CPU, a GPU or the engine's framework behind one interface.

use std::ops::Range;
use std::sync::Arc;

use super::cache::PagedCache;
use super::cpu::CpuCopier;
use super::cuda::{CudaCopier, GpuEvent, Pinned, StreamMark};
use super::error::CopyError;
use super::framework::{FrameworkCopier, FrameworkMark};
use super::mapping::Spans;
use super::object::{Source, Target};
use crate::arena::AttachedArena;

/// Copies between objects and one engine's pages.
pub enum Copier {
    Cpu(CpuCopier),
    Cuda(Box<CudaCopier>),
    Framework(FrameworkCopier),
}

/// The work that an engine's device was given until some moment.
#[derive(Clone)]
pub enum Mark {
    Cuda(StreamMark),
    Framework(FrameworkMark),
}

/// The planes and tokens of one copy.
#[derive(Debug, Clone)]
pub struct CopyJob {
    /// Indices in the space; planes that the cache lacks are left out.
    pub planes: Range<usize>,
    pub spans: Spans,
    /// Where in the object the given memory begins: 0 for a whole object.
    pub at: usize,
}

/// A CUDA stream of the engine (`CUstream`, torch's `cuda_stream`). The CPU needs none.
#[derive(Debug, Clone, Copy)]
pub struct EngineStream(pub u64);

impl Copier {
    /// Copies from the object into the pages, after the work that the engine's stream was given until `after`.
    pub fn load<S: Source>(
        &self,
        from: S,
        job: &CopyJob,
        after: Option<&Mark>,
    ) -> Result<Pending<S>, CopyError> {
        match self {
            Self::Cpu(copier) => copier.load(from, job),
            Self::Cuda(copier) => copier.load(from, job, after.and_then(Mark::cuda)),
            Self::Framework(copier) => copier.load(from, job, after.and_then(Mark::framework)),
        }
    }

    /// Copies from the pages into the object, after the work (the forward pass) that the engine's stream was given
    /// until `after`.
    pub fn store<T: Target>(
        &self,
        to: T,
        job: &CopyJob,
        after: Option<&Mark>,
    ) -> Result<Pending<T>, CopyError> {
        match self {
            Self::Cpu(copier) => copier.store(to, job),
            Self::Cuda(copier) => copier.store(to, job, after.and_then(Mark::cuda)),
            Self::Framework(copier) => copier.store(to, job, after.and_then(Mark::framework)),
        }
    }

    /// The work that `engine` was given so far. Marked when the engine orders a copy: later work on the stream does
    /// not delay that copy. A framework knows its stream by itself. None: a CPU, or no stream of CUDA's.
    pub fn mark(&self, engine: Option<EngineStream>) -> Result<Option<Mark>, CopyError> {
        match self {
            Self::Cpu(_) => Ok(None),
            Self::Cuda(copier) => {
                let mark = engine.map(|engine| copier.mark(engine)).transpose();
                Ok(mark?.map(Mark::Cuda))
            }
            Self::Framework(copier) => Ok(Some(Mark::Framework(copier.mark()?))),
        }
    }

    /// Whether its arena is registered with the device before copies.
    pub fn registers(&self) -> bool {
        matches!(self, Self::Cuda(_))
    }

    /// Registers an arena with the device; None: it needs no registration. For a large arena it takes seconds.
    pub fn register(&self, arena: &Arc<AttachedArena>) -> Option<Arc<Pinned>> {
        match self {
            Self::Cpu(_) | Self::Framework(_) => None,
            Self::Cuda(copier) => Some(copier.register(Arc::clone(arena))),
        }
    }

    /// Expects objects in this memory from now on.
    pub fn pin(&self, pinned: &Arc<Pinned>) -> Result<(), CopyError> {
        match self {
            Self::Cpu(_) | Self::Framework(_) => Ok(()),
            Self::Cuda(copier) => Ok(copier.pin(pinned)?),
        }
    }

    pub fn cache(&self) -> &PagedCache {
        match self {
            Self::Cpu(copier) => copier.cache(),
            Self::Cuda(copier) => copier.cache(),
            Self::Framework(copier) => copier.cache(),
        }
    }
}

impl Mark {
    fn cuda(&self) -> Option<&StreamMark> {
        match self {
            Self::Cuda(mark) => Some(mark),
            Self::Framework(_) => None,
        }
    }

    fn framework(&self) -> Option<&FrameworkMark> {
        match self {
            Self::Framework(mark) => Some(mark),
            Self::Cuda(_) => None,
        }
    }
}

/// A copy that may still be under way. It keeps its memory; a drop waits for the copy.
pub struct Pending<T> {
    /// None only after `wait`.
    held: Option<T>,
    /// None: the copy is done.
    done: Option<GpuEvent>,
}

impl<T> Pending<T> {
    pub(super) fn new(held: T, done: Option<GpuEvent>) -> Self {
        Self {
            held: Some(held),
            done,
        }
    }

    /// Whether the copy is done; never waits.
    pub fn is_done(&self) -> Result<bool, CopyError> {
        match &self.done {
            Some(event) => Ok(event.is_done()?),
            None => Ok(true),
        }
    }

    /// Makes later work on the engine's stream wait for the copy; this thread doesn't wait.
    pub fn hold_up(&self, engine: EngineStream) -> Result<(), CopyError> {
        match &self.done {
            Some(event) => Ok(event.hold_up(engine)?),
            None => Ok(()),
        }
    }

    /// Waits, and gives the memory back. After an error the device may still use the memory, so it is kept for
    /// good.
    pub fn wait(mut self) -> Result<T, CopyError> {
        self.finish()?;
        Ok(self.held.take().expect("taken here only"))
    }

    fn finish(&mut self) -> Result<(), CopyError> {
        let Some(event) = self.done.take() else {
            return Ok(());
        };
        if let Err(error) = event.wait() {
            std::mem::forget(self.held.take());
            return Err(CopyError::Kept(error));
        }
        Ok(())
    }
}

/// Waits for all of these copies, also after an error. The error is that the device may still use some memory, if that
/// is so, or else the first.
pub fn wait_for_all<T>(copies: Vec<Pending<T>>) -> Result<(), CopyError> {
    let mut result = Ok(());
    for copy in copies {
        match copy.wait() {
            Ok(_) => {}
            Err(kept @ CopyError::Kept(_)) => result = Err(kept),
            Err(error) => result = result.and(Err(error)),
        }
    }
    result
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::error!(%error, "a copy that nobody waited for failed; its slot is lost until the engine is gone");
        }
    }
}

impl CopyJob {
    /// Checks a copy from or to `bytes` of the object; returns its parts of the cache.
    pub(super) fn check_load(&self, cache: &PagedCache, bytes: usize) -> Result<Range<usize>, CopyError> {
        if self.spans.geometry() != cache.geometry() {
            return Err(CopyError::OtherCache);
        }
        let parts = cache.parts_of(&self.planes)?;
        let of = &cache.parts()[parts.clone()];
        if let (Some(first), Some(last)) = (of.first(), of.last()) {
            let layout = cache.space().layout();
            let needs = layout.plane(first.plane).start..layout.plane(last.plane).end;
            let has = self.at..self.at.saturating_add(bytes);
            if needs.start < has.start || has.end < needs.end {
                return Err(CopyError::Object {
                    first: needs.start,
                    end: needs.end,
                    at: has.start,
                    has: has.end,
                });
            }
        }
        Ok(parts)
    }

    /// As for a load; a store must also leave nothing out.
    pub(super) fn check_store(&self, cache: &PagedCache, bytes: usize) -> Result<Range<usize>, CopyError> {
        let chunk_tokens = cache.tokens().count(cache.space().chunk_rows());
        if self.spans.tokens() != chunk_tokens {
            return Err(CopyError::Tokens {
                tokens: self.spans.tokens(),
                chunk_tokens,
            });
        }
        self.check_load(cache, bytes)
    }
}
