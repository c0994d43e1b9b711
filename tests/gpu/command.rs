//! `kvgate gpu` as people call it, with the tests' driver and without any driver.

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

use crate::mock::build;

/// With the driver of `mock/` where the loader looks first.
fn kvgate(arguments: &[&str], driver: Option<&Path>) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvgate"));
    command.args(arguments).env_remove("LD_LIBRARY_PATH");
    // Smaller than the bench's arena: some of its chunks lie in two pieces.
    command.env("KVGATE__COPY__PIN_SIZE", "3MiB");
    if let Some(folder) = driver {
        command.env("LD_LIBRARY_PATH", folder);
    }
    command.output().unwrap()
}

fn driver() -> std::path::PathBuf {
    let library = build("for-commands", None);
    let folder = library.with_extension("d");
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::rename(library, folder.join("libcuda.so")).unwrap();
    folder
}

#[test]
fn check_and_bench_run_from_the_command_line() {
    let driver = driver();
    let checked = kvgate(&["gpu", "check", "--json"], Some(&driver));
    assert!(
        checked.status.success(),
        "{}",
        String::from_utf8_lossy(&checked.stderr)
    );
    let report: Value = serde_json::from_slice(&checked.stdout).unwrap();
    assert_eq!(report["right"], true);
    assert_eq!(report["gpu"]["compute_capability"], "9.0");
    assert!(report["checked"].as_array().unwrap().len() > 60);

    let small = [
        "gpu",
        "bench",
        "--json",
        "--chunks",
        "2",
        "--chunk-tokens",
        "16",
        "--rounds",
        "1",
    ];
    let one = [
        "--block-tokens",
        "16",
        "--thread-blocks",
        "2",
        "--layouts",
        "vllm LBNHC,sglang",
    ];
    let benched = kvgate(&[&small[..], &one[..]].concat(), Some(&driver));
    assert!(
        benched.status.success(),
        "{}",
        String::from_utf8_lossy(&benched.stderr)
    );
    let report: Value = serde_json::from_slice(&benched.stdout).unwrap();
    let rows = report["copies"].as_array().unwrap();
    assert_eq!(rows.len(), 2);
    for figure in [
        "load_gib_s",
        "store_gib_s",
        "both_gib_s",
        "load_ratio",
        "store_ratio",
        "both_ratio",
    ] {
        assert!(
            rows.iter().all(|row| row[figure].as_f64().unwrap() > 0.0),
            "{figure}: {rows:?}"
        );
    }
    let slots_and_pages = &report["path"][0];
    assert_eq!(slots_and_pages["chunks"], 2);
    assert!(slots_and_pages["pages_gib_s"].as_f64().unwrap() > 0.0);

    let wrong = kvgate(&["gpu", "bench", "--layouts", "mla BND"], Some(&driver));
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("there are vllm LBHNC, "));
}

#[test]
fn without_a_driver_one_line_says_so() {
    let output = kvgate(&["gpu", "check"], None);
    if output.status.success() {
        // There is one here, and all is right.
        return;
    }
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(
        error,
        "error: no NVIDIA driver here: libcuda.so.1 can't be loaded\n"
    );
    assert!(output.stdout.is_empty());
    // And all else works.
    assert!(kvgate(&["size", "--model", "llama-3-8b"], None).status.success());
}
