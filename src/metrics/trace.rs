//! Where the time of one call goes, for `kvgate trace` and for OpenTelemetry: spans that the parts of the way leave behind.
//!
//! A call's tasks carry its [`CallTrace`] along. Who does a part of the work [`begin`]s a span and ends it. In a task
//! without a trace that is one look at a task-local value.

use std::future::Future;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures::future::Either;
use serde::Serialize;

tokio::task_local! {
    /// The trace, and the span that new ones are parts of.
    static CURRENT: (Arc<CallTrace>, u32);
}

/// The spans of one load, lookup or store.
pub struct CallTrace {
    began: Instant,
    spans_max: usize,
    /// The number of the latest span.
    last: AtomicU32,
    spans: Mutex<CallSpans>,
    /// None: nobody wants it, or has had it.
    export: Mutex<Option<Export>>,
}

/// Takes a call's spans when it has ended.
pub type Export = Box<dyn FnOnce(EndedCall) + Send>;

/// A word of a span and its value.
pub type Attribute = (&'static str, String);

/// What was noted of a call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CallSpans {
    pub spans: Vec<TraceSpan>,
    /// Spans that came when there were enough.
    pub left_out: u64,
}

/// A call that is over.
#[derive(Debug)]
pub struct EndedCall {
    pub took: Duration,
    pub attributes: Vec<Attribute>,
    pub noted: CallSpans,
}

/// Times are microseconds since the call's start.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TraceSpan {
    /// Unique in the call.
    pub id: u32,
    /// The span that it is a part of; 0: the call.
    pub parent: u32,
    pub name: &'static str,
    pub start_us: u64,
    pub end_us: u64,
    #[serde(serialize_with = "as_map")]
    pub attributes: Vec<Attribute>,
    /// Steps on the way.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub marks: Vec<(&'static str, u64)>,
}

fn as_map<S: serde::Serializer>(attributes: &[Attribute], to: S) -> Result<S::Ok, S::Error> {
    to.collect_map(attributes.iter().map(|(name, value)| (name, value)))
}

/// A span that has not ended. Dropped, it was given up.
pub struct OpenSpan {
    trace: Arc<CallTrace>,
    id: u32,
    parent: u32,
    name: &'static str,
    began: Instant,
    marks: Vec<(&'static str, Instant)>,
    is_open: bool,
}

impl CallTrace {
    /// Keeps at most so many spans, the first ones.
    pub fn new(spans_max: usize, export: Option<Export>) -> Arc<Self> {
        Arc::new(Self {
            began: Instant::now(),
            spans_max,
            last: AtomicU32::new(0),
            spans: Mutex::default(),
            export: Mutex::new(export),
        })
    }

    /// Runs it as a part of this call: the tasks that it starts carry the trace along.
    pub fn run<T>(self: &Arc<Self>, part: impl FnOnce() -> T) -> T {
        CURRENT.sync_scope((Arc::clone(self), 0), part)
    }

    pub fn elapsed(&self) -> Duration {
        self.began.elapsed()
    }

    pub fn noted(&self) -> CallSpans {
        self.lock().clone()
    }

    /// Something that took no time.
    pub fn note(&self, name: &'static str, attributes: Vec<Attribute>) {
        let (id, now) = (self.next(), Instant::now());
        self.add((id, 0), name, (now, now), &[], attributes);
    }

    /// The call has ended: whoever wants its spans gets them, once. It also ends when nobody has the trace any more.
    pub fn end(&self, attributes: Vec<Attribute>) {
        let export = self.export.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(export) = export {
            export(EndedCall {
                took: self.elapsed(),
                attributes,
                noted: self.noted(),
            });
        }
    }

