//! Lookup, load and store of chunks: the place where keys, objects, existence and the arena meet.
//!
//! A [`Gateway`] is the cache of one node, as a library. Everything is per chunk: an outcome with its reason, and
//! one chunk's failure never fails its neighbours. Every call has a deadline, and the bytes in flight are bounded.
//!
//! All public methods are here. Their work is done in these folders and files; each uses only those before it:
//!
//! - `bucket`: S3, the lowest tier: the existence of its chunks, turns of GETs and PUTs.
//! - `tiers`: memory, disk and bucket together, and chunks on their way between them.
//! - `fetch`: one chunk into its slot, from S3 or the disk, verified.
//! - `lower`: chunks that go down to the disk and to S3.
//! - `store`: an engine's reserve and commit.
//! - `for_peer`: what another node is answered.
//! - `load`: chunks handed out, in chunk order or in layer order.
//! - `lookup`: which chunks exist.
//!
//! A node is built with tiers above S3 ([`Gateway::with_tiers`]), a library with a memory tier that keeps nothing.
//!
//! Not here: sessions, and copies into an engine's memory.

mod boundary;
mod bucket;
mod chunk;
mod credit;
mod fetch;
mod for_peer;
mod load;
mod lookup;
mod lower;
mod miss;
mod options;
mod slot;
mod store;
mod task;
mod tiers;
mod warnings;

use std::future::Future;
use std::sync::Arc;

use tokio::time::Instant;

pub use self::boundary::{Boundary, Kinds, NeededRun};
use self::bucket::Bucket;
pub use self::bucket::{RefreshOptions, RefreshStats, StoreOutcome};
pub use self::chunk::LoadedChunk;
pub use self::credit::Credit;
pub use self::for_peer::ForPeer;
pub use self::load::{AfterMiss, LoadSpec, LoadStream};
pub use self::lookup::Lookup;
pub use self::miss::Miss;
pub use self::options::{GatewayOptions, OpenError, open_store, s3_options};
pub use self::slot::{ArenaFull, FilledSlot, StoreSlot};
pub use self::store::{ReserveCall, Reserved, Skip};
use self::tiers::Tiers;
pub use self::tiers::{BehindOptions, BehindStats, DiskTier, Flight, Flow, KvEvents, TierOptions, TierStats};
use crate::arena::Arena;
use crate::cache::existence::Known;
use crate::cache::peers::Peers;
use crate::config::Config;
use crate::format::{ChunkHash, KeyError, Keyring, Space};
use crate::metrics::Times;
use crate::protocol::{BoundChunk, Flushed, Strategy};
use crate::s3::dns::NameState;
use crate::s3::fanout::{EndpointState, Requests};
use crate::s3::object::{Capabilities, ObjectError, ObjectStore, RequestCounts, RequestTimes};

/// See the [module](self). Cheap to clone; clones share everything.
#[derive(Clone)]
pub struct Gateway(Arc<Tiers>);

/// Constructors.
impl Gateway {
    /// Reaches the bucket, finds out the server's capabilities, and makes the arena.
    pub async fn open(config: &Config) -> Result<Self, OpenError> {
        let store = open_store(config, None).await?;
        Self::over(store, config).await
    }

    /// The same as [`open`](Self::open), over a store that is open already.
    pub async fn over(store: Arc<dyn ObjectStore>, config: &Config) -> Result<Self, OpenError> {
        // Room for a retry after an attempt that timed out.
        let deadline = Instant::now() + 2 * config.s3.request_timeout;
        store.check_bucket(deadline).await?;
        let options = GatewayOptions::with_keys(config).await?;
        let probe_key = options.keys.own(&format!("probe-{:016x}", fastrand::u64(..)));
        let capabilities = Capabilities::probe(&*store, &probe_key, config.s3.probe, deadline).await?;
        tracing::debug!(?capabilities, "what the S3 server does");
        let arena = Arena::new(&options::arena(config))?;
        Ok(Self::new(store, arena, capabilities, options))
    }

    /// A library over a store that was probed already; [`Gateway::open`] does everything from a configuration.
    pub fn new(
        store: Arc<dyn ObjectStore>,
        arena: Arena,
        capabilities: Capabilities,
        options: GatewayOptions,
    ) -> Self {
        let gateway = Self::with_tiers(store, arena, options, TierOptions::library());
        gateway.found_capabilities(capabilities);
        gateway
    }

    /// A node with tiers above S3. The server's capabilities may be unknown at first: none is assumed until
    /// [`found_capabilities`](Self::found_capabilities).
    pub fn with_tiers(
        store: Arc<dyn ObjectStore>,
        arena: Arena,
        options: GatewayOptions,
        tiers: TierOptions,
    ) -> Self {
        Self(Tiers::new(arena, Bucket::new(store, options), tiers))
    }

    /// Sets the server's capabilities; only the first call counts.
    pub fn found_capabilities(&self, capabilities: Capabilities) {
        self.0.bucket.found_capabilities(capabilities);
    }
}

