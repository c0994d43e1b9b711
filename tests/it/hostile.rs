//! A server that does its worst: no wrong byte is delivered, no slot is used again too early, nothing hangs or panics,
//! and memory stays bounded.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kvgate::arena::Arena;
use kvgate::s3::fanout::BreakerPhase;
use kvgate::s3::net::{BodyWatch, Landing};
use kvgate::s3::object::{
    Condition, ErrorKind, GetRange, ObjectError, ObjectMeta, ObjectStore, Result, S3, S3Options,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::Instant;

use kvgate::cache::gateway::AfterMiss;

use crate::support::backends::{Backend, listen, open, options};
use crate::support::fixture::{Prompt, Site, arena, arena_empties, load_codes, soon, store_all};
use crate::support::program::kvgate;
use crate::support::tls_front::TlsFront;

const STALL: Duration = Duration::from_millis(300);
const ANSWER_MAX: usize = 1 << 20;
const ETAG: &str = "e";
const OBJECT_LEN: usize = 100_000;
/// The bytes of a slot before.
const POISON: u8 = 0xee;

/// The server's action once it has a request.
#[derive(Clone)]
enum Step {
    Send(Vec<u8>),
    /// One byte at a time, with pauses.
    Drip(Vec<u8>, Duration),
    /// Again and again, until nobody listens.
    Forever(Vec<u8>),
    Pause(Duration),
    Close,
    /// With a RST.
    Reset,
}

struct Hostile {
    endpoint: String,
    connections: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
}

impl Hostile {
    /// `script`: from the number of the request (from 0) and its head to what is done. `reads_body`: before that.
    async fn new(
        reads_body: bool,
        script: impl Fn(usize, &str) -> Vec<Step> + Send + Sync + 'static,
    ) -> Self {
        let (listener, endpoint) = listen().await;
        let (connections, requests) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (accepted, asked, script) = (Arc::clone(&connections), Arc::clone(&requests), Arc::new(script));
        tokio::spawn(async move {
            while let Ok((mut socket, _)) = listener.accept().await {
                accepted.fetch_add(1, Ordering::SeqCst);
                let (asked, script) = (Arc::clone(&asked), Arc::clone(&script));
                tokio::spawn(async move {
                    while let Some(head) = read_request(&mut socket, reads_body).await {
                        let number = asked.fetch_add(1, Ordering::SeqCst);
                        for step in script(number, &head) {
                            perform(&mut socket, step).await?;
                        }
                    }
                    std::io::Result::Ok(())
                });
            }
        });
        Self {
            endpoint,
            connections,
            requests,
        }
    }

    async fn always(steps: Vec<Step>) -> Self {
        Self::new(true, move |_, _| steps.clone()).await
    }

    /// Waits for as long as a busy machine may take.
    async fn store(&self) -> S3 {
        self.store_with(Duration::from_secs(20), Duration::from_secs(60))
            .await
    }

    /// Where the server hangs.
    async fn impatient(&self) -> S3 {
        self.store_with(STALL, Duration::from_secs(3)).await
    }

    async fn store_with(&self, read_timeout: Duration, request_timeout: Duration) -> S3 {
        let options = S3Options {
            read_timeout,
            request_timeout,
            answer_bytes_max: ANSWER_MAX,
            ..options(&self.endpoint)
        };
        S3::connect(&options).await.unwrap()
    }

    /// With TLS in front of it, for as long as the front lives.
    async fn store_over_tls(&self) -> (S3, TlsFront) {
        let front = TlsFront::new(&self.endpoint);
        let options = S3Options {
            ca_file: Some(front.ca_file.clone()),
            ..options(&front.endpoint)
        };
        (S3::connect(&options).await.unwrap(), front)
    }
}

async fn read_request(socket: &mut TcpStream, reads_body: bool) -> Option<String> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await.ok()?);
    }
    let head = String::from_utf8(head).unwrap().to_lowercase();
    if reads_body && let Some((_, rest)) = head.split_once("content-length: ") {
        let len = rest.split_once("\r\n").unwrap().0.parse().unwrap();
        socket.read_exact(&mut vec![0; len]).await.ok()?;
    }
    Some(head)
}

