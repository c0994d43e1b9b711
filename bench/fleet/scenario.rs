//! Fleets, and what happens to their RGWs and to DNS, each with its time.

use std::ops::Range;
use std::time::Duration;

use super::peers::PeerMood;
use super::rgw::Mood;

/// In which arrivals are counted.
pub const BIN: Duration = Duration::from_millis(10);

/// Of each gateway, a second. A prompt is a conversation's next turn, and any gateway may get it.
pub const PROMPTS: f64 = 2.0;
/// For each gateway.
pub const CONVERSATIONS: usize = 40;
/// Of an address in DNS.
pub const TTL: Duration = Duration::from_secs(5);
/// Addresses in a UDP answer that is cut, as Consul has it.
const CUT: usize = 3;

/// One of four on a node with 100 Gbit/s. The rest is measured ([`super::ceph`]).
pub const CORES: f64 = 8.0;
pub const NIC_BYTES_PER_SECOND: f64 = 3.1e9;
pub const REQUESTS_MAX: usize = 1024;
/// For each RGW.
pub const OSDS: usize = 4;
pub const OSD_BYTES_PER_SECOND: f64 = 3e9;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fleet {
    pub gateways: usize,
    pub rgws: usize,
}

/// Seconds from the start.
#[derive(Debug, Clone, Copy)]
pub struct Times {
    /// From here on everything counts: every gateway has to learn first.
    pub begin: f64,
    pub fault: f64,
    pub well: f64,
    /// From here on no prompt comes any more.
    pub end: f64,
}

pub const LONG: Times = Times {
    begin: 5.0,
    fault: 13.0,
    well: 25.0,
    end: 37.0,
};
/// For every day.
pub const SHORT: Times = Times {
    begin: 4.0,
    fault: 8.0,
    well: 12.0,
    end: 16.0,
};

/// Scenarios in which p99 is to stay within twice of what it was.
pub const STEADY: [&str; 5] = [
    "one dead",
    "one slow to a tenth",
    "one hanging",
    "addresses come and go",
    "answers cut to 3, TTL 0",
];

#[derive(Clone)]
pub struct Scenario {
    pub name: &'static str,
    /// Those that something happens to.
    pub hit: Range<usize>,
    /// When all is well again.
    pub well: f64,
    pub ttl: Duration,
    /// Addresses in an answer by UDP that does not say that it was cut.
    pub cut: Option<usize>,
    /// Gateways have memories, and ask each other first.
    pub peers: bool,
    /// By time in seconds.
    pub script: Vec<(f64, Act)>,
}

#[derive(Clone)]
pub enum Act {
    Set(Range<usize>, Mood),
    /// DNS names them no more, or again.
    Unlist(Range<usize>),
    List(Range<usize>),
    /// How these gateways answer others.
    Peers(Range<usize>, PeerMood),
    /// All gateways load the same prompt, within this many seconds.
    Herd(f64),
}

pub fn all(fleet: Fleet, times: Times) -> Vec<Scenario> {
    let Times { fault, well, .. } = times;
    let plain = |name, hit, script| Scenario {
        name,
        hit,
        well,
        ttl: TTL,
        cut: None,
        peers: false,
        script,
    };
    let with_peers = |scenario| Scenario {
        peers: true,
        ..scenario
    };
    let serves = Mood::Serves;
    let one = |name, mood| {
        let script = vec![(fault, Act::Set(0..1, mood)), (well, Act::Set(0..1, serves(1.0)))];
        plain(name, 0..1, script)
    };
    let step = (well - fault) / 3.0;
    let cold = vec![
        (fault, Act::Set(0..1, Mood::Dead)),
        (fault + step, Act::Set(0..1, serves(0.2))),
        (fault + 2.0 * step, Act::Set(0..1, serves(0.5))),
        (well, Act::Set(0..1, serves(1.0))),
    ];
    let outage = vec![
        (fault, Act::Set(0..fleet.rgws, Mood::Dead)),
        (fault + 3.0, Act::Set(0..fleet.rgws, serves(1.0))),
    ];
    let all_gone = plain("all dead for 3 s", 0..fleet.rgws, outage);
    let herd = || (fault, Act::Herd(1.0));
    // One in twenty, for as long as it takes.
    let some = 0..fleet.gateways.div_ceil(20);
    let hanging = vec![(fault, Act::Peers(some.clone(), PeerMood::Hangs)), herd()];
    let dead = vec![(fault, Act::Peers(some, PeerMood::Dead)), herd()];
    vec![
        plain("quiet", 0..1, Vec::new()),
        one("one dead", Mood::Dead),
        one("one slow to a tenth", serves(0.1)),
        one("one hanging", Mood::Hangs),
        one("one takes 4 requests, else 503", Mood::Takes(4)),
        plain("one restarts cold", 0..1, cold),
        Scenario {
            well: fault + 3.0,
            ..all_gone
        },
        rolling(fleet, times, plain("rolling restart", 0..fleet.rgws, Vec::new())),
        Scenario {
            ttl: Duration::ZERO,
            cut: Some(CUT),
            ..plain("answers cut to 3, TTL 0", 0..1, Vec::new())
        },
        churning(fleet, times, plain("addresses come and go", 0..1, Vec::new())),
        plain("a prompt that all load", 0..1, vec![herd()]),
        with_peers(plain("quiet, peers", 0..1, Vec::new())),
        with_peers(plain("a prompt that all load, peers", 0..1, vec![herd()])),
        with_peers(plain("the same, one peer in twenty hangs", 0..1, hanging)),
        with_peers(plain("the same, one peer in twenty is dead", 0..1, dead)),
    ]
}

/// Nearly half of them, a twentieth each second: they leave DNS, end, start, and are back in DNS, while gateways still have them.
fn rolling(fleet: Fleet, times: Times, like: Scenario) -> Scenario {
    let mut script = Vec::new();
    let (each, some) = (1.0, twentieth(fleet));
    let mut at = times.fault;
    for rgws in batches(fleet) {
        if at + 4.0 * each > times.well {
            break;
        }
        script.push((at, Act::Unlist(rgws.clone())));
        script.push((at + each, Act::Set(rgws.clone(), Mood::Dead)));
        script.push((at + 3.0 * each, Act::Set(rgws.clone(), Mood::Serves(1.0))));
        script.push((at + 4.0 * each, Act::List(rgws)));
        at += if fleet.rgws / some < 8 { 4.0 * each } else { each };
    }
    script.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    Scenario { script, ..like }
}

/// Each second a twentieth leaves DNS, and is back three seconds later. All of them serve all the time.
fn churning(fleet: Fleet, times: Times, like: Scenario) -> Scenario {
    let mut script = Vec::new();
    for (second, rgws) in batches(fleet).enumerate() {
        let at = times.fault + second as f64;
        if at + 3.0 > times.well {
            break;
        }
        script.push((at, Act::Unlist(rgws.clone())));
        script.push((at + 3.0, Act::List(rgws)));
    }
    script.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    Scenario { script, ..like }
}

fn twentieth(fleet: Fleet) -> usize {
    fleet.rgws.div_ceil(20)
}

fn batches(fleet: Fleet) -> impl Iterator<Item = Range<usize>> {
    let some = twentieth(fleet);
    (0..fleet.rgws)
        .step_by(some)
        .map(move |first| first..(first + some).min(fleet.rgws))
}
