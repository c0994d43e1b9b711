//! Daemon and engines as processes of their own, which are stopped and killed.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, Command};

use crate::support::daemon::{all, alone, eventually, id, load, load_request, store};
use crate::support::fixture::Prompt;
use crate::support::program::{Place, Said};
use kvgate::engine::client::{Client, ClientError, DaemonAddress};
use kvgate::engine::follower::Follower;
use kvgate::protocol::Order;
use kvgate::protocol::{BoundChunk, LoadRequest};

/// A daemon's place: its S3 server, which outlives it, its socket and disk.
struct Home {
    place: Place,
    socket: PathBuf,
    arena: PathBuf,
}

struct Daemon {
    child: Child,
    client: Client,
}

impl Home {
    async fn new() -> Self {
        let place = Place::new().await;
        let socket = place.home.path().join("kvgate.sock");
        let arena = format!(
            "/dev/shm/kvgate-it-{}-{:016x}",
            std::process::id(),
            fastrand::u64(..)
        );
        Self {
            place,
            socket,
            arena: arena.into(),
        }
    }

    async fn serve(&self, settings: &[(&str, &str)]) -> Daemon {
        self.serve_by(":", settings).await
    }

    /// By a shell that runs `first`.
    async fn serve_by(&self, first: &str, settings: &[(&str, &str)]) -> Daemon {
        let socket = self.socket.display().to_string();
        let arena = self.arena.display().to_string();
        let disk = self.place.home.path().join("disk").display().to_string();
        let direct = self
            .place
            .command(&["serve", "--socket", &socket, "--arena-path", &arena]);
        let mut command = after(first, &direct);
        command
            .env("KVGATE__ARENA__SIZE", "32MiB")
            .env("KVGATE__LOAD__RESERVE", "8MiB")
            .env("KVGATE__LOAD__WINDOW", "4MiB")
            .env("KVGATE__STORE__WRITE_BEHIND", "16MiB")
            .env("KVGATE__DISK__PATHS", disk)
            .env("KVGATE__DISK__SIZE", "64MiB")
            .env("KVGATE__API__GRACE", "100ms")
            .env("KVGATE__API__DEGRADED", "true")
            .env("KVGATE__STORE__COMMIT_TIMEOUT", "10s");
        for (name, value) in settings {
            command.env(name, value);
        }
        let mut child = command.spawn().unwrap();
        if !first_line(&mut child).await.contains("serves") {
            let output = child.wait_with_output().await.unwrap();
            panic!("{}", String::from_utf8_lossy(&output.stderr));
        }
        Daemon {
            child,
            client: Client::new(DaemonAddress::Unix(self.socket.clone())),
        }
    }

    fn engine(&self, action: &str, seed: &str, chunks: usize) -> Child {
        start(&self.socket, &[action, seed, &chunks.to_string()])
    }

    fn rank(&self, action: &str, seed: &str, chunks: usize, of: [&str; 3]) -> Child {
        let chunks = chunks.to_string();
        start(&self.socket, &[action, seed, &chunks, of[0], of[1], of[2]])
    }

    async fn done(&self, action: &str, seed: &str, chunks: usize) -> Value {
        said(self.engine(action, seed, chunks)).await
    }
}

