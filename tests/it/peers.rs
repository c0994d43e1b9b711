//! Other nodes' memories before S3: who is asked, what is answered, and that nothing that goes wrong there fails a load.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use kvgate::engine::client::ApiSession;
use kvgate::format::{Header, KeyPrefix, PlaneDigest, Protection};
use kvgate::protocol::{LookupRequest, Order, ReservedChunk, SlotName};
use kvgate::s3::object::Condition;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use crate::abuse::say;
use crate::keys::{key_files, space_of};
use crate::support::daemon::{
    Serving, Site, all, chunks, eventually, id, load, load_request, load_with, store,
};
use crate::support::fixture::{Prompt, soon};
use crate::support::fleet::{Fleet, answered, asked, certificates, gets};

/// Of the tests' objects.
const HEADER_LEN: usize = 4096;

/// The numbers of the nodes that own each chunk, as `of` sees it.
fn owners(fleet: &Fleet, of: &Serving, prompt: &Prompt) -> Vec<usize> {
    let owner = |hash| fleet.owner(of, prompt, hash);
    prompt.hashes.iter().map(owner).collect()
}

/// Each chunk came from the writer, or from S3 if the asker owns it and was not told yet who has it. Answers how many S3 sent.
fn all_but_own_from_peers(words: &[String], owners: &[usize], asker: usize) -> u64 {
    for (word, owner) in words.iter().zip(owners) {
        assert!(
            word == "peer" || (word == "s3" && *owner == asker),
            "{words:?} of {owners:?}"
        );
    }
    words.iter().filter(|word| *word == "s3").count() as u64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_in_a_neighbours_memory_is_read_from_there() {
    for order in [Order::Chunk, Order::Layer] {
        let site = Site::new().await;
        let fleet = Fleet::new(&site, 2);
        let nodes = fleet.serve_all(&site, &[]).await;
        let prompt = Prompt::new(24);
        let (writer, reader) = (nodes[0].attach("writer").await, nodes[1].attach("reader").await);
        store(&nodes[0].client, &writer, &prompt).await;
        nodes[0].flush().await;
        nodes[1].client.declare(&prompt.space).await.unwrap();

        let owners = owners(&fleet, &nodes[1], &prompt);
        assert!(owners.contains(&0) && owners.contains(&1), "{owners:?}");
        let before = gets(&nodes[1]);
        let words = load(&reader, &prompt, "a", order).await;
        let own = all_but_own_from_peers(&words, &owners, 1);
        // The tests' chunks are smaller than a part.
        assert_eq!(gets(&nodes[1]) - before, own, "S3 sent the others' chunks");
        assert_eq!(load(&reader, &prompt, "b", Order::Chunk).await, all("memory", 24));
        assert_eq!(answered(&nodes[0], "memory"), 24 - own);
    }
}

/// The storm: the first asker of a chunk goes to S3, its owner goes there once for all others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_a_prefix_that_all_nodes_want_at_once_s3_sends_each_chunk_twice_at_most() {
    const NODES: usize = 6;
    const CHUNKS: usize = 32;
    let site = Site::new().await;
    let prompt = Prompt::new(CHUNKS);
    site.store_by_another(&prompt, &[]).await;
    let fleet = Fleet::new(&site, NODES);
    let nodes = fleet.serve_all(&site, &[]).await;
    let mut engines = Vec::new();
    for node in &nodes {
        node.client.declare(&prompt.space).await.unwrap();
        engines.push(node.attach("one").await);
    }
    let loads = engines
        .iter()
        .map(|engine| load(engine, &prompt, "a", Order::Chunk));
    let words = futures::future::join_all(loads).await;
    let words: Vec<&String> = words.iter().flatten().collect();
    assert!(
        words
            .iter()
            .all(|word| ["s3", "peer", "memory"].contains(&word.as_str()))
    );
    let sent: u64 = nodes.iter().map(gets).sum();
    assert!(sent <= 2 * CHUNKS as u64, "S3 sent {sent} chunks, of {CHUNKS}");
    let shared = words.iter().filter(|word| **word == "peer").count();
    assert!(shared >= (NODES - 2) * CHUNKS - CHUNKS, "{shared} from peers");
}

