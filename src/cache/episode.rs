//! Warnings that may come a thousand times a second. A line is logged when an episode begins, then at intervals
//! with a count, and when the warning has not come for a while.
//!
//! So a fault that hits every chunk of an outage takes a few lines, however long the outage lasts. No call ends an
//! episode: a server that fails every second request would begin and end one all the time.

use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;

/// See the [module](self). Clones share one episode.
#[derive(Clone)]
pub struct Episode(Arc<Inner>);

struct Inner {
    what: &'static str,
    every: Duration,
    state: Mutex<Option<State>>,
}

/// The state of an episode that goes on.
struct State {
    began: Instant,
    /// Occurrences since the last line.
    times: u64,
    all: u64,
    last: String,
}

impl Episode {
    /// `what` is the message of all lines; at most one line is logged per `every`.
    pub fn new(what: &'static str, every: Duration) -> Self {
        Self(Arc::new(Inner {
            what,
            every,
            state: Mutex::default(),
        }))
    }

    /// Counts an occurrence; logs it if it begins an episode.
    pub fn tell(&self, detail: &dyn Display) {
        let Inner { what, every, .. } = *self.0;
        let mut state = self.0.lock();
        if let Some(now) = &mut *state {
            now.times += 1;
            now.all += 1;
            now.last = detail.to_string();
            drop(state);
            tracing::debug!("{what}: {detail}");
            return;
        }
        // Without a runtime no task can report the end, so every occurrence is logged.
        if let Ok(runtime) = Handle::try_current() {
            *state = Some(State {
                began: Instant::now(),
                times: 0,
                all: 1,
                last: detail.to_string(),
            });
            runtime.spawn(follow(Arc::downgrade(&self.0), every));
        }
        drop(state);
        tracing::warn!("{what}: {detail}");
    }

    /// The latest occurrence, while an episode goes on.
    pub fn latest(&self) -> Option<String> {
        self.0.lock().as_ref().map(|state| state.last.clone())
    }
}

/// Runs until an interval passes without an occurrence.
async fn follow(episode: Weak<Inner>, every: Duration) {
    loop {
        tokio::time::sleep(every).await;
        let Some(episode) = episode.upgrade() else { return };
        if !episode.goes_on() {
            return;
        }
    }
}

impl Inner {
    fn goes_on(&self) -> bool {
        let Self { what, every, .. } = *self;
        let mut state = self.lock();
        let Some(now) = &mut *state else { return false };
        if now.times > 0 {
            let (times, all, last) = (std::mem::take(&mut now.times), now.all, now.last.clone());
            tracing::warn!(
                times,
                all,
                "{what}: {times} times more in {every:?}, the last time: {last}"
            );
            return true;
        }
        // A single occurrence was logged when it came.
        if now.all > 1 {
            let lasted = now.began.elapsed().saturating_sub(every);
            tracing::warn!(
                all = now.all,
                ?lasted,
                "{what}: that is over, it has not happened for {every:?}"
            );
        }
        *state = None;
        false
    }

    /// No panic can leave the state half-changed, so a poisoned lock is still usable.
    fn lock(&self) -> MutexGuard<'_, Option<State>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
