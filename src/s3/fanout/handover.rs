//! A landing that only one attempt of a call may write to at a time. A hedge takes it over when its answer begins.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::route::Start;

/// Something that only one attempt of a call may write to at a time, such as the slot where a body lands. An attempt holds
/// it for as long as it writes, and gives it back however it ends; one that claims it meanwhile waits. Clones share it.
pub struct Handover<T>(Arc<Inner<T>>);

struct Inner<T> {
    state: Mutex<State<T>>,
    /// The part that the holder has yet to do, in thousandths.
    left: AtomicU64,
    returned: Notify,
    wanted: Notify,
}

struct State<T> {
    value: Option<T>,
    holder: Option<Start>,
}

impl<T> Handover<T> {
    pub fn new(value: T) -> Self {
        let state = State {
            value: Some(value),
            holder: None,
        };
        Self(Arc::new(Inner {
            state: Mutex::new(state),
            left: AtomicU64::new(1000),
            returned: Notify::new(),
            wanted: Notify::new(),
        }))
    }

    /// Takes it out for good; None while somebody holds it.
    pub fn take(&self) -> Option<T> {
        self.lock().value.take()
    }

    /// Waits until nobody holds it.
    pub async fn claim(&self, by: Start) -> Held<T> {
        loop {
            {
                let mut state = self.lock();
                if let Some(value) = state.value.take() {
                    state.holder = Some(by);
                    self.0.left.store(1000, Ordering::Relaxed);
                    return Held {
                        of: self.clone(),
                        value: Some(value),
                    };
                }
                if by == Start::Hedge && state.holder != Some(Start::Hedge) {
                    self.0.wanted.notify_one();
                }
            }
            self.0.returned.notified().await;
        }
    }

    /// A hedge waits for what a slower attempt holds.
    pub async fn wanted(&self) {
        self.0.wanted.notified().await;
    }

    /// Which part of its work the holder has yet to do.
    pub fn left(&self) -> f64 {
        self.0.left.load(Ordering::Relaxed) as f64 / 1000.0
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> Clone for Handover<T> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<T> std::fmt::Debug for Handover<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Handover({:?})", self.lock().holder)
    }
}

/// Gives it back when dropped.
pub struct Held<T> {
    of: Handover<T>,
    value: Option<T>,
}

impl<T> Held<T> {
    /// `done` of `all` is done.
    pub fn progress(&self, done: usize, all: usize) {
        let left = (all - done) as u64 * 1000 / (all as u64).max(1);
        self.of.0.left.store(left, Ordering::Relaxed);
    }
}

impl<T> Deref for Held<T> {
    type Target = T;
    fn deref(&self) -> &T {
        self.value.as_ref().expect("there until it is dropped")
    }
}

impl<T> DerefMut for Held<T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("there until it is dropped")
    }
}

impl<T> Drop for Held<T> {
    fn drop(&mut self) {
        {
            let mut state = self.of.lock();
            state.value = self.value.take();
            state.holder = None;
        }
        self.of.0.returned.notify_one();
    }
}
