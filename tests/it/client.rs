//! The client, against a server that is not one.

use kvgate::engine::client::{Client, DaemonAddress};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

async fn read_head(stream: &mut UnixStream) {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.unwrap());
    }
}

async fn answer(stream: &mut UnixStream) {
    read_head(stream).await;
    let ok = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok";
    stream.write_all(ok).await.unwrap();
}

/// The first one may have been carried out: a commit that had been was then told that the slot is not its session's.
#[tokio::test]
async fn a_call_whose_answer_was_lost_was_made_twice() {
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let client = Client::new(DaemonAddress::Unix(socket));
    let server = async {
        let (mut kept, _) = listener.accept().await.unwrap();
        answer(&mut kept).await;
        read_head(&mut kept).await;
        drop(kept);
        // Another call's, on a new connection, which is closed before it is used again.
        let (mut kept, _) = listener.accept().await.unwrap();
        answer(&mut kept).await;
        drop(kept);
        let (mut last, _) = listener.accept().await.unwrap();
        answer(&mut last).await;
    };
    let calls = async {
        assert_eq!(client.get("/first").await.unwrap(), "ok");
        let lost = client.delete("/second").await.unwrap_err().to_string();
        assert!(lost.contains("broke off"), "{lost}");
        assert_eq!(client.get("/third").await.unwrap(), "ok");
        tokio::task::yield_now().await;
        assert_eq!(client.get("/fourth").await.unwrap(), "ok");
    };
    let in_time = tokio::time::timeout(std::time::Duration::from_secs(10), async {
        tokio::join!(server, calls)
    });
    in_time.await.unwrap();
}
