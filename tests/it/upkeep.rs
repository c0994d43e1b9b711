//! The commands that count, bound and age a bucket, and chunks in use that are refreshed.

use std::collections::HashSet;
use std::convert::Infallible;
use std::process::Stdio;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::StreamExt;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::service::service_fn;
use hyper::{Method, Request, Response};
use hyper_util::rt::TokioIo;
use kvgate::cache::gateway::{
    AfterMiss, FilledSlot, Gateway, GatewayOptions, LoadSpec, RefreshOptions, StoreOutcome,
};
use kvgate::format::{
    ChunkHash, ChunkHasher, Header, KeyPrefix, Keyring, Space, SpaceKey, TenantKeys, TenantSecret,
};
use kvgate::inventory::{GcLimits, GcSpec, Inventory, LifecycleError, Parents, Select, Usage};
use kvgate::protocol::{Order, Strategy};
use kvgate::s3::object::{Condition, ErrorKind, LifecycleRules, S3};
use serde_json::Value;
use tempfile::TempDir;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::Command;
use tokio::time::Instant;

use crate::outage::{ALL_RGW, rgw, rgw_with};
use crate::support::backends::{Backend, listen, on_backends, options};
use crate::support::daemon;
use crate::support::fixture::{Prompt, Site, arena, load_codes, lookup, soon, store_all, store_chunk};
use crate::support::program::{Said, kvgate};

on_backends! {
    usage_counts_by_space_model_tenant_and_age: embedded, rgw, minio;
    an_interrupted_usage_goes_on: embedded, rgw;
    gc_leaves_whole_prefixes_and_says_what_it_would_do: embedded, rgw, minio;
    gc_bounds_each_tenant_or_one: embedded;
    gc_takes_the_kinds_of_a_model_together: embedded;
    gc_leaves_spaces_alone_that_have_no_name: embedded;
    gc_asks_the_next_object_where_one_is_damaged: embedded;
    gc_follows_no_parents_of_other_models: embedded;
    gc_follows_the_parents_that_a_key_has_signed: embedded;
    a_killed_gc_is_resumed_at_its_rate: rgw;
    an_interrupted_gc_says_what_it_did: embedded;
    a_copy_in_place_makes_an_object_new: embedded, rgw, minio;
    chunks_in_use_are_refreshed_with_all_before_them: embedded, rgw;
    what_follows_a_removed_chunk_is_stored_again: embedded, rgw;
    nodes_remove_nothing_where_none_can_lead: rclone;
    lifecycle_is_told_where_there_is_none: embedded, rclone;
    cold_chunks_expire_and_hot_ones_stay: rgw;
}

const TOKENS: u32 = 16;

fn tiny(model: &str, more: &str) -> Space {
    let json = format!(
        r#"{{"model": "{model}", "revision": "r1", "chunk_tokens": {TOKENS}, {more}
            "mha": {{"layers": 1, "heads": 1, "head_dim": 8}}}}"#
    );
    Space::from_json(&json).unwrap()
}

/// A place of a test's own on a server, and the program there.
struct Place<'a> {
    backend: &'a Backend,
    site: Site,
    gateway: Gateway,
    home: TempDir,
}

impl<'a> Place<'a> {
    async fn new(backend: &'a Backend) -> Self {
        let site = Site::new(backend.store().await).await;
        let options = GatewayOptions {
            put_bytes_max: 64 << 20,
            ..site.options()
        };
        let gateway = Gateway::new(
            Arc::clone(&site.store),
            arena(64 << 20),
            site.capabilities,
            options,
        );
        Self {
            backend,
            site,
            gateway,
            home: TempDir::new().unwrap(),
        }
    }

    fn prefix(&self) -> &str {
        self.site.keys.as_str().trim_end_matches('/')
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = kvgate(self.home.path(), args);
        command
            .current_dir(self.home.path())
            .envs(self.backend.credentials())
            .env("KVGATE__S3__ENDPOINT", &self.backend.endpoints[0])
            .env("KVGATE__S3__BUCKET", "kvgate-it")
            .env("KVGATE__S3__PREFIX", self.prefix());
        command
    }

    async fn say(&self, args: &[&str]) -> Said {
        Said::new(self.command(args).output().await.unwrap())
    }

    async fn json(&self, args: &[&str]) -> Value {
        self.say(&[args, &["--json"]].concat()).await.exits(0).json()
    }

    /// Stores what is not there yet of a prompt.
    async fn store(&self, prompt: &Prompt) {
        let store = |i: usize| async move {
            let slot = loop {
                match self.gateway.reserve(&prompt.space) {
                    Ok(slot) => break slot,
                    Err(_) => tokio::task::yield_now().await,
                }
            };
            let (hash, parent) = (prompt.hashes[i], prompt.parent(i));
            let outcome = self
                .gateway
                .write_through(FilledSlot { hash, parent, slot }, soon())
                .await;
            let is_there = matches!(
                outcome,
                StoreOutcome::Stored | StoreOutcome::Present | StoreOutcome::Pending
            );
            assert!(is_there, "{outcome:?}");
        };
        futures::stream::iter(0..prompt.hashes.len())
            .for_each_concurrent(32, store)
            .await;
    }

    /// All chunks that are there, in whatever space.
    async fn there(&self) -> HashSet<ChunkHash> {
        self.there_in(None).await
    }

    async fn there_in(&self, space: Option<SpaceKey>) -> HashSet<ChunkHash> {
        let inventory = self.inventory();
        let pages: Vec<_> = inventory.pages(space).collect().await;
        let chunks = pages.into_iter().flat_map(|page| page.unwrap().chunks);
        chunks.map(|chunk| chunk.hash).collect()
    }

    fn inventory(&self) -> Inventory {
        self.inventory_with(Keyring::default())
    }

