//! Chunks of an old key that are written anew with the new one, so that the old one can be taken away; and the removal of
//! what a key wrote.

use std::fmt::Write;
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use kvgate::cache::gateway::AfterMiss;
use kvgate::format::{Header, KeyId, KeyPrefix, KeyState, Keyring, Protection};
use kvgate::inventory::{Inventory, RekeyError, RekeySpec, Rekeyed, Select};
use kvgate::protocol::{Order, Strategy};
use kvgate::s3::object::ObjectStore;
use serde_json::Value;
use tempfile::TempDir;
use tokio::process::Command;

use crate::faults::Hooked;
use crate::keys::{BAD, N, PROTECTIONS, acme_keys, forgeries, key, reader, ring, space_of};
use crate::support::backends::{Backend, on_backends};
use crate::support::daemon;
use crate::support::fixture::{Prompt, Site, load_codes, lookup, store_all, store_chunk};
use crate::support::program::{Said, kvgate};

on_backends! {
    the_new_key_alone_reads_all_of_it: embedded, rgw, minio;
    nothing_forged_is_signed_anew: embedded, rgw, minio;
    what_comes_meanwhile_stays: embedded, rgw, minio;
    chunks_of_a_key_that_is_not_here_are_left: embedded, rgw;
    a_killed_rekey_is_resumed: rgw, minio;
    no_chunk_is_put_at_risk_without_conditional_puts: rclone;
    gc_removes_what_a_key_wrote_and_all_that_follows: embedded, rgw, minio;
    verify_says_once_that_a_key_is_not_here: embedded;
}

const RATE: u64 = 1 << 30;

async fn rekey(
    site: &Site,
    store: &Arc<dyn ObjectStore>,
    keys: &[u8],
    rate: Option<u64>,
) -> Result<Rekeyed, RekeyError> {
    rekey_at(site.keys.clone(), store, keys, rate).await
}

async fn rekey_at(
    prefix: KeyPrefix,
    store: &Arc<dyn ObjectStore>,
    keys: &[u8],
    rate: Option<u64>,
) -> Result<Rekeyed, RekeyError> {
    let spec = RekeySpec {
        select: Select::default(),
        rate,
        buffers: 1 << 20,
    };
    let timeout = Duration::from_secs(60);
    let inventory = Inventory::new(Arc::clone(store), prefix, ring(keys), timeout);
    inventory.rekey(&spec, |_| ()).await
}

async fn the_new_key_alone_reads_all_of_it(backend: &Backend) {
    for protection in PROTECTIONS {
        let site = Site::new(backend.store().await).await;
        let prompt = Prompt::of(space_of("acme", protection), N);
        let plain = Prompt::of(space_of("acme", Protection::None), N);
        store_all(&reader(&site, &ring(&[1])), &plain).await;
        store_all(&reader(&site, &ring(&[1])), &prompt).await;
        store_chunk(
            &reader(&site, &ring(&[2, 1])),
            &Prompt::of(prompt.space.clone(), 1),
            0,
        )
        .await;
        // A node that knows the versions from before.
        let node = reader(&site, &ring(&[2, 1]));
        assert_eq!(lookup(&node, &prompt, Strategy::Exact).await.prefix, N);

        let found = rekey(&site, &site.store, &[2, 1], None).await.unwrap();
        assert_eq!(
            (found.of(KeyState::Old).chunks, found.of(KeyState::Newest).chunks),
            (3, 1)
        );
        assert_eq!(found.rewritten.chunks, 0);
        assert_eq!(
            load_codes(&reader(&site, &ring(&[2])), &prompt, AfterMiss::Continue).await,
            ["no_key"; N]
        );

        let done = rekey(&site, &site.store, &[2, 1], Some(RATE)).await.unwrap();
        assert_eq!((done.rewritten.chunks, done.failed.chunks), (3, 0), "{done:?}");
        assert_eq!(
            load_codes(&reader(&site, &ring(&[2])), &prompt, AfterMiss::Stop).await,
            ["ok"; N]
        );
        assert_eq!(
            load_codes(&reader(&site, &ring(&[1])), &prompt, AfterMiss::Continue).await,
            ["no_key"; N]
        );
        assert_eq!(load_codes(&node, &prompt, AfterMiss::Stop).await, ["ok"; N]);
        assert_eq!(
            load_codes(&reader(&site, &ring(&[2])), &plain, AfterMiss::Stop).await,
            ["ok"; N]
        );

        let again = rekey(&site, &site.store, &[2, 1], Some(RATE)).await.unwrap();
        assert_eq!(
            (again.of(KeyState::Newest).chunks, again.rewritten.chunks),
            (4, 0)
        );
    }
}

