//! A rank's loads, as connectors make them, and what they ask of the daemon for that.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use kvgate::engine::client::{Client, DaemonAddress};
use kvgate::engine::copy::known::{KNOWN, Pages};
use kvgate::engine::copy::{Copier, CpuCopier, CpuOptions, PagedCache, SlotMapping, Tensor};
use kvgate::engine::rank::{
    ComputedChunk, ComputedKind, Hold, KindPages, LoadJob, LoadProgress, LookupBreaker, StoreJob, Stored,
    WantedChunk, WantedKind, Worker,
};
use kvgate::format::Space;
use kvgate::protocol::{AttachRequest, Order};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{UnixListener, UnixStream};

use crate::support::daemon::{Site, alone, eventually, store};
use crate::support::fixture::Prompt;

/// A socket in front of the daemon's; counts the releases that go through it, and holds them until all is `copied`.
fn counted(socket: &Path, home: &Path, copied: Option<Arc<LoadProgress>>) -> (PathBuf, Arc<AtomicUsize>) {
    let (own, behind) = (home.join("counted.sock"), socket.to_owned());
    let listener = UnixListener::bind(&own).unwrap();
    let releases = Arc::<AtomicUsize>::default();
    let count = Arc::clone(&releases);
    tokio::spawn(async move {
        while let Ok((mut engine, _)) = listener.accept().await {
            let (behind, count, copied) = (behind.clone(), Arc::clone(&count), copied.clone());
            tokio::spawn(async move {
                let mut daemon = UnixStream::connect(behind).await.unwrap();
                let (mut from_engine, mut to_engine) = engine.split();
                let (mut from_daemon, mut to_daemon) = daemon.split();
                let calls = async {
                    let mut bytes = vec![0; 1 << 16];
                    // A call is one write.
                    while let Ok(read @ 1..) = from_engine.read(&mut bytes).await {
                        if bytes.starts_with(b"POST /v1/release ") {
                            count.fetch_add(1, Ordering::SeqCst);
                            if let Some(copied) = copied.clone() {
                                tokio::task::spawn_blocking(move || copied.wait(0, 0))
                                    .await
                                    .unwrap();
                            }
                        }
                        if to_daemon.write_all(&bytes[..read]).await.is_err() {
                            break;
                        }
                    }
                };
                tokio::select! {
                    () = calls => {}
                    _ = tokio::io::copy(&mut from_daemon, &mut to_engine) => {}
                }
            });
        }
    });
    (own, releases)
}

const ONE_THREAD: CpuOptions = CpuOptions {
    threads: 1,
    bytes_per_thread: 1 << 30,
};

/// Pages of vLLM with room for so many chunks, and the memory that they lie in.
fn plain_pages(space: &Space, chunks: usize) -> (Vec<u8>, PagedCache) {
    let pages = Pages {
        blocks: chunks as u32,
        block_tokens: space.chunk_tokens(),
        heads: None,
        element_bytes: 2,
    };
    let (bytes, mut tensors) = KNOWN[0].tensors(space, &pages);
    let memory = vec![0_u8; bytes as usize];
    let at = |tensor: &mut Tensor| tensor.address += memory.as_ptr() as u64;
    tensors.iter_mut().for_each(at);
    let cache = PagedCache::new(space, &tensors).unwrap();
    (memory, cache)
}

/// A rank with one kind of KV, whose layers are one group.
fn plain_worker(client: &Client, attach: AttachRequest, space: &Space, cache: &PagedCache) -> Worker {
    let kind = KindPages {
        space: space.clone(),
        is_draft: false,
        groups: vec![cache.clone()],
    };
    // SAFETY: the pages outlive the worker, and no other code touches them.
    let make = |cache| Ok(Copier::Cpu(unsafe { CpuCopier::new(cache, ONE_THREAD) }));
    let breaker = LookupBreaker::new(3, Duration::from_secs(1));
    Worker::new(client, attach, vec![kind], make, breaker).unwrap()
}