/// Views may differ. Here each of two nodes takes the other for the owner of everything.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_that_take_each_other_for_the_owner_do_not_wait_for_each_other() {
    let site = Site::new().await;
    let prompt = Prompt::new(32);
    site.store_by_another(&prompt, &[]).await;
    let fleet = Fleet::new(&site, 2);
    let members = fleet.members.iter().map(ToString::to_string).collect::<Vec<_>>();
    let nodes = [
        fleet.serve(&site, 0, &[("peers.members", &members[1])]).await,
        fleet.serve(&site, 1, &[("peers.members", &members[0])]).await,
    ];
    let mut engines = Vec::new();
    for node in &nodes {
        node.client.declare(&prompt.space).await.unwrap();
        engines.push(node.attach("one").await);
    }
    let loads = engines
        .iter()
        .map(|engine| load(engine, &prompt, "a", Order::Chunk));
    for words in futures::future::join_all(loads).await {
        let is_good = |word: &String| ["s3", "peer", "memory"].contains(&word.as_str());
        assert!(words.iter().all(is_good), "{words:?}");
    }
    for node in &nodes {
        assert_eq!((asked(node, "slow"), asked(node, "failed")), (0, 0));
    }
}

/// What a peer does that is no good one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    /// It is not there.
    Killed,
    /// It takes connections and never answers.
    Silent,
    /// It answers and then sends nothing.
    HangsInTheBody,
    /// One byte now and then.
    Drips,
    Cut,
    NoHttp,
    OtherLength,
    WrongBytes,
    /// Whole and right, and another chunk's.
    OtherChunk,
    /// Another object that says it is this chunk, whose planes are not what its header says.
    OldPlanes,
    /// Of a format that this kvgate does not read.
    OtherVersion,
    Says(u16),
    /// It answers what it has.
    None,
}

impl Fault {
    const ALL: [Self; 15] = [
        Self::Killed,
        Self::Silent,
        Self::HangsInTheBody,
        Self::Drips,
        Self::Cut,
        Self::NoHttp,
        Self::OtherLength,
        Self::WrongBytes,
        Self::OtherChunk,
        Self::OldPlanes,
        Self::OtherVersion,
        Self::Says(503),
        Self::Says(401),
        Self::Says(404),
        Self::Says(302),
    ];

    /// What the asker counts it as, and whether the peer is left alone then.
    fn counts_as(self) -> (&'static str, bool) {
        match self {
            Self::Silent | Self::Drips => ("slow", true),
            Self::WrongBytes | Self::OtherChunk | Self::OldPlanes => ("wrong", true),
            Self::OtherVersion | Self::Says(503) => ("use_s3", false),
            Self::Says(401) => ("refused", true),
            _ => ("failed", true),
        }
    }

    async fn answer(self, mut stream: TcpStream, objects: &HashMap<String, Vec<u8>>) -> std::io::Result<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await?);
        }
        let head = String::from_utf8_lossy(&head).into_owned();
        let hash = head
            .split([' ', '/'])
            .find(|part| part.len() == 64)
            .unwrap_or_default();
        let good = objects[hash].clone();
        let other = objects.iter().find(|(name, _)| *name != hash).unwrap().1.clone();
        let mut object = good.clone();
        match self {
            Self::WrongBytes => object[good.len() / 2] ^= 1,
            Self::OtherChunk => object = other,
            Self::OldPlanes => object[HEADER_LEN..].copy_from_slice(&other[HEADER_LEN..]),
            Self::OtherVersion => {
                object[8..12].copy_from_slice(&9_u32.to_le_bytes());
                rewrite_digest(&mut object);
            }
            Self::OtherLength => object.truncate(good.len() - 1),
            _ => {}
        }
        let status = match self {
            Self::Says(status) => {
                let head = format!("HTTP/1.1 {status} Odd\r\nContent-Length: 0\r\n\r\n");
                return stream.write_all(head.as_bytes()).await;
            }
            Self::NoHttp => return stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await,
            Self::Silent => return std::future::pending().await,
            _ => 200,
        };
        let len = object.len();
        let head = format!("HTTP/1.1 {status} OK\r\nETag: \"x\"\r\nContent-Length: {len}\r\n\r\n");
        stream.write_all(head.as_bytes()).await?;
        match self {
            Self::HangsInTheBody => {
                stream.write_all(&object[..len / 2]).await?;
                std::future::pending().await
            }
            Self::Cut => stream.write_all(&object[..len / 2]).await,
            Self::Drips => loop {
                stream.write_all(&object[..1]).await?;
                tokio::time::sleep(std::time::Duration::from_millis(50)).await;
            },
            _ => stream.write_all(&object).await,
        }
    }
}

/// Gives a changed header its digest, so that only what was changed is odd.
fn rewrite_digest(object: &mut [u8]) {
    let digest = blake3::hash(&object[..HEADER_LEN - 32]);
    object[HEADER_LEN - 32..HEADER_LEN].copy_from_slice(digest.as_bytes());
}

/// A peer with a fault, which has all objects of a prompt.
async fn faulty(listener: TcpListener, fault: Fault, objects: HashMap<String, Vec<u8>>) {
    let objects = Arc::new(objects);
    while let Ok((stream, _)) = listener.accept().await {
        let objects = Arc::clone(&objects);
        tokio::spawn(async move {
            // The asker may give up at any time.
            let _ = fault.answer(stream, &objects).await;
        });
    }
}

