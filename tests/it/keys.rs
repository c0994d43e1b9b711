//! Spaces that keys protect: nobody without the tenant's key can make a reader load anything, whatever he writes to the
//! bucket. The forger here has the bucket's credentials and knows the whole format.

use std::sync::Arc;

use kvgate::cache::gateway::{AfterMiss, Gateway, RefreshOptions, StoreOutcome};
use kvgate::format::{DigestKind, Header, Keyring, PlaneDigest, Protection, Space, TenantKeys, TenantSecret};
use kvgate::protocol::{CommitOutcome, LookupRequest, Order, Strategy};

use crate::support::backends::{Backend, on_backends};
use crate::support::daemon;
use crate::support::fixture::{ABSENT_TTL, Prompt, Site, load_codes, lookup, soon, store_all, store_chunk};

on_backends! {
    forged_objects_are_misses: embedded, rgw, minio;
    forged_objects_heal: embedded, rgw;
    keys_rotate: embedded, rgw;
    a_missing_key_harms_nothing: embedded, rgw;
    chunks_of_an_old_key_are_left_to_the_rule: embedded, rgw;
    two_tenants_have_nothing_in_common: embedded;
    a_space_without_its_key_is_not_stored: embedded;
}

pub const N: usize = 3;
pub const BAD: usize = 1;
pub const PROTECTIONS: [Protection; 2] = [Protection::Signed, Protection::Encrypted];

pub fn space_of(tenant: &str, protection: Protection) -> Space {
    Space::from_json(&format!(
        r#"{{"model": "test/tiny", "revision": "1", "dtype": "float16", "chunk_tokens": 16, "tenant": "{tenant}",
            "protection": "{protection}", "mha": {{"layers": 6, "heads": 4, "head_dim": 64}}}}"#
    ))
    .unwrap()
}

pub fn key(number: u8) -> TenantSecret {
    TenantSecret::new([number; 32])
}

/// The keys of tenant `acme`; the first writes.
pub fn ring(keys: &[u8]) -> Keyring {
    let of = |keys: &[u8]| TenantKeys {
        keys: keys.iter().map(|&number| key(number)).collect(),
        ..TenantKeys::default()
    };
    Keyring::new([("acme".to_owned(), of(keys)), ("other".to_owned(), of(&[99]))].into())
}

pub fn reader(site: &Site, keyring: &Keyring) -> Gateway {
    let mut options = site.options();
    options.keyring = keyring.clone();
    site.gateway_with(Arc::clone(&site.store), options)
}

/// An object of a chunk, made by anybody: its header's digest is right.
fn made(
    space: &Space,
    prompt: &Prompt,
    keyring: &Keyring,
    payload: &[u8],
    change: impl Fn(&mut Header),
) -> Vec<u8> {
    let layout = space.layout();
    let mut object = vec![0; layout.object_len()];
    object[layout.header_len()..].copy_from_slice(payload);
    let cipher = keyring.encrypts(space, &prompt.hashes[BAD], None).unwrap();
    let digest = keyring.writes(space, DigestKind::Crc64Nvme).unwrap();
    let digests = (0..layout.planes()).map(|plane| match &cipher {
        Some(cipher) => cipher.seal(plane, &mut object[layout.plane(plane)]),
        None => digest.of(&object[layout.plane(plane)]),
    });
    let header = Header {
        space_id: space.id(),
        chunk: prompt.hashes[BAD],
        parent: prompt.parent(BAD),
        tokens: space.chunk_tokens(),
        payload_len: payload.len() as u64,
        kind: space.kind(),
        is_draft: false,
        digests: digests.collect(),
        digest_kind: cipher.as_ref().map_or(digest.kind(), |_| DigestKind::Aes256Gcm),
        seal: None,
    };
    let mut header = match &cipher {
        Some(cipher) => cipher.sealed(header),
        None => digest.seal(header),
    };
    change(&mut header);
    header.write(&mut object);
    object
}

/// The header of an object, changed by someone who can compute all that takes no key.
fn rewritten(object: &mut [u8], change: impl FnOnce(&mut Header)) {
    let mut header = Header::parse(object).unwrap();
    change(&mut header);
    header.write(object);
}

