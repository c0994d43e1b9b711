//! Tests of the S3 server inside the process, by the AWS SDK: conditions, ranges, listings, errors.

#![allow(clippy::unwrap_used, reason = "tests")]

use std::net::SocketAddr;
use std::time::Duration;

use aws_sdk_s3::Client;
use aws_sdk_s3::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::operation::list_objects_v2::ListObjectsV2Output;
use aws_sdk_s3::primitives::ByteStream;
use aws_sdk_s3::types::{ChecksumAlgorithm, ChecksumMode, Delete, ObjectIdentifier};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::{EmbeddedError, EmbeddedS3};

const B: &str = "bucket";

fn client_with(s3: &EmbeddedS3, secret: &str) -> Client {
    let config = aws_sdk_s3::Config::builder()
        .behavior_version(BehaviorVersion::latest())
        .http_client(aws_smithy_http_client::Builder::new().build_http())
        .endpoint_url(s3.endpoint())
        .region(Region::new("us-east-1"))
        .credentials_provider(Credentials::new(s3.access_key(), secret, None, None, "test"))
        .retry_config(aws_sdk_s3::config::retry::RetryConfig::disabled())
        .force_path_style(true)
        .build();
    Client::from_conf(config)
}

async fn server() -> (EmbeddedS3, Client) {
    let s3 = EmbeddedS3::start(None, None).await.unwrap();
    let client = client_with(&s3, s3.secret_key());
    client.create_bucket().bucket(B).send().await.unwrap();
    (s3, client)
}

async fn put(client: &Client, key: &str, data: &[u8]) -> String {
    let body = ByteStream::from(data.to_vec());
    let put = client.put_object().bucket(B).key(key).body(body);
    put.send().await.unwrap().e_tag.unwrap()
}

async fn read(client: &Client, key: &str) -> Vec<u8> {
    let got = client.get_object().bucket(B).key(key).send().await.unwrap();
    got.body.collect().await.unwrap().to_vec()
}

/// Status and code of a failure.
fn fault<T, E: ProvideErrorMetadata>(result: Result<T, SdkError<E, HttpResponse>>) -> (u16, String) {
    let Err(error) = result else {
        panic!("must fail");
    };
    let status = error.raw_response().unwrap().status().as_u16();
    let code = error.as_service_error().and_then(|e| e.code());
    (status, code.unwrap_or_default().to_owned())
}

fn noise(len: usize) -> Vec<u8> {
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    let mut out = Vec::with_capacity(len + 8);
    while out.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend_from_slice(&state.to_le_bytes());
    }
    out.truncate(len);
    out
}

fn files_below(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let mut out = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            out.extend(files_below(&path));
        } else {
            out.push(path);
        }
    }
    out
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn conditional_put_has_one_winner() {
    let (s3, client) = server().await;
    for round in 0..10 {
        let key = format!("race/{round}");
        let puts = (0..8_u8).map(|i| {
            let body = ByteStream::from(vec![i; 50_000]);
            let put = client.put_object().bucket(B).key(&key).if_none_match("*");
            tokio::spawn(put.body(body).send())
        });
        let mut winner = None;
        for (i, put) in puts.collect::<Vec<_>>().into_iter().enumerate() {
            let result = put.await.unwrap();
            if result.is_ok() {
                assert_eq!(winner.replace(u8::try_from(i).unwrap()), None);
            } else {
                let lost = (412, "PreconditionFailed".to_owned());
                assert_eq!(fault(result), lost);
            }
        }
        assert_eq!(read(&client, &key).await, vec![winner.unwrap(); 50_000]);
    }
    assert!(files_below(&s3.root().join(".staging")).is_empty());
    s3.stop().await;
}

