//! The cost of a lookup, in requests instead of seconds.

use std::sync::Arc;

use bytes::Bytes;
use futures::StreamExt;
use futures::stream;
use kvgate::format::Space;
use kvgate::protocol::Strategy;
use kvgate::s3::object::Condition;

use crate::support::backends::{Backend, on_backends};
use crate::support::fixture::{Prompt, Site, lookup, soon};

on_backends! {
    a_prompt_of_4096_chunks_of_which_3000_exist: embedded, rgw, minio;
}

const CHUNKS: usize = 4096;
const STORED: usize = 3000;

/// One byte a token, one token a chunk: objects of 4097 bytes.
fn smallest_space() -> Space {
    Space::from_json(
        r#"{"model": "test/smallest", "revision": "1", "dtype": "int8", "chunk_tokens": 1,
            "planes": [{"name": "kv", "layer": 0, "heads": 1, "row_bytes": 1}]}"#,
    )
    .unwrap()
}

async fn a_prompt_of_4096_chunks_of_which_3000_exist(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::of(smallest_space(), CHUNKS);
    let object_len = prompt.space.layout().object_len();
    // Existence is a matter of key and length; what is in them no lookup reads.
    let body = Bytes::from(vec![0; object_len]);
    let puts = (0..STORED).map(|i| {
        let (store, key, body) = (Arc::clone(&site.store), site.key(&prompt, i), body.clone());
        async move { store.put(&key, body, Condition::Always, soon()).await.map(drop) }
    });
    let put: Vec<_> = stream::iter(puts).buffer_unordered(16).collect().await;
    put.into_iter().for_each(|put| put.unwrap());

    let asked =
        |gateway: &kvgate::cache::gateway::Gateway| gateway.requests().head + gateway.requests().attributes;
    let gateway = site.gateway();
    let before = asked(&gateway);
    let prefix = lookup(&gateway, &prompt, Strategy::Prefix).await;
    let cost = asked(&gateway) - before;
    assert!(cost <= 64, "{cost} requests");
    assert_eq!((prefix.prefix, prefix.unknown.count()), (STORED, 0));
    assert_eq!(
        prefix.inferred.count(),
        CHUNKS - cost as usize,
        "all but those asked for"
    );
    let known = lookup(&gateway, &prompt, Strategy::Prefix).await;
    assert_eq!(
        (known.prefix, asked(&gateway)),
        (STORED, before + cost),
        "warm: no request"
    );

    let before = asked(&gateway);
    let exact = lookup(&gateway, &prompt, Strategy::Exact).await;
    assert_eq!(exact.mask, prefix.mask);
    assert_eq!(exact.inferred.count(), 0);
    let asked_now = asked(&gateway) - before;
    // Absent chunks may have expired since, and inferred ones were not known.
    assert!(
        asked_now >= CHUNKS as u64 - cost,
        "what was inferred is asked for: {asked_now}"
    );
}