/// The same command, by a shell that becomes it.
fn after(first: &str, direct: &Command) -> Command {
    let direct = direct.as_std();
    let mut command = Command::new("sh");
    command.args(["-c", &format!("{first}; exec \"$0\" \"$@\"")]);
    command.arg(direct.get_program()).args(direct.get_args());
    for (name, value) in direct.get_envs() {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    command
        .current_dir(direct.get_current_dir().expect("a place's"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// The report of an engine that is done.
async fn said(engine: Child) -> Value {
    let output = engine.wait_with_output().await.unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text} {error}"))
}

impl Drop for Home {
    fn drop(&mut self) {
        // The file that a killed daemon leaves.
        let _ = std::fs::remove_file(&self.arena);
    }
}

/// Cargo builds examples with the tests.
fn start(socket: &Path, arguments: &[&str]) -> Child {
    start_with(socket, arguments, &[])
}

fn start_with(socket: &Path, arguments: &[&str], settings: &[(&str, &str)]) -> Child {
    let program = Path::new(env!("CARGO_BIN_EXE_kvgate"))
        .with_file_name("examples")
        .join("engine");
    Command::new(program)
        .arg(socket)
        .args(arguments)
        .envs(settings.iter().copied())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .expect("the engine stand-in is built")
}

async fn first_line(child: &mut Child) -> String {
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(Duration::from_secs(30), lines.next_line()).await;
    let line = line.expect("it says something").unwrap().unwrap_or_default();
    // Writing to a closed pipe fails, so the rest is read.
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    line
}

fn signal(child: &Child, signal: Signal) {
    let pid = i32::try_from(child.id().expect("it runs")).unwrap();
    kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
}

/// Stops a process. Until none of its threads runs any more it may still answer.
async fn hang(child: &Child) {
    signal(child, Signal::STOP);
    until(async || threads_are(child, |state| state == 'T')).await;
}

/// Whether each thread's state is so.
fn threads_are(child: &Child, so: impl Fn(char) -> bool) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.id().unwrap())).unwrap();
    tasks.map(Result::unwrap).all(|task| {
        let stat = std::fs::read_to_string(task.path().join("stat"));
        // One that is gone runs no more.
        stat.map_or(true, |stat| {
            stat.rsplit(") ").next().is_some_and(|rest| rest.starts_with(&so))
        })
    })
}

async fn leases(daemon: &Daemon) -> u64 {
    number(daemon, "/slots/leases").await
}

/// From the daemon's status.
async fn number(daemon: &Daemon, pointer: &str) -> u64 {
    let status = daemon.client.status().await.unwrap();
    status.pointer(pointer).and_then(Value::as_u64).unwrap()
}

