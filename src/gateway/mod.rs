//! Lookup, load and store of chunks: where keys, objects, existence and the arena meet.
//!
//! A [`Gateway`] is what one node runs, as a library. Everything is per chunk: an outcome with its reason, and one
//! chunk's failure never fails its neighbours. Every call has a deadline, and the bytes in flight are bounded.
//!
//! Not here: tiers below the arena other than S3, sessions, and copies into an engine's memory.

mod chunk_order;
mod drive;
mod fetch;
mod layer_order;
mod load;
mod lookup;
mod miss;
mod options;
mod store;
mod stream;
mod task;
mod turns;

use std::sync::Arc;

use dashmap::DashMap;
use tokio::sync::Semaphore;
use tokio::time::Instant;

pub use load::{AfterMiss, LoadRequest, LoadedChunk, Order};
pub use lookup::{Lookup, TierRun};
pub use miss::Miss;
pub use options::{GatewayOptions, OpenError, open_store};
pub use store::{ArenaFull, NewChunk, StoreOutcome, StoreSlot};
pub use stream::LoadStream;

use self::turns::Turns;
use crate::arena::Arena;
use crate::chunk::SpaceKey;
use crate::existence::{ExistenceCache, Prober};
use crate::fanout::EndpointState;
use crate::object::{Capabilities, ObjectError, ObjectStore, RequestCounts};

/// See the [module](self). Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct Gateway(Arc<Inner>);

struct Inner {
    store: Arc<dyn ObjectStore>,
    arena: Arena,
    options: GatewayOptions,
    capabilities: Capabilities,
    cache: Arc<ExistenceCache>,
    prober: Prober,
    get_turns: Turns,
    /// KiB that PUTs may have in flight.
    put_kib: Semaphore,
    /// Chunks whose PUT is under way.
    storing: DashMap<(SpaceKey, crate::chunk::ChunkHash), ()>,
    /// When each space's space.json was last seen to be there; locked while that is being found out.
    spaces: DashMap<SpaceKey, Arc<tokio::sync::Mutex<Option<Instant>>>>,
}

impl Gateway {
    /// Over a store that was probed already; [`Gateway::open`] does all from a configuration.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        arena: Arena,
        capabilities: Capabilities,
        mut options: GatewayOptions,
    ) -> Self {
        options.lookup_concurrency = options.lookup_concurrency.max(1);
        options.lookup_probes = options.lookup_probes.max(1);
        let cache = Arc::new(ExistenceCache::new(options.cache));
        let prober = Prober::new(
            Arc::clone(&store),
            Arc::clone(&cache),
            options.keys.clone(),
            capabilities.attributes,
            options.lookup_concurrency,
            options.lookup_deadline,
        );
        Self(Arc::new(Inner {
            get_turns: Turns::new(options.get_bytes_max, {
                let store = Arc::clone(&store);
                move || store.window_bytes()
            }),
            put_kib: Semaphore::new(kib(options.put_bytes_max) as usize),
            storing: DashMap::new(),
            spaces: DashMap::new(),
            store,
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

    pub fn capabilities(&self) -> Capabilities {
        self.0.capabilities
    }

    /// HTTP requests sent so far.
    pub fn requests(&self) -> RequestCounts {
        self.0.store.requests()
    }

    /// What is known of the server's endpoints.
    pub fn endpoints(&self) -> Vec<EndpointState> {
        self.0.store.endpoints()
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
