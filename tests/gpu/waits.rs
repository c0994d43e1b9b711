//! Each wait is left out once and each number of a launch or a transfer made wrong: a test must fail each time.

use kvgate::engine::copy::CopyJob;
use kvgate::engine::copy::known::{KNOWN, KnownLayout};

use crate::mock::{CHILD, Mock, SEEDS, fails_in_child};
use crate::stage::{Stage, life, peek};

/// Through the kernels, and straight to the pages.
const WAYS: [(&str, usize); 2] = [("vllm LBNHC", usize::MAX), ("vllm LBHNC", 64)];

fn layout(name: &str) -> &'static KnownLayout {
    KNOWN.iter().find(|layout| layout.name == name).unwrap()
}

#[test]
fn an_engine_s_life_is_right_lazy_and_permuted() {
    for seed in SEEDS.start..SEEDS.end * 3 {
        for (name, direct_bytes) in WAYS {
            let _mock = Mock::start(seed);
            life(layout(name), direct_bytes);
        }
    }
}

/// A chunk of a load that comes late went behind the wait of a load that had begun meanwhile.
#[test]
fn an_older_load_does_not_wait_for_a_younger_one_s_mark() {
    for (name, direct_bytes) in WAYS {
        let _mock = Mock::start(0);
        let mut stage = Stage::new(layout(name), direct_bytes).unwrap();
        let (old, young) = (stage.object(1), stage.object(2));
        let mut image = stage.compute(3);
        let older = stage.mark();
        let load = |stage: &Stage, planes| {
            let job = CopyJob {
                planes,
                ..stage.job(0)
            };
            let load = stage.copier().load(old.clone(), &job, Some(&older));
            load.unwrap().wait().unwrap();
        };
        load(&stage, 0..3);
        // With this driver the engine computes it only when somebody waits for it.
        stage.compute(4);
        let younger = stage.load(&young, &stage.job(1));
        load(&stage, 3..6);
        assert!(!younger.is_done().unwrap(), "{name}");
        stage.twin_load(&mut image, &old, &stage.job(0));
        assert!(peek(stage.base(), stage.bytes()) == image, "{name}");
        younger.wait().unwrap();
    }
}

/// "way what nth field by"
#[test]
fn child() {
    let Ok(purpose) = std::env::var(CHILD) else {
        return;
    };
    let words: Vec<&str> = purpose.split(' ').collect();
    let number = |at: usize| words[at].parse::<i64>().unwrap();
    let (name, direct_bytes) = WAYS[number(0) as usize];
    let nth = number(2) as usize;
    for seed in SEEDS {
        let mock = Mock::start(seed);
        match words[1] {
            "wait" => mock.skip_wait(nth),
            "launch" => mock.twist_launch(nth, number(3) as usize, number(4) as usize, number(5)),
            "copy" => mock.twist_copy(nth, number(3) as usize, number(4)),
            other => panic!("{other}"),
        }
        life(layout(name), direct_bytes);
    }
}

fn unnoticed(purposes: Vec<String>) -> Vec<String> {
    assert!(
        !fails_in_child("waits::child", "0 wait 0", None),
        "with nothing taken out it must pass"
    );
    let noticed = |purpose: &String| fails_in_child("waits::child", purpose, None);
    purposes.into_iter().filter(|purpose| !noticed(purpose)).collect()
}

/// Waits and launches of a life.
fn counts(way: usize) -> (usize, usize) {
    let mock = Mock::start(0);
    life(layout(WAYS[way].0), WAYS[way].1);
    (mock.waits(), mock.launches())
}

#[test]
fn no_wait_can_be_left_out() {
    for way in 0..WAYS.len() {
        let (waits, _) = counts(way);
        assert!(waits > 10);
        let left = unnoticed((1..=waits).map(|nth| format!("{way} wait {nth}")).collect());
        assert!(left.is_empty(), "of {waits} nobody misses {left:?}");
    }
}

/// Parameters of the kernel (`Params`): where, how wide, and by how much it is wrong.
const PARAMS: [(&str, usize, usize, i64); 11] = [
    ("parts", 0, 8, 56),
    ("spans", 8, 8, 16),
    ("staging", 16, 8, 16),
    ("share_offset", 24, 8, 16),
    ("parts_count", 32, 4, -1),
    ("spans_count", 36, 4, -1),
    ("tiles", 40, 4, -1),
    ("unit", 44, 4, -15),
    ("chunk_tokens", 48, 4, 1),
    ("blocks", 52, 4, -11),
    ("block_tokens", 56, 4, -7),
];

#[test]
fn no_number_of_a_launch_can_be_wrong() {
    let (_, launches) = counts(0);
    // The first and the last piece of a load and of a store.
    assert_eq!(launches, 18, "a life has 9 copies of 2 pieces");
    let purposes = [1, 4, 7, 10]
        .iter()
        .flat_map(|nth| PARAMS.map(|(_, at, width, by)| format!("0 launch {nth} {at} {width} {by}")));
    let left = unnoticed(purposes.collect());
    assert!(left.is_empty(), "nobody notices {left:?}");
}

/// Of a transfer: what and by how much it is wrong. The pitches matter where there are rows: in a staged share.
const FIELDS: [(&str, usize, i64); 6] = [
    ("to", 0, 16),
    ("from", 1, 16),
    ("bytes", 2, -16),
    ("rows", 3, -1),
    ("pitch to", 4, 16),
    ("pitch from", 5, 16),
];

#[test]
fn no_number_of_a_transfer_can_be_wrong() {
    for (way, (name, direct_bytes)) in WAYS.into_iter().enumerate() {
        let transfers: Vec<(usize, usize)> = {
            let mock = Mock::start(0);
            life(layout(name), direct_bytes);
            (1..=mock.copies()).map(|nth| mock.rows(nth)).collect()
        };
        let mut purposes = Vec::new();
        // The engine's own launch is the largest, and none of ours.
        let largest = transfers.iter().map(|&(_, bytes)| bytes).max().unwrap();
        let ours = (1..).zip(transfers).filter(|&(_, (_, bytes))| bytes < largest);
        for (nth, (rows, _)) in ours.step_by(3) {
            let fields = FIELDS
                .iter()
                .filter(|(name, ..)| rows > 1 || !name.contains("pitch"));
            purposes.extend(fields.map(|(_, field, by)| format!("{way} copy {nth} {field} {by}")));
        }
        let left = unnoticed(purposes);
        assert!(left.is_empty(), "nobody notices {left:?}");
    }
}
