//! A daemon in this process, and what engines do with it.

use std::sync::Arc;
use std::time::Duration;

use kvgate::cache::tier::DiskError;
use kvgate::config::{self, Config, Override};
use kvgate::embedded::EmbeddedS3;
use kvgate::engine::client::{ApiSession, Client, DaemonAddress};
use kvgate::format::Space;
use kvgate::node::daemon::{Daemon, Ended, StartError};
use kvgate::protocol::Order;
use kvgate::protocol::Share;
use kvgate::protocol::{AttachRequest, LoadLine, LoadRequest, ReserveChunk, ReservedChunk, SlotName};
use kvgate::s3::object::{ObjectStore, S3Options};
use tempfile::TempDir;
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

use crate::support::backends;
use crate::support::fixture::Prompt;

pub const BUCKET: &str = "kvgate-it";

/// An S3 server, and a folder for sockets and disks.
pub struct Site {
    pub s3: Option<EmbeddedS3>,
    pub root: TempDir,
    pub home: TempDir,
    endpoint: String,
    address: std::net::SocketAddr,
}

impl Site {
    pub async fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let s3 = EmbeddedS3::start(Some(root.path()), None).await.unwrap();
        std::fs::create_dir(root.path().join(BUCKET)).unwrap();
        let endpoint = s3.endpoint();
        let address = endpoint.strip_prefix("http://").unwrap().parse().unwrap();
        Self {
            s3: Some(s3),
            root,
            home: tempfile::tempdir().unwrap(),
            endpoint,
            address,
        }
    }

    /// The server's.
    pub fn address(&self) -> std::net::SocketAddr {
        self.address
    }

    /// Nobody answers any more.
    pub async fn stop_s3(&mut self) {
        self.s3.take().unwrap().stop().await;
    }

    /// The same server again, with what it had.
    pub async fn start_s3(&mut self) {
        let start = || EmbeddedS3::start(Some(self.root.path()), Some(self.address));
        let mut s3 = start().await;
        for _ in 0..100 {
            if s3.is_ok() {
                break;
            }
            // Another test's connection has the port for a while.
            tokio::time::sleep(Duration::from_millis(50)).await;
            s3 = start().await;
        }
        self.s3 = Some(s3.unwrap());
    }

    pub fn config(&self, settings: &[(&'static str, &str)]) -> Config {
        let socket = self.home.path().join("kvgate.sock").display().to_string();
        let arena = format!(
            "/dev/shm/kvgate-it-{}-{:016x}",
            std::process::id(),
            fastrand::u64(..)
        );
        let ours = [
            ("s3.endpoint", self.endpoint.as_str()),
            ("s3.bucket", BUCKET),
            ("s3.retries", "0"),
            ("api.socket", &socket),
            ("api.grace", "200ms"),
            ("arena.path", &arena),
            ("arena.size", "32MiB"),
            ("load.reserve", "8MiB"),
            ("load.window", "4MiB"),
            ("store.write_behind", "16MiB"),
            ("store.retry_max", "300ms"),
            ("lookup.absent_ttl", "200ms"),
        ];
        let overrides: Vec<Override> = ours
            .iter()
            .chain(settings)
            .map(|(path, value)| Override {
                path,
                value: (*value).to_owned(),
                flag: "a test",
            })
            .collect();
        config::load(None, std::iter::empty(), &overrides).unwrap().config
    }

    pub async fn store(&self) -> Arc<dyn ObjectStore> {
        self.store_with(|_| {}).await
    }

    pub async fn store_with(&self, change: impl FnOnce(&mut S3Options)) -> Arc<dyn ObjectStore> {
        let credentials = aws_credential_types::Credentials::from_keys(
            kvgate_key(self.s3.as_ref()),
            kvgate_secret(self.s3.as_ref()),
            None,
        );
        let mut options = S3Options {
            credentials: Some(credentials),
            ..backends::options(&self.endpoint)
        };
        change(&mut options);
        backends::open(&options).await
    }

    /// Puts a prompt on the tiers below memory, by a daemon that is gone afterwards.
    pub async fn store_by_another(&self, prompt: &Prompt, settings: &[(&'static str, &str)]) {
        let serving = self.serve(settings).await;
        serving.ready().await;
        let engine = serving.attach("another").await;
        store(&serving.client, &engine, prompt).await;
        serving.flush().await;
        drop(engine);
        serving.end().await;
    }

    pub async fn serve(&self, settings: &[(&'static str, &str)]) -> Serving {
        self.serve_over(self.store().await, settings).await
    }

    pub async fn serve_over(
        &self,
        store: Arc<dyn ObjectStore>,
        settings: &[(&'static str, &str)],
    ) -> Serving {
        let config = self.config(settings);
        let start = || Daemon::start(&config, Arc::clone(&store), Box::new(|_| Ok(Vec::new())));
        let mut daemon = start().await;
        for _ in 0..100 {
            // In one process, what the daemon before left under way keeps its disks for a while.
            if !matches!(&daemon, Err(StartError::Disk(DiskError::InUse { .. }))) {
                break;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
            daemon = start().await;
        }
        let daemon = daemon.unwrap();
        let client = Client::new(DaemonAddress::Unix(config.api.socket.clone()));
        let (node, address) = (daemon.node().clone(), daemon.address());
        let (stop, stopped) = oneshot::channel::<()>();
        let task = tokio::spawn(async move {
            let stop = async { drop(stopped.await) };
            daemon.run(stop).await.unwrap()
        });
        Serving {
            client,
            node,
            address,
            config,
            stop: Some(stop),
            task,
        }
    }
}

fn kvgate_key(s3: Option<&EmbeddedS3>) -> &str {
    s3.map_or("kvgate-embedded", EmbeddedS3::access_key)
}

fn kvgate_secret(s3: Option<&EmbeddedS3>) -> &str {
    s3.map_or("kvgate-embedded-secret", EmbeddedS3::secret_key)
}

/// A daemon that serves.
pub struct Serving {
    pub client: Client,
    pub node: kvgate::node::Node,
    pub address: Option<std::net::SocketAddr>,
    pub config: Config,
    stop: Option<oneshot::Sender<()>>,
    task: JoinHandle<Ended>,
}

impl Serving {
    pub async fn ready(&self) {
        eventually(|| self.node.not_ready().is_none()).await;
    }

    /// As SIGTERM does.
    pub async fn end(mut self) -> Ended {
        drop(self.stop.take());
        (&mut self.task).await.unwrap()
    }

    pub async fn attach(&self, instance: &str) -> ApiSession {
        self.client.attach(&alone(instance)).await.unwrap()
    }

    /// A tensor-parallel rank.
    pub async fn rank(&self, instance: &str, rank: u32, world_size: u32) -> ApiSession {
        let request = AttachRequest {
            instance: instance.to_owned(),
            rank,
            world_size,
            tp: Some((rank, world_size)),
            ..AttachRequest::default()
        };
        self.client.attach(&request).await.unwrap()
    }

    pub async fn flush(&self) {
        assert_eq!(self.client.flush(Some(20_000)).await.unwrap().pending, 0);
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        self.task.abort();
    }
}

pub fn alone(instance: &str) -> AttachRequest {
    AttachRequest {
        instance: instance.to_owned(),
        world_size: 1,
        ..AttachRequest::default()
    }
}

/// Waits until something is so.
pub async fn eventually(is: impl Fn() -> bool) {
    for _ in 0..1500 {
        if is() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("it did not come to that");
}

pub fn id(space: &Space) -> String {
    space.id().to_string()
}

pub fn chunks(prompt: &Prompt) -> Vec<ReserveChunk> {
    let chunk = |i| ReserveChunk {
        hash: prompt.hashes[i],
        parent: prompt.parent(i),
        tokens: None,
    };
    (0..prompt.hashes.len()).map(chunk).collect()
}

/// Reserves, fills and commits what there is room for, in calls of a few chunks; what became of each.
pub async fn store(client: &Client, session: &ApiSession, prompt: &Prompt) -> Vec<&'static str> {
    client.declare(&prompt.space).await.unwrap();
    let mut words = Vec::new();
    let all = chunks(prompt);
    for (at, some) in all.chunks(8).enumerate() {
        let reserved = session.reserve(&id(&prompt.space), some.to_vec()).await.unwrap();
        let mut slots = Vec::new();
        for (i, chunk) in reserved.chunks.iter().enumerate() {
            words.push(match chunk {
                ReservedChunk::Slot {
                    slot,
                    generation,
                    offset,
                } => {
                    assert_eq!(session.arena.generation(*slot).unwrap(), *generation);
                    session
                        .arena
                        .copy_in(*offset, &prompt.payload(at * 8 + i))
                        .unwrap();
                    slots.push(SlotName {
                        slot: *slot,
                        generation: *generation,
                    });
                    "stored"
                }
                ReservedChunk::Skip { skip } => match skip.as_str() {
                    "present" => "present",
                    "pending" => "pending",
                    "full" => "full",
                    "other_rank" => "other_rank",
                    other => panic!("{other}"),
                },
            });
        }
        if !slots.is_empty() {
            session.commit(slots).await.unwrap();
        }
    }
    words
}

/// Writes what a rank owns of a chunk into its slot, as `reserve` answered it.
pub fn write(
    session: &ApiSession,
    prompt: &Prompt,
    chunk: usize,
    own: &[Share],
    to: &ReservedChunk,
) -> SlotName {
    let &ReservedChunk::Slot {
        slot,
        generation,
        offset,
    } = to
    else {
        panic!("{to:?}");
    };
    let (layout, payload) = (prompt.space.layout(), prompt.payload(chunk));
    for share in own {
        for plane in share.planes.0..share.planes.1 {
            let bytes = layout.plane(plane);
            let head = bytes.len() / prompt.space.planes()[plane].heads as usize;
            let start = bytes.start - layout.header_len();
            let row = prompt.space.planes()[plane].row_bytes as usize;
            for at in share.heads.0 as usize..share.heads.1 as usize {
                for tokens in share.tokens.runs(0..prompt.space.chunk_rows()) {
                    let run = start + at * head + tokens.start as usize * row
                        ..start + at * head + tokens.end as usize * row;
                    session.arena.copy_in(offset + run.start, &payload[run]).unwrap();
                }
            }
        }
    }
    SlotName { slot, generation }
}

pub fn load_request(prompt: &Prompt, load_id: &str, order: Order) -> LoadRequest {
    LoadRequest {
        session: String::new(),
        load_id: load_id.to_owned(),
        space: id(&prompt.space),
        hashes: prompt.hashes.clone(),
        order,
        continue_after_miss: true,
        deadline_ms: Some(20_000),
        declines: false,
    }
}

/// Loads, compares every byte that came with what it must be, and releases. Of each chunk the tier, or why it is missing.
pub async fn load(session: &ApiSession, prompt: &Prompt, load_id: &str, order: Order) -> Vec<String> {
    load_with(session, prompt, load_request(prompt, load_id, order)).await
}

/// The same, of a request of one's own.
pub async fn load_with(session: &ApiSession, prompt: &Prompt, request: LoadRequest) -> Vec<String> {
    let load_id = &request.load_id.clone();
    let mut lines = session.load(request).await.unwrap();
    let layout = prompt.space.layout();
    let mut words = vec![String::new(); prompt.hashes.len()];
    let mut planes_seen = vec![0; prompt.hashes.len()];
    while let Some(line) = lines.next().await.unwrap() {
        match line {
            LoadLine::Here {
                i,
                slot,
                generation,
                offset,
                planes,
                tier,
            } => {
                let (first, end) = (layout.plane(planes.0).start, layout.plane(planes.1 - 1).end);
                let mut bytes = vec![0; end - first];
                session.arena.copy_out(offset, &mut bytes).unwrap();
                assert_eq!(session.arena.generation(slot).unwrap(), generation);
                let payload = prompt.payload(i);
                let start = layout.header_len();
                assert!(
                    bytes == payload[first - start..end - start],
                    "chunk {i} has other bytes"
                );
                planes_seen[i] += planes.1 - planes.0;
                if planes_seen[i] == layout.planes() {
                    let slot = SlotName { slot, generation };
                    assert_eq!(session.release(load_id, Some(vec![slot])).await.unwrap(), 1);
                }
                words[i] = tier;
            }
            LoadLine::Missing { i, miss, .. } => words[i] = miss,
            LoadLine::End { .. } => {}
        }
    }
    words
}

pub fn all(word: &str, count: usize) -> Vec<String> {
    vec![word.to_owned(); count]
}
