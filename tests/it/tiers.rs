//! A node's tiers: the chunks that each keeps, and those that go up and down.

use std::time::{Duration, Instant};

use kvgate::cache::tier::DiskState;
use kvgate::engine::client::Client;
use kvgate::format::Space;
use kvgate::protocol::{LookupAnswer, LookupRequest, Needed, Order, Tier};

use tokio::net::UnixStream;

use crate::abuse::say;
use crate::support::backends::skip_because;
use crate::support::daemon::{Serving, Site, all, eventually, id, load, store};
use crate::support::fixture::Prompt;

fn count(words: &[&str], word: &str) -> usize {
    words.iter().filter(|one| **one == word).count()
}

async fn mask(client: &Client, prompt: &Prompt) -> usize {
    let found = client
        .lookup_hashes(&id(&prompt.space), &prompt.hashes, "strategy=exact")
        .await;
    found.unwrap().mask.count()
}

/// Chunks on S3.
async fn on_s3(site: &Site, prompt: &Prompt) -> usize {
    let store = site.store().await;
    let mut there = 0;
    for hash in &prompt.hashes {
        let key = kvgate::format::KeyPrefix::new("").chunk(prompt.space.key(), hash);
        there += usize::from(store.head(&key, crate::support::fixture::soon()).await.is_ok());
    }
    there
}