async fn until(is: impl AsyncFn() -> bool) {
    for _ in 0..500 {
        if is().await {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("it did not come to that");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_of_a_killed_engine_are_loaded_by_another() {
    let home = Home::new().await;
    let daemon = home.serve(&[]).await;
    let stored = home.done("store", "one", 20).await;
    assert_eq!((&stored["stored"], &stored["skipped"]), (&20.into(), &0.into()));
    let mut filler = home.engine("fill", "two", 4);
    first_line(&mut filler).await;
    let mut holder = home.engine("hold", "one", 20);
    let held: Value = serde_json::from_str(&first_line(&mut holder).await).unwrap();
    assert_eq!((&held["loaded"], &held["wrong"]), (&20.into(), &0.into()));
    assert_eq!(leases(&daemon).await, 20);
    for engine in [&filler, &holder] {
        signal(engine, Signal::KILL);
    }
    until(async || leases(&daemon).await == 0).await;
    let loaded = home.done("load", "one", 20).await;
    assert_eq!(
        (&loaded["loaded"], &loaded["wrong"]),
        (&20.into(), &0.into()),
        "{loaded}"
    );
    let half = home.done("load", "two", 4).await;
    assert_eq!(half["loaded"], 0, "what was not committed is not there: {half}");
    until(async || daemon.client.status().await.unwrap()["sessions"] == Value::Array(Vec::new())).await;
}

/// A process that is stopped can go on at any moment: what it may read or write stays as it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_hangs_keeps_its_slots() {
    let home = Home::new().await;
    let daemon = home.serve(&[("KVGATE__STORE__COMMIT_TIMEOUT", "1500ms")]).await;
    home.done("store", "one", 8).await;
    let (mut holder, mut filler) = (home.engine("hold", "one", 8), home.engine("fill", "two", 3));
    first_line(&mut holder).await;
    first_line(&mut filler).await;
    for engine in [&holder, &filler] {
        signal(engine, Signal::STOP);
    }
    // Past the commit timeout and the grace, and with others that want all the room there is.
    let slots = async || daemon.client.status().await.unwrap()["slots"].clone();
    until(async || slots().await["spoilt"] == 3).await;
    for seed in ["three", "four", "five"] {
        home.done("store", seed, 120).await;
        let loaded = home.done("load", seed, 120).await;
        assert_eq!(loaded["wrong"], 0, "{loaded}");
    }
    let now = slots().await;
    assert_eq!((&now["leases"], &now["spoilt"]), (&8.into(), &3.into()));
    for engine in [&holder, &filler] {
        signal(engine, Signal::KILL);
    }
    until(async || slots().await["leases"] == 0 && slots().await["spoilt"] == 0).await;
}

/// Four of its loads had all of the arena, for as long as it hung.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_hangs_leaves_room_for_the_others() {
    const CHUNKS: usize = 80;
    let home = Home::new().await;
    let daemon = home.serve(&[("KVGATE__LOAD__WINDOW", "8MiB")]).await;
    for seed in [
        "one-0", "one-1", "one-2", "one-3", "two-0", "two-1", "two-2", "two-3", "mine",
    ] {
        assert_eq!(home.done("store", seed, CHUNKS).await["stored"], CHUNKS);
        daemon.client.flush(Some(20_000)).await.unwrap();
    }
    let hang = async |seed, leased| {
        let mut engine = home.engine("hoard", seed, CHUNKS);
        first_line(&mut engine).await;
        until(async || leases(&daemon).await >= leased).await;
        signal(&engine, Signal::STOP);
        engine
    };
    // 40 % of what is not the reserve each, in slots of 100 KiB.
    let _one = hang("one", 90).await;
    for seed in ["mine", "new"] {
        home.done("store", seed, CHUNKS).await;
        let loaded = home.done("load", seed, CHUNKS).await;
        assert_eq!(
            (&loaded["loaded"], &loaded["wrong"]),
            (&CHUNKS.into(), &0.into()),
            "{loaded}"
        );
    }
    // Two of them leave a fifth, and the reserve.
    let _two = hang("two", 180).await;
    assert_eq!(home.done("store", "newer", 20).await["stored"], 20);
    for seed in ["mine", "newer"] {
        let chunks = if seed == "mine" { CHUNKS } else { 20 };
        let loaded = home.done("load", seed, chunks).await;
        assert_eq!(
            (&loaded["loaded"], &loaded["wrong"]),
            (&chunks.into(), &0.into()),
            "{loaded}"
        );
    }
}

/// Where engines that hang have all of it, nothing comes free: nobody waits for the deadline to be told so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_arena_that_is_in_dead_hands_is_full_at_once() {
    const CHUNKS: usize = 80;
    let home = Home::new().await;
    let settings = [
        ("KVGATE__LOAD__WINDOW", "8MiB"),
        ("KVGATE__LOAD__ENGINE_SHARE", "95"),
        ("KVGATE__LOAD__DEADLINE", "1h"),
        ("KVGATE__API__STALLED", "300ms"),
    ];
    let daemon = home.serve(&settings).await;
    for seed in [
        "one-0", "one-1", "one-2", "one-3", "two-0", "two-1", "two-2", "two-3", "mine",
    ] {
        assert_eq!(home.done("store", seed, CHUNKS).await["stored"], CHUNKS);
        daemon.client.flush(Some(20_000)).await.unwrap();
    }
    let patient = |action, seed| {
        start_with(
            &home.socket,
            &[action, seed, &CHUNKS.to_string()],
            &[("KVGATE_TEST_DEADLINE_MS", "3600000")],
        )
    };
    let mut hung = Vec::new();
    for (seed, leased) in [("one", 230), ("two", 320)] {
        let mut engine = patient("hoard", seed);
        first_line(&mut engine).await;
        until(async || leases(&daemon).await >= leased).await;
        signal(&engine, Signal::STOP);
        hung.push(engine);
    }
    let told = tokio::time::timeout(Duration::from_secs(60), said(patient("load", "mine"))).await;
    let told = told.expect("it waits for what never comes");
    assert_eq!(told["wrong"], 0, "{told}");
    let missing = told["missing"].as_array().unwrap();
    assert!(missing.iter().any(|miss| miss == "arena_full"), "{told}");
}

