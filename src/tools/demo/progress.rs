//! The demo's progress bars.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

const BYTES: &str = "{prefix:>16} {wide_bar} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec}";
const CHUNKS: &str = "{prefix:>16} {wide_bar} {pos}/{len} chunks";

/// One bar on stderr for the phase under way; nothing if stderr is no terminal.
pub(super) struct DemoProgress {
    bar: ProgressBar,
    visible: bool,
}

impl DemoProgress {
    pub fn hidden() -> Self {
        Self {
            bar: ProgressBar::hidden(),
            visible: false,
        }
    }

    pub fn visible() -> Self {
        Self {
            bar: ProgressBar::hidden(),
            visible: true,
        }
    }

    /// Starts a bar; ends the bar before.
    pub fn start(&mut self, name: &'static str, total: u64, bytes: bool) {
        self.end();
        if !self.visible {
            return;
        }
        self.bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr()).with_prefix(name);
        if let Ok(style) = ProgressStyle::with_template(if bytes { BYTES } else { CHUNKS }) {
            self.bar.set_style(style);
        }
    }

    pub fn add(&self, amount: u64) {
        self.bar.inc(amount);
    }

    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for DemoProgress {
    fn drop(&mut self) {
        self.end();
    }
}