/// All that someone can put in a chunk's place who has the bucket but not the key; with what it counts as.
pub async fn forgeries(
    site: &Site,
    prompt: &Prompt,
    protection: Protection,
) -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let space = &prompt.space;
    let layout = space.layout();
    let good = site.read(&site.key(prompt, BAD)).await;
    let payload = prompt.payload(BAD);
    let forged: Vec<u8> = payload.iter().map(|byte| !byte).collect();
    let plain = |kind: PlaneDigest, bytes: &[u8]| {
        let mut object = good.clone();
        object[layout.header_len()..].copy_from_slice(bytes);
        let digests = (0..layout.planes())
            .map(|plane| kind.of(&object[layout.plane(plane)]))
            .collect();
        rewritten(&mut object, |header| {
            (header.digest_kind, header.digests, header.seal) = (kind.kind(), digests, None);
        });
        object
    };
    // Two planes of the object itself change places, and their digests with them.
    let mut swapped = good.clone();
    let (one, two) = (layout.plane(0), layout.plane(1));
    swapped.copy_within(two.clone(), one.start);
    swapped[two].copy_from_slice(&good[one]);
    let mut both = swapped.clone();
    rewritten(&mut both, |header| header.digests.swap(0, 1));
    // A byte changes, and its digest is made as if there were no key.
    let mut keyless = good.clone();
    keyless[layout.header_len()] ^= 1;
    let digest = *blake3::hash(&keyless[layout.plane(0)]).as_bytes();
    rewritten(&mut keyless, |header| {
        let width = header.digest_kind.width();
        header.digests[0][..width].copy_from_slice(&digest[..width]);
    });
    let mut one_bit = good.clone();
    *one_bit.last_mut().unwrap() ^= 1;
    let mut parent = good.clone();
    rewritten(&mut parent, |header| header.parent = header.chunk);
    let mut unsealed = good.clone();
    rewritten(&mut unsealed, |header| {
        header.seal.as_mut().unwrap().tag = blake3::Hash::from_bytes([0; 32]);
    });
    // A plane of another object of the same chunk: encrypted anew, it differs.
    let older = made(space, prompt, &ring(&[1]), &payload, |_| ());
    let mut mixed = good.clone();
    mixed[layout.plane(2)].copy_from_slice(&older[layout.plane(2)]);
    if protection == Protection::Signed {
        mixed[layout.plane(2).start] ^= 1;
    }
    let mut salted = good.clone();
    rewritten(&mut salted, |header| {
        if protection == Protection::Encrypted {
            header.seal.as_mut().unwrap().salt[0] ^= 1;
        } else {
            header.seal.as_mut().unwrap().tag = blake3::hash(b"");
        }
    });
    let mut unknown = good.clone();
    rewritten(&mut unknown, |header| {
        header.seal.as_mut().unwrap().key_id.0 = [7; 16];
    });
    // The same tenant's, of another chunk; of the space without protection; of another tenant, who has a key.
    let chunk_0 = site.read(&site.key(prompt, 0)).await;
    let mut renamed = chunk_0.clone();
    rewritten(&mut renamed, |header| {
        (header.chunk, header.parent) = (prompt.hashes[BAD], prompt.hashes[0]);
    });
    let open = space_of("acme", Protection::None);
    let other = space_of("other", protection);
    let of_other = made(&other, prompt, &ring(&[1]), &forged, |_| ());
    let moved = made(&other, prompt, &ring(&[1]), &forged, |header| {
        header.space_id = space.id();
    });
    let wrong_key = made(space, prompt, &ring(&[66]), &forged, |_| ());
    let claims_key = made(space, prompt, &ring(&[66]), &forged, |header| {
        header.seal.as_mut().unwrap().key_id = Header::parse(&good).unwrap().seal.unwrap().key_id;
    });
    let of_open = made(&open, prompt, &ring(&[1]), &forged, |_| ());
    vec![
        (
            "without a seal, CRC64",
            plain(PlaneDigest::Crc64Nvme, &forged),
            "forged",
        ),
        (
            "without a seal, the same bytes",
            plain(PlaneDigest::Crc64Nvme, &payload),
            "forged",
        ),
        (
            "without a seal, BLAKE3",
            plain(PlaneDigest::Blake3, &forged),
            "forged",
        ),
        ("planes change places", swapped, "bad_digest"),
        ("planes and their digests change places", both, "forged"),
        ("a byte changes, a digest without the key", keyless, "forged"),
        ("a bit changes", one_bit, "bad_digest"),
        ("another parent", parent, "forged"),
        ("no tag", unsealed, "forged"),
        ("a plane of an older object", mixed, "bad_digest"),
        ("another salt", salted, "forged"),
        ("another key's name", unknown, "no_key"),
        ("another chunk's object", chunk_0, "foreign_chunk"),
        ("another chunk's object, renamed", renamed, "forged"),
        ("another tenant's object", of_other, "foreign_space"),
        ("another tenant's object, renamed", moved, "no_key"),
        ("a key that is not the tenant's", wrong_key, "no_key"),
        ("a key that says it is the tenant's", claims_key, "forged"),
        ("of the space without protection", of_open, "foreign_space"),
        ("truncated", good[..good.len() - 1].to_vec(), "wrong_length"),
        ("longer", [&good[..], &[0]].concat(), "wrong_length"),
    ]
}