async fn objects(site: &Site, prompt: &Prompt) -> HashMap<String, Vec<u8>> {
    let (store, keys) = (site.store().await, KeyPrefix::new(""));
    let mut objects = HashMap::new();
    for hash in &prompt.hashes {
        let key = keys.chunk(prompt.space.key(), hash);
        let object = store.read(&key, 1 << 24, soon()).await.unwrap();
        objects.insert(hash.to_string(), object.to_vec());
    }
    objects
}

/// Every byte is compared by `load`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_that_are_gone_hang_or_lie_fail_no_load_and_bring_no_wrong_byte() {
    let site = Site::new().await;
    let prompt = Prompt::new(12);
    site.store_by_another(&prompt, &[]).await;
    let objects = objects(&site, &prompt).await;
    for fault in Fault::ALL {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut fleet = Fleet::new(&site, 2);
        fleet.members[0] = listener.local_addr().unwrap();
        let fake = match fault {
            Fault::Killed => {
                drop(listener);
                None
            }
            fault => Some(tokio::spawn(faulty(listener, fault, objects.clone()))),
        };
        let settings = [
            ("peers.first_byte", "1s"),
            ("peers.stall", "1s"),
            ("peers.owners", "1"),
            ("endpoints.breaker_failures", "1"),
            ("endpoints.breaker_open", "1h"),
            ("endpoints.breaker_open_max", "1h"),
            // Half of it is for peers.
            ("load.deadline", "8s"),
        ];
        let node = fleet.serve(&site, 1, &settings).await;
        node.client.declare(&prompt.space).await.unwrap();
        let owned = owners(&fleet, &node, &prompt)
            .into_iter()
            .filter(|owner| *owner == 0)
            .count();
        assert!(owned > 0, "the prompt is long enough");
        let engine = node.attach("one").await;
        let mut request = load_request(&prompt, "a", Order::Chunk);
        request.deadline_ms = Some(8_000);
        let words = load_with(&engine, &prompt, request).await;
        assert_eq!(words, all("s3", 12), "{fault:?}");
        let (word, is_left_alone) = fault.counts_as();
        assert!(asked(&node, word) > 0, "{fault:?} is not counted as {word}");
        assert_eq!(asked(&node, "landed"), 0, "{fault:?}");
        let peers = node.node.gateway().peers().unwrap();
        let member = peers
            .members()
            .into_iter()
            .find(|one| one.address == fleet.members[0]);
        assert_eq!(!member.unwrap().is_up(), is_left_alone, "{fault:?}");
        drop(engine);
        node.end().await;
        if let Some(fake) = fake {
            fake.abort();
        }
    }
}

/// One answer, read to its end.
/// It was told in metrics only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn peers_that_refuse_or_do_not_answer_are_told_with_what_to_do() {
    let site = Site::new().await;
    let prompt = Prompt::new(12);
    site.store_by_another(&prompt, &[]).await;
    let other_token = site.home.path().join("other-token");
    std::fs::write(&other_token, "of-another-fleet\n").unwrap();
    let other_token = other_token.display().to_string();
    let left_alone = [
        ("endpoints.breaker_failures", "1"),
        ("endpoints.breaker_open", "1h"),
        ("endpoints.breaker_open_max", "1h"),
    ];
    for (is_there, what, todo) in [
        (true, "Peers refuse this node: ", "token_file"),
        (false, "No peer answers: ", "nc -vz"),
    ] {
        let fleet = Fleet::new(&site, 2);
        let other = match is_there {
            true => Some(fleet.serve(&site, 0, &[("peers.token_file", &other_token)]).await),
            false => None,
        };
        let node = fleet.serve(&site, 1, &left_alone).await;
        assert_eq!(node.node.status().troubles, []);
        node.client.declare(&prompt.space).await.unwrap();
        let engine = node.attach("one").await;
        assert_eq!(load(&engine, &prompt, "a", Order::Chunk).await, all("s3", 12));
        let told = node.client.status().await.unwrap();
        let troubles = told["troubles"].as_array().unwrap();
        let [trouble] = &troubles[..] else {
            panic!("{troubles:#?}");
        };
        let word = |name: &str| trouble[name].as_str().unwrap();
        assert_eq!(word("what"), format!("{what}{}", fleet.members[0]));
        assert!(word("todo").contains(todo), "{trouble:#}");
        drop(engine);
        node.end().await;
        if let Some(other) = other {
            other.end().await;
        }
    }
}