async fn nothing_forged_is_signed_anew(backend: &Backend) {
    for protection in PROTECTIONS {
        let site = Site::new(backend.store().await).await;
        let prompt = Prompt::of(space_of("acme", protection), N);
        store_all(&reader(&site, &ring(&[1])), &prompt).await;
        let at = site.key(&prompt, BAD);
        for (what, object, _) in forgeries(&site, &prompt, protection).await {
            site.overwrite(&at, object.clone()).await;
            let done = rekey(&site, &site.store, &[2, 1], Some(RATE)).await.unwrap();
            assert_eq!(site.read(&at).await, object, "{protection}: {what}");
            assert_eq!(done.failed.chunks, 0, "{what}: {done:?}");
            let left = done.refused.chunks + done.keyless.chunks + done.of(KeyState::Missing).chunks;
            assert_eq!(left, 1, "{what}: {done:?}");
            let codes = load_codes(&reader(&site, &ring(&[2])), &prompt, AfterMiss::Continue).await;
            assert_eq!((codes[0], codes[2]), ("ok", "ok"));
            assert_ne!(codes[BAD], "ok", "{what}");
        }
    }
}

/// Whoever wrote it, and even what was removed.
async fn what_comes_meanwhile_stays(backend: &Backend) {
    for protection in PROTECTIONS {
        let site = Site::new(backend.store().await).await;
        let prompt = Prompt::of(space_of("acme", protection), N);
        store_all(&reader(&site, &ring(&[1])), &prompt).await;
        let at = site.key(&prompt, BAD);
        let hooked = Hooked::over(Arc::clone(&site.store));
        *hooked.overtakes.lock().unwrap() = Some((at.clone(), "another writer's".into()));
        let hooked: Arc<dyn ObjectStore> = Arc::new(hooked);
        let done = rekey(&site, &hooked, &[2, 1], Some(RATE)).await.unwrap();
        assert_eq!((done.rewritten.chunks, done.changed.chunks), (2, 1), "{done:?}");
        assert_eq!(site.read(&at).await, b"another writer's");
    }
}

async fn chunks_of_a_key_that_is_not_here_are_left(backend: &Backend) {
    for protection in PROTECTIONS {
        let site = Site::new(backend.store().await).await;
        let prompt = Prompt::of(space_of("acme", protection), N);
        store_all(&reader(&site, &ring(&[3])), &prompt).await;
        let before = site.read(&site.key(&prompt, 0)).await;
        let done = rekey(&site, &site.store, &[2, 1], Some(RATE)).await.unwrap();
        assert_eq!((done.of(KeyState::Missing).chunks, done.rewritten.chunks), (3, 0));
        let named = done.keys.keys().next().unwrap();
        assert_eq!(*named, ("acme".to_owned(), KeyId::of(&key(3))));
        assert_eq!(site.read(&site.key(&prompt, 0)).await, before);
        let codes = load_codes(&reader(&site, &ring(&[3])), &prompt, AfterMiss::Stop).await;
        assert_eq!(codes, ["ok"; N]);
    }
}

async fn no_chunk_is_put_at_risk_without_conditional_puts(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::of(space_of("acme", Protection::Signed), N);
    store_all(&reader(&site, &ring(&[1])), &prompt).await;
    let found = rekey(&site, &site.store, &[2, 1], None).await.unwrap();
    assert_eq!(found.of(KeyState::Old).chunks, 3);
    let refused = rekey(&site, &site.store, &[2, 1], Some(RATE)).await;
    assert!(matches!(refused, Err(RekeyError::Unconditional)), "{refused:?}");
    let codes = load_codes(&reader(&site, &ring(&[1])), &prompt, AfterMiss::Stop).await;
    assert_eq!(codes, ["ok"; N]);
}

/// The program at a place of a test's own, with keys of tenant `acme`.
struct Place<'a> {
    backend: &'a Backend,
    site: Site,
    home: TempDir,
}

impl<'a> Place<'a> {
    async fn new(backend: &'a Backend, keys: &[u8]) -> Self {
        let place = Self {
            backend,
            site: Site::new(backend.store().await).await,
            home: TempDir::new().unwrap(),
        };
        let mut text = String::from("[[tenant]]\nname = \"acme\"\nkeys = [");
        for number in keys {
            let hex = format!("{number:02x}").repeat(32);
            write!(text, "\"command:echo {hex}\", ").unwrap();
        }
        std::fs::write(place.home.path().join("keys.toml"), text + "]\n").unwrap();
        place
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = kvgate(self.home.path(), args);
        command
            .current_dir(self.home.path())
            .envs(self.backend.credentials())
            .env("KVGATE__KEYS__FILE", self.home.path().join("keys.toml"))
            .env("KVGATE__S3__ENDPOINT", &self.backend.endpoints[0])
            .env("KVGATE__S3__BUCKET", "kvgate-it")
            .env(
                "KVGATE__S3__PREFIX",
                self.site.keys.as_str().trim_end_matches('/'),
            );
        command
    }

