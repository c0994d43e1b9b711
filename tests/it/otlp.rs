//! Spans as a collector of OpenTelemetry gets them.

use std::convert::Infallible;
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use kvgate::engine::client::traced;
use kvgate::protocol::Order;
use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span;
use prost::Message;
use tokio::net::TcpListener;

use crate::support::daemon::{Serving, Site, eventually, load, store};
use crate::support::fixture::Prompt;
use crate::support::tls_front::TlsFront;

/// A collector that keeps what it gets.
struct Collector {
    address: SocketAddr,
    spans: Arc<Mutex<Vec<Span>>>,
}

impl Collector {
    async fn new(answers: bool) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let spans: Arc<Mutex<Vec<Span>>> = Arc::default();
        let got = Arc::clone(&spans);
        tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let got = Arc::clone(&got);
                let take = move |request: Request<Incoming>| {
                    let got = Arc::clone(&got);
                    async move {
                        if !answers {
                            std::future::pending::<()>().await;
                        }
                        assert_eq!(request.uri().path(), "/v1/traces");
                        let body = request.into_body().collect().await.unwrap().to_bytes();
                        let told = ExportTraceServiceRequest::decode(body).unwrap();
                        let scopes = told.resource_spans.into_iter().flat_map(|of| of.scope_spans);
                        got.lock().unwrap().extend(scopes.flat_map(|of| of.spans));
                        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
                    }
                };
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(socket), service_fn(take));
                tokio::spawn(connection);
            }
        });
        Self { address, spans }
    }

    fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    fn named(&self, name: &str) -> Vec<Span> {
        let spans = self.spans.lock().unwrap();
        spans.iter().filter(|span| span.name == name).cloned().collect()
    }

    async fn has(&self, name: &str) -> Span {
        eventually(|| !self.named(name).is_empty()).await;
        self.named(name).remove(0)
    }

    fn parts_of(&self, span: &Span, name: &str) -> Vec<Span> {
        let parts = self.named(name).into_iter();
        parts.filter(|part| part.parent_span_id == span.span_id).collect()
    }
}

fn about(span: &Span, key: &str) -> String {
    let found = span.attributes.iter().find(|attribute| attribute.key == key);
    let value = found.and_then(|attribute| attribute.value.as_ref()?.value.clone());
    match value {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        _ => panic!("{span:?} has no {key}"),
    }
}

async fn outcome(serving: &Serving, outcome: &str) -> u64 {
    let text = serving.client.get("/metrics").await.unwrap();
    let text = String::from_utf8(text.to_vec()).unwrap();
    let line = format!("kvgate_otlp_spans_total{{outcome=\"{outcome}\"}} ");
    let line = text.lines().find_map(|found| found.strip_prefix(&line));
    line.unwrap().parse().unwrap()
}

const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";

