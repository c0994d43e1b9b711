//! Whether a connection that nothing is asked of can be used again.

use std::io::{Read, Write};
use std::sync::mpsc;

use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::server::{Lab, Peer, VERSIONS, arrived};

/// The connection after one exchange, with its server's hand at `act`, and the check's answer after that.
async fn after(act: impl FnOnce(&mut Peer) + Send + 'static) -> (bool, Vec<u8>) {
    let lab = Lab::new(VERSIONS[1]);
    let (go, went) = mpsc::channel();
    let (address, server) = lab.serve(move |mut peer| {
        let mut request = [0; 1];
        peer.read_exact(&mut request).unwrap();
        peer.write_all(b"x").unwrap();
        peer.flush().unwrap();
        went.recv().unwrap();
        act(&mut peer);
        // Says something more only if the client still speaks.
        if peer.read_exact(&mut request).is_ok() {
            peer.write_all(b"more").unwrap();
        }
        peer.conn.send_close_notify();
        let _ = peer.flush();
    });
    let mut stream = lab.connect(address).await.unwrap();
    stream.write_all(b"?").await.unwrap();
    stream.flush().await.unwrap();
    assert_eq!(stream.read_u8().await.unwrap(), b'x');
    assert!(stream.is_idle_and_open(), "nothing has happened yet");
    assert!(stream.is_idle_and_open(), "asking changes nothing");
    go.send(()).unwrap();
    arrived(&stream).await;
    let open = stream.is_idle_and_open();
    // With either answer nothing is lost.
    let mut rest = Vec::new();
    let _ = stream.write_all(b"?").await;
    let _ = stream.flush().await;
    let _ = stream.read_to_end(&mut rest).await;
    server.join().unwrap();
    (open, rest)
}

#[tokio::test]
async fn data_that_waits_is_not_idle() {
    let written = after(|peer| {
        peer.write_all(b"early").unwrap();
        peer.flush().unwrap();
    });
    assert_eq!(written.await, (false, b"earlymore".to_vec()));
}

#[tokio::test]
async fn part_of_a_record_is_not_idle() {
    let part = after(|peer| {
        peer.conn.writer().write_all(b"early").unwrap();
        let mut record = Vec::new();
        peer.conn.write_tls(&mut record).unwrap();
        peer.sock.write_all(&record[..7]).unwrap();
        // The rest comes after the check: the client's request shows that it is over.
        let mut sock = peer.sock.try_clone().unwrap();
        while sock.peek(&mut [0]).unwrap() == 0 {}
        sock.write_all(&record[7..]).unwrap();
    });
    assert_eq!(part.await, (false, b"earlymore".to_vec()));
}

#[tokio::test]
async fn a_key_update_that_waits_is_used_up() {
    let updated = after(|peer| {
        peer.conn.refresh_traffic_keys().unwrap();
        peer.flush().unwrap();
    });
    assert_eq!(updated.await, (true, b"more".to_vec()));
}

#[tokio::test]
async fn close_notify_and_a_cut_connection_are_not_open() {
    let closed = after(|peer| {
        peer.conn.send_close_notify();
        peer.flush().unwrap();
    });
    assert!(!closed.await.0);
    let cut = after(|peer| peer.sock.shutdown(std::net::Shutdown::Both).unwrap());
    assert!(!cut.await.0);
}

#[tokio::test]
async fn session_tickets_that_wait_are_used_up() {
    let lab = Lab::new(VERSIONS[1]);
    for resumed in [false, true] {
        let (address, server) = lab.serve(|mut peer| {
            peer.conn.complete_io(&mut peer.sock).unwrap();
            let kind = peer.conn.handshake_kind();
            assert_eq!(peer.read(&mut [0]).unwrap(), 0);
            kind
        });
        let mut stream = lab.connect(address).await.unwrap();
        arrived(&stream).await;
        assert!(stream.is_idle_and_open());
        stream.shutdown().await.unwrap();
        let kind = server.join().unwrap();
        assert_eq!(
            kind == Some(rustls::HandshakeKind::Resumed),
            resumed,
            "the tickets were kept"
        );
    }
}
