//! Any bytes as an answer, read as the HTTP client reads it. For the fuzz target, and a property test here.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

use super::body;
use super::connection::{Connection, Outgoing, Stream};
use super::error::NetError;
use super::landing::{Expect, Landing, LandingCell};
use crate::arena::{Arena, ArenaOptions};
use crate::s3::fanout::{Held, Start};

const STALL: Duration = Duration::from_secs(5);
const BODY_BYTES_MAX: usize = 1000;
const SLOT_BYTES: usize = 10;

const ARENA_OPTIONS: ArenaOptions = ArenaOptions {
    size: 1 << 20,
    ticket_bytes: 0,
    path: None,
    mode: 0,
    huge_pages: false,
    prefault: false,
    mlock: false,
};

/// `input`: the kind of request, the place where the answer is cut in two, and the answer. Reading any answer ends, without
/// a panic and within the memory limit, and all bytes that land were in the answer.
pub fn answer(input: &[u8]) {
    thread_local! {
        static RUNTIME: tokio::runtime::Runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .expect("a runtime");
        static ARENA: Arena = Arena::new(&ARENA_OPTIONS).expect("an arena");
    }
    let [what, cut, bytes @ ..] = input else {
        return;
    };
    let pieces = bytes.split_at(usize::from(*cut).min(bytes.len()));
    // A failure is as good as any end.
    drop(RUNTIME.with(|runtime| ARENA.with(|arena| runtime.block_on(ask(arena, what % 3, bytes, pieces)))));
}

async fn ask(arena: &Arena, what: u8, bytes: &[u8], pieces: (&[u8], &[u8])) -> Result<(), NetError> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let (ours, theirs) = tokio::join!(TcpStream::connect(listener.local_addr()?), listener.accept());
    let (mut connection, mut server) = (Connection::new(Stream::Plain(ours?), STALL), theirs?.0);
    let send = async {
        server.write_all(pieces.0).await?;
        tokio::task::yield_now().await;
        server.write_all(pieces.1).await?;
        server.shutdown().await
    };
    let read = async {
        let request = Outgoing {
            head: b"GET / HTTP/1.1\r\n\r\n",
            body: &[],
            bodyless: what == 0,
        };
        let head = connection.exchange(&request).await?;
        if what < 2 {
            let body = body::collect(&mut connection, head.framing, BODY_BYTES_MAX).await?;
            assert!(body.len() <= BODY_BYTES_MAX);
            if connection.is_reusable(&head) && connection.is_open() {
                connection.exchange(&request).await?;
            }
            return Ok(());
        }
        let expect = Expect {
            range: 10..10 + SLOT_BYTES as u64,
            object_len: 100,
            etag: Some("e".into()),
        };
        expect.check(&head)?;
        let slot = arena.try_reserve(SLOT_BYTES).expect("it came back");
        let cell = LandingCell::new(Landing::new(slot), expect);
        let mut landing = cell.claim(Start::First).await;
        let mut digested = Vec::new();
        let arrived = |landing: &mut Held<Landing>, len| {
            let at = digested.len();
            digested.extend_from_slice(&landing.slot[at..at + len]);
        };
        connection.land(&mut landing, arrived).await?;
        assert_eq!(digested, landing.slot[..]);
        assert!(
            bytes
                .windows(SLOT_BYTES)
                .any(|stretch| *stretch == landing.slot[..])
        );
        Ok(())
    };
    // A side that has read enough lets the other's writes fail.
    tokio::join!(send, read).1
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ANSWERS: [&str; 4] = [
        "HTTP/1.1 206 Partial Content\r\nETag: \"e\"\r\nContent-Length: 10\r\nContent-Range: bytes 10-19/100\r\n\r\n0123456789",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n01234HTTP/1.1 200 OK\r\n\r\n",
        "HTTP/1.1 404 Not Found\r\nTransfer-Encoding: chunked\r\n\r\n5;x=y\r\n01234\r\n3\r\n567\r\n0\r\nA: b\r\n\r\n",
        "HTTP/1.0 503 Slow Down\r\n\r\n<Error>until the end</Error>",
    ];

    proptest! {
        #[test]
        fn an_answer_with_changes_never_panics(
            which in 0..ANSWERS.len(),
            what in any::<u8>(),
            cut in any::<u8>(),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            end in any::<prop::sample::Index>(),
        ) {
            let mut bytes = ANSWERS[which].as_bytes().to_vec();
            for (at, byte) in changes {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            let len = bytes.len() - end.index(bytes.len()) / 2;
            answer(&[&[what, cut][..], &bytes[..len]].concat());
        }
    }
}
