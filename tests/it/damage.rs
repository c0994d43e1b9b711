//! Objects that are not what their key says: each is a miss with its own reason, and heals.

use std::sync::Arc;

use kvgate::cache::gateway::{AfterMiss, StoreOutcome};
use kvgate::format::Space;
use kvgate::protocol::Strategy;

use crate::faults::Hooked;
use crate::support::backends::{Backend, on_backends};
use crate::support::fixture::{ABSENT_TTL, Prompt, Site, load_codes, lookup, store_all, store_chunk};

on_backends! {
    a_flipped_byte_anywhere: embedded, rgw, minio, rclone, swift;
    a_truncated_object: embedded, rgw, minio, rclone, swift;
    a_foreign_object: embedded, rgw, minio, rclone, swift;
    another_chunk_s_object: embedded, rgw, minio;
    a_header_of_another_space: embedded, rgw, minio;
    deleted_between_lookup_and_load: embedded, rgw, minio, rclone, swift;
    replaced_between_two_ranges: embedded, rgw, minio, rclone, swift;
    replaced_between_lookup_and_load: embedded, rgw, minio, rclone, swift;
    a_hole_ends_the_run: embedded, rgw, minio;
    decay_that_keeps_the_etag_heals: embedded, rgw;
    a_server_without_conditions: embedded, rgw;
    a_short_object_in_the_way_of_a_first_store: embedded, rgw, minio, rclone, swift;
    a_chunk_that_is_known_to_be_damaged_is_never_inferred: embedded, rgw, minio, rclone, swift;
}

const N: usize = 4;
const BAD: usize = 1;

/// Stores a prompt, damages chunk `BAD`, and checks what a second gateway makes of it: the reason, that it is
/// forgotten, that its neighbours load, and that storing it again makes it a verified hit for every gateway.
async fn damaged(backend: &Backend, bytes: impl AsyncFn(&Site, &Prompt) -> Vec<u8>, code: &str) {
    damaged_at(&Site::new(backend.store().await).await, bytes, code).await;
}

async fn damaged_at(site: &Site, bytes: impl AsyncFn(&Site, &Prompt) -> Vec<u8>, code: &str) {
    let prompt = Prompt::new(N);
    store_all(&site.gateway(), &prompt).await;
    let (reader, other) = (site.gateway(), site.gateway());
    // Both have seen the good one.
    assert_eq!(lookup(&reader, &prompt, Strategy::Exact).await.prefix, N);
    assert_eq!(lookup(&other, &prompt, Strategy::Exact).await.prefix, N);
    let bad = bytes(site, &prompt).await;
    site.overwrite(&site.key(&prompt, BAD), bad).await;

    assert_eq!(
        load_codes(&reader, &prompt, AfterMiss::Continue).await,
        ["ok", code, "ok", "ok"]
    );
    let found = lookup(&reader, &prompt, Strategy::Exact).await;
    assert_eq!(
        (found.mask.get(BAD), found.unknown.get(BAD)),
        (false, false),
        "absent, not present nor unknown"
    );
    assert_eq!((found.prefix, found.mask.count()), (BAD, N - 1));
    tokio::time::sleep(ABSENT_TTL).await;
    let found = lookup(&reader, &prompt, Strategy::Exact).await;
    assert!(
        !found.mask.get(BAD),
        "also after the TTL, as long as S3 shows that version"
    );
    let again = load_codes(&reader, &prompt, AfterMiss::Continue).await[BAD];
    assert!(["quarantined", "absent"].contains(&again), "{again}");

    let outcome = store_chunk(&reader, &prompt, BAD).await;
    assert!(matches!(outcome, StoreOutcome::Stored), "{outcome:?}");
    tokio::time::sleep(ABSENT_TTL).await;
    for gateway in [&reader, &other, &site.gateway()] {
        assert_eq!(lookup(gateway, &prompt, Strategy::Exact).await.prefix, N);
        assert_eq!(load_codes(gateway, &prompt, AfterMiss::Stop).await, ["ok"; N]);
    }
}

