//! The API under those who mean ill, or know no better: the others are served, and memory stays bounded.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::fixture::Prompt;
use crate::serving::{Site, all, eventually, id, load, load_request, store};

/// Of this process, in MiB.
fn resident_mib() -> usize {
    let text = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: usize = text.split_whitespace().nth(1).unwrap().parse().unwrap();
    (pages * 4096) >> 20
}

pub async fn say(stream: &mut UnixStream, text: &str) -> String {
    stream.write_all(text.as_bytes()).await.unwrap();
    let mut answer = vec![0; 4096];
    let read = stream.read(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer[..read]).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousands_who_hang_are_in_nobodys_way() {
    let site = Site::new().await;
    let serving = site
        .serve(&[("api.connections", "500"), ("api.timeout", "60s")])
        .await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(4);
    store(&serving.client, &engine, &prompt).await;
    let before = resident_mib();
    let mut hung = Vec::new();
    for i in 0..2000 {
        let mut stream = UnixStream::connect(&serving.config.api.socket).await.unwrap();
        if i % 2 == 0 {
            let _ = stream
                .write_all(b"POST /v1/lookup HTTP/1.1\r\nhost: x\r\ncontent-le")
                .await;
        }
        hung.push(stream);
        if i % 500 == 0 {
            let began = Instant::now();
            assert_eq!(
                load(
                    &engine,
                    &prompt,
                    &format!("load {i}"),
                    kvgate::gateway::Order::Chunk
                )
                .await,
                all("memory", 4)
            );
            assert!(began.elapsed() < Duration::from_secs(5));
        }
    }
    assert_eq!(
        load(&engine, &prompt, "last", kvgate::gateway::Order::Chunk).await,
        all("memory", 4)
    );
    assert!(
        resident_mib() < before + 100,
        "{} MiB and then {}",
        before,
        resident_mib()
    );
    assert_eq!(
        serving.node.status().sessions.len(),
        1,
        "an attached engine is no idle one"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn garbage_is_refused_and_costs_nothing() {
    let site = Site::new().await;
    let serving = site.serve(&[("api.body_max", "1MiB")]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(2);
    store(&serving.client, &engine, &prompt).await;
    let before = resident_mib();
    // A gigabyte, or as much of it as is taken, in four ways.
    let mib = vec![0xa5_u8; 1 << 20];
    let full = std::env::var_os("KVGATE_TEST_FULL").is_some();
    let mibs = if full { 1024 } else { 128 };
    for head in [
        "",
        "POST /v1/lookup HTTP/1.1\r\nhost: x\r\ncontent-length: 1073741824\r\n\r\n",
        "POST /v1/load HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n40000000\r\n",
        "GET / HTTP/1.1\r\nx: ",
    ] {
        let mut stream = UnixStream::connect(&serving.config.api.socket).await.unwrap();
        stream.write_all(head.as_bytes()).await.unwrap();
        for _ in 0..mibs {
            if stream.write_all(&mib).await.is_err() {
                break;
            }
        }
    }
    for body in [
        "{",
        "[]",
        "null",
        "{\"space\": 7}",
        "{\"spice\": \"\"}",
        "\u{0}",
        "{\"space\":\"zz\",\"hashes\":[\"zz\"]}",
    ] {
        for path in [
            "lookup",
            "load",
            "release",
            "store/reserve",
            "store/commit",
            "attach",
            "prefetch",
            "pin",
            "flush",
        ] {
            let mut stream = UnixStream::connect(&serving.config.api.socket).await.unwrap();
            let request = format!(
                "POST /v1/{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n{body}",
                body.len()
            );
            let answer = say(&mut stream, &request).await;
            assert!(answer.starts_with("HTTP/1.1 4"), "{path} {body}: {answer}");
            assert!(answer.contains("application/problem+json"), "{answer}");
        }
    }
    assert_eq!(
        load(&engine, &prompt, "a", kvgate::gateway::Order::Chunk).await,
        all("memory", 2)
    );
    assert!(
        resident_mib() < before + 64,
        "{} MiB and then {}",
        before,
        resident_mib()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_stops_reading_holds_up_nobody() {
    let site = Site::new().await;
    let settings = [("api.timeout", "3s"), ("load.window", "2MiB")];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(30);
    store(&serving.client, &engine, &prompt).await;
    serving.flush().await;
    // Loads whose lines nobody reads, and a chunk that nobody takes.
    let mut stuck = Vec::new();
    for i in 0..8 {
        let mut request = load_request(&prompt, &format!("stuck {i}"), kvgate::gateway::Order::Chunk);
        request.session.clone_from(&engine.name);
        let body = serde_json::to_string(&request).unwrap();
        let mut stream = UnixStream::connect(&serving.config.api.socket).await.unwrap();
        let head = format!(
            "POST /v1/load HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        stuck.push(stream);
    }
    let mut taker = UnixStream::connect(&serving.config.api.socket).await.unwrap();
    let path = format!("/v1/chunks/{}/{}", id(&prompt.space), prompt.hashes[29]);
    for _ in 0..200 {
        let _ = taker
            .write_all(format!("GET {path} HTTP/1.1\r\nhost: x\r\n\r\n").as_bytes())
            .await;
    }
    let other = serving.attach("other").await;
    for round in 0..5 {
        let words = load(
            &other,
            &prompt,
            &format!("load {round}"),
            kvgate::gateway::Order::Chunk,
        )
        .await;
        assert_eq!(words, all("memory", 30));
    }
    drop((stuck, taker));
    engine.release("stuck 0", None).await.unwrap();
    drop(engine);
    eventually(|| serving.node.status().slots.leases == 0).await;
}
