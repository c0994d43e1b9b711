//! A rank's loads and stores through a daemon, by a GPU that fails.

use std::sync::Arc;
use std::time::Duration;

use kvgate::cache::gateway::open_store;
use kvgate::config::{self, Override};
use kvgate::engine::client::{Client, DaemonAddress};
use kvgate::engine::copy::cuda::Lanes;
use kvgate::engine::copy::known::KNOWN;
use kvgate::engine::copy::{Copier, CudaCopier, PagedCache};
use kvgate::engine::rank::{
    ComputedChunk, ComputedKind, Hold, KindPages, LoadJob, LoadProgress, LookupBreaker, StoreJob, Stored,
    WantedChunk, WantedKind, Worker, WorkerError,
};
use kvgate::node::Node;
use kvgate::node::daemon::Daemon;
use kvgate::protocol::{AttachRequest, Order, Share, TokenShare};
use tokio::runtime::Runtime;

use crate::mock::Mock;
use crate::stage::{Stage, options};

/// A daemon without S3: what is stored stays in memory.
async fn serve(home: &tempfile::TempDir) -> (Node, Client) {
    let at = |name: &str| home.path().join(name).display().to_string();
    let settings = [
        ("s3.endpoint", "http://127.0.0.1:9".into()),
        ("s3.bucket", "kv-gpu".into()),
        ("arena.path", at("arena")),
        ("arena.size", "8MiB".into()),
        ("load.reserve", "2MiB".into()),
        ("store.write_behind", "4MiB".into()),
        ("api.socket", at("socket")),
        ("api.degraded", "true".into()),
    ];
    let overrides = settings.map(|(path, value): (_, String)| Override {
        path,
        value,
        flag: "a test",
    });
    let config = config::load(None, std::iter::empty(), &overrides).unwrap().config;
    let keys = aws_credential_types::Credentials::from_keys("k", "s", None);
    let store = open_store(&config, Some(keys)).await.unwrap();
    let daemon = Daemon::start(&config, store, Box::new(|_| Ok(Vec::new())))
        .await
        .unwrap();
    let node = daemon.node().clone();
    tokio::spawn(daemon.run(std::future::pending()));
    (node, Client::new(DaemonAddress::Unix(config.api.socket)))
}

struct Rank {
    worker: Worker,
    node: Node,
    _home: tempfile::TempDir,
}

impl Rank {
    /// `cuts`: the planes at which its layers are cut into groups.
    async fn new(stage: &mut Stage, cuts: &[usize]) -> Self {
        // Its pages are there.
        stage.engine.synchronize().unwrap();
        let home = tempfile::tempdir().unwrap();
        let (node, client) = serve(&home).await;
        let whole = stage.cache(stage.base());
        let share = |cut: &[usize]| Share {
            planes: (cut[0], cut[1]),
            heads: (0, 4),
            tokens: TokenShare::ALL,
        };
        let groups = cuts.windows(2).map(|cut| whole.only(&[share(cut)]));
        let kind = KindPages {
            space: stage.space.clone(),
            is_draft: false,
            groups: groups.collect(),
        };
        let lanes = Lanes::new(&stage.gpu, options(usize::MAX));
        let make = move |cache: PagedCache| {
            // SAFETY: the pages are gone after the worker.
            let copier = unsafe { CudaCopier::on(&lanes, cache) };
            Ok(Copier::Cuda(Box::new(copier?)))
        };
        let attach = AttachRequest {
            instance: "engine".into(),
            world_size: 1,
            ..AttachRequest::default()
        };
        stage.copier = None;
        let breaker = LookupBreaker::new(3, Duration::from_secs(1));
        let worker = Worker::new(&client, attach, vec![kind], make, breaker).unwrap();
        while let Err(error) = worker.session().await.map(drop) {
            assert!(matches!(error, WorkerError::Pinning), "{error}");
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Self {
            worker,
            node,
            _home: home,
        }
    }

    async fn store(&self, chunks: &[ComputedChunk]) -> Stored {
        let kinds = [ComputedKind {
            kind: 0,
            chunks: chunks.to_vec(),
        }];
        let store = StoreJob {
            kinds: &kinds,
            after: None,
            deadline: Duration::from_secs(30),
        };
        let mut stored = self.worker.store(store, &Hold::default()).await.unwrap();
        stored.remove(0)
    }
}

/// One group, and two.
const CUTS: [&[usize]; 2] = [&[0, 6], &[0, 3, 6]];

fn chunks(stage: &Stage, groups: usize) -> Vec<ComputedChunk> {
    let hash = |nth: u8| kvgate::format::ChunkHash([nth; 32]);
    let chunk = |nth: u8| ComputedChunk {
        hash: hash(nth + 1),
        parent: hash(nth),
        spans: vec![stage.job(nth.into()).spans; groups],
    };
    vec![chunk(0), chunk(1)]
}

/// The device may still write there: given up, the slots were others' at once.
#[test]
fn slots_of_a_store_that_failed_on_the_gpu_are_not_given_up() {
    for (cuts, nth) in [(CUTS[0], 1), (CUTS[1], 1), (CUTS[1], 2)] {
        let mock = Mock::start(0);
        Runtime::new().unwrap().block_on(async {
            let mut stage = Stage::with_heads(&KNOWN[1], usize::MAX, (0, 4)).unwrap();
            let chunks = chunks(&stage, cuts.len() - 1);
            let rank = Rank::new(&mut stage, cuts).await;
            mock.fail("cuEventSynchronize", mock.calls("cuEventSynchronize") + nth, 700);
            assert!(rank.store(&chunks).await.error.is_some());
            let slots = rank.node.status().slots;
            assert_eq!(
                slots.filling, 2,
                "neither committed nor given up while the process lives"
            );
            mock.reset(0);
            std::mem::forget((rank.worker, stage));
        });
    }
}

/// The same where it may still read.
#[test]
fn slots_of_a_load_that_failed_on_the_gpu_are_not_released() {
    for (cuts, nth) in [(CUTS[0], 1), (CUTS[1], 1), (CUTS[1], 2)] {
        let mock = Mock::start(0);
        Runtime::new().unwrap().block_on(async {
            let mut stage = Stage::with_heads(&KNOWN[1], usize::MAX, (0, 4)).unwrap();
            let chunks = chunks(&stage, cuts.len() - 1);
            let rank = Rank::new(&mut stage, cuts).await;
            assert_eq!(rank.store(&chunks).await.stored, 2);
            let wanted = chunks.iter().map(|chunk| WantedChunk {
                hash: chunk.hash,
                spans: chunk.spans.clone(),
            });
            let wanted = [WantedKind {
                kind: 0,
                chunks: wanted.collect(),
            }];
            mock.fail("cuEventSynchronize", mock.calls("cuEventSynchronize") + nth, 700);
            let load = LoadJob {
                id: "load",
                kinds: &wanted,
                order: Order::Chunk,
                deadline_ms: Some(20_000),
                after: None,
            };
            let progress = Arc::new(LoadProgress::new([(0, stage.space.planes().len(), 2)]));
            let failed = rank.worker.load(load, &progress).await.unwrap();
            assert!(!failed.is_empty());
            assert!(rank.node.status().slots.leases > 0, "while the process lives");
            mock.reset(0);
            std::mem::forget((rank.worker, stage));
        });
    }
}