async fn a_flipped_byte_anywhere(backend: &Backend) {
    let object_len = crate::support::fixture::space().layout().object_len();
    // The magic, the chunk hash, a digest, the header's digest; the first and the last payload byte, and one inside.
    for (at, code) in [
        (0, "bad_header"),
        (50, "bad_header"),
        (300, "bad_header"),
        (4095, "bad_header"),
        (4096, "bad_digest"),
        (70_000, "bad_digest"),
        (object_len - 1, "bad_digest"),
    ] {
        let flipped = async |site: &Site, prompt: &Prompt| {
            let mut bytes = site.read(&site.key(prompt, BAD)).await;
            bytes[at] ^= 0x10;
            bytes
        };
        damaged(backend, flipped, code).await;
    }
}

async fn a_truncated_object(backend: &Backend) {
    for len in [1, 4096, 50_000] {
        let cut = async |site: &Site, prompt: &Prompt| {
            let mut bytes = site.read(&site.key(prompt, BAD)).await;
            bytes.truncate(len);
            bytes
        };
        damaged(backend, cut, "wrong_length").await;
    }
}

async fn a_foreign_object(backend: &Backend) {
    damaged(
        backend,
        async |_: &Site, _: &Prompt| b"somebody's notes".to_vec(),
        "wrong_length",
    )
    .await;
    let same_length = async |_: &Site, prompt: &Prompt| vec![b'x'; prompt.space.layout().object_len()];
    damaged(backend, same_length, "bad_header").await;
}

async fn another_chunk_s_object(backend: &Backend) {
    let other = async |site: &Site, prompt: &Prompt| site.read(&site.key(prompt, 0)).await;
    damaged(backend, other, "foreign_chunk").await;
}

async fn a_header_of_another_space(backend: &Backend) {
    let other = async |site: &Site, prompt: &Prompt| {
        let json = prompt.space.canonical_json().replace("test/tiny", "test/tini");
        let stranger = Prompt {
            space: Space::from_json(&json).unwrap(),
            root: prompt.root,
            hashes: prompt.hashes.clone(),
        };
        store_chunk(&site.gateway(), &stranger, BAD).await;
        site.read(&site.key(&stranger, BAD)).await
    };
    damaged(backend, other, "foreign_space").await;
}

async fn deleted_between_lookup_and_load(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(N);
    store_all(&site.gateway(), &prompt).await;
    let reader = site.gateway();
    assert_eq!(lookup(&reader, &prompt, Strategy::Exact).await.prefix, N);
    site.remove(site.key(&prompt, BAD)).await;
    assert_eq!(
        load_codes(&reader, &prompt, AfterMiss::Continue).await,
        ["ok", "absent", "ok", "ok"]
    );
    let found = lookup(&reader, &prompt, Strategy::Exact).await;
    assert_eq!(
        (found.prefix, found.mask.count(), found.unknown.count()),
        (BAD, N - 1, 0)
    );
    assert!(matches!(
        store_chunk(&reader, &prompt, BAD).await,
        StoreOutcome::Stored
    ));
    assert_eq!(load_codes(&reader, &prompt, AfterMiss::Stop).await, ["ok"; N]);
}