async fn perform(socket: &mut TcpStream, step: Step) -> std::io::Result<()> {
    match step {
        Step::Send(bytes) => socket.write_all(&bytes).await,
        Step::Drip(bytes, pause) => {
            for byte in bytes {
                socket.write_all(&[byte]).await?;
                tokio::time::sleep(pause).await;
            }
            Ok(())
        }
        Step::Forever(bytes) => loop {
            socket.write_all(&bytes).await?;
        },
        Step::Pause(pause) => {
            tokio::time::sleep(pause).await;
            Ok(())
        }
        Step::Close => Err(std::io::ErrorKind::ConnectionAborted.into()),
        Step::Reset => {
            socket.set_zero_linger()?;
            Err(std::io::ErrorKind::ConnectionReset.into())
        }
    }
}

/// Byte `i` of the object.
fn object_byte(i: usize) -> u8 {
    u8::try_from(i % 251).unwrap()
}

fn object(range: std::ops::Range<usize>) -> Vec<u8> {
    range.map(object_byte).collect()
}

/// The right answer to a ranged GET, for a request's head in lower case.
fn right_answer(head: &str) -> Vec<u8> {
    let range = head
        .split_once("range: bytes=")
        .unwrap()
        .1
        .split_once("\r\n")
        .unwrap()
        .0;
    let (first, last) = range.split_once('-').unwrap();
    let range = first.parse().unwrap()..last.parse::<usize>().unwrap() + 1;
    answer_to(range)
}

fn answer_to(range: std::ops::Range<usize>) -> Vec<u8> {
    let mut answer = format!(
        "HTTP/1.1 206 Partial Content\r\nETag: \"{ETAG}\"\r\nContent-Length: {}\r\nContent-Range: bytes {}-{}/{OBJECT_LEN}\r\n\r\n",
        range.len(),
        range.start,
        range.end - 1
    )
    .into_bytes();
    answer.extend(object(range));
    answer
}

/// Keeps a copy of what arrived.
#[derive(Clone, Default)]
struct Seen(Arc<std::sync::Mutex<Vec<u8>>>);

impl BodyWatch for Seen {
    fn arrived(&mut self, at: usize, bytes: &[u8]) {
        let mut seen = self.0.lock().unwrap();
        if at == 0 {
            seen.clear();
        }
        assert_eq!(seen.len(), at, "in order and without gaps");
        seen.extend_from_slice(bytes);
    }
}

/// GETs a range; the bytes only if it succeeded. Checks that nothing was delivered that is not the object's, that the
/// slot came back, and that the watch saw what the slot holds.
async fn get(store: &S3, arena: &Arena, range: std::ops::Range<usize>) -> Result<ObjectMeta> {
    let mut slot = arena
        .try_reserve(range.len())
        .expect("the slots before came back");
    slot.fill(POISON);
    let seen = Seen::default();
    let landing = Landing {
        slot,
        watch: Some(Box::new(seen.clone())),
    };
    let get = GetRange {
        key: "k",
        range: range.clone(),
        object_len: OBJECT_LEN,
        if_match: Some(ETAG),
    };
    let (landing, got) = store.get(get, landing, soon()).await;
    let seen = seen.0.lock().unwrap();
    assert!(landing.slot.starts_with(&seen), "the watch saw what landed");
    match &got {
        Ok(meta) => {
            assert!(
                landing.slot[..] == object(range)[..],
                "wrong bytes were delivered"
            );
            assert_eq!(seen.len(), landing.slot.len());
            assert_eq!((meta.len, &*meta.version.etag), (OBJECT_LEN as u64, ETAG));
        }
        Err(error)
            if matches!(
                error.kind,
                ErrorKind::Broken | ErrorKind::Timeout | ErrorKind::Deadline
            ) => {}
        Err(error) => assert!(
            landing.slot.iter().all(|&byte| byte == POISON),
            "{error}: not a byte may land"
        ),
    }
    got
}

async fn get_kind(steps: Vec<Step>) -> ErrorKind {
    let server = Hostile::always(steps).await;
    let arena = arena(1 << 16);
    let store = server.impatient().await;
    let kind = get(&store, &arena, 10..20).await.expect_err("refused").kind;
    assert_eq!(arena.stats().used_bytes, 0);
    kind
}

