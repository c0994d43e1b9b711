//! The abilities that kvgate needs of every S3 server.

use std::sync::Arc;

use bytes::Bytes;
use kvgate::cache::gateway::{AfterMiss, StoreOutcome};
use kvgate::format::Key;
use kvgate::protocol::Strategy;
use kvgate::s3::net::Landing;
use kvgate::s3::object::{Capabilities, Condition, ErrorKind, GetRange};

use crate::outage::ALL_RGW;
use crate::support::backends::{Backend, on_backends};
use crate::support::fixture::{self, Prompt, Site, arena, load_codes, lookup, soon, store_all, store_chunk};

on_backends! {
    capabilities_are_found_out: embedded, rgw, minio, rclone, swift;
    objects_come_and_go: embedded, rgw, minio, rclone, swift;
    wrong_keys_are_told: embedded, rgw, minio, swift;
    chunks_are_stored_found_and_loaded: embedded, rgw, minio, rclone, swift;
    eight_gateways_store_the_same_chunk: embedded, rgw, minio, rclone, swift;
    every_gateway_sees_what_one_stored: rgw;
}

async fn capabilities_are_found_out(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let (if_none_match, if_match, attributes, checksum, metadata) = match backend.name {
        "embedded" => (true, true, false, true, true),
        "rgw" => (true, true, false, false, true),
        "minio" => (true, true, true, true, true),
        "rclone" => (false, false, false, false, true),
        _ => (false, false, false, false, false),
    };
    assert_eq!(
        site.capabilities,
        Capabilities {
            if_none_match,
            if_match,
            attributes,
            checksum,
            metadata,
        }
    );
    let left = site.store.list(site.keys.as_str(), None, soon()).await.unwrap();
    assert_eq!(left.objects, [], "the probe's object is removed");
}

async fn objects_come_and_go(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let store = &site.store;
    let key = |i: usize| format!("{}objects/{i:04}", site.keys.as_str());
    let body: Vec<u8> = (0..100_000_u32).map(|i| (i % 251) as u8).collect();
    store
        .put(&key(0), Bytes::from(body.clone()), Condition::Always, soon())
        .await
        .unwrap();
    let meta = store.head(&key(0), soon()).await.unwrap();
    assert_eq!(meta.len, 100_000);
    assert!(meta.version.modified > 1_700_000_000);

    let arena = arena(1 << 20);
    for range in [0..100_000, 0..1, 99_999..100_000, 5_000..60_000] {
        let slot = arena.try_reserve(range.len()).unwrap();
        let get = GetRange {
            key: &key(0),
            range: range.clone(),
            object_len: 100_000,
            if_match: Some(&meta.version.etag),
        };
        let (Landing { slot, .. }, got) = store.get(get, Landing::new(slot), soon()).await;
        assert_eq!(got.unwrap(), meta);
        assert_eq!(slot[..], body[range]);
    }
    let mut slot = arena.try_reserve(10).unwrap();
    let wrong = [
        (
            key(0),
            0..10,
            100_000,
            Some("0123456789abcdef0123456789abcdef"),
            ErrorKind::Changed,
        ),
        (
            key(0),
            0..10,
            99_999,
            None,
            ErrorKind::Length {
                expected: 99_999,
                actual: Some(100_000),
            },
        ),
        (key(1), 0..10, 100_000, None, ErrorKind::NotFound),
    ];
    for (key, range, object_len, if_match, kind) in wrong {
        let get = GetRange {
            key: &key,
            range,
            object_len,
            if_match,
        };
        let (Landing { slot: back, .. }, got) = store.get(get, Landing::new(slot), soon()).await;
        slot = back;
        assert_eq!(got.unwrap_err().kind, kind);
    }
    let get = GetRange {
        key: &key(0),
        range: 200_000..200_010,
        object_len: 300_000,
        if_match: None,
    };
    let error = store.get(get, Landing::new(slot), soon()).await.1.unwrap_err();
    assert!(
        matches!(
            error.kind,
            ErrorKind::Length {
                expected: 300_000,
                ..
            }
        ),
        "{error}"
    );
    assert_eq!(
        store.head(&key(1), soon()).await.unwrap_err().kind,
        ErrorKind::NotFound
    );

    // More keys than fit on a page.
    let small = (1..1_105).map(|i| {
        let (store, key) = (Arc::clone(store), key(i));
        async move {
            store
                .put(&key, Bytes::from_static(b"x"), Condition::Always, soon())
                .await
                .map(drop)
        }
    });
    let put: Vec<_> = futures::StreamExt::collect(futures::StreamExt::buffer_unordered(
        futures::stream::iter(small),
        16,
    ))
    .await;
    put.into_iter().for_each(|put| put.unwrap());
    let prefix = format!("{}objects/", site.keys.as_str());
    let (mut keys, mut from) = (Vec::new(), None::<String>);
    loop {
        let page = store.list(&prefix, from.as_deref(), soon()).await.unwrap();
        keys.extend(page.objects.into_iter().map(|object| object.key));
        from = page.next;
        if from.is_none() {
            break;
        }
    }
    assert_eq!(keys, (0..1_105).map(key).collect::<Vec<_>>());
    for batch in keys.chunks(1000) {
        store.delete(batch, soon()).await.unwrap();
    }
    assert_eq!(store.list(&prefix, None, soon()).await.unwrap().objects, []);
    store
        .delete(&[key(0)], soon())
        .await
        .expect("one that isn't there is as good as removed");
}