async fn forged_objects_are_misses(backend: &Backend) {
    for protection in PROTECTIONS {
        let site = Site::new(backend.store().await).await;
        let prompt = Prompt::of(space_of("acme", protection), N);
        store_all(&reader(&site, &ring(&[1])), &prompt).await;
        assert_eq!(
            load_codes(&reader(&site, &ring(&[1])), &prompt, AfterMiss::Continue).await,
            ["ok"; N]
        );
        let at = site.key(&prompt, BAD);
        let good = site.read(&at).await;
        for (what, object, code) in forgeries(&site, &prompt, protection).await {
            site.overwrite(&at, object).await;
            let codes = load_codes(&reader(&site, &ring(&[1])), &prompt, AfterMiss::Continue).await;
            assert_eq!(codes, ["ok", code, "ok"], "{protection}: {what}");
        }
        site.overwrite(&at, good).await;
        assert_eq!(
            load_codes(&reader(&site, &ring(&[1])), &prompt, AfterMiss::Continue).await,
            ["ok"; N]
        );
    }
}

/// What is known to be forged is replaced by the next store; what may be another key's is left as it is.
async fn forged_objects_heal(backend: &Backend) {
    for protection in PROTECTIONS {
        let site = Site::new(backend.store().await).await;
        let prompt = Prompt::of(space_of("acme", protection), N);
        store_all(&reader(&site, &ring(&[1])), &prompt).await;
        let at = site.key(&prompt, BAD);
        for (what, object, code) in forgeries(&site, &prompt, protection).await {
            site.overwrite(&at, object.clone()).await;
            let gateway = reader(&site, &ring(&[1]));
            assert_eq!(
                load_codes(&gateway, &prompt, AfterMiss::Continue).await[BAD],
                code,
                "{what}"
            );
            tokio::time::sleep(ABSENT_TTL).await;
            let outcome = store_chunk(&gateway, &prompt, BAD).await;
            if code == "no_key" {
                assert!(matches!(outcome, StoreOutcome::Present), "{what}: {outcome:?}");
                assert_eq!(site.read(&at).await, object, "{what}: left as it is");
            } else {
                assert!(matches!(outcome, StoreOutcome::Stored), "{what}: {outcome:?}");
                let codes = load_codes(&reader(&site, &ring(&[1])), &prompt, AfterMiss::Stop).await;
                assert_eq!(codes, ["ok"; N], "{what}");
            }
        }
    }
}

/// Chunk 0 with the old key, the others with the new one; without a restart between.
async fn written_by_two_keys(site: &Site, protection: Protection) -> Prompt {
    let prompt = Prompt::of(space_of("acme", protection), N);
    let writer = reader(site, &ring(&[1]));
    store_chunk(&writer, &prompt, 0).await;
    writer.keyring().replace(&ring(&[2, 1]));
    for chunk in 1..N {
        store_chunk(&writer, &prompt, chunk).await;
    }
    prompt
}

async fn keys_rotate(backend: &Backend) {
    for protection in PROTECTIONS {
        let site = Site::new(backend.store().await).await;
        let prompt = written_by_two_keys(&site, protection).await;
        let id = async |i: usize| {
            let header = Header::parse(&site.read(&site.key(&prompt, i)).await).unwrap();
            header.seal.unwrap().key_id
        };
        assert_ne!(id(0).await, id(1).await, "the new key writes");
        assert_eq!(id(1).await, id(2).await);
        for (keys, codes) in [
            (&[2, 1][..], ["ok", "ok", "ok"]),
            (&[1, 2], ["ok", "ok", "ok"]),
            // The old key is taken away: what it wrote, and could write today, is read no more.
            (&[2], ["no_key", "ok", "ok"]),
            (&[1], ["ok", "no_key", "no_key"]),
        ] {
            let gateway = reader(&site, &ring(keys));
            assert_eq!(
                load_codes(&gateway, &prompt, AfterMiss::Continue).await,
                codes,
                "{keys:?}"
            );
        }
    }
}