fn dropped(serving: &Serving) -> u64 {
    serving.node.status().tiers.write_behind.dropped
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_go_on_while_s3_is_away_until_they_are_refused() {
    let mut site = Site::new().await;
    let settings = [
        ("arena.size", "16MiB"),
        ("load.reserve", "4MiB"),
        ("store.write_behind", "4MiB"),
    ];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    site.stop_s3().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(60);
    let began = Instant::now();
    let words = store(&serving.client, &engine, &prompt).await;
    assert!(
        began.elapsed() < Duration::from_secs(5),
        "an engine waits for nobody"
    );
    let room = (4 << 20) / prompt.space.layout().object_len();
    assert_eq!(count(&words, "stored"), room);
    assert_eq!(count(&words, "full"), 60 - room);
    assert!(
        words[..room].iter().all(|word| *word == "stored"),
        "the first ones"
    );
    assert_eq!(
        mask(&serving.client, &prompt).await,
        room,
        "they are hits all the same"
    );
    let refused = serving.client.flush(Some(200)).await.unwrap_err().to_string();
    assert!(refused.contains("not_flushed"), "{refused}");

    site.start_s3().await;
    serving.flush().await;
    assert_eq!(on_s3(&site, &prompt).await, room);
    assert_eq!(dropped(&serving), 0);
    assert_eq!(
        count(&store(&serving.client, &engine, &prompt).await, "present"),
        room
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_deepest_descendants_make_room_and_never_a_head() {
    let mut site = Site::new().await;
    let settings = [
        ("arena.size", "16MiB"),
        ("load.reserve", "4MiB"),
        ("store.write_behind", "4MiB"),
        ("store.in_flight", "1MiB"),
        ("store.when_full", "drop"),
    ];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    site.stop_s3().await;
    let engine = serving.attach("one").await;
    let prompts: Vec<Prompt> = (0..4).map(|_| Prompt::new(30)).collect();
    let mut stored = 0;
    for prompt in &prompts {
        stored += count(&store(&serving.client, &engine, prompt).await, "stored");
    }
    let room = (4 << 20) / prompts[0].space.layout().object_len();
    assert!(stored > room, "{stored} came in where {room} have room");
    site.start_s3().await;
    let refused = serving.client.flush(Some(20_000)).await.unwrap_err().to_string();
    let lost = dropped(&serving);
    assert!(
        refused.starts_with(&format!("{lost} chunks")) && refused.ends_with("(dropped)"),
        "{refused}"
    );
    let known = serving.client.flush_but(Some(20_000), lost).await.unwrap();
    assert_eq!((known.pending, known.dropped), (0, lost));
    let mut there = 0;
    for prompt in &prompts {
        let mut run = true;
        let store = site.store().await;
        for (i, hash) in prompt.hashes.iter().enumerate() {
            let key = kvgate::format::KeyPrefix::new("").chunk(prompt.space.key(), hash);
            let is_there = store.head(&key, crate::support::fixture::soon()).await.is_ok();
            assert!(run || !is_there, "chunk {i} is there without those before it");
            assert!(i > 0 || is_there, "a head was dropped");
            run = is_there;
            there += usize::from(is_there);
        }
    }
    assert_eq!(
        there as u64 + dropped(&serving),
        stored as u64,
        "what was dropped is counted"
    );
}

/// They have no parent among the snapshots, and were kept as if each were a head.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_snapshot_makes_room_before_the_chunk_that_it_follows() {
    let mut site = Site::new().await;
    let settings = [
        ("arena.size", "16MiB"),
        ("load.reserve", "4MiB"),
        ("store.write_behind", "4MiB"),
        ("store.in_flight", "1MiB"),
        ("store.when_full", "drop"),
    ];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    site.stop_s3().await;
    let engine = serving.attach("one").await;
    let head = async || store(&serving.client, &engine, &Prompt::new(1)).await;
    // What is on its way to S3 is not given up.
    for _ in 0..12 {
        assert_eq!(head().await, ["stored"]);
    }
    let [full, _, state] = of_three_kinds(10);
    // One snapshot is committed before its chunk, the other one after it.
    for prompt in [&part(&state, 4..5), &part(&full, 0..10), &part(&state, 9..10)] {
        let words = store(&serving.client, &engine, prompt).await;
        assert_eq!(count(&words, "stored"), prompt.hashes.len());
    }
    while dropped(&serving) < 3 {
        assert_eq!(head().await, ["stored"]);
    }
    site.start_s3().await;
    serving.client.flush_but(Some(20_000), 3).await.unwrap();
    assert_eq!(on_s3(&site, &part(&state, 9..10)).await, 0);
    assert_eq!(on_s3(&site, &part(&full, 8..10)).await, 0);
    assert_eq!(on_s3(&site, &part(&full, 0..8)).await, 8);
    assert_eq!(on_s3(&site, &part(&state, 4..5)).await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_that_are_not_stored_at_the_end_are_told() {
    let mut site = Site::new().await;
    let serving = site.serve(&[("store.drain", "300ms")]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let (kept, lost) = (Prompt::new(3), Prompt::new(5));
    store(&serving.client, &engine, &kept).await;
    serving.flush().await;
    site.stop_s3().await;
    store(&serving.client, &engine, &lost).await;
    assert_eq!(serving.end().await.dropped, 5);
    site.start_s3().await;
    assert_eq!((on_s3(&site, &kept).await, on_s3(&site, &lost).await), (3, 0));
}

/// They were hits for ever, which nobody stored again, and S3 never got them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_on_a_disk_that_s3_lacks_are_sent_by_the_next_start() {
    let mut site = Site::new().await;
    let disk = site.home.path().join("disk").display().to_string();
    let settings = [
        ("disk.paths", disk.as_str()),
        ("disk.size", "64MiB"),
        ("api.degraded", "true"),
        ("store.drain", "100ms"),
        ("store.write_behind", "3MiB"),
    ];
    site.stop_s3().await;
    let prompt = Prompt::new(24);
    let dirty = |serving: &Serving| serving.node.status().tiers.disk.unwrap().disks[0].dirty;
    {
        let serving = site.serve(&settings).await;
        let engine = serving.attach("one").await;
        let words = store(&serving.client, &engine, &prompt).await;
        assert_eq!(count(&words, "stored"), 24);
        eventually(|| dirty(&serving) == 24).await;
        drop(engine);
        assert_eq!(serving.end().await.dropped, 0, "none is lost");
    }
    let serving = site.serve(&settings).await;
    let engine = serving.attach("two").await;
    let words = store(&serving.client, &engine, &prompt).await;
    assert_eq!(count(&words, "present"), 24);
    let refused = serving.client.flush(Some(200)).await.unwrap_err().to_string();
    assert!(refused.contains("24 chunks"), "{refused}");
    // They take none of the room for new ones.
    let new = Prompt::new(24);
    assert_eq!(count(&store(&serving.client, &engine, &new).await, "stored"), 24);
    let gone = format!("/v1/chunks/{}/{}", prompt.space.key(), prompt.hashes[23]);
    serving.client.delete(&gone).await.unwrap_err();

    site.start_s3().await;
    serving.flush().await;
    assert_eq!((on_s3(&site, &prompt).await, on_s3(&site, &new).await), (23, 24));
    eventually(|| dirty(&serving) == 0).await;
    assert_eq!(serving.node.status().tiers.write_behind.backlog_chunks, 0);
    drop(engine);
    serving.end().await;
    let serving = site.serve(&settings).await;
    assert_eq!(serving.node.status().tiers.write_behind.backlog_chunks, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn disks_serve_what_memory_has_not_also_without_s3() {
    let mut site = Site::new().await;
    let disks = [site.home.path().join("disk0"), site.home.path().join("disk1")];
    let paths = format!("{},{}", disks[0].display(), disks[1].display());
    let settings = [
        ("disk.paths", paths.as_str()),
        ("disk.size", "64MiB"),
        ("api.degraded", "true"),
    ];
    let prompt = Prompt::new(16);
    site.store_by_another(&prompt, &settings).await;
    site.stop_s3().await;
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let stats = serving.node.status().tiers.disk.unwrap();
    assert_eq!(stats.disks.iter().map(|disk| disk.chunks).sum::<u64>(), 16);
    assert!(stats.disks.iter().all(|disk| disk.chunks > 0), "{stats:?}");
    serving.client.declare(&prompt.space).await.unwrap();
    assert_eq!(mask(&serving.client, &prompt).await, 16);
    let engine = serving.attach("two").await;
    assert_eq!(load(&engine, &prompt, "a", Order::Layer).await, all("disk", 16));
    assert_eq!(load(&engine, &prompt, "b", Order::Chunk).await, all("memory", 16));
    drop(engine);
    serving.end().await;

    // A file that is not what it was is a miss, and goes.
    let damaged = disks
        .iter()
        .map(|disk| {
            disk.join(prompt.space.key().to_string())
                .join(prompt.hashes[3].to_string())
        })
        .find(|path| path.exists())
        .unwrap();
    let mut bytes = std::fs::read(&damaged).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&damaged, bytes).unwrap();
    let serving = site.serve(&settings).await;
    serving.client.declare(&prompt.space).await.unwrap();
    let engine = serving.attach("three").await;
    let words = load(&engine, &prompt, "a", Order::Chunk).await;
    let unknown = words.iter().position(|word| word == "unknown");
    assert_eq!(
        (unknown, words.iter().filter(|word| *word == "disk").count()),
        (Some(3), 15)
    );
    assert!(!damaged.exists());
    site.start_s3().await;
    eventually(|| serving.node.status().s3.answered).await;
    let words = load(&engine, &prompt, "b", Order::Chunk).await;
    assert_eq!(words[3], "s3");
}

/// A user with the right to write to a disk's folder could put any KV there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn files_of_other_users_are_no_chunks_and_stay() {
    if !rustix::process::geteuid().is_root() {
        skip_because(
            "tiers::files_of_other_users_are_no_chunks_and_stay",
            "only root can give a file to another user",
        );
        return;
    }
    let mut site = Site::new().await;
    let disk = site.home.path().join("disk");
    let path = disk.display().to_string();
    let settings = [
        ("disk.paths", path.as_str()),
        ("disk.size", "64MiB"),
        ("api.degraded", "true"),
    ];
    let prompt = Prompt::new(4);
    site.store_by_another(&prompt, &settings).await;
    site.stop_s3().await;
    let folder = disk.join(prompt.space.key().to_string());
    let foreign = folder.join(prompt.hashes[2].to_string());
    std::os::unix::fs::chown(&foreign, Some(12345), None).unwrap();
    let serving = site.serve(&settings).await;
    let engine = serving.attach("two").await;
    serving.client.declare(&prompt.space).await.unwrap();
    let words = load(&engine, &prompt, "a", Order::Chunk).await;
    assert_eq!(words, ["disk", "disk", "unknown", "disk"]);
    assert!(foreign.exists());
    drop(engine);
    serving.end().await;
    // Nor is a folder of theirs read.
    std::os::unix::fs::chown(&folder, Some(12345), None).unwrap();
    let serving = site.serve(&settings).await;
    let engine = serving.attach("three").await;
    serving.client.declare(&prompt.space).await.unwrap();
    assert_eq!(load(&engine, &prompt, "a", Order::Chunk).await, all("unknown", 4));
}

/// It kept what stores may have in flight, so nothing went to S3 any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_hangs_does_not_hold_up_s3() {
    let site = Site::new().await;
    let disk = site.home.path().join("disk");
    let path = disk.display().to_string();
    let settings = [
        ("disk.paths", path.as_str()),
        ("disk.size", "64MiB"),
        ("disk.depth", "1"),
        ("disk.timeout", "1s"),
        ("store.in_flight", "1MiB"),
    ];
    let there = Prompt::new(1);
    site.store_by_another(&there, &settings).await;
    let serving = site.serve(&settings).await;
    serving.ready().await;
    serving.client.declare(&there.space).await.unwrap();
    // Opening a pipe to read waits for a writer; all others wait for their turn.
    let pipe = disk
        .join(there.space.key().to_string())
        .join(there.hashes[0].to_string());
    std::fs::remove_file(&pipe).unwrap();
    let (kind, mode) = (rustix::fs::FileType::Fifo, rustix::fs::Mode::RWXU);
    rustix::fs::mknodat(rustix::fs::CWD, &pipe, kind, mode, 0).unwrap();
    let reader = serving.attach("reader").await;
    let hangs = tokio::spawn(async move { load(&reader, &there, "a", Order::Chunk).await });
    tokio::time::sleep(Duration::from_millis(100)).await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(30);
    store(&serving.client, &engine, &prompt).await;
    serving.flush().await;
    assert_eq!(on_s3(&site, &prompt).await, 30);
    let state = serving.node.status().tiers.disk.unwrap().disks.remove(0).state;
    assert!(matches!(state, DiskState::Failed(_)), "{state:?}");
    assert_eq!(hangs.await.unwrap(), all("s3", 1));
    // The runtime's end waits for who still reads.
    std::mem::forget(
        std::fs::File::options()
            .read(true)
            .write(true)
            .open(&pipe)
            .unwrap(),
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_from_s3_are_written_to_the_disks() {
    let site = Site::new().await;
    let prompt = Prompt::new(8);
    site.store_by_another(&prompt, &[]).await;
    let disk = site.home.path().join("disk").display().to_string();
    for promote in ["false", "true"] {
        let settings = [
            ("disk.paths", disk.as_str()),
            ("disk.size", "64MiB"),
            ("disk.promote", promote),
        ];
        let serving = site.serve(&settings).await;
        serving.ready().await;
        serving.client.declare(&prompt.space).await.unwrap();
        let engine = serving.attach("two").await;
        assert_eq!(load(&engine, &prompt, "a", Order::Chunk).await, all("s3", 8));
        let chunks = || serving.node.status().tiers.disk.unwrap().disks[0].chunks;
        if promote == "true" {
            eventually(|| chunks() == 8).await;
        } else {
            assert_eq!(chunks(), 0);
        }
        drop(engine);
        serving.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tiers_that_stop_ask_and_store_no_lower() {
    let site = Site::new().await;
    let prompt = Prompt::new(4);
    let disk = site.home.path().join("disk").display().to_string();
    let base = [("disk.paths", disk.as_str()), ("disk.size", "64MiB")];
    let settings = [base[0], base[1], ("disk.store", "stop")];
    site.store_by_another(&prompt, &settings).await;
    assert_eq!(on_s3(&site, &prompt).await, 0);
    {
        let serving = site
            .serve(&[
                base[0],
                base[1],
                ("memory.lookup", "stop"),
                ("memory.store", "stop"),
            ])
            .await;
        serving.ready().await;
        serving.client.declare(&prompt.space).await.unwrap();
        assert_eq!(mask(&serving.client, &prompt).await, 0);
        let engine = serving.attach("one").await;
        assert_eq!(load(&engine, &prompt, "a", Order::Chunk).await, all("absent", 4));
        let own = Prompt::new(2);
        store(&serving.client, &engine, &own).await;
        serving.flush().await;
        assert_eq!(
            (mask(&serving.client, &own).await, on_s3(&site, &own).await),
            (2, 0)
        );
        drop(engine);
        serving.end().await;
    }
    let serving = site.serve(&base).await;
    serving.ready().await;
    serving.client.declare(&prompt.space).await.unwrap();
    let engine = serving.attach("two").await;
    assert_eq!(load(&engine, &prompt, "a", Order::Chunk).await, all("disk", 4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_what_is_used_goes_lower() {
    let site = Site::new().await;
    let serving = site.serve(&[("memory.min_accesses", "2")]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(3);
    store(&serving.client, &engine, &prompt).await;
    assert_eq!(
        load(&engine, &prompt, "first", Order::Chunk).await,
        all("memory", 3)
    );
    serving.flush().await;
    assert_eq!(on_s3(&site, &prompt).await, 0);
    // The second time, or as soon as its digests are computed.
    for round in 0..100 {
        assert_eq!(
            load(&engine, &prompt, &format!("load {round}"), Order::Chunk).await,
            all("memory", 3)
        );
        serving.flush().await;
        if on_s3(&site, &prompt).await == 3 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("used often, and not stored");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_used_while_the_write_behind_is_full_goes_lower_later() {
    let mut site = Site::new().await;
    let serving = site
        .serve(&[("memory.min_accesses", "1"), ("store.write_behind", "1MiB")])
        .await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(20);
    let room = (1 << 20) / prompt.space.layout().object_len();
    store(&serving.client, &engine, &prompt).await;
    site.stop_s3().await;
    let behind = || serving.node.status().tiers.write_behind.waiting_chunks as usize;
    for round in 0..100 {
        load(&engine, &prompt, &format!("full {round}"), Order::Chunk).await;
        if behind() == room {
            break;
        }
    }
    // Also those whose digests were late.
    load(&engine, &prompt, "all", Order::Chunk).await;
    site.start_s3().await;
    serving.flush().await;
    assert_eq!(on_s3(&site, &prompt).await, room);
    for round in 0..10 {
        load(&engine, &prompt, &format!("again {round}"), Order::Chunk).await;
        serving.flush().await;
    }
    assert_eq!(on_s3(&site, &prompt).await, 20);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tenant_has_no_more_than_its_share_of_memory() {
    let site = Site::new().await;
    let serving = site.serve(&[("memory.tenant_max", "1MiB")]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let of = |tenant: &str| {
        let space = format!(
            r#"{{"model": "test/tiny", "revision": "1", "dtype": "float16", "chunk_tokens": 16, "tenant": "{tenant}",
                "mha": {{"layers": 6, "heads": 4, "head_dim": 64}}}}"#
        );
        Prompt::of(kvgate::format::Space::from_json(&space).unwrap(), 30)
    };
    let (one, other) = (of("one"), of("other"));
    let words = store(&serving.client, &engine, &one).await;
    assert_eq!(count(&words[..8], "stored"), 8);
    serving.flush().await;
    let small = Prompt {
        space: other.space.clone(),
        root: other.root,
        hashes: other.hashes[..4].to_vec(),
    };
    store(&serving.client, &engine, &small).await;
    serving.flush().await;
    let memory = serving.node.status().tiers.memory;
    assert!(
        memory.bytes <= (1 << 20) + 4 * small.space.layout().object_len() as u64,
        "{memory:?}"
    );
    assert_eq!(load(&engine, &small, "a", Order::Chunk).await, all("memory", 4));
    // All stored chunks come back, in memory or not.
    let loaded = load(&engine, &one, "b", Order::Chunk).await;
    for (stored, loaded) in words.iter().zip(&loaded) {
        assert_eq!(
            *stored == "stored",
            loaded == "s3" || loaded == "memory",
            "{words:?} {loaded}"
        );
    }
    assert_eq!(
        load(&engine, &small, "c", Order::Chunk).await,
        all("memory", 4),
        "the other's are untouched"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefetched_and_pinned_chunks_are_in_memory() {
    let site = Site::new().await;
    let prompt = Prompt::new(6);
    site.store_by_another(&prompt, &[]).await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    serving.client.declare(&prompt.space).await.unwrap();
    let space = id(&prompt.space);
    assert_eq!(
        serving
            .client
            .prefetch(&space, &prompt.hashes)
            .await
            .unwrap()
            .chunks,
        6
    );
    eventually(|| serving.node.status().tiers.memory.chunks == 6).await;
    assert_eq!(
        serving
            .client
            .pin(&space, &prompt.hashes, 60_000)
            .await
            .unwrap()
            .chunks,
        6
    );
    let engine = serving.attach("one").await;
    // More than the arena holds.
    let more = Prompt::new(400);
    store(&serving.client, &engine, &more).await;
    serving.flush().await;
    assert_eq!(load(&engine, &prompt, "a", Order::Chunk).await, all("memory", 6));
    assert_eq!(
        serving.client.unpin(&space, &prompt.hashes).await.unwrap().chunks,
        6
    );
}

/// A prompt of a model with full attention, windows of two chunks and states.
fn of_three_kinds(chunks: usize) -> [Prompt; 3] {
    let full = Prompt::new(chunks);
    let of = |kind: &str, heads: u32| {
        let space = format!(
            r#"{{"model": "test/tiny", "revision": "1", "dtype": "float16", "chunk_tokens": 16, "kind": {kind},
                "mha": {{"layers": 6, "heads": {heads}, "head_dim": 64}}}}"#
        );
        Prompt {
            space: Space::from_json(&space).unwrap(),
            root: full.root,
            hashes: full.hashes.clone(),
        }
    };
    let others = (of(r#"{"window": 33}"#, 4), of(r#""state""#, 64));
    [full, others.0, others.1]
}

fn part(prompt: &Prompt, chunks: std::ops::Range<usize>) -> Prompt {
    Prompt {
        space: prompt.space.clone(),
        root: prompt.parent(chunks.start),
        hashes: prompt.hashes[chunks].to_vec(),
    }
}

async fn lookup_kinds(client: &Client, prompts: &[Prompt; 3], pin: bool, prefetch: bool) -> LookupAnswer {
    let request = LookupRequest {
        space: id(&prompts[0].space),
        with: vec![id(&prompts[1].space), id(&prompts[2].space)],
        hashes: Some(prompts[0].hashes.clone()),
        pin_ms: pin.then_some(60_000),
        prefetch,
        ..LookupRequest::default()
    };
    client.lookup(&request).await.unwrap()
}

/// No policy of its own: what no boundary needs any more is not touched any more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_of_a_window_far_behind_leave_first() {
    for policy in ["reuse", "lru", "sieve", "s3fifo"] {
        let site = Site::new().await;
        let settings = [("memory.policy", policy), ("store.write_behind", "4MiB")];
        let serving = site.serve(&settings).await;
        serving.ready().await;
        let engine = serving.attach("one").await;
        let prompts = of_three_kinds(20);
        let [full, window, state] = &prompts;
        // The window comes last, so that its chunks are younger than those of the others.
        for prompt in [full, state, window] {
            assert_eq!(
                count(&store(&serving.client, &engine, prompt).await, "stored"),
                20
            );
            serving.flush().await;
        }
        let found = lookup_kinds(&serving.client, &prompts, false, false).await;
        let needed: Vec<_> = found.needed.iter().map(|needed| needed.chunks).collect();
        assert_eq!(needed, [(0, 20), (18, 20), (19, 20)]);
        let kept = [full.hashes.len(), 2, 1];
        let loads = [part(full, 0..20), part(window, 18..20), part(state, 19..20)];
        for round in 0..2 {
            for (i, (prompt, chunks)) in loads.iter().zip(kept).enumerate() {
                let words = load(&engine, prompt, &format!("{policy} {round} {i}"), Order::Chunk).await;
                assert_eq!(words, all("memory", chunks));
            }
        }
        // Others' chunks take the place of the rest.
        let memory = || serving.node.status().tiers.memory;
        while memory().evicted < 15 {
            store(&serving.client, &engine, &Prompt::new(1)).await;
            serving.flush().await;
        }
        for (i, (prompt, chunks)) in loads.iter().zip(kept).enumerate() {
            let words = load(&engine, prompt, &format!("{policy} {i}"), Order::Chunk).await;
            assert_eq!(words, all("memory", chunks), "{policy}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lookup_over_kinds_pins_and_prefetches_what_is_needed() {
    let site = Site::new().await;
    let prompts = of_three_kinds(12);
    for prompt in &prompts {
        site.store_by_another(prompt, &[]).await;
    }
    let serving = site.serve(&[]).await;
    serving.ready().await;
    for prompt in &prompts {
        serving.client.declare(&prompt.space).await.unwrap();
    }
    let memory = || serving.node.status().tiers.memory;
    let found = lookup_kinds(&serving.client, &prompts, true, true).await;
    assert_eq!((found.boundary, found.full, found.open), (12, 12, false));
    assert_eq!(memory().pinned_chunks, 0, "nothing is in memory yet");
    eventually(|| memory().chunks == 12 + 2 + 1).await;
    let found = lookup_kinds(&serving.client, &prompts, true, true).await;
    let in_memory = |needed: &Needed| needed.tiers.iter().all(|run| run.tier == Tier::Memory);
    assert!(found.needed.iter().all(in_memory), "{:?}", found.needed);
    assert_eq!(memory().pinned_chunks, 12 + 2 + 1);
    serving.flush().await;
    assert_eq!(memory().chunks, 12 + 2 + 1);
}

/// A full chunk is of no use without those before it; a window's is, once the window has passed the gap.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_window_or_a_snapshot_is_stored_after_a_refused_one() {
    let mut site = Site::new().await;
    let settings = [("store.write_behind", "2MiB")];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompts = of_three_kinds(40);
    for prompt in &prompts {
        // The space's JSON is on S3.
        store(&serving.client, &engine, &part(prompt, 0..1)).await;
        serving.flush().await;
    }
    for (prompt, after_a_gap) in prompts.iter().zip(["full", "stored", "stored"]) {
        site.stop_s3().await;
        let words = store(&serving.client, &engine, prompt).await;
        let refused = words.iter().position(|word| *word == "full").unwrap();
        site.start_s3().await;
        serving.flush().await;
        let words = store(&serving.client, &engine, &part(prompt, refused + 1..refused + 3)).await;
        assert_eq!(words, [after_a_gap; 2], "{:?}", prompt.space.kind());
        serving.flush().await;
    }
}

/// It waited until the pins were over.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_is_not_held_up_by_chunks_that_others_pinned() {
    let site = Site::new().await;
    let (pinned, wanted) = (Prompt::new(40), Prompt::new(10));
    site.store_by_another(&pinned, &[]).await;
    site.store_by_another(&wanted, &[]).await;
    let settings = [
        ("arena.size", "4MiB"),
        ("load.reserve", "2MiB"),
        ("load.window", "2MiB"),
        ("memory.watermark", "100"),
        ("store.write_behind", "1MiB"),
    ];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let (client, space) = (&serving.client, id(&pinned.space));
    client.declare(&pinned.space).await.unwrap();
    client.prefetch(&space, &pinned.hashes).await.unwrap();
    eventually(|| serving.node.status().tiers.memory.chunks == 40).await;
    assert_eq!(
        client.pin(&space, &pinned.hashes, 60_000).await.unwrap().chunks,
        40
    );
    let engine = serving.attach("one").await;
    let new = Prompt::new(1);
    assert_eq!(
        store(client, &engine, &new).await,
        ["full"],
        "a store takes no pinned one's place"
    );
    let began = Instant::now();
    assert_eq!(load(&engine, &wanted, "a", Order::Chunk).await, all("s3", 10));
    assert!(began.elapsed() < Duration::from_secs(15));
}

/// A chunk as people and tools see it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_by_http() {
    let site = Site::new().await;
    let serving = site.serve(&[("api.listen", "127.0.0.1:0")]).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(1);
    store(&serving.client, &engine, &prompt).await;
    serving.flush().await;
    let path = format!("/v1/chunks/{}/{}", prompt.space.key(), prompt.hashes[0]);
    let object = serving.client.get(&path).await.unwrap();
    let layout = prompt.space.layout();
    assert_eq!(object[layout.header_len()..], prompt.payload(0)[..]);
    let header: serde_json::Value =
        serde_json::from_slice(&serving.client.get(&format!("{path}?header")).await.unwrap()).unwrap();
    assert_eq!(header["chunk"], prompt.hashes[0].to_string());
    // A HEAD is a lookup: no byte is loaded for it.
    let mut stream = UnixStream::connect(&serving.config.api.socket).await.unwrap();
    let head = format!("HEAD {path} HTTP/1.1\r\nhost: x\r\n\r\n");
    let hits = serving.node.status().tiers.memory.hits;
    let answer = say(&mut stream, &head).await;
    let length = format!("content-length: {}\r\n", object.len());
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains(&length),
        "{answer}"
    );
    assert_eq!(serving.node.status().tiers.memory.hits, hits);
    serving.client.delete(&path).await.unwrap();
    assert!(say(&mut stream, &head).await.starts_with("HTTP/1.1 404"));
    assert_eq!(
        (mask(&serving.client, &prompt).await, on_s3(&site, &prompt).await),
        (0, 0)
    );
    let gone = serving.client.get(&path).await.unwrap_err().to_string();
    assert!(gone.contains("absent"), "{gone}");
}
