//! The client, against a server that is not one, or one of another version.

use std::os::unix::fs::FileExt;

use kvgate::arena::{Arena, ArenaOptions};
use kvgate::engine::client::{Client, DaemonAddress};
use kvgate::protocol::{AttachRequest, LookupRequest, VERSION};
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

/// The error of a call whose answer this is, from a daemon with that `server` header.
async fn error_of<T: std::fmt::Debug, E: ToString + std::fmt::Debug>(
    server: &str,
    status: &str,
    body: &str,
    call: impl AsyncFnOnce(Client) -> Result<T, E>,
) -> String {
    let home = tempfile::tempdir().unwrap();
    let socket = home.path().join("socket");
    let listener = UnixListener::bind(&socket).unwrap();
    let client = Client::new(DaemonAddress::Unix(socket));
    let daemon = async {
        let (mut stream, _) = listener.accept().await.unwrap();
        read_head(&mut stream).await;
        let length = body.len();
        let text = format!("HTTP/1.1 {status}\r\n{server}content-length: {length}\r\n\r\n{body}");
        stream.write_all(text.as_bytes()).await.unwrap();
        // Open until the caller has read it.
        stream
    };
    let (_stream, answer) = tokio::join!(daemon, call(client));
    answer.unwrap_err().to_string()
}

const BOTH: &str = "install the same version on both sides";

#[tokio::test]
async fn an_answer_of_another_version_names_both_versions_and_what_to_do() {
    let lookup = async |client: Client| client.lookup(&LookupRequest::default()).await;
    // A tier that this version does not know.
    let answer = r#"{"chunks": 1, "mask": "01", "tiers": [{"tier": "moon", "from": 0, "count": 1}]}"#;
    let told = error_of("server: kvgate/9.9.9\r\n", "200 OK", answer, lookup).await;
    let versions = format!("the daemon is kvgate 9.9.9, and its client here is kvgate {VERSION}");
    for part in ["unknown variant `moon`", &versions, BOTH] {
        assert!(told.contains(part), "no {part:?} in {told}");
    }
    // One from before the header.
    let told = error_of("", "200 OK", answer, lookup).await;
    assert!(
        told.contains("older than this kvgate") && told.contains(BOTH),
        "{told}"
    );
    // Of the same version it is a fault, and no advice helps.
    let same = format!("server: kvgate/{VERSION}\r\n");
    let told = error_of(&same, "200 OK", answer, lookup).await;
    assert!(
        told.contains("unknown variant `moon`") && !told.contains(BOTH),
        "{told}"
    );
    // What is no version is not repeated.
    let told = error_of("server: kvgate/1 [2J\r\n", "200 OK", answer, lookup).await;
    assert!(!told.contains("[2J") && told.contains(BOTH), "{told}");
}

#[tokio::test]
async fn a_refusal_by_another_version_names_both_versions_and_what_to_do() {
    let lookup = async |client: Client| client.lookup(&LookupRequest::default()).await;
    let problem = |code: &str| {
        format!(
            r#"{{"type": "x", "title": "x", "status": 400, "detail": "unknown field `depth`", "code": "{code}"}}"#
        )
    };
    let other = "server: kvgate/9.9.9\r\n";
    let told = error_of(other, "400 Bad Request", &problem("bad_request"), lookup).await;
    for part in ["unknown field `depth`", "the daemon is kvgate 9.9.9", BOTH] {
        assert!(told.contains(part), "no {part:?} in {told}");
    }
    // Refusals that have nothing to do with versions.
    let told = error_of(other, "400 Bad Request", &problem("unknown_space"), lookup).await;
    assert!(!told.contains(BOTH), "{told}");
    // A proxy's page.
    let told = error_of(other, "502 Bad Gateway", "<html>", lookup).await;
    assert!(told.contains("502") && told.contains(BOTH), "{told}");
}

#[tokio::test]
async fn an_arena_of_another_version_is_refused_with_both_versions_and_what_to_do() {
    let home = tempfile::tempdir().unwrap();
    let path = home.path().join("arena");
    let options = ArenaOptions {
        size: 64 << 10,
        path: Some(path.clone()),
        ..ArenaOptions::default()
    };
    let arena = Arena::new(&options).unwrap();
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.write_all_at(&7_u32.to_le_bytes(), 8).unwrap();
    let attached = serde_json::json!({
        "session": "s",
        "arena": {"path": path, "bytes": 64 << 10, "boot_id": arena.boot_id().to_string()},
        "version": "9.9.9",
    });
    let attach = async |client: Client| client.attach(&AttachRequest::default()).await.map(|_| ());
    let line = format!("{attached}\n");
    let told = error_of("server: kvgate/9.9.9\r\n", "200 OK", &line, attach).await;
    let versions = format!("The daemon is kvgate 9.9.9, and its client here is kvgate {VERSION}");
    for part in [
        "has version 7, and the engine's kvgate maps version 1: the daemon is the newer one",
        "Install the same version of kvgate on both sides",
        &versions,
    ] {
        assert!(told.contains(part), "no {part:?} in {told}");
    }
}
