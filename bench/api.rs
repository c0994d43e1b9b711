//! The cost of the daemon's socket beside a call in the process: lookups of known chunks, and loads of chunks in memory.
//!
//!     cargo bench --bench api               # the table
//!     cargo bench --bench api -- --save     # also writes bench/results/api-<date>.md and .json
//!
//! Daemon and client share this process and its cores, each with threads of its own, as an engine's process would have them:
//! the daemon many, the client one. Calls are measured one after the other, each by itself.

use std::fmt::Write as _;
use std::io::{Read, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use aws_credential_types::Credentials;
use kvgate::cache::gateway::{self, AfterMiss, Gateway, open_store};
use kvgate::config::{self, Override};
use kvgate::embedded::EmbeddedS3;
use kvgate::engine::client::{ApiSession, Client, DaemonAddress};
use kvgate::format::{ChunkHash, ChunkHasher, Space};
use kvgate::node::daemon::{Daemon, Ended, StartError};
use kvgate::protocol::Order;
use kvgate::protocol::Strategy;
use kvgate::protocol::{AttachRequest, LoadLine, LoadRequest, ReserveChunk, ReservedChunk, SlotName};
use twox_hash::XxHash3_64;

mod saving;

const CHUNKS: usize = 4096;
const ROUNDS: usize = 400;

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let rounds = if given("--bench") { ROUNDS } else { 3 };
    let of_daemon = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let of_client = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let bed = of_daemon.block_on(Bed::new())?;
    let rows = of_client.block_on(measure(&bed, rounds))?;
    of_daemon.block_on(bed.end())?;
    let mut text =
        String::from("| what | median | p99 | rounds | wanted (median) |\n|---|---:|---:|---:|---|\n");
    for row in &rows {
        let (what, median, p99, wanted) = (&row.what, us(row.median()), us(row.at(0.99)), row.wanted);
        writeln!(
            text,
            "| {what} | {median} | {p99} | {} | {wanted} |",
            row.times.len()
        )?;
    }
    print!("{text}");
    if given("--save") {
        let row = |row: &Row| {
            serde_json::json!({
                "what": row.what,
                "median_us": row.median().as_secs_f64() * 1e6,
                "p99_us": row.at(0.99).as_secs_f64() * 1e6,
                "rounds": row.times.len(),
            })
        };
        let rows: Vec<_> = rows.iter().map(row).collect();
        saving::save("api", "api", "client and daemon in one process", &text, &rows)?;
    }
    Ok(())
}

struct Row {
    what: String,
    wanted: &'static str,
    times: Vec<Duration>,
}

impl Row {
    fn at(&self, share: f64) -> Duration {
        let mut times = self.times.clone();
        times.sort();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index")]
        let index = ((times.len() - 1) as f64 * share) as usize;
        times[index]
    }

    fn median(&self) -> Duration {
        self.at(0.5)
    }
}

fn us(time: Duration) -> String {
    format!("{:.0} µs", time.as_secs_f64() * 1e6)
}

async fn measure(bed: &Bed, rounds: usize) -> Result<Vec<Row>, Failure> {
    let engine = bed.attach().await?;
    engine.fill().await?;
    let row = |what: &str, wanted| Row {
        what: what.into(),
        wanted,
        times: Vec::new(),
    };
    let mut rows = [
        row("lookup of 4096 known chunks, in the process", ""),
        row("lookup of 4096 known chunks, socket, as bytes", "≤ 500 µs"),
        row("load of a chunk in memory, in the process", ""),
        row(
            "load of a chunk in memory, socket, until its line is here",
            "≤ 100 µs",
        ),
        row(
            "floor: as many bytes as the lookup's, there and back between two threads",
            "",
        ),
        row("floor: as many bytes as the load's", ""),
        row("/query of 4096 known blocks, as JSON tokens", "≤ 5 ms"),
        row("/check_blocks of 4096 known blocks, as hashes", "≤ 5 ms"),
    ];
    let mut peer = Peer::new()?;
    for round in 0..rounds {
        engine.lookups(&mut rows, &mut peer).await?;
        engine.routers(&mut rows).await?;
        let hash = engine.hashes[round * 7 % CHUNKS];
        engine.loads(&mut rows, &mut peer, hash).await?;
    }
    Ok(rows.into())
}

/// A daemon on a server of its own.
struct Bed {
    s3: EmbeddedS3,
    _home: tempfile::TempDir,
    gateway: Gateway,
    stop: tokio::sync::oneshot::Sender<()>,
    running: tokio::task::JoinHandle<Result<Ended, StartError>>,
    socket: PathBuf,
}

