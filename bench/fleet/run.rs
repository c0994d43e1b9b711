//! One fleet in one scenario, from its start to the end of its last prompt.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kvgate::cache::gateway::s3_options;
use kvgate::config::Config;
use serde::Serialize;
use tokio::time::{Instant, sleep_until};

use super::bucket::{Bucket, CHUNK_TOKENS, SHARED_CHUNKS};
use super::ceph::RGW;
use super::names::Names;
use super::node::{Node, Prompt};
use super::peers::Fabric;
use super::rgw::{Rgw, lock};
use super::scenario::{Act, CONVERSATIONS, Fleet, OSD_BYTES_PER_SECOND, OSDS, Scenario, Times};
use super::store::{Counts, World};

/// In bins.
const SECOND: usize = 100;
/// Time for the last prompts to end.
pub const DRAIN: f64 = 40.0;
/// Prompts that come within this time before something happens are not of the time before.
const NEAR: f64 = 1.0;
/// Gateways start one after the other within this time.
const START: f64 = 1.0;

/// The result.
#[derive(Serialize, PartialEq, Debug)]
pub struct Row {
    pub gateways: usize,
    pub rgws: usize,
    pub scenario: &'static str,
    /// Before anything happens, while it happens, and after.
    pub before: Took,
    pub meanwhile: Took,
    pub after: Took,
    /// Requests for 1,000 tokens that were loaded, before and meanwhile.
    pub requests_a_kilotoken: [f64; 2],
    /// How often RGWs sent each chunk of the prompt that all share, meanwhile.
    pub shared_sent: f64,
    /// Of the chunks that were loaded meanwhile, those from other gateways.
    pub from_peers_percent: f64,
    /// Attempts at a call, before and meanwhile; and the most that one call took.
    pub attempts_a_call: [f64; 2],
    pub attempts_most: u64,
    /// Before, and in the seconds after all is well again, at the RGWs that something happened to.
    pub peaks_before: Peaks,
    pub peaks_after: Peaks,
    /// Attempts that failed at those RGWs, or were given up, until the fleet avoided them; and when that was.
    pub failed_attempts: u64,
    pub avoided_after_s: Option<f64>,
    /// Until as many bytes arrive as before: since it happened, and since all is well again.
    pub back_after_s: [Option<f64>; 2],
    /// The most connections that one RGW had.
    pub connections_peak: usize,
    /// Questions a second.
    pub dns: f64,
    pub dns_by_tcp: f64,
    /// Mean share of an RGW's arrivals that the least used one had, before.
    pub least_used: f64,
}

impl Row {
    /// Of the time until a prompt's last chunk is there: meanwhile, over before.
    pub fn p99_ratio(&self) -> f64 {
        self.meanwhile.load_ms[1] / self.before.load_ms[1]
    }
}

/// Prompts that came in some time.
#[derive(Serialize, PartialEq, Debug)]
pub struct Took {
    pub prompts: usize,
    pub failed: usize,
    pub lookup_ms: [f64; 3],
    /// Until the last chunk is there; of prompts that have any.
    pub load_ms: [f64; 3],
}

/// The fullest bin of arrivals over the mean.
#[derive(Serialize, PartialEq, Debug)]
pub struct Peaks {
    pub in_10_ms: f64,
    pub in_100_ms: f64,
}

/// The same for the same seed.
pub fn run(fleet: Fleet, scenario: &Scenario, times: Times, seed: u64) -> Row {
    in_simulated_time(seed, simulate(fleet, scenario, times))
}

pub fn in_simulated_time<T>(seed: u64, work: impl Future<Output = T>) -> T {
    fastrand::seed(seed);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(work)
}

/// A fleet whose gateways have started.
pub struct Running {
    pub began: Instant,
    pub world: Arc<World>,
    pub rgws: Vec<Arc<Rgw>>,
    pub nodes: Vec<Arc<Node>>,
    pub prompts: Arc<Mutex<Vec<Prompt>>>,
}