#[tokio::test]
async fn put_if_match_and_delete_if_match() {
    let (_s3, client) = server().await;
    let old = put(&client, "k", b"old").await;
    let cas = |etag: &str| client.put_object().bucket(B).key("k").if_match(etag);
    cas(&old).body(b"new".to_vec().into()).send().await.unwrap();
    assert_eq!(fault(cas(&old).send().await).0, 412);
    assert_eq!(read(&client, "k").await, b"new");
    let missing = client.put_object().bucket(B).key("none").if_match(&old);
    assert_eq!(fault(missing.send().await).0, 404);
    let delete = client.delete_object().bucket(B).key("k").if_match(&old);
    assert_eq!(fault(delete.send().await).0, 412);
    assert_eq!(read(&client, "k").await, b"new");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn readers_see_one_version() {
    let (_s3, client) = server().await;
    let versions: Vec<_> = (0..4_u8).map(|i| vec![i; 300_000 + usize::from(i)]).collect();
    let mut etags = Vec::new();
    for version in &versions {
        etags.push(put(&client, "k", version).await);
    }
    let writer = tokio::spawn({
        let (client, versions) = (client.clone(), versions.clone());
        async move {
            for round in 0..40 {
                put(&client, "k", &versions[round % versions.len()]).await;
            }
        }
    });
    while !writer.is_finished() {
        let got = client.get_object().bucket(B).key("k").send().await.unwrap();
        let which = etags.iter().position(|e| Some(e) == got.e_tag.as_ref());
        let body = got.body.collect().await.unwrap().to_vec();
        assert!(body == versions[which.unwrap()]);
    }
    writer.await.unwrap();
}

#[tokio::test]
async fn ranges_and_conditions_of_get() {
    let (_s3, client) = server().await;
    let data = noise(3_000_001);
    let etag = put(&client, "k", &data).await;
    let get = |range: &str| client.get_object().bucket(B).key("k").range(range);
    for (range, want) in [
        ("bytes=0-0", 0..1),
        ("bytes=1048575-1048576", 1_048_575..1_048_577),
        ("bytes=100-2500000", 100..2_500_001),
        ("bytes=2999999-", 2_999_999..3_000_001),
        ("bytes=2999999-99999999", 2_999_999..3_000_001),
        ("bytes=-7", 2_999_994..3_000_001),
        ("bytes=-18446744073709551615", 0..3_000_001),
    ] {
        let got = get(range).if_match(&etag).send().await.unwrap();
        let header = format!("bytes {}-{}/3000001", want.start, want.end - 1);
        assert_eq!(got.content_range(), Some(header.as_str()));
        let body = got.body.collect().await.unwrap().to_vec();
        assert!(body == data[want], "{range}");
    }
    let wrong = fault(get("bytes=0-9").if_match("\"other\"").send().await);
    assert_eq!(wrong, (412, "PreconditionFailed".to_owned()));
    for range in ["bytes=3000001-", "bytes=-0"] {
        let fault = fault(get(range).send().await);
        assert_eq!(fault, (416, "InvalidRange".to_owned()));
    }
    let unchanged = client.get_object().bucket(B).key("k").if_none_match(&etag);
    assert_eq!(fault(unchanged.send().await).0, 304);
    let head = client.head_object().bucket(B).key("k").send().await;
    assert_eq!(head.unwrap().content_length(), Some(3_000_001));
    let wrong = client.head_object().bucket(B).key("k").if_match("\"other\"");
    assert_eq!(fault(wrong.send().await).0, 412);
}

#[tokio::test]
async fn faults() {
    let (s3, client) = server().await;
    let get = client.get_object().bucket(B).key("none").send().await;
    assert_eq!(fault(get), (404, "NoSuchKey".to_owned()));
    let head = client.head_object().bucket(B).key("none").send().await;
    assert_eq!(fault(head).0, 404);
    let no_bucket = client.put_object().bucket("other").key("k");
    let no_bucket = no_bucket.body(noise(5_000_000).into()).send().await;
    assert_eq!(fault(no_bucket), (404, "NoSuchBucket".to_owned()));
    let list = client.list_objects_v2().bucket("other").send().await;
    assert_eq!(fault(list), (404, "NoSuchBucket".to_owned()));
    let again = client.create_bucket().bucket(B).send().await;
    assert_eq!(fault(again), (409, "BucketAlreadyOwnedByYou".to_owned()));
    let wrong = client_with(&s3, "wrong");
    let wrong = wrong.get_object().bucket(B).key("k").send().await;
    assert_eq!(fault(wrong), (403, "SignatureDoesNotMatch".to_owned()));
    let multipart = client.create_multipart_upload().bucket(B).key("k");
    assert_eq!(fault(multipart.send().await).0, 501);
    let parts = client.list_parts().bucket(B).key("k").upload_id("u");
    assert_eq!(fault(parts.send().await).0, 501);

    for key in ["../x", "a/../b", "a//b", "/a", "a/", "a/./b", "a\u{1}"] {
        let put = client.put_object().bucket(B).key(key).send().await;
        assert_eq!(fault(put).0, 400, "{key:?}");
    }
    let long = "n".repeat(250);
    put(&client, &format!("{long}/{long}/{long}"), b"long").await;
    for key in ["n".repeat(256), format!("{long}/").repeat(5) + "x"] {
        let put = client.put_object().bucket(B).key(key).send().await;
        assert_eq!(fault(put), (400, "KeyTooLongError".to_owned()));
    }
    put(&client, "file", b"1").await;
    let below = client.put_object().bucket(B).key("file/x").send().await;
    assert_eq!(fault(below), (400, "InvalidRequest".to_owned()));
    let below = client.get_object().bucket(B).key("file/x").send().await;
    assert_eq!(fault(below).0, 404);
    put(&client, "dir/x/y", b"1").await;
    let folder = client.put_object().bucket(B).key("dir").send().await;
    assert_eq!(fault(folder), (400, "InvalidRequest".to_owned()));
    let folder = client.get_object().bucket(B).key("dir").send().await;
    assert_eq!(fault(folder).0, 404);
    let full = client.delete_bucket().bucket(B).send().await;
    assert_eq!(fault(full), (409, "BucketNotEmpty".to_owned()));
    // Folders left empty do not stand in the way.
    client
        .delete_object()
        .bucket(B)
        .key("dir/x/y")
        .send()
        .await
        .unwrap();
    put(&client, "dir", b"now a file").await;
}

#[tokio::test]
async fn metadata_checksums_and_restart() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("new/root");
    let s3 = EmbeddedS3::start(Some(&root), None).await.unwrap();
    let client = client_with(&s3, s3.secret_key());
    client.create_bucket().bucket(B).send().await.unwrap();
    let put = client.put_object().bucket(B).key("a/k").metadata("tier", "x y");
    let put = put
        .content_type("application/x-kv")
        .body(b"12345".to_vec().into());
    let put = put
        .checksum_algorithm(ChecksumAlgorithm::Crc64Nvme)
        .send()
        .await
        .unwrap();
    let crc = put.checksum_crc64_nvme().unwrap().to_owned();

    let bad = client
        .put_object()
        .bucket(B)
        .key("a/k")
        .body(b"other".to_vec().into());
    let bad = fault(bad.checksum_crc64_nvme("AAAAAAAAAAA=").send().await);
    assert_eq!(bad, (400, "BadDigest".to_owned()));

    let taken = EmbeddedS3::start(Some(&root), None).await;
    assert!(matches!(taken, Err(EmbeddedError::InUse { .. })));
    drop(s3);
    let s3 = EmbeddedS3::start(Some(&root), None).await.unwrap();
    let client = client_with(&s3, s3.secret_key());
    let get = client
        .get_object()
        .bucket(B)
        .key("a/k")
        .checksum_mode(ChecksumMode::Enabled);
    let get = get.send().await.unwrap();
    assert_eq!(get.e_tag, put.e_tag);
    assert_eq!(get.checksum_crc64_nvme(), Some(crc.as_str()));
    assert_eq!(get.content_type(), Some("application/x-kv"));
    assert_eq!(get.metadata().unwrap()["tier"], "x y");
    assert_eq!(get.body.collect().await.unwrap().to_vec(), b"12345");
    // A file changed by hand does not keep the record's ETag.
    std::fs::write(root.join(B).join("a/k"), b"654321").unwrap();
    let head = client.head_object().bucket(B).key("a/k").send().await.unwrap();
    assert_ne!(head.e_tag, put.e_tag);
    s3.stop().await;
}