/// A caller's span, sampled or not.
fn parent(span: &str, flags: &str) -> String {
    format!("00-{TRACE}-{span}-{flags}")
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lookups_loads_and_stores_are_parts_of_their_callers_traces() {
    let (site, collector) = (Site::new().await, Collector::new(true).await);
    let endpoint = collector.endpoint();
    let prompt = Prompt::new(3);
    // None of its own: only those whose caller traces.
    let settings = [("otlp.endpoint", endpoint.as_str()), ("otlp.sample", "0")];
    {
        let serving = site.serve(&settings).await;
        serving.ready().await;
        let engine = serving.attach("writer").await;
        let caller = parent("00f067aa0ba902b7", "01");
        traced(Some(&caller), store(&serving.client, &engine, &prompt)).await;
        serving.flush().await;
        drop(engine);
        // What waits is sent before the end.
        serving.end().await;
    }
    let stored = collector.named("store").remove(0);
    assert_eq!(
        (hex(&stored.trace_id), hex(&stored.parent_span_id)),
        (TRACE.to_owned(), "00f067aa0ba902b7".to_owned())
    );
    assert_eq!(about(&stored, "kvgate.instance"), "writer");
    let lowered = collector.parts_of(&stored, "lower");
    assert_eq!(lowered.len(), 3);
    for lower in &lowered {
        assert_eq!(about(lower, "kvgate.outcome"), "stored");
        assert!(lower.events.iter().any(|event| event.name == "sealed"));
        assert!(stored.start_time_unix_nano <= lower.start_time_unix_nano);
        assert!(lower.end_time_unix_nano <= stored.end_time_unix_nano + 1_000_000);
        let put = collector.parts_of(lower, "PUT").remove(0);
        let requests = collector.parts_of(&put, "request");
        assert!(
            requests
                .iter()
                .any(|request| about(request, "http.response.status_code") == "200")
        );
        assert!(about(&requests[0], "server.address").starts_with("127.0.0.1:"));
    }

    let serving = site.serve(&settings).await;
    serving.ready().await;
    let engine = serving.attach("reader").await;
    let caller = parent("00f067aa0ba902b8", "01");
    let look = serving
        .client
        .lookup_space(&prompt.space, &prompt.hashes, "strategy=exact");
    assert_eq!(traced(Some(&caller), look).await.unwrap().prefix, 3);
    traced(Some(&caller), load(&engine, &prompt, "r#1", Order::Chunk)).await;
    let lookup = collector.has("lookup").await;
    assert_eq!(
        (hex(&lookup.trace_id), about(&lookup, "kvgate.prefix")),
        (TRACE.to_owned(), "3".to_owned())
    );
    let probes = collector.parts_of(&lookup, "probe");
    assert_eq!(probes.len(), 3);
    assert!(
        probes
            .iter()
            .all(|probe| about(probe, "kvgate.answer") == "present")
    );
    let loaded = collector.has("load").await;
    assert_eq!(hex(&loaded.parent_span_id), "00f067aa0ba902b8");
    assert_eq!(
        (about(&loaded, "kvgate.load"), about(&loaded, "kvgate.loaded")),
        ("r#1".to_owned(), "3 s3".to_owned())
    );
    let gets = collector.parts_of(&loaded, "GET");
    assert_eq!(gets.len(), collector.parts_of(&loaded, "verify").len());
    for get in &gets {
        assert!(about(get, "kvgate.range").contains('-'));
        assert_eq!(
            about(
                &collector.parts_of(get, "request")[0],
                "http.response.status_code"
            ),
            "206"
        );
    }
    let ids: std::collections::HashSet<_> = collector
        .spans
        .lock()
        .unwrap()
        .iter()
        .map(|span| span.span_id.clone())
        .collect();
    assert_eq!(ids.len(), collector.spans.lock().unwrap().len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_caller_that_is_not_sampled_is_left_alone_and_a_share_of_the_others_is_not() {
    let (site, collector) = (Site::new().await, Collector::new(true).await);
    let front = TlsFront::new(&collector.endpoint());
    let settings = [
        ("otlp.endpoint", front.endpoint.as_str()),
        ("otlp.sample", "100"),
        ("otlp.ca_file", front.ca_file.to_str().unwrap()),
    ];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let prompt = Prompt::new(2);
    let look = || serving.client.lookup_space(&prompt.space, &prompt.hashes, "");
    for caller in [
        parent("00f067aa0ba902b7", "00"),
        "nonsense".to_owned(),
        "00-\u{7f}".to_owned(),
    ] {
        traced(Some(&caller), look()).await.unwrap();
    }
    look().await.unwrap();
    serving.end().await;
    let lookups = collector.named("lookup");
    assert!(
        lookups
            .iter()
            .all(|span| span.parent_span_id.is_empty() && hex(&span.trace_id) != TRACE)
    );
    // The nonsense, twice, and the one without.
    assert_eq!(lookups.len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_collector_that_hangs_or_is_gone_costs_its_spans_only() {
    let hanging = Collector::new(false).await;
    let gone = "http://127.0.0.1:9".to_owned();
    for (endpoint, lost) in [(hanging.endpoint(), "dropped"), (gone, "failed")] {
        let site = Site::new().await;
        let settings = [
            ("otlp.endpoint", endpoint.as_str()),
            ("otlp.sample", "100"),
            ("otlp.queue", "2"),
            ("otlp.timeout", "1s"),
        ];
        let serving = site.serve(&settings).await;
        serving.ready().await;
        let engine = serving.attach("one").await;
        let prompt = Prompt::new(2);
        store(&serving.client, &engine, &prompt).await;
        let mut rounds = 0;
        while outcome(&serving, lost).await == 0 {
            load(&engine, &prompt, &format!("r#{rounds}"), Order::Chunk).await;
            rounds += 1;
            tokio::time::sleep(Duration::from_millis(20)).await;
            assert!(rounds < 500, "no span was {lost}");
        }
        assert_eq!(outcome(&serving, "sent").await, 0);
        drop(engine);
        serving.end().await;
    }
}
