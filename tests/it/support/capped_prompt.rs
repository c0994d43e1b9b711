//! A stored prompt, a name with several addresses, and a proxy with a cap of its own behind each of them.

use std::net::{Ipv4Addr, SocketAddr};
use std::ops::Deref;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use kvgate::cache::gateway::{AfterMiss, Gateway, GatewayOptions};
use kvgate::format::Space;
use kvgate::s3::dns::DnsOptions;
use kvgate::s3::fanout::{BreakerOptions, EndpointOptions, EndpointState, Requests, WindowOptions};
use kvgate::s3::object::{S3, S3Options};
use tokio::time::Instant;

use crate::support::backends::{Backend, RETRIES};
use crate::support::capped::Capped;
use crate::support::dns_server::{A, DnsServer, Question, Record, Reply};
use crate::support::fixture::{Prompt, Site, arena, arena_empties, load_codes, soon, store_all};

pub const MIB: usize = 1 << 20;
pub const MB: u64 = 1_000_000;
pub const NAME: &str = "s3.test";

/// As the defaults, but for a fraction of the throughput.
pub const ENDPOINTS: EndpointOptions = EndpointOptions {
    window: WindowOptions {
        start: 8 * MIB,
        min: 2 * MIB,
        max: 64 * MIB,
    },
    breaker: BreakerOptions {
        failures: 5,
        open: Duration::from_millis(500),
        open_max: Duration::from_secs(30),
    },
    hedge_min: Duration::from_millis(20),
    subset: 16,
};

/// Chunks of 4 MiB, in parts of one.
pub fn space() -> Space {
    Space::from_json(
        r#"{"model": "test/fan", "revision": "1", "dtype": "float16", "chunk_tokens": 256,
            "mha": {"layers": 4, "heads": 8, "head_dim": 128}}"#,
    )
    .unwrap()
}

/// Chunks of one part of 64 KiB.
pub fn tiny_space() -> Space {
    Space::from_json(
        r#"{"model": "test/fan-tiny", "revision": "1", "dtype": "float16", "chunk_tokens": 64,
            "mha": {"layers": 1, "heads": 4, "head_dim": 64}}"#,
    )
    .unwrap()
}

/// A stored prompt, and where its server is said to be.
pub struct Bed {
    pub backend: Backend,
    pub site: Site,
    pub prompt: Prompt,
    /// `SCHEME://NAME:PORT`
    pub endpoint: String,
    pub dns: SocketAddr,
}

impl Bed {
    pub async fn new(
        backend: Backend,
        space: Space,
        chunks: usize,
        endpoint: String,
        dns: SocketAddr,
    ) -> Self {
        let site = Site::new(backend.store().await).await;
        let prompt = Prompt::of(space, chunks);
        let direct = Gateway::new(
            Arc::clone(&site.store),
            arena(16 * MIB),
            site.capabilities,
            gateway_options(&site),
        );
        store_all(&direct, &prompt).await;
        Self {
            backend,
            site,
            prompt,
            endpoint,
            dns,
        }
    }

    pub fn options(&self) -> S3Options {
        S3Options {
            endpoint: Some(self.endpoint.clone()),
            attempts: RETRIES,
            endpoints: ENDPOINTS,
            dns: DnsOptions {
                servers: vec![self.dns],
                tcp: false,
                min_ttl: Duration::from_millis(100),
                max_ttl: Duration::from_secs(60),
                timeout: Duration::from_secs(1),
            },
            ..self.backend.options()
        }
    }

    pub async fn gateway(&self) -> Gateway {
        self.gateway_with(&self.options()).await
    }

    pub async fn gateway_with(&self, options: &S3Options) -> Gateway {
        let store = Arc::new(S3::connect(options).await.unwrap());
        let loads = self.prompt.hashes.len() * self.prompt.space.layout().object_len();
        let arena = arena(loads + 64 * MIB);
        Gateway::new(store, arena, self.site.capabilities, gateway_options(&self.site))
    }

    /// Removes the prompt: a throw-away Ceph holds little.
    pub async fn remove(&self) {
        for i in 0..self.prompt.hashes.len() {
            self.site.remove(self.site.key(&self.prompt, i)).await;
        }
    }

    /// Loads the whole prompt: every chunk must come, with its bytes.
    pub async fn load(&self, gateway: &Gateway) {
        let codes = load_codes(gateway, &self.prompt, AfterMiss::Continue).await;
        assert_eq!(codes, vec!["ok"; codes.len()]);
    }

    /// Loads again and again until `done`, which must be before `deadline`.
    pub async fn load_until(&self, gateway: &Gateway, deadline: Instant, done: impl Fn() -> bool) {
        while !done() {
            assert!(Instant::now() < deadline, "{:#?}", gateway.endpoints());
            self.load(gateway).await;
        }
    }