#[tokio::test]
async fn broken_put_leaves_nothing() {
    let (s3, client) = server().await;
    let addr: SocketAddr = s3.endpoint()["http://".len()..].parse().unwrap();
    for old in [None, Some(b"old")] {
        let presigned =
            client.put_object().bucket(B).key("k").presigned(
                aws_sdk_s3::presigning::PresigningConfig::expires_in(Duration::from_mins(1)).unwrap(),
            );
        let presigned = presigned.await.unwrap();
        let path = presigned.uri().split_once(&addr.to_string()).unwrap().1;
        if let Some(old) = old {
            put(&client, "k", old).await;
        }
        let before = files_below(s3.root());
        let mut stream = tokio::net::TcpStream::connect(addr).await.unwrap();
        let head = format!("PUT {path} HTTP/1.1\r\nhost: {addr}\r\ncontent-length: 3000000\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&noise(2_000_000)).await.unwrap();
        // Wait until the server has begun to write.
        while files_below(s3.root()).len() == before.len() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        drop(stream);
        while files_below(s3.root()).len() != before.len() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let get = client.get_object().bucket(B).key("k").send().await;
        match old {
            None => assert_eq!(fault(get).0, 404),
            Some(old) => assert_eq!(read(&client, "k").await, old),
        }
    }
}

#[tokio::test]
async fn rubbish_is_answered() {
    let (s3, client) = server().await;
    let addr = s3.endpoint()["http://".len()..].to_owned();
    for rubbish in [
        "\0\0\0\r\n\r\n".to_owned(),
        "GET / HTTP/1.1\r\n\r\n".to_owned(),
        format!("GET /{B}/%ff%00 HTTP/1.1\r\nhost: x\r\nrange: bytes=9-1\r\n\r\n"),
        format!("PUT /{B}/k HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n"),
        format!("GET /{B}?list-type=2&max-keys=-5 HTTP/1.1\r\nhost: x\r\n\r\n"),
    ] {
        let mut stream = tokio::net::TcpStream::connect(&addr).await.unwrap();
        stream.write_all(rubbish.as_bytes()).await.unwrap();
        let mut start = [0; 9];
        stream.read_exact(&mut start).await.unwrap();
        assert_eq!(&start, b"HTTP/1.1 ", "{rubbish}");
    }
    put(&client, "k", b"alive").await;
}

#[tokio::test]
async fn leftovers_of_a_kill_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let uploads = folder.path().join(".staging/uploads");
    std::fs::create_dir_all(&uploads).unwrap();
    for name in ["0", "0.record", "../.tmp.0.internal.part"] {
        std::fs::write(uploads.join(name), b"junk").unwrap();
    }
    let s3 = EmbeddedS3::start(Some(folder.path()), None).await.unwrap();
    assert!(files_below(&folder.path().join(".staging")).is_empty());
    s3.stop().await;
}

