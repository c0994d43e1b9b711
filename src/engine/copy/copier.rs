//! Copies between objects and pages, by the CPU or a GPU behind one interface.

use std::ops::Range;
use std::sync::Arc;

use super::cache::PagedCache;
use super::cpu::CpuCopier;
use super::cuda::{CudaCopier, GpuEvent, Pinned, StreamMark};
use super::error::CopyError;
use super::mapping::Spans;
use super::object::{Source, Target};
use crate::arena::AttachedArena;

/// Copies between objects and one engine's pages.
pub enum Copier {
    Cpu(CpuCopier),
    Cuda(Box<CudaCopier>),
}

/// A copy to make.
#[derive(Debug, Clone)]
pub struct CopyJob {
    /// Of the space; those that the cache does not have are left out.
    pub planes: Range<usize>,
    pub spans: Spans,
    /// Where in the object the memory begins that is given: 0 for a whole one.
    pub at: usize,
}

/// A CUDA stream of the engine (`CUstream`, as torch's `cuda_stream` tells it). The CPU needs none.
#[derive(Debug, Clone, Copy)]
pub struct EngineStream(pub u64);

impl Copier {
    /// From the object into the pages, after what the engine's stream was given until `after`.
    pub fn load<S: Source>(
        &self,
        from: S,
        job: &CopyJob,
        after: Option<&StreamMark>,
    ) -> Result<Pending<S>, CopyError> {
        match self {
            Self::Cpu(copier) => copier.load(from, job),
            Self::Cuda(copier) => copier.load(from, job, after),
        }
    }

    /// From the pages into the object, after what the engine's stream was given until `after`: the forward pass.
    pub fn store<T: Target>(
        &self,
        to: T,
        job: &CopyJob,
        after: Option<&StreamMark>,
    ) -> Result<Pending<T>, CopyError> {
        match self {
            Self::Cpu(copier) => copier.store(to, job),
            Self::Cuda(copier) => copier.store(to, job, after),
        }
    }

    /// What `engine` was given so far. Marked when the engine orders a copy: what it is given later does not hold that up.
    /// None: a CPU.
    pub fn mark(&self, engine: EngineStream) -> Result<Option<StreamMark>, CopyError> {
        match self {
            Self::Cpu(_) => Ok(None),
            Self::Cuda(copier) => Ok(Some(copier.mark(engine)?)),
        }
    }

    /// Registers an arena with the device; None: a CPU needs none of that. For a large arena it takes seconds.
    pub fn register(&self, arena: &Arc<AttachedArena>) -> Option<Arc<Pinned>> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(copier) => Some(copier.register(Arc::clone(arena))),
        }
    }

    /// Objects will be in this memory from now on.
    pub fn pin(&self, pinned: &Arc<Pinned>) -> Result<(), CopyError> {
        match self {
            Self::Cpu(_) => Ok(()),
            Self::Cuda(copier) => Ok(copier.pin(pinned)?),
        }
    }

    pub fn cache(&self) -> &PagedCache {
        match self {
            Self::Cpu(copier) => copier.cache(),
            Self::Cuda(copier) => copier.cache(),
        }
    }
}

/// A copy that may still be under way. It keeps the memory that it was given; dropped, it waits.
pub struct Pending<T> {
    /// None only after `wait`.
    held: Option<T>,
    /// None: it is done.
    done: Option<GpuEvent>,
}

impl<T> Pending<T> {
    pub(super) fn new(held: T, done: Option<GpuEvent>) -> Self {
        Self {
            held: Some(held),
            done,
        }
    }

    /// Never waits.
    pub fn is_done(&self) -> Result<bool, CopyError> {
        match &self.done {
            Some(event) => Ok(event.is_done()?),
            None => Ok(true),
        }
    }

    /// Lets what the engine's stream is given from now on wait for it; this thread doesn't.
    pub fn hold_up(&self, engine: EngineStream) -> Result<(), CopyError> {
        match &self.done {
            Some(event) => Ok(event.hold_up(engine)?),
            None => Ok(()),
        }
    }

    /// Gives the memory back. After an error nobody knows what the device still does with it, so it is kept for good.
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

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        if let Err(error) = self.finish() {
            tracing::error!(%error, "a copy that nobody waited for failed; its slot is lost until the engine is gone");
        }
    }
}

impl CopyJob {
    /// Which parts of the cache it copies, from or to `bytes` of the object.
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

    /// And a store must leave nothing out.
    pub(super) fn check_store(&self, cache: &PagedCache, bytes: usize) -> Result<Range<usize>, CopyError> {
        let chunk_tokens = cache.space().chunk_tokens();
        if self.spans.tokens() != chunk_tokens {
            return Err(CopyError::Tokens {
                tokens: self.spans.tokens(),
                chunk_tokens,
            });
        }
        self.check_load(cache, bytes)
    }
}