async fn get(address: SocketAddr, path: &str, headers: &str) -> (u16, String, Vec<u8>) {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{headers}\r\n");
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).await.unwrap();
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
    let head = String::from_utf8(answer[..end].to_vec()).unwrap().to_lowercase();
    let status = head.split(' ').nth(1).unwrap().parse().unwrap();
    (status, head, answer[end..].to_vec())
}

const TOKEN: &str = "Authorization: Bearer the-fleets-token\r\n";

fn header<'a>(head: &'a str, name: &str) -> &'a str {
    let line = head.lines().find_map(|line| line.strip_prefix(name));
    line.unwrap_or_else(|| panic!("no {name} in {head}"))
        .trim_start_matches(": ")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_is_answered_the_objects_bytes_from_memory_and_nothing_else() {
    let site = Site::new().await;
    let fleet = Fleet::new(&site, 1);
    let node = fleet.serve(&site, 0, &[]).await;
    let address = fleet.members[0];
    let engine = node.attach("one").await;
    let (prompt, on_s3) = (Prompt::new(2), Prompt::new(1));
    site.store_by_another(&on_s3, &[]).await;
    store(&node.client, &engine, &prompt).await;
    node.flush().await;
    let objects = objects(&site, &prompt).await;
    let path = |prompt: &Prompt, i: usize| format!("/v1/peer/{}/{}", prompt.space.key(), prompt.hashes[i]);
    let path_of = path(&prompt, 0);
    let object = &objects[&prompt.hashes[0].to_string()];

    let (status, head, body) = get(address, &path_of, TOKEN).await;
    assert_eq!((status, &body), (200, object));
    let etag = header(&head, "etag").to_owned();
    let matching = |etag: &str| format!("{TOKEN}If-Match: {etag}\r\nRange: bytes=4096-8191\r\n");
    let (status, head, body) = get(address, &path_of, &matching(&etag)).await;
    assert_eq!((status, &body[..]), (206, &object[4096..8192]));
    let total = object.len();
    assert_eq!(header(&head, "content-range"), format!("bytes 4096-8191/{total}"));
    assert_eq!(header(&head, "etag"), etag);
    assert_eq!(get(address, &path_of, &matching("\"other\"")).await.0, 412);
    let too_far = format!("{TOKEN}Range: bytes={total}-\r\n");
    assert_eq!(get(address, &path_of, &too_far).await.0, 416);

    for wrong in [
        "",
        "Authorization: Bearer other\r\n",
        "Authorization: the-fleets-token\r\n",
    ] {
        assert_eq!(get(address, &path_of, wrong).await.0, 401, "{wrong:?}");
    }
    for other in ["/v1/status", "/metrics", "/v1/peer/x", "/"] {
        assert_eq!(get(address, other, TOKEN).await.0, 404, "{other}");
    }
    for bad in ["/v1/peer/xyz/00", &format!("/v1/peer/{}/zz", prompt.space.key())] {
        assert_eq!(get(address, bad, TOKEN).await.0, 400, "{bad}");
    }
    // No engine here has declared that space.
    let unknown = format!("/v1/peer/{}/{}", "0".repeat(32), prompt.hashes[0]);
    assert_eq!(get(address, &unknown, TOKEN).await.0, 503);

    // S3 has it, memory does not: the first asker is sent there, the second is served.
    let (status, _, body) = get(address, &path(&on_s3, 0), TOKEN).await;
    assert_eq!(status, 503);
    assert!(String::from_utf8_lossy(&body).contains("use_s3"), "{body:?}");
    let (status, head, body) = get(address, &path(&on_s3, 0), TOKEN).await;
    assert_eq!(status, 200);
    assert!(header(&head, "etag").starts_with("w/"), "{head}");
    let payload_at = on_s3.space.layout().header_len();
    assert!(body[payload_at..] == on_s3.payload(0)[..]);
    assert_eq!(answered(&node, "fetched"), 1);
    // Nobody has that one: the answer has begun, and breaks off.
    let nowhere = path(&Prompt::new(1), 0);
    assert_eq!(get(address, &nowhere, TOKEN).await.0, 503);
    let (status, head, body) = get(address, &nowhere, TOKEN).await;
    assert!(status == 503 || body.len() < header(&head, "content-length").parse().unwrap());
}