/// A wrong key in a configuration must not make good objects look damaged.
async fn a_missing_key_harms_nothing(backend: &Backend) {
    for protection in PROTECTIONS {
        let site = Site::new(backend.store().await).await;
        let prompt = Prompt::of(space_of("acme", protection), N);
        store_all(&reader(&site, &ring(&[1])), &prompt).await;
        let before = site.read(&site.key(&prompt, BAD)).await;
        let misled = reader(&site, &ring(&[2]));
        assert_eq!(
            load_codes(&misled, &prompt, AfterMiss::Continue).await,
            ["no_key"; N]
        );
        tokio::time::sleep(ABSENT_TTL).await;
        assert_eq!(
            load_codes(&misled, &prompt, AfterMiss::Continue).await,
            ["no_key"; N],
            "the reason stays"
        );
        // No engine is promised what it can't load, and no store replaces it.
        for _asked_once_and_again in 0..2 {
            assert_eq!(lookup(&misled, &prompt, Strategy::Exact).await.mask.prefix(), 0);
            for i in 0..N {
                let outcome = store_chunk(&misled, &prompt, i).await;
                assert!(matches!(outcome, StoreOutcome::Present), "{outcome:?}");
            }
            tokio::time::sleep(ABSENT_TTL).await;
        }
        assert_eq!(site.read(&site.key(&prompt, BAD)).await, before);
        let codes = load_codes(&reader(&site, &ring(&[1])), &prompt, AfterMiss::Stop).await;
        assert_eq!(codes, ["ok"; N]);
        // The key is back, or another object took its place.
        let (first, rest) = (site.key(&prompt, 0), site.key(&prompt, 1));
        misled.replace_keys(&ring(&[2, 1]));
        assert_eq!(lookup(&misled, &prompt, Strategy::Exact).await.prefix, N);
        assert_eq!(load_codes(&misled, &prompt, AfterMiss::Stop).await, ["ok"; N]);
        let away = reader(&site, &ring(&[2]));
        assert_eq!(
            load_codes(&away, &prompt, AfterMiss::Continue).await,
            ["no_key"; N]
        );
        site.remove(first).await;
        site.remove(rest).await;
        tokio::time::sleep(ABSENT_TTL).await;
        for (i, wanted) in [(0, "stored"), (1, "stored"), (2, "present")] {
            let outcome = store_chunk(&away, &prompt, i).await;
            assert_eq!(outcome.about().1, wanted, "{outcome:?}");
        }
        assert_eq!(lookup(&away, &prompt, Strategy::Exact).await.prefix, 2);
        assert_eq!(
            load_codes(&away, &prompt, AfterMiss::Continue).await,
            ["ok", "ok", "no_key"]
        );
    }
}

/// Or a rotation would never end.
async fn chunks_of_an_old_key_are_left_to_the_rule(backend: &Backend) {
    for protection in PROTECTIONS {
        let site = Site::new(backend.store().await).await;
        let prompt = written_by_two_keys(&site, protection).await;
        let modified = async || {
            let mut times = Vec::new();
            for i in 0..N {
                let head = site.store.head(&site.key(&prompt, i), soon()).await;
                times.push(head.unwrap().version.modified);
            }
            times
        };
        let before = modified().await;
        tokio::time::sleep(std::time::Duration::from_millis(2100)).await;
        let node = reader(&site, &ring(&[2, 1]));
        let refresh = tokio::spawn({
            let node = node.clone();
            let options = RefreshOptions {
                after: std::time::Duration::from_secs(2),
                rate: 1000,
                queue: 1000,
                known: 1000,
            };
            async move { node.refresh_used(options).await }
        });
        // Two chunks, and space.json.
        while node.refresh_stats().refreshed < 3 {
            assert_eq!(lookup(&node, &prompt, Strategy::Exact).await.prefix, N);
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        refresh.abort();
        let after = modified().await;
        assert_eq!(after[0], before[0], "{protection}: of the old key");
        assert!(after[1] > before[1] && after[2] > before[2], "{protection}");
    }
}

async fn two_tenants_have_nothing_in_common(_: &Backend) {
    for protection in PROTECTIONS {
        let [acme, other] = ["acme", "other"].map(|tenant| space_of(tenant, protection));
        assert_ne!(acme.id(), other.id());
        assert_ne!(acme.key(), other.key());
        assert_ne!(acme.id(), space_of("acme", Protection::None).id());
        let chain = |space: &Space, secret: u8| {
            let hasher = kvgate::format::ChunkHasher::new(space, Some(&key(secret))).unwrap();
            let root = hasher.root(b"", b"").unwrap();
            hasher.chain(&root, &[1; 48], &[]).unwrap()
        };
        let [one, two, guessed] = [chain(&acme, 1), chain(&other, 99), chain(&acme, 99)];
        assert!(
            one.iter()
                .all(|hash| !two.contains(hash) && !guessed.contains(hash))
        );
    }
}

async fn a_space_without_its_key_is_not_stored(backend: &Backend) {
    for protection in PROTECTIONS {
        let site = Site::new(backend.store().await).await;
        let prompt = Prompt::of(space_of("nobody", protection), 1);
        let outcome = store_chunk(&reader(&site, &ring(&[1])), &prompt, 0).await;
        let StoreOutcome::Failed(error) = outcome else {
            panic!("{outcome:?}")
        };
        assert!(
            error.to_string().contains("there is no key of tenant \"nobody\""),
            "{error}"
        );
        assert!(site.store.head(&site.key(&prompt, 0), soon()).await.is_err());
    }
}

/// The keys of tenant `acme` in files, as an operator has them, for a daemon with this protection.
pub fn key_files(folder: &std::path::Path, protection: &str) -> String {
    use std::os::unix::fs::PermissionsExt;
    let [secret, key] = [("secret", 5_u8), ("key", 6)].map(|(name, number)| {
        let path = folder.join(name);
        std::fs::write(&path, format!("{number:02x}").repeat(32)).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o400)).unwrap();
        path.display().to_string()
    });
    let file = folder.join("keys.toml");
    let text = format!(
        "[[tenant]]\nname = \"acme\"\nprotection = \"{protection}\"\nsecret = \"file:{secret}\"\nkeys = [\"file:{key}\"]\n"
    );
    std::fs::write(&file, text).unwrap();
    file.display().to_string()
}

