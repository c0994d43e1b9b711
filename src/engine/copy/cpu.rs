//! Copies by the CPU: regions of rows, split over threads where they are large.

use std::borrow::Cow;
use std::ops::Range;

use super::cache::{PagedCache, PlanePart};
use super::copier::{CopyJob, Pending};
use super::error::CopyError;
use super::mapping::Span;
use super::object::{Source, Target};
use super::region::Region;

/// Copies by the CPU, for engines that compute on it.
pub struct CpuCopier {
    cache: PagedCache,
    options: CpuOptions,
}

/// Limits for copies by more than one thread.
#[derive(Debug, Clone, Copy)]
pub struct CpuOptions {
    /// The most threads.
    pub threads: usize,
    /// Bytes for which one more thread is used.
    pub bytes_per_thread: usize,
}

impl From<&crate::config::Copies> for CpuOptions {
    fn from(config: &crate::config::Copies) -> Self {
        Self {
            threads: config.threads as usize,
            bytes_per_thread: config.thread_size.bytes() as usize,
        }
    }
}

/// The direction of a copy.
#[derive(Clone, Copy)]
enum Way {
    Load(*const u8),
    Store(*mut u8),
}

// SAFETY: the pointers are to memory that the copy has for itself (a `Target`), or that nobody writes (a `Source`);
// threads write disjoint parts of it.
unsafe impl Send for Way {}
// SAFETY: as above.
unsafe impl Sync for Way {}

impl CpuCopier {
    /// # Safety
    /// The cache's addresses are of memory of this process that stays mapped for as long as the copier lives. No
    /// other code may touch the tokens of a copy under way.
    pub unsafe fn new(cache: PagedCache, options: CpuOptions) -> Self {
        Self { cache, options }
    }

    /// Copies from the object into the pages; done when this returns.
    pub fn load<S: Source>(&self, from: S, job: &CopyJob) -> Result<Pending<S>, CopyError> {
        let bytes = from.bytes();
        let parts = job.check_load(&self.cache, bytes.len())?;
        self.copy(Way::Load(bytes.cast()), job, parts);
        Ok(Pending::new(from, None))
    }

    /// Copies from the pages into the object; done when this returns.
    pub fn store<T: Target>(&self, mut to: T, job: &CopyJob) -> Result<Pending<T>, CopyError> {
        let bytes = to.bytes();
        let parts = job.check_store(&self.cache, bytes.len())?;
        self.copy(Way::Store(bytes.cast()), job, parts);
        Ok(Pending::new(to, None))
    }

    pub fn cache(&self) -> &PagedCache {
        &self.cache
    }

    fn copy(&self, way: Way, job: &CopyJob, parts: Range<usize>) {
        let token_major = is_token_major(&self.cache.parts()[parts.clone()]);
        let spans: Cow<[Span]> = match token_major {
            true => job.spans.as_slice().iter().flat_map(cut).collect(),
            false => job.spans.as_slice().into(),
        };
        let row = |index: usize| self.cache.parts()[index].run_bytes as usize;
        let heads = |index: usize| {
            let (first, end) = self.cache.parts()[index].heads;
            (end - first) as usize
        };
        let of_token: usize = parts.clone().map(|index| row(index) * heads(index)).sum();
        let bytes = of_token * job.spans.tokens() as usize;
        let pairs = parts.len() * spans.len();
        let threads = (bytes / self.options.bytes_per_thread.max(1))
            .clamp(1, self.options.threads.max(1))
            .min(pairs.max(1));
        let share = |thread: usize| pairs * thread / threads..pairs * (thread + 1) / threads;
        let work = |pairs: Range<usize>| {
            for pair in pairs {
                let (part, span) = match token_major {
                    true => (pair % parts.len(), pair / parts.len()),
                    false => (pair / spans.len(), pair % spans.len()),
                };
                let part = &self.cache.parts()[parts.start + part];
                let region = Region::new(&self.cache, part, &spans[span]);
                // SAFETY: the maker of the copier vouches for the pages, the job was checked against the object's
                // length and the cache, and pairs have disjoint bytes on both sides.
                unsafe { copy_region(way, &region, job.at) };
            }
        };
        std::thread::scope(|scope| {
            for thread in 1..threads {
                let (work, pairs) = (&work, share(thread));
                scope.spawn(move || work(pairs));
            }
            work(share(0));
        });
    }
}

/// Whether a token's layers are side by side, as in SGLang's page_first: then all of them are copied while the
/// token's pages are in the CPU's cache.
fn is_token_major(parts: &[PlanePart]) -> bool {
    let Some((first, others)) = parts.split_first() else {
        return false;
    };
    // A part of the next layer.
    let next = others.iter().find(|part| part.row_offset == first.row_offset);
    next.is_some_and(|next| first.address.abs_diff(next.address) < first.token_stride)
}

/// Tokens whose layers are all copied together.
const TOKENS: u32 = 32;

fn cut(span: &Span) -> impl Iterator<Item = Span> + use<> {
    let span = *span;
    (0..span.tokens).step_by(TOKENS as usize).map(move |first| Span {
        token: span.token + first,
        tokens: TOKENS.min(span.tokens - first),
        block: span.block,
        offset: span.offset + first,
    })
}

/// Step of longer runs where the two sides are not aligned alike: memcpy would use `rep movsb`, which some CPUs
/// then do at a third of the speed.
const STEP: usize = 1024;
const ALIGN: usize = 64;

/// # Safety
/// The region's runs are in the pages, and, less `at`, in the object; the written side is this copy's alone.
unsafe fn copy_region(way: Way, region: &Region, at: usize) {
    let (inner, outer) = (region.inner, region.outer);
    let page = region.address as usize as *mut u8;
    for o in 0..outer.count {
        for i in 0..inner.count {
            // SAFETY: as the caller says.
            unsafe {
                let page = page.add(o * outer.pages + i * inner.pages);
                let in_object = region.object - at + o * outer.object + i * inner.object;
                match way {
                    Way::Load(object) => copy_run(object.add(in_object), page, region.run),
                    Way::Store(object) => copy_run(page, object.add(in_object), region.run),
                }
            }
        }
    }
}

/// # Safety
/// As for `copy_nonoverlapping`.
#[inline]
unsafe fn copy_run(from: *const u8, to: *mut u8, bytes: usize) {
    let alike = (from as usize).wrapping_sub(to as usize).is_multiple_of(ALIGN);
    if bytes <= STEP || alike {
        // SAFETY: as the caller says.
        return unsafe { from.copy_to_nonoverlapping(to, bytes) };
    }
    for done in (0..bytes).step_by(STEP) {
        let step = STEP.min(bytes - done);
        // SAFETY: as the caller says.
        unsafe { from.add(done).copy_to_nonoverlapping(to.add(done), step) };
    }
}