#[tokio::test]
async fn list_pages_prefixes_delimiters() {
    let (_s3, client) = server().await;
    let mut keys: Vec<_> = (0..23).map(|i| format!("p/{}/o{i}", i % 3)).collect();
    keys.extend(["p-x", "p/é+%41 &<", "q", "p.d/z"].map(str::to_owned));
    let mut etag = String::new();
    for key in &keys {
        etag = put(&client, key, b"1").await;
    }
    keys.sort();
    for size in [1, 4, 5, 1000] {
        let pages = client.list_objects_v2().bucket(B).max_keys(size).into_paginator();
        let all: Vec<_> = pages.send().collect::<Result<Vec<_>, _>>().await.unwrap();
        assert_eq!(all.len(), keys.len().div_ceil(usize::try_from(size).unwrap()));
        let objects: Vec<_> = all.iter().flat_map(ListObjectsV2Output::contents).collect();
        assert!(objects.iter().map(|o| o.key().unwrap()).eq(keys.iter()));
        assert!(
            objects
                .iter()
                .all(|o| o.e_tag() == Some(&etag) && o.size() == Some(1))
        );
    }
    let list = |prefix: &str| client.list_objects_v2().bucket(B).prefix(prefix);
    for prefix in ["p", "p/", "p/1", "p/1/o1", "", "none/", "../", "p//"] {
        let got = list(prefix).send().await.unwrap();
        let want = keys.iter().filter(|key| key.starts_with(prefix));
        assert!(
            got.contents().iter().map(|o| o.key().unwrap()).eq(want),
            "{prefix}"
        );
    }
    assert_eq!(fault(list("p\0/").send().await).0, 400);
    for page in [1, 100] {
        let pages = list("p").delimiter("/").max_keys(page).into_paginator().send();
        let pages = pages.collect::<Result<Vec<_>, _>>().await.unwrap();
        let groups = pages.iter().flat_map(ListObjectsV2Output::common_prefixes);
        assert!(groups.map(|p| p.prefix().unwrap()).eq(["p.d/", "p/"]));
        let objects = pages.iter().flat_map(ListObjectsV2Output::contents);
        assert!(objects.map(|o| o.key().unwrap()).eq(["p-x"]));
    }
    let odd = list("p/").delimiter("é").send().await.unwrap();
    assert_eq!(odd.common_prefixes()[0].prefix(), Some("p/é"));
    let after = client
        .list_objects_v2()
        .bucket(B)
        .start_after("p/2/o20")
        .send()
        .await;
    assert_eq!(after.unwrap().contents().len(), 4);
}

