//! The rows of one part in one span, as two loops over runs that are as long as both layouts allow.

use super::cache::{PagedCache, PlanePart};
use super::mapping::Span;

/// The rows of one part in one span: runs in two loops, as few and as long as the two layouts allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Region {
    /// Offset of the first run in the object.
    pub object: usize,
    /// Address of the first run.
    pub address: u64,
    pub run: usize,
    pub inner: Dim,
    pub outer: Dim,
}

/// A loop: its count, and its step on each side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dim {
    pub count: usize,
    pub object: usize,
    pub pages: usize,
}

impl Dim {
    const ONCE: Self = Self {
        count: 1,
        object: 0,
        pages: 0,
    };
}

impl Region {
    /// The region of a span of this cache. It lies in the memory that the cache was checked to have, so nothing
    /// overflows.
    pub fn new(cache: &PagedCache, part: &PlanePart, span: &Span) -> Self {
        let plane = &cache.space().planes()[part.plane];
        let row = plane.row_bytes as usize;
        let of_head = cache.space().chunk_rows() as usize * row;
        let (first_head, end_head) = part.heads;
        let token = Dim {
            count: span.tokens as usize,
            object: row,
            pages: part.token_stride as usize,
        };
        let head = Dim {
            count: (end_head - first_head) as usize,
            object: of_head,
            pages: part.head_stride as usize,
        };
        let in_plane = first_head as usize * of_head + span.token as usize * row + part.row_offset as usize;
        // The inner loop is the one with the smaller stride in the pages.
        let (inner, outer) = match part.head_stride < part.token_stride {
            true => (head, token),
            false => (token, head),
        };
        Self {
            object: cache.space().layout().plane(part.plane).start + in_plane,
            address: part.address
                + u64::from(span.block) * part.block_stride
                + u64::from(span.offset) * part.token_stride,
            run: part.run_bytes as usize,
            inner,
            outer,
        }
        .merged()
        .merged()
    }

    /// Makes the inner loop part of the run where both sides are contiguous in it.
    fn merged(mut self) -> Self {
        let contiguous = self.inner.object == self.run && self.inner.pages == self.run;
        if self.inner.count == 1 || contiguous {
            self.run *= self.inner.count;
            (self.inner, self.outer) = (self.outer, Dim::ONCE);
        }
        self
    }
}
