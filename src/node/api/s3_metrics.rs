//! The metrics of S3, of its name and of its addresses.

use super::exposition::Families;
use super::metrics::each;
use crate::node::Status;
use crate::s3::dns::NameState;
use crate::s3::fanout::{EndpointState, Requests};

pub fn s3(text: &mut Families, status: &Status) {
    let s3 = &status.s3;
    text.gauge(
        "kvgate_s3_answered",
        "1 if S3 has answered since the start.",
        u64::from(s3.answered),
    );
    let requests = &s3.requests;
    let kinds = [
        ("head", requests.head),
        ("attributes", requests.attributes),
        ("get", requests.get),
        ("put", requests.put),
        ("list", requests.list),
        ("delete", requests.delete),
        ("bucket", requests.bucket),
    ];
    let lines = kinds.map(|(kind, count)| (kind.to_owned(), count));
    text.lines(
        "kvgate_s3_requests_total",
        "counter",
        "Requests sent.",
        "kind",
        &lines,
    );
    totals(text, &s3.totals);
    text.gauge(
        "kvgate_existence_entries",
        "Chunks that are known to exist or not.",
        s3.existence_entries as u64,
    );
    names(text, &s3.names);
    ended(text, &s3.endpoints);
    let latencies = s3.endpoints.iter();
    let latencies = latencies.filter_map(|one| Some((one.address.to_string(), one.latency_us?)));
    text.seconds(
        "kvgate_endpoint_latency_seconds",
        "Time until an answer begins, lately; none before the first.",
        "address",
        &latencies.collect::<Vec<_>>(),
    );
    let mut of = each(text, "address", &s3.endpoints, |one| one.address.to_string());
    of(
        "kvgate_endpoint_up",
        "gauge",
        "1 if its breaker is closed.",
        &|one| u64::from(one.works()),
    );
    of(
        "kvgate_endpoint_window_bytes",
        "gauge",
        "Bytes that may be in flight.",
        &|one| one.window_bytes as u64,
    );
    of(
        "kvgate_endpoint_in_flight_bytes",
        "gauge",
        "Bytes in flight.",
        &|one| one.in_flight_bytes as u64,
    );
    of(
        "kvgate_endpoint_throughput_bytes_per_second",
        "gauge",
        "Throughput of bodies, lately.",
        &|one| one.bytes_per_second,
    );
    of("kvgate_endpoint_requests_total", "counter", "Requests.", &|one| {
        one.totals.total()
    });
    of(
        "kvgate_endpoint_failed_total",
        "counter",
        "Requests that failed there.",
        &|one| one.totals.failed + one.totals.lost + one.totals.timed_out + one.totals.throttled,
    );
    of(
        "kvgate_endpoint_retries_total",
        "counter",
        "Requests that were retries.",
        &|one| one.totals.retries,
    );
    of(
        "kvgate_endpoint_hedges_total",
        "counter",
        "Requests that were hedges.",
        &|one| one.totals.hedges,
    );
    of(
        "kvgate_endpoint_moved_bytes_total",
        "counter",
        "Bytes of bodies.",
        &|one| one.totals.bytes,
    );
}

/// What DNS says.
fn names(text: &mut Families, names: &[NameState]) {
    let mut of = each(text, "name", names, |one| one.name.clone());
    of(
        "kvgate_dns_addresses",
        "gauge",
        "Addresses of S3 by its name; the last good answer's.",
        &|one| one.addresses as u64,
    );
    of(
        "kvgate_dns_age_seconds",
        "gauge",
        "Since the last good answer of DNS; 0 before it, and for an address that needs no DNS.",
        &|one| one.age_seconds.unwrap_or(0),
    );
    of(
        "kvgate_dns_failing",
        "gauge",
        "1 if the last lookup of the name failed.",
        &|one| u64::from(one.error.is_some()),
    );
}

/// Requests to all addresses, also to those that have left: names whose addresses change leave series by address that end soon.
fn totals(text: &mut Families, totals: &Requests) {
    text.head("kvgate_s3_ended_total", "counter", ENDED);
    for (outcome, count) in ends(totals) {
        text.add(&[("outcome", outcome)], count);
    }
    text.counter(
        "kvgate_s3_retries_total",
        "Requests that were retries.",
        totals.retries,
    );
    text.counter(
        "kvgate_s3_hedges_total",
        "Requests that were hedges.",
        totals.hedges,
    );
    text.counter("kvgate_s3_moved_bytes_total", "Bytes of bodies.", totals.bytes);
}

/// One line for each address and way to end, from 0: a rate sees the first failure.
fn ended(text: &mut Families, endpoints: &[EndpointState]) {
    text.head("kvgate_endpoint_ended_total", "counter", ENDED);
    for one in endpoints {
        for (outcome, count) in ends(&one.totals) {
            text.add(
                &[("address", &one.address.to_string()), ("outcome", outcome)],
                count,
            );
        }
    }
}

const ENDED: &str = "Requests by how they ended: ok, refused (4xx), denied (401 or 403, also for a quota that is used up), \
                     throttled (429 or 503), failed (other 5xx), lost (no connection or a broken one), timed_out, given_up (not waited for any more).";

fn ends(totals: &Requests) -> [(&'static str, u64); 8] {
    [
        ("ok", totals.ok),
        ("refused", totals.refused),
        ("denied", totals.denied),
        ("throttled", totals.throttled),
        ("failed", totals.failed),
        ("lost", totals.lost),
        ("timed_out", totals.timed_out),
        ("given_up", totals.given_up),
    ]
}
