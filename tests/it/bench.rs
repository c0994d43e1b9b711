//! `kvgate bench` as people type it: what it counts, what it finds wrong, and what it leaves behind.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::process::Command;
use tokio::sync::watch;

use crate::keys::{PROTECTIONS, acme_keys, space_of};
use crate::support::backends::listen;
use crate::support::program::{PREFIX, Place, Said, say};
use crate::support::way;

/// Where small benches run.
struct Site(Place);

impl Site {
    async fn new() -> Self {
        Self(Place::new().await)
    }

    /// Small objects: 5 of 300,000 bytes in 3 parts, unless `args` say otherwise.
    fn command(&self, args: &[&str]) -> Command {
        let mut all = vec!["bench"];
        all.extend(args);
        for (flag, value) in [
            ("--objects", "5"),
            ("--object-size", "300000"),
            ("--part-size", "100000"),
        ] {
            if !args.contains(&flag) {
                all.extend([flag, value]);
            }
        }
        self.0.command(&all)
    }

    async fn say(&self, args: &[&str]) -> Said {
        Said::new(self.command(args).output().await.unwrap())
    }

    /// The phases' reports.
    async fn phases(&self, args: &[&str]) -> Vec<Value> {
        let args = [args, &["--json"]].concat();
        phases(&self.say(&args).await.exits(0))
    }

    fn file(&self, object: usize) -> PathBuf {
        self.0.bucket().join(format!("{PREFIX}/bench-o{object:05}"))
    }

    fn objects(&self) -> usize {
        files(&self.0.bucket()).len()
    }
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = std::fs::read_dir(folder).into_iter().flatten();
    let files = entries.flat_map(|entry| match entry.unwrap().path() {
        folder if folder.is_dir() => files(&folder),
        file => vec![file],
    });
    files.collect()
}

#[track_caller]
fn phases(said: &Said) -> Vec<Value> {
    said.json()["phases"].as_array().unwrap().clone()
}

