//! The same on a real Ceph with a real DNS server: four radosgw behind one name. Shares are measured behind proxies, so
//! that the cores that all of them run on are not the limit; failures are those of the radosgw themselves.

use std::cell::Cell;
use std::net::IpAddr;
use std::time::Duration;

use kvgate::cache::gateway::Gateway;
use kvgate::s3::fanout::{AttemptPolicy, BreakerPhase, EndpointState};
use kvgate::s3::object::S3Options;
use tokio::sync::MutexGuard;
use tokio::time::Instant;

use crate::outage::{ALL_RGW, rgw, rgw_with};
use crate::support::backends::{Backend, RETRIES, on_backends};
use crate::support::capped::Capped;
use crate::support::capped_prompt::{
    Bed, ENDPOINTS, MB, MIB, address, addresses, carried, proxies, shares, space, state, totals,
};
use crate::support::dns_server::Dnsmasq;
use crate::support::fixture::soon;

on_backends! {
    even_shares: rgw;
    a_tenth_as_fast: rgw;
    killed: rgw;
    paused: rgw;
    overloaded: rgw;
    dns_that_changes_and_dies: rgw;
    tls_for_every_address: rgw;
}

/// Of dnsmasq's records.
const TTL: Duration = Duration::from_secs(1);

/// A prompt on all radosgw, of which this test has the use alone.
struct Rgws {
    bed: Bed,
    dns: Dnsmasq,
    /// As DNS has them.
    addresses: Vec<String>,
    _alone: MutexGuard<'static, ()>,
}

impl Rgws {
    /// With addresses that DNS has, at this port; None without a DNS server.
    async fn new(
        backend: &Backend,
        test: &str,
        addresses: Vec<String>,
        port: u16,
        chunks: usize,
    ) -> Option<Self> {
        let alone = ALL_RGW.lock().await;
        let dns = Dnsmasq::start(&format!("fanout_rgw::{test}"), &addresses)?;
        let endpoint = format!("http://{}:{port}", dns.name);
        Some(Self {
            bed: Bed::new(backend.clone(), space(), chunks, endpoint, dns.address).await,
            dns,
            addresses,
            _alone: alone,
        })
    }

    /// Their own addresses.
    async fn direct(backend: &Backend, test: &str, chunks: usize) -> Option<Self> {
        let all = backend.endpoints.iter().map(|endpoint| address(endpoint));
        let port = address(&backend.endpoints[0]).port();
        Self::new(
            backend,
            test,
            all.map(|address| address.ip().to_string()).collect(),
            port,
            chunks,
        )
        .await
    }

    /// Behind proxies with a cap each.
    async fn capped(backend: &Backend, test: &str, chunks: usize) -> Option<(Self, Vec<Capped>)> {
        let upstreams: Vec<_> = backend
            .endpoints
            .iter()
            .map(|endpoint| address(endpoint))
            .collect();
        let front = addresses(4);
        let proxies = proxies(&front, &upstreams, 40 * MB).await;
        let names = front.iter().map(ToString::to_string).collect();
        let rgws = Self::new(backend, test, names, proxies[0].address().port(), chunks).await?;
        Some((rgws, proxies))
    }

    fn state(&self, gateway: &Gateway, number: usize) -> EndpointState {
        let port = address(&self.bed.backend.endpoints[0]).port();
        let ip: IpAddr = self.addresses[number].parse().unwrap();
        state(gateway, (ip, port).into())
    }

    /// The bytes that came from each known address.
    fn moved(gateway: &Gateway) -> Vec<u64> {
        let states = gateway.endpoints();
        states.iter().map(|state| state.totals.bytes).collect()
    }

    /// One that has much in flight; not the first one, which other tests use meanwhile.
    fn busy(&self, gateway: &Gateway) -> Option<usize> {
        let known = gateway.endpoints().len() == self.addresses.len();
        known.then(|| (1..4).find(|&number| self.state(gateway, number).in_flight >= 3))?
    }
}

/// A radosgw that is not as it should be, until this is dropped.
struct Outage<'a>(&'a str);

impl<'a> Outage<'a> {
    fn new(action: &str, address: &'a str) -> Self {
        rgw(action, address);
        Self(address)
    }
}

impl Drop for Outage<'_> {
    fn drop(&mut self) {
        // By SIGKILL, which a paused one gets, too.
        rgw("stop", self.0);
        rgw("start", self.0);
    }
}

async fn even_shares(backend: &Backend) {
    let Some((rgws, proxies)) = Rgws::capped(backend, "even_shares", 24).await else {
        return;
    };
    let gateway = rgws.bed.gateway().await;
    let before = carried(&proxies);
    rgws.bed.load(&gateway).await;
    let shares = shares("radosgw, even", &proxies, &before);
    assert!(
        shares.iter().all(|share| (15.0..=35.0).contains(share)),
        "{shares:?}"
    );
    rgws.bed.remove().await;
}

async fn a_tenth_as_fast(backend: &Backend) {
    let Some((rgws, proxies)) = Rgws::capped(backend, "a_tenth_as_fast", 24).await else {
        return;
    };
    let gateway = rgws.bed.gateway().await;
    proxies[1].set_rate(4 * MB);
    let before = carried(&proxies);
    rgws.bed.load(&gateway).await;
    let learning = carried(&proxies);
    shares("radosgw, one slow, learning", &proxies, &before);
    for _ in 0..2 {
        rgws.bed.load(&gateway).await;
    }
    let shares = shares("radosgw, one slow", &proxies, &learning);
    assert!(shares[1] <= 10.0, "{shares:?}");
    rgws.bed.remove().await;
}

