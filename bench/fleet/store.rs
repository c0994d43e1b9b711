//! A gateway's way to the modelled RGWs: the object store that its calls go to. Attempts, endpoints, windows, breakers and
//! the watch of DNS are kvgate's own, called as `s3/object/s3.rs`, `s3/net/http_client.rs` and `s3/net/host.rs` call them.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kvgate::s3::dns::{AddressSource, Resolver};
use kvgate::s3::fanout::{Attempts, Class, Endpoints, Handover, Loss, Outcome, Permit, Route, Start};
use kvgate::s3::net::{Landing, Traffic};
use kvgate::s3::object::{
    Condition, ErrorKind, GetFuture, GetRange, ListPage, ObjectError, ObjectMeta, ObjectStore, Operation,
    PutExtras, RequestCounts, Result, S3Options, StoreFuture, Version,
};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

use super::bucket::{Bucket, SCALE};
use super::link::{IDLE, Link};
use super::names::{Asks, Names};
use super::peers::Fabric;
use super::rgw::{Bins, Fault, Rgw, pass_until};

/// What all gateways share.
pub struct World {
    pub bucket: Bucket,
    /// Where gateways ask each other.
    pub fabric: Option<Arc<Fabric>>,
    pub rgws: HashMap<SocketAddr, Arc<Rgw>>,
    pub names: Arc<Names>,
    pub counts: Counts,
}

/// Of the whole fleet.
pub struct Counts {
    pub calls: Bins,
    pub heads: Bins,
    pub gets: Bins,
    pub puts: Bins,
    /// GETs of the prompt that all share.
    pub shared: Bins,
    /// Of bodies that arrived, in KiB.
    pub kib: Bins,
    /// The most attempts that one call took.
    pub attempts_most: AtomicU64,
}

impl Counts {
    pub fn new() -> Self {
        Self {
            calls: Bins::new(),
            heads: Bins::new(),
            gets: Bins::new(),
            puts: Bins::new(),
            shared: Bins::new(),
            kib: Bins::new(),
            attempts_most: AtomicU64::new(0),
        }
    }

    pub fn attempts(&self, from: f64, to: f64) -> u64 {
        let operations = [&self.heads, &self.gets, &self.puts];
        operations.iter().map(|attempts| attempts.sum(from, to)).sum()
    }
}

pub struct Store {
    world: Arc<World>,
    endpoints: Endpoints<Link>,
    attempts: Attempts,
    in_use: Semaphore,
    connect_timeout: Duration,
    request_timeout: Duration,
}

/// One request.
struct Request<'a> {
    operation: Operation,
    key: &'a str,
    /// Bytes of body on the way, as RGWs see them.
    up: usize,
    down: usize,
    hint: Option<&'a str>,
    route: Route,
}

impl Store {
    /// Starts the watch of DNS; needs a tokio runtime.
    pub fn new(world: &Arc<World>, options: &S3Options) -> Arc<Self> {
        let endpoints = Endpoints::new(options.endpoints);
        let names = Arc::clone(&world.names);
        let resolver = Resolver::over(options.dns.clone(), move |_| Box::new(Asks(Arc::clone(&names))));
        follow(&resolver, endpoints.clone(), Arc::clone(world));
        Arc::new(Self {
            world: Arc::clone(world),
            endpoints,
            attempts: Attempts::new(options.attempts),
            in_use: Semaphore::new(options.connections_max),
            connect_timeout: options.connect_timeout,
            request_timeout: options.request_timeout,
        })
    }

    /// As `S3::attempt`.
    async fn attempt(
        &self,
        request: Request<'_>,
        deadline: Instant,
        land: Option<&Handover<Landing>>,
    ) -> Result<()> {
        let failed = |kind| ObjectError::new(request.operation, request.key, kind, "");
        let now = Instant::now();
        if deadline <= now {
            return Err(failed(ErrorKind::Deadline));
        }
        let limit = now + self.request_timeout;
        match timeout_at(limit.min(deadline), self.send(&request, land)).await {
            Ok(result) => result,
            Err(_) if limit < deadline => Err(failed(ErrorKind::Timeout)),
            Err(_) => Err(failed(ErrorKind::Deadline)),
        }
    }