    fn next(&self) -> u32 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn add(
        &self,
        (id, parent): (u32, u32),
        name: &'static str,
        (began, ended): (Instant, Instant),
        marks: &[(&'static str, Instant)],
        attributes: Vec<Attribute>,
    ) {
        let since = |at: Instant| {
            let time = at.saturating_duration_since(self.began);
            u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
        };
        let mut noted = self.lock();
        if noted.spans.len() >= self.spans_max {
            noted.left_out += 1;
            return;
        }
        noted.spans.push(TraceSpan {
            id,
            parent,
            name,
            start_us: since(began),
            end_us: since(ended),
            attributes,
            marks: marks.iter().map(|(name, at)| (*name, since(*at))).collect(),
        });
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, CallSpans> {
        self.spans.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for CallTrace {
    fn drop(&mut self) {
        self.end(Vec::new());
    }
}

impl OpenSpan {
    fn new(trace: Arc<CallTrace>, parent: u32, name: &'static str) -> Self {
        Self {
            id: trace.next(),
            trace,
            parent,
            name,
            began: Instant::now(),
            marks: Vec::new(),
            is_open: true,
        }
    }

    fn close(&mut self, attributes: Vec<Attribute>) {
        self.is_open = false;
        let ids = (self.id, self.parent);
        self.trace.add(
            ids,
            self.name,
            (self.began, Instant::now()),
            &self.marks,
            attributes,
        );
    }
}

impl Drop for OpenSpan {
    fn drop(&mut self) {
        if self.is_open {
            self.close(vec![("error", "given up".to_owned())]);
        }
    }
}

/// A part of the current call begins; None: nobody wants to know.
pub fn begin(name: &'static str) -> Option<OpenSpan> {
    let (trace, parent) = CURRENT.try_with(Clone::clone).ok()?;
    Some(OpenSpan::new(trace, parent, name))
}

/// A part of this span begins.
pub fn begin_part(span: Option<&OpenSpan>, name: &'static str) -> Option<OpenSpan> {
    span.map(|span| OpenSpan::new(Arc::clone(&span.trace), span.id, name))
}

/// The same future, with the current trace, if there is one: for a task that is a part of the call.
pub fn carry<F: Future>(future: F) -> impl Future<Output = F::Output> {
    scope(CURRENT.try_with(Clone::clone).ok(), future)
}

/// The same future, whose spans are parts of this one.
pub fn within<F: Future>(span: Option<&OpenSpan>, future: F) -> impl Future<Output = F::Output> {
    scope(span.map(|span| (Arc::clone(&span.trace), span.id)), future)
}

/// The same future, as a part of this call.
pub fn part_of<F: Future>(trace: Option<Arc<CallTrace>>, future: F) -> impl Future<Output = F::Output> {
    scope(trace.map(|trace| (trace, 0)), future)
}

fn scope<F: Future>(of: Option<(Arc<CallTrace>, u32)>, future: F) -> impl Future<Output = F::Output> {
    match of {
        Some(of) => Either::Left(CURRENT.scope(of, future)),
        None => Either::Right(future),
    }
}

/// Ends a span that may not be there. `attributes` are only made where it is.
pub fn end(span: Option<OpenSpan>, attributes: impl FnOnce() -> Vec<Attribute>) {
    if let Some(mut span) = span {
        span.close(attributes());
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

    fn about(value: &str) -> Vec<Attribute> {
        vec![("about", value.to_owned())]
    }

    #[tokio::test]
    async fn spans_are_of_the_call_whose_task_they_are_in() {
        assert!(begin("nobody's").is_none());
        let (one, other) = (CallTrace::new(9, None), CallTrace::new(9, None));
        let task = |trace: &Arc<CallTrace>| {
            trace.run(|| {
                tokio::spawn(carry(async {
                    let mut span = begin("part");
                    tokio::task::yield_now().await;
                    mark(&mut span, "half");
                    let inner = async { end(begin("inner"), || about("x")) };
                    within(span.as_ref(), tokio::spawn(carry(inner))).await.unwrap();
                    let nested = within(span.as_ref(), async { end(begin("nested"), || about("z")) });
                    nested.await;
                    end(span, || about("y"));
                }))
            })
        };
        let (first, second) = (task(&one), task(&other));
        first.await.unwrap();
        second.await.unwrap();
        for trace in [one, other] {
            let spans = trace.noted().spans;
            let names: Vec<_> = spans
                .iter()
                .map(|span| (span.name, span.attributes[0].1.as_str()))
                .collect();
            assert_eq!(names, [("inner", "x"), ("nested", "z"), ("part", "y")]);
            let part = &spans[2];
            assert_eq!((part.parent, spans[0].parent, spans[1].parent), (0, 0, part.id));
            assert_eq!(part.marks[0].0, "half");
            assert!(part.start_us <= part.marks[0].1 && part.marks[0].1 <= part.end_us);
        }
    }

    #[test]
    fn only_the_first_spans_are_kept_and_the_others_counted() {
        let trace = CallTrace::new(2, None);
        for number in 0..5 {
            trace.note("n", about(&number.to_string()));
        }
        let noted = trace.noted();
        let values: Vec<_> = noted
            .spans
            .into_iter()
            .map(|span| span.attributes[0].1.clone())
            .collect();
        assert_eq!(
            (values, noted.left_out),
            (vec!["0".to_owned(), "1".to_owned()], 3)
        );
    }

    #[tokio::test]
    async fn a_call_is_exported_once_and_what_it_gave_up_is_in_it() {
        for ends in [true, false] {
            let (tell, told) = std::sync::mpsc::channel();
            let export: Export = Box::new(move |call| tell.send(call).unwrap());
            let trace = CallTrace::new(9, Some(export));
            let waiting = part_of(Some(Arc::clone(&trace)), async {
                let _span = begin("wait");
                std::future::pending::<()>().await;
            });
            assert!(
                tokio::time::timeout(Duration::from_millis(1), waiting)
                    .await
                    .is_err()
            );
            if ends {
                trace.end(about("done"));
                trace.end(about("again"));
            }
            drop(trace);
            let call: EndedCall = told.recv().unwrap();
            assert_eq!(call.attributes, if ends { about("done") } else { Vec::new() });
            assert_eq!(call.noted.spans[0].attributes, [("error", "given up".to_owned())]);
            assert!(told.recv().is_err());
        }
    }
}
