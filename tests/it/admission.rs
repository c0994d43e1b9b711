//! `[store] admit = "auto"`: what S3 is not given is a hit on the node, and S3 gets it when it is asked for again, after its
//! ancestors.
//!
//! The budget of these tests lets some 12 chunks through at once, of which a quarter is kept for second chances, and then
//! one every five seconds.

use std::time::Duration;

use kvgate::cache::admission::AdmissionStats;
use kvgate::engine::client::ApiSession;
use kvgate::format::{KeyPrefix, Space};
use kvgate::protocol::Order;

use crate::support::daemon::{Serving, Site, all, eventually, id, load, store};
use crate::support::fixture::{Prompt, soon};

const LITTLE: [(&str, &str); 2] = [("store.admit", "auto"), ("store.admit_rate", "20KiB")];
/// A memory that little fits into.
const SMALL: [(&str, &str); 4] = [
    ("arena.size", "8MiB"),
    ("load.reserve", "2MiB"),
    ("load.window", "1MiB"),
    ("store.write_behind", "3MiB"),
];
const PLENTY: [(&str, &str); 2] = [("store.admit", "auto"), ("store.admit_rate", "1GiB")];

fn with<'a>(
    settings: &[(&'static str, &'a str)],
    more: &[(&'static str, &'a str)],
) -> Vec<(&'static str, &'a str)> {
    settings.iter().chain(more).copied().collect()
}

fn admission(serving: &Serving) -> AdmissionStats {
    serving.node.status().tiers.admission.unwrap()
}

async fn is_on_s3(site: &Site, prompt: &Prompt, i: usize) -> bool {
    let key = KeyPrefix::new("").chunk(prompt.space.key(), &prompt.hashes[i]);
    site.store().await.head(&key, soon()).await.is_ok()
}

async fn on_s3(site: &Site, prompt: &Prompt) -> Vec<bool> {
    let mut there = Vec::new();
    for i in 0..prompt.hashes.len() {
        there.push(is_on_s3(site, prompt, i).await);
    }
    there
}

/// Chunks on S3, while none is on its way: only leading ones may be there.
async fn head_on_s3(site: &Site, prompt: &Prompt) -> usize {
    let there = on_s3(site, prompt).await;
    let head = there.iter().take_while(|is_there| **is_there).count();
    assert!(
        !there[head..].contains(&true),
        "a chunk is there without those before it: {there:?}"
    );
    head
}

