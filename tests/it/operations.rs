//! A daemon as systemd and operators see it.

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use kvgate::engine::client::{Client, ClientError, DaemonAddress};
use kvgate::s3::object::{Condition, ErrorKind};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::net::{UnixDatagram, UnixStream};
use tokio::process::{Child, ChildStderr, ChildStdout};

use crate::abuse::say;
use crate::support::daemon::{Site, alone, eventually};
use crate::support::program::kvgate;
use crate::support::way;

/// `kvgate serve --embedded`, as a process of its own.
struct Served {
    home: TempDir,
    child: Child,
    out: Lines<BufReader<ChildStdout>>,
    err: Lines<BufReader<ChildStderr>>,
}

impl Served {
    async fn new(arguments: &[&str], settings: &[(&str, &str)]) -> Self {
        Self::over(Some("data"), arguments, settings).await
    }

    /// Over an S3 server of its own, or the one of the settings.
    async fn over(embedded: Option<&str>, arguments: &[&str], settings: &[(&str, &str)]) -> Self {
        let home = TempDir::new().unwrap();
        let mut command = kvgate(home.path(), &["serve"]);
        command
            .args(embedded.iter().flat_map(|folder| ["--embedded", folder]))
            .arg("--socket")
            .arg(home.path().join("kvgate.sock"))
            .arg("--arena-path")
            .arg(arena(home.path()))
            .args(["--arena-size", "32MiB"])
            .args(arguments)
            .current_dir(home.path())
            .env("KVGATE__LOAD__RESERVE", "8MiB")
            .env("KVGATE__STORE__WRITE_BEHIND", "16MiB")
            .envs(settings.iter().copied())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let (out, err) = (child.stdout.take().unwrap(), child.stderr.take().unwrap());
        let mut served = Self {
            home,
            child,
            out: BufReader::new(out).lines(),
            err: BufReader::new(err).lines(),
        };
        says(&mut served.out, "serves").await;
        served
    }

    fn client(&self) -> Client {
        Client::new(DaemonAddress::Unix(self.socket()))
    }

    fn socket(&self) -> PathBuf {
        self.home.path().join("kvgate.sock")
    }

    fn signal(&self, signal: Signal) {
        let pid = i32::try_from(self.child.id().expect("it runs")).unwrap();
        kill_process(Pid::from_raw(pid).unwrap(), signal).unwrap();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // The file that it leaves if it is killed.
        let _ = std::fs::remove_file(arena(self.home.path()));
    }
}

fn arena(home: &Path) -> PathBuf {
    let name = home.file_name().unwrap().display();
    format!("/dev/shm/kvgate-it-{name}").into()
}