impl Running {
    pub async fn start(fleet: Fleet, conversations: usize, names: Names, with_peers: bool) -> Self {
        let began = Instant::now();
        let rgws: Vec<Arc<Rgw>> = (0..fleet.rgws)
            .map(|number| Rgw::new(address(number), *RGW))
            .collect();
        names.change(|listed| listed.extend(rgws.iter().map(|rgw| rgw.address)));
        let bucket = Bucket::new(conversations, OSDS * fleet.rgws, OSD_BYTES_PER_SECOND);
        let world = Arc::new(World {
            fabric: with_peers.then(|| Fabric::new(fleet.gateways, &bucket.space)),
            bucket,
            rgws: rgws.iter().map(|rgw| (rgw.address, Arc::clone(rgw))).collect(),
            names: Arc::new(names),
            counts: Counts::new(),
        });
        let mut config = Config::default();
        config.s3.bucket = Some("fleet".into());
        let options = s3_options(&config).expect("a bucket is named");
        let prompts: Arc<Mutex<Vec<Prompt>>> = Arc::default();
        let mut nodes = Vec::new();
        for number in 0..fleet.gateways {
            sleep_until(began + Duration::from_secs_f64(START * number as f64 / fleet.gateways as f64)).await;
            nodes.push(Node::new(number, &world, &config, &options, &prompts));
        }
        Self {
            began,
            world,
            rgws,
            nodes,
            prompts,
        }
    }
}

async fn simulate(fleet: Fleet, scenario: &Scenario, times: Times) -> Row {
    let names = Names::new(scenario.ttl, scenario.cut);
    let Running {
        began,
        world,
        rgws,
        nodes,
        prompts,
    } = Running::start(fleet, CONVERSATIONS * fleet.gateways, names, scenario.peers).await;
    let at = move |seconds: f64| began + Duration::from_secs_f64(seconds);
    for node in &nodes {
        tokio::spawn(Arc::clone(node).serve(at(times.end)));
    }
    for (when, act) in &scenario.script {
        sleep_until(at(*when)).await;
        match act.clone() {
            Act::Set(those, mood) => rgws[those].iter().for_each(|rgw| rgw.set(mood)),
            Act::Unlist(those) => {
                let those: Vec<_> = those.map(address).collect();
                world
                    .names
                    .change(|listed| listed.retain(|one| !those.contains(one)));
            }
            Act::List(those) => world.names.change(|listed| listed.extend(those.map(address))),
            Act::Peers(those, mood) => {
                let fabric = world.fabric.as_ref().expect("a fleet with peers");
                fabric.set(those, mood);
            }
            Act::Herd(within) => {
                for node in &nodes {
                    tokio::spawn(Arc::clone(node).load_shared(within));
                }
            }
        }
    }
    sleep_until(at(times.end)).await;
    let (questions, by_tcp) = world.names.questions();
    sleep_until(at(times.end + DRAIN)).await;
    if let Some(fabric) = &world.fabric {
        fabric.end();
    }
    let prompts = lock(&prompts);
    let took = |from: f64, to: f64| took(&prompts, at(from), at(to));
    let seen = Seen {
        world: &world,
        rgws: &rgws,
        hit: &rgws[scenario.hit.clone()],
        times,
    };
    let tokens = |from: f64, to: f64| {
        let came = prompts
            .iter()
            .filter(|prompt| (at(from)..at(to)).contains(&prompt.came));
        came.map(|prompt| prompt.loaded as u64 * CHUNK_TOKENS)
            .sum::<u64>() as f64
    };
    let Times {
        begin,
        fault,
        well,
        end,
    } = times;
    let counts = &world.counts;
    let over = |from, to| {
        let attempts = counts.attempts(from, to) as f64;
        (
            attempts * 1e3 / tokens(from, to),
            attempts / counts.calls.sum(from, to) as f64,
        )
    };
    let (before, meanwhile) = (over(begin, fault), over(fault, well));
    let (failed_attempts, avoided_after_s) = seen.avoided();
    Row {
        gateways: fleet.gateways,
        rgws: fleet.rgws,
        scenario: scenario.name,
        before: took(begin, fault - NEAR),
        meanwhile: took(fault, well),
        after: took(well, end),
        requests_a_kilotoken: [before.0, meanwhile.0],
        shared_sent: counts.shared.sum(fault, well) as f64 / SHARED_CHUNKS as f64,
        from_peers_percent: from_peers(&prompts, at(fault), at(well)),
        attempts_a_call: [before.1, meanwhile.1],
        attempts_most: counts.attempts_most.load(std::sync::atomic::Ordering::Relaxed),
        peaks_before: seen.peaks(begin, fault),
        peaks_after: seen.peaks(scenario.well, scenario.well + (end - well)),
        failed_attempts,
        avoided_after_s,
        back_after_s: [seen.back(fault), seen.back(scenario.well)],
        connections_peak: rgws.iter().map(|rgw| rgw.connections_peak()).max().unwrap_or(0),
        dns: questions as f64 / end,
        dns_by_tcp: by_tcp as f64 / end,
        least_used: seen.least_used(),
    }
}

/// Of the chunks of prompts that came in that time.
fn from_peers(prompts: &[Prompt], from: Instant, to: Instant) -> f64 {
    let came = || prompts.iter().filter(|prompt| (from..to).contains(&prompt.came));
    let loaded: usize = came().map(|prompt| prompt.loaded).sum();
    let from_peers: usize = came().map(|prompt| prompt.from_peers).sum();
    from_peers as f64 * 100.0 / loaded.max(1) as f64
}