    async fn say(&self, args: &[&str]) -> Said {
        Said::new(self.command(args).output().await.unwrap())
    }

    async fn json(&self, args: &[&str]) -> Value {
        self.say(&[args, &["--json"]].concat()).await.exits(0).json()
    }
}

async fn a_killed_rekey_is_resumed(backend: &Backend) {
    const CHUNKS: usize = 40;
    for protection in PROTECTIONS {
        let place = Place::new(backend, &[2, 1]).await;
        let prompt = Prompt::of(space_of("acme", protection), CHUNKS);
        store_all(&reader(&place.site, &ring(&[1])), &prompt).await;
        let [old, new] = [1, 2].map(|number| KeyId::of(&key(number)).to_string());
        let found = place.json(&["rekey"]).await;
        assert_eq!(found["dry_run"], true);
        let row = serde_json::json!([{
            "tenant": "acme", "key_id": old, "state": "old", "objects": CHUNKS,
            "bytes": CHUNKS * prompt.space.layout().object_len(),
        }]);
        assert_eq!(found["keys"], row);
        place
            .say(&["rekey"])
            .await
            .exits(0)
            .says(&["acme", &old, "--yes"]);

        // It is killed once it has written some: each of them takes a tenth of a second.
        let rate = (10 * prompt.space.layout().object_len()).to_string();
        let slow = ["rekey", "--yes", "--rate", &rate];
        let mut child = place.command(&slow).stdout(Stdio::null()).spawn().unwrap();
        let of_new = async || {
            let found = rekey(&place.site, &place.site.store, &[2, 1], None)
                .await
                .unwrap();
            found.of(KeyState::Newest).chunks as usize
        };
        while of_new().await < 5 {
            assert!(child.try_wait().unwrap().is_none(), "it is not done yet");
        }
        child.kill().await.unwrap();
        let codes = load_codes(&reader(&place.site, &ring(&[2, 1])), &prompt, AfterMiss::Stop).await;
        assert_eq!(
            codes, ["ok"; CHUNKS],
            "each chunk is whole, of the old key or of the new one"
        );
        let done = of_new().await;
        assert!((5..CHUNKS).contains(&done), "it was killed in the middle: {done}");

        let json = place.json(&["rekey", "--yes"]).await;
        let rewritten = json["rewritten"]["objects"].as_u64().unwrap() as usize;
        // One may have arrived after it was killed.
        assert!((CHUNKS - done - 1..=CHUNKS - done).contains(&rewritten), "{json}");
        assert_eq!(
            (&json["refused"]["objects"], &json["failed"]["objects"]),
            (&0.into(), &0.into())
        );
        let codes = load_codes(&reader(&place.site, &ring(&[2])), &prompt, AfterMiss::Stop).await;
        assert_eq!(codes, ["ok"; CHUNKS], "without the old key");
        let found = place.json(&["rekey", "--yes"]).await;
        assert_eq!(found["keys"].as_array().unwrap().len(), 1, "{found}");
        assert_eq!(
            (&found["keys"][0]["key_id"], &found["keys"][0]["state"]),
            (&new.into(), &"newest".into())
        );
        assert_eq!(found["rewritten"]["objects"], 0);
    }
}

/// It was a line for each chunk.
async fn verify_says_once_that_a_key_is_not_here(backend: &Backend) {
    for protection in PROTECTIONS {
        let place = Place::new(backend, &[2]).await;
        let prompt = Prompt::of(space_of("acme", protection), 9);
        store_all(&reader(&place.site, &ring(&[1])), &prompt).await;
        let said = place.say(&["verify"]).await.exits(1);
        let said = said.says(&["9 chunks: ", "add that key to the tenant's `keys`", "unknown 9"]);
        assert_eq!(said.out.matches("no_key").count(), 1, "{said:?}");
        let json = place.say(&["verify", "--json"]).await.exits(1).json();
        assert_eq!(json["problems"].as_array().unwrap().len(), 9);
    }
}