/// A file of keys for tenant `acme`; the first writes.
pub fn acme_keys(folder: &std::path::Path, name: &str, numbers: &[u8]) -> String {
    let keys = numbers
        .iter()
        .map(|number| format!("\"command:echo {}\"", format!("{number:02x}").repeat(32)));
    let keys: Vec<String> = keys.collect();
    let path = folder.join(name);
    let text = format!("[[tenant]]\nname = \"acme\"\nkeys = [{}]\n", keys.join(", "));
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_daemon_serves_a_tenant_with_keys() {
    for protection in PROTECTIONS {
        let folder = tempfile::tempdir().unwrap();
        let file = key_files(folder.path(), &protection.to_string());
        let place = daemon::Site::new().await;
        let space = space_of("acme", protection);
        // As an engine with the tenant's secret names them.
        let hasher = kvgate::format::ChunkHasher::new(&space, Some(&key(5))).unwrap();
        let root = hasher.root(b"salt", b"").unwrap();
        let tokens: Vec<u32> = (0..96).collect();
        let hashes = hasher.chain(&root, &tokens, &[]).unwrap();
        let prompt = Prompt {
            space: space.clone(),
            root,
            hashes,
        };
        let settings = [("keys.file", file.as_str())];
        place.store_by_another(&prompt, &settings).await;

        let serving = place.serve(&settings).await;
        serving.ready().await;
        serving.client.declare(&space).await.unwrap();
        let request = LookupRequest {
            space: space.id().to_string(),
            tokens: Some(tokens.clone()),
            salt: Some("salt".to_owned()),
            ..LookupRequest::default()
        };
        let found = serving.client.lookup(&request).await.unwrap();
        assert_eq!(
            found.prefix,
            prompt.hashes.len(),
            "tokens are hashed with the tenant's secret"
        );
        let engine = serving.attach("one").await;
        for order in [Order::Layer, Order::Chunk] {
            let loaded = daemon::load(&engine, &prompt, &format!("{order:?}"), order).await;
            assert_eq!(loaded.len(), prompt.hashes.len(), "{loaded:?}");
            assert!(
                loaded
                    .iter()
                    .all(|from| ["s3", "memory"].contains(&from.as_str())),
                "{loaded:?}"
            );
        }
        for (space, code) in [
            (space_of("acme", Protection::None), "wrong_protection"),
            (space_of("nobody", protection), "no_key"),
        ] {
            let refused = serving.client.declare(&space).await.unwrap_err();
            assert!(refused.to_string().contains(code), "{refused}");
        }
        drop(engine);
        serving.end().await;
        // Nothing that this node says has a key.
        let config = format!("{:?}", place.config(&settings));
        assert!(!config.contains(&"05".repeat(8)) && !config.contains(&"06".repeat(8)));
    }
}

/// No chunk is taken that could not be signed, and nothing is lost without a word.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_space_whose_key_a_reload_takes_away_is_refused() {
    for protection in PROTECTIONS {
        let folder = tempfile::tempdir().unwrap();
        let file = key_files(folder.path(), &protection.to_string());
        let place = daemon::Site::new().await;
        let serving = place.serve(&[("keys.file", file.as_str())]).await;
        serving.ready().await;
        let more = Prompt::of(space_of("acme", protection), N + 1);
        let prompt = Prompt {
            space: more.space.clone(),
            root: more.root,
            hashes: more.hashes[..N].to_vec(),
        };
        let id = daemon::id(&prompt.space);
        let engine = serving.attach("one").await;
        assert_eq!(
            daemon::store(&serving.client, &engine, &prompt).await,
            ["stored"; N]
        );
        serving.flush().await;
        let last = daemon::chunks(&more).split_off(N);
        let reserved = engine.reserve(&id, last.clone()).await.unwrap();
        let name = daemon::write(&engine, &more, N, &reserved.own, &reserved.chunks[0]);

        let ring = serving.node.gateway().keyring().clone();
        let (before, none) = (Keyring::default(), Keyring::default());
        before.replace(&ring);
        ring.replace(&none);
        let committed = engine.commit(vec![name]).await.unwrap();
        assert!(
            matches!(&committed.slots[0], CommitOutcome::Refused { code, .. } if code == "no_key"),
            "{committed:?}"
        );
        let refused = engine.reserve(&id, last.clone()).await.unwrap_err().to_string();
        assert!(refused.contains("no_key"), "{refused}");
        let lookup = LookupRequest {
            space: id.clone(),
            hashes: Some(more.hashes.clone()),
            ..LookupRequest::default()
        };
        let refused = serving.client.lookup(&lookup).await.unwrap_err().to_string();
        assert!(refused.contains("no_key"), "{refused}");

        ring.replace(&before);
        let there = serving.client.lookup(&lookup).await.unwrap();
        assert_eq!(there.prefix, N, "the chunk that could not be signed is no hit");
        let stored = daemon::store(&serving.client, &engine, &more).await;
        assert_eq!(stored[N], "stored");
        serving.flush().await;
        assert_eq!(serving.client.flush(None).await.unwrap().dropped, 0);
        drop(engine);
        serving.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_that_demands_a_protection_ends_plain_stores() {
    let place = daemon::Site::new().await;
    let serving = place.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::of(space_of("acme", Protection::None), N);
    let (id, engine) = (daemon::id(&prompt.space), serving.attach("one").await);
    daemon::store(&serving.client, &engine, &prompt).await;
    serving.flush().await;
    let demands = TenantKeys {
        protection: Some(Protection::Encrypted),
        keys: vec![key(1)],
        ..TenantKeys::default()
    };
    let demands = Keyring::new([("acme".to_owned(), demands)].into());
    serving.node.gateway().keyring().replace(&demands);
    let more = daemon::chunks(&Prompt::of(prompt.space.clone(), N + 1));
    let refused = engine.reserve(&id, more).await.unwrap_err().to_string();
    assert!(refused.contains("wrong_protection"), "{refused}");
    let chunk = format!("/v1/chunks/{id}/{}", prompt.hashes[0]);
    let refused = serving.client.get(&chunk).await.unwrap_err().to_string();
    assert!(refused.contains("wrong_protection"), "{refused}");
    // The plain chunks can still be removed.
    serving.client.delete(&chunk).await.unwrap();
    drop(engine);
    serving.end().await;
}

/// Neither the bucket nor a disk has a word of it, and both give it back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn encrypted_chunks_are_plain_in_memory_only() {
    for (protection, is_seen) in [(Protection::Signed, true), (Protection::Encrypted, false)] {
        let folder = tempfile::tempdir().unwrap();
        let file = key_files(folder.path(), &protection.to_string());
        let disk = folder.path().join("disk");
        std::fs::create_dir(&disk).unwrap();
        let settings = [
            ("keys.file", file.as_str()),
            ("disk.paths", disk.to_str().unwrap()),
            ("disk.size", "64MiB"),
        ];
        let place = daemon::Site::new().await;
        let prompt = Prompt::of(space_of("acme", protection), 6);
        place.store_by_another(&prompt, &settings).await;

        let needles: Vec<Vec<u8>> = (0..6).map(|i| prompt.payload(i)[5000..5032].to_vec()).collect();
        let seen = |bytes: &[u8]| {
            let windows = bytes.windows(32).collect::<std::collections::HashSet<_>>();
            needles
                .iter()
                .filter(|needle| windows.contains(needle.as_slice()))
                .count()
        };
        let store = place.store().await;
        let keys = kvgate::format::KeyPrefix::new("");
        for i in 0..6 {
            let key = keys.chunk(prompt.space.key(), &prompt.hashes[i]);
            let object = store.read(&key, 1 << 24, soon()).await.unwrap();
            assert_eq!(seen(&object) == 1, is_seen, "{protection}: in the bucket");
        }
        let mut on_disk = 0;
        let mut folders = vec![disk.clone()];
        while let Some(folder) = folders.pop() {
            for entry in std::fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                match path.is_dir() {
                    true => folders.push(path),
                    false => on_disk += seen(&std::fs::read(path).unwrap()),
                }
            }
        }
        assert_eq!(on_disk, if is_seen { 6 } else { 0 }, "{protection}: on the disk");

        // From the disk, then from S3 onto another disk.
        for (from, order) in [("disk", Order::Chunk), ("s3", Order::Layer)] {
            let serving = place.serve(&settings).await;
            serving.ready().await;
            serving.client.declare(&prompt.space).await.unwrap();
            let engine = serving.attach("one").await;
            assert_eq!(
                daemon::load(&engine, &prompt, "a", order).await,
                vec![from; 6],
                "{protection}"
            );
            assert_eq!(
                daemon::load(&engine, &prompt, "b", Order::Chunk).await,
                vec!["memory"; 6]
            );
            drop(engine);
            serving.end().await;
            // A file may still be on its way there.
            std::fs::rename(&disk, folder.path().join(format!("old-{from}"))).unwrap();
            std::fs::create_dir(&disk).unwrap();
        }
    }
}

