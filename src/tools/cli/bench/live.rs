//! The line on a terminal that tells how far a phase is and how fast, twice a second.

use std::io::{IsTerminal, stderr};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::JoinHandle;

use crate::tools::bench::{Live, UnderWay};
use crate::tools::cli::progress::Progress;

/// Often enough for people; each update takes a lock for every request in flight.
const EVERY: Duration = Duration::from_millis(500);

/// The progress line, on a terminal.
pub struct LiveLine(Option<(Arc<Progress>, JoinHandle<()>)>);

impl LiveLine {
    pub fn start(under_way: UnderWay) -> Self {
        if !stderr().is_terminal() {
            return Self(None);
        }
        let progress = Arc::new(Progress::spinner("starting"));
        let shown = Arc::clone(&progress);
        let task = tokio::spawn(async move {
            let mut before: Option<Live> = None;
            loop {
                tokio::time::sleep(EVERY).await;
                let now = under_way.live();
                match &now {
                    Some(now) => shown.say(text(before.as_ref(), now)),
                    None => shown.say("getting ready".into()),
                }
                before = now;
            }
        });
        Self(Some((progress, task)))
    }

    /// Hides the line while other output is written.
    pub fn pause<T>(&self, write: impl FnOnce() -> T) -> T {
        match &self.0 {
            Some((progress, _)) => progress.pause(write),
            None => write(),
        }
    }
}

impl Drop for LiveLine {
    fn drop(&mut self) {
        if let Some((_, task)) = &self.0 {
            task.abort();
        }
    }
}

/// Speeds since the last update, or since the phase began.
fn text(before: Option<&Live>, now: &Live) -> String {
    let earlier = before.filter(|before| before.phase == now.phase && before.seconds < now.seconds);
    let (seconds, ops, bytes) = earlier.map_or((0.0, 0, 0), |live| (live.seconds, live.ops, live.bytes));
    let took = (now.seconds - seconds).max(1e-9);
    let total = now.total.map(|total| format!("/{total}")).unwrap_or_default();
    format!(
        "{} {}{total}  {:.0} MiB/s  {:.0} IOPS  {} errors  {:.0} s",
        now.phase.name(),
        now.ops,
        (now.bytes.saturating_sub(bytes)) as f64 / f64::from(1 << 20) / took,
        now.ops.saturating_sub(ops) as f64 / took,
        now.errors,
        now.seconds,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tools::bench::BenchPhase;

    #[test]
    fn speeds_are_those_since_the_last_look() {
        let live = |seconds: f64, ops: u64, total| Live {
            phase: BenchPhase::Read,
            seconds,
            total,
            ops,
            bytes: ops << 20,
            errors: 0,
        };
        let first = live(0.5, 10, Some(64));
        assert_eq!(text(None, &first), "read 10/64  20 MiB/s  20 IOPS  0 errors  0 s");
        let next = live(1.0, 30, None);
        assert_eq!(
            text(Some(&first), &next),
            "read 30  40 MiB/s  40 IOPS  0 errors  1 s"
        );
        assert_eq!(
            text(Some(&next), &first),
            "read 10/64  20 MiB/s  20 IOPS  0 errors  0 s",
            "a new phase"
        );
    }
}