/// Lookup and load.
impl Gateway {
    /// Tells by `deadline` which chunks of a prompt exist.
    pub async fn lookup(
        &self,
        space: &Space,
        chunks: &[ChunkHash],
        strategy: Strategy,
        deadline: Instant,
    ) -> Lookup {
        lookup::lookup(&self.0, space, chunks, strategy, deadline).await
    }

    /// Tells by `deadline` after how many leading chunks an engine can go on, for a model with several kinds of KV.
    pub async fn boundary(
        &self,
        kinds: Kinds<'_>,
        chunks: &[ChunkHash],
        strategy: Strategy,
        deadline: Instant,
    ) -> Boundary {
        boundary::boundary(&self.0, kinds, chunks, strategy, deadline).await
    }

    /// Brings chunks into slots, verified. Needs a tokio runtime; starts at once.
    pub fn load(&self, request: LoadSpec) -> LoadStream {
        load::start(&self.0, request, None)
    }

    /// The same as [`load`](Self::load), with a limit on the bytes of slots that it holds at a time.
    pub fn load_on_credit(&self, request: LoadSpec, credit: Credit) -> LoadStream {
        load::start(&self.0, request, Some(credit))
    }

    /// The answer to a peer that asks for a chunk, `asker` by its id. None: this node has no peers.
    pub fn for_peer(&self, space: &Space, chunk: &ChunkHash, asker: Option<&str>) -> Option<ForPeer> {
        let peers = self.peers()?;
        Some(for_peer::for_peer(&self.0, peers, space, chunk, asker))
    }

    /// Whether a peer that asks for a chunk would get it.
    pub fn has_for_peer(&self, space: &Space, chunk: &ChunkHash) -> bool {
        let has = |peers: &Arc<Peers>| for_peer::has_for_peer(&self.0, peers, space, chunk);
        self.peers().is_some_and(has)
    }

    /// Other nodes, asked before S3.
    pub fn peers(&self) -> Option<&Arc<Peers>> {
        self.0.options.peers.as_ref()
    }

    /// Keeps the chunks that are in memory there until `until`; returns how many.
    pub fn pin(&self, space: &Space, chunks: &[ChunkHash], until: Instant) -> usize {
        self.0.memory.pin(space.key(), chunks, until)
    }

    pub fn unpin(&self, space: &Space, chunks: &[ChunkHash]) -> usize {
        self.0.memory.unpin(space.key(), chunks)
    }

    /// An engine says what its own events tell of chunks, parents first: those that are in memory or on disks have
    /// events from now on.
    pub fn bind(&self, space: &Space, scheme: &str, chunks: Vec<BoundChunk>) {
        self.0.bind(space.key(), scheme, chunks);
    }

    pub fn events(&self) -> &KvEvents {
        &self.0.events
    }
}

/// A node's stores, which never wait: reserve, commit, write behind.
impl Gateway {
    /// Slots for the new chunks of one call. `credit` limits the bytes of slots that the engine holds at a time.
    pub fn reserve_behind<'a>(&'a self, space: &'a Space, credit: Option<&'a Credit>) -> ReserveCall<'a> {
        ReserveCall::new(&self.0, space, credit)
    }

    /// Commits a filled chunk: it is a hit from now on. Returns at once. False if another store of it came first.
    ///
    /// # Errors
    ///
    /// The space may not be served: its key was taken away since the reserve. The chunk is not kept.
    pub fn commit(&self, chunk: ChunkHash, parent: ChunkHash, reserved: Reserved) -> Result<bool, KeyError> {
        store::commit(&self.0, chunk, parent, reserved)
    }

    /// Waits until all chunks that were committed before, in an earlier life as well, are on S3, but for those that
    /// the configuration keeps from it; at most until the deadline.
    pub async fn flush(&self, deadline: Instant) -> Flushed {
        self.0.flush(deadline).await
    }

    /// Gives up chunks that are not on the lower tiers yet; returns how many chunks are lost by that, and how many
    /// the disks keep: those are sent the next time.
    pub fn give_up(&self) -> (u64, u64) {
        self.0.give_up()
    }

    /// Sends the chunks that the disks had at start, and those of disks that are taken up again; a flush waits for
    /// them from now on. Also sends declined chunks that are asked for again. It goes on for as long as the returned
    /// future is polled.
    pub fn send_more(&self) -> impl Future<Output = ()> + Send + use<> {
        lower::send_more(&self.0)
    }
}

/// A library's stores, which wait for S3.
impl Gateway {
    /// A slot for a new chunk of `space`. Never waits.
    pub fn reserve(&self, space: &Space) -> Result<StoreSlot, ArenaFull> {
        slot::reserve(&self.0.arena, space)
    }

    /// Puts a chunk on S3, unless it is there. Its slot is free again when nothing reads it any more: with the
    /// answer, or, after a time-out or a dropped future, when the HTTP client has let go of it.
    pub async fn write_through(&self, chunk: FilledSlot, deadline: Instant) -> StoreOutcome {
        self.0.bucket.write_through(chunk, deadline).await
    }
}

