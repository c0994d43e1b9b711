//! A fleet: many gateways, many RGWs, and what goes wrong between them.
//!
//! Nothing goes over the network and no time passes: RGWs, OSDs and DNS are models, and the clock is tokio's, paused. The
//! gateways are kvgate's own: lookups and loads (`kvgate::cache::gateway`), attempts, endpoints, windows and breakers
//! (`kvgate::s3::fanout`), and the watch of DNS (`kvgate::s3::dns`). A fleet runs in one thread, and the same seed gives the
//! same report.
//!
//! Not for: what a request costs in CPU, and how real servers behave when they are overloaded (`bench/fanout.py`).
//!
//!     cargo bench --bench fleet                        all fleets, all scenarios
//!     cargo bench --bench fleet -- 100x20 dead         of these fleets, scenarios with these words
//!     cargo bench --bench fleet -- --save [NAME]       writes bench/results/fleet-[NAME-]DATE.md and .json
//!     cargo test --bench fleet                         a short one, twice: both must be equal

mod bucket;
mod link;
mod names;
mod node;
mod report;
mod rgw;
mod run;
#[path = "../saving.rs"]
mod saving;
mod scenario;
mod store;

use std::sync::Mutex;
use std::time::Instant;

use run::Row;
use scenario::{Fleet, LONG, SHORT, Scenario, Times};

const SEED: u64 = 20_261_126;
const FLEETS: [Fleet; 3] = [
    Fleet {
        gateways: 20,
        rgws: 4,
    },
    Fleet {
        gateways: 100,
        rgws: 20,
    },
    Fleet {
        gateways: 1000,
        rgws: 200,
    },
];
const SMALL: Fleet = Fleet {
    gateways: 12,
    rgws: 6,
};

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |flag: &str| arguments.iter().position(|argument| argument == flag);
    if given("--bench").is_none() {
        check();
        return Ok(());
    }
    let word_after = |flag: &str| {
        let next = arguments.get(given(flag)? + 1)?;
        (!next.starts_with('-')).then_some(next.as_str())
    };
    let seed = word_after("--seed")
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(SEED);
    let words = arguments.iter().take_while(|word| !word.starts_with('-'));
    let (sizes, names): (Vec<&String>, Vec<&String>) =
        words.partition(|word| FLEETS.iter().any(|fleet| **word == size(*fleet)));
    let mut cases = Vec::new();
    for fleet in FLEETS {
        let wanted = sizes.is_empty() || sizes.iter().any(|word| **word == size(fleet));
        let scenarios = scenario::all(fleet, LONG).into_iter();
        let scenarios = scenarios.filter(|scenario| {
            wanted && (names.is_empty() || names.iter().any(|word| scenario.name.contains(word.as_str())))
        });
        cases.extend(scenarios.map(|scenario| (fleet, scenario)));
    }
    let began = Instant::now();
    let rows = all(&cases, LONG, seed);
    let note = format!("simulated in {:.0} s, seed {seed}", began.elapsed().as_secs_f64());
    let tables = report::markdown(&rows);
    println!("{note}\n\n{tables}");
    if given("--save").is_some() {
        let name = word_after("--save").map_or("fleet".to_owned(), |name| format!("fleet-{name}"));
        saving::save("fleet", &name, &note, &tables, &rows)?;
    }
    Ok(())
}

fn size(fleet: Fleet) -> String {
    format!("{}x{}", fleet.gateways, fleet.rgws)
}

/// A small fleet, each scenario twice.
fn check() {
    for scenario in scenario::all(SMALL, SHORT) {
        let [row, again] = [0, 1].map(|_| run::run(SMALL, &scenario, SHORT, SEED));
        assert_eq!(row, again, "the same seed gives the same report");
        assert!(row.before.prompts > 0, "{row:?}");
        // An absence is remembered for two seconds, in which another gateway may store the chunk.
        let is_quiet = scenario.script.is_empty() && scenario.cut.is_none();
        let failed = row.before.failed + row.meanwhile.failed;
        assert!(!is_quiet || failed * 20 <= row.before.prompts, "{row:?}");
    }
}

/// Each in a thread of its own, as many at a time as there are cores; the largest first.
fn all(cases: &[(Fleet, Scenario)], times: Times, seed: u64) -> Vec<Row> {
    let left = Mutex::new((0..cases.len()).collect::<Vec<_>>());
    let rows = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let Some(at) = left.lock().expect("no panic").pop() else {
                        break;
                    };
                    let (fleet, scenario) = &cases[at];
                    let began = Instant::now();
                    let row = run::run(*fleet, scenario, times, seed);
                    let took = began.elapsed().as_secs_f64();
                    eprintln!("{}, {}: {took:.1} s", size(*fleet), row.scenario);
                    rows.lock().expect("no panic").push((at, row));
                }
            });
        }
    });
    let mut rows = rows.into_inner().expect("no panic");
    rows.sort_by_key(|(at, _)| *at);
    rows.into_iter().map(|(_, row)| row).collect()
}
