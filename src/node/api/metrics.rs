//! `GET /metrics`, for Prometheus. This file has every name with its unit and meaning, but for those of S3 and of peers.

use std::sync::Arc;

use hyper::StatusCode;
use hyper::header::HeaderValue;

use super::Api;
use super::body::{Reply, bytes};
use super::exposition::{Families, PROTOBUF, TEXT};
use super::figures::Figures;
use super::otlp::Otlp;
use super::{peer_metrics, s3_metrics};
use crate::cache::admission::{AdmissionStats, Declined};
use crate::cache::gateway::{Gateway, RefreshStats};
use crate::node::{GcStats, Status};

/// Reads one figure of a part.
pub(super) type Value<'a, T> = &'a dyn Fn(&T) -> u64;

/// Writes one line for each of several parts of the same kind.
pub(super) fn each<'a, T>(
    text: &'a mut Families,
    label: &'a str,
    parts: &'a [T],
    name: impl Fn(&T) -> String + 'a,
) -> impl FnMut(&str, &str, &str, Value<'_, T>) + 'a {
    move |metric, kind, help, value| {
        let lines: Vec<_> = parts.iter().map(|part| (name(part), value(part))).collect();
        text.lines(metric, kind, help, label, &lines);
    }
}

/// `accept`: of the request.
pub fn metrics(api: &Arc<Api>, accept: Option<&HeaderValue>) -> Reply {
    let mut text = Families::default();
    node(&mut text, &api.node.status());
    text.gauge(
        "kvgate_reload_failed",
        "1 if the last reload (SIGHUP, POST /v1/reload) was refused: what it should have changed may be as before.",
        u64::from(api.node.reload_refused().is_some()),
    );
    engines(&mut text, &api.figures);
    waits(&mut text, api.node.gateway());
    refresh(&mut text, &api.node.gateway().refresh_stats());
    gc(&mut text, api.node.gc());
    tenants(&mut text, api.node.gateway());
    peer_metrics::peers(&mut text, api.node.gateway().peers().map(|peers| &**peers));
    text.gauge(
        "kvgate_api_connections",
        "Connections now.",
        api.connections.count() as u64,
    );
    text.counter(
        "kvgate_api_connections_total",
        "Connections ever.",
        api.connections.total(),
    );
    text.counter(
        "kvgate_api_connections_closed_idle_total",
        "Connections closed because there were too many and they did nothing.",
        api.connections.closed_idle(),
    );
    let (chunks, removals) = api.node.gateway().events().counts();
    text.gauge(
        "kvgate_events_chunks",
        "Chunks of memory and disks whose coming and leaving engines publish.",
        chunks as u64,
    );
    text.gauge(
        "kvgate_events_removals",
        "Chunks that left and that engines can still read of.",
        removals as u64,
    );
    otlp(&mut text, api.otlp.as_ref());
    // Prometheus asks for it where native histograms are turned on.
    let accepts = accept.and_then(|accept| accept.to_str().ok()).unwrap_or_default();
    match accepts.contains("application/vnd.google.protobuf") && accepts.contains("encoding=delimited") {
        true => bytes(StatusCode::OK, PROTOBUF, text.protobuf().into()),
        false => bytes(StatusCode::OK, TEXT, text.text().into()),
    }
}

fn otlp(text: &mut Families, otlp: Option<&Otlp>) {
    let none = [("sent", 0), ("dropped", 0), ("failed", 0)];
    let lines = otlp
        .map_or(none, Otlp::counts)
        .map(|(outcome, count)| (outcome.to_owned(), count));
    text.lines(
        "kvgate_otlp_spans_total",
        "counter",
        "Spans for the collector: sent, dropped because too many waited, or failed because it did not take them.",
        "outcome",
        &lines,
    );
}

/// Series of each metric about tenants; the others are one.
const TENANTS_MAX: usize = 20;

/// What each tenant has, those with the most.
fn tenants(text: &mut Families, gateway: &Gateway) {
    let [memory, disk] = gateway.tenants().map(largest);
    let help = "Bytes that a tenant has in memory: the 20 with the most, and all others together.";
    text.lines("kvgate_memory_tenant_bytes", "gauge", help, "tenant", &memory);
    let help = "Bytes that a tenant has on disks: the 20 with the most, and all others together.";
    text.lines("kvgate_disk_tenant_bytes", "gauge", help, "tenant", &disk);
}

fn largest(mut tenants: Vec<(String, u64)>) -> Vec<(String, u64)> {
    tenants.sort_by(|one, other| (other.1, &one.0).cmp(&(one.1, &other.0)));
    let others = tenants.split_off(tenants.len().min(TENANTS_MAX));
    if !others.is_empty() {
        let bytes = others.iter().map(|(_, bytes)| bytes).sum();
        tenants.push(("(others)".to_owned(), bytes));
    }
    tenants
}

/// What engines asked for and got.
fn engines(text: &mut Families, figures: &Figures) {
    let one = |times: &crate::metrics::Histogram| [(None, times.read())];
    text.times(
        "kvgate_lookup_seconds",
        "Lookups, until the answer.",
        one(&figures.lookup),
    );
    text.counts(
        "kvgate_lookup_chunks_total",
        "Chunks of lookups, by where they were found: in memory, on disk, at a peer, on S3, nowhere (absent), or not known by the \
         deadline (unknown). Of a model with several kinds of KV, those of the first full kind.",
        "found",
        &figures.lookup_chunks,
    );
    text.times(
        "kvgate_load_first_seconds",
        "Loads, until the first chunk may be read.",
        one(&figures.load_first),
    );
    text.times(
        "kvgate_load_seconds",
        "Loads, until their end.",
        one(&figures.load),
    );
    text.counts(
        "kvgate_load_chunks_total",
        "Chunks that engines loaded, by the tier that they came from. Each rank counts.",
        "tier",
        &figures.loaded_chunks,
    );
    text.counts(
        "kvgate_load_bytes_total",
        "Their bytes.",
        "tier",
        &figures.loaded_bytes,
    );
    text.counts(
        "kvgate_load_misses_total",
        "Chunks that loads did not get, by reason: docs/API.md has their meaning.",
        "reason",
        &figures.missed_chunks,
    );
    text.counts(
        "kvgate_store_chunks_total",
        "Chunks that engines wanted to store, by the answer: a slot (reserved), present, pending, full, other_rank.",
        "answer",
        &figures.reserved_chunks,
    );
    text.counts(
        "kvgate_store_commits_total",
        "Commits of slots: the chunk is a hit from then on (published), another rank's share is still to come (share), refused.",
        "outcome",
        &figures.committed_chunks,
    );
}

/// Where time goes.
fn waits(text: &mut Families, gateway: &Gateway) {
    let by = |label| move |(word, times)| (Some((label, word)), times);
    text.times(
        "kvgate_wait_seconds",
        "Waits of loads, by queue: for credit ([load] window, engine_share), for another load's fetch (flight), for room in \
         the arena, for the turn of a GET ([load] in_flight), for room at an endpoint (window) and a connection ([s3] \
         connections), both also of stores, for a disk's turn ([disk] depth). Where there is no queue to wait in, only arena \
         and turn note something.",
        gateway.waits().into_iter().map(by("queue")),
    );
    text.times(
        "kvgate_behind_seconds",
        "From a chunk's commit until the lowest tier has it, or it was given up.",
        [(None, gateway.behind_times())],
    );
    text.times(
        "kvgate_s3_request_seconds",
        "Requests to S3 until their answer or failure, with the wait for window and connection. Each attempt counts.",
        gateway.request_times().into_iter().map(by("kind")),
    );
}

fn node(text: &mut Families, status: &Status) {
    text.gauge(
        "kvgate_node_ready",
        "1 if the node takes traffic.",
        u64::from(status.not_ready.is_none()),
    );
    text.counter(
        "kvgate_node_uptime_seconds_total",
        "Since the start.",
        status.uptime_seconds,
    );
    let arena = &status.arena.stats;
    text.gauge(
        "kvgate_arena_size_bytes",
        "Bytes for slots.",
        arena.size_bytes as u64,
    );
    text.gauge(
        "kvgate_arena_used_bytes",
        "Of these, taken.",
        arena.used_bytes as u64,
    );
    text.gauge("kvgate_arena_slots", "Slots taken.", arena.slots as u64);
    text.gauge(
        "kvgate_arena_free_run_bytes",
        "The longest run that is free: a larger slot finds no room before others go.",
        status.arena.free_run_bytes as u64,
    );
    text.counter(
        "kvgate_arena_refused_total",
        "Reservations that found no room.",
        arena.refused,
    );
    let memory = &status.tiers.memory;
    text.gauge("kvgate_memory_chunks", "Chunks in memory.", memory.chunks);
    text.gauge("kvgate_memory_used_bytes", "Their bytes.", memory.bytes);
    text.gauge(
        "kvgate_memory_dirty_bytes",
        "Of these, not yet on a lower tier.",
        memory.dirty_bytes,
    );
    text.gauge(
        "kvgate_memory_pinned_chunks",
        "Chunks that were pinned.",
        memory.pinned_chunks,
    );
    text.counter(
        "kvgate_memory_hits_total",
        "Loads of a chunk that was in memory.",
        memory.hits,
    );
    text.counter(
        "kvgate_memory_misses_total",
        "Loads of a chunk that was not.",
        memory.misses,
    );
    text.counter(
        "kvgate_memory_looked_up_total",
        "Chunks that lookups and stores looked for in memory.",
        memory.looked_up,
    );
    text.counter(
        "kvgate_memory_evicted_total",
        "Chunks that made room.",
        memory.evicted,
    );
    text.counter(
        "kvgate_memory_expired_total",
        "Chunks whose time was over.",
        memory.expired,
    );
    behind(text, status);
    admission(text, &status.tiers.admission.unwrap_or_default());
    disk(text, status);
    s3_metrics::s3(text, status);
    slots(text, status);
}

fn behind(text: &mut Families, status: &Status) {
    let behind = &status.tiers.write_behind;
    text.gauge(
        "kvgate_behind_waiting_chunks",
        "Committed, not yet on the lower tiers.",
        behind.waiting_chunks,
    );
    text.gauge(
        "kvgate_behind_waiting_bytes",
        "Their bytes.",
        behind.waiting_bytes,
    );
    text.gauge(
        "kvgate_behind_backlog_chunks",
        "On the disks since an earlier life of this node, not yet on S3.",
        behind.backlog_chunks,
    );
    text.gauge(
        "kvgate_behind_reserved_bytes",
        "Reserved by engines, not committed.",
        behind.reserved_bytes,
    );
    text.counter(
        "kvgate_behind_stored_total",
        "Chunks written to the lower tiers.",
        behind.stored,
    );
    text.counter(
        "kvgate_behind_present_total",
        "Chunks that were there already.",
        behind.present,
    );
    text.counter("kvgate_behind_dropped_total", "Chunks given up.", behind.dropped);
    text.counter(
        "kvgate_behind_lost_total",
        "Of these, chunks whose only file could not be read or was gone.",
        behind.lost,
    );
    text.gauge(
        "kvgate_behind_kept_back_chunks",
        "Committed, and not given to S3 because the configuration says so.",
        behind.kept_back,
    );
    text.counter(
        "kvgate_behind_failed_attempts_total",
        "Attempts that failed, and were made again.",
        behind.failed_attempts,
    );
}

fn refresh(text: &mut Families, stats: &RefreshStats) {
    text.counter(
        "kvgate_refresh_asked_total",
        "Chunks in use whose age S3 was asked for.",
        stats.asked,
    );
    text.counter(
        "kvgate_refresh_chunks_total",
        "Objects written anew in place, before a lifecycle rule takes them.",
        stats.refreshed,
    );
    text.counter(
        "kvgate_refresh_absent_total",
        "Chunks in use that S3 does not have.",
        stats.absent,
    );
    text.counter(
        "kvgate_refresh_failed_total",
        "Requests that failed.",
        stats.failed,
    );
    text.counter(
        "kvgate_refresh_dropped_total",
        "Prefixes in use that found no room in [refresh] queue.",
        stats.dropped,
    );
    text.gauge(
        "kvgate_refresh_waiting_chunks",
        "Chunks in use that wait for that.",
        stats.waiting,
    );
}

fn gc(text: &mut Families, stats: &GcStats) {
    text.gauge(
        "kvgate_gc_leads",
        "1 if this node removes from S3 what is beyond [gc].",
        u64::from(stats.leads()),
    );
    text.counter(
        "kvgate_gc_removed_total",
        "Objects that this node has removed from S3.",
        stats.removed(),
    );
    text.counter(
        "kvgate_gc_removed_bytes_total",
        "Their bytes.",
        stats.removed_bytes(),
    );
    text.counter(
        "kvgate_gc_failed_total",
        "Runs that ended with an error.",
        stats.failed(),
    );
}

/// All zero where `[store] admit` is `all`.
fn admission(text: &mut Families, of: &AdmissionStats) {
    text.counter(
        "kvgate_admission_admitted_chunks_total",
        "Chunks given to S3 by [store] admit = auto.",
        of.admitted_chunks,
    );
    text.counter(
        "kvgate_admission_admitted_bytes_total",
        "Their bytes.",
        of.admitted_bytes,
    );
    text.counter(
        "kvgate_admission_second_chances_total",
        "Of these, chunks that had been declined, and were asked for again.",
        of.second_chances,
    );
    let lines = |value: fn(&Declined) -> u64| {
        let reasons = [
            ("unlikely", &of.unlikely),
            ("budget", &of.budget),
            ("parent", &of.parent),
        ];
        reasons.map(|(reason, declined)| (reason.to_owned(), value(declined)))
    };
    text.lines(
        "kvgate_admission_declined_chunks_total",
        "counter",
        "Decisions against chunks, by reason: likelier chunks use up the budget (unlikely); the chunk was asked for again \
         while the budget was used up (budget); the chunk before it was declined (parent).",
        "reason",
        &lines(|declined| declined.chunks),
    );
    text.lines(
        "kvgate_admission_declined_bytes_total",
        "counter",
        "Their bytes.",
        "reason",
        &lines(|declined| declined.bytes),
    );
    text.gauge(
        "kvgate_admission_left_out_chunks",
        "Chunks that were declined and not admitted since, of those that are remembered ([store] admit_chunks).",
        of.declined_now,
    );
    text.gauge(
        "kvgate_admission_budget_bytes",
        "What the budget allows at this moment.",
        of.budget_bytes,
    );
}

fn slots(text: &mut Families, status: &Status) {
    let slots = &status.slots;
    text.gauge(
        "kvgate_node_sessions",
        "Engine processes that are attached.",
        status.sessions.len() as u64,
    );
    text.gauge(
        "kvgate_node_filling_slots",
        "Slots that engines fill.",
        slots.filling as u64,
    );
    text.gauge(
        "kvgate_node_spoilt_slots",
        "Slots that wait for a writer that came too late.",
        slots.spoilt as u64,
    );
    text.gauge(
        "kvgate_node_leases",
        "Slots that engines read.",
        slots.leases as u64,
    );
    text.gauge(
        "kvgate_node_spaces",
        "Spaces that were declared.",
        status.spaces.len() as u64,
    );
}

fn disk(text: &mut Families, status: &Status) {
    let Some(disk) = &status.tiers.disk else { return };
    let mut of = each(text, "path", &disk.disks, |disk| disk.path.display().to_string());
    of("kvgate_disk_up", "gauge", "1 if the disk is in use.", &|path| {
        u64::from(path.state == crate::cache::tier::DiskState::Ok)
    });
    of("kvgate_disk_chunks", "gauge", "Chunks on the disk.", &|path| {
        path.chunks
    });
    of(
        "kvgate_disk_dirty_chunks",
        "gauge",
        "Chunks of it that are not on S3 yet.",
        &|path| path.dirty,
    );
    of("kvgate_disk_used_bytes", "gauge", "Their bytes.", &|path| {
        path.bytes
    });
    of("kvgate_disk_reads_total", "counter", "Chunks read.", &|path| {
        path.reads
    });
    of(
        "kvgate_disk_writes_total",
        "counter",
        "Chunks written.",
        &|path| path.writes,
    );
    of(
        "kvgate_disk_evicted_total",
        "counter",
        "Chunks that made room.",
        &|path| path.evicted,
    );
    of(
        "kvgate_disk_expired_total",
        "counter",
        "Chunks whose time was over.",
        &|path| path.expired,
    );
    of("kvgate_disk_errors_total", "counter", "Errors.", &|path| {
        path.errors
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_series_of_tenants_are_bounded() {
        let named = |number: u64| (format!("t{number}"), number);
        assert_eq!(largest(vec![named(1), named(2)]), [named(2), named(1)]);
        let many = largest((0..50).map(named).collect());
        assert_eq!((many.len(), &many[0]), (TENANTS_MAX + 1, &named(49)));
        assert_eq!(many[TENANTS_MAX], ("(others)".to_owned(), (0..30).sum()));
    }
}