/// The lines up to the one that has this word.
async fn says<R: AsyncRead + Unpin>(lines: &mut Lines<BufReader<R>>, word: &str) -> Vec<String> {
    let mut said = Vec::new();
    let all = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            said.push(line);
            if said.last().is_some_and(|line| line.contains(word)) {
                return;
            }
        }
        panic!("it ended");
    };
    let in_time = tokio::time::timeout(Duration::from_secs(30), all).await;
    assert!(in_time.is_ok(), "{word:?} was not said: {said:?}");
    said
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn systemd_is_told_that_it_is_ready_alive_and_stopping() {
    let folder = TempDir::new().unwrap();
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path).unwrap();
    let told = async || {
        let mut buffer = [0; 256];
        let received = tokio::time::timeout(Duration::from_secs(30), socket.recv(&mut buffer)).await;
        let len = received.expect("it is told something").unwrap();
        String::from_utf8(buffer[..len].to_vec()).unwrap()
    };
    let within = Duration::from_secs(2);
    let settings = [
        ("NOTIFY_SOCKET", path.to_str().unwrap()),
        ("WATCHDOG_USEC", &within.as_micros().to_string()),
    ];
    let mut served = Served::new(&[], &settings).await;
    let (mut ready, mut alive) = (0, Vec::new());
    while ready == 0 || alive.len() < 4 {
        match told().await.as_str() {
            "READY=1" => ready += 1,
            "WATCHDOG=1" => alive.push(Instant::now()),
            other => panic!("{other}"),
        }
    }
    assert_eq!(ready, 1);
    for pair in alive.windows(2) {
        assert!(pair[1] - pair[0] < within, "{alive:?}");
    }
    served.signal(Signal::TERM);
    while told().await != "STOPPING=1" {}
    assert!(served.child.wait().await.unwrap().success());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_changes_the_token_and_the_log_level() {
    let folder = TempDir::new().unwrap();
    let (config, token) = (folder.path().join("kvgate.toml"), folder.path().join("token"));
    let write = |level: &str, secret: &str| {
        std::fs::write(&token, secret).unwrap();
        let text = format!(
            "[log]\nlevel = {level:?}\n[api]\nlisten = \"127.0.0.1:0\"\ntoken_file = {:?}\n",
            token.display().to_string()
        );
        std::fs::write(&config, text).unwrap();
    };
    write("error", "first");
    let mut served = Served::new(&["--config", config.to_str().unwrap()], &[]).await;
    let lines = says(&mut served.out, "status").await;
    let address = lines.last().unwrap().split("http://").nth(1).unwrap();
    let address = address.trim_end_matches('/').parse().unwrap();
    let works = async |token: &str| {
        let client = Client::with_token(DaemonAddress::Tcp(address), Some(token));
        match client.status().await {
            Ok(_) => true,
            Err(ClientError::Refused(problem)) if problem.code == "unauthorized" => false,
            Err(error) => panic!("{error}"),
        }
    };
    // Each is told of at level info.
    let client = served.client();
    let attach = async |instance: &str| drop(client.attach(&alone(instance)).await.unwrap());
    let tokens = async || [works("first").await, works("second").await, works("third").await];

    attach("unheard").await;
    assert_eq!(tokens().await, [true, false, false]);
    write("info", "second");
    served.signal(Signal::HUP);
    let silence = says(&mut served.err, "reloaded").await;
    assert_eq!(silence.len(), 1, "{silence:?}");
    assert_eq!(tokens().await, [false, true, false]);
    attach("heard").await;
    says(&mut served.err, "heard").await;

    write("error", "third");
    let socket = served.socket();
    let reload = async || {
        let mut stream = UnixStream::connect(&socket).await.unwrap();
        let answer = say(&mut stream, "POST /v1/reload HTTP/1.1\r\nhost: x\r\n\r\n").await;
        assert!(
            answer.ends_with(r#"{"reloaded":["log.level","api.token_file"]}"#),
            "{answer}"
        );
    };
    reload().await;
    assert_eq!(tokens().await, [false, false, true]);
    attach("hushed").await;
    write("info", "third");
    reload().await;
    attach("again").await;
    let said = says(&mut served.err, "again").await;
    assert!(!said.iter().any(|line| line.contains("hushed")), "{said:?}");
}

/// `kill -HUP` did well whatever the daemon said.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_units_reload_fails_when_it_is_refused() {
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("kvgate.toml");
    std::fs::write(&config, "[log]\nlevel = \"info\"\n").unwrap();
    let mut served = Served::new(&["--config", config.to_str().unwrap()], &[]).await;
    let unit = include_str!("../../docs/kvgate.service");
    let reload = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecReload="))
        .unwrap();
    let reload = reload.replace("/run/kvgate/kvgate.sock", served.socket().to_str().unwrap());
    let mut words = reload.split(' ');
    let mut command = tokio::process::Command::new(words.next().unwrap());
    command.args(words);
    assert!(command.status().await.unwrap().success());
    std::fs::write(&config, "[log]\nlevel = \"shrill\"\n").unwrap();
    assert!(!command.status().await.unwrap().success());
    says(&mut served.err, "not reloaded").await;
}

/// The log alone would tell it to nobody who takes a stolen key away.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_reload_is_a_trouble_until_one_succeeds() {
    let folder = TempDir::new().unwrap();
    let config = folder.path().join("kvgate.toml");
    std::fs::write(&config, "[log]\nlevel = \"info\"\n").unwrap();
    let mut served = Served::new(&["--config", config.to_str().unwrap()], &[]).await;
    // At once: a daemon that serves takes signals.
    served.signal(Signal::HUP);
    says(&mut served.err, "reloaded").await;
    let (client, socket) = (served.client(), served.socket());
    let seen = async || {
        let troubles = client.status().await.unwrap()["troubles"].to_string();
        let mut stream = UnixStream::connect(&socket).await.unwrap();
        let asked = b"GET /metrics HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n";
        stream.write_all(asked).await.unwrap();
        let mut metrics = String::new();
        stream.read_to_string(&mut metrics).await.unwrap();
        let failed = metrics.contains("\nkvgate_reload_failed 1");
        assert_ne!(failed, metrics.contains("\nkvgate_reload_failed 0"));
        assert_eq!(
            failed,
            troubles.contains("The last reload was refused"),
            "{troubles}"
        );
        failed.then_some(troubles)
    };
    assert_eq!(seen().await, None);
    std::fs::write(&config, "[log]\nlevel = \"shrill\"\n").unwrap();
    served.signal(Signal::HUP);
    says(&mut served.err, "not reloaded").await;
    let troubles = seen().await.unwrap();
    assert!(
        troubles.contains("shrill") && troubles.contains("reload again"),
        "{troubles}"
    );
    std::fs::write(&config, "[log]\nlevel = \"info\"\n").unwrap();
    served.signal(Signal::HUP);
    says(&mut served.err, "reloaded").await;
    assert_eq!(seen().await, None);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn it_is_not_ready_before_s3_has_answered() {
    let mut site = Site::new().await;
    site.stop_s3().await;
    let serving = site.serve(&[("api.degraded", "true")]).await;
    serving.client.get("/readyz").await.unwrap();
    serving.end().await;
    let serving = site.serve(&[]).await;
    let ready = async || serving.client.get("/readyz").await;
    match ready().await {
        Err(ClientError::Refused(problem)) => {
            assert_eq!((problem.status, problem.code.as_str()), (503, "not_ready"));
        }
        other => panic!("{other:?}"),
    }
    serving.client.get("/healthz").await.unwrap();
    site.start_s3().await;
    serving.ready().await;
    ready().await.unwrap();
}

