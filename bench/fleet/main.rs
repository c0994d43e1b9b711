//! A fleet: many gateways, many RGWs, and what goes wrong between them.
//!
//! Nothing goes over the network and no time passes: RGWs, OSDs and DNS are models, and the clock is tokio's, paused. The
//! gateways are kvgate's own: lookups and loads (`kvgate::cache::gateway`), attempts, endpoints, windows and breakers
//! (`kvgate::s3::fanout`), the watch of DNS (`kvgate::s3::dns`), and other gateways' memories (`kvgate::cache::peers`). A fleet
//! runs in one thread, and the same seed gives the same report; nearly, where gateways ask each other.
//!
//! Not for: what a request costs in CPU, and how real servers behave when they are overloaded (`bench/fanout.py`).
//!
//!     cargo bench --bench fleet                        all fleets, all scenarios
//!     cargo bench --bench fleet -- 100x20 dead         of these fleets, scenarios with these words
//!     cargo bench --bench fleet -- --trace [FILE]      a trace in Mooncake's format or Qwen-Bailian's, or a made-up one, at its
//!                                                      pace and as fast as it keeps the fleet busy; [--block-tokens N]
//!     cargo bench --bench fleet -- curves              the modelled RGW beside the measured one
//!     cargo bench --bench fleet -- --save [NAME]       writes bench/results/fleet-[NAME-]DATE.md and .json
//!     cargo test --bench fleet                         short ones, twice: both must be equal

mod bucket;
mod ceph;
mod link;
mod names;
mod node;
mod peers;
mod report;
mod rgw;
mod run;
#[path = "../saving.rs"]
mod saving;
mod scenario;
mod store;
mod trace;

use std::fmt::Debug;
use std::sync::Mutex;
use std::time::Instant;

use scenario::{Fleet, LONG, SHORT, STEADY};

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
const TRACED: Fleet = FLEETS[1];
/// With more RGWs than a gateway uses.
const SMALL: Fleet = Fleet {
    gateways: 24,
    rgws: 40,
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
    let fleets: Vec<Fleet> = FLEETS
        .into_iter()
        .filter(|fleet| sizes.is_empty() || sizes.contains(&&size(*fleet)))
        .collect();
    let began = Instant::now();
    let (tables, rows) = if given("--trace").is_some() {
        let block_tokens = word_after("--block-tokens").and_then(|tokens| tokens.parse().ok());
        let trace = trace::read(word_after("--trace"), block_tokens);
        let fleets = if sizes.is_empty() { vec![TRACED] } else { fleets };
        let cases = fleets
            .iter()
            .flat_map(|&fleet| [(fleet, 1.0), (fleet, trace::busy(&trace, fleet))]);
        let rows = all(&cases.collect::<Vec<_>>(), |&(fleet, speed)| {
            (
                format!("{speed:.0} times as fast"),
                trace::replay(fleet, &trace, speed, seed),
            )
        });
        (report::replays(&rows), serde_json::to_value(&rows))
    } else if names.iter().any(|name| *name == "curves") {
        let curves = ceph::curves();
        (ceph::markdown(&curves), serde_json::to_value(&curves))
    } else {
        let cases = fleets.into_iter().flat_map(|fleet| {
            let scenarios = scenario::all(fleet, LONG).into_iter();
            let wanted = scenarios.filter(|scenario| {
                names.is_empty() || names.iter().any(|word| scenario.name.contains(word.as_str()))
            });
            wanted.map(move |scenario| (fleet, scenario))
        });
        let rows = all(&cases.collect::<Vec<_>>(), |(fleet, scenario)| {
            (scenario.name.to_owned(), run::run(*fleet, scenario, LONG, seed))
        });
        (report::markdown(&rows), serde_json::to_value(&rows))
    };
    let note = format!("simulated in {:.0} s, seed {seed}", began.elapsed().as_secs_f64());
    println!("{note}\n\n{tables}");
    if given("--save").is_some() {
        let name = word_after("--save").map_or("fleet".to_owned(), |name| format!("fleet-{name}"));
        saving::save("fleet", &name, &note, &tables, &rows?)?;
    }
    Ok(())
}

fn size(fleet: Fleet) -> String {
    format!("{}x{}", fleet.gateways, fleet.rgws)
}

/// A small fleet, each scenario twice, and the start of a made-up trace; and whether the modelled RGW is like the measured one.
/// Once with peers: in which order tokio wakes those who wait for one chunk is chance.
fn check() {
    for scenario in scenario::all(SMALL, SHORT) {
        let run = || run::run(SMALL, &scenario, SHORT, SEED);
        let row = if scenario.peers { run() } else { twice(run) };
        assert!(row.before.prompts > 0, "{row:?}");
        if STEADY.contains(&scenario.name) {
            assert!(row.p99_ratio() <= 2.0 && row.attempts_a_call[1] <= 1.1, "{row:?}");
        }
        if scenario.peers {
            assert!(row.from_peers_percent > 10.0 && row.shared_sent <= 3.0, "{row:?}");
        }
        // An absence is remembered for two seconds, in which another gateway may store the chunk.
        let is_quiet = scenario.script.is_empty() && scenario.cut.is_none();
        let failed = row.before.failed + row.meanwhile.failed;
        assert!(!is_quiet || failed * 20 <= row.before.prompts, "{row:?}");
    }
    let mut trace = trace::read(None, None);
    trace.prompts.truncate(200);
    let speed = trace::busy(&trace, SMALL);
    let row = twice(|| trace::replay(SMALL, &trace, speed, SEED));
    assert_eq!(row.took.prompts, trace.prompts.len(), "{row:?}");
    assert!(row.loaded_percent > 0.5 * row.most_percent, "{row:?}");
    for curve in ceph::curves() {
        assert!((0.5..2.0).contains(&curve.over()), "{curve:?}");
    }
}

fn twice<T: PartialEq + Debug>(run: impl Fn() -> T) -> T {
    let row = run();
    assert_eq!(row, run(), "the same seed gives the same report");
    row
}

/// Each in a thread of its own, as many at a time as there are cores; the last first: the largest. `run` also tells its name.
fn all<Case: Sync, Row: Send>(cases: &[Case], run: impl Fn(&Case) -> (String, Row) + Sync) -> Vec<Row> {
    let left = Mutex::new((0..cases.len()).collect::<Vec<_>>());
    let rows = Mutex::new(Vec::new());
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                loop {
                    let Some(at) = left.lock().expect("no panic").pop() else {
                        break;
                    };
                    let began = Instant::now();
                    let (name, row) = run(&cases[at]);
                    eprintln!("{name}: {:.1} s", began.elapsed().as_secs_f64());
                    rows.lock().expect("no panic").push((at, row));
                }
            });
        }
    });
    let mut rows = rows.into_inner().expect("no panic");
    rows.sort_by_key(|(at, _)| *at);
    rows.into_iter().map(|(_, row)| row).collect()
}