/// An engine that is attached.
struct Engine<'a> {
    gateway: &'a Gateway,
    client: Client,
    session: ApiSession,
    space: Space,
    /// The space's id.
    name: String,
    root: ChunkHash,
    hashes: Vec<ChunkHash>,
}

impl Bed {
    async fn new() -> Result<Self, Failure> {
        let home = tempfile::tempdir()?;
        let s3 = EmbeddedS3::start(None, None).await?;
        std::fs::create_dir(s3.root().join("bench"))?;
        let socket = home.path().join("kvgate.sock");
        let settings = [
            ("s3.endpoint", s3.endpoint()),
            ("s3.bucket", "bench".to_owned()),
            ("api.socket", socket.display().to_string()),
            (
                "arena.path",
                format!("/dev/shm/kvgate-bench-{}", std::process::id()),
            ),
            ("arena.size", "256MiB".to_owned()),
            ("load.reserve", "64MiB".to_owned()),
            ("store.write_behind", "128MiB".to_owned()),
            // Nothing is written behind its back meanwhile.
            ("memory.store", "stop".to_owned()),
        ];
        let settings = settings.map(|(path, value)| Override {
            path,
            value,
            flag: "the bench",
        });
        let config = config::load(None, std::iter::empty(), &settings)?.config;
        let credentials = Credentials::from_keys(s3.access_key(), s3.secret_key(), None);
        let store = open_store(&config, Some(credentials)).await?;
        let daemon = Daemon::start(&config, store, Box::new(|_| Ok(Vec::new()))).await?;
        let gateway = daemon.node().gateway().clone();
        let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
        let running = tokio::spawn(daemon.run(async { drop(stopped.await) }));
        Ok(Self {
            _home: home,
            s3,
            gateway,
            stop,
            running,
            socket,
        })
    }

    async fn attach(&self) -> Result<Engine<'_>, Failure> {
        // 8 KiB a chunk, header included.
        let space = Space::from_json(
            r#"{"model": "kvgate/bench", "revision": "api", "dtype": "float16", "chunk_tokens": 16,
                "mha": {"layers": 1, "heads": 1, "head_dim": 64}}"#,
        )?;
        let hasher = ChunkHasher::new(&space, None)?;
        let root = hasher.root(b"api", b"")?;
        let tokens: Vec<u32> = (0..).take(CHUNKS * 16).collect();
        let client = Client::new(DaemonAddress::Unix(self.socket.clone()));
        client.declare(&space).await?;
        let attach = AttachRequest {
            instance: "bench".into(),
            world_size: 1,
            ..AttachRequest::default()
        };
        Ok(Engine {
            gateway: &self.gateway,
            session: client.attach(&attach).await?,
            hashes: hasher.chain(&root, &tokens, &[])?,
            name: space.id().to_string(),
            client,
            space,
            root,
        })
    }

    async fn end(self) -> Result<(), Failure> {
        drop(self.stop);
        self.running.await??;
        self.s3.stop().await;
        Ok(())
    }
}

