//! The callers of each call of the daemon: by the unix socket, by TCP, with and without the token.

use std::net::SocketAddr;
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::backends::skip_because;
use crate::support::daemon::{Serving, Site, alone, chunks, id, load, store, write};
use crate::support::fixture::Prompt;
use kvgate::engine::client::{Client, ClientError, DaemonAddress};
use kvgate::protocol::Order;
use kvgate::protocol::{CommitOutcome, ReservedChunk, SlotName};

/// Every call that reads or changes what is cached, and those of sessions.
const CALLS: [(&str, &str); 15] = [
    ("PUT", "/v1/spaces"),
    ("POST", "/v1/lookup"),
    ("POST", "/v1/prefix"),
    ("POST", "/query"),
    ("POST", "/check_blocks"),
    ("POST", "/v1/prefetch"),
    ("POST", "/v1/pin"),
    ("POST", "/v1/unpin"),
    ("POST", "/v1/flush"),
    ("POST", "/v1/reload"),
    ("POST", "/v1/bind"),
    ("POST", "/v1/events"),
    ("GET", "/v1/traces"),
    ("GET", "/v1/chunks/00000000000000000000000000000000/0000"),
    ("DELETE", "/v1/chunks/00000000000000000000000000000000/0000"),
];
const OF_SESSIONS: [&str; 6] = [
    "/v1/attach",
    "/v1/load",
    "/v1/release",
    "/v1/store/reserve",
    "/v1/store/commit",
    "/v1/store/abort",
];
const OPEN: [&str; 7] = [
    "/",
    "/v1/status",
    "/v1/history",
    "/metrics",
    "/healthz",
    "/readyz",
    "/v1/openapi.json",
];