/// Each chunk was released by a call of its own, which the next copy waited for.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn chunks_of_a_load_are_released_together() {
    const CHUNKS: usize = 40;
    // A call is held until all is copied; the next takes what was copied meanwhile, the last the rest.
    // The calls of a narrow window are what makes room for the rest.
    for (window, is_held, calls_max) in [("16MiB", true, 3), ("1MiB", false, CHUNKS)] {
        let site = Site::new().await;
        let serving = site.serve(&[("load.window", window)]).await;
        serving.ready().await;
        let prompt = Prompt::new(CHUNKS);
        let engine = serving.attach("writer").await;
        store(&serving.client, &engine, &prompt).await;
        serving.flush().await;

        let (memory, cache) = plain_pages(&prompt.space, CHUNKS);
        let table: Vec<u32> = (0..CHUNKS as u32).collect();
        let wanted = |(i, hash): (usize, &kvgate::format::ChunkHash)| WantedChunk {
            hash: *hash,
            spans: vec![
                cache
                    .spans(
                        SlotMapping::Blocks {
                            table: &table,
                            first_token: (i * prompt.space.chunk_tokens() as usize) as u64,
                        },
                        0..prompt.space.chunk_tokens(),
                    )
                    .unwrap(),
            ],
        };
        let wanted = [WantedKind {
            kind: 0,
            chunks: prompt.hashes.iter().enumerate().map(wanted).collect(),
        }];
        let progress = Arc::new(LoadProgress::new([(0, prompt.space.planes().len(), CHUNKS)]));
        let held = is_held.then(|| Arc::clone(&progress));
        let (socket, releases) = counted(&serving.config.api.socket, site.home.path(), held);
        let client = Client::new(DaemonAddress::Unix(socket));
        let worker = plain_worker(&client, alone("reader"), &prompt.space, &cache);
        let load = LoadJob {
            id: "load",
            kinds: &wanted,
            order: Order::Chunk,
            deadline_ms: Some(20_000),
            after: None,
        };
        assert_eq!(worker.load(load, &progress).await.unwrap(), []);
        eventually(|| serving.node.status().slots.leases == 0).await;
        let calls = releases.load(Ordering::SeqCst);
        assert!(
            (1..=calls_max).contains(&calls),
            "{calls} calls for {CHUNKS} chunks with a window of {window}"
        );
        assert!(memory.iter().any(|&byte| byte != 0));
    }
}

/// It was counted as another's to store, and nobody stored it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_its_other_rank_nothing_is_there() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let prompt = Prompt::new(1);
    serving.client.declare(&prompt.space).await.unwrap();
    let pages = Pages {
        blocks: 1,
        block_tokens: prompt.space.chunk_tokens(),
        heads: None,
        element_bytes: 2,
    };
    let (bytes, mut tensors) = KNOWN[0].tensors(&prompt.space, &pages);
    let memory = vec![0_u8; bytes as usize];
    for tensor in &mut tensors {
        tensor.address += memory.as_ptr() as u64;
    }
    let cache = PagedCache::new(&prompt.space, &tensors).unwrap();
    let table = SlotMapping::Blocks {
        table: &[0],
        first_token: 0,
    };
    let chunk = ComputedChunk {
        hash: prompt.hashes[0],
        parent: prompt.parent(0),
        spans: vec![cache.spans(table, 0..prompt.space.chunk_tokens()).unwrap()],
    };
    let attach = AttachRequest {
        world_size: 2,
        tp: Some((0, 2)),
        ..alone("engine")
    };
    let worker = plain_worker(&serving.client, attach, &prompt.space, &cache);
    let kinds = [ComputedKind {
        kind: 0,
        chunks: vec![chunk],
    }];
    let store = StoreJob {
        kinds: &kinds,
        after: None,
        deadline: Duration::from_secs(20),
    };
    let refused = Stored {
        refused: 1,
        ..Stored::default()
    };
    assert_eq!(worker.store(store, &Hold::default()).await.unwrap(), [refused]);
}

/// While idle engines kept it mapped, a new daemon found no room for its own arena beside it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_lets_go_of_the_arena_of_a_daemon_that_is_gone() {
    let site = Site::new().await;
    let serving = site.serve(&[]).await;
    serving.ready().await;
    let path = serving.config.arena.path.clone().unwrap().display().to_string();
    let are_mapped = || {
        std::fs::read_to_string("/proc/self/maps")
            .unwrap()
            .matches(&path)
            .count()
    };
    let space = Prompt::new(1).space;
    let (_memory, cache) = plain_pages(&space, 1);
    let worker = plain_worker(&serving.client, alone("one"), &space, &cache);
    drop(worker.session().await.unwrap());
    // The daemon's, which is in this process, and the engine's.
    assert_eq!(are_mapped(), 2);
    serving.end().await;
    eventually(|| are_mapped() == 0).await;
    assert!(worker.session().await.is_err());
}