/// Two engines of two ranks want to store the same chunks; a rank of the first one is stopped in the middle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rank_that_is_stopped_leaves_the_chunks_to_another_engine() {
    let home = Home::new().await;
    let daemon = home.serve(&[("KVGATE__STORE__COMMIT_TIMEOUT", "1500ms")]).await;
    let mut stopped = home.rank("fill", "one", 8, ["a", "1", "2"]);
    let first = home.rank("store", "one", 8, ["a", "0", "2"]);
    first_line(&mut stopped).await;
    signal(&stopped, Signal::STOP);
    assert_eq!(said(first).await["stored"], 8);
    let spoilt = async || daemon.client.status().await.unwrap()["slots"]["spoilt"].clone();
    until(async || spoilt().await == 8).await;

    let second = ["0", "1"].map(|rank| home.rank("store", "one", 8, ["b", rank, "2"]));
    let [one, other] = second;
    let stored = futures::join!(said(one), said(other));
    assert_eq!(
        (&stored.0["stored"], &stored.1["stored"]),
        (&8.into(), &8.into()),
        "{stored:?}"
    );
    let loaded = home.done("load", "one", 8).await;
    assert_eq!(
        (&loaded["loaded"], &loaded["wrong"]),
        (&8.into(), &0.into()),
        "{loaded}"
    );
    assert_eq!(spoilt().await, 8, "it may go on at any moment");
    signal(&stopped, Signal::CONT);
    until(async || threads_are(&stopped, |state| state != 'T')).await;
    signal(&stopped, Signal::KILL);
    until(async || spoilt().await == 0).await;
    let loaded = home.done("load", "one", 8).await;
    assert_eq!(
        (&loaded["loaded"], &loaded["wrong"]),
        (&8.into(), &0.into()),
        "{loaded}"
    );
}

/// Killed at any moment: all that it serves afterwards verifies, and all that flush acknowledged is there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_is_killed_serves_nothing_wrong_afterwards() {
    /// Chunks of the store that it is killed in.
    const STORED: usize = 60;
    let full = std::env::var_os("KVGATE_TEST_FULL").is_some();
    let rounds = if full { 200 } else { 20 };
    let home = Home::new().await;
    let mut acknowledged: Option<String> = None;
    let mut under_way = 0;
    for round in 0..rounds {
        let mut daemon = home.serve(&[]).await;
        let seed = format!("round {round}");
        if round % 4 == 0 {
            home.done("store", &seed, 10).await;
            daemon.client.flush(Some(20_000)).await.unwrap();
            acknowledged = Some(seed.clone());
        }
        let [mut storing, _loading] =
            ["store", "load"].map(|action| home.engine(action, &format!("{seed} under way"), STORED));
        let inserted = async || number(&daemon, "/tiers/memory/inserted").await;
        let enough = inserted().await + fastrand::u64(1..STORED as u64 / 2);
        while inserted().await < enough {}
        signal(&daemon.child, Signal::KILL);
        daemon.child.wait().await.unwrap();
        // Its calls were refused then.
        under_way += usize::from(!storing.wait().await.unwrap().success());

        let mut daemon = home.serve(&[]).await;
        let seen = home.done("load", &format!("{seed} under way"), STORED).await;
        assert_eq!(seen["wrong"], 0, "{seen}");
        if let Some(seed) = &acknowledged {
            let there = home.done("load", seed, 10).await;
            assert_eq!(
                (&there["loaded"], &there["wrong"]),
                (&10.into(), &0.into()),
                "{there}"
            );
        }
        // The next one needs its socket and disks.
        daemon.child.kill().await.unwrap();
    }
    assert!(
        under_way * 2 > rounds,
        "a store was under way in {under_way} of {rounds} rounds only"
    );
}