    /// Loads, with something that happens to the endpoint that `victim` finds in the middle of that.
    pub async fn load_while<V>(
        &self,
        gateway: &Gateway,
        victim: impl Fn() -> Option<V>,
        event: impl AsyncFnOnce(V),
    ) {
        let meanwhile = async {
            let deadline = soon();
            loop {
                if let Some(victim) = victim() {
                    return event(victim).await;
                }
                assert!(
                    Instant::now() < deadline,
                    "nobody was busy: {:#?}",
                    gateway.endpoints()
                );
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::join!(self.load(gateway), meanwhile);
        arena_empties(gateway).await;
    }
}

/// Sections of 1 MiB, and so many of them in flight that four endpoints have something to do.
fn gateway_options(site: &Site) -> GatewayOptions {
    GatewayOptions {
        part_bytes: MIB,
        layer_part_bytes: MIB,
        // 16 chunks are no large load, whose parts would be twice that.
        get_bytes_max: 40 * MIB,
        put_bytes_max: 32 * MIB,
        ..site.options()
    }
}

/// The embedded server, behind proxies, and behind a scripted DNS server.
pub struct Rig {
    pub bed: Bed,
    pub addresses: Vec<Ipv4Addr>,
    pub proxies: Vec<Capped>,
    pub dns: DnsServer,
}

impl Rig {
    /// `rate`: bytes a second of each address.
    pub async fn new(count: u8, rate: u64, chunks: usize) -> Self {
        Self::of(space(), count, rate, chunks).await
    }

    pub async fn of(space: Space, count: u8, rate: u64, chunks: usize) -> Self {
        let backend = Backend::embedded().await;
        let addresses = addresses(count);
        let proxies = proxies(&addresses, &[upstream(&backend)], rate).await;
        let dns = DnsServer::start(has(&addresses, 1)).await;
        let endpoint = format!("http://{NAME}:{}", proxies[0].address().port());
        Self {
            bed: Bed::new(backend, space, chunks, endpoint, dns.address).await,
            addresses,
            proxies,
            dns,
        }
    }
}

impl Deref for Rig {
    type Target = Bed;
    fn deref(&self) -> &Bed {
        &self.bed
    }
}

pub fn upstream(backend: &Backend) -> SocketAddr {
    address(&backend.endpoints[0])
}

/// Of a plain URL.
pub fn address(endpoint: &str) -> SocketAddr {
    endpoint.trim_start_matches("http://").parse().unwrap()
}

/// Addresses 127.0.x.1 and so on, of which a test has an x of its own.
pub fn addresses(count: u8) -> Vec<Ipv4Addr> {
    static BLOCKS: AtomicU8 = AtomicU8::new(100);
    let block = BLOCKS.fetch_add(1, Ordering::Relaxed);
    (1..=count).map(|n| Ipv4Addr::new(127, 0, block, n)).collect()
}

/// One proxy for each address, all at the same port, to these servers in turn.
pub async fn proxies(addresses: &[Ipv4Addr], upstreams: &[SocketAddr], rate: u64) -> Vec<Capped> {
    'again: loop {
        let mut proxies: Vec<Capped> = Vec::new();
        for (&address, &upstream) in addresses.iter().zip(upstreams.iter().cycle()) {
            let port = proxies.first().map_or(0, |first| first.address().port());
            match Capped::start((address, port).into(), upstream, rate).await {
                Ok(proxy) => proxies.push(proxy),
                // Another process has the port there.
                Err(_) => continue 'again,
            }
        }
        return proxies;
    }
}

/// A DNS script: the name has these addresses, and nothing else.
pub fn has(addresses: &[Ipv4Addr], ttl: u32) -> impl FnMut(&Question) -> Vec<Reply> + Send + use<> {
    let records = addresses.iter().map(|&address| Record::a(NAME, ttl, address));
    let records: Vec<_> = records.collect();
    move |question| {
        let records = match question.kind {
            A => records.clone(),
            _ => Vec::new(),
        };
        vec![Reply::new(records)]
    }
}

pub fn carried(proxies: &[Capped]) -> Vec<u64> {
    proxies.iter().map(|proxy| proxy.carried().bytes).collect()
}

/// The percentage of bytes that each proxy carried since.
pub fn shares(what: &str, proxies: &[Capped], since: &[u64]) -> Vec<f64> {
    let carried = carried(proxies);
    let carried: Vec<_> = carried.iter().zip(since).map(|(now, then)| now - then).collect();
    let all: u64 = carried.iter().sum();
    let share = |bytes: u64| 100.0 * bytes as f64 / all as f64;
    let shares: Vec<_> = carried.into_iter().map(share).collect();
    eprintln!("{what}: {shares:.1?}");
    shares
}

/// Waits until something holds.
pub async fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = soon();
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Of all endpoints.
pub fn totals(gateway: &Gateway) -> Requests {
    let mut all = Requests::default();
    for EndpointState { totals, .. } in gateway.endpoints() {
        all.ok += totals.ok;
        all.refused += totals.refused;
        all.throttled += totals.throttled;
        all.failed += totals.failed;
        all.lost += totals.lost;
        all.timed_out += totals.timed_out;
        all.given_up += totals.given_up;
        all.retries += totals.retries;
        all.hedges += totals.hedges;
        all.bytes += totals.bytes;
    }
    all
}

pub fn state(gateway: &Gateway, address: SocketAddr) -> EndpointState {
    let mut states = gateway.endpoints().into_iter();
    states
        .find(|state| state.address == address)
        .expect("an endpoint")
}