/// The answer to a request with these headers, and a JSON body unless it is a GET.
async fn ask(at: SocketAddr, method: &str, path: &str, headers: &str) -> String {
    let mut stream = TcpStream::connect(at).await.unwrap();
    let body = if method == "GET" { "" } else { "{}" };
    let head = format!(
        "{method} {path} HTTP/1.1\r\nconnection: close\r\ncontent-length: {}\r\n{headers}\r\n{body}",
        body.len()
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

fn status(answer: &str) -> &str {
    answer.split(' ').nth(1).unwrap_or(answer)
}

/// A daemon that also listens by TCP; with a token if it is given one.
async fn serving(site: &Site, token: Option<&str>) -> (Serving, SocketAddr) {
    let path = site.home.path().join("token");
    let path = path.display().to_string();
    let mut settings = vec![("api.listen", "127.0.0.1:0"), ("api.hosts", "kv.example")];
    if let Some(token) = token {
        std::fs::write(&path, token).unwrap();
        settings.push(("api.token_file", &path));
    }
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let at = serving.address.unwrap();
    (serving, at)
}

const JSON: &str = "content-type: application/json\r\n";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_a_token_tcp_serves_status_metrics_health_and_the_page() {
    let site = Site::new().await;
    for token in [None, Some("sesame\n")] {
        let (serving, at) = serving(&site, token).await;
        let headers = format!("host: {at}\r\n{JSON}");
        for path in OPEN {
            assert_eq!(status(&ask(at, "GET", path, &headers).await), "200", "{path}");
        }
        for (method, path) in CALLS {
            assert_eq!(
                status(&ask(at, method, path, &headers).await),
                "401",
                "{method} {path}"
            );
        }
        serving.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_token_is_refused_and_the_right_one_is_not_for_sessions() {
    let site = Site::new().await;
    let (_serving, at) = serving(&site, Some("sesame\n")).await;
    let with = |authorization: &str| format!("host: {at}\r\n{JSON}authorization: {authorization}\r\n");
    for wrong in ["Bearer wrong", "Basic sesame", "sesame", "Bearer"] {
        for path in ["/v1/status", "/v1/flush"] {
            let method = if path == "/v1/flush" { "POST" } else { "GET" };
            assert_eq!(
                status(&ask(at, method, path, &with(wrong)).await),
                "401",
                "{wrong} {path}"
            );
        }
    }
    for (method, path) in CALLS {
        let answer = ask(at, method, path, &with("Bearer sesame")).await;
        assert!(
            !["401", "403"].contains(&status(&answer)),
            "{method} {path}: {answer}"
        );
    }
    for path in OF_SESSIONS {
        let answer = ask(at, "POST", path, &with("Bearer sesame")).await;
        assert_eq!(status(&answer), "403", "{path}");
        assert!(answer.contains("unix_socket_only"), "{answer}");
    }
}

/// As load balancers ask: no browser speaks HTTP/1.0, and none leaves `Host` out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_health_check_by_http_1_0_needs_no_host() {
    let site = Site::new().await;
    let (_serving, at) = serving(&site, None).await;
    for (request, expected) in [
        ("GET /healthz HTTP/1.0\r\n\r\n", "200"),
        ("GET /healthz HTTP/1.0\r\nhost: evil.example\r\n\r\n", "421"),
        ("GET http://evil.example/healthz HTTP/1.0\r\n\r\n", "421"),
        ("GET /healthz HTTP/1.1\r\nconnection: close\r\n\r\n", "421"),
    ] {
        let mut stream = TcpStream::connect(at).await.unwrap();
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        assert_eq!(status(&answer), expected, "{request}: {answer}");
    }
}

/// DNS rebinding: a page's name that resolves to this machine.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_under_another_name_are_refused() {
    let site = Site::new().await;
    let (_serving, at) = serving(&site, Some("sesame\n")).await;
    let port = at.port();
    for host in [
        format!("127.0.0.1:{port}"),
        format!("localhost:{port}"),
        "kv.example".into(),
        "localhost".into(),
    ] {
        let answer = ask(at, "GET", "/v1/status", &format!("host: {host}\r\n")).await;
        assert_eq!(status(&answer), "200", "{host}");
    }
    let others = [
        "host: evil.example\r\n".to_owned(),
        format!("host: evil.example:{port}\r\n"),
        "host: 10.0.0.1\r\n".to_owned(),
        "host: localhost.evil.example\r\n".to_owned(),
        format!("host: x@127.0.0.1:{port}\r\n"),
        format!("host: 127.0.0.1:{port}\r\nhost: evil.example\r\n"),
        "host: \r\n".to_owned(),
        String::new(),
    ];
    for headers in others {
        for path in OPEN {
            let answer = ask(at, "GET", path, &headers).await;
            assert!(
                ["421", "400"].contains(&status(&answer)),
                "{headers:?} {path}: {answer}"
            );
        }
        let known = format!("{headers}{JSON}authorization: Bearer sesame\r\n");
        let answer = ask(at, "POST", "/v1/flush", &known).await;
        assert!(["421", "400"].contains(&status(&answer)), "{headers:?}: {answer}");
    }
    let absolute = format!("http://evil.example:{port}/v1/status");
    let answer = ask(at, "GET", &absolute, &format!("host: 127.0.0.1:{port}\r\n")).await;
    assert_eq!(status(&answer), "421", "{answer}");
}

/// Requests that a form or a script of a page may send to any server without asking it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bodies_of_types_that_a_page_may_send_are_refused() {
    let site = Site::new().await;
    let (_serving, at) = serving(&site, Some("sesame\n")).await;
    let known = format!("host: {at}\r\nauthorization: Bearer sesame\r\n");
    for kind in [
        "",
        "content-type: text/plain\r\n",
        "content-type: application/x-www-form-urlencoded\r\n",
        "content-type: multipart/form-data; boundary=x\r\n",
    ] {
        let answer = ask(at, "POST", "/v1/flush", &format!("{known}{kind}")).await;
        assert_eq!(status(&answer), "415", "{kind:?}: {answer}");
    }
    let answer = ask(
        at,
        "POST",
        "/v1/flush",
        &format!("{known}content-type: application/json; charset=utf-8\r\n"),
    )
    .await;
    assert_eq!(status(&answer), "200", "{answer}");
}

/// Its slot's old bytes became a chunk that every node took for verified.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_of_a_slot_that_was_not_written_publishes_nothing() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::new(3);
    serving.client.declare(&prompt.space).await.unwrap();
    let space = id(&prompt.space);
    let engine = serving.attach("one").await;
    let reserved = engine.reserve(&space, chunks(&prompt)).await.unwrap();
    let names: Vec<SlotName> = reserved
        .chunks
        .iter()
        .map(|chunk| match chunk {
            ReservedChunk::Slot { slot, generation, .. } => SlotName {
                slot: *slot,
                generation: *generation,
            },
            ReservedChunk::Skip { .. } => panic!("{chunk:?}"),
        })
        .collect();
    // The first is not written, the second but for its last plane, the third wholly.
    let last = prompt.space.layout().planes() - 1;
    let mut most = reserved.own.clone();
    assert_eq!(most.len(), 1, "{most:?}");
    most[0].planes.1 = last;
    write(&engine, &prompt, 1, &most, &reserved.chunks[1]);
    write(&engine, &prompt, 2, &reserved.own, &reserved.chunks[2]);
    let committed = engine.commit(names).await.unwrap().slots;
    for refused in &committed[..2] {
        assert!(
            matches!(refused, CommitOutcome::Refused { code, .. } if code == "unwritten"),
            "{refused:?}"
        );
    }
    assert_eq!(committed[2], CommitOutcome::Ok { published: true });
    let found = load(&engine, &prompt, "load", Order::Chunk).await;
    assert_eq!(found, ["absent", "absent", "memory"]);
    // They can be stored by an engine that writes.
    assert_eq!(
        store(&serving.client, &engine, &prompt).await,
        ["stored", "stored", "present"]
    );
    assert_eq!(load(&engine, &prompt, "again", Order::Chunk).await, ["memory"; 3]);
}

