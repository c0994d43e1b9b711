//! Where the time of one load goes, for `kvgate trace`: spans that the parts of the way leave behind.
//!
//! A load's tasks carry its [`LoadTrace`] along. Who does a part of the work [`begin`]s a span and ends it. In a task
//! without a trace that is one look at a task-local value.

use std::fmt::Display;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::Either;
use serde::Serialize;

tokio::task_local! {
    static CURRENT: Arc<LoadTrace>;
}

/// The spans of one load.
#[derive(Debug)]
pub struct LoadTrace {
    began: Instant,
    spans_max: usize,
    spans: Mutex<Vec<TraceSpan>>,
}

/// Times are microseconds since the load's start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TraceSpan {
    pub name: &'static str,
    pub detail: String,
    pub start_us: u64,
    pub end_us: u64,
    /// Steps on the way.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub marks: Vec<(&'static str, u64)>,
}

/// A span that has not ended. Dropped, it leaves nothing.
#[derive(Debug)]
pub struct OpenSpan {
    trace: Arc<LoadTrace>,
    name: &'static str,
    began: Instant,
    marks: Vec<(&'static str, Instant)>,
}

impl LoadTrace {
    /// Keeps at most so many spans, the first ones.
    pub fn new(spans_max: usize) -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            spans_max,
            spans: Mutex::default(),
        })
    }

    /// Runs it as a part of this load: the tasks that it starts carry the trace along.
    pub fn run<T>(self: &Arc<Self>, part: impl FnOnce() -> T) -> T {
        CURRENT.sync_scope(Arc::clone(self), part)
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    pub fn spans(&self) -> Vec<TraceSpan> {
        self.lock().clone()
    }

    /// Something that took no time.
    pub fn note(&self, name: &'static str, detail: impl Display) {
        let now = Instant::now();
        self.add(name, now, now, &[], detail);
    }

    fn add(
        &self,
        name: &'static str,
        began: Instant,
        ended: Instant,
        marks: &[(&'static str, Instant)],
        detail: impl Display,
    ) {
        let since = |at: Instant| {
            let time = at.saturating_duration_since(self.began);
            u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
        };
        let detail = detail.to_string();
        let mut spans = self.lock();
        if spans.len() < self.spans_max {
            spans.push(TraceSpan {
                name,
                detail,
                start_us: since(began),
                end_us: since(ended),
                marks: marks.iter().map(|(name, at)| (*name, since(*at))).collect(),
            });
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<TraceSpan>> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A part of the current load begins; None: nobody wants to know.
pub fn begin(name: &'static str) -> Option<OpenSpan> {
    let trace = CURRENT.try_with(Arc::clone).ok()?;
    Some(OpenSpan {
        trace,
        name,
        began: Instant::now(),
        marks: Vec::new(),
    })
}

/// The same future, with the current trace, if there is one: for a task that is a part of the load.
pub fn carry<F: Future>(future: F) -> impl Future<Output = F::Output> {
    match CURRENT.try_with(Arc::clone) {
        Ok(trace) => Either::Left(CURRENT.scope(trace, future)),
        Err(_) => Either::Right(future),
    }
}

/// Ends a span that may not be there. `detail` is only made where it is.
pub fn end<D: Display>(span: Option<OpenSpan>, detail: impl FnOnce() -> D) {
    if let Some(span) = span {
        span.trace
            .add(span.name, span.began, Instant::now(), &span.marks, detail());
    }
}

/// A step on the way of a span that may not be there.
pub fn mark(span: &mut Option<OpenSpan>, name: &'static str) {
    if let Some(span) = span {
        span.marks.push((name, Instant::now()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn spans_are_of_the_load_whose_task_they_are_in() {
        assert!(begin("nobody's").is_none());
        let (one, other) = (LoadTrace::new(9), LoadTrace::new(9));
        let task = |trace: &Arc<LoadTrace>| {
            trace.run(|| {
                tokio::spawn(carry(async {
                    let mut span = begin("part");
                    tokio::task::yield_now().await;
                    mark(&mut span, "half");
                    tokio::spawn(carry(async { end(begin("inner"), || "x") }))
                        .await
                        .unwrap();
                    end(span, || "y");
                }))
            })
        };
        let (first, second) = (task(&one), task(&other));
        first.await.unwrap();
        second.await.unwrap();
        for trace in [one, other] {
            let spans = trace.spans();
            let names: Vec<_> = spans
                .iter()
                .map(|span| (span.name, span.detail.as_str()))
                .collect();
            assert_eq!(names, [("inner", "x"), ("part", "y")]);
            let part = &spans[1];
            assert_eq!(part.marks[0].0, "half");
            assert!(part.start_us <= part.marks[0].1 && part.marks[0].1 <= part.end_us);
        }
    }

    #[test]
    fn only_the_first_spans_are_kept() {
        let trace = LoadTrace::new(2);
        for number in 0..5 {
            trace.note("n", number);
        }
        let details: Vec<_> = trace.spans().into_iter().map(|span| span.detail).collect();
        assert_eq!(details, ["0", "1"]);
    }
}
