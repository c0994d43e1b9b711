//! PUTs on a line that flips bits: S3 must not acknowledge other bytes than were sent.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use kvgate::cache::gateway::{AfterMiss, Gateway, StoreOutcome};
use kvgate::s3::object::{Capabilities, ErrorKind, S3Options};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::backends::{Backend, on_backends, open};
use crate::support::fixture::{Prompt, Site, arena, arena_empties, load_codes, store_chunk};

on_backends! {
    bits_that_flip_on_the_way_are_not_acknowledged: embedded, minio;
}

/// A line to a server on which one bit of each of so many PUTs' bodies is flipped.
struct Line {
    endpoint: String,
    flips: Arc<AtomicUsize>,
}

impl Line {
    async fn to(upstream: &str) -> Self {
        let upstream = upstream.trim_start_matches("http://").to_owned();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let flips = Arc::new(AtomicUsize::new(0));
        let left = Arc::clone(&flips);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let (upstream, left) = (upstream.clone(), Arc::clone(&left));
                tokio::spawn(async move {
                    let server = TcpStream::connect(upstream).await.unwrap();
                    let (mut from_server, mut to_server) = server.into_split();
                    let (mut from_client, mut to_client) = client.into_split();
                    tokio::spawn(async move { tokio::io::copy(&mut from_server, &mut to_client).await });
                    let mut bytes = vec![0; 16 << 10];
                    while let Ok(len @ 1..) = from_client.read(&mut bytes).await {
                        // Far into the body of a chunk, and in no head: those are small.
                        let spend = |left: usize| left.checked_sub(1);
                        if len == bytes.len()
                            && left
                                .fetch_update(Ordering::SeqCst, Ordering::SeqCst, spend)
                                .is_ok()
                        {
                            bytes[len - 1] ^= 4;
                        }
                        if to_server.write_all(&bytes[..len]).await.is_err() {
                            break;
                        }
                    }
                });
            }
        });
        Self { endpoint, flips }
    }
}

/// It was acknowledged, and every node took it for the chunk until its digests were computed.
async fn bits_that_flip_on_the_way_are_not_acknowledged(backend: &Backend) {
    let site = Site::new(backend.store().await).await;
    assert!(site.capabilities.checksum, "this server checks");
    let line = Line::to(&backend.endpoints[0]).await;
    let options = S3Options {
        endpoint: Some(line.endpoint.clone()),
        ..backend.options()
    };
    let gateway = site.gateway_over(open(&options).await);
    let prompt = Prompt::new(3);

    line.flips.store(1, Ordering::SeqCst);
    let stored = store_chunk(&gateway, &prompt, 0).await;
    assert!(matches!(stored, StoreOutcome::Stored), "sent again: {stored:?}");
    assert_eq!(line.flips.load(Ordering::SeqCst), 0, "it was flipped");

    line.flips.store(1000, Ordering::SeqCst);
    match store_chunk(&gateway, &prompt, 1).await {
        StoreOutcome::Failed(error) => assert_eq!(error.kind, ErrorKind::Checksum, "{error}"),
        other => panic!("{other:?}"),
    }
    line.flips.store(0, Ordering::SeqCst);
    assert!(matches!(
        store_chunk(&gateway, &prompt, 1).await,
        StoreOutcome::Stored
    ));
    // Over a damaged object, with If-Match.
    let key = site.key(&prompt, 2);
    assert!(matches!(
        store_chunk(&gateway, &prompt, 2).await,
        StoreOutcome::Stored
    ));
    let mut damaged = site.read(&key).await;
    *damaged.last_mut().unwrap() ^= 1;
    site.overwrite(&key, damaged).await;
    let codes = load_codes(&gateway, &prompt, AfterMiss::Continue).await;
    assert_eq!(codes, ["ok", "ok", "bad_digest"]);
    line.flips.store(1, Ordering::SeqCst);
    assert!(matches!(
        store_chunk(&gateway, &prompt, 2).await,
        StoreOutcome::Stored
    ));
    let reader = site.gateway();
    assert_eq!(load_codes(&reader, &prompt, AfterMiss::Stop).await, ["ok"; 3]);
    arena_empties(&gateway).await;
}

/// A checksum that the server was not seen to compare is not sent.
#[tokio::test]
async fn without_the_capability_no_checksum_is_sent() {
    let backend = Backend::embedded().await;
    let site = Site::new(backend.store().await).await;
    let line = Line::to(&backend.endpoints[0]).await;
    let options = S3Options {
        endpoint: Some(line.endpoint.clone()),
        ..backend.options()
    };
    let capabilities = Capabilities {
        checksum: false,
        ..site.capabilities
    };
    let gateway = Gateway::new(open(&options).await, arena(4 << 20), capabilities, site.options());
    let prompt = Prompt::new(1);
    line.flips.store(1, Ordering::SeqCst);
    assert!(matches!(
        store_chunk(&gateway, &prompt, 0).await,
        StoreOutcome::Stored
    ));
    assert_eq!(
        load_codes(&site.gateway(), &prompt, AfterMiss::Stop).await,
        ["bad_digest"]
    );
}