    fn inventory_with(&self, keyring: Keyring) -> Inventory {
        let keys = KeyPrefix::new(self.prefix());
        Inventory::new(
            Arc::clone(&self.site.store),
            keys,
            keyring,
            Duration::from_secs(60),
        )
    }

    /// Names another parent in the header of an object, as anybody can who may write to the bucket.
    async fn set_parent(&self, space: &Space, chunk: &ChunkHash, parent: ChunkHash) {
        let key = self.site.keys.chunk(space.key(), chunk);
        let mut object = self.site.read(&key).await;
        let mut header = Header::parse(&object).unwrap();
        header.parent = parent;
        header.write(&mut object);
        let put = self
            .site
            .store
            .put(&key, object.into(), Condition::Always, soon());
        put.await.unwrap();
    }
}

const ZERO: ChunkHash = ChunkHash([0; 32]);

/// Removes down to a size; returns how many objects.
async fn gc(inventory: &Inventory, bytes: u64) -> u64 {
    let spec = GcSpec {
        select: Select::default(),
        limits: GcLimits {
            bytes: Some(bytes),
            ..GcLimits::default()
        },
        key: None,
        rate: 10_000,
        chunks_max: 1000,
    };
    let began = inventory.begin_gc().await.unwrap();
    let plan = inventory
        .plan_gc(&spec, began, &mut Parents::default(), |_| ())
        .await;
    let removed = inventory.remove_planned(&plan.unwrap(), || true, |_| ()).await;
    removed.unwrap().removed.chunks
}

/// Another tenant's model that is listed after this space, so that what its objects say is read last.
fn after(space: &Space, of: impl Fn(&str) -> Space) -> Space {
    let mut others = (0..).map(|number| of(&format!("other{number}")));
    others.find(|other| other.key() > space.key()).unwrap()
}

/// Prompts of `space` that begin alike: `head` chunks, then `tail` of their own.
fn prompts(space: &Space, count: u32, head: u32, tail: u32) -> Vec<Prompt> {
    let hasher = ChunkHasher::new(space, None).unwrap();
    let salt = fastrand::u64(..).to_le_bytes();
    let root = hasher.root(&salt, b"").unwrap();
    let prompt = |number: u32| {
        let mut tokens: Vec<u32> = (0..head * TOKENS).collect();
        tokens.extend((0..tail * TOKENS).map(|token| number * 100_000 + token));
        Prompt {
            space: space.clone(),
            root,
            hashes: hasher.chain(&root, &tokens, &[]).unwrap(),
        }
    };
    (1..=count).map(prompt).collect()
}

/// How many leading chunks of the prompt are there; none may be after the first that is not.
#[track_caller]
fn prefix_of(prompt: &Prompt, there: &HashSet<ChunkHash>) -> usize {
    let is_there: Vec<bool> = prompt.hashes.iter().map(|hash| there.contains(hash)).collect();
    let prefix = is_there.iter().take_while(|is| **is).count();
    assert!(
        !is_there[prefix..].contains(&true),
        "a prompt with a hole: {is_there:?}"
    );
    prefix
}

