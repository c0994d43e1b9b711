//! The API under those who mean ill, or know no better: the others are served, and memory stays bounded.

use std::time::{Duration, Instant};

use kvgate::format::Space;
use kvgate::protocol::Order;
use kvgate::protocol::{LookupRequest, ReserveChunk, ReservedChunk, SlotName};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;

use crate::support::daemon::{Site, all, chunks, eventually, id, load, load_request, store};
use crate::support::fixture::Prompt;

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
                    kvgate::protocol::Order::Chunk
                )
                .await,
                all("memory", 4)
            );
            assert!(began.elapsed() < Duration::from_secs(5));
        }
    }
    assert_eq!(
        load(&engine, &prompt, "last", kvgate::protocol::Order::Chunk).await,
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
        load(&engine, &prompt, "a", kvgate::protocol::Order::Chunk).await,
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
async fn a_client_that_stops_reading_holds_up_nobody() {
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
        let mut request = load_request(&prompt, &format!("stuck {i}"), kvgate::protocol::Order::Chunk);
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
            kvgate::protocol::Order::Chunk,
        )
        .await;
        assert_eq!(words, all("memory", 30));
    }
    drop((stuck, taker));
    engine.release("stuck 0", None).await.unwrap();
    drop(engine);
    eventually(|| serving.node.status().slots.leases == 0).await;
}

/// Values that a body must not have where it has others, or may.
fn strange(random: &mut fastrand::Rng, known: &[Value]) -> Value {
    match random.u8(..12) {
        0 => Value::Null,
        1 => json!(true),
        2 => json!(-1),
        3 => json!(0),
        4 => json!(u64::MAX),
        5 => json!(1e300),
        6 => json!(""),
        7 => json!("\u{0}\u{fffd}".repeat(500)),
        8 => json!([]),
        9 => json!({}),
        _ => known[random.usize(..known.len())].clone(),
    }
}

/// The `at`-th value of a tree, counted down: itself first, then what is in it.
fn nth<'a>(value: &'a mut Value, at: &mut usize) -> Option<&'a mut Value> {
    if *at == 0 {
        return Some(value);
    }
    *at -= 1;
    match value {
        Value::Array(items) => items.iter_mut().find_map(|item| nth(item, at)),
        Value::Object(fields) => fields.values_mut().find_map(|field| nth(field, at)),
        _ => None,
    }
}

fn values_of(value: &Value) -> usize {
    1 + match value {
        Value::Array(items) => items.iter().map(values_of).sum(),
        Value::Object(fields) => fields.values().map(values_of).sum(),
        _ => 0,
    }
}

/// A body with one to three changes, of which most leave it JSON.
fn changed(random: &mut fastrand::Rng, body: &Value, known: &[Value]) -> Vec<u8> {
    let mut body = body.clone();
    for _ in 0..random.usize(1..4) {
        let mut at = random.usize(..values_of(&body));
        let Some(value) = nth(&mut body, &mut at) else {
            continue;
        };
        match (random.u8(..4), &mut *value) {
            (0, Value::Object(fields)) if !fields.is_empty() => {
                let name = fields.keys().nth(random.usize(..fields.len())).unwrap().clone();
                fields.remove(&name);
            }
            (1, Value::Object(fields)) => {
                fields.insert("more".into(), strange(random, known));
            }
            (0, Value::Array(items)) if !items.is_empty() => {
                let item = items[random.usize(..items.len())].clone();
                items.extend(vec![item; random.usize(1..50)]);
            }
            (1, Value::Array(items)) => items.push(strange(random, known)),
            _ => *value = strange(random, known),
        }
    }
    let mut text = body.to_string().into_bytes();
    match random.u8(..10) {
        0 => text.truncate(random.usize(..text.len())),
        1 => {
            let at = random.usize(..text.len());
            text[at] ^= 1 << random.u8(..8);
        }
        // A name twice.
        2 if text.starts_with(b"{\"") => drop(text.splice(1..1, *b"\"session\":7,")),
        _ => {}
    }
    text
}

