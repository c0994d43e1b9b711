//! The fan-out against 64 scripted endpoints, beside round robin and beside a single endpoint.
//!
//! Nothing goes over the network and no time passes: endpoints are tasks that share their speed among what is on its way,
//! and the clock is tokio's, paused, so that twenty seconds of 64 endpoints take one. The code that chooses,
//! waits, retries and hedges is kvgate's own (`kvgate::s3::fanout`). The same seed gives the same table.
//!
//! Not for: what a request costs in CPU, and how real servers behave when they are overloaded (`bench/fanout.py`).

mod client;
mod report;
mod run;
#[path = "../saving.rs"]
mod saving;
mod scenario;
mod server;

use std::sync::Mutex;
use std::time::Instant;

use client::Policy;
use run::Row;
use scenario::{Scenario, WORKLOADS, Workload};

const SEED: u64 = 20_261_121;

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |flag: &str| arguments.iter().position(|argument| argument == flag);
    let seed = given("--seed").and_then(|at| arguments.get(at + 1)?.parse().ok());
    let seed = seed.unwrap_or(SEED);
    let filter = arguments.first().filter(|word| !word.starts_with('-'));
    let wanted = |workload: &Workload, scenario: &Scenario, policy: Policy| {
        filter.is_none_or(|word| {
            workload.name.contains(&**word) || scenario.name.contains(&**word) || policy.name() == *word
        })
    };
    let all_scenarios: Vec<(Workload, Vec<Scenario>)> = WORKLOADS
        .into_iter()
        .map(|workload| (workload, (workload.scenarios)()))
        .collect();
    let mut cases: Vec<(&Scenario, Workload, Policy)> = Vec::new();
    for (workload, scenarios) in &all_scenarios {
        for scenario in scenarios {
            let policies = Policy::ALL.into_iter();
            let policies = policies.filter(|&policy| wanted(workload, scenario, policy));
            cases.extend(policies.map(|policy| (scenario, *workload, policy)));
        }
    }
    if given("--bench").is_none() {
        // `cargo test --benches` only wants to see it run.
        cases.truncate(1);
    }
    let began = Instant::now();
    let rows = all(&cases, seed);
    let note = format!("simulated in {:.0} s, seed {seed}", began.elapsed().as_secs_f64());
    let table = report::markdown(&rows);
    println!("{note}\n\n{table}");
    if given("--save").is_some() {
        saving::save("fanout", "fanout-sim", &note, &table, &rows)?;
    }
    Ok(())
}

/// Each in a thread of its own, as many at a time as there are cores.
fn all(cases: &[(&Scenario, Workload, Policy)], seed: u64) -> Vec<Row> {
    let next = Mutex::new(0);
    let rows = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let at = {
                        let mut next = next.lock().expect("no panic");
                        *next += 1;
                        *next - 1
                    };
                    let Some(&(scenario, workload, policy)) = cases.get(at) else {
                        break;
                    };
                    let row = run::run(scenario, workload, policy, seed);
                    eprintln!("{}, {}", row.scenario, row.client);
                    rows.lock().expect("no panic").push((at, row));
                }
            });
        }
    });
    let mut rows = rows.into_inner().expect("no panic");
    rows.sort_by_key(|(at, _)| *at);
    rows.into_iter().map(|(_, row)| row).collect()
}
