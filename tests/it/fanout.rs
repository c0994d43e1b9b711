//! One name, many addresses, and what becomes of loads when some of them are slow, hung, gone, or new. Each address is a
//! proxy with a cap of its own in front of the same S3 server; a scripted DNS server says which addresses there are.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::Duration;

use bytes::Bytes;
use kvgate::chunk::Space;
use kvgate::dns::DnsOptions;
use kvgate::fanout::{
    AttemptPolicy, Attempts, BreakerOptions, Class, EndpointOptions, EndpointState, Endpoints, Failure,
    Handover, Lease, Loss, Outcome, Phase, Requests, Route, Start, Verdict, WindowOptions,
};
use kvgate::gateway::{AfterMiss, Gateway, GatewayOptions, StoreOutcome};
use kvgate::net::Landing;
use kvgate::object::{Condition, ErrorKind, GetRange, ObjectStore, S3, S3Options};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::{Instant, timeout};

use crate::backends::{Backend, RETRIES};
use crate::capped::Capped;
use crate::dns_server::{A, AAAA, DnsServer, NXDOMAIN, Question, Record, Reply, SRV};
use crate::fixture::{Prompt, Site, arena, arena_empties, load_codes, soon, store_all, store_chunk};

const MIB: usize = 1 << 20;
const MB: u64 = 1_000_000;
const NAME: &str = "s3.test";
/// As low as DNS can say, zero apart.
const TTL: Duration = Duration::from_secs(1);

/// As the defaults, but for a hundredth of the throughput.
const ENDPOINTS: EndpointOptions = EndpointOptions {
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
};

/// Chunks of 4 MiB, in parts of one.
fn space() -> Space {
    Space::from_json(
        r#"{"model": "test/fan", "revision": "1", "dtype": "float16", "chunk_tokens": 256,
            "mha": {"layers": 4, "heads": 8, "head_dim": 128}}"#,
    )
    .unwrap()
}

/// Chunks of one part of 64 KiB.
fn tiny_space() -> Space {
    Space::from_json(
        r#"{"model": "test/fan-tiny", "revision": "1", "dtype": "float16", "chunk_tokens": 64,
            "mha": {"layers": 1, "heads": 4, "head_dim": 64}}"#,
    )
    .unwrap()
}

/// Addresses 127.0.x.1 and so on, of which a test has an x of its own.
fn addresses(count: u8) -> Vec<Ipv4Addr> {
    static BLOCKS: AtomicU8 = AtomicU8::new(100);
    let block = BLOCKS.fetch_add(1, Ordering::Relaxed);
    (1..=count).map(|n| Ipv4Addr::new(127, 0, block, n)).collect()
}

/// One proxy for each address, all at the same port.
async fn proxies(addresses: &[Ipv4Addr], upstream: SocketAddr, rate: u64) -> Vec<Capped> {
    'again: loop {
        let mut proxies: Vec<Capped> = Vec::new();
        for &address in addresses {
            let port = proxies.first().map_or(0, |first| first.address().port());
            match Capped::start((address, port).into(), upstream, rate).await {
                Ok(proxy) => proxies.push(proxy),
                Err(_) => continue 'again,
            }
        }
        return proxies;
    }
}