/// The error of a PUT of more than sockets buffer, to a server that reads nothing of it.
async fn put_error(steps: Vec<Step>) -> ObjectError {
    let server = Hostile::new(false, move |_, _| steps.clone()).await;
    let put = put(&server.impatient().await, 32 << 20).await;
    put.expect_err("it was not stored")
}

async fn put(store: &S3, len: usize) -> Result<Arc<str>> {
    let body = Bytes::from(vec![7; len]);
    store.put("k", body, Condition::Always, soon()).await
}

fn halves(answer: &[u8], at: usize, pause: Duration) -> Vec<Step> {
    let (a, b) = answer.split_at(at);
    vec![Step::Send(a.to_vec()), Step::Pause(pause), Step::Send(b.to_vec())]
}

fn text(text: &str) -> Vec<Step> {
    vec![Step::Send(text.replace('\n', "\r\n").into_bytes())]
}

#[tokio::test]
async fn the_right_answer_lands_and_the_connection_is_kept() {
    let server = Hostile::new(true, |_, head| vec![Step::Send(right_answer(head))]).await;
    let (store, arena) = (server.store().await, arena(1 << 20));
    for range in [
        0..1,
        10..20,
        0..OBJECT_LEN,
        5000..90_000,
        OBJECT_LEN - 1..OBJECT_LEN,
    ] {
        let before = store.traffic();
        get(&store, &arena, range.clone()).await.unwrap();
        let after = store.traffic();
        assert_eq!(after.landed_bytes - before.landed_bytes, range.len() as u64);
        assert!(
            after.copied_bytes - before.copied_bytes <= 4096,
            "only what comes with the head is copied: {after:?}"
        );
    }
    assert_eq!(server.connections.load(Ordering::SeqCst), 1);
    assert_eq!(store.traffic().stale, 0);
}

