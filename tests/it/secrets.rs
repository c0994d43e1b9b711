//! No secret is ever told: not in a log of everything, not in an answer, not in an error.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::Command;
use tokio::task::JoinHandle;

use crate::support::program::{Place, Said};

const TOKEN: &str = "bearer-a1b2c3d4e5f6";
const NEXT_TOKEN: &str = "bearer-of-the-next-day";
const WRONG_TOKEN: &str = "guess-0f9e8d7c6b5a";
const PASSWORD: &str = "basic-hunter2-hunter2";
const TENANT_SECRET: &str = "5ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2e75ec2";
const TENANT_KEY: &str = "ce15ce15ce15ce15ce15ce15ce15ce15ce15ce15ce15ce15ce15ce15ce15ce15";
const SESSION_TOKEN: &str = "session-token-4711-0815";

/// A program that issues S3's keys, with a session token, for some seconds at a time.
fn issuer(place: &Place) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let (program, config) = (
        place.home.path().join("issue"),
        place.home.path().join("aws-config"),
    );
    let script = format!(
        r#"#!/bin/sh
echo '{{"Version": 1, "AccessKeyId": "{}", "SecretAccessKey": "{}", "SessionToken": "{SESSION_TOKEN}", "Expiration": "'$(date -u -d '+3 seconds' +%Y-%m-%dT%H:%M:%SZ)'"}}'
"#,
        place.s3.access_key(),
        place.s3.secret_key(),
    );
    std::fs::write(&program, script).unwrap();
    std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o700)).unwrap();
    let text = format!("[profile fleet]\ncredential_process = {}\n", program.display());
    std::fs::write(&config, text).unwrap();
    config
}

/// The keys of the tenant without a name, which the engines are.
fn key_file(place: &Place) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt;
    let folder = place.home.path();
    for (name, text) in [("secret", TENANT_SECRET), ("key", TENANT_KEY)] {
        std::fs::write(folder.join(name), text).unwrap();
        std::fs::set_permissions(folder.join(name), std::fs::Permissions::from_mode(0o400)).unwrap();
    }
    let file = folder.join("keys.toml");
    let text = format!(
        "[[tenant]]\nname = \"\"\nsecret = \"file:{0}/secret\"\nkeys = [\"file:{0}/key\"]\n",
        folder.display()
    );
    std::fs::write(&file, text).unwrap();
    file
}

/// All that comes, as it comes: a full pipe would stop who writes.
fn collect(mut from: impl AsyncReadExt + Send + Unpin + 'static) -> JoinHandle<String> {
    tokio::spawn(async move {
        let mut text = Vec::new();
        from.read_to_end(&mut text).await.unwrap();
        String::from_utf8_lossy(&text).into_owned()
    })
}

