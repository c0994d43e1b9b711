//! The report of a bench, phase by phase.
//!
//! Throughput is told twice. Until the first worker ran out of work, all of them were busy: that is the server's
//! speed. Until the last one had finished is the time that a caller waits. Times are in seconds, latencies in
//! microseconds.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use super::histogram::{Histogram, HistogramBucket};
use super::phase_run::PhaseRun;
use super::settings::{BenchPhase, BenchSettings};
use super::split::{self, Endpoint};
use super::usage::Usage;
use crate::s3::net::Traffic;
use crate::s3::object::{ObjectError, RequestCounts};

const MIB: f64 = (1_u64 << 20) as f64;
const GIB: f64 = (1_u64 << 30) as f64;

/// All results of a bench.
#[derive(Debug, Clone, Serialize)]
pub struct BenchReport {
    /// Version of kvgate.
    pub version: &'static str,
    pub settings: BenchSettings,
    pub phases: Vec<PhaseReport>,
    /// Whether it was ended early.
    pub interrupted: bool,
}

/// The results of one phase. Figures of bytes are null in phases that move none.
#[derive(Debug, Clone, Serialize)]
pub struct PhaseReport {
    pub phase: BenchPhase,
    /// Start, in seconds since 1970.
    pub began: f64,
    /// Number of objects, however often the phase goes over them.
    pub objects: u64,
    /// Requests that succeeded.
    pub ops: u64,
    pub bytes: u64,
    pub seconds: f64,
    /// When the first task found nothing left to do.
    pub first_done: ReportMark,
    pub last_done: ReportMark,
    pub iops: f64,
    pub mib_per_s: f64,
    /// User and system time of this process.
    pub cpu_seconds: f64,
    pub cpu_seconds_per_gib: Option<f64>,
    pub cpu_us_per_op: Option<f64>,
    pub minor_faults: u64,
    pub minor_faults_per_gib: Option<f64>,
    pub latency_us: Option<Latency>,
    /// Latencies by octave.
    pub histogram: Vec<HistogramBucket>,
    pub errors: Errors,
    /// Chunks that a prompt's write found stored already.
    pub present: u64,
    /// Requests that were sent because an earlier one had failed.
    pub retries: u64,
    /// Requests that were sent because an earlier one was slow.
    pub hedges: u64,
    pub requests: RequestCounts,
    /// Bytes over the connections.
    pub traffic: Traffic,
    /// All addresses of the server's name.
    pub endpoints: Vec<Endpoint>,
    /// Only where whole prompts are read.
    pub prompt: Option<PromptReport>,
    pub interrupted: bool,
    /// An error that every further request would meet: it ended the phase.
    #[serde(skip)]
    pub fatal: Option<Arc<ObjectError>>,
}

/// Progress of a phase at one time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct ReportMark {
    pub seconds: f64,
    pub ops: u64,
    pub bytes: u64,
    pub mib_per_s: f64,
    pub iops: f64,
}

/// Latencies of successful requests, retries included.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Latency {
    pub min: f64,
    pub mean: f64,
    pub p50: f64,
    pub p90: f64,
    pub p99: f64,
    pub p999: f64,
    pub max: f64,
}

#[derive(Debug, Clone, Default, Serialize)]
pub struct Errors {
    pub count: u64,
    pub first: Option<String>,
    /// Whether the phase ended because too many requests failed.
    pub gave_up: bool,
}

/// Whole prompts, one after the other: lookup, then load. Times count from the prompt's start; an operation is a
/// chunk, and its latency counts from the load's start.
#[derive(Debug, Clone, Serialize)]
pub struct PromptReport {
    pub prompts: u64,
    pub chunks: u64,
    /// Bytes of whole prompts, by the time from the lookup's start to the last chunk. Waits for --rate don't count.
    pub gib_per_s: Option<f64>,
    pub lookup_us: Option<Latency>,
    pub first_chunk_us: Option<Latency>,
    /// Time until every chunk's first layer was there: in chunk order, when the last chunk was.
    pub first_layer_us: Option<Latency>,
    pub last_chunk_us: Option<Latency>,
}

/// The cost of a phase besides its time.
pub(super) struct Cost {
    pub usage: Usage,
    pub requests: RequestCounts,
    pub traffic: Traffic,
    pub endpoints: Vec<Endpoint>,
}

/// None: no bytes moved.
pub(super) fn gib_per_s(bytes: u64, took: Duration) -> Option<f64> {
    (bytes > 0).then(|| bytes as f64 / GIB / took.as_secs_f64().max(1e-9))
}

impl ReportMark {
    pub(super) fn new(elapsed: Duration, ops: u64, bytes: u64) -> Self {
        // A phase without a request takes no time; avoids a division by zero.
        let seconds = elapsed.as_secs_f64().max(1e-9);
        Self {
            seconds,
            ops,
            bytes,
            mib_per_s: bytes as f64 / MIB / seconds,
            iops: ops as f64 / seconds,
        }
    }
}

impl Latency {
    pub(super) fn of(histogram: &Histogram) -> Option<Self> {
        (histogram.count() > 0).then(|| Self {
            min: histogram.quantile_us(0.0),
            mean: histogram.mean_us(),
            p50: histogram.quantile_us(0.5),
            p90: histogram.quantile_us(0.9),
            p99: histogram.quantile_us(0.99),
            p999: histogram.quantile_us(0.999),
            max: histogram.quantile_us(1.0),
        })
    }
}

impl PhaseReport {
    /// `ended`: the progress when the last request ended.
    pub(super) fn new(settings: &BenchSettings, course: &PhaseRun, ended: ReportMark, cost: Cost) -> Self {
        let (phase, tally) = (course.phase(), course.tally());
        let first_done = course.first_done().unwrap_or(ended);
        let latency = &tally.done.latency;
        let gib = ended.bytes as f64 / GIB;
        let per_gib = |amount: f64| (ended.bytes > 0).then(|| amount / gib);
        let sent = split::sum(cost.endpoints.iter().map(|endpoint| &endpoint.state));
        Self {
            phase,
            began: course.began(),
            objects: settings.objects,
            ops: ended.ops,
            bytes: ended.bytes,
            seconds: ended.seconds,
            first_done,
            last_done: ended,
            iops: ended.iops,
            mib_per_s: ended.mib_per_s,
            cpu_seconds: cost.usage.cpu_seconds,
            cpu_seconds_per_gib: per_gib(cost.usage.cpu_seconds),
            cpu_us_per_op: (ended.ops > 0).then(|| cost.usage.cpu_seconds * 1e6 / ended.ops as f64),
            minor_faults: cost.usage.minor_faults,
            minor_faults_per_gib: per_gib(cost.usage.minor_faults as f64),
            latency_us: Latency::of(latency),
            histogram: latency.octaves(),
            retries: sent.retries,
            hedges: sent.hedges,
            endpoints: cost.endpoints,
            requests: cost.requests,
            traffic: cost.traffic,
            errors: Errors {
                count: tally.errors,
                first: tally.first_error,
                gave_up: course.gave_up(),
            },
            present: 0,
            prompt: None,
            interrupted: false,
            fatal: course.take_fatal().map(Arc::new),
        }
    }
}