async fn all_come_to_s3(site: &Site, prompt: &Prompt) {
    for _ in 0..1500 {
        if !on_s3(site, prompt).await.contains(&false) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("on S3: {:?}", on_s3(site, prompt).await);
}

async fn hits(serving: &Serving, prompt: &Prompt) -> usize {
    let space = id(&prompt.space);
    let found = serving
        .client
        .lookup_hashes(&space, &prompt.hashes, "strategy=exact");
    found.await.unwrap().mask.count()
}

/// Stores prompts of two chunks until one is declined. The first of them use up what is not kept for second chances.
async fn declined(site: &Site, serving: &Serving, engine: &ApiSession) -> Prompt {
    store(&serving.client, engine, &Prompt::new(14)).await;
    loop {
        let prompt = Prompt::new(2);
        hits(serving, &prompt).await;
        store(&serving.client, engine, &prompt).await;
        serving.flush().await;
        assert_eq!(hits(serving, &prompt).await, 2);
        if head_on_s3(site, &prompt).await == 0 {
            return prompt;
        }
    }
}

/// The last chunk of a prompt alone.
fn last(prompt: &Prompt) -> Prompt {
    let at = prompt.hashes.len() - 1;
    Prompt {
        root: prompt.hashes[at - 1],
        hashes: vec![prompt.hashes[at]],
        ..prompt.clone()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_declined_is_a_hit_here_and_on_s3_when_it_is_asked_for_again() {
    let site = Site::new().await;
    let serving = site.serve(&LITTLE).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(30);
    assert_eq!(
        store(&serving.client, &engine, &prompt).await,
        ["stored"; 30],
        "an engine sees nothing of it"
    );
    let flushed = serving.client.flush(Some(20_000)).await.unwrap();
    let head = head_on_s3(&site, &prompt).await;
    assert!((8..30).contains(&head), "{head} are on S3");
    assert_eq!(
        (flushed.pending, flushed.dropped, flushed.declined),
        (0, 0, 30 - head as u64)
    );
    let stats = admission(&serving);
    assert_eq!(
        (stats.admitted_chunks, stats.declined_now),
        (head as u64, flushed.declined)
    );
    assert_eq!(
        (stats.unlikely.chunks, stats.parent.chunks),
        (1, flushed.declined - 1)
    );
    let bytes = prompt.space.layout().object_len() as u64;
    assert_eq!(stats.parent.bytes, stats.parent.chunks * bytes);
    assert_eq!(hits(&serving, &prompt).await, 30);
    let behind = serving.node.status().tiers.write_behind;
    assert_eq!(
        (behind.stored, behind.waiting_chunks, behind.dropped),
        (head as u64, 0, 0)
    );
    assert_eq!(
        serving.node.status().tiers.memory.dirty_bytes,
        0,
        "all may leave memory"
    );

    // Asking for the last one brings its ancestors, as far as the budget goes.
    let words = load(&engine, &last(&prompt), "a", Order::Chunk).await;
    assert_eq!(words, ["memory"]);
    eventually(|| admission(&serving).budget.chunks > 0).await;
    serving.flush().await;
    let more = head_on_s3(&site, &prompt).await;
    assert!((head + 3..30).contains(&more), "{more} are on S3, {head} before");
    let stats = admission(&serving);
    assert_eq!(stats.second_chances, (more - head) as u64);
    assert_eq!(stats.declined_now, 30 - more as u64);

    // A new prompt gets nothing of what is left, and is a hit all the same.
    let other = Prompt::new(4);
    store(&serving.client, &engine, &other).await;
    serving.flush().await;
    assert_eq!(
        (head_on_s3(&site, &other).await, hits(&serving, &other).await),
        (0, 4)
    );
    assert_eq!(load(&engine, &other, "b", Order::Chunk).await, all("memory", 4));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_admit_all_s3_is_given_everything_whatever_the_budget() {
    let site = Site::new().await;
    let settings = [("store.admit", "all"), ("store.admit_rate", "1KiB")];
    let serving = site.serve(&settings).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(30);
    store(&serving.client, &engine, &prompt).await;
    let flushed = serving.client.flush(Some(20_000)).await.unwrap();
    assert_eq!((flushed.declined, flushed.pending, flushed.dropped), (0, 0, 0));
    assert_eq!(head_on_s3(&site, &prompt).await, 30);
    assert_eq!(serving.node.status().tiers.admission, None);
    assert_eq!(serving.node.status().tiers.write_behind.stored, 30);
}

/// Its flush said that S3 had everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_admit_all_s3_gets_what_an_earlier_life_declined() {
    let site = Site::new().await;
    let disk = site.home.path().join("disk").display().to_string();
    let disks = [("disk.paths", disk.as_str()), ("disk.size", "64MiB")];
    let prompt = Prompt::new(30);
    site.store_by_another(&prompt, &with(&LITTLE, &disks)).await;
    let head = head_on_s3(&site, &prompt).await;
    assert!((8..30).contains(&head));

    let serving = site.serve(&with(&LITTLE, &disks)).await;
    serving.ready().await;
    let declined = serving.client.flush(Some(20_000)).await.unwrap().declined;
    assert_eq!(declined, 30 - head as u64, "nobody asked for them");
    serving.end().await;

    let serving = site.serve(&with(&[("store.admit", "all")], &disks)).await;
    serving.ready().await;
    let flushed = serving.client.flush(Some(20_000)).await.unwrap();
    assert_eq!(
        (
            flushed.pending,
            flushed.dropped,
            flushed.declined,
            flushed.forgotten
        ),
        (0, 0, 0, 0)
    );
    assert_eq!(head_on_s3(&site, &prompt).await, 30);
    serving.end().await;

    let serving = site.serve(&with(&LITTLE, &disks)).await;
    serving.ready().await;
    assert_eq!(serving.client.flush(Some(20_000)).await.unwrap().declined, 0);
}

/// They are on its disks, and no backlog: nobody promised them to S3.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_earlier_life_declined_is_admitted_when_it_is_asked_for() {
    let site = Site::new().await;
    let disk = site.home.path().join("disk").display().to_string();
    let disks = [("disk.paths", disk.as_str()), ("disk.size", "64MiB")];
    let serving = site.serve(&with(&LITTLE, &disks)).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(30);
    store(&serving.client, &engine, &prompt).await;
    serving.flush().await;
    let head = head_on_s3(&site, &prompt).await;
    assert!((8..30).contains(&head));
    let disk_stats = serving.node.status().tiers.disk.unwrap();
    assert_eq!(
        (disk_stats.disks[0].chunks, disk_stats.disks[0].dirty),
        (30, 0),
        "all are on the disk, and may leave it"
    );
    drop(engine);
    assert_eq!(serving.end().await.dropped, 0);

    let serving = site.serve(&with(&PLENTY, &disks)).await;
    serving.ready().await;
    let flushed = serving.client.flush(Some(20_000)).await.unwrap();
    assert_eq!((flushed.pending, flushed.dropped), (0, 0));
    assert_eq!(head_on_s3(&site, &prompt).await, head);
    serving.client.declare(&prompt.space).await.unwrap();
    assert_eq!(hits(&serving, &prompt).await, 30);
    let engine = serving.attach("two").await;
    assert_eq!(load(&engine, &last(&prompt), "a", Order::Chunk).await, ["disk"]);
    all_come_to_s3(&site, &prompt).await;
    assert_eq!(admission(&serving).second_chances, 30 - head as u64);
    assert_eq!(serving.client.flush(Some(20_000)).await.unwrap().declined, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_declined_and_left_is_admitted_when_it_is_stored_again() {
    let site = Site::new().await;
    let small = with(&SMALL, &[("memory.policy", "fifo")]);
    let serving = site.serve(&with(&LITTLE, &small)).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let flushed = async |prompt: &Prompt| {
        store(&serving.client, &engine, prompt).await;
        serving.flush().await;
    };
    let prompt = declined(&site, &serving, &engine).await;
    for _ in 0..10 {
        flushed(&Prompt::new(10)).await;
    }
    assert_eq!(hits(&serving, &prompt).await, 0, "it made room for others");
    assert_eq!(store(&serving.client, &engine, &prompt).await, ["stored"; 2]);
    serving.flush().await;
    assert_eq!(head_on_s3(&site, &prompt).await, 2);
    assert_eq!(admission(&serving).second_chances, 2);
}

/// Its parent was declined as well, and is here: it goes first.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_stored_again_brings_its_parent_along() {
    let site = Site::new().await;
    let small = with(&SMALL, &[("memory.policy", "lru")]);
    let serving = site.serve(&with(&LITTLE, &small)).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = declined(&site, &serving, &engine).await;
    // The last chunk of a prompt leaves first.
    let mut others = Vec::new();
    while hits(&serving, &prompt).await == 2 {
        others.push(Prompt::new(1));
        store(&serving.client, &engine, &others[others.len() - 1]).await;
        serving.flush().await;
    }
    assert_eq!(hits(&serving, &prompt).await, 1);
    // Its parent need not make room for it.
    for other in &others[others.len() - 3..] {
        let path = format!("/v1/chunks/{}/{}", other.space.key(), other.hashes[0]);
        serving.client.delete(&path).await.unwrap();
    }
    assert_eq!(store(&serving.client, &engine, &last(&prompt)).await, ["stored"]);
    all_come_to_s3(&site, &prompt).await;
}

/// A chunk waits for its second load; then it is one that was asked for again, and its budget is the kept one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_waits_for_a_load_is_offered_with_it() {
    let site = Site::new().await;
    let serving = site.serve(&with(&LITTLE, &[("memory.min_accesses", "1")])).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = Prompt::new(30);
    store(&serving.client, &engine, &prompt).await;
    let flushed = serving.client.flush(Some(20_000)).await.unwrap();
    assert_eq!((flushed.kept_back, flushed.declined), (30, 0));
    load(&engine, &prompt, "a", Order::Chunk).await;
    let flushed = serving.client.flush(Some(20_000)).await.unwrap();
    let head = head_on_s3(&site, &prompt).await;
    assert!((12..30).contains(&head), "{head} are on S3");
    assert_eq!((flushed.kept_back, flushed.declined), (0, 30 - head as u64));
    assert_eq!(admission(&serving).admitted_chunks, head as u64);
}

/// Stores it again while memory or a disk has it: that is asking for it, too.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_of_what_is_here_is_a_second_chance() {
    let site = Site::new().await;
    let serving = site.serve(&LITTLE).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = declined(&site, &serving, &engine).await;
    assert_eq!(store(&serving.client, &engine, &prompt).await, ["present"; 2]);
    all_come_to_s3(&site, &prompt).await;
}

/// The admission forgets soon.
const FORGETS: [(&str, &str); 3] = [
    ("store.admit", "auto"),
    ("store.admit_rate", "40KiB"),
    ("store.admit_chunks", "1024"),
];

/// Two planes of 2 KiB.
fn small() -> Space {
    Space::from_json(
        r#"{"model": "test/small", "revision": "1", "dtype": "float16", "chunk_tokens": 16,
            "mha": {"layers": 1, "heads": 1, "head_dim": 64}}"#,
    )
    .unwrap()
}

