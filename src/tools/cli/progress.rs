//! Progress of long commands, on the standard error: a line that changes on a terminal, else a line now and then.

use std::io::{IsTerminal, stderr};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::output::tell;

/// See the [module](self).
pub struct Progress {
    bar: ProgressBar,
    /// Without a terminal.
    log: Option<Mutex<ProgressLog>>,
}

const TICK: Duration = Duration::from_millis(100);
/// Between two lines of a log.
const EVERY: Duration = Duration::from_secs(10);

/// What is a line in a log: what a quick command would say is none.
struct ProgressLog {
    last: Instant,
}

impl ProgressLog {
    fn is_due(&mut self, now: Instant) -> bool {
        let is_due = now.duration_since(self.last) >= EVERY;
        if is_due {
            self.last = now;
        }
        is_due
    }
}

impl Progress {
    /// Progress of unknown length.
    pub fn spinner(what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        bar.set_style(ProgressStyle::default_spinner());
        bar.set_message(what);
        Self::new(bar)
    }

    fn new(bar: ProgressBar) -> Self {
        bar.enable_steady_tick(TICK);
        let last = Instant::now();
        let log = (!stderr().is_terminal()).then(|| Mutex::new(ProgressLog { last }));
        Self { bar, log }
    }

    fn log(&self, line: impl FnOnce() -> String) {
        let Some(log) = &self.log else { return };
        let mut log = log.lock().unwrap_or_else(PoisonError::into_inner);
        if log.is_due(Instant::now()) {
            tell(line());
        }
    }

    /// Progress over `total` steps.
    pub fn bar(what: &'static str, total: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        // The template is a constant; a mistake in it shows the default bar.
        if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {msg} {eta}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what);
        Self::new(bar)
    }

    pub fn set(&self, position: u64, bytes: u64) {
        let bytes = HumanBytes(bytes);
        self.bar.set_position(position);
        self.bar.set_message(bytes.to_string());
        self.log(|| {
            let total = self.bar.length().unwrap_or_default();
            format!("{}: {position} of {total}, {bytes}", self.bar.prefix())
        });
    }

    /// For spinners: objects and bytes so far.
    pub fn seen(&self, what: &str, objects: u64, bytes: u64) {
        self.say(format!("{what}: {objects} objects, {}", HumanBytes(bytes)));
    }

    /// For spinners: any other text.
    pub fn say(&self, text: String) {
        self.log(|| text.clone());
        self.bar.set_message(text);
    }

    /// Hides the line while other output is written.
    pub fn pause<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_gets_a_line_now_and_then() {
        let start = Instant::now();
        let mut log = ProgressLog { last: start };
        let lines: Vec<u64> = (0..=35)
            .filter(|second| log.is_due(start + Duration::from_secs(*second)))
            .collect();
        assert_eq!(lines, [10, 20, 30]);
    }
}