/// Calls for operators.
impl Gateway {
    /// Removes a chunk from every tier. Reads under way go on.
    pub async fn remove(
        &self,
        space: &Space,
        chunk: &ChunkHash,
        deadline: Instant,
    ) -> Result<(), ObjectError> {
        let key = (space.key(), *chunk);
        self.0.delete_here(&key).await;
        let _nobody_changes_it = self.0.bucket.delete(key, deadline).await?;
        // A load that began meanwhile may have brought it back, or still will.
        self.0.delete_here(&key).await;
        self.0.bucket.cache.learn(key, Known::Absent, Instant::now());
        self.0.bucket.cache.is_gone(&key);
        Ok(())
    }

    /// Makes a space known: chunks on the disks may have waited for that.
    pub fn knows(&self, space: &Space) {
        lower::knows(&self.0, space);
    }

    /// Drops chunks that are too old, in memory and on the disks; otherwise that happens only when a chunk is asked
    /// for.
    pub async fn expire(&self) {
        self.0.expire().await;
    }

    /// Tries disks that were taken out again, for as long as the future is polled.
    pub async fn retry_disks(&self) {
        if let Some(disk) = self.0.disk() {
            disk.retry().await;
        }
    }

    /// Refreshes the chunks on S3 that are used, for as long as the future is polled.
    pub async fn refresh_used(&self, options: RefreshOptions) {
        self.0.bucket.refresh_used(options).await;
    }

    pub fn refresh_stats(&self) -> RefreshStats {
        self.0.bucket.refresh.stats()
    }

    /// Forgets which chunks are known to exist; the next lookup asks S3 again.
    pub fn forget_existence(&self) {
        self.0.bucket.cache.forget_all();
    }

    /// Checks endpoint, bucket and credentials; the error says what is wrong with them.
    pub async fn check(&self, deadline: Instant) -> Result<(), ObjectError> {
        self.0.bucket.store.check_bucket(deadline).await
    }

    /// The latest chunk that could not be used for want of a key, if that happens now.
    pub fn keyless(&self) -> Option<String> {
        self.0.bucket.warnings.keyless.latest()
    }

    /// Takes over the keys of tenants, as a reload has read them.
    pub fn replace_keys(&self, keys: &Keyring) {
        self.0.replace_keys(keys);
    }

    /// The keys of tenants.
    pub fn keyring(&self) -> &Keyring {
        &self.0.bucket.options.keyring
    }

    pub fn arena(&self) -> &Arena {
        &self.0.arena
    }

    /// The server's capabilities, as far as they are known.
    pub fn capabilities(&self) -> Capabilities {
        self.0.bucket.capabilities()
    }

    /// None before S3 has answered.
    pub fn known_capabilities(&self) -> Option<Capabilities> {
        self.0.bucket.known_capabilities()
    }

    /// HTTP requests sent so far.
    pub fn requests(&self) -> RequestCounts {
        self.0.bucket.store.requests()
    }

    /// Of each kind of request, the times until its answer or its failure.
    pub fn request_times(&self) -> RequestTimes {
        self.0.bucket.store.request_times()
    }

    /// Of each queue of a load its word and the waits in it.
    pub fn waits(&self) -> [(&'static str, Times); 7] {
        let (times, store) = (&self.0.times, &self.0.bucket.store);
        [
            ("credit", times.credit.read()),
            ("flight", times.flight.read()),
            ("arena", times.arena.read()),
            ("turn", times.turn.read()),
            ("window", store.window_waits()),
            ("connection", store.connection_waits()),
            ("disk", self.0.disk_waits()),
        ]
    }

    /// Bytes that engines may have reserved or committed and that are not stored yet.
    pub fn write_behind_max(&self) -> usize {
        self.0.options.behind.bytes_max
    }

    /// Bytes that each tenant has in memory, and on disks.
    pub fn tenants(&self) -> [Vec<(String, u64)>; 2] {
        self.0.tenants()
    }

    /// From a commit until the lowest tier has the chunk.
    pub fn behind_times(&self) -> Times {
        self.0.times.behind.read()
    }

    /// The names that the server's endpoints come from.
    pub fn names(&self) -> Vec<NameState> {
        self.0.bucket.store.names()
    }

    /// The state of the server's endpoints.
    pub fn endpoints(&self) -> Vec<EndpointState> {
        self.0.bucket.store.endpoints()
    }

    /// Requests to all endpoints, also to those that have left.
    pub fn s3_totals(&self) -> Requests {
        self.0.bucket.store.totals()
    }

    /// Whether the latest PUT was refused because a quota is used up.
    pub fn is_over_quota(&self) -> bool {
        self.0.bucket.store.is_over_quota()
    }

    /// The number of chunks that are known to exist or not.
    pub fn existence_entries(&self) -> usize {
        self.0.bucket.cache.entries().0
    }

    pub fn tier_stats(&self) -> TierStats {
        self.0.stats()
    }
}