async fn wrong_keys_are_told(backend: &Backend) {
    let mut options = backend.options();
    options.bucket = "kvgate-no-such-bucket".into();
    let error = crate::support::backends::open(&options)
        .await
        .check_bucket(soon())
        .await
        .unwrap_err();
    assert_eq!(error.kind, ErrorKind::NoBucket);
    assert!(error.to_string().contains("--bucket"), "{error}");

    options = backend.options();
    options.credentials = Some(aws_credential_types::Credentials::from_keys(
        "nobody", "nothing", None,
    ));
    let error = crate::support::backends::open(&options)
        .await
        .check_bucket(soon())
        .await
        .unwrap_err();
    assert!(
        matches!(error.kind, ErrorKind::Credentials | ErrorKind::Denied),
        "{error}"
    );
    assert!(!error.to_string().contains("nothing"));
}

async fn chunks_are_stored_found_and_loaded(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(9);
    let writer = site.gateway();
    store_all(&writer, &prompt).await;
    assert!(matches!(
        store_chunk(&writer, &prompt, 0).await,
        StoreOutcome::Present
    ));
    fixture::arena_empties(&writer).await;

    let reader = site.gateway();
    for strategy in [Strategy::Exact, Strategy::Prefix] {
        reader.forget_existence();
        let found = lookup(&reader, &prompt, strategy).await;
        assert_eq!(
            (found.prefix, found.mask.count(), found.unknown.count()),
            (9, 9, 0)
        );
    }
    assert_eq!(load_codes(&reader, &prompt, AfterMiss::Stop).await, ["ok"; 9]);
    // A load that no lookup went before learns the version from its first range.
    assert_eq!(
        load_codes(&site.gateway(), &prompt, AfterMiss::Stop).await,
        ["ok"; 9]
    );
    fixture::arena_empties(&reader).await;

    let listed = site
        .store
        .list(site.keys.as_str(), None, soon())
        .await
        .unwrap()
        .objects;
    let mut keys: Vec<Key> = listed
        .iter()
        .map(|object| site.keys.parse(&object.key).unwrap())
        .collect();
    let mut expected: Vec<Key> = prompt
        .hashes
        .iter()
        .map(|hash| Key::Chunk(prompt.space.key(), *hash))
        .collect();
    expected.push(Key::SpaceJson(prompt.space.key()));
    let by_text = |key: &Key| format!("{key:?}");
    keys.sort_by_key(by_text);
    expected.sort_by_key(by_text);
    assert_eq!(keys, expected);
    let json = site.read(&site.keys.space_json(prompt.space.key())).await;
    assert_eq!(json, prompt.space.canonical_json().as_bytes());
}

async fn eight_gateways_store_the_same_chunk(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let prompt = Arc::new(Prompt::new(1));
    let gateways: Vec<_> = (0..8).map(|_| site.gateway()).collect();
    let stores = gateways.iter().cloned().map(|gateway| {
        let prompt = Arc::clone(&prompt);
        tokio::spawn(async move { store_chunk(&gateway, &prompt, 0).await })
    });
    let outcomes = futures::future::join_all(stores.collect::<Vec<_>>()).await;
    let stored = outcomes
        .iter()
        .filter(|outcome| matches!(outcome, Ok(StoreOutcome::Stored)))
        .count();
    let present = outcomes
        .iter()
        .filter(|outcome| matches!(outcome, Ok(StoreOutcome::Present)))
        .count();
    assert_eq!(stored + present, 8, "{outcomes:?}");
    assert!(
        stored == 1 || (stored > 1 && !site.capabilities.if_none_match),
        "{outcomes:?}"
    );
    for gateway in gateways {
        assert_eq!(load_codes(&gateway, &prompt, AfterMiss::Stop).await, ["ok"]);
    }
    let listed = site
        .store
        .list(&site.keys.space(prompt.space.key()), None, soon())
        .await
        .unwrap();
    assert_eq!(listed.objects.len(), 2, "the chunk and space.json");
}

async fn every_gateway_sees_what_one_stored(backend: &Backend) {
    let _all_there = ALL_RGW.lock().await;
    assert!(backend.endpoints.len() > 1, "several radosgw");
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(3);
    store_all(&site.gateway(), &prompt).await;
    for endpoint in &backend.endpoints {
        let mut options = backend.options();
        options.endpoint = Some(endpoint.clone());
        let gateway = site.gateway_over(crate::support::backends::open(&options).await);
        assert_eq!(lookup(&gateway, &prompt, Strategy::Prefix).await.prefix, 3);
        assert_eq!(load_codes(&gateway, &prompt, AfterMiss::Stop).await, ["ok"; 3]);
    }
}