async fn replaced_between_two_ranges(backend: &Backend) {
    let site = Arc::new(Site::new(backend.store().await).await);
    let prompt = Arc::new(Prompt::new(1));
    store_all(&site.gateway(), &prompt).await;
    // Other bytes, in a good object: what another engine's rounding would have made of the same tokens.
    let other_site = Site::new(backend.store().await).await;
    let other_bytes = {
        let gateway = other_site.gateway();
        let mut slot = gateway.reserve(&prompt.space).unwrap();
        slot.payload_mut().fill(0x5a);
        let chunk = kvgate::cache::gateway::FilledSlot {
            hash: prompt.hashes[0],
            parent: prompt.root,
            slot,
        };
        gateway
            .write_through(chunk, crate::support::fixture::soon())
            .await;
        other_site.read(&other_site.key(&prompt, 0)).await
    };
    let hooked = Hooked::before_get(Arc::clone(&site.store), 1, {
        let (site, prompt) = (Arc::clone(&site), Arc::clone(&prompt));
        move || {
            let (site, prompt, bytes) = (Arc::clone(&site), Arc::clone(&prompt), other_bytes.clone());
            Box::pin(async move { site.overwrite(&site.key(&prompt, 0), bytes).await })
        }
    });
    let reader = site.gateway_over(Arc::new(hooked));
    assert_eq!(load_codes(&reader, &prompt, AfterMiss::Stop).await, ["replaced"]);
    let found = lookup(&reader, &prompt, Strategy::Exact).await;
    assert_eq!(found.prefix, 1, "the new one is there");
    let loaded = crate::support::fixture::load(&reader, &prompt, AfterMiss::Stop).await;
    assert!(
        loaded[0]
            .as_ref()
            .unwrap()
            .payload()
            .iter()
            .all(|&byte| byte == 0x5a)
    );
}

async fn replaced_between_lookup_and_load(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(2);
    store_all(&site.gateway(), &prompt).await;
    let reader = site.gateway();
    assert_eq!(lookup(&reader, &prompt, Strategy::Exact).await.prefix, 2);
    // A good object with another ETag: BLAKE3 digests in place of CRCs.
    let mut options = site.options();
    options.digest = kvgate::format::DigestKind::Blake3;
    site.remove(site.key(&prompt, 1)).await;
    let writer = kvgate::cache::gateway::Gateway::new(
        Arc::clone(&site.store),
        crate::support::fixture::arena(1 << 20),
        site.capabilities,
        options,
    );
    assert!(matches!(
        store_chunk(&writer, &prompt, 1).await,
        StoreOutcome::Stored
    ));
    assert_eq!(load_codes(&reader, &prompt, AfterMiss::Stop).await, ["ok", "ok"]);
}

async fn a_hole_ends_the_run(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(6);
    store_all(&site.gateway(), &prompt).await;
    site.remove(site.key(&prompt, 2)).await;
    let reader = site.gateway();
    let found = lookup(&reader, &prompt, Strategy::Exact).await;
    assert_eq!((found.prefix, found.mask.count()), (2, 5));
    assert_eq!(
        found
            .tiers
            .iter()
            .map(|run| (run.from, run.count))
            .collect::<Vec<_>>(),
        [(0, 2), (3, 3)]
    );
    let codes = load_codes(&reader, &prompt, AfterMiss::Stop).await;
    assert_eq!(
        codes,
        ["ok", "ok", "absent", "run_ended", "run_ended", "run_ended"]
    );
    let codes = load_codes(&reader, &prompt, AfterMiss::Continue).await;
    assert_eq!(codes, ["ok", "ok", "absent", "ok", "ok", "ok"]);
}

/// A disk that returns other bytes than were written: the ETag still is the good bytes', and the good bytes that
/// replace them have it again.
async fn decay_that_keeps_the_etag_heals(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(N);
    store_all(&site.gateway(), &prompt).await;
    let last = prompt.space.layout().object_len() - 1;
    let decaying = Hooked::flipping(Arc::clone(&site.store), site.key(&prompt, BAD), last);
    let reader = site.gateway_over(Arc::clone(&decaying) as Arc<_>);
    assert_eq!(
        load_codes(&reader, &prompt, AfterMiss::Continue).await,
        ["ok", "bad_digest", "ok", "ok"]
    );
    assert_eq!(lookup(&reader, &prompt, Strategy::Exact).await.prefix, BAD);
    let other = site.gateway_over(Arc::clone(&decaying) as Arc<_>);
    assert_eq!(
        load_codes(&other, &prompt, AfterMiss::Continue).await[BAD],
        "bad_digest"
    );
    // S3 keeps whole seconds.
    tokio::time::sleep(std::time::Duration::from_millis(1100)).await;
    assert!(matches!(
        store_chunk(&reader, &prompt, BAD).await,
        StoreOutcome::Stored
    ));
    decaying.flip_times(0);
    tokio::time::sleep(ABSENT_TTL).await;
    for gateway in [&reader, &other, &site.gateway()] {
        assert_eq!(lookup(gateway, &prompt, Strategy::Exact).await.prefix, N);
        assert_eq!(load_codes(gateway, &prompt, AfterMiss::Stop).await, ["ok"; N]);
    }
}