/// Neither memory nor the disk keeps what a key wrote that was taken away, as if another had written it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_key_wrote_that_is_taken_away_is_a_miss_on_every_tier() {
    for protection in PROTECTIONS {
        let place = daemon::Site::new().await;
        let folder = tempfile::tempdir().unwrap();
        let [old, both, new] = [("1.toml", &[1_u8][..]), ("2.toml", &[2, 1]), ("3.toml", &[2])]
            .map(|(name, numbers)| acme_keys(folder.path(), name, numbers));
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
        place
            .store_by_another(&prompt, &[("keys.file", old.as_str())])
            .await;

        let serving = place.serve(&of(both.as_str())).await;
        serving.ready().await;
        serving.client.declare(&prompt.space).await.unwrap();
        let engine = serving.attach("one").await;
        let load = async |name: &str| daemon::load(&engine, &prompt, name, Order::Chunk).await;
        assert_eq!(load("a").await, ["s3"; N]);
        assert_eq!(load("b").await, ["memory"; N]);
        let on_disk = || serving.node.status().tiers.disk.unwrap().disks[0].chunks;
        daemon::eventually(|| on_disk() == N as u64).await;
        let only_new = TenantSecret::from_hex(&format!("{:064}", 2)).unwrap();
        let only_new = TenantKeys {
            keys: vec![only_new],
            ..TenantKeys::default()
        };
        let only_new = Keyring::new([("acme".to_owned(), only_new)].into());
        serving.node.gateway().replace_keys(&only_new);
        assert_eq!(load("c").await, ["no_key"; N], "{protection}: after the reload");
        drop(engine);
        serving.end().await;

        let serving = place.serve(&of(new.as_str())).await;
        serving.ready().await;
        serving.client.declare(&prompt.space).await.unwrap();
        let engine = serving.attach("one").await;
        let lookup = LookupRequest {
            space: daemon::id(&prompt.space),
            hashes: Some(prompt.hashes.clone()),
            ..LookupRequest::default()
        };
        let found = async || serving.client.lookup(&lookup).await.unwrap().prefix;
        assert_eq!(found().await, N, "{protection}: nobody has read the disk yet");
        let loaded = daemon::load(&engine, &prompt, "a", Order::Chunk).await;
        assert_eq!(loaded, ["no_key"; N], "{protection}: after a restart");
        assert_eq!(found().await, 0, "{protection}: no engine is promised it again");
        // What an engine computes instead is kept here, though S3's object is left as it is.
        let stored = daemon::store(&serving.client, &engine, &prompt).await;
        assert_eq!(stored, ["stored"; N]);
        serving.flush().await;
        assert_eq!(found().await, N);
        drop(engine);
        serving.end().await;

        let serving = place.serve(&of(new.as_str())).await;
        serving.ready().await;
        serving.client.declare(&prompt.space).await.unwrap();
        let engine = serving.attach("one").await;
        let loaded = daemon::load(&engine, &prompt, "a", Order::Chunk).await;
        assert_eq!(loaded, ["disk"; N], "{protection}: as the new key wrote it");
        drop(engine);
        serving.end().await;
    }
}

