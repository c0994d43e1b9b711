//! Bytes both ways: in pieces of any length, through key updates, dropped reads and full sockets.

use std::future::poll_fn;
use std::io::{ErrorKind, Read, Write};
use std::pin::Pin;
use std::sync::mpsc;
use std::task::Poll;

use fastrand::Rng;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::timeout;

use super::server::{Lab, PATIENCE, VERSIONS, arrived, pattern, write_in_pieces};
use crate::s3::net::lowat::LowWater;
use crate::s3::net::tls::TlsStream;

/// Reads `len` bytes with `ReadBuf`s as long as `read_len` says.
async fn read_in_pieces(
    stream: &mut (impl AsyncRead + Unpin),
    len: usize,
    mut read_len: impl FnMut() -> usize,
) -> Vec<u8> {
    let mut bytes = vec![0xEE; len];
    let mut at = 0;
    while at < len {
        let end = (at + read_len().max(1)).min(len);
        let read = stream.read(&mut bytes[at..end]).await.unwrap();
        assert!(read > 0, "the end came after {at} of {len} bytes");
        at += read;
    }
    bytes
}

fn assert_same(got: &[u8], wanted: &[u8]) {
    let differs = got.iter().zip(wanted).position(|(a, b)| a != b);
    assert!(
        got.len() == wanted.len() && differs.is_none(),
        "differs at {differs:?}, {} and {} bytes",
        got.len(),
        wanted.len()
    );
}

#[tokio::test]
async fn both_ways_at_once_in_pieces_of_all_lengths() {
    for (seed, version) in (1..).zip(VERSIONS) {
        let (down, up) = (pattern(3_000_017), pattern(1_500_007));
        let lab = Lab::new(version);
        let (to_send, wanted) = (down.clone(), up.len());
        let (address, server) = lab.serve(move |mut peer| {
            // One thread: writes all while the client's writes wait in the sockets, then reads.
            let mut rng = Rng::with_seed(seed);
            write_in_pieces(&mut peer, &to_send, || match rng.u8(0..4) {
                0 => rng.usize(1..40),
                1 => 16 * 1024,
                _ => rng.usize(1..40_000),
            });
            let mut received = vec![0; wanted];
            peer.read_exact(&mut received).unwrap();
            peer.conn.send_close_notify();
            peer.flush().unwrap();
            received
        });
        let (mut reader, mut writer) = tokio::io::split(lab.connect(address).await.unwrap());
        let write = async {
            let mut rng = Rng::with_seed(seed);
            let mut rest = up.as_slice();
            while !rest.is_empty() {
                let (piece, after) = rest.split_at(rng.usize(1..200_000).min(rest.len()));
                writer.write_all(piece).await.unwrap();
                rest = after;
            }
            writer.flush().await.unwrap();
        };
        let mut rng = Rng::with_seed(seed);
        let read = read_in_pieces(&mut reader, down.len(), || match rng.u8(0..3) {
            0 => rng.usize(1..40),
            _ => rng.usize(1..300_000),
        });
        let ((), got) = tokio::join!(write, read);
        assert_same(&got, &down);
        assert_same(&server.join().unwrap(), &up);
        assert_eq!(reader.read(&mut [0]).await.unwrap(), 0);
    }
}

#[tokio::test]
async fn one_byte_at_a_time() {
    let bytes = pattern(40_000);
    let lab = Lab::new(VERSIONS[1]);
    let sent = bytes.clone();
    let (address, server) = lab.serve(move |mut peer| write_in_pieces(&mut peer, &sent, || 16_384));
    let mut stream = lab.connect(address).await.unwrap();
    let got = read_in_pieces(&mut stream, bytes.len(), || 1).await;
    assert_same(&got, &bytes);
    server.join().unwrap();
}