async fn usage_counts_by_space_model_tenant_and_age(backend: &Backend) {
    let place = Place::new(backend).await;
    let acme = tiny("m/one", r#""tenant": "acme","#);
    let other = tiny("m/two", "");
    for (space, chunks) in [(&acme, 3), (&other, 2)] {
        place.store(&prompts(space, 1, 0, chunks)[0]).await;
    }
    let object = acme.layout().object_len() as u64;
    let json = place.json(&["usage"]).await;
    assert_eq!(
        (&json["chunks"], &json["bytes"]),
        (&5.into(), &(5 * object).into())
    );
    let row = |name: &str, key: &str, value: &str| {
        let rows = json[name].as_array().unwrap();
        rows.iter().find(|row| row[key] == value).cloned().unwrap()
    };
    assert_eq!(row("tenants", "tenant", "acme")["bytes"], 3 * object);
    assert_eq!(row("models", "model", "m/two")["chunks"], 2);
    assert_eq!(row("spaces", "space", &acme.key().to_string())["gets"], 3);
    assert_eq!(row("ages", "age", "under 1 hour")["chunks"], 5);
    assert_eq!(json["days"][0]["bytes"], 5 * object);
    assert_eq!(json["growth_bytes_a_day"], 5 * object);
    assert_eq!(json["requests"]["list"], 1);
    let said = place.say(&["usage"]).await.exits(0);
    said.says(&["5 chunks", "acme", "m/two", "█", "a day", "under 1 hour"]);
}

async fn an_interrupted_usage_goes_on(backend: &Backend) {
    let place = Place::new(backend).await;
    let space = tiny("m/many", "");
    let prompt = &prompts(&space, 1, 0, 2_300)[0];
    place.store(prompt).await;
    let file = place.home.path().join("usage.json");
    let whole = place.json(&["usage"]).await;
    // It dies within the second page.
    let killed = tokio::spawn({
        let (inventory, file) = (place.inventory(), file.clone());
        let s3 = format!("{} kvgate-it {}", backend.endpoints[0], place.prefix());
        async move {
            let seen = |usage: &Usage| assert_eq!(usage.lists, 1, "killed");
            let _ = inventory.usage(&s3, 1 << 20, Some(&file), seen).await;
        }
    });
    killed.await.unwrap_err();
    let json = place.json(&["usage", "--resume", "usage.json"]).await;
    assert_eq!((&json["chunks"], &json["bytes"]), (&2300.into(), &whole["bytes"]));
    assert_eq!(json["requests"]["list"], 3, "each page once");
    assert_eq!(json["since"], Value::Null);
    // The next one is compared with it.
    place.store(&prompts(&space, 1, 0, 5)[0]).await;
    let json = place.json(&["usage", "--resume", "usage.json"]).await;
    assert_eq!(json["chunks"], 2305);
    assert!(json["since"].is_i64(), "{json}");
    let other = place
        .say(&["usage", "--resume", "usage.json", "--prefix", "other"])
        .await;
    other.exits(2).says(&["--resume"]);
    let notes = place.home.path().join("notes.txt");
    std::fs::write(&notes, "buy milk\n").unwrap();
    for command in [&["usage"][..], &["gc", "--size", "1GiB"]] {
        let said = place.say(&[command, &["--resume", "notes.txt"]].concat()).await;
        said.exits(2)
            .says(&["notes.txt: it was not written by", "give another file"]);
    }
    assert_eq!(std::fs::read_to_string(&notes).unwrap(), "buy milk\n");
}

async fn gc_leaves_whole_prefixes_and_says_what_it_would_do(backend: &Backend) {
    let place = Place::new(backend).await;
    let space = tiny("m/gc", "");
    let object = space.layout().object_len() as u64;
    let (old, new) = (prompts(&space, 2, 4, 4), prompts(&space, 1, 0, 6));
    for prompt in &old {
        place.store(prompt).await;
    }
    tokio::time::sleep(Duration::from_millis(1100)).await;
    place.store(&new[0]).await;
    let size = (10 * object).to_string();
    let gc = ["gc", "--size", &size];
    let json = place.json(&gc).await;
    assert_eq!(json["dry_run"], true);
    assert_eq!(
        (&json["planned"]["objects"], &json["removed"]["objects"]),
        (&8.into(), &0.into())
    );
    assert_eq!(place.there().await.len(), 18);
    place
        .say(&gc)
        .await
        .exits(0)
        .says(&["would go", "--yes", "limit    down to"]);
    // Days are meant, and seconds would take everything.
    for bare in ["30", " 30 "] {
        place
            .say(&["gc", "--unused", bare, "--yes"])
            .await
            .exits(2)
            .says(&["write 30d, or 30s"]);
    }
    assert_eq!(place.there().await.len(), 18);
    let month = ["gc", "--unused", "30d", "--tenant-size", "1TiB"];
    place.say(&month).await.exits(0).says(&[
        "each tenant down to 1 TiB; what was unused for 30d",
        "would go 0 objects",
    ]);
    assert_eq!(place.json(&month).await["limits"]["unused_seconds"], 2_592_000.0);

    let json = place.json(&[&gc[..], &["--yes"]].concat()).await;
    assert_eq!(json["removed"]["objects"], 8);
    let there = place.there().await;
    assert_eq!(
        (there.len(), prefix_of(&new[0], &there)),
        (10, 6),
        "the newest stays whole"
    );
    old.iter()
        .for_each(|prompt| assert_eq!(prefix_of(prompt, &there), 4, "the common head is the last"));
    // Nothing more must go.
    assert_eq!(
        place.json(&[&gc[..], &["--yes"]].concat()).await["planned"]["objects"],
        0
    );
    assert_eq!(
        place.json(&["gc", "--unused", "1h", "--yes"]).await["planned"]["objects"],
        0
    );
    place.say(&["gc"]).await.exits(2).says(&["--size", "--unused"]);
    place
        .say(&["gc", "--model", "no/such"])
        .await
        .exits(2)
        .says(&["kvgate usage"]);
    // All of a revision, with its readable form.
    let json = place.json(&["gc", "--revision", "r1", "--yes"]).await;
    assert_eq!(json["removed"]["objects"], 10);
    let left = place
        .site
        .store
        .list(place.site.keys.as_str(), None, soon())
        .await
        .unwrap();
    assert_eq!(left.objects, []);
}

async fn gc_bounds_each_tenant_or_one(backend: &Backend) {
    let place = Place::new(backend).await;
    let spaces = ["acme", "beta"].map(|tenant| tiny("m/t", &format!(r#""tenant": "{tenant}","#)));
    let object = spaces[0].layout().object_len() as u64;
    let stored = [8, 3].map(|chunks| chunks).into_iter().zip(&spaces);
    let stored: Vec<Prompt> = stored
        .map(|(chunks, space)| prompts(space, 1, 0, chunks).remove(0))
        .collect();
    for prompt in &stored {
        place.store(prompt).await;
    }
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let left = async || {
        let there = place.there().await;
        [prefix_of(&stored[0], &there), prefix_of(&stored[1], &there)]
    };
    let size = |chunks: u64| (chunks * object).to_string();
    place.json(&["gc", "--tenant-size", &size(5), "--yes"]).await;
    assert_eq!(left().await, [5, 3], "only the one that has more gives");
    place
        .json(&["gc", "--tenant", "beta", "--size", &size(2), "--yes"])
        .await;
    assert_eq!(left().await, [5, 2]);
    place.json(&["gc", "--tenant", "beta", "--yes"]).await;
    assert_eq!(left().await, [5, 0]);
}

async fn gc_takes_the_kinds_of_a_model_together(backend: &Backend) {
    let place = Place::new(backend).await;
    let full = tiny("m/kinds", "");
    let window = tiny("m/kinds", r#""kind": {"window": 64},"#);
    let prompt = prompts(&full, 1, 0, 6).remove(0);
    place.store(&prompt).await;
    // Only the last chunks of a window are stored.
    let tail = Prompt {
        space: window.clone(),
        root: prompt.hashes[3],
        hashes: prompt.hashes[4..].to_vec(),
    };
    place.store(&tail).await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let objects = full.layout().object_len() as u64 * 8;
    let json = place
        .json(&["gc", "--size", &(objects - 1).to_string(), "--yes"])
        .await;
    assert_eq!(json["removed"]["objects"], 2, "the last chunk in both kinds");
    let inventory = place.inventory();
    for (space, chunks) in [(&full, 5), (&window, 1)] {
        let pages: Vec<_> = inventory.pages(Some(space.key())).collect().await;
        let left: Vec<_> = pages.into_iter().flat_map(|page| page.unwrap().chunks).collect();
        assert_eq!(left.len(), chunks);
        assert!(left.iter().all(|chunk| chunk.hash != prompt.hashes[5]));
    }
    // By the space of one kind all kinds of the model go.
    let json = place
        .json(&["gc", "--space", &window.key().to_string(), "--yes"])
        .await;
    assert_eq!(json["removed"]["objects"], 6);
}

async fn gc_leaves_spaces_alone_that_have_no_name(backend: &Backend) {
    let place = Place::new(backend).await;
    let (lost, other) = (tiny("m/lost", ""), tiny("m/other", ""));
    let window = tiny("m/lost", r#""kind": {"window": 64},"#);
    let prompt = prompts(&lost, 1, 0, 6).remove(0);
    place.store(&prompt).await;
    let mut windows = prompt.clone();
    windows.space = window.clone();
    place.store(&windows).await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    place.store(&prompts(&other, 1, 0, 6)[0]).await;
    let json = place.site.keys.space_json(lost.key());
    place.site.store.delete(&[json], soon()).await.unwrap();
    let left = async |space: &Space| place.there_in(Some(space.key())).await.len();
    // What it can name has room, and without that: all of it goes.
    let object = lost.layout().object_len() as u64;
    let size = (12 * object).to_string();
    let gc = ["gc", "--size", &size, "--yes"];
    let json = place.json(&gc).await;
    assert_eq!(
        (&json["found"]["objects"], &json["removed"]["objects"]),
        (&12.into(), &0.into())
    );
    assert_eq!(json["unnamed"][0]["space"], lost.key().to_string());
    assert_eq!(json["unnamed"][0]["bytes"], 6 * object);
    place
        .say(&gc)
        .await
        .exits(0)
        .says(&["6 objects", "1 space ", "kvgate ls", "--space"]);
    for limit in [["--unused", "1s"], ["--tenant-size", "1"]] {
        place.json(&[&["gc", "--yes"], &limit[..]].concat()).await;
        assert_eq!(left(&lost).await, 6, "{limit:?}");
    }
    assert_eq!(place.there().await.len(), 6);
    place
        .json(&["gc", "--space", &lost.key().to_string(), "--yes"])
        .await;
    assert_eq!(left(&lost).await, 0);
}

/// A window's object is asked for the parent before the full chunk's.
async fn gc_asks_the_next_object_where_one_is_damaged(backend: &Backend) {
    let place = Place::new(backend).await;
    let full = tiny("m/damaged", "");
    let window = tiny("m/damaged", r#""kind": {"window": 64},"#);
    let prompt = prompts(&full, 1, 0, 8).remove(0);
    let mut head = prompt.clone();
    head.hashes.truncate(4);
    place.store(&head).await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    place.store(&prompt).await;
    let tail = Prompt {
        space: window.clone(),
        root: prompt.hashes[3],
        hashes: prompt.hashes[4..5].to_vec(),
    };
    place.store(&tail).await;
    let key = place.site.key(&tail, 0);
    let noise = vec![0xee; window.layout().object_len()];
    let put = place
        .site
        .store
        .put(&key, noise.into(), Condition::Always, soon());
    put.await.unwrap();
    let object = full.layout().object_len() as u64;
    // The damaged one is as large: nine objects, and the last three chunks go.
    assert_eq!(gc(&place.inventory(), 6 * object).await, 3);
    assert_eq!(prefix_of(&prompt, &place.there_in(Some(full.key())).await), 5);
}

/// An engine's own hashes are the same in all models and tenants, and anybody may store them there, with any parents.
async fn gc_follows_no_parents_of_other_models(backend: &Backend) {
    let place = Place::new(backend).await;
    let of = |tenant: &str| {
        tiny(
            "m/own",
            &format!(r#""tenant": "{tenant}", "hash": "sglang-sha256","#),
        )
    };
    let acme = of("acme");
    let other = after(&acme, of);
    let object = acme.layout().object_len() as u64;
    let prompt = Prompt {
        space: acme.clone(),
        root: ZERO,
        hashes: (0..8)
            .map(|_| ChunkHash(std::array::from_fn(|_| fastrand::u8(..))))
            .collect(),
    };
    let mut head = prompt.clone();
    head.hashes.truncate(4);
    place.store(&head).await;
    for hash in &prompt.hashes {
        let alone = Prompt {
            space: other.clone(),
            root: ZERO,
            hashes: vec![*hash],
        };
        place.store(&alone).await;
    }
    tokio::time::sleep(Duration::from_millis(1100)).await;
    place.store(&prompt).await;
    // The head is in use, so the other tenant's are the oldest.
    assert_eq!(gc(&place.inventory(), 12 * object).await, 4);
    assert_eq!(prefix_of(&prompt, &place.there_in(Some(acme.key())).await), 8);
}

/// A window's object is asked for the parent before the full chunk's; one that no key has signed says nothing.
async fn gc_follows_the_parents_that_a_key_has_signed(backend: &Backend) {
    let place = Place::new(backend).await;
    let of = |kind: &str| {
        let more = format!(r#""tenant": "acme", "protection": "signed", {kind}"#);
        tiny("m/signed", &more)
    };
    let (full, window) = (of(""), of(r#""kind": {"window": 64},"#));
    let acme = TenantKeys {
        keys: vec![TenantSecret::new([7; 32])],
        ..TenantKeys::default()
    };
    let keyring = Keyring::new([("acme".to_owned(), acme)].into());
    let mut options = place.site.options();
    options.keyring = keyring.clone();
    let gateway = place.site.gateway_with(Arc::clone(&place.site.store), options);
    let prompt = Prompt::of(full.clone(), 12);
    store_all(&gateway, &prompt).await;
    let mut windows = prompt.clone();
    windows.space = window.clone();
    store_all(&gateway, &windows).await;
    for chunk in &prompt.hashes {
        place.set_parent(&window, chunk, ZERO).await;
    }
    let half = 12 * full.layout().object_len() as u64;
    assert_eq!(gc(&place.inventory_with(keyring), half).await, 12);
    assert_eq!(prefix_of(&prompt, &place.there_in(Some(full.key())).await), 6);
}

async fn an_interrupted_gc_says_what_it_did(backend: &Backend) {
    let place = Place::new(backend).await;
    let space = tiny("m/stopped", "");
    place.store(&prompts(&space, 1, 0, 20)[0]).await;
    tokio::time::sleep(Duration::from_millis(1100)).await;
    let gc = ["gc", "--model", "m/stopped", "--yes", "--resume", "gc.log"];
    let mut slow = place.command(&gc);
    slow.args(["--rate", "1", "--json"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let child = slow.spawn().unwrap();
    while place.there().await.len() == 20 {}
    let pid = rustix::process::Pid::from_raw(child.id().unwrap().cast_signed()).unwrap();
    rustix::process::kill_process(pid, rustix::process::Signal::INT).unwrap();
    let said = Said::new(child.wait_with_output().await.unwrap()).exits(1);
    let json = said.json();
    let removed = json["removed"]["objects"].as_u64().unwrap();
    assert_eq!(
        (json["stopped"].clone(), removed),
        (true.into(), 20 - place.there().await.len() as u64)
    );
    said.says(&[
        &format!("stopped: {removed} of 20 objects removed"),
        "--resume gc.log",
    ]);
    place.say(&gc).await.exits(0).says(&["removed"]);
    assert_eq!(place.there().await.len(), 0);
}

async fn a_killed_gc_is_resumed_at_its_rate(backend: &Backend) {
    // 20,000 of them take a minute to store.
    let trees = if std::env::var_os("KVGATE_TEST_FULL").is_some() {
        100
    } else {
        20
    };
    let place = Place::new(backend).await;
    let space = tiny("m/rate", "");
    let object = space.layout().object_len() as u64;
    let mut stored = Vec::new();
    for _ in 0..trees {
        let tree = prompts(&space, 10, 10, 19);
        for prompt in &tree {
            place.store(prompt).await;
        }
        stored.extend(tree);
    }
    let total = trees * 200;
    assert_eq!(place.there().await.len(), total);
    tokio::time::sleep(Duration::from_millis(1100)).await;

    let (limit, rate) = (total / 2, 400);
    let size = (limit as u64 * object).to_string();
    let rate_text = rate.to_string();
    let gc = [
        "gc", "--size", &size, "--rate", &rate_text, "--resume", "gc.log", "--yes", "--json",
    ];
    let mut child = place.command(&gc).stdout(Stdio::null()).spawn().unwrap();
    let mut left = total;
    while left > total - total / 10 {
        assert!(child.try_wait().unwrap().is_none(), "it is not done yet");
        left = place.there().await.len();
    }
    child.kill().await.unwrap();
    // The server may still be at the last batch, and a listing has several pages.
    let mut there = place.there().await;
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = place.there().await;
        if std::mem::replace(&mut there, now.clone()) == now {
            break;
        }
    }
    let prefixes: Vec<usize> = stored.iter().map(|prompt| prefix_of(prompt, &there)).collect();
    assert!(
        there.len() > limit,
        "it was killed in the middle: {}",
        there.len()
    );

    // What is stored now is later than its beginning, and needs all before it.
    let longest = (0..stored.len()).max_by_key(|&prompt| prefixes[prompt]).unwrap();
    let mut late = stored[longest].clone();
    late.hashes.truncate(prefixes[longest]);
    let hasher = ChunkHasher::new(&space, None).unwrap();
    let tokens: Vec<u32> = (0..3 * TOKENS).collect();
    late.hashes
        .extend(hasher.chain(late.hashes.last().unwrap(), &tokens, &[]).unwrap());
    place.gateway.forget_existence();
    place.store(&late).await;

    let before = place.there().await.len();
    let began = Instant::now();
    let json = place.say(&gc).await.exits(0).json();
    let removed = json["removed"]["objects"].as_u64().unwrap() as usize;
    assert_eq!(before - removed, limit, "{json}");
    let least = Duration::from_secs_f64((removed as f64 - f64::from(rate)) / f64::from(rate));
    assert!(began.elapsed() >= least, "{removed} in {:?}", began.elapsed());
    let there = place.there().await;
    assert_eq!(there.len(), limit);
    assert_eq!(
        prefix_of(&late, &there),
        late.hashes.len(),
        "what was stored since stays, with all before it"
    );
    let usable: usize = stored
        .iter()
        .filter(|prompt| prefix_of(prompt, &there) > 0)
        .count();
    assert!(usable > 0, "prompts are left");
}

async fn a_copy_in_place_makes_an_object_new(backend: &Backend) {
    let place = Place::new(backend).await;
    let prompt = Prompt::new(1);
    lookup(&place.gateway, &prompt, Strategy::Prefix).await;
    store_all(&place.gateway, &prompt).await;
    let (store, key) = (&place.site.store, place.site.key(&prompt, 0));
    let before = (
        store.head(&key, soon()).await.unwrap(),
        place.site.read(&key).await,
    );
    tokio::time::sleep(Duration::from_millis(1100)).await;
    assert!(before.0.run.is_some(), "{before:?}");
    store.copy_in_place(&key, &before.0, soon()).await.unwrap();
    let after = (
        store.head(&key, soon()).await.unwrap(),
        place.site.read(&key).await,
    );
    assert!(after.0.version.modified > before.0.version.modified, "{after:?}");
    assert_eq!(
        (&after.0.version.etag, &after.0.run, &after.1),
        (&before.0.version.etag, &before.0.run, &before.1)
    );
    // RGW 16 ignores the condition. A copy onto itself mixes no versions all the same.
    if backend.name != "rgw" {
        let mut wrong = before.0.clone();
        wrong.version.etag = "0123456789abcdef0123456789abcdef".into();
        let wrong = store.copy_in_place(&key, &wrong, soon()).await;
        assert_eq!(wrong.unwrap_err().kind, ErrorKind::Changed);
    }
    let gone = store.copy_in_place("nothing/there", &before.0, soon()).await;
    assert_eq!(gone.unwrap_err().kind, ErrorKind::NotFound);
}

fn refreshing(after: Duration) -> RefreshOptions {
    RefreshOptions {
        after,
        rate: 1000,
        queue: 1000,
        known: 1000,
    }
}

async fn chunks_in_use_are_refreshed_with_all_before_them(backend: &Backend) {
    let place = Place::new(backend).await;
    let (hot, cold) = (Prompt::new(5), Prompt::new(2));
    store_all(&place.gateway, &hot).await;
    store_all(&place.gateway, &cold).await;
    let modified = async |prompt: &Prompt, i: usize| {
        let key = place.site.key(prompt, i);
        place
            .site
            .store
            .head(&key, soon())
            .await
            .unwrap()
            .version
            .modified
    };
    let before = [
        modified(&hot, 0).await,
        modified(&hot, 4).await,
        modified(&cold, 1).await,
    ];
    tokio::time::sleep(Duration::from_millis(2100)).await;
    // A node of its own, and a lookup of the third chunk alone: an engine may have the first ones itself.
    let node = place.site.gateway();
    let refresh = tokio::spawn({
        let node = node.clone();
        async move { node.refresh_used(refreshing(Duration::from_secs(2))).await }
    });
    while node.refresh_stats().refreshed < 4 {
        let found = node
            .lookup(&hot.space, &hot.hashes[2..3], Strategy::Prefix, soon())
            .await;
        assert_eq!(found.prefix, 1);
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    refresh.abort();
    for i in 0..3 {
        assert!(modified(&hot, i).await > before[0], "chunk {i}");
    }
    assert_eq!(modified(&hot, 4).await, before[1], "nobody used it");
    assert_eq!(modified(&cold, 1).await, before[2]);
    let stats = node.refresh_stats();
    assert_eq!(
        (stats.refreshed, stats.failed),
        (4, 0),
        "space.json as well: {stats:?}"
    );
}

async fn lifecycle_is_told_where_there_is_none(backend: &Backend) {
    let place = Place::new(backend).await;
    for args in [
        &["lifecycle", "show"][..],
        &["lifecycle", "apply", "--days", "3"],
        &["lifecycle", "remove"],
    ] {
        place
            .say(args)
            .await
            .exits(1)
            .says(&["no lifecycle rules", "kvgate gc"]);
    }
}

const FOREIGN: &str = "<Rule><ID>of another team</ID><Filter><And><Prefix>logs/</Prefix>\
    <Tag><Key>a</Key><Value>b</Value></Tag></And></Filter><Status>Enabled</Status>\
    <Expiration><Days>3000</Days></Expiration></Rule>";

/// AWS's lifecycle rules: a document, and a setting beside it that a write without it resets. No server that runs here has
/// that setting.
#[derive(Default)]
struct Rules {
    document: Option<String>,
    setting: String,
    /// The document that others write after the next GET.
    meanwhile: Option<String>,
    /// What this server forgets of a document.
    drops: &'static str,
    writes: usize,
}

const SETTING: &str = "x-amz-transition-default-minimum-object-size";

impl Rules {
    fn answer(&mut self, method: &Method, setting: Option<String>, body: &str) -> Response<Full<Bytes>> {
        let answer = |status: u16, body: String| {
            let response = Response::builder().status(status).header(SETTING, &self.setting);
            response.body(Full::from(body)).unwrap()
        };
        match *method {
            Method::GET => {
                let absent = || {
                    answer(
                        404,
                        "<Error><Code>NoSuchLifecycleConfiguration</Code></Error>".into(),
                    )
                };
                let answer = self
                    .document
                    .clone()
                    .map_or_else(absent, |document| answer(200, document));
                self.document = self.meanwhile.take().or(self.document.take());
                answer
            }
            Method::PUT => {
                self.writes += 1;
                self.setting = setting.unwrap_or_else(|| "all_storage_classes_128K".into());
                self.document = Some(match self.drops {
                    "" => body.to_owned(),
                    drops => body.replace(drops, ""),
                });
                Response::default()
            }
            _ => {
                self.writes += 1;
                self.document = None;
                Response::default()
            }
        }
    }

    /// Serves them, to this inventory.
    async fn serve(self) -> (Arc<Mutex<Self>>, Inventory) {
        let rules = Arc::new(Mutex::new(self));
        let served = Arc::clone(&rules);
        let (listener, endpoint) = listen().await;
        tokio::spawn(async move {
            loop {
                let (socket, _) = listener.accept().await.unwrap();
                let served = Arc::clone(&served);
                let take = move |request: Request<Incoming>| {
                    let served = Arc::clone(&served);
                    async move {
                        let (head, body) = request.into_parts();
                        let body = body.collect().await.unwrap().to_bytes();
                        let setting = head
                            .headers
                            .get(SETTING)
                            .map(|value| value.to_str().unwrap().to_owned());
                        let body = std::str::from_utf8(&body).unwrap();
                        let answer = served.lock().unwrap().answer(&head.method, setting, body);
                        Ok::<_, Infallible>(answer)
                    }
                };
                let connection = hyper::server::conn::http1::Builder::new()
                    .serve_connection(TokioIo::new(socket), service_fn(take));
                tokio::spawn(connection);
            }
        });
        let store = Arc::new(S3::connect(&options(&endpoint)).await.unwrap());
        let limit = Duration::from_secs(10);
        let inventory = Inventory::new(store, KeyPrefix::new("kv"), Keyring::default(), limit);
        (rules, inventory)
    }
}

fn with_rules(rules: &str) -> String {
    format!("<LifecycleConfiguration>{rules}</LifecycleConfiguration>")
}

#[tokio::test]
async fn a_setting_beside_the_rules_stays_when_they_are_written() {
    let (rules, inventory) = Rules {
        document: Some(with_rules(FOREIGN)),
        setting: "varies_by_storage_class".into(),
        ..Rules::default()
    }
    .serve()
    .await;
    let before = inventory.lifecycle().await.unwrap();
    let after = inventory.set_lifecycle(&before, Some(5)).await.unwrap();
    assert_eq!(after.rules().unwrap().len(), 2);
    let after = inventory.set_lifecycle(&after, None).await.unwrap();
    assert_eq!(after.rules().unwrap().len(), 1);
    let rules = rules.lock().unwrap();
    assert_eq!(rules.document.as_deref(), Some(&*with_rules(FOREIGN)));
    assert_eq!(
        (rules.writes, rules.setting.as_str()),
        (2, "varies_by_storage_class")
    );
}

#[tokio::test]
async fn rules_that_others_changed_meanwhile_are_left_alone() {
    let other = with_rules(&FOREIGN.replace("3000", "7"));
    for meanwhile in [
        other,
        with_rules(&[FOREIGN, &FOREIGN.replace("of another", "of a third")].concat()),
    ] {
        let (rules, inventory) = Rules {
            document: Some(with_rules(FOREIGN)),
            meanwhile: Some(meanwhile.clone()),
            ..Rules::default()
        }
        .serve()
        .await;
        let before = inventory.lifecycle().await.unwrap();
        let set = inventory.set_lifecycle(&before, Some(5)).await;
        assert!(matches!(set, Err(LifecycleError::Changed)), "{set:?}");
        let rules = rules.lock().unwrap();
        assert_eq!((rules.writes, rules.document.as_deref()), (0, Some(&*meanwhile)));
    }
}

#[tokio::test]
async fn a_server_that_forgets_a_part_of_anothers_rule_is_told_of() {
    let (_, inventory) = Rules {
        document: Some(with_rules(FOREIGN)),
        drops: "<Tag><Key>a</Key><Value>b</Value></Tag>",
        ..Rules::default()
    }
    .serve()
    .await;
    let before = inventory.lifecycle().await.unwrap();
    let set = inventory.set_lifecycle(&before, Some(5)).await;
    assert!(matches!(set, Err(LifecycleError::Lost(_))), "{set:?}");
    // The first rules of a bucket have nothing beside them.
    let (_, inventory) = Rules {
        setting: "all_storage_classes_128K".into(),
        ..Rules::default()
    }
    .serve()
    .await;
    let before = inventory.lifecycle().await.unwrap();
    let after = inventory.set_lifecycle(&before, Some(5)).await.unwrap();
    let none = inventory.set_lifecycle(&after, None).await.unwrap();
    assert_eq!(none, before);
}

async fn cold_chunks_expire_and_hot_ones_stay(backend: &Backend) {
    // One of the radosgw does the rules of all, and for it alone a day lasts this long: it looks through the bucket each day.
    let day = Duration::from_secs(2);
    let _alone = ALL_RGW.lock().await;
    let last = backend.endpoints.last().unwrap();
    let last = last.trim_start_matches("http://").split(':').next().unwrap();
    rgw("stop", last);
    rgw_with("start", last, "--rgw-lc-debug-interval=2");
    let place = Place::new(backend).await;
    let store = &place.site.store;
    let document = format!(
        r#"<LifecycleConfiguration xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{FOREIGN}</LifecycleConfiguration>"#
    );
    let rules = LifecycleRules {
        xml: document,
        smallest_moved: None,
    };
    store.set_lifecycle(Some(&rules), soon()).await.unwrap();
    let foreign = async || {
        let rules = place.json(&["lifecycle", "show"]).await["rules"]
            .as_array()
            .unwrap()
            .clone();
        rules
            .into_iter()
            .find(|rule| rule["id"] == "of another team")
            .unwrap()
    };
    let was = foreign().await;
    let text_of = async || {
        let xml = store.lifecycle(soon()).await.unwrap().unwrap().xml;
        let rules: Vec<String> = xml.split("<Rule>").map(ToOwned::to_owned).collect();
        rules
            .into_iter()
            .find(|rule| rule.contains("of another team"))
            .unwrap()
            .split("</Rule>")
            .next()
            .unwrap()
            .to_owned()
    };
    let text = text_of().await;

    let (hot, cold) = (Prompt::new(6), Prompt::new(6));
    let node = place.site.gateway();
    let refresh = tokio::spawn({
        let node = node.clone();
        async move { node.refresh_used(refreshing(2 * day)).await }
    });
    store_all(&place.gateway, &hot).await;
    store_all(&place.gateway, &cold).await;
    let whole = place
        .say(&["lifecycle", "apply", "--days", "6", "--prefix", ""])
        .await;
    whole.exits(2).says(&["--whole-bucket"]);
    let dry = place
        .json(&["lifecycle", "apply", "--days", "6", "--dry-run"])
        .await;
    assert_eq!(
        (&dry["changed"], dry["rules"].as_array().unwrap().len()),
        (&false.into(), 1)
    );
    let said = place.say(&["lifecycle", "apply", "--days", "6"]).await.exits(0);
    said.says(&["6 days", "of another team", "[refresh] after"]);
    assert_eq!(
        place.json(&["lifecycle", "apply", "--days", "6"]).await["changed"],
        false
    );

    // Its last chunk is in use, its first ones are as old as the cold prompt's.
    let until = Instant::now() + Duration::from_secs(120);
    loop {
        node.forget_existence();
        let found = node
            .lookup(&hot.space, &hot.hashes, Strategy::Exact, soon())
            .await;
        assert_eq!(
            found.prefix,
            6,
            "a chunk in use is gone: {:?}",
            node.refresh_stats()
        );
        let there = place.there().await;
        if !cold.hashes.iter().any(|hash| there.contains(hash)) {
            break;
        }
        assert!(Instant::now() < until, "cold chunks are still there");
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert!(node.refresh_stats().refreshed >= 7, "{:?}", node.refresh_stats());
    // Longer than a chunk lives without a use.
    let until = Instant::now() + 8 * day;
    while Instant::now() < until {
        let found = node
            .lookup(&hot.space, &hot.hashes, Strategy::Exact, soon())
            .await;
        assert_eq!(found.prefix, 6);
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    assert_eq!(place.there().await.len(), 6);
    refresh.abort();

    assert_eq!((foreign().await, text_of().await), (was.clone(), text.clone()));
    let said = place.say(&["lifecycle", "remove"]).await.exits(0);
    said.says(&["chunks stay", "of another team"]);
    assert_eq!((foreign().await, text_of().await), (was, text));
    assert_eq!(place.json(&["lifecycle", "remove"]).await["changed"], false);
    store.set_lifecycle(None, soon()).await.unwrap();
    place
        .say(&["lifecycle", "show"])
        .await
        .exits(0)
        .says(&["no rule of kvgate's"]);
    rgw("stop", last);
    rgw("start", last);
}

/// No cron, and no harm when the leader goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_node_of_a_fleet_removes_and_another_takes_over() {
    let site = daemon::Site::new().await;
    let store = site.store().await;
    let (first, second) = (Prompt::new(20), Prompt::new(20));
    site.store_by_another(&first, &[]).await;
    let keys = KeyPrefix::new("");
    let inventory = Inventory::new(
        Arc::clone(&store),
        keys.clone(),
        Keyring::default(),
        Duration::from_secs(10),
    );
    let there = async || {
        let pages: Vec<_> = inventory.pages(None).collect().await;
        let chunks = pages.into_iter().flat_map(|page| page.unwrap().chunks);
        chunks.map(|chunk| (chunk.hash, chunk.bytes)).collect::<Vec<_>>()
    };
    let bounded = async || {
        for _ in 0..300 {
            let there = there().await;
            if there.iter().map(|(_, bytes)| bytes).sum::<u64>() <= 1 << 20 {
                return there.into_iter().map(|(hash, _)| hash).collect::<HashSet<_>>();
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        panic!("nobody removes what is beyond the limit");
    };
    let gc = [("gc.size", "1MiB"), ("gc.every", "1s"), ("gc.lease", "2s")];
    let leader = site.serve(&gc).await;
    let there_then = bounded().await;
    assert_eq!(prefix_of(&first, &there_then), 10, "1 MiB has room for ten");
    assert!(store.head(&keys.own("gc-lease"), soon()).await.is_ok());

    let gc_of = |node: &daemon::Serving| (node.node.gc().leads(), node.node.gc().removed());
    daemon::eventually(|| gc_of(&leader) == (true, 10)).await;

    let socket = site.home.path().join("other.sock").display().to_string();
    let other = site.serve(&[&gc[..], &[("api.socket", &socket)]].concat()).await;
    leader.end().await;
    site.store_by_another(&second, &[]).await;
    let there_now = bounded().await;
    assert_eq!(prefix_of(&second, &there_now), 10, "the newer prompt is left");
    assert_eq!(prefix_of(&first, &there_now), 0);
    daemon::eventually(|| gc_of(&other) == (true, 20)).await;
    other.end().await;
}

async fn nodes_remove_nothing_where_none_can_lead(backend: &Backend) {
    let place = Place::new(backend).await;
    let (socket, arena) = (place.home.path().join("s.sock"), place.home.path().join("arena"));
    let mut child = place
        .command(&["serve", "--socket", socket.to_str().unwrap()])
        .env("KVGATE__ARENA__PATH", arena)
        .env("KVGATE__ARENA__SIZE", "32MiB")
        .env("KVGATE__LOAD__RESERVE", "8MiB")
        .env("KVGATE__STORE__WRITE_BEHIND", "8MiB")
        .env("KVGATE__GC__SIZE", "1MiB")
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let told = async {
        while let Some(line) = lines.next_line().await.unwrap() {
            if line.contains("ignores conditional PUTs") {
                return line;
            }
        }
        panic!("it ended");
    };
    let line = tokio::time::timeout(Duration::from_secs(60), told)
        .await
        .expect("it says so");
    assert!(line.contains("kvgate gc"), "{line}");
    child.kill().await.unwrap();
}

/// A load ends at its first miss. The node that had seen the chunks took stores of those behind it as done.
async fn what_follows_a_removed_chunk_is_stored_again(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    for (order, after_miss) in [
        (Order::Chunk, AfterMiss::Stop),
        (Order::Layer, AfterMiss::Stop),
        (Order::Chunk, AfterMiss::Continue),
    ] {
        let one_get_at_a_time = GatewayOptions {
            get_bytes_max: 1,
            ..site.options()
        };
        let gateway = site.gateway_with(Arc::clone(&site.store), one_get_at_a_time);
        let prompt = Prompt::new(5);
        store_all(&gateway, &prompt).await;
        for i in [2, 3] {
            site.remove(site.key(&prompt, i)).await;
        }
        let mut load = gateway.load(LoadSpec {
            space: prompt.space.clone(),
            chunks: prompt.hashes.clone(),
            order,
            after_miss,
            deadline: soon(),
        });
        while load.next().await.is_some() {}
        for i in 2..5 {
            let outcome = store_chunk(&gateway, &prompt, i).await;
            let is_new = matches!(outcome, StoreOutcome::Stored);
            assert_eq!(is_new, i < 4, "{order:?}, {after_miss:?}, chunk {i}: {outcome:?}");
        }
        assert_eq!(
            load_codes(&site.gateway(), &prompt, AfterMiss::Stop).await,
            ["ok"; 5]
        );
    }
}
