//! The host pools of an engine that waits for its calls, as SGLang's HiCache does. A chunk is one page of a pool.
//!
//! Each call looks up, loads or stores some pages and ends within a deadline. Copies between the arena and a pool are
//! made by the calling thread, one a page. So none is under way when a call has returned, however it ended: the deadline
//! falls between copies only. [`rank::Worker`](kvgate::engine::rank::Worker) copies in the background, and would have to be
//! waited for beyond the deadline: this engine waits for its threads no longer than 10 s.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Once, PoisonError, RwLock, Weak};
use std::time::{Duration, Instant};

use kvgate::engine::client::{ApiSession, Client, ClientError, DaemonAddress, Engine, LoadLines};
use kvgate::engine::copy::{
    Copier, CopyError, CopyJob, MappingError, PagedCache, SlotMapping, Spans, Tensor,
};
use kvgate::engine::rank::LookupBreaker;
use kvgate::format::{ChunkHash, PageNames, Space};
use kvgate::protocol::{
    AttachRequest, CommitOutcome, LoadLine, LoadRequest, Order, ReserveChunk, ReservedChunk, Share, SlotName,
    Strategy,
};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use serde::Deserialize;
use tokio::runtime::Handle;

use crate::copier::Copiers;
use crate::error::failed;
use crate::lookups::split;
use crate::runtime::runtime;
use crate::space::PySpace;

/// The settings of a rank.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Settings {
    socket: PathBuf,
    /// A user whose socket is trusted, besides root and this process's own.
    #[serde(default)]
    socket_owner: Option<u32>,
    attach: AttachRequest,
    /// Time that a store waits for room in the gateway.
    store_deadline_ms: u64,
    /// Of each lookup, with all that it waits for.
    deadline_ms: u64,
    /// Time that the gateway has for an answer of its own.
    patience_ms: u64,
    /// Time that the gateway has to find out which chunks there are.
    lookup_deadline_ms: u64,
    /// The same while S3 does not answer: its memory and disks do.
    local_lookup_deadline_ms: u64,
    lookup_strategy: Strategy,
    pin_ms: u64,
    /// Bytes of pages that are reserved at a time.
    store_bytes: u64,
    /// Pages that a load gives back together: few calls, and the gateway's window is free soon.
    release_pages: usize,
    /// Time after which a store asks again, where the gateway had no room or not all ranks were there.
    retry_ms: u64,
    breaker_timeouts: u32,
    breaker_pause_ms: u64,
}

/// The outcome of a load or a store.
#[pyclass(frozen, get_all, module = "kvgate._native")]
pub struct Moved {
    done: Vec<bool>,
    /// Bytes that were copied.
    bytes: u64,
    seconds: f64,
    /// The first reason why a page is not done.
    error: Option<String>,
}

/// See the [module](self).
#[pyclass(frozen, module = "kvgate._native")]
pub struct Pages {
    client: Client,
    stores: Arc<Side>,
    /// A rank loads what it needs when it needs it: each is an engine of its own, for which no other rank is waited for.
    loads: Arc<Side>,
    kept: Once,
    pools: Pools,
    copiers: Copiers,
    limits: Limits,
    breaker: LookupBreaker,
    /// Of lookups for which S3 did not answer in time. SGLang makes one after the other.
    s3: LookupBreaker,
    /// A store waited for room in vain. Until one finds some again, each asks only once: SGLang has one thread for all.
    is_full: AtomicBool,
    loads_begun: AtomicU64,
}

type Pools = Arc<RwLock<Vec<Arc<Pool>>>>;

struct Limits {
    deadline_ms: u64,
    patience: Duration,
    /// The query that is the same in all lookups, but for its deadline.
    lookup: String,
    lookup_deadline_ms: u64,
    local_lookup_deadline_ms: u64,
    store_deadline: Duration,
    store_bytes: u64,
    release_pages: usize,
    retry: Duration,
}

/// One kind of KV in a host pool.
struct Pool {
    space: Space,
    names: PageNames,
    copier: Copier,
    /// The copier of the share that this rank owns, made when the node has said which.
    own: Mutex<Option<(Vec<Share>, Arc<Copier>)>>,
}

/// An engine, as the daemon sees it, and the number of pools whose spaces it has declared.
struct Side {
    engine: Engine,
    declared: tokio::sync::Mutex<usize>,
}