/// Its name is all that a call says of a session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sessions_name_is_worth_nothing_to_another_process() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let script = r#"
import json, socket, sys
path, session = sys.argv[1:]
for call in ("load", "release", "store/reserve", "store/commit", "store/abort"):
    body = {"session": session, "space": "0" * 64}
    body |= {"load": {"load_id": "x", "hashes": []}, "release": {"load_id": "x"}, "store/reserve": {"chunks": []}}.get(call, {})
    if call in ("store/commit", "store/abort"):
        body = {"session": session, "slots": []}
    if call == "release":
        body.pop("space")
    text = json.dumps(body)
    with socket.socket(socket.AF_UNIX) as there:
        there.connect(path)
        head = f"POST /v1/{call} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {len(text)}\r\n\r\n{text}"
        there.sendall(head.encode())
        answer = b"".join(iter(lambda: there.recv(4096), b"")).decode()
    print(call, answer.split()[1], "other_process" in answer)
"#;
    let socket = serving.config.api.socket.clone();
    let name = engine.name.clone();
    let ran = tokio::task::spawn_blocking(move || {
        let mut python = Command::new("python3");
        python.args(["-c", script]).arg(socket).arg(name);
        python.stderr(Stdio::inherit()).output().unwrap()
    });
    let said = String::from_utf8(ran.await.unwrap().stdout).unwrap();
    let lines: Vec<&str> = said.lines().collect();
    assert_eq!(lines.len(), 5, "{said}");
    assert!(lines.iter().all(|line| line.ends_with(" 403 True")), "{said}");
    engine.release("x", None).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_clients_gateway_is_roots_or_its_own() {
    if !rustix::process::geteuid().is_root() {
        skip_because(
            "callers::a_clients_gateway_is_roots_or_its_own",
            "only root can make another user's socket",
        );
        return;
    }
    let home = tempfile::tempdir().unwrap();
    let folder = home.path();
    std::fs::set_permissions(folder, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    let socket = folder.join("kvgate.sock");
    let stranger = 65_534;
    let script = "import socket, sys; there = socket.socket(socket.AF_UNIX); there.bind(sys.argv[1]); there.listen(); \
        print('listens', flush=True); [there.accept() for _ in range(9)]";
    let mut listener = Command::new("python3")
        .args(["-c", script])
        .arg(&socket)
        .uid(stranger)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    let out = listener.stdout.take().unwrap();
    std::io::BufRead::read_line(&mut std::io::BufReader::new(out), &mut line).unwrap();
    let client = Client::new(DaemonAddress::Unix(socket));
    let refused = client.status().await;
    assert!(
        matches!(&refused, Err(ClientError::Stranger { uid, .. }) if *uid == stranger),
        "{refused:?}"
    );
    assert!(client.attach(&alone("one")).await.is_err());
    let told = client
        .trusting(Some(stranger))
        .with_patience(std::time::Duration::from_millis(100));
    let late = told.status().await;
    assert!(matches!(late, Err(ClientError::Late(_))), "it is asked: {late:?}");
    listener.kill().unwrap();
    listener.wait().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn session_names_are_random_and_long() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let mut names = std::collections::BTreeSet::new();
    for number in 0..8 {
        let session = serving.attach(&number.to_string()).await;
        assert_eq!(session.name.len(), 32);
        names.insert(session.name.clone());
    }
    assert_eq!(names.len(), 8);
}
