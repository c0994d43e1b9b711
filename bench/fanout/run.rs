//! One scenario with one client, from its start to the end of its last load.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use serde::Serialize;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::client::{Client, Policy};
use super::scenario::{Act, BEGIN, END, Scenario, Workload};
use super::server::Server;

/// The result, from [`BEGIN`] on.
#[derive(Serialize)]
pub struct Row {
    pub workload: &'static str,
    pub scenario: &'static str,
    pub client: &'static str,
    /// Of ranges that arrived whole by [`END`].
    pub gb_per_s: f64,
    /// Of loads, failed ones too.
    pub p50_ms: f64,
    pub p99_ms: f64,
    /// Of the bytes that endpoints sent.
    pub watched_share_percent: f64,
    pub requests: u64,
    pub hedges_percent: f64,
    pub retries: u64,
    /// Sent in vain: by both sides of a hedge, and before something broke.
    pub waste_percent: f64,
    pub loads: usize,
    pub failed_loads: usize,
}

/// An engine that can't load computes.
const COMPUTE: Duration = Duration::from_secs(1);

struct Load {
    took: Duration,
    failed: bool,
}

/// The same for the same seed.
pub fn run(scenario: &Scenario, workload: Workload, policy: Policy, seed: u64) -> Row {
    fastrand::seed(seed);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime");
    runtime.block_on(simulate(scenario, workload, policy))
}

async fn simulate(scenario: &Scenario, workload: Workload, policy: Policy) -> Row {
    let start = Instant::now();
    let at = move |seconds: f64| start + Duration::from_secs_f64(seconds);
    let servers: Vec<Arc<Server>> = (0..scenario.servers)
        .map(|number| Server::start(address(number), workload.speed))
        .collect();
    let client = Arc::new(Client::new(policy, workload));
    client.update(&servers);
    let (sender, mut done) = mpsc::unbounded_channel();
    let acts = scenario
        .script
        .iter()
        .map(|(seconds, act)| (at(*seconds), act.clone()));
    tokio::spawn(play(acts.collect(), servers.clone(), Arc::clone(&client)));
    let numbers = Arc::new(AtomicU64::new(0));
    for _ in 0..workload.loads {
        let (client, numbers, sender) = (Arc::clone(&client), Arc::clone(&numbers), sender.clone());
        tokio::spawn(async move {
            while Instant::now() < at(END) {
                let began = Instant::now();
                let failed = client
                    .load(numbers.fetch_add(1, Ordering::Relaxed))
                    .await
                    .is_err();
                let took = began.elapsed();
                if began >= at(BEGIN) {
                    let _ = sender.send(Load { took, failed });
                }
                if failed {
                    sleep(COMPUTE).await;
                }
            }
        });
    }
    drop(sender);

    let counted = || {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = &client.counts;
        [&counts.requests, &counts.retries, &counts.hedges, &counts.bytes].map(get)
    };
    let sent = |servers: &[Arc<Server>]| servers.iter().map(|server| server.sent()).sum::<u64>();
    let watched = &servers[scenario.watched.clone()];
    let shares = async {
        let (mut theirs, mut all) = (0, 0);
        for &(from, to) in &scenario.spans {
            sleep_until(at(from)).await;
            let before = (sent(watched), sent(&servers));
            sleep_until(at(to)).await;
            theirs += sent(watched) - before.0;
            all += sent(&servers) - before.1;
        }
        theirs as f64 * 100.0 / all.max(1) as f64
    };
    let counts = async {
        sleep_until(at(BEGIN)).await;
        let before = (counted(), sent(&servers));
        sleep_until(at(END)).await;
        let (now, all) = (counted(), sent(&servers));
        (std::array::from_fn(|i| now[i] - before.0[i]), all - before.1)
    };
    let (watched_share_percent, ([requests, retries, hedges, bytes], all)): (f64, ([u64; 4], u64)) =
        tokio::join!(shares, counts);
    let mut loads = Vec::new();
    while let Some(load) = done.recv().await {
        loads.push(load);
    }
    loads.sort_by_key(|load| load.took);
    let quantile = |of: f64| {
        let last = loads.len().saturating_sub(1) as f64;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
        let load = loads.get((last * of).round() as usize);
        load.map_or(f64::NAN, |load| load.took.as_secs_f64() * 1e3)
    };
    Row {
        workload: workload.name,
        scenario: scenario.name,
        client: policy.name(),
        gb_per_s: bytes as f64 / 1e9 / (END - BEGIN),
        p50_ms: quantile(0.5),
        p99_ms: quantile(0.99),
        watched_share_percent,
        requests,
        hedges_percent: hedges as f64 * 100.0 / requests.max(1) as f64,
        retries,
        waste_percent: all.saturating_sub(bytes) as f64 * 100.0 / all.max(1) as f64,
        loads: loads.len(),
        failed_loads: loads.iter().filter(|load| load.failed).count(),
    }
}

/// In the order in which it is written.
async fn play(script: Vec<(Instant, Act)>, servers: Vec<Arc<Server>>, client: Arc<Client>) {
    for (at, act) in script {
        sleep_until(at).await;
        match act {
            Act::Set(those, mood) => servers[those].iter().for_each(|server| server.set(mood)),
            Act::List(those) => {
                let listed: Vec<_> = those.iter().map(|&number| Arc::clone(&servers[number])).collect();
                client.update(&listed);
            }
        }
    }
}

fn address(number: usize) -> SocketAddr {
    let last = u8::try_from(number + 1).expect("fewer than 255 endpoints");
    (Ipv4Addr::new(10, 0, 0, last), 80).into()
}
