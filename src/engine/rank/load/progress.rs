//! The planes of a load that are in the pages, for an engine that computes layer by layer.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// The planes of a load that are in the pages, for an engine that computes layer by layer.
pub struct LoadProgress {
    /// By kind: for each plane, the number of chunks that still miss it.
    left: Mutex<HashMap<usize, Vec<usize>>>,
    changed: Condvar,
}

impl LoadProgress {
    /// `kinds`: the loaded ones, each with its planes and chunks.
    pub fn new(kinds: impl IntoIterator<Item = (usize, usize, usize)>) -> Self {
        let left = |(kind, planes, chunks)| (kind, vec![chunks; planes]);
        Self {
            left: Mutex::new(kinds.into_iter().map(left).collect()),
            changed: Condvar::new(),
        }
    }

    /// Blocks until this plane of all the kind's chunks is in the pages, or the load has ended without it.
    pub fn wait(&self, kind: usize, plane: usize) {
        let is_missing = |left: &HashMap<usize, Vec<usize>>| {
            let of_plane = left.get(&kind).and_then(|planes| planes.get(plane));
            of_plane.is_some_and(|&left| left > 0)
        };
        let mut left = self.lock();
        while is_missing(&left) {
            left = self.changed.wait(left).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn copied(&self, kind: usize, planes: Range<usize>) {
        let mut left = self.lock();
        let of_kind = left.get_mut(&kind).and_then(|left| left.get_mut(planes));
        for left in of_kind.into_iter().flatten() {
            *left = left.saturating_sub(1);
        }
        drop(left);
        self.changed.notify_all();
    }

    /// No thread waits for more of the load when the result is gone.
    pub(super) fn ends_with_this(self: &Arc<Self>) -> Ends {
        Ends(Arc::clone(self), None)
    }

    /// The same for one kind.
    pub(super) fn ends_kind_with_this(self: &Arc<Self>, kind: usize) -> Ends {
        Ends(Arc::clone(self), Some(kind))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<usize, Vec<usize>>> {
        self.left.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub(super) struct Ends(Arc<LoadProgress>, Option<usize>);

impl Drop for Ends {
    fn drop(&mut self) {
        let Self(progress, kind) = self;
        progress
            .lock()
            .retain(|of, _| kind.is_some_and(|kind| *of != kind));
        progress.changed.notify_all();
    }
}