/// The time of a call.
#[derive(Clone, Copy)]
struct Time {
    began: Instant,
    given: Duration,
}

impl Time {
    fn new(ms: u64) -> Self {
        Self {
            began: Instant::now(),
            given: Duration::from_millis(ms),
        }
    }

    fn left(self) -> Duration {
        self.given.saturating_sub(self.began.elapsed())
    }
}

/// Pages to ask for again, and what they wait for.
struct Again {
    pages: Vec<usize>,
    missing: Missing,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
enum Missing {
    #[error("the gateway had no room for it")]
    Room,
    #[error("not all ranks of this engine are attached to the gateway")]
    Ranks,
}

/// A call that did not do all of its pages.
#[derive(Debug, thiserror::Error)]
enum PagesError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Copy(#[from] CopyError),
    #[error(transparent)]
    Mapping(#[from] MappingError),
    #[error(transparent)]
    Arena(#[from] kvgate::arena::AttachedError),
    #[error("the gateway is left alone for a while: it did not answer in time")]
    Paused,
    #[error("the calls before it took all the time")]
    NoTime,
    #[error("it took longer than {0:?}")]
    Late(Duration),
    #[error("{0}")]
    Refused(Missing),
    #[error("{0}")]
    Other(String),
}

#[pymethods]
impl Pages {
    #[new]
    fn new(py: Python<'_>, settings: &str) -> PyResult<Self> {
        let settings: Settings = serde_json::from_str(settings).map_err(failed)?;
        py.detach(|| Self::start(settings))
    }

    /// Adds a pool; returns its number.
    fn add(&self, space: &PySpace, tensors: &str) -> PyResult<usize> {
        let tensors: Vec<Tensor> = serde_json::from_str(tensors).map_err(failed)?;
        let cache = PagedCache::new(&space.0, &tensors).map_err(failed)?;
        if cache.block_tokens() != space.0.chunk_rows() {
            let (page, chunk) = (cache.block_tokens(), space.0.chunk_rows());
            return Err(failed(format!(
                "a page has {page} rows, and a chunk {chunk}: they must be the same"
            )));
        }
        let copier = self.copiers.make(cache).map_err(failed)?;
        let mut pools = self.pools.write().unwrap_or_else(PoisonError::into_inner);
        pools.push(Arc::new(Pool {
            space: space.0.clone(),
            names: space.names(),
            copier,
            own: Mutex::default(),
        }));
        Ok(pools.len() - 1)
    }

    /// Attaches, now and to each later life of the gateway, so that all ranks are there when one of them stores: SGLang
    /// has only one of them store what all of them have.
    fn attach(&self) -> PyResult<()> {
        let (side, pools) = (Arc::downgrade(&self.stores), Arc::clone(&self.pools));
        let (runtime, pause) = (runtime()?, self.limits.patience / 8);
        self.kept
            .call_once(|| drop(runtime.spawn(keep_attached(side, pools, pause))));
        Ok(())
    }

    fn lookup(&self, py: Python<'_>, pools: Vec<usize>, hashes: PyBackedBytes) -> PyResult<(usize, usize)> {
        let mut hashes = split(&hashes)?;
        if let Some(&pool) = pools.first() {
            // All pools of one lookup are one model's.
            hashes = self.pool(pool)?.names.of(hashes);
        }
        let spaces = pools
            .iter()
            .map(|&pool| Ok(self.pool(pool)?.space.id().to_string()));
        let spaces: Vec<String> = spaces.collect::<PyResult<_>>()?;
        let Some((first, others)) = spaces.split_first() else {
            return Err(failed("a lookup is about one pool at least"));
        };
        let is_local = self.s3.is_open();
        let deadline_ms = match is_local {
            true => self.limits.local_lookup_deadline_ms,
            false => self.limits.lookup_deadline_ms,
        };
        let mut query = format!("{}&deadline_ms={deadline_ms}", self.limits.lookup);
        for space in others {
            query.push_str("&with=");
            query.push_str(space);
        }
        let look = async {
            self.loads.session(&self.pools).await?;
            let found = match self.client.lookup_hashes(first, &hashes, &query).await {
                // A daemon of which this process has not heard yet.
                Err(ClientError::Refused(problem)) if problem.code == "unknown_space" => {
                    self.loads.declare(&self.pools, 0).await?;
                    self.client.lookup_hashes(first, &hashes, &query).await
                }
                found => found,
            };
            Ok::<_, PagesError>(found?)
        };
        let time = Time::new(self.limits.deadline_ms);
        let found = py.detach(|| self.run(time, look)).map_err(failed)?;
        if !is_local {
            let is_late = found.is_open && time.began.elapsed() >= Duration::from_millis(deadline_ms);
            self.s3.note(!is_late);
        }
        Ok((found.boundary, found.full))
    }

    /// `deadline_ms`: of the call, with all that it waits for.
    fn load(
        &self,
        py: Python<'_>,
        pool: usize,
        hashes: PyBackedBytes,
        pages: Vec<i64>,
        deadline_ms: u64,
    ) -> PyResult<Moved> {
        let (pool, time) = (self.pool(pool)?, Time::new(deadline_ms));
        let hashes = pool.names.of(split(&hashes)?);
        Ok(py.detach(|| {
            let mut moving = Moving::new(hashes.len());
            let ended = match pool.spans(&hashes, &pages) {
                Ok(spans) => self.run(time, self.load_pages(&pool, &hashes, &spans, time, &mut moving)),
                Err(error) => Err(error),
            };
            moving.ended(ended)
        }))
    }

    fn store(
        &self,
        py: Python<'_>,
        pool: usize,
        hashes: PyBackedBytes,
        parents: PyBackedBytes,
        pages: Vec<i64>,
        deadline_ms: u64,
    ) -> PyResult<Moved> {
        let time = Time::new(deadline_ms);
        let pool = self.pool(pool)?;
        let [hashes, parents] = [split(&hashes)?, split(&parents)?].map(|hashes| pool.names.of(hashes));
        if parents.len() != hashes.len() {
            return Err(failed("a store needs a parent for each page"));
        }
        Ok(py.detach(|| {
            let mut moving = Moving::new(hashes.len());
            let ended = match pool.spans(&hashes, &pages) {
                Ok(spans) => {
                    let pages = (&*hashes, &*parents, &*spans);
                    self.run(time, self.store_pages(&pool, pages, time, &mut moving))
                }
                Err(error) => Err(error),
            };
            moving.ended(ended)
        }))
    }
}

impl Pages {
    fn start(settings: Settings) -> PyResult<Self> {
        let millis = Duration::from_millis;
        let patience = millis(settings.patience_ms);
        let client = Client::new(DaemonAddress::Unix(settings.socket))
            .trusting(settings.socket_owner)
            .with_patience(patience);
        let breaker = || LookupBreaker::new(settings.breaker_timeouts, millis(settings.breaker_pause_ms));
        let attach = settings.attach;
        let side = |request| {
            Arc::new(Side {
                engine: client.engine(request),
                declared: tokio::sync::Mutex::default(),
            })
        };
        let alone = AttachRequest {
            instance: format!("{} loads {}", attach.instance, attach.rank),
            world_size: 1,
            ..AttachRequest::default()
        };
        let is_alone = attach.world_size == 1;
        let stores = side(attach);
        let loads = if is_alone {
            Arc::clone(&stores)
        } else {
            side(alone)
        };
        Ok(Self {
            client,
            stores,
            loads,
            kept: Once::new(),
            pools: Pools::default(),
            copiers: Copiers::new(None, None)?,
            limits: Limits {
                deadline_ms: settings.deadline_ms,
                patience,
                lookup: format!(
                    "prefetch=true&strategy={}&pin_ms={}",
                    settings.lookup_strategy, settings.pin_ms
                ),
                lookup_deadline_ms: settings.lookup_deadline_ms,
                local_lookup_deadline_ms: settings.local_lookup_deadline_ms,
                store_deadline: millis(settings.store_deadline_ms),
                store_bytes: settings.store_bytes,
                release_pages: settings.release_pages,
                retry: millis(settings.retry_ms),
            },
            breaker: breaker(),
            s3: breaker(),
            is_full: AtomicBool::default(),
            loads_begun: AtomicU64::default(),
        })
    }

    fn pool(&self, number: usize) -> PyResult<Arc<Pool>> {
        let pools = self.pools.read().unwrap_or_else(PoisonError::into_inner);
        let pool = pools.get(number).map(Arc::clone);
        pool.ok_or_else(|| failed(format!("pool {number} of {}", pools.len())))
    }

    /// Does the work on this thread, within its time.
    fn run<T>(&self, time: Time, work: impl Future<Output = Result<T, PagesError>>) -> Result<T, PagesError> {
        if self.breaker.is_open() {
            return Err(PagesError::Paused);
        }
        // The answer to the last call must come before the deadline, and its last line may take the patience longer.
        if time.left() <= 2 * self.limits.patience {
            return Err(PagesError::NoTime);
        }
        let runtime = runtime().map_err(|error| PagesError::Other(error.to_string()))?;
        let ended = runtime.block_on(async { tokio::time::timeout(time.left(), work).await });
        let ended = ended.unwrap_or(Err(PagesError::Late(time.given)));
        let is_late = matches!(
            ended,
            Err(PagesError::Late(_) | PagesError::Client(ClientError::Late(_)))
        );
        self.breaker.note(!is_late);
        ended
    }

    async fn load_pages(
        &self,
        pool: &Pool,
        hashes: &[ChunkHash],
        spans: &[Spans],
        time: Time,
        moving: &mut Moving,
    ) -> Result<(), PagesError> {
        let session = self.loads.session(&self.pools).await?;
        let given = time.left().saturating_sub(2 * self.limits.patience);
        if given.is_zero() {
            return Err(PagesError::Late(time.given));
        }
        let number = self.loads_begun.fetch_add(1, Ordering::Relaxed);
        let request = LoadRequest {
            session: String::new(),
            load_id: format!("pages-{number}"),
            space: pool.space.id().to_string(),
            hashes: hashes.to_vec(),
            order: Order::Chunk,
            continue_after_miss: false,
            deadline_ms: Some(u64::try_from(given.as_millis()).unwrap_or(u64::MAX)),
            declines: false,
        };
        let load_id = request.load_id.clone();
        let mut lines = session.load(request).await?;
        let mut lent = Lent::new(&session, load_id);
        while let Some(line) = next(&mut lines, &mut lent).await? {
            match line {
                LoadLine::Missing { i, miss, detail } => {
                    moving.miss(format!("page {i} of {}: {miss}: {detail}", hashes.len()));
                }
                LoadLine::Here {
                    i,
                    slot,
                    generation,
                    offset,
                    planes,
                    ..
                } if i < hashes.len() => {
                    lent.names.push(SlotName { slot, generation });
                    let layout = pool.space.layout();
                    let planes = planes.0..planes.1;
                    if planes != (0..layout.planes()) {
                        let what = format!("planes {planes:?} of {}", layout.planes());
                        return Err(ClientError::Answer(what).into());
                    }
                    let at = layout.header_len();
                    let from = session.arena.slot(offset, layout.payload_len())?;
                    let job = CopyJob {
                        planes,
                        spans: spans[i].clone(),
                        at,
                    };
                    pool.copier
                        .load(from.kept_by(Arc::clone(&session)), &job, None)?
                        .wait()?;
                    // As a rank does: what was read after the slot changed hands is nothing.
                    if session.arena.generation(slot)? == generation {
                        moving.done(i, pool.copied(&pool.copier));
                    } else {
                        let what = format!("page {i}: its slot was another chunk's when the copy ended");
                        return Err(ClientError::Answer(what).into());
                    }
                    if lent.names.len() >= self.limits.release_pages {
                        lent.release().await?;
                    }
                }
                LoadLine::Here { .. } | LoadLine::End { .. } => {}
            }
        }
        lent.release().await?;
        lent.is_over = true;
        Ok(())
    }

    async fn store_pages(
        &self,
        pool: &Pool,
        (hashes, parents, spans): (&[ChunkHash], &[ChunkHash], &[Spans]),
        time: Time,
        moving: &mut Moving,
    ) -> Result<(), PagesError> {
        let bytes = (pool.space.layout().payload_len() as u64).max(1);
        let at_once = usize::try_from(self.limits.store_bytes / bytes).map_or(1, |pages| pages.max(1));
        let mut left: Vec<usize> = (0..hashes.len()).collect();
        while !left.is_empty() {
            let session = self.stores.session(&self.pools).await?;
            // A reserve and a commit.
            if time.left() < 2 * self.limits.patience {
                return Err(PagesError::Late(time.given));
            }
            let now: Vec<usize> = left.drain(..at_once.min(left.len())).collect();
            let again = self
                .store_some(&session, pool, (hashes, parents, spans), &now, moving)
                .await?;
            let is_stuck = again.pages.len() == now.len();
            left.splice(..0, again.pages);
            if !is_stuck {
                continue;
            }
            let until = match again.missing {
                _ if self.is_full.load(Ordering::Relaxed) => Duration::ZERO,
                Missing::Room => self.limits.store_deadline,
                Missing::Ranks => time.given.saturating_sub(2 * self.limits.patience),
            };
            if time.began.elapsed() + self.limits.retry >= until {
                self.is_full.store(true, Ordering::Relaxed);
                return Err(PagesError::Refused(again.missing));
            }
            tokio::time::sleep(self.limits.retry).await;
        }
        Ok(())
    }

    /// Stores these of the pages.
    async fn store_some(
        &self,
        session: &Arc<ApiSession>,
        pool: &Pool,
        (hashes, parents, spans): (&[ChunkHash], &[ChunkHash], &[Spans]),
        now: &[usize],
        moving: &mut Moving,
    ) -> Result<Again, PagesError> {
        let chunks = now.iter().map(|&page| ReserveChunk {
            hash: hashes[page],
            parent: parents[page],
            tokens: None,
        });
        let space = pool.space.id().to_string();
        let reserved = session.reserve(&space, chunks.collect()).await?;
        let (mut pages, mut filled) = (Vec::new(), Vec::new());
        let is_incomplete = reserved.ranks_missing;
        let missing = if is_incomplete {
            Missing::Ranks
        } else {
            Missing::Room
        };
        let mut taken = Reserved::new(session);
        for (&page, chunk) in now.iter().zip(reserved.chunks) {
            match chunk {
                ReservedChunk::Slot {
                    slot,
                    generation,
                    offset,
                } => {
                    taken.names.push(SlotName { slot, generation });
                    filled.push((page, offset));
                }
                ReservedChunk::Skip { skip } if skip == "full" || is_incomplete => pages.push(page),
                ReservedChunk::Skip { .. } => moving.done(page, 0),
            }
        }
        if filled.is_empty() {
            return Ok(Again { pages, missing });
        }
        self.is_full.store(false, Ordering::Relaxed);
        let copier = pool.own_copier(&reserved.own, &self.copiers)?;
        let layout = pool.space.layout();
        for &(page, offset) in &filled {
            let to = session.arena.slot(offset, layout.payload_len())?;
            let job = CopyJob {
                planes: 0..layout.planes(),
                spans: spans[page].clone(),
                at: layout.header_len(),
            };
            copier
                .store(to.kept_by(Arc::clone(session)), &job, None)?
                .wait()?;
        }
        let committed = session.commit(taken.names.clone()).await?;
        taken.names.clear();
        for (&(page, _), outcome) in filled.iter().zip(&committed.slots) {
            match outcome {
                CommitOutcome::Ok { .. } => moving.done(page, pool.copied(&copier)),
                CommitOutcome::Refused { code, detail } => moving.miss(format!("{code}: {detail}")),
            }
        }
        Ok(Again { pages, missing })
    }
}

/// The next line. Before a wait the slots of finished copies are given back, since the gateway may wait for them.
async fn next(lines: &mut LoadLines, lent: &mut Lent<'_>) -> Result<Option<LoadLine>, PagesError> {
    if let Ok(line) = tokio::time::timeout(Duration::ZERO, lines.next()).await {
        return Ok(line?);
    }
    lent.release().await?;
    Ok(lines.next().await?)
}

/// Until the rank has ended.
async fn keep_attached(side: Weak<Side>, pools: Pools, pause: Duration) {
    while let Some(side) = side.upgrade() {
        let session = side.session(&pools).await;
        drop(side);
        match session {
            Ok(session) => {
                let ended = session.ended();
                drop(session);
                ended.await;
            }
            Err(_) => tokio::time::sleep(pause).await,
        }
    }
}

impl Side {
    /// The session of now, in which all pools' spaces are declared.
    async fn session(&self, pools: &Pools) -> Result<Arc<ApiSession>, PagesError> {
        let mut declared = self.declared.lock().await;
        *declared = self.declare(pools, *declared).await?;
        drop(declared);
        Ok(self.engine.session().await?)
    }

    /// Declares the spaces from this one on. Returns how many there are.
    async fn declare(&self, pools: &Pools, first: usize) -> Result<usize, PagesError> {
        let pools = pools.read().unwrap_or_else(PoisonError::into_inner).clone();
        for pool in &pools[first.min(pools.len())..] {
            self.engine.declare(&pool.space).await?;
        }
        Ok(pools.len())
    }
}

impl Pool {
    /// Where each page lies. `pages`: their numbers in the pool.
    fn spans(&self, hashes: &[ChunkHash], pages: &[i64]) -> Result<Vec<Spans>, PagesError> {
        if pages.len() != hashes.len() {
            let (pages, hashes) = (pages.len(), hashes.len());
            return Err(PagesError::Other(format!("{pages} pages for {hashes} hashes")));
        }
        let spans = pages.iter().map(|&page| {
            let table = [u32::try_from(page).unwrap_or(u32::MAX)];
            let mapping = SlotMapping::Blocks {
                table: &table,
                first_token: 0,
            };
            Ok(self.copier.cache().spans(mapping, 0..self.space.chunk_rows())?)
        });
        spans.collect()
    }

    fn own_copier(&self, own: &[Share], copiers: &Copiers) -> Result<Arc<Copier>, CopyError> {
        let mut kept = self.own.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((known, copier)) = &*kept
            && known == own
        {
            return Ok(Arc::clone(copier));
        }
        let copier = Arc::new(copiers.make(self.copier.cache().only(own))?);
        *kept = Some((own.to_vec(), Arc::clone(&copier)));
        Ok(copier)
    }

    /// Bytes of a page that this copier copies.
    fn copied(&self, copier: &Copier) -> u64 {
        u64::from(self.space.chunk_rows()) * copier.cache().token_bytes()
    }
}

/// A load or a store so far.
struct Moving {
    began: Instant,
    done: Vec<bool>,
    bytes: u64,
    error: Option<String>,
}

impl Moving {
    fn new(pages: usize) -> Self {
        Self {
            began: Instant::now(),
            done: vec![false; pages],
            bytes: 0,
            error: None,
        }
    }

    fn done(&mut self, page: usize, bytes: u64) {
        self.done[page] = true;
        self.bytes += bytes;
    }

    fn miss(&mut self, reason: String) {
        self.error.get_or_insert(reason);
    }

    fn ended(mut self, ended: Result<(), PagesError>) -> Moved {
        if let Err(error) = ended {
            self.miss(error.to_string());
        }
        if !self.done.contains(&false) {
            self.error = None;
        }
        Moved {
            done: self.done,
            bytes: self.bytes,
            seconds: self.began.elapsed().as_secs_f64(),
            error: self.error,
        }
    }
}

/// A load's slots that are not given back. Those of a load that ends early are given back behind it.
struct Lent<'a> {
    session: &'a Arc<ApiSession>,
    load_id: String,
    names: Vec<SlotName>,
    is_over: bool,
    handle: Handle,
}

impl<'a> Lent<'a> {
    fn new(session: &'a Arc<ApiSession>, load_id: String) -> Self {
        Self {
            session,
            load_id,
            names: Vec::new(),
            is_over: false,
            handle: Handle::current(),
        }
    }

    async fn release(&mut self) -> Result<(), PagesError> {
        if !self.names.is_empty() {
            let names = std::mem::take(&mut self.names);
            self.session.release(&self.load_id, Some(names)).await?;
        }
        Ok(())
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        let (session, load_id) = (Arc::clone(self.session), std::mem::take(&mut self.load_id));
        self.handle
            .spawn(async move { session.release(&load_id, None).await });
    }
}

/// Reserved slots that are not committed. Those of a store that ends early are given up behind it.
struct Reserved<'a> {
    session: &'a Arc<ApiSession>,
    names: Vec<SlotName>,
    handle: Handle,
}

impl<'a> Reserved<'a> {
    fn new(session: &'a Arc<ApiSession>) -> Self {
        Self {
            session,
            names: Vec::new(),
            handle: Handle::current(),
        }
    }
}

impl Drop for Reserved<'_> {
    fn drop(&mut self) {
        if self.names.is_empty() {
            return;
        }
        let (session, names) = (Arc::clone(self.session), std::mem::take(&mut self.names));
        self.handle.spawn(async move { session.abort(names).await });
    }
}