/// The keys are here, but memory is plain: it leaves the node for nobody.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_of_encrypted_spaces_stay_on_their_node_and_signed_ones_are_verified() {
    for protection in [Protection::Signed, Protection::Encrypted] {
        let site = Site::new().await;
        let folder = tempfile::tempdir().unwrap();
        let file = key_files(folder.path(), &protection.to_string());
        let fleet = Fleet::new(&site, 2);
        let nodes = fleet.serve_all(&site, &[("keys.file", &file)]).await;
        let prompt = Prompt::of(space_of("acme", protection), 12);
        let (writer, reader) = (nodes[0].attach("writer").await, nodes[1].attach("reader").await);
        store(&nodes[0].client, &writer, &prompt).await;
        nodes[0].flush().await;
        nodes[1].client.declare(&prompt.space).await.unwrap();
        let path = format!("/v1/peer/{}/{}", prompt.space.key(), prompt.hashes[0]);
        let (status, _, body) = get(fleet.members[0], &path, TOKEN).await;
        let words = load(&reader, &prompt, "a", Order::Chunk).await;
        if protection == Protection::Encrypted {
            assert_eq!((status, words), (503, all("s3", 12)));
            assert_eq!(asked(&nodes[1], "use_s3"), 0, "it is not even asked");
        } else {
            assert_eq!(status, 200);
            let header = Header::parse(&body).unwrap();
            assert!(
                header.digest_kind.protection() == Protection::Signed,
                "{header:?}"
            );
            all_but_own_from_peers(&words, &owners(&fleet, &nodes[1], &prompt), 1);
        }
    }
}

