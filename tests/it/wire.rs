//! Answers that no good S3 server gives, from a socket: none of them is taken for an absence or an end.

use std::time::Duration;

use bytes::Bytes;
use kvgate::s3::object::{Condition, ErrorKind, ObjectStore, S3, S3Options};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::backends::{listen, options};
use crate::support::fixture::soon;

const STALL: Duration = Duration::from_millis(300);

async fn answering(answer: impl Into<String>, body_len: usize) -> S3 {
    answering_each(vec![answer.into()], body_len).await
}

/// A store behind which each connection gets the next of these answers (the last one again and again), once its
/// request's body of `body_len` bytes was read slowly.
async fn answering_each(answers: Vec<String>, body_len: usize) -> S3 {
    let (listener, endpoint) = listen().await;
    tokio::spawn(async move {
        let last = answers.last().cloned().into_iter().cycle();
        let mut answers = answers.into_iter().chain(last);
        while let (Ok((mut socket, _)), Some(answer)) = (listener.accept().await, answers.next()) {
            tokio::spawn(async move {
                let mut head = Vec::new();
                while !head.ends_with(b"\r\n\r\n") {
                    head.push(socket.read_u8().await?);
                }
                let mut left = vec![0; body_len];
                for piece in left.chunks_mut(4 << 20) {
                    socket.read_exact(piece).await?;
                    tokio::time::sleep(STALL / 4).await;
                }
                socket.write_all(answer.as_bytes()).await?;
                // Kept open: what does not come must be noticed by the clock.
                tokio::time::sleep(Duration::from_secs(5)).await;
                std::io::Result::Ok(())
            });
        }
    });
    let options = S3Options {
        read_timeout: STALL,
        ..options(&endpoint)
    };
    S3::connect(&options).await.unwrap()
}

async fn head_kind(answer: &str) -> ErrorKind {
    answering(answer, 0)
        .await
        .head("k", soon())
        .await
        .unwrap_err()
        .kind
}

#[tokio::test]
async fn a_404_that_is_not_from_s3_is_no_absence() {
    let bare = "HTTP/1.1 404 Not Found\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
    assert_eq!(
        head_kind(bare).await,
        ErrorKind::NotFound,
        "as far as is known this server has no request ids"
    );
    let good = "HTTP/1.1 200 OK\r\nx-amz-request-id: 7\r\netag: \"e\"\r\nconnection: close\r\ncontent-length: 9\r\n\r\n";
    let store = answering_each(vec![good.into(), bare.into()], 0).await;
    assert_eq!(store.head("k", soon()).await.unwrap().len, 9);
    assert_eq!(
        store.head("k", soon()).await.unwrap_err().kind,
        ErrorKind::Unavailable,
        "a proxy's"
    );
    let from_s3 = "HTTP/1.1 404 Not Found\r\nx-amz-request-id: 7\r\ncontent-length: 0\r\n\r\n";
    assert_eq!(head_kind(from_s3).await, ErrorKind::NotFound);
    let page = "HTTP/1.1 404 Not Found\r\ncontent-length: 13\r\n\r\n<p>Nothing</p>";
    let error = answering(page, 0).await.read("k", 10, soon()).await.unwrap_err();
    assert_ne!(error.kind, ErrorKind::NotFound, "{error}");
}

#[tokio::test]
async fn heads_that_say_nothing_are_errors_and_hanging_ones_time_out() {
    assert_eq!(
        head_kind("HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\n").await,
        ErrorKind::Protocol,
        "no ETag"
    );
    assert_eq!(head_kind("").await, ErrorKind::Timeout);
    assert_eq!(head_kind("HTTP/1.1 200").await, ErrorKind::Timeout);
    assert!(head_kind("SSH-2.0-OpenSSH_9.2\r\n").await.retryable());
    assert_eq!(
        head_kind("HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\n\r\n").await,
        ErrorKind::Throttled
    );
    assert_eq!(
        head_kind("HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n").await,
        ErrorKind::Denied
    );
}

#[tokio::test]
async fn a_slow_upload_is_not_a_stalled_one() {
    let len = 32 << 20;
    let store = answering("HTTP/1.1 200 OK\r\netag: \"e\"\r\ncontent-length: 0\r\n\r\n", len).await;
    let put = store
        .put("k", Bytes::from(vec![7; len]), Condition::Always, soon())
        .await;
    assert_eq!(
        &*put.unwrap(),
        "e",
        "it took twice the time without a byte, but bytes flowed"
    );
}

#[tokio::test]
async fn a_listing_that_breaks_off_is_an_error() {
    let list = async |xml: &str| {
        let answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{xml}", xml.len());
        answering(answer, 0)
            .await
            .list("p", None, soon())
            .await
            .map_err(|error| error.kind)
    };
    let page = |inner: &str| {
        format!(
            "<ListBucketResult xmlns=\"http://s3.amazonaws.com/doc/2006-03-01/\">{inner}</ListBucketResult>"
        )
    };
    let good = "<Contents><Key>p1</Key><Size>3</Size></Contents><IsTruncated>false</IsTruncated>";
    assert_eq!(list(&page(good)).await.unwrap().objects.len(), 1);
    let no_token = "<Contents><Key>p1</Key><Size>3</Size></Contents><IsTruncated>true</IsTruncated>";
    assert_eq!(list(&page(no_token)).await.unwrap_err(), ErrorKind::Protocol);
    let no_size = "<Contents><Key>p1</Key></Contents><IsTruncated>false</IsTruncated>";
    assert_eq!(list(&page(no_size)).await.unwrap_err(), ErrorKind::Protocol);
}

#[tokio::test]
async fn an_idle_connection_is_closed_before_the_server_would() {
    let (listener, endpoint) = listen().await;
    let options = S3Options {
        idle_timeout: Duration::from_millis(100),
        ..options(&endpoint)
    };
    let store = S3::connect(&options).await.unwrap();
    let server = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        let mut bytes = [0; 4096];
        assert!(socket.read(&mut bytes).await.unwrap() > 0, "the request");
        let answer = "HTTP/1.1 404 Not Found\r\nx-amz-request-id: 1\r\nContent-Length: 0\r\n\r\n";
        socket.write_all(answer.as_bytes()).await.unwrap();
        socket.read(&mut bytes).await.unwrap()
    });
    assert_eq!(
        store.head("k", soon()).await.unwrap_err().kind,
        ErrorKind::NotFound
    );
    let end = tokio::time::timeout(Duration::from_secs(20), server);
    assert_eq!(
        end.await
            .expect("it is closed, though nothing else is asked for")
            .unwrap(),
        0
    );
}