/// Its first chunks.
fn first(prompt: &Prompt, chunks: usize) -> Prompt {
    Prompt {
        hashes: prompt.hashes[..chunks].to_vec(),
        ..prompt.clone()
    }
}

/// A prompt of 41 chunks. The first 40 are in memory, and S3 has some of them. The admission forgot that it declined the
/// rest, and would admit the last.
async fn forgotten(site: &Site, serving: &Serving, engine: &ApiSession) -> Prompt {
    // Prompts that add one chunk are asked for again.
    let likely: Vec<Prompt> = (0..60).map(|_| Prompt::of(small(), 1)).collect();
    for _ in 0..2 {
        for prompt in &likely {
            serving.client.declare(&prompt.space).await.unwrap();
            hits(serving, prompt).await;
            store(&serving.client, engine, prompt).await;
        }
        serving.flush().await;
    }
    loop {
        let prompt = Prompt::of(small(), 41);
        let here = first(&prompt, 40);
        hits(serving, &here).await;
        store(&serving.client, engine, &here).await;
        serving.flush().await;
        if (1..40).contains(&head_on_s3(site, &here).await) {
            store(&serving.client, engine, &Prompt::of(small(), 1100)).await;
            serving.flush().await;
            assert_eq!(hits(serving, &here).await, 40);
            return prompt;
        }
    }
}