/// With a session and a space that are there, what is wrong gets as far as it can.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_bodies_of_a_live_session_publish_nothing_and_keep_nothing() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let random = &mut fastrand::Rng::with_seed(seed);
    let site = Site::new().await;
    let serving = site
        .serve(&[("api.grace", "0s"), ("api.hashes_max", "1000")])
        .await;
    serving.ready().await;
    let (good, prompt) = (serving.attach("good").await, Prompt::new(4));
    store(&serving.client, &good, &prompt).await;
    let space = id(&prompt.space);
    let (one, other) = (serving.attach("one").await, serving.attach("other").await);
    // Reserved by both, and never written.
    let unwritten = [Prompt::new(2), Prompt::new(2)];
    let mut slots = Vec::new();
    for (session, of) in [&one, &other].into_iter().zip(&unwritten) {
        for chunk in session.reserve(&space, chunks(of)).await.unwrap().chunks {
            let ReservedChunk::Slot { slot, generation, .. } = chunk else {
                panic!("{chunk:?}")
            };
            slots.push(SlotName { slot, generation });
        }
    }
    let more = Prompt::new(3);
    let new: Vec<ReserveChunk> = chunks(&more);
    let mut loads = load_request(&prompt, "a", Order::Chunk);
    loads.session.clone_from(&one.name);
    loads.deadline_ms = Some(500);
    let declared: Value = serde_json::from_str(prompt.space.canonical_json()).unwrap();
    let hashes = json!(prompt.hashes);
    let calls = [
        ("PUT", "spaces", declared),
        (
            "POST",
            "attach",
            json!({"instance": "x", "rank": 0, "world_size": 1, "tp": [0, 1]}),
        ),
        (
            "POST",
            "lookup",
            json!({"space": space, "hashes": hashes, "strategy": "prefix", "deadline_ms": 100, "pin_ms": 5, "prefetch": true}),
        ),
        (
            "POST",
            "lookup",
            json!({"space": space, "tokens": vec![7; 64], "salt": "s", "adapter": "a", "strategy": "exact"}),
        ),
        ("POST", "load", json!(loads)),
        (
            "POST",
            "release",
            json!({"session": one.name, "load_id": "a", "slots": slots}),
        ),
        (
            "POST",
            "store/reserve",
            json!({"session": one.name, "space": space, "chunks": new}),
        ),
        (
            "POST",
            "store/commit",
            json!({"session": one.name, "slots": slots}),
        ),
        (
            "POST",
            "store/abort",
            json!({"session": one.name, "slots": slots[..1]}),
        ),
        ("POST", "pin", json!({"space": space, "hashes": hashes, "ms": 5})),
        ("POST", "unpin", json!({"space": space, "hashes": hashes})),
        ("POST", "prefetch", json!({"space": space, "hashes": hashes})),
        ("POST", "flush", json!({"deadline_ms": 100, "dropped": 0})),
    ];
    let known = [
        json!(one.name),
        json!(other.name),
        json!(space),
        json!(more.hashes[0]),
        json!(unwritten[1].hashes),
        json!(slots[3]),
        json!(slots[3].slot),
        json!(slots[3].generation),
        json!({"hash": more.hashes[1], "parent": more.hashes[1]}),
    ];
    let cases = if std::env::var_os("KVGATE_TEST_FULL").is_some() {
        50_000
    } else {
        3000
    };
    for case in 0..cases {
        let (method, path, body) = &calls[random.usize(..calls.len())];
        let body = changed(random, body, &known);
        let shown = String::from_utf8_lossy(&body).into_owned();
        let mut stream = UnixStream::connect(&serving.config.api.socket).await.unwrap();
        let head = format!(
            "{method} /v1/{path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        stream
            .write_all(&[head.as_bytes(), &body].concat())
            .await
            .unwrap();
        let mut answer = vec![0; 4096];
        let read = stream.read(&mut answer);
        let read = tokio::time::timeout(Duration::from_secs(20), read).await;
        let read = read
            .unwrap_or_else(|_| panic!("{path} {shown} is not answered"))
            .unwrap();
        let answer = String::from_utf8_lossy(&answer[..read]);
        let status = answer.split(' ').nth(1).unwrap_or_default();
        assert!(
            status.starts_with(['2', '4']) || ["503", "504"].contains(&status),
            "case {case}: {path} {shown}: {answer}"
        );
        if case % 500 == 0 {
            let words = load(&good, &prompt, &format!("load {case}"), Order::Chunk).await;
            assert_eq!(words, all("memory", 4), "case {case}");
        }
    }
    let reader = serving.attach("reader").await;
    for never in unwritten.iter().chain([&more]) {
        let words = load(&reader, never, "never", Order::Chunk).await;
        assert_eq!(words, all("absent", never.hashes.len()));
        reader.release("never", None).await.ok();
    }
    assert_eq!(
        load(&reader, &prompt, "last", Order::Chunk).await,
        all("memory", 4)
    );
    drop((one, other, reader));
    // A session that a changed attach began has ended with its connection.
    eventually(|| {
        let status = serving.node.status();
        status.sessions.len() == 1 && status.slots.leases == 0
    })
    .await;
    assert_eq!(serving.node.status().sessions[0].writes, 0);
}

/// With 400,000 slots and a load's name of 4 MB the whole daemon stood still for 46 seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_release_names_no_more_than_a_load_may() {
    let site = Site::new().await;
    let serving = site.serve(&[("api.hashes_max", "100")]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let slots = vec![
        SlotName {
            slot: 0,
            generation: 0,
        };
        101
    ];
    let refused = engine.release("x", Some(slots[1..].to_vec())).await;
    assert_eq!(refused.unwrap(), 0);
    let refused = engine.release("x", Some(slots)).await.unwrap_err().to_string();
    assert!(refused.contains("101 chunks in one call"), "{refused}");
    for name in ["", &"x".repeat(257)] {
        let refused = engine.release(name, None).await.unwrap_err().to_string();
        assert!(
            refused.contains("`load_id` must have 1 to 256 bytes"),
            "{refused}"
        );
    }
}