/// Some overwrite whatever the condition; then kvgate looks before it stores, and overwrites what is damaged.
async fn a_server_without_conditions(backend: &Backend) {
    let mut site = Site::new(backend.store().await).await;
    site.capabilities = kvgate::s3::object::Capabilities::default();
    let flipped = async |site: &Site, prompt: &Prompt| {
        let mut bytes = site.read(&site.key(prompt, BAD)).await;
        bytes[70_000] ^= 1;
        bytes
    };
    damaged_at(&site, flipped, "bad_digest").await;
    damaged_at(
        &site,
        async |_: &Site, _: &Prompt| b"short".to_vec(),
        "wrong_length",
    )
    .await;
    let prompt = Prompt::new(1);
    assert!(matches!(
        store_chunk(&site.gateway(), &prompt, 0).await,
        StoreOutcome::Stored
    ));
    assert!(matches!(
        store_chunk(&site.gateway(), &prompt, 0).await,
        StoreOutcome::Present
    ));
}

/// This gateway never looked: the 412 is its first word of the object, and must not count as stored.
async fn a_short_object_in_the_way_of_a_first_store(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(1);
    site.overwrite(&site.key(&prompt, 0), b"half a chunk".to_vec())
        .await;
    let outcome = store_chunk(&site.gateway(), &prompt, 0).await;
    assert!(matches!(outcome, StoreOutcome::Stored), "{outcome:?}");
    assert_eq!(
        load_codes(&site.gateway(), &prompt, AfterMiss::Stop).await,
        ["ok"]
    );
}

/// All chunks after the damaged one are there, so that nothing else would be asked for.
async fn a_chunk_that_is_known_to_be_damaged_is_never_inferred(backend: &Backend) {
    const CHUNKS: usize = 20;
    const FLIPPED: usize = 5;
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(CHUNKS);
    store_all(&site.gateway(), &prompt).await;
    let key = site.key(&prompt, FLIPPED);
    let mut bytes = site.read(&key).await;
    bytes[70_000] ^= 1;
    site.overwrite(&key, bytes).await;

    let reader = site.gateway();
    let prefix = || lookup(&reader, &prompt, Strategy::Prefix);
    assert_eq!(prefix().await.prefix, CHUNKS, "nobody has read it yet");
    assert_eq!(
        load_codes(&reader, &prompt, AfterMiss::Continue).await[FLIPPED],
        "bad_digest"
    );
    assert_eq!(prefix().await.prefix, FLIPPED);
    tokio::time::sleep(ABSENT_TTL).await;
    let found = prefix().await;
    assert_eq!(
        (found.prefix, found.asked, found.unknown.count()),
        (FLIPPED, 1, 0)
    );

    // Another node, which has read it too, stores it anew.
    let other = site.gateway();
    load_codes(&other, &prompt, AfterMiss::Continue).await;
    let outcome = store_chunk(&other, &prompt, FLIPPED).await;
    assert!(matches!(outcome, StoreOutcome::Stored), "{outcome:?}");
    tokio::time::sleep(ABSENT_TTL).await;
    assert_eq!(prefix().await.prefix, CHUNKS);
    assert_eq!(prefix().await.asked, 0);
    assert_eq!(
        load_codes(&reader, &prompt, AfterMiss::Stop).await,
        ["ok"; CHUNKS]
    );
}