impl Engine<'_> {
    /// Stores all chunks.
    async fn fill(&self) -> Result<(), Failure> {
        let chunk = |i: usize| ReserveChunk {
            hash: self.hashes[i],
            parent: if i == 0 { self.root } else { self.hashes[i - 1] },
            tokens: None,
        };
        let payload = vec![1; self.space.layout().payload_len()];
        for start in (0..CHUNKS).step_by(256) {
            let chunks = (start..start + 256).map(chunk).collect();
            let reserved = self.session.reserve(&self.name, chunks).await?;
            let mut slots = Vec::new();
            for chunk in &reserved.chunks {
                if let ReservedChunk::Slot {
                    slot,
                    generation,
                    offset,
                } = chunk
                {
                    // What was not written is not stored.
                    self.session.arena.copy_in(*offset, &payload)?;
                    slots.push(SlotName {
                        slot: *slot,
                        generation: *generation,
                    });
                }
            }
            self.session.commit(slots).await?;
        }
        self.client.flush(Some(600_000)).await?;
        Ok(())
    }

    async fn lookups(&self, rows: &mut [Row], peer: &mut Peer) -> Result<(), Failure> {
        let began = Instant::now();
        let found = self
            .gateway
            .lookup(&self.space, &self.hashes, Strategy::Exact, soon())
            .await;
        rows[0].times.push(began.elapsed());
        // The answering thread has slept a while, like the daemon.
        rows[4]
            .times
            .push(peer.ping(CHUNKS * 32 + 300, CHUNKS / 8 * 3 + 200)?);
        let began = Instant::now();
        let query = "strategy=exact";
        let by_socket = self.client.lookup_hashes(&self.name, &self.hashes, query).await?;
        rows[1].times.push(began.elapsed());
        assert!(found.prefix == CHUNKS && by_socket.prefix == CHUNKS);
        Ok(())
    }

    /// What routers ask; the first question tells the node what the hashes of the second mean.
    async fn routers(&self, rows: &mut [Row]) -> Result<(), Failure> {
        let tokens: Vec<u32> = (0..).take(CHUNKS * 16).collect();
        let query = serde_json::json!({
            "model": "kvgate/bench", "token_ids": tokens, "block_size": 16, "cache_salt": "api", "instance_id": "bench",
        });
        let seed = 1337_u64.wrapping_add(XxHash3_64::oneshot_with_seed(1, b"api"));
        let local = tokens.chunks_exact(16).map(|block| {
            let bytes: Vec<u8> = block.iter().flat_map(|token| token.to_le_bytes()).collect();
            XxHash3_64::oneshot_with_seed(seed, &bytes)
        });
        let check = serde_json::json!({"block_hashes": local.collect::<Vec<u64>>()});
        let began = Instant::now();
        let answer: serde_json::Value = self.client.post("/query", &query).await?;
        rows[6].times.push(began.elapsed());
        assert_eq!(answer["default"]["bench"]["longest_matched"], CHUNKS * 16);
        let began = Instant::now();
        let answer: serde_json::Value = self.client.post("/check_blocks", &check).await?;
        rows[7].times.push(began.elapsed());
        assert_eq!(answer["ranges"], serde_json::json!([[0, CHUNKS]]));
        Ok(())
    }

    async fn loads(&self, rows: &mut [Row], peer: &mut Peer, hash: ChunkHash) -> Result<(), Failure> {
        let request = gateway::LoadSpec {
            space: self.space.clone(),
            chunks: vec![hash],
            order: Order::Chunk,
            after_miss: AfterMiss::Stop,
            deadline: soon(),
        };
        let began = Instant::now();
        let loaded = self.gateway.load(request).next().await;
        rows[2].times.push(began.elapsed());
        assert!(matches!(loaded, Some((_, Ok(_)))));
        rows[5].times.push(peer.ping(500, 400)?);
        let request = LoadRequest {
            session: String::new(),
            load_id: "bench".into(),
            space: self.name.clone(),
            hashes: vec![hash],
            order: Order::Chunk,
            continue_after_miss: false,
            deadline_ms: None,
            declines: false,
        };
        let began = Instant::now();
        let mut lines = self.session.load(request).await?;
        let line = lines.next().await?;
        rows[3].times.push(began.elapsed());
        assert!(matches!(line, Some(LoadLine::Here { .. })));
        while lines.next().await?.is_some() {}
        self.session.release("bench", None).await?;
        Ok(())
    }
}

/// A thread that answers over a unix socket, without HTTP: what waking each other up and the bytes alone cost.
struct Peer(UnixStream);

impl Peer {
    fn new() -> std::io::Result<Self> {
        let (here, mut there) = UnixStream::pair()?;
        std::thread::spawn(move || {
            let mut buffer = vec![0; 1 << 20];
            let mut sizes = [0; 8];
            while there.read_exact(&mut sizes).is_ok() {
                let [asked, answer] = [&sizes[..4], &sizes[4..]].map(|size| {
                    let size = size.try_into().map_or(0, u32::from_le_bytes);
                    size as usize
                });
                if there.read_exact(&mut buffer[..asked]).is_err()
                    || there.write_all(&buffer[..answer]).is_err()
                {
                    return;
                }
            }
        });
        Ok(Self(here))
    }

    fn ping(&mut self, asked: usize, answer: usize) -> Result<Duration, Failure> {
        let mut bytes = vec![0; 8 + asked.max(answer)];
        bytes[..4].copy_from_slice(&u32::try_from(asked)?.to_le_bytes());
        bytes[4..8].copy_from_slice(&u32::try_from(answer)?.to_le_bytes());
        let began = Instant::now();
        self.0.write_all(&bytes[..8 + asked])?;
        self.0.read_exact(&mut bytes[..answer])?;
        Ok(began.elapsed())
    }
}

fn soon() -> tokio::time::Instant {
    tokio::time::Instant::now() + Duration::from_secs(10)
}