/// A forger in the fleet has the token and not the tenant's key.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_without_the_tenants_key_can_forge_nothing() {
    let site = Site::new().await;
    let folder = tempfile::tempdir().unwrap();
    let file = key_files(folder.path(), "signed");
    let settings = [("keys.file", file.as_str())];
    let prompt = Prompt::of(space_of("acme", Protection::Signed), 12);
    site.store_by_another(&prompt, &settings).await;
    let mut forged = objects(&site, &prompt).await;
    let layout = prompt.space.layout();
    for object in forged.values_mut() {
        for byte in &mut object[layout.header_len()..] {
            *byte = !*byte;
        }
        let mut header = Header::parse(object).unwrap();
        let plain = PlaneDigest::Crc64Nvme;
        let digests = (0..layout.planes()).map(|plane| plain.of(&object[layout.plane(plane)]));
        (header.digests, header.digest_kind, header.seal) = (digests.collect(), plain.kind(), None);
        header.write(object);
    }
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut fleet = Fleet::new(&site, 2);
    fleet.members[0] = listener.local_addr().unwrap();
    let forger = tokio::spawn(faulty(listener, Fault::None, forged));
    let node = fleet.serve(&site, 1, &settings).await;
    node.client.declare(&prompt.space).await.unwrap();
    let engine = node.attach("one").await;
    assert_eq!(load(&engine, &prompt, "a", Order::Chunk).await, all("s3", 12));
    assert!(asked(&node, "wrong") > 0);
    forger.abort();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn with_certificates_only_nodes_of_the_fleet_are_answered() {
    let site = Site::new().await;
    let fleet = Fleet::new(&site, 2);
    let own = certificates(&site.home.path().join("own"), "peers.test");
    let own: Vec<(&'static str, &str)> = own.iter().map(|(key, value)| (*key, value.as_str())).collect();
    let nodes = fleet.serve_all(&site, &own).await;
    let prompt = Prompt::new(12);
    let (writer, reader) = (nodes[0].attach("writer").await, nodes[1].attach("reader").await);
    store(&nodes[0].client, &writer, &prompt).await;
    nodes[0].flush().await;
    nodes[1].client.declare(&prompt.space).await.unwrap();
    let words = load(&reader, &prompt, "a", Order::Chunk).await;
    all_but_own_from_peers(&words, &owners(&fleet, &nodes[1], &prompt), 1);

    let reload = async || {
        let mut stream = UnixStream::connect(&nodes[0].config.api.socket).await.unwrap();
        say(&mut stream, "POST /v1/reload HTTP/1.1\r\nhost: x\r\n\r\n").await
    };
    let answer = reload().await;
    assert!(answer.ends_with(r#""peers.cert_file"]}"#), "{answer}");
    let cert = site.home.path().join("own/cert.pem");
    let good = std::fs::read(&cert).unwrap();
    std::fs::write(&cert, "nonsense").unwrap();
    let answer = reload().await;
    assert!(answer.contains("can't use [peers] cert_file"), "{answer}");
    std::fs::write(&cert, good).unwrap();

    // A node with a certificate of another authority gets nothing, and loads from S3.
    drop(reader);
    let mut nodes = nodes.into_iter();
    let first = nodes.next().unwrap();
    nodes.next().unwrap().end().await;
    let other = certificates(&site.home.path().join("other"), "peers.test");
    let other: Vec<(&'static str, &str)> = other.iter().map(|(key, value)| (*key, value.as_str())).collect();
    let stranger = fleet.serve(&site, 1, &other).await;
    stranger.client.declare(&prompt.space).await.unwrap();
    let reader = stranger.attach("reader").await;
    assert_eq!(load(&reader, &prompt, "a", Order::Chunk).await, all("s3", 12));
    assert!(asked(&stranger, "failed") > 0);
    drop(first);
}

/// Prefill and decode apart: nothing of it is on S3, and nothing goes there.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_is_a_hit_on_other_nodes_before_s3_has_it() {
    for (strategy, order) in [
        ("strategy=exact", Order::Chunk),
        ("strategy=prefix", Order::Layer),
    ] {
        let site = Site::new().await;
        let fleet = Fleet::new(&site, 3);
        let nodes = fleet.serve_all(&site, &[("memory.store", "stop")]).await;
        let prompt = Prompt::new(24);
        let (prefill, decode) = (nodes[0].attach("prefill").await, nodes[1].attach("decode").await);
        nodes[1].client.declare(&prompt.space).await.unwrap();
        let space = id(&prompt.space);
        let lookup = || async {
            let found = nodes[1].client.lookup_hashes(&space, &prompt.hashes, strategy);
            found.await.unwrap()
        };
        assert_eq!(lookup().await.mask.count(), 0);
        store(&nodes[0].client, &prefill, &prompt).await;
        let mut found = lookup().await;
        while found.mask.count() < 24 {
            // The owners are told in the background.
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
            found = lookup().await;
        }
        let request = LookupRequest {
            space: space.clone(),
            hashes: Some(prompt.hashes.clone()),
            ..LookupRequest::default()
        };
        let told = nodes[1].client.lookup(&request).await.unwrap();
        assert_eq!(serde_json::to_value(&told.tiers).unwrap()[0]["tier"], "peer");
        assert_eq!(load(&decode, &prompt, "a", order).await, all("peer", 24));
        assert_eq!(gets(&nodes[0]) + gets(&nodes[1]) + gets(&nodes[2]), 0);
        // Its writer is gone: what was known of it ends with the first load, and nothing else fails.
        let other = nodes[2].attach("decode").await;
        nodes[2].client.declare(&prompt.space).await.unwrap();
        let mut nodes = nodes.into_iter();
        drop(prefill);
        nodes.next().unwrap().end().await;
        let words = load(&other, &prompt, "b", Order::Chunk).await;
        assert!(
            words.iter().all(|word| word == "peer" || word == "absent"),
            "{words:?}"
        );
    }
}

/// What is known of who has a chunk may be old. A lookup is wrong once at most.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_that_its_holder_lost_is_not_promised_again() {
    let site = Site::new().await;
    let fleet = Fleet::new(&site, 3);
    let nodes = fleet.serve_all(&site, &[("memory.store", "stop")]).await;
    let prompt = Prompt::new(24);
    let (writer, reader) = (nodes[0].attach("writer").await, nodes[2].attach("reader").await);
    for node in &nodes {
        node.client.declare(&prompt.space).await.unwrap();
    }
    let space = id(&prompt.space);
    let found = async |node: &Serving| {
        let found = node
            .client
            .lookup_hashes(&space, &prompt.hashes, "strategy=exact");
        found.await.unwrap().mask.count()
    };
    store(&nodes[0].client, &writer, &prompt).await;
    while found(&nodes[1]).await < 24 {
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
    // Its next life has nothing in memory.
    drop(writer);
    let mut nodes = nodes.into_iter();
    nodes.next().unwrap().end().await;
    let (_other, asker) = (nodes.next().unwrap(), nodes.next().unwrap());
    let _again = fleet.serve(&site, 0, &[("memory.store", "stop")]).await;
    found(&asker).await;
    assert_eq!(load(&reader, &prompt, "a", Order::Chunk).await, all("absent", 24));
    assert_eq!(found(&asker).await, 0);
}

/// A node that gives loads 30 s, and a peer that has all chunks of a prompt and drips them.
async fn beside_one_that_drips(site: &Site, prompt: &Prompt) -> (Fleet, Serving) {
    site.store_by_another(prompt, &[]).await;
    let mut fleet = Fleet::new(site, 2);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    fleet.members[0] = listener.local_addr().unwrap();
    tokio::spawn(faulty(listener, Fault::Drips, objects(site, prompt).await));
    let node = fleet.serve(site, 1, &[]).await;
    node.client.declare(&prompt.space).await.unwrap();
    (fleet, node)
}

/// The same as `load`, in four seconds.
async fn load_soon(engine: &ApiSession, prompt: &Prompt) -> Vec<String> {
    let mut request = load_request(prompt, "soon", Order::Chunk);
    request.deadline_ms = Some(4_000);
    load_with(engine, prompt, request).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_with_less_time_than_the_node_gives_has_half_of_it_left_for_s3() {
    let (site, prompt) = (Site::new().await, Prompt::new(12));
    let (fleet, node) = beside_one_that_drips(&site, &prompt).await;
    assert!(owners(&fleet, &node, &prompt).contains(&0));
    let engine = node.attach("one").await;
    assert_eq!(load_soon(&engine, &prompt).await, all("s3", 12));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_load_that_joins_another_one_has_half_of_its_own_time_left_for_s3() {
    let (site, prompt) = (Site::new().await, Prompt::new(12));
    let (_fleet, node) = beside_one_that_drips(&site, &prompt).await;
    let (one, other) = (node.attach("one").await, node.attach("other").await);
    let peers = Arc::clone(node.node.gateway().peers().unwrap());
    let is_asking = || {
        let mut hashes = prompt.hashes.iter();
        hashes.any(|hash| peers.is_asking(&(prompt.space.key(), *hash)))
    };
    let joins = async {
        eventually(is_asking).await;
        load_soon(&other, &prompt).await
    };
    tokio::select! {
        words = joins => {
            let is_good = |word: &String| ["s3", "memory"].contains(&word.as_str());
            assert!(words.iter().all(is_good), "{words:?}");
        }
        words = load(&one, &prompt, "a", Order::Chunk) => panic!("the peer was fast: {words:?}"),
    }
}

/// Its writer may never store it, and an engine here is told that it is stored.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_an_engine_stores_goes_to_s3_also_where_a_peer_brought_it_first() {
    for is_reserved_before in [false, true] {
        let site = Site::new().await;
        let fleet = Fleet::new(&site, 2);
        let writes_nothing = fleet.serve(&site, 0, &[("memory.store", "stop")]).await;
        let node = fleet.serve(&site, 1, &[]).await;
        let prompt = Prompt::new(8);
        let (writer, engine) = (writes_nothing.attach("writer").await, node.attach("one").await);
        node.client.declare(&prompt.space).await.unwrap();
        let space = id(&prompt.space);
        let reserved = match is_reserved_before {
            true => Some(engine.reserve(&space, chunks(&prompt)).await.unwrap()),
            false => None,
        };
        store(&writes_nothing.client, &writer, &prompt).await;
        let found = async || {
            let found = node
                .client
                .lookup_hashes(&space, &prompt.hashes, "strategy=exact");
            found.await.unwrap().mask.count()
        };
        while found().await < 8 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        let other = node.attach("other").await;
        assert_eq!(load(&other, &prompt, "a", Order::Chunk).await, all("peer", 8));
        if let Some(reserved) = reserved {
            let mut slots = Vec::new();
            for (i, chunk) in reserved.chunks.iter().enumerate() {
                let &ReservedChunk::Slot {
                    slot,
                    generation,
                    offset,
                } = chunk
                else {
                    panic!("{chunk:?}");
                };
                engine.arena.copy_in(offset, &prompt.payload(i)).unwrap();
                slots.push(SlotName { slot, generation });
            }
            engine.commit(slots).await.unwrap();
        } else {
            assert_eq!(store(&node.client, &engine, &prompt).await, ["stored"; 8]);
        }
        node.flush().await;
        assert_eq!(objects(&site, &prompt).await.len(), 8, "S3 has all of them");
        let puts = || node.node.status().s3.requests.put;
        let once = puts();
        assert_eq!(store(&node.client, &engine, &prompt).await, ["present"; 8]);
        node.flush().await;
        assert_eq!(puts(), once);
    }
}

/// Two members that say of each other that they have everything; answers how often they were asked.
async fn pointing(fleet: &mut Fleet) -> Arc<AtomicU64> {
    let asks = Arc::new(AtomicU64::new(0));
    let mut listeners = Vec::new();
    for member in &mut fleet.members[..2] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        *member = listener.local_addr().unwrap();
        listeners.push(listener);
    }
    for (at, listener) in listeners.into_iter().enumerate() {
        let (other, asks) = (fleet.members[1 - at], Arc::clone(&asks));
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(points_to(other, stream, Arc::clone(&asks)));
            }
        });
    }
    asks
}