/// Those that S3 is asked for first fail before they are sent. They kept their buffers and waited for turns; others had turns
/// and waited for buffers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_an_outage_encrypted_chunks_don_t_wait_for_each_other() {
    const IN_FLIGHT: usize = 1 << 20;
    let mut place = daemon::Site::new().await;
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    let key = "keys = [\"command:printf %064d 5\"]";
    std::fs::write(&file, format!("[[tenant]]\nname = \"acme\"\n{key}\n")).unwrap();
    let file = file.display().to_string();
    let serving = place
        .serve(&[
            ("keys.file", file.as_str()),
            ("store.in_flight", "1MiB"),
            ("store.retry_max", "50ms"),
        ])
        .await;
    serving.ready().await;
    let space = space_of("acme", Protection::Encrypted);
    let chunks = 3 * IN_FLIGHT / space.layout().object_len();
    let prompt = Prompt::of(space, chunks);
    let engine = serving.attach("one").await;
    serving.client.declare(&prompt.space).await.unwrap();
    place.stop_s3().await;
    let look = serving
        .client
        .lookup_space(&prompt.space, &prompt.hashes, "deadline_ms=500");
    assert_eq!(look.await.unwrap().unknown.count(), chunks);
    assert!(
        daemon::store(&serving.client, &engine, &prompt)
            .await
            .iter()
            .all(|word| *word == "stored")
    );
    let behind = || serving.node.status().tiers.write_behind;
    // All are tried several times.
    daemon::eventually(|| behind().failed_attempts > 4 * chunks as u64).await;
    place.start_s3().await;
    serving.flush().await;
    assert_eq!((behind().stored, behind().dropped), (chunks as u64, 0));
    drop(engine);
    serving.end().await;
}

