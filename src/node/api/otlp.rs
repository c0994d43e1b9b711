//! Spans for OpenTelemetry: lookups, loads and stores that are sampled go to a collector by OTLP, over HTTP.
//!
//! A call with a `traceparent` is a part of its caller's trace, and sampled if that is. Of the others a share is. A
//! call's spans go when it has ended, through a bounded queue: what finds no room is dropped and counted, so that a
//! collector that is slow or gone costs nothing but its spans.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use hyper::HeaderMap;
use hyper_rustls::HttpsConnectorBuilder;
use opentelemetry::propagation::TextMapPropagator;
use opentelemetry::trace::{
    Event, SpanContext, SpanId, SpanKind, Status, TraceContextExt, TraceFlags, TraceId,
};
use opentelemetry::{Context, InstrumentationScope, KeyValue};
use opentelemetry_http::HeaderExtractor;
use opentelemetry_http::hyper::HyperClient;
use opentelemetry_otlp::{SpanExporter as OtlpExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::propagation::TraceContextPropagator;
use opentelemetry_sdk::trace::{
    IdGenerator, RandomIdGenerator, Sampler, SamplingDecision, ShouldSample, SpanData, SpanEvents,
    SpanExporter, SpanLinks,
};
use rustls::ClientConfig;
use tokio::sync::{Notify, mpsc};
use tokio::task::JoinHandle;
use tokio::time::Instant;

use crate::cache::episode::Episode;
use crate::metrics::trace::{Attribute, EndedCall, Export, TraceSpan};
use crate::node::host_name;
use crate::s3::net::client_config;

/// Where spans go.
#[derive(Debug, Clone)]
pub struct OtlpOptions {
    /// Of the collector, such as `http://127.0.0.1:4318`.
    pub endpoint: String,
    /// Of the calls without a trace of their caller.
    pub sample_percent: u32,
    /// Spans that wait to be sent or are under way.
    pub queue: u64,
    /// Of one request to the collector.
    pub timeout: Duration,
    /// Further authorities to trust.
    pub ca_file: Option<PathBuf>,
    /// How often the log tells of a collector that fails.
    pub log_repeat: Duration,
}

/// See the [module](self).
pub struct Otlp {
    sampler: Sampler,
    propagator: TraceContextPropagator,
    scope: InstrumentationScope,
    queue: mpsc::UnboundedSender<Vec<SpanData>>,
    counts: Arc<OtlpCounts>,
    ending: Arc<Notify>,
    task: Mutex<Option<JoinHandle<()>>>,
}

/// Spans, since the start.
#[derive(Debug)]
struct OtlpCounts {
    /// In the queue and on the way to the collector.
    waiting: AtomicU64,
    waiting_max: u64,
    sent: AtomicU64,
    /// The queue was full.
    dropped: AtomicU64,
    /// The collector did not take them.
    failed: AtomicU64,
}

/// A call that is to be exported.
pub struct Sampled {
    context: SpanContext,
    parent: SpanContext,
    name: &'static str,
    began: SystemTime,
    scope: InstrumentationScope,
    queue: mpsc::UnboundedSender<Vec<SpanData>>,
    counts: Arc<OtlpCounts>,
}

/// Spans that are sent together, at most.
const TOGETHER: usize = 2048;
/// How long spans wait for others.
const PAUSE: Duration = Duration::from_secs(1);

impl Otlp {
    /// Starts the task that sends. The collector is not asked for anything yet.
    pub fn start(options: &OtlpOptions) -> Result<Self, String> {
        let tls = client_config(options.ca_file.as_deref());
        let tls = tls.map_err(|error| error.to_string().replace("[s3] ca_file", "[otlp] ca_file"))?;
        let mut tls = ClientConfig::clone(&tls);
        // The connector sets them.
        tls.alpn_protocols.clear();
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls)
            .https_or_http()
            .enable_http1()
            .build();
        let url = format!("{}/v1/traces", options.endpoint.trim_end_matches('/'));
        let exporter = OtlpExporter::builder()
            .with_http()
            .with_http_client(HyperClient::new(connector, options.timeout, None))
            .with_endpoint(url)
            .with_timeout(options.timeout)
            .build();
        let mut exporter = exporter.map_err(|error| format!("[otlp] endpoint: {error}"))?;
        let resource = Resource::builder()
            .with_service_name("kvgate")
            .with_attributes([
                KeyValue::new("host.name", host_name()),
                KeyValue::new("service.version", env!("CARGO_PKG_VERSION")),
            ])
            .build();
        exporter.set_resource(&resource);
        // `waiting` bounds it, in spans.
        let (queue, waiting) = mpsc::unbounded_channel();
        let counts = Arc::new(OtlpCounts {
            waiting: AtomicU64::new(0),
            waiting_max: options.queue,
            sent: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        });
        let ending: Arc<Notify> = Arc::default();
        let fails = Episode::new(
            "spans did not reach the collector of [otlp] endpoint",
            options.log_repeat,
        );
        let task = tokio::spawn(send(
            exporter,
            waiting,
            Arc::clone(&counts),
            Arc::clone(&ending),
            fails,
        ));
        let share = f64::from(options.sample_percent) / 100.0;
        Ok(Self {
            sampler: Sampler::ParentBased(Box::new(Sampler::TraceIdRatioBased(share))),
            propagator: TraceContextPropagator::new(),
            scope: InstrumentationScope::builder("kvgate").build(),
            queue,
            counts,
            ending,
            task: Mutex::new(Some(task)),
        })
    }

    /// Sends what waits, as far as that is done in time.
    pub async fn end(&self, time: Duration) {
        self.ending.notify_one();
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(task) = task {
            let _ = tokio::time::timeout(time, task).await;
        }
    }

    /// Decides on a call by its headers. None: it is not exported.
    pub fn sample(&self, name: &'static str, headers: &HeaderMap) -> Option<Sampled> {
        let parent = self
            .propagator
            .extract_with_context(&Context::new(), &HeaderExtractor(headers));
        let ids = RandomIdGenerator::default();
        let span = parent.span();
        let parent_context = span.span_context().clone();
        let trace = match parent_context.is_valid() {
            true => parent_context.trace_id(),
            false => ids.new_trace_id(),
        };
        let decided = self
            .sampler
            .should_sample(Some(&parent), trace, name, &SpanKind::Server, &[], &[]);
        if decided.decision != SamplingDecision::RecordAndSample {
            return None;
        }
        Some(Sampled {
            context: SpanContext::new(
                trace,
                ids.new_span_id(),
                TraceFlags::SAMPLED,
                false,
                decided.trace_state,
            ),
            parent: parent_context,
            name,
            began: SystemTime::now(),
            scope: self.scope.clone(),
            queue: self.queue.clone(),
            counts: Arc::clone(&self.counts),
        })
    }

    pub fn counts(&self) -> [(&'static str, u64); 3] {
        let OtlpCounts {
            sent,
            dropped,
            failed,
            ..
        } = &*self.counts;
        [("sent", sent), ("dropped", dropped), ("failed", failed)]
            .map(|(outcome, count)| (outcome, count.load(Ordering::Relaxed)))
    }
}

impl Sampled {
    /// Takes the call's spans, when it has ended. `attributes`: of the call.
    pub fn export(self, attributes: Vec<Attribute>) -> Export {
        Box::new(move |call| {
            let (counts, count) = (&self.counts, call.noted.spans.len() as u64 + 1);
            let waiting = counts.waiting.fetch_add(count, Ordering::Relaxed) + count;
            let has_room = waiting <= counts.waiting_max;
            if !has_room || self.queue.send(self.spans(&attributes, &call)).is_err() {
                counts.waiting.fetch_sub(count, Ordering::Relaxed);
                counts.dropped.fetch_add(count, Ordering::Relaxed);
            }
        })
    }

    fn spans(&self, attributes: &[Attribute], call: &EndedCall) -> Vec<SpanData> {
        let (EndedCall { took, noted, .. }, ids) = (call, RandomIdGenerator::default());
        let mut words = key_values(attributes.iter().chain(&call.attributes));
        if noted.left_out > 0 {
            words.push(KeyValue::new(
                "kvgate.spans_left_out",
                i64::try_from(noted.left_out).unwrap_or(i64::MAX),
            ));
        }
        let root = self.span(
            (self.context.span_id(), self.parent.span_id()),
            self.name,
            (Duration::ZERO, *took),
            words,
        );
        let mut spans = vec![SpanData {
            parent_span_is_remote: self.parent.is_valid(),
            span_kind: SpanKind::Server,
            ..root
        }];
        // Ids are random, and unique enough where the part's own number is added.
        let base = u64::from_be_bytes(ids.new_span_id().to_bytes());
        let id_of = |number: u32| match number {
            0 => self.context.span_id(),
            _ => SpanId::from_bytes(base.wrapping_add(u64::from(number)).max(1).to_be_bytes()),
        };
        let known: std::collections::HashSet<u32> = noted.spans.iter().map(|span| span.id).collect();
        for span in &noted.spans {
            // A part of a span that was left out is one of the call.
            let parent = if known.contains(&span.parent) {
                span.parent
            } else {
                0
            };
            spans.push(self.part(span, (id_of(span.id), id_of(parent))));
        }
        spans
    }

    fn part(&self, of: &TraceSpan, ids: (SpanId, SpanId)) -> SpanData {
        let micros = Duration::from_micros;
        let times = (micros(of.start_us), micros(of.end_us));
        let span = self.span(ids, of.name, times, key_values(of.attributes.iter()));
        let mut events = SpanEvents::default();
        events.events = of
            .marks
            .iter()
            .map(|(name, at)| Event::new(*name, self.began + micros(*at), Vec::new(), 0))
            .collect();
        let is_failed = of.attributes.iter().find(|(name, _)| *name == "error");
        SpanData {
            span_kind: match of.name {
                "request" => SpanKind::Client,
                _ => SpanKind::Internal,
            },
            events,
            status: is_failed.map_or(Status::Unset, |(_, error)| Status::error(error.clone())),
            ..span
        }
    }

    fn span(
        &self,
        (id, parent): (SpanId, SpanId),
        name: &'static str,
        (start, end): (Duration, Duration),
        attributes: Vec<KeyValue>,
    ) -> SpanData {
        SpanData {
            span_context: SpanContext::new(
                self.trace(),
                id,
                TraceFlags::SAMPLED,
                false,
                self.context.trace_state().clone(),
            ),
            parent_span_id: parent,
            parent_span_is_remote: false,
            span_kind: SpanKind::Internal,
            name: name.into(),
            start_time: self.began + start,
            end_time: self.began + end,
            attributes,
            dropped_attributes_count: 0,
            events: SpanEvents::default(),
            links: SpanLinks::default(),
            status: Status::Unset,
            instrumentation_scope: self.scope.clone(),
        }
    }

    fn trace(&self) -> TraceId {
        self.context.trace_id()
    }
}

/// The words whose values are numbers.
const NUMBERS: [&str; 7] = [
    "boundary", "bytes", "chunks", "index", "prefix", "rank", "unknown",
];

/// In OpenTelemetry's words where it has some.
fn key_values<'a>(attributes: impl Iterator<Item = &'a Attribute>) -> Vec<KeyValue> {
    attributes
        .map(|(name, value)| match *name {
            "address" => KeyValue::new("server.address", value.clone()),
            "status" => match value.parse::<i64>() {
                Ok(status) => KeyValue::new("http.response.status_code", status),
                Err(_) => KeyValue::new("http.response.status_code", value.clone()),
            },
            "error" => KeyValue::new("error.message", value.clone()),
            name => {
                let number = value.parse::<i64>().ok().filter(|_| NUMBERS.contains(&name));
                let name = format!("kvgate.{name}");
                match number {
                    Some(number) => KeyValue::new(name, number),
                    None => KeyValue::new(name, value.clone()),
                }
            }
        })
        .collect()
}