async fn points_to(other: SocketAddr, mut stream: TcpStream, asks: Arc<AtomicU64>) -> std::io::Result<()> {
    let mut head = Vec::new();
    loop {
        head.push(stream.read_u8().await?);
        if head.ends_with(b"\r\n\r\n") {
            head.clear();
            asks.fetch_add(1, Ordering::Relaxed);
            let say = format!("HTTP/1.1 503 x\r\nkvgate-holder: {other}\r\nContent-Length: 0\r\n\r\n");
            stream.write_all(say.as_bytes()).await?;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_nodes_that_point_to_each_other_each_is_asked_once() {
    let site = Site::new().await;
    let prompt = Prompt::new(12);
    site.store_by_another(&prompt, &[]).await;
    let mut fleet = Fleet::new(&site, 3);
    let asks = pointing(&mut fleet).await;
    let node = fleet.serve(&site, 2, &[]).await;
    node.client.declare(&prompt.space).await.unwrap();
    let engine = node.attach("one").await;
    assert_eq!(load(&engine, &prompt, "a", Order::Chunk).await, all("s3", 12));
    assert!(asks.load(Ordering::Relaxed) <= 2 * 12);
}

/// A member that says that it has each chunk, and sends no byte of it.
async fn hanging(listener: TcpListener, asks: Arc<AtomicU64>, object_len: usize) {
    let mut held = Vec::new();
    while let Ok((mut stream, _)) = listener.accept().await {
        let mut head = Vec::new();
        while let Ok(byte) = stream.read_u8().await
            && !head.ends_with(b"\r\n\r")
        {
            head.push(byte);
        }
        let say = format!("HTTP/1.1 200 OK\r\nETag: \"x\"\r\nContent-Length: {object_len}\r\n\r\n");
        if stream.write_all(say.as_bytes()).await.is_ok() {
            asks.fetch_add(1, Ordering::Relaxed);
            held.push(stream);
        }
    }
}

/// Or two nodes that ask each other would wait for each other's turns.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_peers_are_asked_for_holds_up_nothing_that_comes_from_s3() {
    let site = Site::new().await;
    let file = key_files(site.home.path(), "encrypted");
    // For these no peer is asked.
    let from_s3 = Prompt::of(space_of("acme", Protection::Encrypted), 3);
    site.store_by_another(&from_s3, &[("keys.file", &file)]).await;
    let prompt = Prompt::new(96);
    site.store_by_another(&prompt, &[]).await;
    let mut fleet = Fleet::new(&site, 2);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    fleet.members[0] = listener.local_addr().unwrap();
    let asks = Arc::new(AtomicU64::new(0));
    let len = prompt.space.layout().object_len();
    tokio::spawn(hanging(listener, Arc::clone(&asks), len));
    let settings = [
        ("keys.file", file.as_str()),
        ("s3.part_size", "1MiB"),
        ("load.in_flight", "1MiB"),
    ];
    let node = fleet.serve(&site, 1, &settings).await;
    for space in [&prompt.space, &from_s3.space] {
        node.client.declare(space).await.unwrap();
    }
    let (one, other) = (node.attach("one").await, node.attach("other").await);
    let held_up = load(&one, &prompt, "a", Order::Chunk);
    let hold = async {
        while asks.load(Ordering::Relaxed) < (1 << 20) / len as u64 {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        load(&other, &from_s3, "b", Order::Chunk).await
    };
    tokio::select! {
        words = hold => {
            assert_eq!(words, all("s3", 3));
            assert_eq!(asked(&node, "failed") + asked(&node, "slow"), 0, "all asks had to end first");
        }
        words = held_up => panic!("the other load had to wait for this one: {words:?}"),
    }
}

/// With peers, a chunk that S3 lacks is asked for at once: a peer may have it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_that_is_known_to_be_damaged_is_never_inferred() {
    const FLIPPED: usize = 5;
    let site = Site::new().await;
    let prompt = Prompt::new(20);
    site.store_by_another(&prompt, &[]).await;
    let (s3, key) = (
        site.store().await,
        KeyPrefix::new("").chunk(prompt.space.key(), &prompt.hashes[FLIPPED]),
    );
    let mut bytes = s3.read(&key, 1 << 24, soon()).await.unwrap().to_vec();
    bytes[70_000] ^= 1;
    s3.put(&key, bytes.into(), Condition::Always, soon())
        .await
        .unwrap();

    let fleet = Fleet::new(&site, 2);
    let nodes = fleet.serve_all(&site, &[]).await;
    let reader = nodes[1].attach("reader").await;
    for node in &nodes {
        node.client.declare(&prompt.space).await.unwrap();
    }
    let space = id(&prompt.space);
    let prefix = || async {
        let found = nodes[1]
            .client
            .lookup_hashes(&space, &prompt.hashes, "strategy=prefix");
        found.await.unwrap().mask.prefix()
    };
    assert_eq!(prefix().await, 20, "nobody has read it yet");
    let mut words = load(&reader, &prompt, "a", Order::Chunk).await;
    assert_eq!(words.remove(FLIPPED), "bad_digest");
    assert!(
        words.iter().all(|word| ["s3", "peer"].contains(&word.as_str())),
        "{words:?}"
    );
    assert_eq!(prefix().await, FLIPPED);
    // More than `[lookup] absent_ttl`.
    tokio::time::sleep(std::time::Duration::from_millis(300)).await;
    assert_eq!(prefix().await, FLIPPED);
}