#[tokio::test]
async fn many_records_come_with_one_read() {
    let bytes = pattern(5 * 16_384);
    let lab = Lab::new(VERSIONS[1]);
    let sent = bytes.clone();
    let (written, is_written) = mpsc::channel();
    let (address, server) = lab.serve(move |mut peer| {
        write_in_pieces(&mut peer, &sent, || 16_384);
        written.send(()).unwrap();
        peer
    });
    let mut stream = lab.connect(address).await.unwrap();
    tokio::task::spawn_blocking(move || is_written.recv().unwrap())
        .await
        .unwrap();
    let mut got = vec![0; bytes.len()];
    let mut reads = 0;
    let mut at = 0;
    while at < got.len() {
        at += stream.read(&mut got[at..]).await.unwrap();
        reads += 1;
    }
    assert!(reads <= 3, "{reads} reads for 5 records");
    assert_same(&got, &bytes);
    drop(server);
}

#[tokio::test]
async fn a_low_water_mark_does_not_count_what_has_come() {
    let bytes = pattern(100_000);
    let lab = Lab::new(VERSIONS[1]);
    // The last byte of a record's head, most of a record, the whole of one and a part of the next.
    for cut in [5, 16_000, 30_000] {
        let (go, went) = mpsc::channel();
        let sent = bytes.clone();
        let (address, server) = lab.serve(move |mut peer| {
            peer.conn.complete_io(&mut peer.sock).unwrap();
            peer.conn.set_buffer_limit(None);
            peer.conn.writer().write_all(&sent).unwrap();
            let mut records = Vec::new();
            while peer.conn.wants_write() {
                peer.conn.write_tls(&mut records).unwrap();
            }
            went.recv().unwrap();
            peer.sock.write_all(&records[..cut]).unwrap();
            went.recv().unwrap();
            peer.sock.write_all(&records[cut..]).unwrap();
            peer
        });
        let mut stream = lab.connect(address).await.unwrap();
        arrived(&stream).await;
        assert!(stream.is_idle_and_open(), "the tickets are used up");
        let mut got = vec![0; bytes.len()];
        go.send(()).unwrap();
        arrived(&stream).await;
        let (came, mut at) = stream.read_now(&mut got).unwrap();
        assert!(came);
        let mut low_water = LowWater::tls();
        stream.expect(&mut low_water, got.len() - at).unwrap();
        go.send(()).unwrap();
        while at < got.len() {
            let read = timeout(PATIENCE, stream.read(&mut got[at..])).await;
            at += read.expect("waits for nothing").unwrap();
            stream.expect(&mut low_water, got.len() - at).unwrap();
        }
        assert_same(&got, &bytes);
        drop(server);
    }
}

