//! Pauses lookups after some time-outs in a row: an engine must not wait for a gateway that hangs.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Opens for a while after some time-outs in a row: an engine must not wait for a gateway that hangs.
pub struct LookupBreaker {
    timeouts: u32,
    pause: Duration,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    in_a_row: u32,
    open_until: Option<Instant>,
}

impl LookupBreaker {
    pub fn new(timeouts: u32, pause: Duration) -> Self {
        Self {
            timeouts,
            pause,
            state: Mutex::default(),
        }
    }

    pub fn is_open(&self) -> bool {
        self.lock().open_until.is_some_and(|until| Instant::now() < until)
    }

    pub fn note(&self, in_time: bool) {
        let mut state = self.lock();
        if in_time {
            *state = State::default();
            return;
        }
        state.in_a_row += 1;
        if state.in_a_row >= self.timeouts {
            *state = State {
                in_a_row: 0,
                open_until: Instant::now().checked_add(self.pause),
            };
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