/// Sends what comes, some calls together, until nobody can send more.
async fn send(
    exporter: OtlpExporter,
    mut waiting: mpsc::UnboundedReceiver<Vec<SpanData>>,
    counts: Arc<OtlpCounts>,
    ending: Arc<Notify>,
    fails: Episode,
) {
    let (mut spans, mut due, mut is_ending) = (Vec::new(), Instant::now(), false);
    loop {
        tokio::select! {
            // What waits comes before the end.
            biased;
            () = ending.notified(), if !is_ending => {
                (is_ending, due) = (true, Instant::now());
                continue;
            }
            more = waiting.recv() => {
                let Some(more) = more else { return };
                if spans.is_empty() && !is_ending {
                    due = Instant::now() + PAUSE;
                }
                spans.extend(more);
                if spans.len() < TOGETHER {
                    continue;
                }
            }
            () = tokio::time::sleep_until(due), if is_ending || !spans.is_empty() => {
                if spans.is_empty() {
                    return;
                }
            }
        }
        let spans = std::mem::take(&mut spans);
        let count = spans.len() as u64;
        match exporter.export(spans).await {
            Ok(()) => counts.sent.fetch_add(count, Ordering::Relaxed),
            Err(error) => {
                fails.tell(&error);
                counts.failed.fetch_add(count, Ordering::Relaxed)
            }
        };
        counts.waiting.fetch_sub(count, Ordering::Relaxed);
    }
}