#[tokio::test]
async fn the_end_with_and_without_close_notify() {
    for clean in [true, false] {
        let bytes = pattern(20_000);
        let lab = Lab::new(VERSIONS[1]);
        let sent = bytes.clone();
        let (address, server) = lab.serve(move |mut peer| {
            peer.write_all(&sent).unwrap();
            if clean {
                peer.conn.send_close_notify();
            }
            peer.flush().unwrap();
            peer.sock.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut stream = lab.connect(address).await.unwrap();
        let got = read_in_pieces(&mut stream, bytes.len(), || 7_000).await;
        assert_same(&got, &bytes);
        for _ in 0..2 {
            match stream.read(&mut [0; 10]).await {
                Ok(len) => assert!(clean && len == 0),
                Err(error) => assert!(!clean && error.kind() == ErrorKind::UnexpectedEof, "{error}"),
            }
        }
        server.join().unwrap();
    }
}

#[tokio::test]
async fn our_close_notify_reaches_the_server() {
    let lab = Lab::new(VERSIONS[1]);
    let (address, server) = lab.serve(|mut peer| {
        let mut received = Vec::new();
        peer.read_to_end(&mut received).map(|_| received)
    });
    let mut stream = lab.connect(address).await.unwrap();
    stream.write_all(b"all of it").await.unwrap();
    stream.shutdown().await.unwrap();
    assert_eq!(server.join().unwrap().unwrap(), b"all of it");
    assert_eq!(
        stream.write(b"more").await.unwrap_err().kind(),
        ErrorKind::BrokenPipe
    );
}

#[tokio::test]
async fn key_updates_between_records() {
    let bytes = pattern(300_000);
    let lab = Lab::new(VERSIONS[1]);
    let sent = bytes.clone();
    let (address, server) = lab.serve(move |mut peer| {
        peer.conn.complete_io(&mut peer.sock).unwrap();
        let mut echoed = vec![0; 10];
        for part in sent.chunks(30_000) {
            peer.conn.refresh_traffic_keys().unwrap();
            peer.write_all(part).unwrap();
            peer.read_exact(&mut echoed).unwrap();
            assert_eq!(echoed, part[..10]);
        }
    });
    let mut stream = lab.connect(address).await.unwrap();
    for part in bytes.chunks(30_000) {
        let got = read_in_pieces(&mut stream, part.len(), || 9_999).await;
        assert_same(&got, part);
        stream.write_all(&part[..10]).await.unwrap();
        stream.flush().await.unwrap();
    }
    server.join().unwrap();
}

/// Polls a read once and drops it.
async fn read_once(stream: &mut TlsStream, into: &mut [u8]) -> usize {
    poll_fn(|cx| {
        let mut into = ReadBuf::new(into);
        Poll::Ready(match Pin::new(&mut *stream).poll_read(cx, &mut into) {
            Poll::Ready(done) => done.map(|()| into.filled().len()).unwrap(),
            Poll::Pending => 0,
        })
    })
    .await
}

#[tokio::test]
async fn reads_dropped_in_the_middle_of_a_record_lose_nothing() {
    let bytes = pattern(60_000);
    let lab = Lab::new(VERSIONS[1]);
    let sent = bytes.clone();
    let (address, server) = lab.serve(move |mut peer| {
        peer.conn.complete_io(&mut peer.sock).unwrap();
        for part in sent.chunks(4_000) {
            peer.conn.writer().write_all(part).unwrap();
            let mut records = Vec::new();
            while peer.conn.wants_write() {
                peer.conn.write_tls(&mut records).unwrap();
            }
            for piece in records.chunks(700) {
                peer.sock.write_all(piece).unwrap();
            }
        }
    });
    let mut stream = lab.connect(address).await.unwrap();
    let mut got = Vec::new();
    let mut piece = [0; 1_000];
    while got.len() < bytes.len() {
        let len = read_once(&mut stream, &mut piece).await;
        got.extend_from_slice(&piece[..len]);
        if len == 0 {
            tokio::task::yield_now().await;
        }
    }
    assert_same(&got, &bytes);
    server.join().unwrap();
}

#[tokio::test]
async fn writes_wait_for_a_full_socket_and_lose_nothing_when_dropped() {
    let lab = Lab::new(VERSIONS[1]);
    let (go, went) = mpsc::channel();
    let (address, server) = lab.serve(move |mut peer| {
        peer.conn.complete_io(&mut peer.sock).unwrap();
        went.recv().unwrap();
        let mut received = Vec::new();
        peer.read_to_end(&mut received).unwrap();
        received
    });
    let mut stream = lab.connect(address).await.unwrap();
    let bytes = pattern(100_003);
    let mut written = Vec::new();
    let mut pending = 0;
    while pending < 5 {
        assert!(written.len() < 64 << 20, "the socket is never full");
        let next = &bytes[written.len() % bytes.len()..];
        // Polled once and dropped.
        match poll_fn(|cx| Poll::Ready(Pin::new(&mut stream).poll_write(cx, next))).await {
            Poll::Ready(len) => written.extend_from_slice(&next[..len.unwrap()]),
            Poll::Pending => pending += 1,
        }
    }
    go.send(()).unwrap();
    stream.write_all(b"the last").await.unwrap();
    written.extend_from_slice(b"the last");
    stream.shutdown().await.unwrap();
    assert_same(&server.join().unwrap(), &written);
}