/// A DNS script: the name has these addresses, and nothing else.
fn has(addresses: &[Ipv4Addr], ttl: u32) -> impl FnMut(&Question) -> Vec<Reply> + Send + use<> {
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

fn upstream(backend: &Backend) -> SocketAddr {
    let endpoint = backend.endpoints[0].trim_start_matches("http://");
    endpoint.parse().unwrap()
}

/// A stored prompt behind proxies and a name.
struct Rig {
    backend: Backend,
    site: Site,
    prompt: Prompt,
    addresses: Vec<Ipv4Addr>,
    proxies: Vec<Capped>,
    dns: DnsServer,
}

impl Rig {
    /// `rate`: bytes a second of each address.
    async fn new(addresses_count: u8, rate: u64, chunks: usize) -> Self {
        Self::of(space(), addresses_count, rate, chunks).await
    }

    async fn of(space: Space, addresses_count: u8, rate: u64, chunks: usize) -> Self {
        let backend = Backend::embedded().await;
        let site = Site::new(backend.store().await).await;
        let prompt = Prompt::of(space, chunks);
        let direct = site.gateway_over(Arc::clone(&site.store));
        let direct = Gateway::new(
            Arc::clone(&site.store),
            arena(16 * MIB),
            direct.capabilities(),
            gateway_options(&site),
        );
        store_all(&direct, &prompt).await;
        let addresses = addresses(addresses_count);
        let proxies = proxies(&addresses, upstream(&backend), rate).await;
        let dns = DnsServer::start(has(&addresses, 1)).await;
        Self {
            backend,
            site,
            prompt,
            addresses,
            proxies,
            dns,
        }
    }

    fn options(&self) -> S3Options {
        let port = self.proxies[0].address().port();
        S3Options {
            endpoint: Some(format!("http://{NAME}:{port}")),
            attempts: RETRIES,
            endpoints: ENDPOINTS,
            dns: self.dns_options(),
            ..self.backend.options()
        }
    }

    fn dns_options(&self) -> DnsOptions {
        DnsOptions {
            servers: vec![self.dns.address],
            min_ttl: Duration::from_millis(100),
            max_ttl: Duration::from_secs(60),
            timeout: Duration::from_secs(1),
        }
    }

    async fn gateway(&self) -> Gateway {
        self.gateway_with(&self.options()).await
    }

    async fn gateway_with(&self, options: &S3Options) -> Gateway {
        let store = Arc::new(S3::connect(options).await.unwrap());
        let loads = self.prompt.hashes.len() * self.prompt.space.layout().object_len();
        Gateway::new(
            store,
            arena(loads + 64 * MIB),
            self.site.capabilities,
            gateway_options(&self.site),
        )
    }

    /// Loads the whole prompt: every chunk must come, with its bytes.
    async fn load(&self, gateway: &Gateway) {
        let codes = load_codes(gateway, &self.prompt, AfterMiss::Continue).await;
        assert_eq!(codes, vec!["ok"; codes.len()]);
    }

    /// Loads again and again until `done`, which must be before `deadline`.
    async fn load_until(&self, gateway: &Gateway, deadline: Instant, done: impl Fn() -> bool) {
        while !done() {
            assert!(Instant::now() < deadline, "{:#?}", gateway.endpoints());
            self.load(gateway).await;
        }
    }

    fn carried(&self) -> Vec<u64> {
        self.proxies.iter().map(|proxy| proxy.carried().bytes).collect()
    }

    /// What each address carried since, of a hundred.
    fn shares(&self, since: &[u64]) -> Vec<f64> {
        shares(&self.carried(), since)
    }
}

fn shares(carried: &[u64], since: &[u64]) -> Vec<f64> {
    let carried: Vec<_> = carried.iter().zip(since).map(|(now, then)| now - then).collect();
    let all: u64 = carried.iter().sum();
    let share = |bytes: u64| 100.0 * bytes as f64 / all as f64;
    carried.into_iter().map(share).collect()
}

/// Sections of 1 MiB, and so many of them in flight that four endpoints have something to do.
fn gateway_options(site: &Site) -> GatewayOptions {
    GatewayOptions {
        part_bytes: MIB,
        layer_part_bytes: MIB,
        get_bytes_max: 32 * MIB,
        put_bytes_max: 32 * MIB,
        ..site.options()
    }
}

/// Waits until something holds.
async fn until(what: &str, holds: impl Fn() -> bool) {
    let deadline = soon();
    while !holds() {
        assert!(Instant::now() < deadline, "{what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn totals(gateway: &Gateway) -> Requests {
    let mut all = Requests::default();
    for EndpointState { totals, .. } in gateway.endpoints() {
        all.ok += totals.ok;
        all.lost += totals.lost;
        all.timed_out += totals.timed_out;
        all.given_up += totals.given_up;
        all.throttled += totals.throttled;
        all.failed += totals.failed;
        all.refused += totals.refused;
        all.retries += totals.retries;
        all.hedges += totals.hedges;
        all.bytes += totals.bytes;
    }
    all
}

fn state(gateway: &Gateway, address: SocketAddr) -> EndpointState {
    let mut states = gateway.endpoints().into_iter();
    states
        .find(|state| state.address == address)
        .expect("an endpoint")
}

fn print(what: &str, shares: &[f64]) {
    let shares: Vec<_> = shares.iter().map(|share| format!("{share:.1}")).collect();
    eprintln!("{what}: {}", shares.join(" "));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn even_addresses_get_even_shares() {
    let rig = Rig::new(4, 20 * MB, 32).await;
    let gateway = rig.gateway().await;
    let before = rig.carried();
    rig.load(&gateway).await;
    let shares = rig.shares(&before);
    print("even", &shares);
    assert!(
        shares.iter().all(|share| (15.0..=35.0).contains(share)),
        "{shares:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_slow_address_gets_little() {
    let rig = Rig::new(4, 20 * MB, 24).await;
    let gateway = rig.gateway().await;
    rig.proxies[2].set_rate(2 * MB);
    // What it learns from.
    rig.load(&gateway).await;
    print("slow, learning", &rig.shares(&[0; 4]));
    let before = rig.carried();
    rig.load(&gateway).await;
    let shares = rig.shares(&before);
    print("slow", &shares);
    assert!(shares[2] <= 10.0, "{shares:?}");
}

/// What was slow is tried now and then, and is back with the others soon after it has recovered.
#[tokio::test(start_paused = true)]
async fn a_slow_address_that_recovers_gets_its_share_again() {
    let endpoints = Endpoints::new(ENDPOINTS);
    let slow = SocketAddr::from(([10, 0, 0, 1], 80));
    let others = (2..=4).map(|n| SocketAddr::from(([10, 0, 0, n], 80)));
    endpoints.update(&others.chain([slow]).collect::<Vec<_>>(), |_| ());
    let began = Instant::now();
    let after = |seconds| began + Duration::from_secs(seconds);
    let ask = async |until: Instant| {
        while Instant::now() < until {
            let mut lease = endpoints.lease(Class::Load, MIB, &Route::default()).await;
            let is_slow = lease.address() == slow && Instant::now() < after(30);
            lease.answered();
            tokio::time::sleep(Duration::from_millis(if is_slow { 500 } else { 50 })).await;
            lease.moved(MIB);
            lease.end(Outcome::Answered { status: 206 });
        }
    };
    let share = async |until: Instant| {
        let bytes = || {
            let states = endpoints.states();
            let of = |state: &EndpointState| state.totals.bytes;
            let slow = states.iter().find(|state| state.address == slow).map_or(0, of);
            [slow, states.iter().map(of).sum()]
        };
        let before = bytes();
        futures::future::join_all((0..12).map(|_| ask(until))).await;
        let after = bytes();
        100.0 * (after[0] - before[0]) as f64 / (after[1] - before[1]) as f64
    };
    let at_first = share(after(30)).await;
    assert!(at_first < 10.0, "{at_first}");
    share(after(45)).await;
    let again = share(after(60)).await;
    assert!((15.0..=35.0).contains(&again), "{again}");
}

/// Loads, with something that happens once every address has carried some of it.
async fn load_while(rig: &Rig, gateway: &Gateway, event: impl AsyncFnOnce()) {
    let before = rig.carried();
    let some = || {
        let carried = rig.carried();
        carried
            .iter()
            .zip(&before)
            .all(|(now, then)| now - then > MIB as u64)
    };
    let meanwhile = async {
        until("the load has begun", some).await;
        event().await;
    };
    tokio::join!(rig.load(gateway), meanwhile);
    arena_empties(gateway).await;
}

/// Of many ranges in flight there, none spends a token on its way elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_in_the_middle_of_a_load() {
    let rig = Rig::new(4, 20 * MB, 16).await;
    let gateway = rig
        .gateway_with(&S3Options {
            attempts: AttemptPolicy {
                budget: 2,
                hedges: 0,
                ..RETRIES
            },
            ..rig.options()
        })
        .await;
    load_while(&rig, &gateway, async || rig.proxies[1].kill()).await;
    let dead = rig.proxies[1].address();
    let lost = state(&gateway, dead).totals.lost;
    assert!(lost > 2, "{lost} ranges were lost: not enough to show anything");

    // It is left alone, but for a probe now and then.
    rig.load(&gateway).await;
    let before = state(&gateway, dead);
    assert_ne!(before.breaker, Phase::Closed);
    for _ in 0..3 {
        rig.load(&gateway).await;
    }
    let more = state(&gateway, dead).totals.since(&before.totals).total();
    assert!(more <= 5, "{more} of 192 requests went to a dead endpoint");

    rig.proxies[1].revive().await.unwrap();
    let connections = rig.proxies[1].carried().connections;
    let back = || rig.proxies[1].carried().connections > connections + 2;
    rig.load_until(&gateway, soon(), back).await;
    assert_eq!(state(&gateway, dead).breaker, Phase::Closed);
}

/// What hangs in the middle of bodies is taken over by hedges long before a time-out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_in_the_middle_of_a_load() {
    let rig = Rig::new(4, 20 * MB, 16).await;
    let gateway = rig
        .gateway_with(&S3Options {
            read_timeout: Duration::from_secs(50),
            request_timeout: Duration::from_secs(50),
            ..rig.options()
        })
        .await;
    // It learns what is typical, and earns hedges.
    for _ in 0..3 {
        rig.load(&gateway).await;
    }
    let began = Instant::now();
    load_while(&rig, &gateway, async || rig.proxies[1].pause()).await;
    assert!(
        began.elapsed() < Duration::from_secs(30),
        "hedges and not time-outs ended it"
    );
    let hung = state(&gateway, rig.proxies[1].address());
    assert!(hung.totals.given_up > 0, "{hung:?}");
    let mut loads = 0;
    let began = Instant::now();
    while loads < 3 {
        rig.load(&gateway).await;
        loads += 1;
    }
    assert!(began.elapsed() < Duration::from_secs(30));
    let all = totals(&gateway);
    eprintln!("hung: {all:?}");
    assert!(all.hedges * 10 <= all.total(), "{all:?}");
    rig.proxies[1].resume();
}

/// The same without hedges: a time-out ends each wait, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_without_hedges() {
    let rig = Rig::new(4, 20 * MB, 16).await;
    let gateway = rig
        .gateway_with(&S3Options {
            attempts: AttemptPolicy { hedges: 0, ..RETRIES },
            read_timeout: Duration::from_millis(500),
            ..rig.options()
        })
        .await;
    load_while(&rig, &gateway, async || rig.proxies[1].pause()).await;
    assert_eq!(totals(&gateway).hedges, 0);
    rig.load(&gateway).await;
    assert_ne!(state(&gateway, rig.proxies[1].address()).breaker, Phase::Closed);
}

/// Answers 503 to everything.
async fn overloaded(address: SocketAddr) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.set_reuseaddr(true).unwrap();
    until("the port is free again", || socket.bind(address).is_ok()).await;
    let listener = socket.listen(64).unwrap();
    tokio::spawn(async move {
        while let Ok((mut socket, _)) = listener.accept().await {
            tokio::spawn(async move {
                loop {
                    let mut head = Vec::new();
                    while !head.ends_with(b"\r\n\r\n") {
                        head.push(socket.read_u8().await?);
                    }
                    let head = String::from_utf8_lossy(&head).to_lowercase();
                    if let Some((_, rest)) = head.split_once("content-length: ") {
                        let len = rest.split_once("\r\n").map_or("0", |(len, _)| len);
                        socket.read_exact(&mut vec![0; len.parse().unwrap()]).await?;
                    }
                    let answer =
                        b"HTTP/1.1 503 Slow Down\r\nx-amz-request-id: 7\r\ncontent-length: 0\r\n\r\n";
                    socket.write_all(answer).await?;
                }
                #[expect(unreachable_code, reason = "the type of the block")]
                std::io::Result::Ok(())
            });
        }
    });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_that_answers_503() {
    let mut rig = Rig::new(4, 20 * MB, 16).await;
    let address = rig.proxies[3].address();
    rig.proxies.pop();
    overloaded(address).await;
    let gateway = rig.gateway().await;
    for _ in 0..3 {
        rig.load(&gateway).await;
    }
    let busy = state(&gateway, address);
    eprintln!("503: {busy:?}");
    assert!(busy.totals.throttled >= 5 && busy.totals.ok == 0, "{busy:?}");
    assert!(busy.totals.throttled <= 30, "it is left alone: {busy:?}");
    assert_eq!(busy.window_bytes, ENDPOINTS.window.min);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_moves_to_another_endpoint() {
    let rig = Rig::new(3, 40 * MB, 1).await;
    let gateway = rig
        .gateway_with(&S3Options {
            attempts: AttemptPolicy { budget: 2, ..RETRIES },
            read_timeout: Duration::from_secs(1),
            ..rig.options()
        })
        .await;
    let prompt = Prompt::of(space(), 12);
    let kill = async {
        until("stores are under way", || {
            rig.proxies[0].carried().bytes > MIB as u64
        })
        .await;
        rig.proxies[0].kill();
    };
    let stores = (0..12).map(|i| store_chunk(&gateway, &prompt, i));
    let (outcomes, ()) = tokio::join!(futures::future::join_all(stores), kill);
    for outcome in outcomes {
        assert!(matches!(outcome, StoreOutcome::Stored), "{outcome:?}");
    }
    let codes = load_codes(&gateway, &prompt, AfterMiss::Continue).await;
    assert_eq!(codes, ["ok"; 12]);
    assert!(totals(&gateway).retries > 0);
}

/// Uploads are slow, and one endpoint hangs: they wait and go on elsewhere, but never twice at a time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stores_are_never_hedged() {
    let rig = Rig::new(2, 20 * MB, 4).await;
    let store = S3::connect(&S3Options {
        attempts: AttemptPolicy {
            hedges: 100,
            ..RETRIES
        },
        read_timeout: Duration::from_secs(1),
        ..rig.options()
    })
    .await
    .unwrap();
    // What is slow is known.
    for _ in 0..20 {
        store.head("nothing", soon()).await.unwrap_err();
    }
    let hedges = || -> u64 { store.endpoints().iter().map(|state| state.totals.hedges).sum() };
    let before = hedges();
    rig.proxies[0].pause();
    for i in 0..8 {
        let body = Bytes::from(vec![7; MIB]);
        let key = format!("hedge-{i}");
        store.put(&key, body, Condition::Always, soon()).await.unwrap();
    }
    assert_eq!(hedges(), before);
    assert!(store.requests().put >= 8);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_come_and_go() {
    let rig = Rig::new(4, 40 * MB, 8).await;
    rig.dns.script(has(&rig.addresses[..3], 1));
    let gateway = rig.gateway().await;
    rig.load(&gateway).await;
    assert_eq!(rig.proxies[3].carried().connections, 0);

    rig.dns.script(has(&rig.addresses, 1));
    let added = Instant::now();
    let traffic = || rig.proxies[3].carried().requests > 0;
    rig.load_until(&gateway, added + 2 * TTL, traffic).await;

    rig.dns.script(has(&rig.addresses[..2], 1));
    tokio::time::sleep(2 * TTL).await;
    let gone = || [2, 3].map(|n| rig.proxies[n].carried().requests);
    let before = gone();
    for _ in 0..4 {
        rig.load(&gateway).await;
    }
    assert_eq!(gone(), before);
    assert_eq!(gateway.endpoints().len(), 2);
}

/// A request that runs where no address is any more ends in peace.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_removed_address_finishes_what_it_began() {
    let rig = Rig::new(2, MB, 1).await;
    rig.dns.script(has(&rig.addresses[..1], 1));
    let store = S3::connect(&rig.options()).await.unwrap();
    let object_len = rig.prompt.space.layout().object_len();
    let slot = arena(16 * MIB).try_reserve(object_len).unwrap();
    let key = rig.site.key(&rig.prompt, 0);
    let get = GetRange {
        key: &key,
        range: 0..object_len,
        object_len,
        if_match: None,
    };
    let gone = async {
        until("it runs", || rig.proxies[0].carried().bytes > 0).await;
        rig.dns.script(has(&rig.addresses[1..], 1));
        until("the address is gone", || {
            let states = store.endpoints();
            states
                .iter()
                .all(|state| state.address == rig.proxies[1].address())
        })
        .await;
        rig.proxies[0].carried().bytes
    };
    let ((_, got), before) = tokio::join!(store.get(get, Landing::new(slot), soon()), gone);
    got.unwrap();
    assert!(
        before < object_len as u64,
        "it was over before the address was gone"
    );
    assert_eq!(rig.proxies[1].carried().connections, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_go_on_without_dns() {
    let mut rig = Rig::new(3, 100 * MB, 2).await;
    rig.dns.script(has(&rig.addresses, 0));
    let gateway = rig.gateway().await;
    rig.load(&gateway).await;
    rig.dns.script(|_| vec![Reply::error(NXDOMAIN)]);
    let asked = rig.dns.asked().len();
    rig.load_until(&gateway, soon(), || rig.dns.asked().len() > asked + 8)
        .await;
    assert_eq!(gateway.endpoints().len(), 3);
    // No server at all.
    let address = rig.dns.address;
    rig.dns = DnsServer::start(|_| Vec::new()).await;
    assert_ne!(rig.dns.address, address);
    let began = Instant::now();
    rig.load_until(&gateway, soon(), || began.elapsed() > TTL).await;
    assert_eq!(gateway.endpoints().len(), 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_address_at_first() {
    let rig = Rig::new(2, 100 * MB, 1).await;
    let store = S3::connect(&S3Options {
        connect_timeout: Duration::from_millis(500),
        ..rig.options()
    })
    .await
    .unwrap();
    for (script, words) in [
        (Reply::error(NXDOMAIN), "does not exist"),
        (Reply::new(Vec::new()), "no A or AAAA records"),
    ] {
        rig.dns.script(move |_| vec![script.clone()]);
        // What it said before may still be told.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let error = store.check_bucket(soon()).await.unwrap_err();
        assert_eq!(error.kind, ErrorKind::Connect);
        let error = error.to_string();
        for word in [NAME, words, "check", &rig.dns.address.to_string()] {
            assert!(error.contains(word), "{word}: {error}");
        }
    }
    assert_eq!(store.window_bytes(), 0);
    rig.dns.script(has(&rig.addresses, 1));
    store.check_bucket(soon()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ports_from_srv() {
    let rig = Rig::new(1, 100 * MB, 2).await;
    let (a, b) = (rig.addresses[0], Ipv4Addr::LOCALHOST);
    let other = Capped::start((b, 0).into(), upstream(&rig.backend), 100 * MB)
        .await
        .unwrap();
    let ports = [rig.proxies[0].address().port(), other.address().port()];
    rig.dns.script(move |question| {
        let records = match (&*question.name, question.kind) {
            ("_s3._tcp.test", SRV) => vec![
                Record::srv("_s3._tcp.test", 1, 10, ports[0], "a.test"),
                Record::srv("_s3._tcp.test", 1, 10, ports[1], "b.test"),
                // Of a higher number, and nobody is there.
                Record::srv("_s3._tcp.test", 1, 20, 9, "b.test"),
            ],
            ("a.test", A) => vec![Record::a("a.test", 1, a)],
            ("b.test", A) => vec![Record::a("b.test", 1, b)],
            _ => Vec::new(),
        };
        vec![Reply::new(records)]
    });
    let options = S3Options {
        srv: Some("_s3._tcp.test".into()),
        ..rig.options()
    };
    let gateway = rig.gateway_with(&options).await;
    let both = || {
        [&rig.proxies[0], &other]
            .iter()
            .all(|proxy| proxy.carried().requests > 1)
    };
    rig.load_until(&gateway, soon(), both).await;
    assert_eq!(gateway.endpoints().len(), 2);
}

/// Nothing listens at the AAAA address, behind a chain of CNAMEs without a TTL.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_aaaa_that_refuses_and_cnames_without_ttl() {
    let rig = Rig::new(2, 100 * MB, 2).await;
    let addresses = rig.addresses.clone();
    rig.dns.script(move |question| {
        let mut records = vec![
            Record::cname(NAME, 0, "b.test"),
            Record::cname("b.test", 0, "c.test"),
        ];
        match question.kind {
            A => records.extend(addresses.iter().map(|&address| Record::a("c.test", 0, address))),
            AAAA => records.push(Record::aaaa("c.test", 0, Ipv6Addr::LOCALHOST)),
            _ => records.clear(),
        }
        vec![Reply::new(records)]
    });
    let options = S3Options {
        attempts: AttemptPolicy { budget: 2, ..RETRIES },
        ..rig.options()
    };
    let gateway = rig.gateway_with(&options).await;
    for _ in 0..10 {
        rig.load(&gateway).await;
    }
    let states = gateway.endpoints();
    assert_eq!(states.len(), 3);
    let refused = states.iter().find(|state| state.address.is_ipv6()).unwrap();
    assert!(refused.totals.lost > 0 && refused.totals.ok == 0, "{refused:?}");
    // TTL 0 is asked for again and again, though not all the time.
    assert!(rig.dns.asked().len() > 4);
}

/// More than a UDP answer holds; at most of them nobody listens.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_addresses_of_which_some_answer() {
    let mut rig = Rig::new(100, 100 * MB, 16).await;
    for (n, proxy) in rig.proxies.iter().enumerate() {
        if n % 2 == 1 {
            proxy.kill();
        }
    }
    rig.dns.script(has(&rig.addresses, 1));
    let gateway = rig.gateway().await;
    for _ in 0..3 {
        rig.load(&gateway).await;
    }
    assert_eq!(gateway.endpoints().len(), 100);
    assert!(rig.dns.asked().iter().any(|question| question.tcp));
    rig.proxies.clear();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_given_by_hand() {
    let rig = Rig::new(3, 100 * MB, 4).await;
    let urls: Vec<_> = rig
        .proxies
        .iter()
        .map(|proxy| format!("http://{}", proxy.address()))
        .collect();
    let gateway = rig
        .gateway_with(&S3Options {
            endpoint: Some(urls.join(",")),
            ..rig.options()
        })
        .await;
    let all = || rig.proxies.iter().all(|proxy| proxy.carried().requests > 1);
    rig.load_until(&gateway, soon(), all).await;
    rig.proxies[0].kill();
    rig.load(&gateway).await;
    assert!(rig.dns.asked().is_empty(), "no name, no question");
}

/// No endpoint has more in flight than its window says.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_bound_what_is_in_flight() {
    let rig = Rig::new(2, 20 * MB, 8).await;
    let window = WindowOptions {
        start: 2 * MIB,
        min: 2 * MIB,
        max: 4 * MIB,
    };
    let gateway = rig
        .gateway_with(&S3Options {
            endpoints: EndpointOptions { window, ..ENDPOINTS },
            ..rig.options()
        })
        .await;
    let mut most = 0;
    let sample = async {
        loop {
            for state in gateway.endpoints() {
                assert!(state.in_flight_bytes <= window.max, "{state:?}");
                most = most.max(state.in_flight_bytes);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::select! {
        () = rig.load(&gateway) => {}
        () = sample => {}
    }
    assert!(most >= MIB, "it was used");
}

/// Where nothing ever opens a breaker, and each call has one more attempt: that goes elsewhere.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_retry_goes_elsewhere() {
    let rig = Rig::of(tiny_space(), 2, 100 * MB, 64).await;
    let endpoints = EndpointOptions {
        breaker: BreakerOptions {
            failures: 1_000_000,
            ..ENDPOINTS.breaker
        },
        ..ENDPOINTS
    };
    let gateway = rig
        .gateway_with(&S3Options {
            attempts: AttemptPolicy {
                retries: 1,
                budget: 0,
                hedges: 0,
                ..RETRIES
            },
            endpoints,
            ..rig.options()
        })
        .await;
    rig.load(&gateway).await;
    rig.proxies[0].kill();
    for _ in 0..4 {
        rig.load(&gateway).await;
    }
    let dead = state(&gateway, rig.proxies[0].address());
    assert!(dead.totals.lost > 8, "{dead:?}");
}

/// A host that is off answers nothing at all: to go elsewhere costs no token, as when it refuses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_address_where_nobody_is() {
    let mut rig = Rig::new(3, 100 * MB, 2).await;
    let address = rig.proxies[2].address();
    rig.proxies.pop();
    let _full = full(address).await;
    let gateway = rig
        .gateway_with(&S3Options {
            connect_timeout: Duration::from_millis(200),
            attempts: AttemptPolicy {
                budget: 0,
                hedges: 0,
                ..RETRIES
            },
            ..rig.options()
        })
        .await;
    for _ in 0..4 {
        rig.load(&gateway).await;
    }
    let silent = state(&gateway, address);
    assert!(silent.totals.lost >= 5 && silent.totals.ok == 0, "{silent:?}");
}

/// A listener whose queue is full: the kernel ignores who connects.
async fn full(address: SocketAddr) -> (TcpListener, Vec<TcpStream>) {
    let socket = TcpSocket::new_v4().unwrap();
    until("the port is free again", || socket.bind(address).is_ok()).await;
    let listener = socket.listen(0).unwrap();
    let mut waiting = Vec::new();
    while let Ok(connected) = timeout(Duration::from_millis(200), TcpStream::connect(address)).await {
        waiting.push(connected.unwrap());
    }
    (listener, waiting)
}

/// An attempt that fails late leaves the next one its time: that is not hedged before it is slow itself.
#[tokio::test(start_paused = true)]
async fn a_retry_is_not_hedged_for_what_its_predecessor_took() {
    let address = |n| SocketAddr::from(([10, 0, 0, n], 80));
    let endpoints = Endpoints::new(ENDPOINTS);
    endpoints.update(&[address(1), address(2), address(3)], |_| ());
    let attempts = Attempts::new(AttemptPolicy {
        hedges: 100,
        ..RETRIES
    });
    let answered = |mut lease: Lease<()>| {
        lease.answered();
        lease.end(Outcome::Answered { status: 200 });
    };
    for _ in 0..50 {
        let lease = endpoints.lease(Class::Load, 0, &Route::default()).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
        answered(lease);
    }
    let sent = AtomicU8::new(0);
    let attempt = |route: Route| {
        let (endpoints, number) = (&endpoints, sent.fetch_add(1, Ordering::Relaxed));
        async move {
            let lease = match route.start() {
                Start::Hedge => endpoints.try_lease(0, &route).unwrap(),
                _ => endpoints.lease(Class::Load, 0, &route).await,
            };
            // The first one is hedged, and both fail.
            let (takes, lost) = match number {
                0 | 1 => (Duration::from_secs(5), true),
                _ => (Duration::from_millis(100), false),
            };
            tokio::time::sleep(takes).await;
            match lost {
                true => lease.end(Outcome::Lost(Loss::Connection)),
                false => answered(lease),
            }
            if lost { Err(Broken) } else { Ok(()) }
        }
    };
    let hedge = endpoints.hedge(0);
    let nothing = None::<&Handover<()>>;
    let deadline = Instant::now() + Duration::from_secs(60);
    attempts
        .run_hedged(deadline, &hedge, nothing, attempt)
        .await
        .unwrap();
    assert_eq!(sent.load(Ordering::Relaxed), 3);
}

#[derive(Debug)]
struct Broken;

impl Failure for Broken {
    fn verdict(&self) -> Verdict {
        Verdict::Lost
    }
}
