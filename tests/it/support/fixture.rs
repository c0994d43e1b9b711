//! Small spaces, chunks with known bytes, and gateways over any store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kvgate::arena::{Arena, ArenaOptions};
use kvgate::cache::existence::CacheLimits;
use kvgate::cache::gateway::{
    AfterMiss, FilledSlot, Gateway, GatewayOptions, LoadSpec, LoadedChunk, Lookup, Miss, StoreOutcome,
};
use kvgate::format::{ChunkHash, ChunkHasher, DigestKind, KeyPrefix, Keyring, Space};
use kvgate::protocol::Order;
use kvgate::protocol::ProbeMode;
use kvgate::protocol::Strategy;
use kvgate::s3::object::{Capabilities, Condition, ObjectStore};
use tokio::time::Instant;

pub const ABSENT_TTL: Duration = Duration::from_millis(200);

pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Six planes of 16 KiB: sections of two planes with the options below.
pub fn space() -> Space {
    Space::from_json(
        r#"{"model": "test/tiny", "revision": "1", "dtype": "float16", "chunk_tokens": 16,
            "mha": {"layers": 6, "heads": 4, "head_dim": 64}}"#,
    )
    .unwrap()
}

/// A prompt of `n` chunks that no other test has.
#[derive(Clone)]
pub struct Prompt {
    pub space: Space,
    pub root: ChunkHash,
    pub hashes: Vec<ChunkHash>,
}

impl Prompt {
    pub fn new(n: usize) -> Self {
        Self::of(space(), n)
    }

    pub fn of(space: Space, n: usize) -> Self {
        let hasher = ChunkHasher::new(&space, None).unwrap();
        let root = hasher
            .root(format!("{:016x}", fastrand::u64(..)).as_bytes(), b"")
            .unwrap();
        let tokens: Vec<u32> = (0..).take(n * space.chunk_tokens() as usize).collect();
        let hashes = hasher.chain(&root, &tokens, &[]).unwrap();
        Self { space, root, hashes }
    }

    pub fn parent(&self, i: usize) -> ChunkHash {
        if i == 0 { self.root } else { self.hashes[i - 1] }
    }

    /// The bytes that chunk `i` must hold.
    pub fn payload(&self, i: usize) -> Vec<u8> {
        let mut payload = vec![0; self.space.layout().payload_len()];
        blake3::Hasher::new()
            .update(self.hashes[i].as_bytes())
            .finalize_xof()
            .fill(&mut payload);
        payload
    }
}

/// A place in the bucket of one test's own, and gateways to it.
pub struct Site {
    pub store: Arc<dyn ObjectStore>,
    pub keys: KeyPrefix,
    pub capabilities: Capabilities,
}

static SITES: AtomicU32 = AtomicU32::new(0);

impl Site {
    pub async fn new(store: Arc<dyn ObjectStore>) -> Self {
        let number = SITES.fetch_add(1, Ordering::Relaxed);
        let keys = KeyPrefix::new(&format!(
            "it-{}-{number}-{:08x}",
            std::process::id(),
            fastrand::u32(..)
        ));
        let probe = keys.own("probe");
        let capabilities = Capabilities::probe(&*store, &probe, ProbeMode::Auto, soon())
            .await
            .unwrap();
        Self {
            store,
            keys,
            capabilities,
        }
    }

    pub fn options(&self) -> GatewayOptions {
        GatewayOptions {
            keys: self.keys.clone(),
            digest: DigestKind::Crc64Nvme,
            keyring: Keyring::default(),
            part_bytes: 40_000,
            layer_part_bytes: 40_000,
            get_bytes_max: 400_000,
            put_bytes_max: 400_000,
            cache: CacheLimits {
                present_ttl: Duration::from_secs(300),
                absent_ttl: ABSENT_TTL,
                bytes: 1 << 24,
            },
            lookup_deadline: Duration::from_secs(30),
            lookup_concurrency: 32,
            lookup_probes: 15,
            run_chunks: 1 << 15,
            outage_pause_max: Duration::from_millis(500),
            log_repeat: Duration::from_mins(1),
        }
    }