async fn ask(address: &str, call: &str, headers: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!(
        "{call} HTTP/1.1\r\nhost: {address}\r\nconnection: close\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n{headers}\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

async fn engine(socket: &Path, action: &str, seed: &str) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_kvgate"))
        .with_file_name("examples")
        .join("engine");
    let output = Command::new(program)
        .args([socket.as_os_str(), action.as_ref(), seed.as_ref(), "6".as_ref()])
        .output()
        .await
        .unwrap();
    String::from_utf8(output.stdout).unwrap() + &String::from_utf8_lossy(&output.stderr)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_log_of_everything_under_load_tells_no_secret() {
    let place = Place::new().await;
    let (config, keys, token) = (issuer(&place), key_file(&place), place.home.path().join("token"));
    std::fs::write(&token, TOKEN).unwrap();
    let (socket, arena) = (
        place.home.path().join("kvgate.sock"),
        format!(
            "/dev/shm/kvgate-it-{}-{:016x}",
            std::process::id(),
            fastrand::u64(..)
        ),
    );
    let with_settings = |args: &[&str]| {
        let mut command = place.command(args);
        command
            .env_remove("AWS_ACCESS_KEY_ID")
            .env_remove("AWS_SECRET_ACCESS_KEY")
            .env("AWS_CONFIG_FILE", &config)
            .env("AWS_PROFILE", "fleet")
            .env("KVGATE__API__SOCKET", &socket)
            .env("KVGATE__API__LISTEN", "127.0.0.1:0")
            .env("KVGATE__API__TOKEN_FILE", &token)
            .env("KVGATE__KEYS__FILE", &keys)
            .env("KVGATE__ARENA__PATH", &arena)
            .env("KVGATE__ARENA__SIZE", "32MiB")
            .env("KVGATE__LOAD__RESERVE", "8MiB")
            .env("KVGATE__LOAD__WINDOW", "4MiB")
            .env("KVGATE__STORE__WRITE_BEHIND", "16MiB")
            .env("KVGATE__STORE__DRAIN", "1s")
            .env("KVGATE__LOG__LEVEL", "trace")
            .env("KVGATE__S3__READ_TIMEOUT", "1s");
        command
    };
    let mut daemon = with_settings(&["serve", "-vvv"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let log = collect(daemon.stderr.take().unwrap());
    let mut lines = BufReader::new(daemon.stdout.take().unwrap()).lines();
    let address = loop {
        let line = tokio::time::timeout(Duration::from_secs(30), lines.next_line()).await;
        let line = line.unwrap().unwrap().expect("it serves");
        if let Some((_, url)) = line.split_once("http://") {
            break url.trim_end_matches('/').to_owned();
        }
    };
    let said = collect(lines.into_inner());
    let mut told = Vec::new();
    let limits = std::fs::read_to_string(format!("/proc/{}/limits", daemon.id().unwrap())).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size"));
    let core: Vec<&str> = core.unwrap().split_whitespace().collect();
    assert_eq!(
        core[4..6],
        ["0", "0"],
        "with keys in its memory it writes no core file"
    );

    let bearer = |token: &str| format!("authorization: Bearer {token}\r\n");
    let tcp = async |headers: &str| {
        let mut told = String::new();
        for call in [
            "POST /v1/lookup",
            "POST /v1/flush",
            "POST /v1/attach",
            "GET /v1/status",
        ] {
            told += &ask(&address, call, headers, "{}").await;
        }
        told
    };
    let basic = format!("authorization: Basic {PASSWORD}\r\n");
    let (right, wrong) = (bearer(TOKEN), bearer(WRONG_TOKEN));
    for round in ["1", "2", "3"] {
        let seeds = [format!("{round}a"), format!("{round}b")];
        let stores = futures::future::join_all(seeds.iter().map(|seed| engine(&socket, "store", seed)));
        let calls = async { [tcp(&right).await, tcp(&wrong).await, tcp(&basic).await] };
        let (stored, called) = tokio::join!(stores, calls);
        assert!(stored.iter().all(|said| said.contains("stored")), "{stored:?}");
        assert!(
            called[0].contains("200 OK") && called[1].contains("401"),
            "{called:?}"
        );
        told.extend(called);
        for seed in &seeds {
            told.push(engine(&socket, "load", seed).await);
        }
    }
    // The keys have been issued anew meanwhile, if only for this.
    tokio::time::sleep(Duration::from_secs(3)).await;
    told.push(engine(&socket, "store", "later").await);
    let flushed = ask(&address, "POST /v1/flush", &right, "{}").await;
    assert!(flushed.contains("200 OK"), "{flushed}");
    for path in ["/", "/v1/status", "/metrics", "/readyz"] {
        told.push(ask(&address, &format!("GET {path}"), "", "").await);
    }
    // Another token, by a signal; a query that no call takes.
    std::fs::write(&token, NEXT_TOKEN).unwrap();
    let pid = Pid::from_raw(i32::try_from(daemon.id().unwrap()).unwrap()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    while !ask(&address, "POST /v1/flush", &bearer(NEXT_TOKEN), "{}")
        .await
        .contains("200 OK")
    {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    told.push(
        ask(
            &address,
            &format!("GET /v1/status?token={NEXT_TOKEN}"),
            &right,
            "",
        )
        .await,
    );
    told.push(format!(
        "{:?}",
        Said::new(with_settings(&["config", "show"]).output().await.unwrap())
    ));
    let secret = place.s3.secret_key().to_owned();
    // S3 is gone: errors tell much.
    place.s3.stop().await;
    told.push(engine(&socket, "store", "last").await);
    kill_process(pid, Signal::TERM).unwrap();
    daemon.wait().await.unwrap();
    let (log, said) = (log.await.unwrap(), said.await.unwrap());
    let _ = std::fs::remove_file(&arena);

    assert!(log.contains("DEBUG kvgate::"), "a log of everything: {log}");
    assert!(
        log.contains("aws_") || log.contains("hyper"),
        "of libraries, too: {log}"
    );
    told.extend([log, said]);
    for (name, secret) in [
        ("the secret key", secret.as_str()),
        ("the session token", SESSION_TOKEN),
        ("the token", TOKEN),
        ("the next token", NEXT_TOKEN),
        ("a wrong token", WRONG_TOKEN),
        ("the tenant's secret", TENANT_SECRET),
        ("the tenant's key", TENANT_KEY),
        ("a password", PASSWORD),
        ("a signature", "Signature="),
    ] {
        for text in &told {
            let at = text.find(secret);
            let around = at.map(|at| text[..at].rsplit('\n').next().unwrap_or_default());
            assert!(at.is_none(), "{name} is told after: {around:?}");
        }
    }
}