async fn killed(backend: &Backend) {
    let Some(rgws) = Rgws::direct(backend, "killed", 16).await else {
        return;
    };
    let options = S3Options {
        attempts: AttemptPolicy {
            budget: 2,
            hedges: 0,
            ..RETRIES
        },
        ..rgws.bed.options()
    };
    let gateway = rgws.bed.gateway_with(&options).await;
    let outage = Cell::new(None);
    let kill = async |number: usize| {
        outage.set(Some((number, Outage::new("stop", &rgws.addresses[number]))));
    };
    rgws.bed.load_while(&gateway, || rgws.busy(&gateway), kill).await;
    let (number, outage) = outage.take().unwrap();
    let dead = || rgws.state(&gateway, number);
    let opened = || dead().breaker != BreakerPhase::Closed;
    rgws.bed.load_until(&gateway, soon(), opened).await;
    eprintln!("radosgw, killed: {:?}", dead());
    assert!(dead().totals.lost > 0, "{:?}", dead());

    drop(outage);
    let before = dead().totals.ok;
    let back = || dead().totals.ok > before + 2;
    rgws.bed.load_until(&gateway, soon(), back).await;
    rgws.bed.remove().await;
}

/// Hedges take over the requests that it holds up. Those that are too many for hedges end with a time-out.
async fn paused(backend: &Backend) {
    let Some(rgws) = Rgws::direct(backend, "paused", 16).await else {
        return;
    };
    let gateway = rgws.bed.gateway().await;
    rgws.bed.load(&gateway).await;
    let outage = Cell::new(None);
    let pause = async |number: usize| {
        outage.set(Some((number, Outage::new("pause", &rgws.addresses[number]))));
    };
    rgws.bed.load_while(&gateway, || rgws.busy(&gateway), pause).await;
    let (number, _outage) = outage.take().unwrap();
    // All of its requests may have ended before it was paused.
    let noticed = || {
        let hung = rgws.state(&gateway, number).totals;
        hung.given_up + hung.timed_out > 0
    };
    rgws.bed.load_until(&gateway, soon(), noticed).await;
    let all = totals(&gateway);
    eprintln!("radosgw, paused: {all:?}");
    assert!(all.hedges * 10 <= all.total(), "{all:?}");
    rgws.bed.remove().await;
}

/// One of them takes a single request at a time, and answers 503 to all others.
async fn overloaded(backend: &Backend) {
    let Some(rgws) = Rgws::direct(backend, "overloaded", 16).await else {
        return;
    };
    let address = &rgws.addresses[3];
    let _outage = Outage::new("stop", address);
    rgw_with("start", address, "--rgw-max-concurrent-requests=1");
    let gateway = rgws.bed.gateway().await;
    for _ in 0..4 {
        rgws.bed.load(&gateway).await;
    }
    let busy = rgws.state(&gateway, 3);
    eprintln!("radosgw, overloaded: {busy:?}");
    assert!(busy.totals.throttled > 0, "{busy:?}");
    assert!(busy.window_bytes < ENDPOINTS.window.start, "{busy:?}");
    rgws.bed.remove().await;
}

async fn dns_that_changes_and_dies(backend: &Backend) {
    let Some(rgws) = Rgws::direct(backend, "dns_that_changes_and_dies", 8).await else {
        return;
    };
    rgws.dns.set(&rgws.addresses[..2]);
    let gateway = rgws.bed.gateway().await;
    rgws.bed.load(&gateway).await;
    assert_eq!(gateway.endpoints().len(), 2);

    rgws.dns.set(&rgws.addresses[1..]);
    let set = Instant::now();
    let states = || gateway.endpoints();
    let requests = |states: Vec<EndpointState>| {
        let with_requests = states.iter().filter(|state| state.totals.total() > 0);
        with_requests.count()
    };
    let came = || states().len() == 3 && requests(states()) == 3;
    rgws.bed.load_until(&gateway, set + 2 * TTL, came).await;
    let gone: IpAddr = rgws.addresses[0].parse().unwrap();
    assert!(states().iter().all(|state| state.address.ip() != gone));

    rgws.dns.kill();
    let killed = Instant::now();
    rgws.bed
        .load_until(&gateway, soon(), || killed.elapsed() > 3 * TTL)
        .await;
    assert_eq!(states().len(), 3);
    rgws.bed.remove().await;
}

/// Each address shows the certificate of the name.
async fn tls_for_every_address(backend: &Backend) {
    let endpoints = std::env::var("KVGATE_TEST_RGW_TLS_ENDPOINTS").expect("radosgw with TLS");
    let ca_file = std::env::var("KVGATE_TEST_RGW_TLS_CA").expect("its certificate");
    let Some(rgws) = Rgws::direct(backend, "tls_for_every_address", 4).await else {
        return;
    };
    let first = endpoints.split_whitespace().next().unwrap();
    let (_, port) = first.rsplit_once(':').unwrap();
    let options = S3Options {
        endpoint: Some(format!("https://{}:{port}", rgws.dns.name)),
        ca_file: Some(ca_file.into()),
        ..rgws.bed.options()
    };
    let gateway = rgws.bed.gateway_with(&options).await;
    let all = || {
        let moved = Rgws::moved(&gateway);
        moved.len() == 4 && moved.iter().all(|&bytes| bytes > MIB as u64)
    };
    rgws.bed.load_until(&gateway, soon(), all).await;
    rgws.bed.remove().await;
}