/// It had them on its disk, and S3 had never got them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_that_a_killed_daemon_had_not_sent_are_sent_by_the_next_one() {
    let home = Home::new().await;
    let mut daemon = home
        .serve(&[("KVGATE__S3__ENDPOINT", "http://127.0.0.1:9")])
        .await;
    home.done("store", "unsent", 10).await;
    let dirty = async || daemon.client.status().await.unwrap()["tiers"]["disk"]["disks"][0]["dirty"].clone();
    until(async || dirty().await == 10).await;
    signal(&daemon.child, Signal::KILL);
    daemon.child.wait().await.unwrap();

    let mut daemon = home.serve(&[]).await;
    daemon.client.flush(Some(20_000)).await.unwrap();
    daemon.child.kill().await.unwrap();
    std::fs::remove_dir_all(home.place.home.path().join("disk")).unwrap();
    let _daemon = home.serve(&[]).await;
    let there = home.done("load", "unsent", 10).await;
    assert_eq!(
        (&there["loaded"], &there["wrong"]),
        (&10.into(), &0.into()),
        "{there}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_goes_on_when_its_daemon_was_started_anew() {
    let home = Home::new().await;
    let mut daemon = home.serve(&[]).await;
    let prompt = Prompt::new(6);
    let client = daemon.client.clone();
    let engine = client.engine(alone("one"));
    engine.declare(&prompt.space).await.unwrap();
    let before = engine.session().await.unwrap();
    store(&client, &before, &prompt).await;
    client.flush(Some(20_000)).await.unwrap();
    let mut kept = before
        .load(load_request(&prompt, "kept", Order::Chunk))
        .await
        .unwrap();
    while kept.next().await.unwrap().is_some() {}
    assert_eq!(before.name, engine.session().await.unwrap().name);
    signal(&daemon.child, Signal::KILL);
    daemon.child.wait().await.unwrap();
    until(async || matches!(engine.session().await, Err(ClientError::Connect { .. }))).await;

    let _daemon = home.serve(&[]).await;
    let after = engine.session().await.unwrap();
    let lost = before.release("kept", None).await.unwrap_err().to_string();
    assert!(lost.contains("no_session"), "{lost}");
    // Nothing was declared to this one by hand.
    let found = client.lookup_hashes(&id(&prompt.space), &prompt.hashes, "").await;
    assert_eq!(found.unwrap().prefix, 6);
    assert_eq!(load(&after, &prompt, "again", Order::Chunk).await, all("disk", 6));
}

fn late<T: std::fmt::Debug>(answer: &Result<T, ClientError>) {
    assert!(matches!(answer, Err(ClientError::Late(_))), "{answer:?}");
}

/// It waited for as long as the daemon hung, whatever time it had given it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_that_hangs_hung_its_engines() {
    let home = Home::new().await;
    let daemon = home.serve(&[]).await;
    let prompt = Prompt::new(6);
    let client = daemon.client.with_patience(Duration::from_millis(500));
    let engine = client.engine(alone("one"));
    engine.declare(&prompt.space).await.unwrap();
    let before = engine.session().await.unwrap();
    store(&client, &before, &prompt).await;
    let hurried = || LoadRequest {
        deadline_ms: Some(100),
        ..load_request(&prompt, "lost", Order::Chunk)
    };
    let mut lines = before.load(hurried()).await.unwrap();
    assert!(lines.next().await.unwrap().is_some());
    hang(&daemon.child).await;
    late(&before.load(hurried()).await.map(drop));
    late(&client.flush(Some(100)).await);
    let space = id(&prompt.space);
    late(&client.lookup_hashes(&space, &prompt.hashes, "").await);
    let began = Instant::now();
    let attached = futures::future::join_all((0..8).map(|_| engine.session())).await;
    attached.into_iter().for_each(|one| late(&one.map(drop)));
    assert!(
        began.elapsed() < Duration::from_secs(3),
        "all of them together, not one by one"
    );
    signal(&daemon.child, Signal::CONT);
    // Slots that it was lent without hearing of them go with its session, and it attaches anew.
    drop((lines, before));
    until(async || engine.session().await.is_ok()).await;
    let after = engine.session().await.unwrap();
    assert_eq!(
        load(&after, &prompt, "again", Order::Chunk).await,
        all("memory", 6)
    );
    until(async || leases(&daemon).await == 0).await;
}

