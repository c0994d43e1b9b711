//! The speed and the costs of a real radosgw, fitted to what `bench/ceph_curves.py` measured: `ceph.json`. And that model beside
//! the measurement.
//!
//! Of each kind of request two lines through the points say everything: its CPU time by its bytes, and its time by its bytes
//! where it is the only one in flight. What more of them in flight make of that is not fitted: it follows from the cores.

use std::fmt::Write as _;
use std::sync::LazyLock;
use std::time::Duration;

use kvgate::s3::object::Operation;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::rgw::{Abilities, Cost, GIB, ROUND_TRIP, Rgw};
use super::run::{address, in_simulated_time, percentile};
use super::scenario::{CORES, NIC_BYTES_PER_SECOND, REQUESTS_MAX};

#[derive(Deserialize)]
struct Measured {
    points: Vec<Point>,
}

/// By requests of one kind and size, so many in flight. CPU times are those of a request.
#[derive(Deserialize)]
struct Point {
    request: String,
    bytes: usize,
    in_flight: usize,
    per_s: f64,
    p50_us: f64,
    p99_us: f64,
    rgw_cpu_us: f64,
    osd_cpu_us: f64,
    client_cpu_us: f64,
}

static POINTS: LazyLock<Vec<Point>> = LazyLock::new(|| {
    let measured: Measured =
        serde_json::from_str(include_str!("ceph.json")).expect("ceph_curves.py wrote it");
    measured.points
});

/// An RGW of the fleet, by itself: OSDs and clients are elsewhere.
pub static RGW: LazyLock<Abilities> =
    LazyLock::new(|| abilities(CORES, NIC_BYTES_PER_SECOND, |point| point.rgw_cpu_us));

/// That of the measurement: it shares its cores with the OSD, with the client, and with what else ran there.
static LAB: LazyLock<Abilities> = LazyLock::new(|| {
    let cores = POINTS.iter().map(|point| point.per_s * all_cpu_us(point) / 1e6);
    abilities(cores.fold(0.0, f64::max), f64::INFINITY, all_cpu_us)
});

fn all_cpu_us(point: &Point) -> f64 {
    point.rgw_cpu_us + point.osd_cpu_us + point.client_cpu_us
}

fn abilities(cores: f64, nic_bytes_per_second: f64, cpu_us: fn(&Point) -> f64) -> Abilities {
    let cost = |request: &str| {
        let points = || POINTS.iter().filter(|point| point.request == request);
        let (cpu, gib_cpu) = line(points().map(|point| (point.bytes, cpu_us(point))));
        let alone = points().filter(|point| point.in_flight == 1);
        let (least, gib) = line(alone.map(|point| (point.bytes, point.p50_us)));
        // The median of what `Rgw::answer` makes of a latency.
        let median = 0.5 + 0.5 * std::f64::consts::LN_2;
        let latency = (least - ROUND_TRIP.as_secs_f64() - cpu / cores) / median;
        Cost {
            cpu,
            gib_cpu,
            latency: latency.max(0.0),
            gib,
        }
    };
    Abilities {
        cores,
        head: cost("HEAD"),
        get: cost("GET"),
        put: cost("PUT"),
        nic_bytes_per_second,
        requests_max: REQUESTS_MAX,
    }
}

/// Seconds without a body, and of each GiB of it: the line that all are nearest to, by the share that each is off.
fn line(points: impl Iterator<Item = (usize, f64)>) -> (f64, f64) {
    let (mut w, mut wx, mut wxx, mut wy, mut wxy) = (0.0, 0.0, 0.0, 0.0, 0.0);
    for (bytes, us) in points {
        let (x, y) = (bytes as f64 / GIB, us / 1e6);
        let weight = 1.0 / (y * y);
        w += weight;
        wx += weight * x;
        wxx += weight * x * x;
        wy += weight * y;
        wxy += weight * x * y;
    }
    let apart = w * wxx - wx * wx;
    // HEADs have one size: none.
    let slope = if apart > 0.0 {
        (w * wxy - wx * wy) / apart
    } else {
        0.0
    };
    let slope = slope.max(0.0);
    ((wy - slope * wx) / w, slope)
}

/// A measured point, and what the model makes of it.
#[derive(Serialize, Debug, PartialEq)]
pub struct Curve {
    request: &'static str,
    bytes: usize,
    in_flight: usize,
    per_s: Both,
    p50_us: Both,
    p99_us: Both,
}

#[derive(Serialize, Debug, PartialEq)]
struct Both {
    measured: f64,
    model: f64,
}

/// All points, in a simulation of each.
pub fn curves() -> Vec<Curve> {
    POINTS.iter().map(curve).collect()
}

impl Curve {
    /// How many times as many requests a second the model has.
    pub fn over(&self) -> f64 {
        self.per_s.model / self.per_s.measured
    }
}

fn curve(point: &'static Point) -> Curve {
    let operation = match point.request.as_str() {
        "GET" => Operation::Get,
        "PUT" => Operation::Put,
        _ => Operation::Head,
    };
    let (per_s, mut took) = in_simulated_time(1, closed_loop(operation, point.bytes, point.in_flight));
    took.sort_unstable();
    let us = |of| percentile(&took, of).as_secs_f64() * 1e6;
    Curve {
        request: &point.request,
        bytes: point.bytes,
        in_flight: point.in_flight,
        per_s: Both {
            measured: point.per_s,
            model: per_s,
        },
        p50_us: Both {
            measured: point.p50_us,
            model: us(0.5),
        },
        p99_us: Both {
            measured: point.p99_us,
            model: us(0.99),
        },
    }
}

/// Requests a second, and the time of each, where so many are always in flight.
async fn closed_loop(operation: Operation, bytes: usize, in_flight: usize) -> (f64, Vec<Duration>) {
    let rgw = Rgw::new(address(0), *LAB);
    let began = Instant::now();
    let end = began + Duration::from_secs(10);
    let workers = (0..in_flight).map(|_| async {
        let mut took = Vec::new();
        while Instant::now() < end {
            let from = Instant::now();
            let serving = rgw.answer(operation).await.expect("it is well");
            rgw.carry(operation, bytes, |_| {}).await.expect("it is well");
            drop(serving);
            took.push(from.elapsed());
        }
        took
    });
    let took: Vec<Duration> = futures::future::join_all(workers).await.concat();
    (took.len() as f64 / began.elapsed().as_secs_f64(), took)
}

pub fn markdown(curves: &[Curve]) -> String {
    let mut text = String::from(
        "| request | bytes | in flight | a second: measured | model | p50, ms: measured | model | p99, ms: measured | model |\n\
         |---|---:|---:|---:|---:|---:|---:|---:|---:|\n",
    );
    let ms = |both: &Both| format!("{:.1} | {:.1}", both.measured / 1e3, both.model / 1e3);
    for curve in curves {
        // Writing to a String can't fail.
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.0} | {:.0} | {} | {} |",
            curve.request,
            curve.bytes,
            curve.in_flight,
            curve.per_s.measured,
            curve.per_s.model,
            ms(&curve.p50_us),
            ms(&curve.p99_us),
        );
    }
    text
}