fn names(phases: &[Value]) -> Vec<&str> {
    phases
        .iter()
        .map(|phase| phase["phase"].as_str().unwrap())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn alone_it_measures_all_phases_on_a_server_of_its_own() {
    let args = [
        "bench",
        "--objects",
        "5",
        "--object-size",
        "2500001",
        "--part-size",
        "700001",
        "-t",
        "3",
    ];
    let said = say(&[&args[..], &["--json"]].concat()).await.exits(0);
    let json = said.json();
    assert_eq!(json["settings"]["embedded"], true);
    assert_eq!(json["settings"]["part_bytes"], 700_001);
    assert_eq!(json["version"], env!("CARGO_PKG_VERSION"));
    let phases = phases(&said);
    assert_eq!(names(&phases), ["write", "read", "head", "lookup", "delete"]);
    let kinds = ["put", "get", "head", "head", "delete"];
    for ((phase, kind), ops) in phases.iter().zip(kinds).zip([5_u64, 20, 5, 5, 5]) {
        assert_eq!(phase["ops"], ops, "{phase}");
        assert_eq!(phase["errors"]["count"], 0, "{phase}");
        assert_eq!(phase["requests"][kind], ops, "{phase}");
        assert_eq!(phase["retries"], 0, "{phase}");
        let endpoint = &phase["endpoints"][0];
        // The chunks that are looked up are not there: 404.
        let answers = if phase["phase"] == "lookup" {
            "refused"
        } else {
            "ok"
        };
        let counted = (&endpoint["requests"], &endpoint[answers]);
        assert_eq!(counted, (&ops.into(), &ops.into()), "{phase}");
        assert_eq!(endpoint["share_percent"], 100.0, "{phase}");
        assert_eq!(endpoint["bytes"], phase["bytes"], "{phase}");
        assert!(
            endpoint["latency_us"].as_u64() > Some(0) && endpoint["breaker"] == "closed",
            "{phase}"
        );
        let number = |path: &str| {
            phase
                .pointer(path)
                .and_then(Value::as_f64)
                .unwrap_or_else(|| panic!("{path}: {phase}"))
        };
        let (first, last) = (number("/first_done/seconds"), number("/last_done/seconds"));
        assert!(
            first > 0.0 && first <= last && phase["seconds"] == phase["last_done"]["seconds"],
            "{phase}"
        );
        assert!(number("/iops") > 0.0 && number("/cpu_seconds") > 0.0 && number("/cpu_us_per_op") > 0.0);
        let quantiles =
            ["min", "p50", "p90", "p99", "p999", "max"].map(|name| number(&format!("/latency_us/{name}")));
        assert!(quantiles.is_sorted() && quantiles[0] > 0.0, "{phase}");
        let counted: u64 = phase["histogram"]
            .as_array()
            .unwrap()
            .iter()
            .map(|bucket| bucket["count"].as_u64().unwrap())
            .sum();
        assert_eq!(counted, ops);
    }
    for phase in &phases[..2] {
        assert_eq!(phase["bytes"], 5 * 2_500_001);
        assert!(phase["mib_per_s"].as_f64() > Some(0.0) && phase["cpu_seconds_per_gib"].as_f64() > Some(0.0));
    }
    assert!(phases[2]["cpu_seconds_per_gib"].is_null());
    assert_eq!(phases[1]["traffic"]["landed_bytes"], phases[1]["bytes"]);
    // The same for people.
    let said = say(&args).await.exits(0);
    said.says(&[
        "inside this process",
        "first done",
        "last done",
        "    min    avg    p50    p99    max\n",
        "\n- latency up to ",
        "\nwrite ",
        "\nread ",
        "\ndelete ",
    ]);
}

#[tokio::test(flavor = "multi_thread")]
async fn named_phases_imply_nothing() {
    let site = Site::new().await;
    let written = site.phases(&["write", "-t", "9"]).await;
    assert_eq!((names(&written), site.objects()), (vec!["write"], 5));
    let again = site
        .phases(&["head", "read", "head", "--rounds", "3", "--warm-up"])
        .await;
    assert_eq!(names(&again), ["head", "read", "head"]);
    let ops: Vec<&Value> = again.iter().map(|phase| &phase["ops"]).collect();
    assert_eq!(ops, [15, 45, 15], "the untimed pass is not counted");
    assert_eq!(again[1]["requests"]["get"], 45);
    site.phases(&["delete", "--rounds", "3"]).await;
    assert_eq!(site.objects(), 0);
    // Nothing is there any more.
    let said = site.say(&["read"]).await.exits(1);
    said.says(&["15 of 15 requests failed", "kvgate bench write"]);

    site.say(&["--keep"])
        .await
        .exits(0)
        .says(&["\nread ", "\nlookup "]);
    assert_eq!(site.objects(), 5);
    site.say(&["delete"]).await.exits(0);
    assert_eq!(site.objects(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn wrong_bytes_are_found_and_named() {
    let site = Site::new().await;
    site.say(&["write"]).await.exits(0);
    let mut bytes = std::fs::read(site.file(3)).unwrap();
    bytes[234_567] ^= 1;
    std::fs::write(site.file(3), bytes).unwrap();
    let said = site.say(&["read", "--json"]).await.exits(1);
    let read = &phases(&said)[0];
    assert_eq!((&read["ops"], &read["errors"]["count"]), (&14.into(), &1.into()));
    said.says(&[
        "t/bench-o00003",
        "part at offset 200000 of object 3",
        "byte 234567",
    ]);
    site.say(&["read", "--no-verify"]).await.exits(0);
    // Another object's bytes, with whatever digest they have.
    std::fs::copy(site.file(2), site.file(3)).unwrap();
    let said = site.say(&["read"]).await.exits(1);
    said.says(&["part at offset 0 of object 3", "stamped object 2, offset 0"]);
    // And objects of another size.
    let said = site
        .say(&["head", "read", "--object-size", "300001"])
        .await
        .exits(1);
    said.says(&["300000 bytes, not 300001", "another --object-size"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_time_limit_goes_round_until_it_is_over() {
    let site = Site::new().await;
    let args = [
        "--time-limit",
        "300ms",
        "--object-size",
        "10KiB",
        "--part-size",
        "4KiB",
    ];
    for phase in site.phases(&args).await {
        let seconds = phase["seconds"].as_f64().unwrap();
        let ops = phase["ops"].as_u64().unwrap();
        match phase["phase"].as_str() {
            Some("delete") => assert_eq!(ops, 5),
            _ => assert!((0.29..5.0).contains(&seconds) && ops > 5, "{phase}"),
        }
    }
    assert_eq!(site.objects(), 0);
    // A write that is cut short leaves fewer objects to the phases after it.
    let slow = ["--objects", "1000", "--rate-iops", "20", "--time-limit", "190ms"];
    let phases = site.phases(&[&slow[..], &["write", "delete"]].concat()).await;
    // As many as the rate allows, on a busy machine fewer.
    let written = phases[0]["ops"].as_u64().unwrap();
    assert!((1..=4).contains(&written), "{written}");
    assert_eq!(
        (&phases[1]["objects"], &phases[1]["ops"]),
        (&written.into(), &written.into())
    );
    assert_eq!(site.objects(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn bytes_and_requests_are_paced() {
    let site = Site::new().await;
    let phases = site
        .phases(&["write", "--objects", "20", "--rate", "15MB/s"])
        .await;
    assert_eq!(
        (&phases[0]["ops"], &phases[0]["bytes"]),
        (&20.into(), &6_000_000.into())
    );
    // 6 MB, and the last object is not waited for.
    let seconds = phases[0]["seconds"].as_f64().unwrap();
    assert!(seconds > 5.7 / 15.0, "{seconds}");
    let lookups = site
        .phases(&["lookup", "--objects", "9", "--rounds", "2", "--rate-iops", "100"])
        .await;
    assert_eq!(lookups[0]["requests"]["head"], 18);
    assert!(lookups[0]["seconds"].as_f64() > Some(0.17), "{}", lookups[0]);
}

/// The rows' cells by their columns' names; none of these has a comma.
fn rows(csv: &str) -> Vec<HashMap<&str, &str>> {
    let mut lines = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let columns = lines.next().unwrap();
    let row = |cells: Vec<_>| {
        assert_eq!(cells.len(), columns.len(), "{csv}");
        columns.iter().copied().zip(cells).collect()
    };
    lines.map(row).collect()
}

fn number(cell: &str) -> f64 {
    cell.parse().unwrap_or_else(|_| panic!("{cell:?}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn csv_has_a_line_a_phase() {
    let site = Site::new().await;
    let said = site.say(&["write", "head", "--csv", "-"]).await.exits(0);
    let [write, head] = &rows(&said.out)[..] else {
        panic!("{said:?}")
    };
    assert_eq!(
        ["phase", "ops", "bytes", "tokens", "prompts"].map(|name| write[name]),
        ["write", "5", "1500000", "", ""]
    );
    assert_eq!([head["phase"], head["cpu_seconds_per_gib"]], ["head", ""]);
    // A file is added to, and does not take the table's place.
    for _ in 0..2 {
        let said = site.say(&["head", "--csv", "all.csv"]).await.exits(0);
        said.says(&["\nhead "]);
    }
    let file = std::fs::read_to_string(site.0.home.path().join("all.csv")).unwrap();
    let starts: Vec<&str> = file.lines().map(|line| &line[..5]).collect();
    assert_eq!(starts, ["phase", "head,", "head,"]);
    // Not if it has other columns.
    let other = "phase,endpoint\nhead,here\n";
    std::fs::write(site.0.home.path().join("other.csv"), other).unwrap();
    let said = site.say(&["head", "--csv", "other.csv"]).await.exits(2);
    said.says(&["--csv other.csv", "give it a new file"]);
    let file = std::fs::read_to_string(site.0.home.path().join("other.csv")).unwrap();
    assert_eq!(file, other);
    // Nor if its last line may have been cut off.
    let all = std::fs::read_to_string(site.0.home.path().join("all.csv")).unwrap();
    for cut in [&all[..all.len() - 9], all.lines().next().unwrap()] {
        std::fs::write(site.0.home.path().join("cut.csv"), cut).unwrap();
        let said = site.say(&["head", "--csv", "cut.csv"]).await.exits(2);
        said.says(&["--csv cut.csv", "cut off"]);
        let file = std::fs::read_to_string(site.0.home.path().join("cut.csv")).unwrap();
        assert_eq!(file, cut);
    }
}

/// Another address of the same server.
async fn another_way_to(server: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut behind = TcpStream::connect(server).await.unwrap();
            tokio::spawn(async move { copy_bidirectional(&mut client, &mut behind).await });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread")]
async fn the_share_of_each_address_is_told() {
    let site = Site::new().await;
    let url = site.0.s3.endpoint().clone();
    let first: SocketAddr = url.strip_prefix("http://").unwrap().parse().unwrap();
    let second = another_way_to(first).await;
    // Bound, so that no other test gets the port; but nobody listens.
    let unanswered = TcpSocket::new_v4().unwrap();
    unanswered.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let gone = unanswered.local_addr().unwrap();
    let urls = format!("{url},http://{second},http://{gone}");
    let check = |phase: &Value| {
        let of = |address: SocketAddr, name: &str| {
            let endpoints = phase["endpoints"].as_array().unwrap();
            let address = address.to_string();
            let endpoint = endpoints.iter().find(|endpoint| endpoint["address"] == *address);
            endpoint.unwrap_or_else(|| panic!("{address}: {phase}"))[name].clone()
        };
        let count = |name: &str| {
            [first, second, gone]
                .map(|address| of(address, name).as_u64().unwrap())
                .iter()
                .sum::<u64>()
        };
        assert_eq!(phase["errors"]["count"], 0, "{phase}");
        let shares = [first, second].map(|address| of(address, "share_percent").as_f64().unwrap());
        assert!((shares.iter().sum::<f64>() - 100.0).abs() < 0.1, "{phase}");
        for address in [first, second] {
            let moved = of(address, "bytes").as_u64() > Some(0);
            assert_eq!(of(address, "mib_per_s").as_f64() > Some(0.0), moved, "{phase}");
            assert_eq!(of(address, "breaker"), "closed", "{phase}");
        }
        assert!(Some(count("bytes")) >= phase["bytes"].as_u64(), "{phase}");
        assert_eq!(
            (of(gone, "bytes"), of(gone, "ok")),
            (0.into(), 0.into()),
            "{phase}"
        );
        // Of a request and its hedge, one may be given up before it is refused.
        let [lost, given_up, requests] =
            ["lost", "given_up", "requests"].map(|name| of(gone, name).as_u64().unwrap());
        assert_eq!(lost + given_up, requests, "{phase}");
        assert!(given_up <= count("hedges"), "{phase}");
        assert_eq!(phase["retries"], count("retries"), "{phase}");
        assert_eq!(phase["hedges"], count("hedges"), "{phase}");
    };
    // Both lead to one server on the same cores, so which one is chosen is chance.
    let mut runs = 0;
    loop {
        let args = ["write", "read", "--objects", "40", "--keep", "--endpoint", &urls];
        let phases = site.phases(&args).await;
        phases.iter().for_each(check);
        let endpoints = phases[0]["endpoints"].as_array().unwrap();
        let used = endpoints.iter().filter(|one| one["bytes"].as_u64() > Some(0));
        let lost: u64 = endpoints.iter().map(|one| one["lost"].as_u64().unwrap()).sum();
        assert!(phases[0]["retries"].as_u64() >= Some(lost), "{}", phases[0]);
        if used.count() == 2 && lost > 0 {
            break;
        }
        runs += 1;
        assert!(runs < 50, "only one of two addresses is used: {}", phases[0]);
    }

    // The same for people, and for spreadsheets.
    let args = ["read", "--objects", "40", "--endpoint", &urls, "--csv", "all.csv"];
    site.say(&args)
        .await
        .exits(0)
        .says(&["  address ", &format!("\n  {second} "), " % ", "closed"]);
    // HEADs of absent chunks are answered with 404.
    let said = site
        .say(&["lookup", "--endpoint", &format!("{url},http://{second}")])
        .await
        .exits(0);
    assert!(
        said.out.contains("  address ") && !said.out.contains("refused"),
        "{said:?}"
    );
    let file = std::fs::read_to_string(site.0.home.path().join("all.csv")).unwrap();
    let rows: Vec<Vec<&str>> = file.lines().map(|line| line.split(',').collect()).collect();
    // The URL of the server has commas itself.
    assert_eq!(rows.len(), 1 + 1 + 3, "{file}");
    let column = |name: &str| rows[0].iter().rev().position(|column| *column == name).unwrap();
    let of_address = |row: usize, name: &str| rows[row][rows[row].len() - 1 - column(name)];
    let addresses: Vec<&str> = (1..5).map(|row| of_address(row, "address")).collect();
    assert!(
        addresses[0].is_empty() && addresses[1..].contains(&&*second.to_string()),
        "{file}"
    );
    let share: f64 = (2..5)
        .map(|row| of_address(row, "share_percent").parse::<f64>().unwrap())
        .sum();
    assert!((share - 100.0).abs() < 0.1, "{file}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_impossible_setting_is_refused_with_its_flag() {
    let site = Site::new().await;
    let cases: &[(&[&str], &[&str])] = &[
        (&["wriet"], &["'wriet'", "similar value exists: 'write'"]),
        (&["--object-size", "0"], &["--object-size", "more than nothing"]),
        (&["--object-size", "6GiB"], &["--object-size 6GiB", "5GiB"]),
        (
            &["--part-size", "300001"],
            &["--part-size 300001B", "--object-size 300000B"],
        ),
        (
            &["--part-size", "1", "--objects", "1000000"],
            &["--part-size", "--objects"],
        ),
        (
            &[
                "--object-size",
                "5GiB",
                "--part-size",
                "1GiB",
                "-t",
                "4096",
                "--objects",
                "4096",
            ],
            &["--concurrency", "--object-size"],
        ),
        (&["--objects", "0"], &["--objects", "from 1 to 10000000"]),
        (&["--objects", "1k"], &["--objects", "a whole number"]),
        (&["--rate-iops", "-1"], &["--rate-iops", "a whole number from 1"]),
        (&["--name", "a/b"], &["--name", "letters"]),
        (&["-t", "0"], &["--concurrency"]),
        (&["--rounds", "0"], &["--rounds"]),
        (&["--time-limit", "0"], &["--time-limit"]),
        (&["--rate", "fast"], &["--rate", "a size such as"]),
        (&["--json", "--csv", "-"], &["--json", "--csv"]),
        (&["write", "delete", "--keep"], &["--keep or delete?"]),
        (&["--csv", "no/such/folder"], &["--csv no/such/folder"]),
        (
            &["--bucket", "not-there"],
            &["the bucket does not exist", "--bucket"],
        ),
    ];
    for (args, parts) in cases {
        site.say(args).await.exits(2).says(parts);
    }
    say(&["bench", "--keep"])
        .await
        .exits(2)
        .says(&["--keep needs --bucket"]);
    say(&["bench", "read", "--objects", "1"])
        .await
        .exits(1)
        .says(&["write the objects first", "kvgate bench write read"]);
    // Before anything is written.
    let large = ["--object-size", "5GiB", "--part-size", "5GiB"];
    say(&[&["bench", "--objects", "1000000"][..], &large].concat())
        .await
        .exits(2)
        .says(&["has room for", "--object-size", "TMPDIR"]);
    let long = ["--model", "qwen3-32b", "--tokens", "16777216", "--layers-first"];
    let said = site.0.say(&[&["bench"][..], &long].concat()).await.exits(2);
    let said = said.says(&["lower --tokens"]);
    assert_eq!((said.out.as_str(), site.objects()), ("", 0));
}

const SPACE_JSON: &str = r#"{"model":"tiny","revision":"abc123","chunk_tokens":16,
    "mha":{"layers":4,"heads":2,"head_dim":64}}"#;

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_stored_looked_up_and_loaded_as_a_whole() {
    let place = Place::new().await;
    std::fs::write(place.home.path().join("space.json"), SPACE_JSON).unwrap();
    // 9 chunks of 4 layers of 8 KiB, in two parts each.
    let prompt = [
        "--space",
        "space.json",
        "--tokens",
        "150",
        "-t",
        "3",
        "--part-size",
        "16KiB",
    ];
    let bench = |more: &[&'static str]| {
        let args = ["bench"]
            .iter()
            .chain(&prompt)
            .chain(more)
            .copied()
            .collect::<Vec<_>>();
        let place = &place;
        async move { place.say(&args).await }
    };
    let said = bench(&["--json"]).await.exits(0);
    assert_eq!(said.json()["settings"]["prompt"]["tokens"], 150);
    let all = phases(&said);
    assert_eq!(names(&all), ["write", "read", "head", "lookup", "delete"]);
    for phase in &all {
        assert_eq!(
            (&phase["ops"], &phase["errors"]["count"]),
            (&9.into(), &0.into()),
            "{phase}"
        );
    }
    assert_eq!(
        (&all[0]["requests"]["put"], &all[1]["requests"]["get"]),
        (&10.into(), &18.into())
    );
    assert_eq!(all[1]["bytes"], 9 * (4 * 8192 + 4096));
    assert_eq!(files(&place.bucket()).len(), 0, "space.json is gone, too");

    // Kept for a later run; each load begins with a lookup that knows nothing.
    bench(&["--keep"]).await.exits(0).says(&[
        "1 prompt of 9 chunks: lookup ",
        "first chunk",
        "last chunk",
        " GiB/s from",
    ]);
    let said = bench(&["read", "--rounds", "3", "--warm-up", "--json"])
        .await
        .exits(0);
    let read = &phases(&said)[0];
    assert_eq!(
        (&read["prompt"]["prompts"], &read["prompt"]["chunks"]),
        (&3.into(), &9.into())
    );
    assert_eq!((&read["ops"], &read["requests"]["get"]), (&27.into(), &54.into()));
    assert!(read["requests"]["head"].as_u64() >= Some(3 * 2), "{read}");
    let time = |of: &str| read["prompt"][of]["p50"].as_f64().unwrap();
    let times = ["first_chunk_us", "first_layer_us", "last_chunk_us"].map(time);
    assert!(time("lookup_us") < times[0] && times.is_sorted(), "{read}");
    let seconds = 3.0 * read["prompt"]["last_chunk_us"]["mean"].as_f64().unwrap() / 1e6;
    let speed = read["bytes"].as_f64().unwrap() / f64::from(1 << 30) / seconds;
    let told = read["prompt"]["gib_per_s"].as_f64().unwrap();
    assert!((told / speed - 1.0).abs() < 0.02, "{told}, not {speed}");
    let again = bench(&["write", "--json"]).await.exits(0);
    let write = &phases(&again)[0];
    assert_eq!((&write["bytes"], &write["present"]), (&0.into(), &9.into()));
    bench(&["write"])
        .await
        .exits(0)
        .says(&["- 9 of 9 chunks were there already", "kvgate bench delete"]);
    // A run that tidies up has chunks of its own.
    let there = files(&place.bucket()).len();
    let said = bench(&["--csv", "-", "--layers-first"]).await.exits(0);
    assert_eq!((there, files(&place.bucket()).len()), (10, 10));
    let rows = rows(&said.out);
    assert_ne!(rows[0]["bytes"], "0");
    assert_eq!(
        ["model", "tokens", "order", "prompts", "prompt_chunks"].map(|name| rows[1][name]),
        ["tiny", "150", "layer", "1", "9"]
    );
    assert_eq!([rows[0]["prompts"], rows[2]["prompts"]], ["", ""]);
    let of = |what: &str| number(rows[1][&*format!("prompt_{what}")]);
    let times = ["lookup_p50_us", "first_chunk_p50_us", "last_chunk_p99_us"].map(of);
    assert!(
        times[0] > 0.0 && times.is_sorted() && of("gib_per_s") > 0.0,
        "{times:?}"
    );
    assert!(of("first_layer_p99_us") <= times[2]);

    // A damaged chunk ends the load.
    let mut chunks = files(&place.bucket()).into_iter();
    let chunk = chunks.find(|path| !path.ends_with("space.json")).unwrap();
    let mut bytes = std::fs::read(&chunk).unwrap();
    bytes[20_000] ^= 1;
    std::fs::write(&chunk, bytes).unwrap();
    bench(&["read"])
        .await
        .exits(1)
        .says(&["of the prompt: the object is damaged"]);
    std::fs::remove_file(chunk).unwrap();
    bench(&["read"])
        .await
        .exits(1)
        .says(&["of the prompt's 9 chunks were found", "kvgate bench write"]);

    for (args, part) in [
        (&["--objects", "5"][..], "--objects"),
        (&["--no-verify"], "--no-verify"),
    ] {
        bench(args).await.exits(2).says(&[part, "cannot be used with"]);
    }
    for args in [&["--chunk-tokens", "32"], &["--revision", "other"]] {
        bench(args).await.exits(2).says(&["a --space has its own"]);
    }
    say(&["bench", "--model", "llama-3-8b", "--tokens", "9"])
        .await
        .exits(2)
        .says(&["--tokens 9", "at least 256"]);
    say(&["bench", "--tokens", "9"])
        .await
        .exits(2)
        .says(&["--model PRESET"]);
}

fn signal(name: &str, child: &tokio::process::Child) {
    let pid = child.id().unwrap().to_string();
    let status = std::process::Command::new("kill")
        .args([name, &pid])
        .status()
        .unwrap();
    assert!(status.success());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_run_tells_what_it_has_and_tidies_up() {
    // Ctrl-C; and what service managers send.
    for (name, named) in [
        ("-INT", &[][..]),
        ("-TERM", &[]),
        ("-INT", &["write", "read", "delete"]),
    ] {
        let site = Site::new().await;
        let args = [named, &["--objects", "1000", "--rate-iops", "50", "--json"]].concat();
        let child = site.command(&args).spawn().unwrap();
        while site.objects() < 3 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        signal(name, &child);
        let said = Said::new(child.wait_with_output().await.unwrap()).exits(1);
        assert_eq!(said.json()["interrupted"], true);
        let phases = phases(&said);
        assert_eq!(names(&phases), ["write", "delete"]);
        assert!(phases[0]["ops"].as_u64() >= Some(3) && phases[0]["ops"].as_u64() < Some(1000));
        assert_eq!(site.objects(), 0, "{name} {named:?}");
        said.says(&["interrupted"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_report_that_can_t_be_written_leaves_no_objects() {
    let site = Site::new().await;
    let said = site.say(&["--csv", "/dev/full"]).await.exits(1);
    said.says(&["\nwrite ", "can't write --csv /dev/full"]);
    assert_eq!(site.objects(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_that_tidies_up_leaves_the_objects_of_others_alone() {
    let site = Site::new().await;
    site.say(&["write", "--keep"]).await.exits(0);
    let kept = std::fs::metadata(site.file(4)).unwrap().modified().unwrap();
    let said = site.say(&["--json"]).await.exits(0);
    assert!(
        said.json()["settings"]["name"]
            .as_str()
            .unwrap()
            .starts_with("bench-")
    );
    assert_eq!(site.objects(), 5);
    assert_eq!(std::fs::metadata(site.file(4)).unwrap().modified().unwrap(), kept);
    site.say(&["read", "delete"]).await.exits(0);
    assert_eq!(site.objects(), 0);
}

/// Chunks of 256 tokens: 2 layers of 1 MiB.
const WIDE_JSON: &str = r#"{"model":"wide","revision":"abc123","chunk_tokens":256,
    "mha":{"layers":2,"heads":8,"head_dim":128}}"#;

/// 4 of them.
const WIDE: [&str; 5] = ["bench", "--space", "wide.json", "--tokens", "1024"];

async fn wide_place() -> Place {
    let place = Place::new().await;
    std::fs::write(place.home.path().join("wide.json"), WIDE_JSON).unwrap();
    place
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_come_in_parts_of_the_size_that_is_told() {
    let place = wide_place().await;
    place.say(&[&WIDE[..], &["write"]].concat()).await.exits(0);
    let (header, layer) = (4096, 1 << 20);
    let cases: [(&[&str], &str, u64, u64); 4] = [
        // The configuration's 4 MiB have room for a whole chunk.
        (&["--layers-first"], "4MiB", header + 2 * layer, 4),
        (&["--layers-first"], "64KiB", header + layer, 8),
        (
            &["--layers-first", "--part-size", "1MiB"],
            "4MiB",
            header + layer,
            8,
        ),
        (&["--part-size", "1MiB"], "4MiB", header + layer, 8),
    ];
    for (args, configured, part_bytes, gets) in cases {
        let args = [&WIDE[..], &["read", "--json"], args].concat();
        let mut command = place.command(&args);
        command.env("KVGATE__LOAD__LAYER_PART_SIZE", configured);
        let said = Said::new(command.output().await.unwrap()).exits(0);
        assert_eq!(said.json()["settings"]["part_bytes"], part_bytes, "{args:?}");
        assert_eq!(phases(&said)[0]["requests"]["get"], gets, "{args:?}");
    }
}

/// A way to a server on which the requests of one method for objects of the bench are counted, and wait until so many of
/// them have come.
struct Way {
    endpoint: String,
    came: Arc<watch::Sender<usize>>,
}

impl Way {
    async fn to(site: &Place, method: &'static str, together: usize) -> Self {
        let server: SocketAddr = site
            .s3
            .endpoint()
            .strip_prefix("http://")
            .unwrap()
            .parse()
            .unwrap();
        let (listener, endpoint) = listen().await;
        let came = Arc::new(watch::Sender::new(0));
        let counter = Arc::clone(&came);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (mut answers, mut requests) = TcpStream::connect(server).await.unwrap().into_split();
                let (mut asks, mut hears) = client.into_split();
                let back = tokio::spawn(async move { tokio::io::copy(&mut answers, &mut hears).await });
                let counter = Arc::clone(&counter);
                tokio::spawn(async move {
                    let mut piece = vec![0; 64 << 10];
                    while let Ok(len @ 1..) = asks.read(&mut piece).await {
                        // No request begins before the one before it was answered.
                        if is_for_object(method, &piece[..len]) {
                            counter.send_modify(|came| *came += 1);
                            let all = counter
                                .subscribe()
                                .wait_for(|&came| came >= together)
                                .await
                                .is_ok();
                            assert!(all);
                        }
                        requests.write_all(&piece[..len]).await.unwrap();
                    }
                    // The client may be gone; the server goes on.
                    let _ = back.await;
                });
            }
        });
        Self { endpoint, came }
    }

    fn came(&self) -> usize {
        *self.came.borrow()
    }

    /// Nothing waits any more.
    fn open(&self) {
        self.came.send_replace(usize::MAX / 2);
    }
}

/// A way to the site's server on which requests for objects or chunks get another answer, or none.
async fn way_that_answers(
    site: &Place,
    method: &'static str,
    times: usize,
    answer: Option<&'static str>,
) -> String {
    let is_meant = move |piece: &[u8]| is_for_object(method, piece);
    way::that_answers(&site.s3.endpoint(), is_meant, times, answer).await
}

/// Whether a request begins here, for an object or for a chunk.
fn is_for_object(method: &str, piece: &[u8]) -> bool {
    let line = String::from_utf8_lossy(piece.split(|&byte| byte == b'\r').next().unwrap_or_default());
    let name = line
        .split(' ')
        .nth(1)
        .and_then(|path| path.split('?').next()?.rsplit('/').next());
    let ours = |name: &str| ["bench-o", "mine-o"].iter().any(|start| name.starts_with(start));
    line.starts_with(method) && name.is_some_and(|name| ours(name) || name.len() == 64)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_delete_that_fails_is_made_again() {
    let site = Site::new().await;
    // More than the kept connections, which may be stale: those are replaced for nothing.
    let endpoint = way_that_answers(&site.0, "DELETE ", 8, None).await;
    let mut command = site.command(&["write", "delete", "--json", "--endpoint", &endpoint]);
    command.env("KVGATE__S3__RETRIES", "0");
    let said = Said::new(command.output().await.unwrap()).exits(0);
    let delete = &phases(&said)[1];
    assert_eq!(delete["ops"], 5);
    assert!(delete["requests"]["delete"].as_u64() > Some(5), "{delete}");
    assert_eq!(site.objects(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn measurements_before_a_refusal_are_told() {
    let site = Site::new().await;
    let denied = "HTTP/1.1 403 Forbidden\r\nContent-Length: 50\r\nx-amz-request-id: 1\r\nConnection: close\r\n\r\n\
                  <Error><Code>AccessDenied</Code><Message/></Error>";
    let endpoint = way_that_answers(&site.0, "GET ", 1, Some(denied)).await;
    let args = [
        "write",
        "read",
        "head",
        "delete",
        "-t",
        "1",
        "--json",
        "--endpoint",
        &endpoint,
    ];
    let said = site.say(&args).await.exits(2);
    let said = said.says(&["access denied"]);
    let phases = phases(&said);
    assert_eq!(names(&phases), ["write", "read", "delete"]);
    assert_eq!(phases[1]["errors"]["count"], 1);
    assert_eq!(site.objects(), 0);
}

/// It had no keys, so it could store nothing of such a space.
#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_of_a_protected_space_is_stored_and_loaded_with_its_key() {
    for protection in PROTECTIONS {
        let site = Site::new().await;
        let home = site.0.home.path();
        std::fs::write(
            home.join("space.json"),
            space_of("acme", protection).canonical_json(),
        )
        .unwrap();
        let keys = acme_keys(home, "keys.toml", &[1]);
        let bench = [
            "bench",
            "write",
            "read",
            "--space",
            "space.json",
            "--tokens",
            "64",
            "--json",
        ];
        let mut command = site.0.command(&bench);
        let said = Said::new(command.env("KVGATE__KEYS__FILE", keys).output().await.unwrap()).exits(0);
        let phases = phases(&said);
        assert_eq!(phases[1]["ops"], 4, "{protection}: {}", phases[1]);
        site.0.say(&bench).await.exits(1).says(&["key of tenant"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn objects_that_could_not_be_removed_are_named() {
    let site = Site::new().await;
    let endpoint = way_that_answers(&site.0, "DELETE ", usize::MAX, None).await;
    let args = ["write", "delete", "--name", "mine", "-t", "5"];
    let mut command = site.command(&[&args[..], &["--endpoint", &endpoint]].concat());
    command.env("KVGATE__S3__RETRIES", "0");
    let said = Said::new(command.output().await.unwrap()).exits(1);
    assert_eq!(site.objects(), 5);
    let remove = "kvgate bench delete --name mine --objects 5";
    said.says(&["objects may be left", remove]);
    let remove: Vec<&str> = remove.split(' ').skip(2).collect();
    site.say(&remove).await.exits(0);
    assert_eq!(site.objects(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interruption_before_the_first_phase_ends_it() {
    let site = Site::new().await;
    let (listener, endpoint) = listen().await;
    let child = site.command(&["--endpoint", &endpoint]).spawn().unwrap();
    // It is asked for the bucket, and never answers.
    let _asked = listener.accept().await.unwrap();
    signal("-INT", &child);
    let ended = tokio::time::timeout(Duration::from_secs(15), child.wait_with_output());
    let said = Said::new(ended.await.expect("it ends").unwrap()).exits(1);
    said.says(&["interrupted"]);
}

/// Room for one of the requests below in each window, unless the bench makes more.
fn narrow(command: &mut Command) -> &mut Command {
    let windows = ["WINDOW", "WINDOW_MIN", "WINDOW_MAX"];
    let windows = windows.map(|name| (format!("KVGATE__ENDPOINTS__{name}"), "1MiB"));
    command.envs(windows).env("KVGATE__S3__RETRIES", "0")
}

#[tokio::test(flavor = "multi_thread")]
async fn as_many_requests_are_in_flight_as_were_asked_for() {
    let site = Site::new().await;
    for (phase, method, part_size) in [("write", "PUT ", "1MiB"), ("read", "GET ", "512KiB")] {
        let way = Way::to(&site.0, method, 12).await;
        let sizes = ["--object-size", "1MiB", "--part-size", part_size];
        let shape = ["--objects", "12", "-t", "12", "--endpoint", &way.endpoint];
        let args = [&[phase][..], &sizes, &shape].concat();
        Said::new(narrow(&mut site.command(&args)).output().await.unwrap()).exits(0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_put_under_way_at_an_interruption_does_not_come_after_its_delete() {
    let objects = ["write", "delete", "--objects", "4", "--object-size", "30000"];
    let prompt = ["--space", "space.json"];
    for args in [&objects[..], &prompt] {
        let place = Place::new().await;
        std::fs::write(place.home.path().join("space.json"), SPACE_JSON).unwrap();
        let way = Way::to(&place, "PUT ", 5).await;
        let args = [&["bench", "-t", "4", "--endpoint", &way.endpoint], args].concat();
        let child = place.command(&args).spawn().unwrap();
        while way.came() < 4 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        signal("-INT", &child);
        // Longer than other requests get to end after it; the bodies are small, so all of them is on the way by then.
        tokio::time::sleep(Duration::from_secs(3)).await;
        way.open();
        Said::new(child.wait_with_output().await.unwrap())
            .exits(1)
            .says(&["interrupted"]);
        // All requests that were under way are here by now.
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(files(&place.bucket()), Vec::<PathBuf>::new());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_second_interruption_waits_for_nothing() {
    let site = Site::new().await;
    let way = Way::to(&site.0, "PUT ", 5).await;
    let args = [
        "write",
        "delete",
        "--objects",
        "4",
        "-t",
        "4",
        "--endpoint",
        &way.endpoint,
    ];
    // A task that waits for them waits longer than this test does.
    let mut command = site.command(&args);
    let child = command.env("KVGATE__S3__READ_TIMEOUT", "50s").spawn().unwrap();
    while way.came() < 4 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for _ in 0..2 {
        signal("-INT", &child);
        tokio::time::sleep(Duration::from_millis(300)).await;
    }
    let ended = tokio::time::timeout(Duration::from_secs(20), child.wait_with_output());
    let said = Said::new(ended.await.expect("it ends").unwrap()).exits(1);
    said.says(&["interrupted"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn as_many_of_a_prompts_parts_are_in_flight_as_were_asked_for() {
    let place = wide_place().await;
    let cases: [(&[&str], &str, usize); 3] = [
        (&["write", "-t", "4"], "PUT ", 4),
        (&["read", "-t", "6"], "GET ", 6),
        // One layer with the header is more than a part.
        (&["read", "-t", "4", "--layers-first"], "GET ", 4),
    ];
    for (args, method, together) in cases {
        let way = Way::to(&place, method, together).await;
        let shape = ["--part-size", "1MiB", "--endpoint", &way.endpoint];
        let args = [&WIDE[..], args, &shape].concat();
        Said::new(narrow(&mut place.command(&args)).output().await.unwrap()).exits(0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_warm_up_does_everything_once_untimed() {
    let site = Site::new().await;
    for (phase, method) in [
        ("write", "PUT "),
        ("read", "GET "),
        ("head", "HEAD "),
        ("lookup", "HEAD "),
    ] {
        let way = Way::to(&site.0, method, 0).await;
        let done = site
            .phases(&[phase, "--warm-up", "--endpoint", &way.endpoint])
            .await;
        let once = if phase == "read" { 15 } else { 5 };
        assert_eq!(done[0]["ops"], once as u64, "{}", done[0]);
        assert_eq!(way.came(), 2 * once, "{phase}");
    }
    // Objects of the warm-up are removed, too, where the time was too short to write all of them again.
    let short = ["--objects", "50", "--rate-iops", "20", "--time-limit", "190ms"];
    let phases = site
        .phases(&[&["write", "delete", "--warm-up"], &short[..]].concat())
        .await;
    assert!(phases[0]["ops"].as_u64() < Some(50), "{}", phases[0]);
    assert_eq!((phases[1]["ops"].as_u64(), site.objects()), (Some(50), 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_of_which_nothing_was_written_in_time_is_no_work() {
    let place = wide_place().await;
    let args = [&WIDE[..], &["--time-limit", "1us", "--warm-up", "--json"]].concat();
    let said = tokio::time::timeout(Duration::from_secs(60), place.say(&args)).await;
    let phases = phases(&said.expect("it ends").exits(0));
    assert_eq!(names(&phases), ["write", "read", "head", "lookup", "delete"]);
    for phase in phases {
        assert_eq!(phase["ops"], 0, "{phase}");
    }
}