/// Each of its chunks looked at all that is in memory, while nobody else got an answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reserve_looks_for_room_no_more_once_there_was_none() {
    let site = Site::new().await;
    let settings = [("store.write_behind", "1GiB"), ("load.engine_share", "95")];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(2000);
    store(&serving.client, &engine, &prompt).await;
    let space = id(&prompt.space);
    let pinned = serving.client.pin(&space, &prompt.hashes, 60_000).await.unwrap();
    assert!(pinned.chunks > 100, "{pinned:?}");
    // None is the parent of another, so the refusal of one says nothing of the others.
    let heads: Vec<ReserveChunk> = (0..500).flat_map(|_| chunks(&Prompt::new(1))).collect();
    let refused = || serving.node.gateway().arena().stats().refused;
    let before = refused();
    let reserved = engine.reserve(&space, heads).await.unwrap();
    let full = |chunk: &&ReservedChunk| matches!(chunk, ReservedChunk::Skip { skip } if skip == "full");
    assert_eq!(reserved.chunks.iter().filter(full).count(), 500);
    assert_eq!(refused() - before, 1);
}

/// They held every slot that engines could have had.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn slow_readers_of_chunks_hold_a_window_of_the_arena_at_most() {
    let site = Site::new().await;
    let settings = [("load.window", "4MiB"), ("load.deadline", "1s")];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    // An object has 1.5 MiB, more than a socket takes.
    let large = Space::from_json(
        r#"{"model": "test/large", "revision": "1", "dtype": "float16", "chunk_tokens": 256,
            "mha": {"layers": 6, "heads": 4, "head_dim": 64}}"#,
    );
    let prompt = Prompt::of(large.unwrap(), 6);
    assert_eq!(store(&serving.client, &engine, &prompt).await, ["stored"; 6]);
    serving.flush().await;
    let get = async |hash| {
        let mut stream = UnixStream::connect(&serving.config.api.socket).await.unwrap();
        let request = format!(
            "GET /v1/chunks/{}/{hash} HTTP/1.1\r\nhost: x\r\n\r\n",
            id(&prompt.space)
        );
        let answer = say(&mut stream, &request).await;
        (stream, answer)
    };
    let answers = futures::future::join_all(prompt.hashes.iter().map(get)).await;
    let served = answers
        .iter()
        .filter(|(_, answer)| answer.starts_with("HTTP/1.1 200"));
    assert_eq!(served.count(), 2);
    let refused = answers
        .iter()
        .filter(|(_, answer)| answer.contains("not_released"));
    assert_eq!(refused.count(), 4);
    // A client that hangs up gives them back.
    drop(answers);
    let (_stream, answer) = get(&prompt.hashes[0]).await;
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
}

/// Millions of tokens were hashed before that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_of_too_many_tokens_is_refused() {
    let site = Site::new().await;
    let serving = site.serve(&[("api.hashes_max", "10")]).await;
    serving.ready().await;
    let prompt = Prompt::new(1);
    serving.client.declare(&prompt.space).await.unwrap();
    let lookup = |tokens: u32| LookupRequest {
        space: id(&prompt.space),
        tokens: Some((0..tokens).collect()),
        ..LookupRequest::default()
    };
    let most = 11 * prompt.space.chunk_tokens();
    assert_eq!(serving.client.lookup(&lookup(most - 1)).await.unwrap().prefix, 0);
    let refused = serving
        .client
        .lookup(&lookup(most))
        .await
        .unwrap_err()
        .to_string();
    assert!(refused.contains("11 chunks in one call"), "{refused}");
}

/// Each hash is asked for in each space that a lookup names.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_names_each_space_once_and_asks_for_no_more_hashes_than_it_may() {
    let site = Site::new().await;
    let serving = site.serve(&[("api.hashes_max", "10")]).await;
    serving.ready().await;
    let prompt = Prompt::new(1);
    let mut window: serde_json::Value = serde_json::from_str(prompt.space.canonical_json()).unwrap();
    window["kind"] = serde_json::json!({ "window": 16 });
    let window = Space::from_json(&window.to_string()).unwrap();
    for space in [&prompt.space, &window] {
        serving.client.declare(space).await.unwrap();
    }
    let lookup = |with: &[&Space], chunks: u32| LookupRequest {
        space: id(&prompt.space),
        with: with.iter().map(|space| id(space)).collect(),
        tokens: Some((0..chunks * prompt.space.chunk_tokens()).collect()),
        ..LookupRequest::default()
    };
    assert_eq!(
        serving
            .client
            .lookup(&lookup(&[&window], 5))
            .await
            .unwrap()
            .boundary,
        0
    );
    for (request, why) in [
        (lookup(&[&window], 6), "12 chunks in one call"),
        (lookup(&[&window, &window], 1), "names each space once"),
        (lookup(&[&prompt.space], 1), "names each space once"),
    ] {
        let refused = serving.client.lookup(&request).await.unwrap_err().to_string();
        assert!(refused.contains(why), "{refused}");
    }
}