async fn gc_removes_what_a_key_wrote_and_all_that_follows(backend: &Backend) {
    for protection in PROTECTIONS {
        // The node does not have the key any more.
        let place = Place::new(backend, &[2]).await;
        let site = &place.site;
        let prompt = Prompt::of(space_of("acme", protection), 5);
        let store = async |keys: &Keyring, chunks: std::ops::Range<usize>| {
            let node = reader(site, keys);
            for i in chunks {
                store_chunk(&node, &prompt, i).await;
            }
        };
        store(&ring(&[2]), 0..1).await;
        store(&ring(&[1]), 1..2).await;
        store(&ring(&[2]), 2..5).await;
        let other = Prompt::of(prompt.space.clone(), 2);
        store_all(&reader(site, &ring(&[2])), &other).await;
        tokio::time::sleep(Duration::from_millis(1100)).await;

        let id = KeyId::of(&key(1)).to_string();
        let gc = ["gc", "--key-id", &id];
        let json = place.json(&gc).await;
        assert_eq!(
            (&json["dry_run"], &json["planned"]["objects"]),
            (&true.into(), &4.into())
        );
        assert_eq!(json["of_key"]["objects"], 1);
        place
            .say(&gc)
            .await
            .exits(0)
            .says(&["would go", "of the key", "--yes"]);
        let refused = place.say(&["gc", "--key-id", &id, "--size", "1GiB"]).await;
        refused.exits(2);
        place
            .say(&["gc", "--key-id", "53a1"])
            .await
            .exits(2)
            .says(&["32 hex digits", "kvgate rekey"]);
        // One digit is wrong.
        let last = if id.ends_with('0') { "1" } else { "0" };
        let mistyped = format!("{}{last}", &id[..31]);
        for more in [&[][..], &["--yes"]] {
            let said = place.say(&[&["gc", "--key-id", &mistyped], more].concat()).await;
            let said = said.exits(0).says(&["no chunk names this key", "kvgate rekey"]);
            assert!(!said.out.contains("would go"), "{said:?}");
        }

        let json = place.json(&[&gc[..], &["--yes"]].concat()).await;
        assert_eq!(json["removed"]["objects"], 4, "{json}");
        let node = reader(site, &ring(&[2]));
        assert_eq!(
            load_codes(&node, &prompt, AfterMiss::Continue).await,
            ["ok", "absent", "absent", "absent", "absent"]
        );
        assert_eq!(load_codes(&node, &other, AfterMiss::Stop).await, ["ok"; 2]);
        // It is stored anew, with the key that writes.
        for i in 1..5 {
            store_chunk(&node, &prompt, i).await;
        }
        let header = Header::parse(&site.read(&site.key(&prompt, 1)).await).unwrap();
        assert_eq!(header.seal.unwrap().key_id, KeyId::of(&key(2)));
        assert_eq!(place.json(&gc).await["planned"]["objects"], 0);
    }
}

/// Its disk has them as the old key wrote them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_the_old_key_loads_past_its_disk() {
    for protection in PROTECTIONS {
        let place = daemon::Site::new().await;
        let folder = tempfile::tempdir().unwrap();
        let (old, new) = (
            acme_keys(folder.path(), "old.toml", &[1]),
            acme_keys(folder.path(), "new.toml", &[2]),
        );
        let disk = folder.path().join("disk");
        std::fs::create_dir(&disk).unwrap();
        let disk = disk.display().to_string();
        let of = |file| {
            [
                ("keys.file", file),
                ("disk.paths", disk.as_str()),
                ("disk.size", "64MiB"),
            ]
        };
        let prompt = Prompt::of(space_of("acme", protection), N);
        place.store_by_another(&prompt, &of(old.as_str())).await;
        let (store, prefix) = (place.store().await, KeyPrefix::new(""));
        let done = rekey_at(prefix, &store, &[2, 1], Some(RATE)).await.unwrap();
        assert_eq!(done.rewritten.chunks, 3);

        let serving = place.serve(&of(new.as_str())).await;
        serving.ready().await;
        serving.client.declare(&prompt.space).await.unwrap();
        assert_eq!(
            serving.node.status().tiers.disk.unwrap().disks[0].chunks,
            N as u64
        );
        let engine = serving.attach("one").await;
        assert_eq!(
            daemon::load(&engine, &prompt, "a", Order::Chunk).await,
            ["s3"; N],
            "{protection}"
        );
        drop(engine);
        serving.end().await;

        // They made way on the disk, too: S3 is not needed any more.
        let serving = place.serve(&of(new.as_str())).await;
        serving.ready().await;
        serving.client.declare(&prompt.space).await.unwrap();
        let engine = serving.attach("one").await;
        let again = daemon::load(&engine, &prompt, "a", Order::Chunk).await;
        assert_eq!(again, ["disk"; N], "{protection}");
        drop(engine);
        serving.end().await;
    }
}
