//! Lookup, load and store of chunks: where keys, objects, existence and the arena meet.
//!
//! A [`Gateway`] is what one node runs, as a library. Everything is per chunk: an outcome with its reason, and one
//! chunk's failure never fails its neighbours. Every call has a deadline, and the bytes in flight are bounded.
//!
//! With [`TierOptions`] it is a node's: chunks stay in memory and on disks, and stores go to S3 behind the engine's back.
//!
//! Not here: sessions, and copies into an engine's memory.

mod arriving;
mod backlog;
mod behind;
mod chunk_order;
mod commit;
mod credit;
mod drive;
mod fetch;
mod layer_order;
mod load;
mod lookup;
mod miss;
mod options;
mod stream;
mod task;
mod tiers;
mod turns;
mod warnings;
mod write_through;

use std::sync::{Arc, OnceLock};

use dashmap::DashMap;
use tokio::sync::{Notify, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::Instant;

pub use behind::{BehindOptions, BehindStats};
pub use commit::{Reserved, Skip, TierStats};
pub use credit::Credit;
pub use load::{AfterMiss, LoadSpec, LoadedChunk};
pub use lookup::Lookup;
pub use miss::Miss;
pub use options::{GatewayOptions, OpenError, open_store};
pub use stream::LoadStream;
pub use tiers::{DiskTier, Flow, TierOptions};
pub use write_through::{ArenaFull, FilledSlot, StoreOutcome, StoreSlot};

use self::tiers::Tiers;
use self::turns::Turns;
use self::warnings::Warnings;
use crate::arena::Arena;
use crate::cache::existence::{ExistenceCache, Known, Prober};
use crate::format::{ChunkHash, ChunkId, Space, SpaceKey};
use crate::s3::fanout::EndpointState;
use crate::s3::object::{Capabilities, ErrorKind, ObjectError, ObjectStore, Operation, RequestCounts};

/// See the [module](self). Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct Gateway(Arc<Inner>);

struct Inner {
    store: Arc<dyn ObjectStore>,
    arena: Arena,
    options: GatewayOptions,
    capabilities: Arc<OnceLock<Capabilities>>,
    tiers: Option<Tiers>,
    cache: Arc<ExistenceCache>,
    prober: Prober,
    get_turns: Turns,
    warnings: Warnings,
    /// KiB that PUTs may have in flight.
    put_kib: Arc<Semaphore>,
    /// Chunks whose PUT or DELETE is under way: the other waits for its end.
    changing: DashMap<ChunkId, Option<AbortHandle>>,
    /// One of them has ended.
    changed: Notify,
    /// When each space's space.json was last seen to be there; locked while that is being found out.
    spaces: DashMap<SpaceKey, Arc<tokio::sync::Mutex<Option<Instant>>>>,
}

impl Gateway {
    /// Over a store that was probed already; [`Gateway::open`] does all from a configuration.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        arena: Arena,
        capabilities: Capabilities,
        options: GatewayOptions,
    ) -> Self {
        let gateway = Self::with_tiers(store, arena, options, None);
        gateway.found_capabilities(capabilities);
        gateway
    }

    /// With tiers above S3, or none. What the server can do need not be known yet: nothing is taken for granted until
    /// [`found_capabilities`](Self::found_capabilities).
    pub fn with_tiers(
        store: Arc<dyn ObjectStore>,
        arena: Arena,
        mut options: GatewayOptions,
        tiers: Option<TierOptions>,
    ) -> Self {
        options.lookup_concurrency = options.lookup_concurrency.max(1);
        options.lookup_probes = options.lookup_probes.max(1);
        let cache = Arc::new(ExistenceCache::new(options.cache));
        let warnings = Warnings::new(options.log_repeat);
        let capabilities: Arc<OnceLock<Capabilities>> = Arc::default();
        let prober = Prober::new(
            Arc::clone(&store),
            Arc::clone(&cache),
            options.keys.clone(),
            Arc::clone(&capabilities),
            options.lookup_concurrency,
            options.lookup_deadline,
            warnings.damaged.clone(),
        );
        Self(Arc::new(Inner {
            get_turns: Turns::new(options.get_bytes_max, {
                let store = Arc::clone(&store);
                move || store.window_bytes()
            }),
            put_kib: Arc::new(Semaphore::new(kib(options.put_bytes_max) as usize)),
            changing: DashMap::new(),
            changed: Notify::new(),
            spaces: DashMap::new(),
            store,
            warnings,
            tiers: tiers.map(|tiers| Tiers::new(&arena, tiers)),
            arena,
            options,
            capabilities,
            cache,
            prober,
        }))
    }

    pub fn arena(&self) -> &Arena {
        &self.0.arena
    }

    /// What the server can do, as far as is known.
    pub fn capabilities(&self) -> Capabilities {
        self.0.capabilities.get().copied().unwrap_or_default()
    }

    /// Only the first time counts.
    pub fn found_capabilities(&self, capabilities: Capabilities) {
        // Known already.
        let _ = self.0.capabilities.set(capabilities);
    }

    /// HTTP requests sent so far.
    pub fn requests(&self) -> RequestCounts {
        self.0.store.requests()
    }

    /// What is known of the server's endpoints.
    pub fn endpoints(&self) -> Vec<EndpointState> {
        self.0.store.endpoints()
    }

    async fn remove_here(&self, key: &ChunkId) {
        if let Some(tiers) = &self.0.tiers {
            tiers.behind.cancel(key);
            tiers.arriving.forget(key);
            tiers.memory.delete(key);
            if let Some(disk) = tiers.disk() {
                disk.delete(key).await;
            }
        }
    }

    /// How many chunks are known to exist or not.
    pub fn existence_entries(&self) -> usize {
        self.0.cache.entries().0
    }

    /// Removes a chunk from every tier. Whoever reads it goes on.
    pub async fn remove(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        deadline: Instant,
    ) -> Result<(), ObjectError> {
        let key = (space.key(), *chunk);
        self.remove_here(&key).await;
        let object = self.0.options.keys.chunk(key.0, chunk);
        // What S3 may have received already of this node's would come after the DELETE.
        let Ok(_change) = tokio::time::timeout_at(deadline, self.change(key)).await else {
            return Err(ObjectError::new(
                Operation::Delete,
                &object,
                ErrorKind::Deadline,
                "waiting for a store of it to end",
            ));
        };
        self.0.store.delete(&[object], deadline).await?;
        // What a load that began meanwhile has brought back, or still will.
        self.remove_here(&key).await;
        self.0.cache.learn(key, Known::Absent, Instant::now());
        self.0.cache.lift_quarantine(&key);
        Ok(())
    }

    /// Forgets what is known to exist; the next lookup asks S3 again.
    pub fn forget_existence(&self) {
        self.0.cache.forget_all();
    }

    /// Fails with what is wrong with endpoint, bucket or credentials.
    pub async fn check(&self, deadline: Instant) -> Result<(), ObjectError> {
        self.0.store.check_bucket(deadline).await
    }
}

/// Semaphores count in KiB: a permit each byte would not fit in 32 bits.
fn kib(bytes: usize) -> u32 {
    u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX)
}
