//! Copies by an engine's framework (PyTorch), on devices that kvgate has no copies of its own for.
//!
//! kvgate says where rows lie on both sides; the framework's own calls move them. It is slower than the copies of `cpu`
//! and `cuda`, and works on every device that the framework knows.

use std::any::Any;
use std::sync::Arc;

use super::cache::{PagedCache, PlanePart};
use super::copier::{CopyJob, Pending};
use super::error::CopyError;
use super::mapping::Span;
use super::object::{Source, Target};

/// An engine's framework, which copies between host memory and its device.
///
/// When a copy returns, with an error too, it is done: neither side is used any more.
pub trait Framework: Send + Sync {
    /// The work that the device was given so far, for copies that come after it.
    fn mark(&self) -> Result<FrameworkMark, String>;

    /// Copies from the object into the pages.
    fn load(
        &self,
        object: *const [u8],
        rows: &FrameworkRows,
        after: Option<&FrameworkMark>,
    ) -> Result<(), String>;

    /// Copies from the pages into the object; writes nothing but the rows.
    fn store(
        &self,
        object: *mut [u8],
        rows: &FrameworkRows,
        after: Option<&FrameworkMark>,
    ) -> Result<(), String>;
}

/// The framework's own sign for a place in its device's work.
pub type FrameworkMark = Arc<dyn Any + Send + Sync>;

/// The rows of one copy.
#[derive(Debug)]
pub struct FrameworkRows<'a> {
    pub parts: Vec<FrameworkPart>,
    /// The same for all parts.
    pub spans: &'a [Span],
    pub chunk_rows: u32,
    pub blocks: u32,
    pub block_tokens: u32,
}

/// The rows of a plane, or of its K or V alone, on both sides. All numbers but `heads` are bytes.
#[derive(Debug, Clone, Copy)]
pub struct FrameworkPart {
    /// The first head's first row, in the object's memory.
    pub object: usize,
    /// From a row to the next, and from a head to the next, in the object.
    pub row: usize,
    pub of_head: usize,
    pub heads: usize,
    pub run: usize,
    /// In the device's memory.
    pub address: u64,
    pub block_stride: u64,
    pub token_stride: u64,
    pub head_stride: u64,
}

/// Copies by the framework, for one group of layers.
pub struct FrameworkCopier {
    cache: PagedCache,
    framework: Arc<dyn Framework>,
}

impl FrameworkCopier {
    pub fn new(cache: PagedCache, framework: Arc<dyn Framework>) -> Self {
        Self { cache, framework }
    }

    pub fn mark(&self) -> Result<FrameworkMark, CopyError> {
        self.framework.mark().map_err(CopyError::Framework)
    }

    /// Copies from the object into the pages; done when this returns.
    pub fn load<S: Source>(
        &self,
        from: S,
        job: &CopyJob,
        after: Option<&FrameworkMark>,
    ) -> Result<Pending<S>, CopyError> {
        let bytes = from.bytes();
        let parts = job.check_load(&self.cache, bytes.len())?;
        let rows = self.rows(job, &self.cache.parts()[parts]);
        let done = self.framework.load(bytes, &rows, after);
        done.map_err(CopyError::Framework)?;
        Ok(Pending::new(from, None))
    }

    /// Copies from the pages into the object; done when this returns.
    pub fn store<T: Target>(
        &self,
        mut to: T,
        job: &CopyJob,
        after: Option<&FrameworkMark>,
    ) -> Result<Pending<T>, CopyError> {
        let bytes = to.bytes();
        let parts = job.check_store(&self.cache, bytes.len())?;
        let rows = self.rows(job, &self.cache.parts()[parts]);
        let done = self.framework.store(bytes, &rows, after);
        done.map_err(CopyError::Framework)?;
        Ok(Pending::new(to, None))
    }

    pub fn cache(&self) -> &PagedCache {
        &self.cache
    }

    fn rows<'a>(&self, job: &'a CopyJob, parts: &[PlanePart]) -> FrameworkRows<'a> {
        let space = self.cache.space();
        let part = |part: &PlanePart| {
            let row = space.planes()[part.plane].row_bytes as usize;
            let of_head = space.chunk_rows() as usize * row;
            let first = space.layout().plane(part.plane).start + part.heads.0 as usize * of_head;
            FrameworkPart {
                object: first + part.row_offset as usize - job.at,
                row,
                of_head,
                heads: (part.heads.1 - part.heads.0) as usize,
                run: part.run_bytes as usize,
                address: part.address,
                block_stride: part.block_stride,
                token_stride: part.token_stride,
                head_stride: part.head_stride,
            }
        };
        FrameworkRows {
            parts: parts.iter().map(part).collect(),
            spans: job.spans.as_slice(),
            chunk_rows: space.chunk_rows(),
            blocks: self.cache.blocks(),
            block_tokens: self.cache.block_tokens(),
        }
    }
}