/// It went to S3 alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_after_those_that_were_declined_long_ago_brings_them_along() {
    let site = Site::new().await;
    let serving = site.serve(&FORGETS).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let prompt = forgotten(&site, &serving, &engine).await;
    assert_eq!(hits(&serving, &prompt).await, 40);
    assert_eq!(store(&serving.client, &engine, &last(&prompt)).await, ["stored"]);
    all_come_to_s3(&site, &prompt).await;
}

/// It had no second chance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_declined_long_ago_goes_to_s3_when_it_is_asked_for() {
    let site = Site::new().await;
    let serving = site.serve(&FORGETS).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    let here = first(&forgotten(&site, &serving, &engine).await, 40);
    let flushed = serving.client.flush(Some(20_000)).await.unwrap();
    assert!(flushed.declined <= 1024 && flushed.forgotten > 0, "{flushed:?}");
    let words = load(&engine, &last(&here), "a", Order::Chunk).await;
    assert_eq!(words, ["memory"]);
    all_come_to_s3(&site, &here).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_figures_of_what_was_declined_are_metrics() {
    let site = Site::new().await;
    let serving = site.serve(&LITTLE).await;
    serving.ready().await;
    let engine = serving.attach("one").await;
    store(&serving.client, &engine, &Prompt::new(30)).await;
    serving.flush().await;
    let text = serving.client.get("/metrics").await.unwrap();
    let text = std::str::from_utf8(&text).unwrap();
    let value = |name: &str| -> u64 {
        let line = text.lines().find(|line| line.starts_with(&format!("{name} ")));
        line.unwrap_or_else(|| panic!("no {name}"))
            .split(' ')
            .nth(1)
            .unwrap()
            .parse()
            .unwrap()
    };
    let admitted = value("kvgate_admission_admitted_chunks_total");
    let parent = value("kvgate_admission_declined_chunks_total{reason=\"parent\"}");
    assert_eq!(
        value("kvgate_admission_declined_chunks_total{reason=\"unlikely\"}"),
        1
    );
    assert_eq!(
        value("kvgate_admission_declined_chunks_total{reason=\"budget\"}"),
        0
    );
    assert_eq!(admitted + parent + 1, 30);
    assert_eq!(value("kvgate_admission_left_out_chunks"), parent + 1);
    assert!(value("kvgate_admission_declined_bytes_total{reason=\"parent\"}") > parent * 96 * 1024);
}