    /// As `NetClient::send`; with `land` for a body that comes.
    async fn send(&self, request: &Request<'_>, land: Option<&Handover<Landing>>) -> Result<()> {
        let failed = |kind| ObjectError::new(request.operation, request.key, kind, "");
        let (route, bytes) = (&request.route, request.up + request.down);
        let class = if request.up > 0 { Class::Store } else { Class::Load };
        let mut permit = if route.start() == Start::Hedge {
            let permit = self.endpoints.try_permit(bytes, route);
            permit.ok_or_else(|| failed(ErrorKind::Throttled))?
        } else {
            let permit = self.endpoints.permit(class, bytes, route);
            match self.endpoints.is_empty() {
                false => permit.await,
                true => timeout(self.connect_timeout, permit)
                    .await
                    .map_err(|_| failed(ErrorKind::Connect))?,
            }
        };
        let _turn = if let Ok(turn) = self.in_use.try_acquire() {
            turn
        } else {
            permit.waits(route);
            let turn = self.in_use.acquire().await.expect("it is never closed");
            permit.goes(route);
            turn
        };
        self.count(request);
        let mut failing = Failing(Some(Arc::clone(&permit.payload().rgw)));
        let sent = self.exchange(&mut permit, request, land).await;
        if sent.is_ok() {
            failing.0 = None;
        }
        match sent {
            Ok(status) => {
                permit.end(Outcome::Answered { status });
                match status {
                    404 => Err(failed(ErrorKind::NotFound)),
                    412 => Err(failed(ErrorKind::Changed)),
                    _ => Ok(()),
                }
            }
            Err(Fault::Throttled) => {
                permit.end(Outcome::Answered { status: 503 });
                Err(failed(ErrorKind::Throttled))
            }
            Err(fault) => {
                let (loss, kind) = match fault {
                    Fault::Unreached => (Loss::Connection, ErrorKind::Connect),
                    Fault::Timeout => (Loss::Timeout, ErrorKind::Timeout),
                    Fault::Lost | Fault::Throttled => (Loss::Connection, ErrorKind::Broken),
                };
                permit.end(Outcome::Lost(loss));
                Err(failed(kind))
            }
        }
    }

    /// The answer's status, after its body.
    async fn exchange(
        &self,
        permit: &mut Permit<Link>,
        request: &Request<'_>,
        land: Option<&Handover<Landing>>,
    ) -> std::result::Result<u16, Fault> {
        let link = Arc::clone(permit.payload());
        let connection = link.connection().await?;
        let chunk = Bucket::chunk_of(request.key);
        let found = chunk.filter(|chunk| self.world.bucket.has(chunk));
        let whole = async {
            let _serving = link.rgw.answer(request.operation).await?;
            if request.up > 0 {
                link.rgw.carry(request.operation, request.up, |_| {}).await?;
                permit.answered(request.up);
                // A PUT of a chunk is `IfAbsent`.
                let hint = request.hint.map(Into::into);
                let is_new = chunk.is_none_or(|chunk| self.world.bucket.put(chunk, hint));
                return Ok(if is_new { 200 } else { 412 });
            }
            let Some(chunk) = found else {
                permit.answered(0);
                return Ok(404);
            };
            let Some(land) = land else {
                permit.answered(0);
                return Ok(200);
            };
            let osd = self.world.bucket.osd_of(&chunk);
            pass_until(osd.through(Instant::now(), request.down as f64, 1.0)).await;
            permit.answered(0);
            let mut held = land.claim(request.route.start()).await;
            let mut landed = 0;
            let progress = |moved: usize| {
                // Real bytes stand for many.
                let upto = (landed + moved) / SCALE;
                held.arrived(landed / SCALE, upto - landed / SCALE);
                landed += moved;
                held.progress(landed, request.down);
                permit.moved(moved);
                self.world.counts.kib.add(moved as u64 >> 10);
            };
            link.rgw.carry(request.operation, request.down, progress).await?;
            Ok(206)
        };
        let status = link.rgw.while_alive(whole).await?;
        link.keep(connection);
        Ok(status)
    }

    fn count(&self, request: &Request<'_>) {
        let counts = &self.world.counts;
        match request.operation {
            Operation::Head => counts.heads.add(1),
            Operation::Get => {
                counts.gets.add(1);
                let chunk = Bucket::chunk_of(request.key);
                let is_shared = chunk.is_some_and(|chunk| self.world.bucket.shared.contains(&chunk));
                counts.shared.add(u64::from(is_shared));
            }
            _ => counts.puts.add(1),
        }
        counts.calls.add(u64::from(request.route.start() == Start::First));
    }

    fn meta(&self, key: &str) -> ObjectMeta {
        let chunk = Bucket::chunk_of(key);
        ObjectMeta {
            len: self.world.bucket.object_len() as u64,
            version: Version {
                etag: "version".into(),
                modified: 0,
            },
            run: chunk.and_then(|chunk| self.world.bucket.hint(&chunk)),
        }
    }
}