/// Routers sent prompts to it for as long as it hung.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_daemon_that_hangs_has_is_withdrawn_and_comes_back() {
    let home = Home::new().await;
    let daemon = home.serve(&[]).await;
    let prompt = Prompt::new(3);
    let engine = daemon.client.attach(&alone("one")).await.unwrap();
    store(&daemon.client, &engine, &prompt).await;
    let follower = Follower::new(&daemon.client, prompt.space.clone(), "blocks".to_owned());
    let _task = tokio::spawn(follower.follow());
    let bound = prompt.hashes.iter().map(|hash| BoundChunk {
        hash: *hash,
        parent: None,
        tokens: vec![0; prompt.space.chunk_tokens() as usize],
        event: String::new(),
    });
    follower.bind(bound.collect(), None, "", "");
    // In memory and on the disk.
    let come = async |is_stored| {
        let seen = Mutex::new(0);
        until(async || {
            let changes = follower.take(9);
            assert!(
                changes.iter().all(|change| change.is_stored == is_stored),
                "{changes:?}"
            );
            let mut seen = seen.lock().unwrap();
            *seen += changes.len();
            *seen == 6
        })
        .await;
    };
    come(true).await;
    signal(&daemon.child, Signal::STOP);
    come(false).await;
    signal(&daemon.child, Signal::CONT);
    come(true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_command_line_asks_a_daemon() {
    let home = Home::new().await;
    let daemon = home.serve(&[]).await;
    let socket = home.socket.display().to_string();
    home.done("store", "one", 3).await;
    let say = async |args: &[&str]| {
        let mut all = args.to_vec();
        all.extend(["--socket", &socket]);
        home.place.say(&all).await
    };
    let flushed = say(&["flush", "--json"]).await.exits(0).json();
    assert_eq!(flushed["pending"], 0);
    say(&["flush", "--deadline", "5s"])
        .await
        .exits(0)
        .says(&["everything committed is on S3"]);
    say(&["flush", "--deadline", "soon"])
        .await
        .exits(2)
        .says(&["--deadline"]);
    let status = say(&["stat", "--json"]).await.exits(0).json();
    assert_eq!(status["tiers"]["memory"]["chunks"], 3);
    say(&["stat"])
        .await
        .exits(0)
        .says(&["3 chunks", "to store", "engines"]);

    let space = status["spaces"][0]["space_id"].as_str().unwrap().to_owned();
    let hash = std::fs::read_dir(home.place.home.path().join("disk").join(&space[..32])).unwrap();
    let hash = hash
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .find(|name| name.len() == 64)
        .unwrap();
    let header = say(&["stat", &hash, "--space", &space]).await.exits(0).json();
    assert_eq!(header["chunk"], hash);
    let hashes = home.place.home.path().join("hashes");
    std::fs::write(&hashes, &hash).unwrap();
    let hashes = hashes.display().to_string();
    let args = ["lookup", "--space", &space, "--hashes", &hashes];
    say(&args).await.exits(0).says(&["memory", "1 chunk"]);
    let found = say(&[&args[..], &["--json"]].concat()).await.exits(0).json();
    assert_eq!((&found["prefix"], &found["mask"]), (&1.into(), &"01".into()));
    let args = ["prefetch", "--space", &space, "--hashes", &hashes];
    say(&args).await.exits(0).says(&["1 chunk"]);
    say(&["health"]).await.exits(0).says(&["ok"]);
    say(&["health", "--ready"]).await.exits(0).says(&["ready"]);
    hang(&daemon.child).await;
    let hanging = [["stat"], ["top"], ["health"]];
    for said in futures::future::join_all(hanging.iter().map(|args| say(args))).await {
        said.exits(1)
            .says(&["did not answer within 5s", "journalctl -u kvgate"]);
    }
    signal(&daemon.child, Signal::CONT);
    drop(daemon);
    let nobody = home.place.say(&["health", "--socket", "/tmp/nobody.sock"]).await;
    nobody.exits(1).says(&["Is `kvgate serve` running"]);
    let mut configured = home.place.command(&["stat"]);
    configured.env("KVGATE__API__SOCKET", "/tmp/nobody.sock");
    let nobody = Said::new(configured.output().await.unwrap());
    nobody.exits(1).says(&["can't reach kvgate at /tmp/nobody.sock"]);
    let nobody = home.place.say(&["flush", "--socket", "/tmp/nobody.sock"]).await;
    nobody.exits(1).says(&["kvgate serve"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn serve_says_what_is_wrong_and_what_to_type() {
    let home = Home::new().await;
    let daemon = home.serve(&[]).await;
    let socket = home.socket.display().to_string();
    let say = async |args: &[&str]| {
        let output = home.place.command(args).output().await.unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stderr).into_owned(),
        )
    };
    let (code, error) = say(&["serve", "--socket", &socket]).await;
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("another kvgate answers"), "{error}");
    let (code, error) = say(&["serve", "--socket", "/proc/nowhere/x"]).await;
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("[api] socket"), "{error}");
    let (code, error) = say(&["serve", "--socket", "/tmp/x.sock", "--listen", "0.0.0.0:0"]).await;
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("token_file"), "{error}");
    let (code, error) = say(&["serve", "--socket", "/tmp/x.sock", "--arena-size", "100MiB"]).await;
    assert_eq!(code, Some(2), "{error}");
    assert!(error.contains("[load] reserve"), "{error}");
    let mut daemon = daemon;
    signal(&daemon.child, Signal::TERM);
    let status = daemon.child.wait().await.unwrap();
    assert_eq!(status.code(), Some(0));
    eventually(|| !home.socket.exists() && !home.arena.exists()).await;
}