fn took(prompts: &[Prompt], from: Instant, to: Instant) -> Took {
    let came: Vec<&Prompt> = prompts
        .iter()
        .filter(|prompt| (from..to).contains(&prompt.came))
        .collect();
    Took::of(&came)
}

impl Took {
    pub fn of(came: &[&Prompt]) -> Self {
        let percentiles = |mut took: Vec<Duration>| {
            took.sort_unstable();
            [0.5, 0.99, 0.999].map(|of| percentile(&took, of).as_secs_f64() * 1e3)
        };
        let loads = came.iter().filter(|prompt| prompt.loaded > 0 || prompt.failed);
        Self {
            prompts: came.len(),
            failed: came.iter().filter(|prompt| prompt.failed).count(),
            lookup_ms: percentiles(came.iter().map(|prompt| prompt.looked_up).collect()),
            load_ms: percentiles(loads.map(|prompt| prompt.took).collect()),
        }
    }
}

/// Of times in their order; none of none.
pub fn percentile(took: &[Duration], of: f64) -> Duration {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
    let place = (took.len().saturating_sub(1) as f64 * of).round() as usize;
    took.get(place).copied().unwrap_or_default()
}

/// What was counted at the RGWs.
struct Seen<'a> {
    world: &'a World,
    rgws: &'a [Arc<Rgw>],
    hit: &'a [Arc<Rgw>],
    times: Times,
}

impl Seen<'_> {
    /// Of an RGW, in a second, before anything happens.
    fn usual(&self) -> f64 {
        let Times { begin, fault, .. } = self.times;
        let all: u64 = self.rgws.iter().map(|rgw| rgw.arrivals.sum(begin, fault)).sum();
        all as f64 / self.rgws.len() as f64 / (fault - begin)
    }

    fn least_used(&self) -> f64 {
        let Times { begin, fault, .. } = self.times;
        let least = self.rgws.iter().map(|rgw| rgw.arrivals.sum(begin, fault)).min();
        least.unwrap_or(0) as f64 / (fault - begin) / self.usual()
    }

    fn peaks(&self, from: f64, to: f64) -> Peaks {
        let most = |wide: usize| {
            let sums = self
                .hit
                .iter()
                .flat_map(|rgw| rgw.arrivals.between(from, to, wide));
            sums.max().unwrap_or(0) as f64
        };
        Peaks {
            in_10_ms: most(1) / (self.usual() / 100.0),
            in_100_ms: most(10) / (self.usual() / 10.0),
        }
    }

    /// Attempts that failed at those that something happened to; and the second from which on each has fewer than a twentieth
    /// of the requests that are usual there.
    fn avoided(&self) -> (u64, Option<f64>) {
        let Times { fault, well, .. } = self.times;
        let mut failed = vec![
            0;
            self.hit
                .first()
                .map_or(0, |rgw| rgw.failures.between(fault, well, SECOND).len())
        ];
        for rgw in self.hit {
            for (sum, more) in failed.iter_mut().zip(rgw.failures.between(fault, well, SECOND)) {
                *sum += more;
            }
        }
        let few = self.usual() * self.hit.len() as f64 / 20.0;
        let last = failed.iter().rposition(|&failed| failed as f64 > few.max(1.0));
        let until = last.map_or(0, |last| last + 1);
        let avoided = (until < failed.len()).then_some(until as f64);
        (failed[..until].iter().sum(), avoided)
    }

    /// From here on no second brings less than 95 % of what came before, or of the least that came in one then.
    fn back(&self, from: f64) -> Option<f64> {
        let Times {
            begin, fault, end, ..
        } = self.times;
        let (wide, kib) = (SECOND, &self.world.counts.kib);
        let before = kib.between(begin, fault, wide);
        let usual = before.iter().sum::<u64>() as f64 / before.len() as f64;
        // Of a small fleet the quiet time has seconds with less, too.
        let least = before.iter().copied().min().unwrap_or(0) as f64;
        let enough = 0.95 * usual.min(least);
        let after = kib.between(from, end, wide);
        let last = after.iter().rposition(|&kib| (kib as f64) < enough);
        let back = last.map_or(0, |last| last + 1);
        (back < after.len()).then_some(back as f64)
    }
}

pub fn address(number: usize) -> SocketAddr {
    let [high, low] = u16::try_from(number).expect("fewer than 65,536").to_be_bytes();
    (Ipv4Addr::new(10, 0, high, low), 80).into()
}