/// Brings what DNS says to the endpoints, as `s3/net/host.rs` does, and closes idle connections.
fn follow(resolver: &Resolver, endpoints: Endpoints<Link>, world: Arc<World>) {
    let mut told = resolver.watch(&AddressSource::Host {
        name: "s3.fleet".into(),
        port: 80,
    });
    tokio::spawn(async move {
        loop {
            if timeout(IDLE / 8, told.changed()).await.is_ok() {
                let addresses = Arc::clone(&told.borrow_and_update().addresses);
                endpoints.update(&addresses, |address| Link::new(Arc::clone(&world.rgws[&address])));
            }
            endpoints.each(Link::sweep);
        }
    });
}

/// An attempt that did not succeed, should this be dropped as it is.
struct Failing(Option<Arc<Rgw>>);

impl Drop for Failing {
    fn drop(&mut self) {
        if let Some(rgw) = &self.0 {
            rgw.failures.add(1);
        }
    }
}

impl ObjectStore for Store {
    fn head<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        Box::pin(async move {
            let made = AtomicU64::new(0);
            let attempt = |route| {
                made.fetch_add(1, Ordering::Relaxed);
                let request = Request {
                    operation: Operation::Head,
                    key,
                    up: 0,
                    down: 0,
                    hint: None,
                    route,
                };
                self.attempt(request, deadline, None)
            };
            let hedge = self.endpoints.hedge(0);
            let nothing = None::<&Handover<()>>;
            let ended = self.attempts.run_hedged(deadline, &hedge, nothing, attempt).await;
            self.world
                .counts
                .attempts_most
                .fetch_max(made.into_inner(), Ordering::Relaxed);
            ended.map(|()| self.meta(key))
        })
    }

    fn get<'a>(&'a self, get: GetRange<'a>, mut landing: Landing, deadline: Instant) -> GetFuture<'a> {
        Box::pin(async move {
            let key = get.key;
            if let Some(chunk) = Bucket::chunk_of(key) {
                self.world
                    .bucket
                    .read(chunk, get.range.clone(), &mut landing.slot);
            }
            let down = get.range.len() * SCALE;
            let handover = Handover::new(landing);
            let made = AtomicU64::new(0);
            let attempt = |route| {
                made.fetch_add(1, Ordering::Relaxed);
                let request = Request {
                    operation: Operation::Get,
                    key,
                    up: 0,
                    down,
                    hint: None,
                    route,
                };
                self.attempt(request, deadline, Some(&handover))
            };
            let hedge = self.endpoints.hedge(down);
            let ended = self
                .attempts
                .run_hedged(deadline, &hedge, Some(&handover), attempt)
                .await;
            self.world
                .counts
                .attempts_most
                .fetch_max(made.into_inner(), Ordering::Relaxed);
            let landing = handover.take().expect("no attempt is left");
            (landing, ended.map(|()| self.meta(key)))
        })
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        when: Condition<'a>,
        deadline: Instant,
    ) -> StoreFuture<'a, Arc<str>> {
        self.put_with(key, body, PutExtras::default(), when, deadline)
    }

    fn put_with<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        extras: PutExtras<'a>,
        _when: Condition<'a>,
        deadline: Instant,
    ) -> StoreFuture<'a, Arc<str>> {
        Box::pin(async move {
            // The description of a space is as large as it is.
            let scale = Bucket::chunk_of(key).map_or(1, |_| SCALE);
            let attempt = |route| {
                let request = Request {
                    operation: Operation::Put,
                    key,
                    up: body.len() * scale,
                    down: 0,
                    hint: extras.run,
                    route,
                };
                self.attempt(request, deadline, None)
            };
            self.attempts.run(deadline, attempt).await?;
            Ok("version".into())
        })
    }

    fn is_out_of_reach(&self) -> bool {
        self.endpoints.are_out_of_reach()
    }

    fn window_bytes(&self) -> usize {
        self.endpoints.window_bytes() / SCALE
    }

    fn attributes<'a>(&'a self, _key: &'a str, _deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        unreachable!("lookups ask by HEAD")
    }

    fn read<'a>(&'a self, _key: &'a str, _limit: usize, _deadline: Instant) -> StoreFuture<'a, Bytes> {
        unreachable!("nothing is read whole")
    }

    fn list<'a>(&'a self, _: &'a str, _: Option<&'a str>, _: Instant) -> StoreFuture<'a, ListPage> {
        unreachable!("nothing is listed")
    }

    fn delete<'a>(&'a self, _keys: &'a [String], _deadline: Instant) -> StoreFuture<'a, ()> {
        unreachable!("nothing is removed")
    }

    fn check_bucket(&self, _deadline: Instant) -> StoreFuture<'_, ()> {
        unreachable!("it is there")
    }

    fn create_bucket(&self, _deadline: Instant) -> StoreFuture<'_, ()> {
        unreachable!("it is there")
    }

    fn requests(&self) -> RequestCounts {
        RequestCounts::default()
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}