#[tokio::test]
async fn delete_batch_and_bucket() {
    let (s3, client) = server().await;
    for key in ["a", "b/c", "d"] {
        put(&client, key, b"1").await;
    }
    let batch = |keys: &[&str]| {
        let id = |key: &&str| ObjectIdentifier::builder().key(*key).build().unwrap();
        let delete = Delete::builder().set_objects(Some(keys.iter().map(id).collect()));
        client.delete_objects().bucket(B).delete(delete.build().unwrap())
    };
    let gone = batch(&["a", "b/c", "never", "b"]).send().await.unwrap();
    assert_eq!((gone.deleted().len(), gone.errors().len()), (4, 0));
    let bad = batch(&["d", "x/../y"]).send().await.unwrap();
    assert_eq!((bad.deleted().len(), bad.errors().len()), (1, 1));
    client
        .delete_object()
        .bucket(B)
        .key("never")
        .send()
        .await
        .unwrap();
    client.delete_bucket().bucket(B).send().await.unwrap();
    let head = client.head_bucket().bucket(B).send().await;
    assert_eq!(fault(head).0, 404);
    let left: Vec<_> = files_below(s3.root());
    assert_eq!(left, [s3.root().join(".lock")]);
    let root = s3.root().to_owned();
    s3.stop().await;
    assert!(!root.exists());
}

#[tokio::test]
async fn large_and_empty_objects() {
    let (_s3, client) = server().await;
    let data = noise(64 << 20);
    put(&client, "large", &data).await;
    assert!(read(&client, "large").await == data);
    put(&client, "empty", b"").await;
    assert!(read(&client, "empty").await.is_empty());
    let range = client.get_object().bucket(B).key("empty").range("bytes=-5");
    assert_eq!(fault(range.send().await).0, 416);
}
