//! Changed, repeated and endless records: an error each time, never a wrong byte or a panic.

use std::io::{ErrorKind, Read, Write};

use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use super::server::{Lab, PATIENCE, VERSIONS, pattern, serve_plain, write_in_pieces};

/// The bytes that the client reads when `spoil` changes the server's records, and how that ends.
async fn spoiled(
    lab: &Lab,
    bytes: &[u8],
    spoil: impl FnOnce(&mut Vec<u8>) + Send + 'static,
) -> (Vec<u8>, std::io::Result<usize>) {
    let sent = bytes.to_vec();
    let (address, server) = lab.serve(move |mut peer| {
        peer.conn.complete_io(&mut peer.sock).unwrap();
        let mut records = Vec::new();
        for part in sent.chunks(5_000) {
            peer.conn.writer().write_all(part).unwrap();
            while peer.conn.wants_write() {
                peer.conn.write_tls(&mut records).unwrap();
            }
        }
        spoil(&mut records);
        peer.sock.write_all(&records).unwrap();
        peer.sock.shutdown(std::net::Shutdown::Write).unwrap();
        // The client's error.
        let _ = peer.sock.read_to_end(&mut Vec::new());
    });
    let mut stream = lab.connect(address).await.unwrap();
    let mut got = Vec::new();
    let end = stream.read_to_end(&mut got).await;
    assert!(!stream.is_idle_and_open());
    drop(stream);
    server.join().unwrap();
    (got, end)
}

#[tokio::test]
async fn no_changed_byte_gets_through() {
    let lab = Lab::new(VERSIONS[1]);
    let bytes = pattern(20_000);
    let mut rng = fastrand::Rng::with_seed(7);
    for _ in 0..40 {
        // Somewhere in the last three of four records.
        let (at, flip) = (rng.usize(5_100..20_000), 1 << rng.u8(0..8));
        let (got, end) = spoiled(&lab, &bytes, move |records| records[at] ^= flip).await;
        assert!(got.len() < bytes.len() && bytes.starts_with(&got), "byte {at}");
        let kind = end.unwrap_err().kind();
        // A changed length may also make us wait for more than ever comes.
        assert!(
            matches!(kind, ErrorKind::InvalidData | ErrorKind::UnexpectedEof),
            "byte {at}: {kind}"
        );
    }
}

#[tokio::test]
async fn whole_records_before_garbage_are_read() {
    let lab = Lab::new(VERSIONS[1]);
    let bytes = pattern(10_000);
    let (got, end) = spoiled(&lab, &bytes, |records| records.extend_from_slice(&[0x55; 300])).await;
    assert!(got == bytes);
    assert_eq!(end.unwrap_err().kind(), ErrorKind::InvalidData);
}

#[tokio::test]
async fn an_error_stays_though_the_server_says_no_more() {
    let lab = Lab::new(VERSIONS[1]);
    let (address, server) = lab.serve(|mut peer| {
        peer.conn.complete_io(&mut peer.sock).unwrap();
        peer.sock.write_all(&[0x55; 300]).unwrap();
        peer
    });
    let mut stream = lab.connect(address).await.unwrap();
    for _ in 0..3 {
        let read = timeout(PATIENCE, stream.read(&mut [0])).await;
        let error = read.expect("waits for nothing").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
    }
    assert!(!stream.is_idle_and_open());
    drop(server);
}

#[tokio::test]
async fn a_record_twice_is_an_error() {
    let lab = Lab::new(VERSIONS[1]);
    let bytes = pattern(5_000);
    let (got, end) = spoiled(&lab, &bytes, |records| records.extend_from_within(..)).await;
    assert!(got == bytes);
    assert_eq!(end.unwrap_err().kind(), ErrorKind::InvalidData);
}

/// Reads until an error, with a server that says `bytes` instead of its hello.
async fn greeted_with(bytes: Vec<u8>) -> std::io::Error {
    let lab = Lab::new(VERSIONS[1]);
    let (address, server) = serve_plain(move |mut tcp| {
        let _ = tcp.write_all(&bytes);
        let _ = tcp.shutdown(std::net::Shutdown::Write);
        let _ = tcp.read_to_end(&mut Vec::new());
    });
    let error = lab.connect(address).await.err().unwrap();
    server.join().unwrap();
    error
}

#[tokio::test]
async fn a_handshake_message_that_never_ends_does_not_fill_memory() {
    // A ServerHello of 65,535 bytes, one byte a record: 393 KiB of records.
    let mut hello = vec![0; 65_539];
    hello[..4].copy_from_slice(&[2, 0, 0xff, 0xff]);
    let records = hello.iter().flat_map(|byte| [22, 3, 3, 0, 1, *byte]).collect();
    let error = greeted_with(records).await;
    assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
}

#[tokio::test]
async fn a_changed_byte_in_the_handshake_is_an_error_and_no_panic() {
    let mut rng = fastrand::Rng::with_seed(11);
    for version in VERSIONS {
        let lab = Lab::new(version);
        for _ in 0..60 {
            let (at, flip) = (rng.usize(..700), 1 << rng.u8(..8));
            let (address, server) = lab.serve(move |mut peer| {
                while peer.conn.wants_read() && !peer.conn.wants_write() {
                    peer.conn.read_tls(&mut peer.sock).unwrap();
                    peer.conn.process_new_packets().unwrap();
                }
                let mut flight = Vec::new();
                while peer.conn.wants_write() {
                    peer.conn.write_tls(&mut flight).unwrap();
                }
                if let Some(byte) = flight.get_mut(at) {
                    *byte ^= flip;
                }
                peer.sock.write_all(&flight).unwrap();
                peer.sock.shutdown(std::net::Shutdown::Write).unwrap();
                let _ = peer.sock.read_to_end(&mut Vec::new());
            });
            // The version in a record's head is for show: a change there is fine until the connection ends.
            if let Ok(mut stream) = lab.connect(address).await {
                stream.read_to_end(&mut Vec::new()).await.unwrap_err();
            }
            server.join().unwrap();
        }
    }
}

#[tokio::test]
async fn noise_instead_of_a_hello_is_an_error() {
    let mut rng = fastrand::Rng::with_seed(3);
    for len in [1, 5, 6, 100, 20_000] {
        for kind in [rng.u8(..), 20, 21, 22, 23] {
            let mut noise = vec![kind, 3, 3];
            noise.extend(std::iter::repeat_with(|| rng.u8(..)).take(len));
            greeted_with(noise).await;
        }
    }
}

#[tokio::test]
async fn empty_and_tiny_records_are_read() {
    let lab = Lab::new(VERSIONS[1]);
    let bytes = pattern(3_000);
    let sent = bytes.clone();
    let (address, server) = lab.serve(move |mut peer| {
        write_in_pieces(&mut peer, &sent, || 1);
        peer.conn.send_close_notify();
        peer.flush().unwrap();
    });
    let mut stream = lab.connect(address).await.unwrap();
    let mut got = Vec::new();
    stream.read_to_end(&mut got).await.unwrap();
    assert!(got == bytes);
    server.join().unwrap();
}
