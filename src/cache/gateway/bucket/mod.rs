//! S3, the lowest tier: the existence of its chunks, the turns of GETs and PUTs, the PUTs themselves, and chunks in use
//! that are refreshed.

mod outgoing;
mod put;
mod refresh;
mod runs;
mod turns;
mod unanswered;

use std::sync::{Arc, Mutex, OnceLock};

use dashmap::DashMap;
use tokio::sync::{Notify, Semaphore};
use tokio::task::AbortHandle;
use tokio::time::Instant;

pub use self::put::StoreOutcome;
use self::refresh::Refresh;
pub use self::refresh::{RefreshOptions, RefreshStats};
use self::runs::Runs;
pub use self::turns::{Turn, TurnPosition, Turns, Waiting};
use self::unanswered::Unanswered;
use super::credit::kib;
use super::miss::Miss;
use super::options::GatewayOptions;
use super::warnings::BucketWarnings;
use crate::arena::Arena;
use crate::cache::existence::{ExistenceCache, Prober, Useless};
use crate::format::{ChunkHash, ChunkId, HeaderError, Space, SpaceKey};
use crate::s3::object::{Capabilities, ObjectStore};

/// See the [module](self).
pub struct Bucket {
    pub store: Arc<dyn ObjectStore>,
    pub options: GatewayOptions,
    pub cache: Arc<ExistenceCache>,
    pub prober: Prober,
    pub get_turns: Turns,
    /// Of what peers are asked for. Apart from those of S3: the peer may be waiting for S3, and both of them for each other.
    pub peer_turns: Turns,
    pub warnings: BucketWarnings,
    pub refresh: Refresh,
    pub runs: Runs,
    pub unanswered: Unanswered,
    capabilities: Arc<OnceLock<Capabilities>>,
    /// KiB that PUTs may have in flight together.
    put_kib: Arc<Semaphore>,
    /// Chunks whose PUT or DELETE is under way; another change of the chunk waits for its end.
    changing: DashMap<ChunkId, Option<AbortHandle>>,
    /// For encrypted objects, once there are any.
    buffers: Mutex<Option<Arena>>,
    /// Notified when a change has ended.
    changed: Notify,
    /// The time at which each space's space.json was last seen; locked while that is being found out.
    spaces: DashMap<SpaceKey, Arc<tokio::sync::Mutex<Option<Instant>>>>,
}

impl Bucket {
    pub fn new(store: Arc<dyn ObjectStore>, mut options: GatewayOptions) -> Arc<Self> {
        options.lookup_concurrency = options.lookup_concurrency.max(1);
        options.lookup_probes = options.lookup_probes.max(1);
        let cache = Arc::new(ExistenceCache::new(options.cache));
        let warnings = BucketWarnings::new(options.log_repeat);
        let capabilities: Arc<OnceLock<Capabilities>> = Arc::default();
        let prober = Prober::new(
            Arc::clone(&store),
            Arc::clone(&cache),
            options.keys.clone(),
            Arc::clone(&capabilities),
            options.lookup_concurrency,
            options.lookup_deadline,
            [
                warnings.damaged.clone(),
                warnings.denied.clone(),
                warnings.keyless.clone(),
            ],
        );
        Arc::new(Self {
            get_turns: Turns::new(options.get_bytes_max, {
                let store = Arc::clone(&store);
                move || store.window_bytes()
            }),
            peer_turns: Turns::new(options.get_bytes_max, || usize::MAX),
            put_kib: Arc::new(Semaphore::new(kib(options.put_bytes_max) as usize)),
            changing: DashMap::new(),
            buffers: Mutex::default(),
            changed: Notify::new(),
            refresh: Refresh::default(),
            runs: Runs::new(options.run_chunks),
            unanswered: Unanswered::new(options.run_chunks, options.outage_pause_max),
            spaces: DashMap::new(),
            store,
            warnings,
            options,
            capabilities,
            cache,
            prober,
        })
    }

    /// The server's capabilities, as far as they are known.
    pub fn capabilities(&self) -> Capabilities {
        self.capabilities.get().copied().unwrap_or_default()
    }

    pub fn known_capabilities(&self) -> Option<Capabilities> {
        self.capabilities.get().copied()
    }

    /// Sets the server's capabilities; only the first call counts.
    pub fn found_capabilities(&self, capabilities: Capabilities) {
        // Set already.
        let _ = self.capabilities.set(capabilities);
    }

    pub fn object_key(&self, (space, chunk): &ChunkId) -> String {
        self.options.keys.chunk(*space, chunk)
    }

    /// Whether S3 has the chunk, as far as is known now.
    pub fn is_present(&self, key: &ChunkId) -> Option<bool> {
        self.cache.is_present(key, Instant::now())
    }

    /// The reason why the chunk is not worth a request, if one is known.
    pub fn missing(&self, space: &Space, chunk: &ChunkHash) -> Option<Miss> {
        let key = (space.key(), *chunk);
        if self.is_present(&key) != Some(false) {
            return None;
        }
        Some(match self.cache.useless(&key) {
            None => Miss::Absent,
            Some((_, Useless::Damaged)) => Miss::Quarantined,
            Some((_, Useless::Left(why @ HeaderError::NoKey { .. }))) => Miss::NoKey(why),
            Some((_, Useless::Left(why))) => Miss::Unreadable(why),
        })
    }
}