/// A used-up quota is a 403, too. It kept a starting node from ready, and looked like wrong keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_quota_that_is_used_up_leaves_a_node_ready_and_is_told_as_such() {
    const REFUSED: &str = "HTTP/1.1 403 Forbidden\r\nContent-Length: 51\r\nx-amz-request-id: 1\r\nConnection: close\r\n\r\n\
                           <Error><Code>QuotaExceeded</Code><Message/></Error>";
    let site = Site::new().await;
    let is_full = Arc::new(AtomicBool::new(true));
    let full = Arc::clone(&is_full);
    let is_put = move |piece: &[u8]| full.load(Ordering::Relaxed) && piece.starts_with(b"PUT ");
    let server = site.config(&[]).s3.endpoint.unwrap();
    let way = way::that_answers(&server, is_put, usize::MAX, Some(REFUSED)).await;
    let store = site.store_with(|options| options.endpoint = Some(way)).await;
    let serving = site.serve_over(Arc::clone(&store), &[]).await;
    serving.ready().await;
    let told = async || {
        let status = serving.client.status().await.unwrap();
        (
            status["s3"]["over_quota"].clone(),
            status["troubles"].as_array().unwrap().clone(),
        )
    };
    // Refused often enough to look like denied keys.
    while serving.client.status().await.unwrap()["s3"]["endpoints"][0]["denied_in_a_row"].as_u64() < Some(3) {
        let deadline = tokio::time::Instant::now() + Duration::from_secs(30);
        let put = store.put("full", "".into(), Condition::Always, deadline);
        assert_eq!(put.await.unwrap_err().kind, ErrorKind::Quota);
    }
    let (over, troubles) = told().await;
    assert_eq!(over, true);
    assert_eq!(troubles.len(), 1, "{troubles:#?}");
    assert!(
        troubles[0]["what"].as_str().unwrap().contains("quota"),
        "{troubles:#?}"
    );
    assert!(
        troubles[0]["todo"].as_str().unwrap().contains("kvgate gc"),
        "{troubles:#?}"
    );
    is_full.store(false, Ordering::Relaxed);
    eventually(|| serving.node.gateway().known_capabilities().is_some()).await;
    let (over, troubles) = told().await;
    assert_eq!((over, troubles), (false.into(), Vec::new()));
}

/// It was a line for each chunk and try.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_outage_takes_a_few_lines_and_says_how_many_it_counted() {
    let mut site = Site::new().await;
    let s3 = site.config(&[]).s3.endpoint.unwrap();
    let settings = [
        ("KVGATE__S3__ENDPOINT", s3.as_str()),
        ("KVGATE__S3__BUCKET", crate::support::daemon::BUCKET),
        ("KVGATE__S3__RETRIES", "0"),
        ("KVGATE__STORE__RETRY_MAX", "10ms"),
        ("KVGATE__LOG__REPEAT", "1s"),
        ("AWS_ACCESS_KEY_ID", "kvgate-embedded"),
        ("AWS_SECRET_ACCESS_KEY", "kvgate-embedded-secret"),
    ];
    let mut served = Served::over(None, &[], &settings).await;
    let client = served.client();
    let ready = Instant::now() + Duration::from_secs(30);
    while client.get("/readyz").await.is_err() {
        assert!(Instant::now() < ready, "S3 is there");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    site.stop_s3().await;
    let engine = client.attach(&alone("one")).await.unwrap();
    crate::support::daemon::store(&client, &engine, &crate::support::fixture::Prompt::new(60)).await;
    let mut lines = Vec::new();
    for _ in 0..3 {
        lines.extend(says(&mut served.err, "times more in 1s").await);
    }
    let status = client.status().await.unwrap();
    let failed = status["tiers"]["write_behind"]["failed_attempts"]
        .as_u64()
        .unwrap();
    let waits = lines
        .iter()
        .filter(|line| line.contains("wait to be stored"))
        .count();
    assert!(failed > 100, "{failed} attempts");
    assert_eq!(waits, 4, "one when it began, and the counts: {lines:#?}");
    assert!(lines.len() < 20, "{lines:#?}");
    site.start_s3().await;
    says(&mut served.err, "that is over").await;
}
