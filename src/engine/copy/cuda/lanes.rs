//! The lanes of a worker, shared by all of its copiers: device memory for staging does not grow with their number.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::copier::CudaOptions;
use super::gpu::{CudaError, Gpu, StreamMark};
use super::kernel::Way;
use super::lane::{Lane, RingSize};
use super::pinned::Pinned;

/// Streams and staging buffers for the copies of one worker by one GPU, however many copiers it has.
pub struct Lanes {
    pub(super) gpu: Arc<Gpu>,
    pub(super) options: CudaOptions,
    /// With staging buffers; made for the first copier that needs them.
    staged: Mutex<Option<Arc<LaneSet>>>,
    /// For copiers whose DMAs go straight to the pages.
    direct: Mutex<Option<Arc<LaneSet>>>,
}

/// A lane for each purpose.
pub(super) struct LaneSet {
    /// For loads whose mark is passed.
    load: Mutex<Lane>,
    /// For loads of one mark that is not passed yet: they delay no other load.
    held: Mutex<Lane>,
    store: Mutex<Lane>,
}

impl Lanes {
    pub fn new(gpu: &Arc<Gpu>, options: CudaOptions) -> Arc<Self> {
        Arc::new(Self {
            gpu: Arc::clone(gpu),
            options,
            staged: Mutex::default(),
            direct: Mutex::default(),
        })
    }

    /// Lanes with staging buffers of at least this size, or without any.
    pub(super) fn set(&self, ring: Option<RingSize>) -> Result<Arc<LaneSet>, CudaError> {
        let of_kind = match ring {
            Some(_) => &self.staged,
            None => &self.direct,
        };
        let mut set = lock(of_kind);
        match (&*set, ring) {
            (Some(set), None) => Ok(Arc::clone(set)),
            (Some(set), Some(size)) => {
                set.all().try_for_each(|lane| lock(lane).grow(size))?;
                Ok(Arc::clone(set))
            }
            (None, ring) => {
                let new = Arc::new(LaneSet::new(&self.gpu, ring)?);
                Ok(Arc::clone(set.insert(new)))
            }
        }
    }
}

impl LaneSet {
    fn new(gpu: &Gpu, ring: Option<RingSize>) -> Result<Self, CudaError> {
        let lane = |way| Lane::new(gpu, way, ring).map(Mutex::new);
        Ok(Self {
            load: lane(Way::Scatter)?,
            held: lane(Way::Scatter)?,
            store: lane(Way::Gather)?,
        })
    }

    fn all(&self) -> impl Iterator<Item = &Mutex<Lane>> {
        [&self.load, &self.held, &self.store].into_iter()
    }

    /// A lane that writes pages after `after`, and after no younger mark. This thread waits for `after` if
    /// necessary.
    pub fn load_after(&self, after: Option<&StreamMark>) -> Result<MutexGuard<'_, Lane>, CudaError> {
        let Some(after) = after else {
            return Ok(lock(&self.load));
        };
        if after.is_passed()? {
            return Ok(lock(&self.load));
        }
        let mut held = lock(&self.held);
        let is_free = match &held.mark {
            Some(mark) if mark.is(after) => return Ok(held),
            Some(mark) => mark.is_passed()?,
            None => true,
        };
        if is_free {
            after.hold_up(held.toucher())?;
            held.mark = Some(after.clone());
            return Ok(held);
        }
        drop(held);
        after.wait()?;
        Ok(lock(&self.load))
    }

    /// A lane that reads pages after `after`.
    pub fn store_after(&self, after: Option<&StreamMark>) -> Result<MutexGuard<'_, Lane>, CudaError> {
        let lane = lock(&self.store);
        if let Some(after) = after {
            after.hold_up(lane.toucher())?;
        }
        Ok(lane)
    }

    /// Expects objects in this memory from now on. If the memory is new, it waits for the copies under way, which
    /// use the memory pinned before.
    pub fn pin(&self, pinned: &Arc<Pinned>) -> Result<(), CudaError> {
        for lane in self.all() {
            let mut lane = lock(lane);
            match &lane.pinned {
                Some(now) if Arc::ptr_eq(now, pinned) => continue,
                Some(_) => lane.finish()?,
                None => {}
            }
            lane.pinned = Some(Arc::clone(pinned));
        }
        Ok(())
    }

    /// Waits until no copy is under way.
    pub fn finish(&self) {
        for lane in self.all() {
            if let Err(error) = lock(lane).finish() {
                tracing::error!(%error, "the GPU failed while copies were under way");
            }
        }
    }
}

/// No panic can leave a lane half-changed in a way that matters: work given to it ends by itself.
fn lock<T>(lane: &Mutex<T>) -> MutexGuard<'_, T> {
    lane.lock().unwrap_or_else(PoisonError::into_inner)
}
