//! Progress of long commands, on the standard error, where that is a terminal.

use std::time::Duration;

use indicatif::{HumanBytes, ProgressBar, ProgressDrawTarget, ProgressStyle};

/// Progress on the standard error if that is a terminal; else nothing.
pub struct Progress(ProgressBar);

const TICK: Duration = Duration::from_millis(100);

impl Progress {
    /// Progress of unknown length.
    pub fn spinner(what: &'static str) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        bar.set_style(ProgressStyle::default_spinner());
        bar.set_message(what);
        bar.enable_steady_tick(TICK);
        Self(bar)
    }

    /// Progress over `total` steps.
    pub fn bar(what: &'static str, total: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
        // The template is a constant; a mistake in it shows the default bar.
        if let Ok(style) = ProgressStyle::with_template("{prefix} [{bar:30}] {pos}/{len} {msg} {eta}") {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_prefix(what);
        bar.enable_steady_tick(TICK);
        Self(bar)
    }

    pub fn set(&self, position: u64, bytes: u64) {
        self.0.set_position(position);
        self.0.set_message(HumanBytes(bytes).to_string());
    }

    /// For spinners: objects and bytes so far.
    pub fn seen(&self, what: &str, objects: u64, bytes: u64) {
        self.0
            .set_message(format!("{what}: {objects} objects, {}", HumanBytes(bytes)));
    }

    /// For spinners: any other text.
    pub fn say(&self, text: String) {
        self.0.set_message(text);
    }

    /// Hides the line while other output is written.
    pub fn pause<T>(&self, write: impl FnOnce() -> T) -> T {
        self.0.suspend(write)
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