/// Chunks that S3 never got, of a tenant whose key is gone: those of another tenant are sent nevertheless.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_key_keeps_back_no_other_tenants_chunks() {
    for protection in PROTECTIONS {
        let mut place = daemon::Site::new().await;
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, acme: &str| {
            let tenant = |name, key: &str| {
                format!("[[tenant]]\nname = \"{name}\"\nkeys = [\"command:printf %064d {key}\"]\n")
            };
            let path = folder.path().join(name);
            std::fs::write(&path, tenant("acme", acme) + &tenant("other", "7")).unwrap();
            path.display().to_string()
        };
        let (file, wrong) = (file("keys.toml", "5"), file("wrong.toml", "6"));
        let disk = folder.path().join("disk");
        std::fs::create_dir(&disk).unwrap();
        let disk = disk.display().to_string();
        let of = |file| {
            [
                ("keys.file", file),
                ("disk.paths", disk.as_str()),
                ("disk.size", "64MiB"),
                ("api.degraded", "true"),
                ("store.drain", "1s"),
            ]
        };
        let [acme, other] = ["acme", "other"].map(|tenant| Prompt::of(space_of(tenant, protection), 3));
        let store = place.store().await;
        place.stop_s3().await;
        let serving = place.serve_over(Arc::clone(&store), &of(file.as_str())).await;
        let engine = serving.attach("one").await;
        for prompt in [&acme, &other] {
            assert_eq!(
                daemon::store(&serving.client, &engine, prompt).await,
                ["stored"; 3]
            );
        }
        daemon::eventually(|| {
            serving
                .node
                .status()
                .tiers
                .disk
                .is_some_and(|disk| disk.disks[0].dirty == 6)
        })
        .await;
        drop(engine);
        assert_eq!(serving.end().await.dropped, 0, "the disk has them");
        place.start_s3().await;

        let serving = place.serve_over(Arc::clone(&store), &of(wrong.as_str())).await;
        let waiting = || serving.node.status().tiers.write_behind.backlog_chunks;
        daemon::eventually(|| waiting() == 3).await;
        for (prompt, is_there) in [(&acme, false), (&other, true)] {
            for hash in &prompt.hashes {
                let key = kvgate::format::KeyPrefix::new("").chunk(prompt.space.key(), hash);
                let head = store.head(&key, soon()).await;
                assert_eq!(head.is_ok(), is_there, "{head:?}");
            }
        }
        daemon::eventually(|| {
            let troubles = serving.node.status().troubles;
            troubles
                .iter()
                .any(|trouble| trouble.what.contains("which is not here"))
        })
        .await;
        // The disk's reason is told, not that S3 lacks the chunk.
        serving.client.declare(&acme.space).await.unwrap();
        let engine = serving.attach("one").await;
        let loaded = daemon::load(&engine, &acme, "a", Order::Chunk).await;
        assert_eq!(loaded, ["no_key"; 3]);
        assert_eq!(waiting(), 3, "none was given up");
        drop(engine);
        serving.end().await;

        // The key is back.
        let serving = place.serve_over(Arc::clone(&store), &of(file.as_str())).await;
        daemon::eventually(|| {
            serving
                .node
                .status()
                .tiers
                .disk
                .is_some_and(|disk| disk.disks[0].dirty == 0)
        })
        .await;
        for hash in &acme.hashes {
            let key = kvgate::format::KeyPrefix::new("").chunk(acme.space.key(), hash);
            assert!(store.head(&key, soon()).await.is_ok());
        }
        serving.end().await;
    }
}

/// A daemon with another key: what is on its disk stays there, and is served again when the key is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_key_harms_nothing_on_disk() {
    for protection in PROTECTIONS {
        let folder = tempfile::tempdir().unwrap();
        let file = key_files(folder.path(), &protection.to_string());
        let wrong = folder.path().join("wrong.toml");
        let text = std::fs::read_to_string(&file).unwrap();
        let (before, _) = text.split_once("keys = ").unwrap();
        std::fs::write(&wrong, format!("{before}keys = \"command:printf %064d 8\"\n")).unwrap();
        let disk = folder.path().join("disk");
        std::fs::create_dir(&disk).unwrap();
        let (disk, wrong) = (disk.display().to_string(), wrong.display().to_string());
        let of = |file| {
            [
                ("keys.file", file),
                ("disk.paths", disk.as_str()),
                ("disk.size", "64MiB"),
            ]
        };
        let place = daemon::Site::new().await;
        let prompt = Prompt::of(space_of("acme", protection), 3);
        place.store_by_another(&prompt, &of(file.as_str())).await;
        for (file, from) in [(wrong.as_str(), "no_key"), (file.as_str(), "disk")] {
            let serving = place.serve(&of(file)).await;
            serving.ready().await;
            serving.client.declare(&prompt.space).await.unwrap();
            let engine = serving.attach("one").await;
            let loaded = daemon::load(&engine, &prompt, "a", Order::Chunk).await;
            assert_eq!(loaded[0], from, "{protection}: {loaded:?}");
            drop(engine);
            serving.end().await;
        }
    }
}