/// Head and body in pieces of every size: what came with the head, and what comes after it.
#[tokio::test]
async fn an_answer_may_come_in_any_pieces() {
    let whole = answer_to(10..40);
    let len = whole.len();
    let server = Hostile::new(true, move |number, _| {
        halves(&whole, number.min(len), Duration::from_millis(2))
    })
    .await;
    let (store, arena) = (server.store().await, arena(1 << 16));
    for _ in 0..=len {
        get(&store, &arena, 10..40).await.unwrap();
    }
    assert_eq!(server.connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn cut_off_after_every_possible_number_of_bytes() {
    for ending in [Step::Close, Step::Reset] {
        let whole = answer_to(10..60);
        let len = whole.len();
        let server = Hostile::new(true, move |number, _| {
            vec![Step::Send(whole[..number.min(len)].to_vec()), ending.clone()]
        })
        .await;
        let (store, arena) = (server.store().await, arena(1 << 16));
        for sent in 0..=len {
            match get(&store, &arena, 10..60).await {
                Ok(_) => assert_eq!(sent, len),
                // A RST may overtake the last bytes.
                Err(error) => assert_eq!(error.kind, ErrorKind::Broken, "after {sent}: {error}"),
            }
        }
        assert_eq!(
            server.requests.load(Ordering::SeqCst),
            len + 1,
            "each is one attempt"
        );
    }
}

/// The time without a byte is counted from the last byte, not from the request.
#[tokio::test]
async fn head_and_body_may_each_take_their_time() {
    let pause = Duration::from_millis(1800);
    let whole = answer_to(10..40);
    let server = Hostile::new(true, move |_, _| {
        let mut steps = vec![Step::Pause(pause)];
        steps.extend(halves(&whole, whole.len() - 30, pause));
        steps
    })
    .await;
    let store = server
        .store_with(Duration::from_secs(3), Duration::from_secs(20))
        .await;
    get(&store, &arena(1 << 16), 10..40).await.unwrap();
    assert_eq!(server.requests.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_answer_that_was_not_asked_for_does_not_land() {
    let ten = "HTTP/1.1 206 Partial Content\nETag: \"e\"\nContent-Length: 10\nContent-Range: bytes";
    let body = "0123456789";
    for (head, kind) in [
        (format!("{ten} 0-9/{OBJECT_LEN}"), ErrorKind::Protocol),
        (format!("{ten} 10-18/{OBJECT_LEN}"), ErrorKind::Protocol),
        (format!("{ten} 10-19/*"), ErrorKind::Protocol),
        (
            format!("{ten} 10-19/20"),
            ErrorKind::Length {
                expected: OBJECT_LEN,
                actual: Some(20),
            },
        ),
        (
            format!("{ten} 10-19/{OBJECT_LEN}").replace("\"e\"", "\"f\""),
            ErrorKind::Changed,
        ),
        (
            format!("{ten} 10-19/{OBJECT_LEN}").replace(": 10", ": 11"),
            ErrorKind::Protocol,
        ),
        (
            format!("{ten} 10-19/{OBJECT_LEN}").replace(": 10", ": 9"),
            ErrorKind::Protocol,
        ),
        (
            "HTTP/1.1 200 OK\nETag: \"e\"\nContent-Length: 10".into(),
            ErrorKind::Protocol,
        ),
        (
            "HTTP/1.1 206 Partial Content\nETag: \"e\"\nTransfer-Encoding: chunked".into(),
            ErrorKind::Protocol,
        ),
        (
            "HTTP/1.1 206 Partial Content\nETag: \"e\"".into(),
            ErrorKind::Protocol,
        ),
        (
            "HTTP/1.1 206 Partial Content\nETag: \"e\"\nContent-Length: 10".into(),
            ErrorKind::Protocol,
        ),
        // Without an ETag what came can't be told from another version.
        (
            format!("{ten} 10-19/{OBJECT_LEN}").replace("ETag: \"e\"\n", ""),
            ErrorKind::Protocol,
        ),
        (
            format!("{ten} 10-19/{OBJECT_LEN}").replace("206 Partial Content", "203 Not from the server"),
            ErrorKind::Protocol,
        ),
        // A page of something between: it says nothing of the object.
        (
            "HTTP/1.1 200 OK\nContent-Type: text/html\nContent-Length: 10".into(),
            ErrorKind::Protocol,
        ),
        ("HTTP/1.1 204 No Content".into(), ErrorKind::Protocol),
    ] {
        assert_eq!(get_kind(text(&format!("{head}\n\n{body}"))).await, kind, "{head}");
    }
}

/// It was kept for every chunk, whatever [lookup] cache_size said.
#[tokio::test]
async fn an_etag_that_is_longer_than_any_is_none() {
    for (len, is_fine) in [(256, true), (257, false), (30_000, false)] {
        let etag = "e".repeat(len);
        let head = format!("HTTP/1.1 200 OK\nContent-Length: 10\nETag: \"{etag}\"\n\n");
        let server = Hostile::always(text(&head)).await;
        let found = server.impatient().await.head("k", soon()).await;
        match found {
            Ok(meta) => assert!(is_fine && *meta.version.etag == *etag),
            Err(error) => assert!(!is_fine && error.kind == ErrorKind::Protocol, "{len}: {error}"),
        }
    }
}

#[tokio::test]
async fn bytes_after_a_body_end_the_connection() {
    let server = Hostile::new(true, |_, head| {
        let mut answer = right_answer(head);
        answer.extend(b"HTTP/1.1 200 OK\r\nETag: \"smuggled\"\r\nContent-Length: 7\r\n\r\n");
        vec![Step::Send(answer), Step::Pause(Duration::from_millis(20))]
    })
    .await;
    let (store, arena) = (server.store().await, arena(1 << 20));
    for _ in 0..5 {
        get(&store, &arena, 0..20_000).await.unwrap();
        tokio::time::sleep(Duration::from_millis(30)).await;
    }
    assert_eq!(server.connections.load(Ordering::SeqCst), 5, "none is used again");
}

#[tokio::test]
async fn heads_that_are_none() {
    let many = format!("HTTP/1.1 200 OK\n{}\n", "a: b\n".repeat(5000));
    let long = format!("HTTP/1.1 200 OK\nx: {}\n\n", "x".repeat(1 << 20));
    for head in [
        "SSH-2.0-OpenSSH_9.2\n\n",
        "<html>\n\n",
        "HTTP/1.1 206 Partial\nETag: \"e\"\n folded: yes\n\n",
        "HTTP/1.1 206 Partial\nContent-Length: 10\nContent-Length: 11\n\n",
        "HTTP/1.1 206 Partial\nContent-Length: 10\nTransfer-Encoding: chunked\n\n",
        "HTTP/1.1 206 Partial\nContent-Length: ten\n\n",
        "HTTP/1.1 101 Switching Protocols\n\n",
        "HTTP/1.1 2000 OK\n\n",
        "\n\n\n\n\n",
        "\0\0\0\0\0\0\0\0",
        &many,
        &long,
        &"HTTP/1.1 100 Continue\n\n".repeat(100),
    ] {
        let kind = get_kind(text(head)).await;
        assert!(
            matches!(kind, ErrorKind::Broken | ErrorKind::Timeout),
            "{kind:?}: {}",
            &head[..head.len().min(60)]
        );
    }
    let endless = get_kind(vec![Step::Forever(b"HTTP/1.1 100 Continue\r\n\r\n".to_vec())]).await;
    assert_eq!(endless, ErrorKind::Broken);
    let endless = get_kind(vec![Step::Forever(b"HTTP".to_vec())]).await;
    assert_eq!(endless, ErrorKind::Broken);
}

#[tokio::test]
async fn interim_answers_are_passed_over() {
    let server = Hostile::new(true, |_, head| {
        let mut answer = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nx: y\r\n\r\n".to_vec();
        answer.extend(right_answer(head));
        vec![Step::Send(answer)]
    })
    .await;
    let (store, arena) = (server.store().await, arena(1 << 16));
    get(&store, &arena, 10..20).await.unwrap();
}

#[tokio::test]
async fn a_body_that_hangs_times_out_and_one_that_drips_ends_with_the_attempt() {
    let answer = answer_to(10..20);
    let almost = answer[..answer.len() - 1].to_vec();
    let began = Instant::now();
    for steps in [
        vec![Step::Pause(Duration::from_secs(20))],
        vec![
            Step::Send(b"HTTP/1.1 20".to_vec()),
            Step::Pause(Duration::from_secs(20)),
        ],
        vec![Step::Send(almost), Step::Pause(Duration::from_secs(20))],
    ] {
        assert_eq!(get_kind(steps).await, ErrorKind::Timeout);
    }
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    // A body may drip for as long as the attempt may take, 3 s; this one takes 5 s.
    let mut head = answer_to(10..60);
    let body = head.split_off(head.len() - 50);
    let server = Hostile::always(vec![Step::Send(head), Step::Drip(body, STALL / 3)]).await;
    let got = get(&server.impatient().await, &arena(1 << 16), 10..60).await;
    assert_eq!(got.expect_err("too slow").kind, ErrorKind::Timeout);
    // A head is whole in time, or none. This one would be here after some seconds.
    let server = Hostile::always(vec![Step::Drip(answer, STALL / 10)]).await;
    let store = server.store_with(STALL, Duration::from_secs(60)).await;
    let got = get(&store, &arena(1 << 16), 10..20).await;
    assert_eq!(got.expect_err("too slow").kind, ErrorKind::Timeout);
}

/// A server that closes connections without a word after each answer, or after a while.
#[tokio::test]
async fn stale_connections_cost_no_attempt() {
    let server = Hostile::new(true, |_, head| vec![Step::Send(right_answer(head)), Step::Close]).await;
    let (store, arena) = (server.store().await, arena(1 << 20));
    for _ in 0..50 {
        get(&store, &arena, 10..20).await.unwrap();
    }
    // One that reads the next request and closes then: the client can't know before.
    let server = Hostile::new(true, |number, head| match number % 2 {
        0 => vec![Step::Send(right_answer(head))],
        _ => vec![Step::Close],
    })
    .await;
    let store = server.store().await;
    for _ in 0..10 {
        get(&store, &arena, 10..20).await.unwrap();
    }
    assert_eq!(store.traffic().stale, 9);
    assert_eq!(store.requests().get, 10, "no attempt more");
}

#[tokio::test]
async fn over_tls_bodies_land_and_connections_are_kept() {
    let server = Hostile::new(true, |_, head| vec![Step::Send(right_answer(head))]).await;
    let ((store, _front), arena) = (server.store_over_tls().await, arena(1 << 20));
    for range in [0..1, 10..20, 0..OBJECT_LEN, 5000..90_000] {
        get(&store, &arena, range).await.unwrap();
    }
    assert_eq!(server.connections.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn over_tls_cut_off_after_every_possible_number_of_bytes() {
    let whole = answer_to(10..60);
    let len = whole.len();
    let server = Hostile::new(true, move |number, _| {
        vec![Step::Send(whole[..number.min(len)].to_vec()), Step::Close]
    })
    .await;
    let ((store, _front), arena) = (server.store_over_tls().await, arena(1 << 16));
    for sent in 0..=len {
        match get(&store, &arena, 10..60).await {
            Ok(_) => assert_eq!(sent, len),
            Err(error) => assert_eq!(error.kind, ErrorKind::Broken, "after {sent}: {error}"),
        }
    }
    let requests = server.requests.load(Ordering::SeqCst);
    assert_eq!(requests, len + 1, "each is one attempt");
}

#[tokio::test]
async fn over_tls_stale_connections_cost_no_attempt() {
    let server = Hostile::new(true, |number, head| match number % 2 {
        0 => vec![Step::Send(right_answer(head))],
        _ => vec![Step::Close],
    })
    .await;
    let ((store, _front), arena) = (server.store_over_tls().await, arena(1 << 20));
    for _ in 0..10 {
        get(&store, &arena, 10..20).await.unwrap();
    }
    assert_eq!((store.traffic().stale, store.requests().get), (9, 10));
}

/// It is neither hashed for the signature, nor sent in chunks with checksums, nor announced and waited for.
#[tokio::test]
async fn an_upload_is_sent_as_it_is() {
    let (heads, seen) = std::sync::mpsc::channel();
    let server = Hostile::new(true, move |_, head| {
        heads.send(head.to_owned()).unwrap();
        text("HTTP/1.1 200 OK\nETag: \"e\"\nContent-Length: 0\n\n")
    })
    .await;
    put(&server.store().await, 1 << 20).await.unwrap();
    let head = seen.recv().unwrap();
    assert!(head.contains("content-length: 1048576\r\n"), "{head}");
    assert!(
        head.contains("x-amz-content-sha256: unsigned-payload\r\n"),
        "{head}"
    );
    for odd in [
        "x-amz-checksum",
        "aws-chunked",
        "transfer-encoding",
        "expect:",
        "x-amz-trailer",
    ] {
        assert!(!head.contains(odd), "{odd}: {head}");
    }
}

#[tokio::test]
async fn a_refusal_while_the_body_is_sent() {
    let refusal = "HTTP/1.1 403 Forbidden\nx-amz-request-id: 1\nContent-Length: 0\n\n";
    for ending in [Step::Pause(Duration::from_millis(500)), Step::Close] {
        let mut steps = text(refusal);
        steps.push(ending);
        let error = put_error(steps).await;
        assert!(
            matches!(error.kind, ErrorKind::Denied | ErrorKind::Broken),
            "a RST may overtake the answer: {error}"
        );
    }
    // Nobody can have stored what was not sent.
    let error = put_error(text("HTTP/1.1 200 OK\nETag: \"e\"\nContent-Length: 0\n\n")).await;
    assert_eq!(error.kind, ErrorKind::Broken, "{error}");
    // One that never reads: the time without a byte ends it.
    let error = put_error(vec![Step::Pause(Duration::from_secs(20))]).await;
    assert_eq!(error.kind, ErrorKind::Timeout, "{error}");
}

#[tokio::test]
async fn other_bodies_are_read_in_every_framing_up_to_a_limit() {
    let xml = "<Error><Code>NoSuchKey</Code></Error>";
    let chunks = format!(
        "{:x};ext=1\n{}\n{:x}\n{}\n0\nTrailer: x\n\n",
        10,
        &xml[..10],
        xml.len() - 10,
        &xml[10..]
    );
    for good in [
        format!("HTTP/1.1 404 Not Found\nContent-Length: {}\n\n{xml}", xml.len()),
        format!("HTTP/1.1 404 Not Found\nTransfer-Encoding: chunked\n\n{chunks}"),
    ] {
        assert_eq!(get_kind(text(&good)).await, ErrorKind::NotFound, "{good}");
    }
    let mut until_close = text(&format!("HTTP/1.1 404 Not Found\n\n{xml}"));
    until_close.push(Step::Close);
    assert_eq!(get_kind(until_close).await, ErrorKind::NotFound);
    // Of a refusal that is too long, its status is enough.
    for long in [
        format!("HTTP/1.1 403 Forbidden\nContent-Length: {}\n\n", usize::MAX),
        "HTTP/1.1 403 Forbidden\nTransfer-Encoding: chunked\n\nffffffffffffffff\n".into(),
    ] {
        assert_eq!(get_kind(text(&long)).await, ErrorKind::Denied, "{long}");
    }
    for bad in [
        "HTTP/1.1 404 Not Found\nTransfer-Encoding: chunked\n\nzz\n".into(),
        "HTTP/1.1 404 Not Found\nTransfer-Encoding: chunked\n\n\n\n".into(),
        "HTTP/1.1 404 Not Found\nTransfer-Encoding: chunked\n\n5\nhello\n;ext=1\n\n".into(),
        "HTTP/1.1 404 Not Found\nTransfer-Encoding: chunked\n\n2\nabcdef\n".into(),
        format!(
            "HTTP/1.1 404 Not Found\nTransfer-Encoding: chunked\n\n{}",
            "1".repeat(10_000)
        ),
        format!(
            "HTTP/1.1 404 Not Found\nTransfer-Encoding: chunked\n\n0\n{}\n",
            "a: b\n".repeat(1000)
        ),
    ] {
        let kind = get_kind(text(&bad)).await;
        assert!(
            matches!(kind, ErrorKind::Broken | ErrorKind::Protocol),
            "{kind:?}: {bad:.99}"
        );
    }
    for endless in ["\n", "Transfer-Encoding: chunked\n\n"] {
        let steps = |status: &str| {
            let mut steps = text(&format!("HTTP/1.1 {status}\n{endless}"));
            steps.push(Step::Forever(b"4\r\nabcd\r\n".repeat(1000)));
            steps
        };
        assert_eq!(
            get_kind(steps("500 Oh")).await,
            ErrorKind::Unavailable,
            "{endless}"
        );
        let server = Hostile::always(steps("200 OK")).await;
        let read = server.impatient().await.read("k", ANSWER_MAX, soon()).await;
        assert_eq!(read.expect_err("endless").kind, ErrorKind::Protocol, "{endless}");
    }
}

/// The bytes of a GET that was given up don't end in a slot that is used again.
#[tokio::test]
async fn a_get_that_is_dropped_writes_nothing_more() {
    let server = Hostile::new(true, |_, head| {
        let answer = right_answer(head);
        halves(&answer, answer.len() / 2, Duration::from_millis(60))
    })
    .await;
    let (store, arena) = (server.store().await, arena(1 << 17));
    for wait_ms in [0, 1, 5, 20, 50] {
        let slot = arena
            .try_reserve(OBJECT_LEN)
            .expect("the one before is free again");
        let wanted = GetRange {
            key: "k",
            range: 0..OBJECT_LEN,
            object_len: OBJECT_LEN,
            if_match: None,
        };
        let get = store.get(wanted, Landing::new(slot), soon());
        assert!(
            tokio::time::timeout(Duration::from_millis(wait_ms), get)
                .await
                .is_err()
        );
        let mut again = arena.try_reserve(OBJECT_LEN).expect("free at once");
        again.fill(POISON);
        tokio::time::sleep(Duration::from_millis(100)).await;
        assert!(
            again.iter().all(|&byte| byte == POISON),
            "written after {wait_ms} ms"
        );
    }
    get(&store, &arena, 0..OBJECT_LEN).await.unwrap();
}

/// A line to a good server on which bytes are flipped and connections cut, at random.
async fn bad_line(upstream: String) -> String {
    let (listener, endpoint) = listen().await;
    tokio::spawn(async move {
        while let Ok((client, _)) = listener.accept().await {
            let upstream = upstream.trim_start_matches("http://").to_owned();
            tokio::spawn(async move {
                let (mut from_client, mut to_client) = client.into_split();
                let server = TcpStream::connect(upstream).await?;
                let (mut from_server, mut to_server) = server.into_split();
                tokio::spawn(async move { tokio::io::copy(&mut from_client, &mut to_server).await });
                let mut buf = vec![0; 30_000];
                loop {
                    let len = from_server.read(&mut buf).await?;
                    if len == 0 {
                        return Ok(());
                    }
                    let bytes = &mut buf[..len];
                    match fastrand::u32(..20) {
                        0 => bytes[fastrand::usize(..len)] ^= 1 << fastrand::u32(..8),
                        1 => return to_client.write_all(&bytes[..fastrand::usize(..len)]).await,
                        2 => bytes.rotate_left(1),
                        _ => {}
                    }
                    to_client.write_all(bytes).await?;
                }
            });
        }
    });
    endpoint
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_over_a_bad_line_are_right_or_misses() {
    let backend = Backend::embedded().await;
    let site = Site::new(backend.store().await).await;
    let prompt = Prompt::new(12);
    store_all(&site.gateway(), &prompt).await;
    let options = S3Options {
        endpoint: Some(bad_line(backend.endpoints[0].clone()).await),
        read_timeout: STALL,
        ..backend.options()
    };
    let gateway = site.gateway_over(open(&options).await);
    let mut loaded = 0;
    for _ in 0..20 {
        // The bytes of every loaded chunk are compared.
        let codes = load_codes(&gateway, &prompt, AfterMiss::Continue).await;
        loaded += codes.iter().filter(|&&code| code == "ok").count();
        gateway.forget_existence();
    }
    assert!(loaded > 0, "some come through");
    arena_empties(&gateway).await;
    assert_eq!(
        load_codes(&site.gateway(), &prompt, AfterMiss::Stop).await,
        ["ok"; 12],
        "nothing at the server was harmed"
    );
}

#[tokio::test]
async fn giving_up_while_waiting_for_a_connection_says_nothing_of_the_server() {
    let server = Hostile::always(vec![Step::Pause(Duration::from_secs(20))]).await;
    let one = S3Options {
        connections_max: 1,
        ..options(&server.endpoint)
    };
    let store = S3::connect(&one).await.unwrap();
    let heads = futures::future::join_all((0..20).map(|_| store.head("k", soon())));
    let given_up = tokio::time::timeout(Duration::from_millis(600), heads).await;
    assert!(given_up.is_err());
    let state = &store.endpoints()[0];
    // The one that was sent counts, and it alone.
    assert_eq!(server.requests.load(Ordering::SeqCst), 1);
    assert_eq!(state.totals.given_up, 20);
    assert_eq!(state.breaker, BreakerPhase::Closed);
}

/// Not hostile, but it hears whose keys requests are signed with.
#[tokio::test]
async fn keys_that_are_rotated_in_a_file_are_found() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("credentials");
    let write = |key: &str| {
        let text = format!("[default]\naws_access_key_id = {key}\naws_secret_access_key = s\n");
        std::fs::write(&file, text).unwrap();
    };
    let heard = Arc::new(std::sync::Mutex::new(String::new()));
    let server = Hostile::new(true, {
        let heard = Arc::clone(&heard);
        move |_, head| {
            let (_, rest) = head.split_once("credential=").unwrap();
            *heard.lock().unwrap() = rest.split_once('/').unwrap().0.to_owned();
            match head.starts_with("head") {
                true => text("HTTP/1.1 200 OK\nETag: \"e\"\nContent-Length: 1048576\n\n"),
                false => {
                    text("HTTP/1.1 200 OK\nContent-Length: 39\n\n<ListBucketResult></ListBucketResult>\n")
                }
            }
        }
    })
    .await;
    write("old");
    let args = "bench head --bucket keys --objects 1 --object-size 1MiB --part-size 1MiB -t 1 --rate-iops 20 --time-limit 2m";
    let mut bench = kvgate(home.path(), &args.split(' ').collect::<Vec<_>>())
        .env("AWS_SHARED_CREDENTIALS_FILE", &file)
        .env("KVGATE__S3__ENDPOINT", &server.endpoint)
        .env("KVGATE__S3__CREDENTIALS_TTL", "1s")
        .env("AWS_EC2_METADATA_DISABLED", "true")
        .stdout(std::process::Stdio::null())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let hears = async |key: &str| {
        let heard = async {
            while *heard.lock().unwrap() != key {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        let in_time = tokio::time::timeout(Duration::from_secs(60), heard).await;
        in_time.unwrap_or_else(|_| panic!("nothing is signed with {key:?}"));
    };
    hears("old").await;
    // While it is being written, the old ones do.
    std::fs::write(&file, "").unwrap();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    write("new");
    hears("new").await;
    assert!(bench.try_wait().unwrap().is_none(), "it goes on");
}