/// Random stores, loads, removals and restarts. At the end S3 has of each chain a head, and all that is not there was told.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whatever_happens_only_heads_of_chains_are_on_s3() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let site = Site::new().await;
    let disk = site.home.path().join("disk").display().to_string();
    let disks = [
        ("disk.paths", disk.as_str()),
        ("disk.size", "8MiB"),
        ("store.drain", "20s"),
    ];
    let mut prompts: Vec<Prompt> = Vec::new();
    for life in 0..3 {
        let rate = ["20KiB", "100KiB", "40KiB"][life];
        let settings = [("store.admit", "auto"), ("store.admit_rate", rate)];
        let serving = site.serve(&with(&settings, &disks)).await;
        serving.ready().await;
        let engine = serving.attach(&format!("life {life}")).await;
        for act in 0..25 {
            let known = (!prompts.is_empty()).then(|| random.usize(..prompts.len().max(1)));
            match (random.u32(..5), known) {
                (0..2, Some(known)) => {
                    serving.client.declare(&prompts[known].space).await.unwrap();
                    load(&engine, &prompts[known], &format!("{life}-{act}"), Order::Chunk).await;
                }
                (2, Some(known)) => drop(store(&serving.client, &engine, &prompts[known]).await),
                (3, Some(known)) if random.bool() => {
                    let hash = prompts[known].hashes.last().unwrap();
                    let path = format!("/v1/chunks/{}/{hash}", prompts[known].space.key());
                    serving.client.declare(&prompts[known].space).await.unwrap();
                    serving.client.delete(&path).await.unwrap();
                }
                _ => {
                    let prompt = Prompt::new(random.usize(1..12));
                    store(&serving.client, &engine, &prompt).await;
                    prompts.push(prompt);
                }
            }
        }
        let flushed = serving.client.flush(Some(20_000)).await.unwrap();
        assert_eq!((flushed.pending, flushed.dropped), (0, 0), "seed {seed}");
        drop(engine);
        assert_eq!(serving.end().await.dropped, 0, "seed {seed}");
    }
    let mut on_s3 = 0;
    for prompt in &prompts {
        on_s3 += head_on_s3(&site, prompt).await;
    }
    assert!(on_s3 > 12, "seed {seed}: {on_s3} on S3");
}
