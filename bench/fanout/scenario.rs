//! Scenarios: the events that happen to the endpoints, each with its time.

use std::ops::Range;
use std::time::Duration;

use super::server::{Mood, Speed};

pub const ENDPOINTS: usize = 64;
/// Until here nothing counts: every client has to learn.
pub const BEGIN: f64 = 2.0;
/// From here on no load starts any more.
pub const END: f64 = 22.0;
/// However fast an endpoint is.
pub const CONNECTION_BYTES_PER_SECOND: f64 = 150e6;
pub const LATENCY: Duration = Duration::from_millis(5);
/// Of DNS: so much later a client hears of addresses that came or went.
const TTL: f64 = 1.0;

pub struct Scenario {
    pub name: &'static str,
    /// All that there ever are.
    pub servers: usize,
    /// Those whose share is told, and when.
    pub watched: Range<usize>,
    pub spans: Vec<(f64, f64)>,
    /// By time in seconds.
    pub script: Vec<(f64, Act)>,
}

#[derive(Clone)]
pub enum Act {
    Set(Range<usize>, Mood),
    /// From now on these are the addresses.
    List(Vec<usize>),
}

/// The load that the clients make.
#[derive(Clone, Copy)]
pub struct Workload {
    pub name: &'static str,
    pub range_bytes: usize,
    /// Of a prompt.
    pub ranges: usize,
    /// Loads at a time.
    pub loads: usize,
    /// Of all loads together.
    pub in_flight_bytes: usize,
    /// Of an endpoint.
    pub speed: Speed,
    pub scenarios: fn() -> Vec<Scenario>,
}

const MIB: usize = 1 << 20;
const GIB: usize = 1 << 30;

const fn endpoints_of(bytes_per_second: f64) -> Speed {
    Speed {
        bytes_per_second,
        connection_bytes_per_second: CONNECTION_BYTES_PER_SECOND,
        latency: LATENCY,
    }
}

pub const WORKLOADS: [Workload; 5] = [
    Workload {
        name: "1 GiB in 16 MiB, 16 loads at a time, 256 ranges in flight; endpoints of 500 MB/s",
        range_bytes: 16 * MIB,
        ranges: 64,
        loads: 16,
        in_flight_bytes: 4 * GIB,
        speed: endpoints_of(500e6),
        scenarios: all,
    },
    Workload {
        name: "256 MiB in 4 MiB, 2 loads at a time; endpoints of 500 MB/s",
        range_bytes: 4 * MIB,
        ranges: 64,
        loads: 2,
        in_flight_bytes: 4 * GIB,
        speed: endpoints_of(500e6),
        scenarios: all,
    },
    // More than the windows are at first: they have to grow.
    Workload {
        name: "1 GiB in 16 MiB, 32 loads at a time, 1024 ranges in flight; endpoints of 2 GB/s",
        range_bytes: 16 * MIB,
        ranges: 64,
        loads: 32,
        in_flight_bytes: 16 * GIB,
        speed: endpoints_of(2e9),
        scenarios: || all().into_iter().take(2).collect(),
    },
    // As bench/fanout.py does it with real servers.
    Workload {
        name: "128 MiB in 4 MiB, one load at a time, 16 ranges in flight; 4 endpoints of 40 MB/s",
        range_bytes: 4 * MIB,
        ranges: 32,
        loads: 1,
        in_flight_bytes: 64 * MIB,
        speed: endpoints_of(40e6),
        scenarios: few,
    },
    Workload {
        name: "128 MiB in 4 MiB, 4 loads at a time, 16 ranges in flight; 4 endpoints of 40 MB/s",
        range_bytes: 4 * MIB,
        ranges: 32,
        loads: 4,
        in_flight_bytes: 64 * MIB,
        speed: endpoints_of(40e6),
        scenarios: few,
    },
];

const STRETCHES: [(f64, f64); 2] = [(BEGIN, 7.0), (12.0, 17.0)];

/// Some of what [`all`] have, with fewer endpoints.
fn few() -> Vec<Scenario> {
    let few = |name, script| Scenario {
        name,
        servers: 4,
        watched: 0..1,
        spans: vec![(BEGIN, END)],
        script,
    };
    vec![
        few("even", Vec::new()),
        few(
            "1 of 4 slow to a tenth",
            vec![(0.0, Act::Set(0..1, Mood::Serves(0.1)))],
        ),
        few(
            "3 alone",
            vec![(0.0, Act::List(vec![1, 2, 3])), (0.0, Act::Set(0..1, Mood::Gone))],
        ),
    ]
}

fn all() -> Vec<Scenario> {
    vec![
        Scenario {
            name: "even",
            servers: ENDPOINTS,
            watched: 0..8,
            spans: vec![(BEGIN, END)],
            script: Vec::new(),
        },
        Scenario {
            name: "8 of 64 slow to a tenth",
            servers: ENDPOINTS,
            watched: 0..8,
            spans: vec![(BEGIN, END)],
            script: vec![(BEGIN, Act::Set(0..8, Mood::Serves(0.1)))],
        },
        Scenario {
            name: "8 slow to a tenth, then well again: their share then",
            servers: ENDPOINTS,
            watched: 0..8,
            spans: vec![(12.0, END)],
            script: vec![
                (BEGIN, Act::Set(0..8, Mood::Serves(0.1))),
                (12.0, Act::Set(0..8, Mood::Serves(1.0))),
            ],
        },
        stretches("4 failing: 2 by 503, 2 lose connections", |number| match number {
            0 | 1 => Mood::Refuses,
            _ => Mood::Breaks,
        }),
        stretches("4 hanging", |_| Mood::Hangs),
        joining_and_leaving(),
    ]
}

/// Four in some mood, twice for five seconds.
fn stretches(name: &'static str, mood: impl Fn(usize) -> Mood) -> Scenario {
    let mut script = Vec::new();
    for (from, to) in STRETCHES {
        script.extend((0..4).map(|number| (from, Act::Set(number..number + 1, mood(number)))));
        script.push((to, Act::Set(0..4, Mood::Serves(1.0))));
    }
    Scenario {
        name,
        servers: ENDPOINTS,
        watched: 0..4,
        spans: STRETCHES.to_vec(),
        script,
    }
}

/// Eight vanish, eight new ones join, the eight return, and eight are taken out of DNS while they still work.
fn joining_and_leaving() -> Scenario {
    let list = |all: Range<usize>| Act::List(all.collect());
    Scenario {
        name: "8 vanish, 8 join, 8 return, 8 leave: share of those that join",
        servers: ENDPOINTS + 8,
        watched: 64..72,
        spans: vec![(7.0 + TTL, 12.0)],
        script: vec![
            (0.0, Act::List((0..ENDPOINTS).collect())),
            (BEGIN, Act::Set(0..8, Mood::Gone)),
            (BEGIN + TTL, list(8..64)),
            (7.0 + TTL, list(8..72)),
            (12.0, Act::Set(0..8, Mood::Serves(1.0))),
            (12.0 + TTL, list(0..72)),
            (17.0, list(0..64)),
        ],
    }
}