/// It was for everybody who can enter the folder above.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_on_disk_are_the_owner_s_alone_with_any_umask() {
    use std::os::unix::fs::PermissionsExt;
    let home = Home::new().await;
    let mut daemon = home.serve_by("umask 0", &[]).await;
    home.done("store", "one", 3).await;
    assert_eq!(daemon.client.flush(Some(20_000)).await.unwrap().pending, 0);
    let (mut files, mut folders) = (0, vec![home.place.home.path().join("disk")]);
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let (path, metadata) = (entry.path(), entry.metadata().unwrap());
            let mode = metadata.permissions().mode() & 0o777;
            if metadata.is_dir() {
                assert_eq!(mode, 0o700, "{path:?}");
                folders.push(path);
            } else {
                assert_eq!(mode & 0o77, 0, "{path:?}");
                files += 1;
            }
        }
    }
    assert!(files >= 4, "three chunks and their space.json: {files}");
    for path in [&home.socket, &home.arena] {
        let mode = std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode & 0o77, 0, "{path:?}: {mode:o}");
    }
    daemon.child.kill().await.unwrap();
}

/// Nobody would have known of the engine's end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_that_cannot_be_watched_is_refused() {
    const FILES: usize = 96;
    let home = Home::new().await;
    let mut daemon = home.serve_by(&format!("ulimit -n {FILES}"), &[]).await;
    let descriptors = format!("/proc/{}/fd", daemon.child.id().unwrap());
    // The shell may have inherited others, above the limit.
    let open = || {
        let all = std::fs::read_dir(&descriptors).unwrap();
        let numbers = all.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<usize>().ok());
        numbers.filter(|&number| number < FILES).count()
    };
    let mut idle = Vec::new();
    let mut refused: Option<String> = None;
    for round in 0..20 {
        // But for one, which the connection of the attach takes.
        while open() < FILES - 1 {
            let before = open();
            idle.push(tokio::net::UnixStream::connect(&home.socket).await.unwrap());
            eventually(|| open() != before).await;
        }
        let client = Client::new(DaemonAddress::Unix(home.socket.clone()));
        let request = alone(&format!("engine {round}"));
        let attach = client.attach(&request);
        let answer = tokio::time::timeout(Duration::from_secs(5), attach).await;
        if let Ok(Err(ClientError::Refused(problem))) = answer {
            refused = Some(problem.code);
            break;
        }
        // Something else was closed or opened at that moment.
        idle.truncate(idle.len().saturating_sub(8));
        eventually(|| open() < FILES - 4).await;
    }
    assert_eq!(refused.as_deref(), Some("no_resources"));
    drop(idle);
    eventually(|| open() < FILES / 2).await;
    home.done("store", "one", 3).await;
    assert_eq!(home.done("load", "one", 3).await["loaded"], 3);
    daemon.child.kill().await.unwrap();
}