    /// A node of its own, which knows nothing yet.
    pub fn gateway(&self) -> Gateway {
        self.gateway_over(Arc::clone(&self.store))
    }

    pub fn gateway_over(&self, store: Arc<dyn ObjectStore>) -> Gateway {
        self.gateway_with(store, self.options())
    }

    pub fn gateway_with(&self, store: Arc<dyn ObjectStore>, options: GatewayOptions) -> Gateway {
        Gateway::new(store, arena(8 << 20), self.capabilities, options)
    }

    pub fn key(&self, prompt: &Prompt, i: usize) -> String {
        self.keys.chunk(prompt.space.key(), &prompt.hashes[i])
    }

    pub async fn read(&self, key: &str) -> Vec<u8> {
        self.store.read(key, 1 << 24, soon()).await.unwrap().to_vec()
    }

    /// Puts something else at a key, as damage or an operator would.
    pub async fn overwrite(&self, key: &str, bytes: Vec<u8>) {
        self.store
            .put(key, Bytes::from(bytes), Condition::Always, soon())
            .await
            .unwrap();
    }

    pub async fn remove(&self, key: String) {
        self.store.delete(&[key], soon()).await.unwrap();
    }
}

pub fn arena(size: usize) -> Arena {
    Arena::new(&ArenaOptions {
        size,
        ..ArenaOptions::default()
    })
    .unwrap()
}

pub async fn store_chunk(gateway: &Gateway, prompt: &Prompt, i: usize) -> StoreOutcome {
    let mut slot = gateway.reserve(&prompt.space).expect("room in the arena");
    slot.payload_mut().copy_from_slice(&prompt.payload(i));
    let chunk = FilledSlot {
        hash: prompt.hashes[i],
        parent: prompt.parent(i),
        slot,
    };
    gateway.write_through(chunk, soon()).await
}

/// Stores all chunks; each must be acknowledged.
pub async fn store_all(gateway: &Gateway, prompt: &Prompt) {
    for i in 0..prompt.hashes.len() {
        let outcome = store_chunk(gateway, prompt, i).await;
        assert!(matches!(outcome, StoreOutcome::Stored), "chunk {i}: {outcome:?}");
    }
}

pub async fn lookup(gateway: &Gateway, prompt: &Prompt, strategy: Strategy) -> Lookup {
    gateway
        .lookup(&prompt.space, &prompt.hashes, strategy, soon())
        .await
}

pub async fn load(
    gateway: &Gateway,
    prompt: &Prompt,
    after_miss: AfterMiss,
) -> Vec<Result<LoadedChunk, Miss>> {
    let request = LoadSpec {
        space: prompt.space.clone(),
        chunks: prompt.hashes.clone(),
        order: Order::Chunk,
        after_miss,
        deadline: soon(),
    };
    gateway.load(request).collect().await
}

/// "ok" for chunks whose every byte is right, else the reason's code.
pub async fn load_codes(gateway: &Gateway, prompt: &Prompt, after_miss: AfterMiss) -> Vec<&'static str> {
    let outcomes = load(gateway, prompt, after_miss).await;
    let code = |(i, outcome): (usize, &Result<LoadedChunk, Miss>)| match outcome {
        Ok(chunk) => {
            assert!(
                chunk.payload()[..] == prompt.payload(i)[..],
                "chunk {i} has other bytes"
            );
            "ok"
        }
        Err(miss) => miss.code(),
    };
    outcomes.iter().enumerate().map(code).collect()
}

/// Whether everything given out was given back, once those who still read it are done.
pub async fn arena_empties(gateway: &Gateway) {
    for _ in 0..500 {
        if gateway.arena().stats().used_bytes == 0 {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("slots are not given back: {:?}", gateway.arena().stats());
}