/// 5,000 of them were 5,000 lines.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commits_of_slots_that_were_not_written_are_a_line_and_a_count() {
    let home = Home::new().await;
    let daemon = home.serve(&[("KVGATE__LOG__REPEAT", "1s")]).await;
    let lied = home.done("lie", "one", 60).await;
    assert_eq!(lied["stored"], 60);
    assert_eq!(home.done("load", "one", 60).await["loaded"], 0);
    tokio::time::sleep(Duration::from_secs(3)).await;
    signal(&daemon.child, Signal::TERM);
    let output = daemon.child.wait_with_output().await.unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    let lines = log
        .lines()
        .filter(|line| line.contains("a slot that was not written"));
    assert!((2..=5).contains(&lines.count()), "{log}");
    assert!(log.contains("59 times more"), "{log}");
}

/// A server that answers every request with something else that is wrong; how often it was asked.
async fn hostile_server() -> (String, Arc<AtomicUsize>) {
    const ANSWERS: [&str; 5] = [
        "HTTP/1.1 500 Internal Server Error\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 5\r\n\r\nhello",
        "what do you want?\r\n\r\n",
        "",
    ];
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&asked);
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            let count = Arc::clone(&count);
            tokio::spawn(async move {
                let mut request = vec![0; 64 << 10];
                while matches!(socket.read(&mut request).await, Ok(read) if read > 0) {
                    let number = count.fetch_add(1, Ordering::Relaxed);
                    let answer = ANSWERS[number % ANSWERS.len()];
                    if answer.is_empty() || socket.write_all(answer.as_bytes()).await.is_err() {
                        return;
                    }
                }
            });
        }
    });
    (endpoint, asked)
}

/// It was a line for each chunk and try: 12,500 in five minutes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_answers_nonsense_takes_few_lines_of_the_log() {
    let home = Home::new().await;
    let (endpoint, asked) = hostile_server().await;
    let settings = [
        ("KVGATE__S3__ENDPOINT", endpoint.as_str()),
        ("KVGATE__LOG__REPEAT", "1s"),
        ("KVGATE__STORE__RETRY_MAX", "100ms"),
        ("KVGATE__STORE__DRAIN", "100ms"),
        ("KVGATE__LOOKUP__ABSENT_TTL", "100ms"),
    ];
    let daemon = home.serve(&settings).await;
    assert_eq!(home.done("store", "one", 60).await["stored"], 60);
    for _ in 0..5 {
        home.done("load", "another", 60).await;
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    signal(&daemon.child, Signal::TERM);
    let output = daemon.child.wait_with_output().await.unwrap();
    let log = String::from_utf8(output.stderr).unwrap();
    let (lines, asked) = (log.lines().count(), asked.load(Ordering::Relaxed));
    assert!(asked > 300, "{asked} requests are no outage: {log}");
    assert!(lines < 100, "{lines} lines for {asked} requests: {log}");
    assert!(log.contains("times more in 1s"), "{log}");
}
