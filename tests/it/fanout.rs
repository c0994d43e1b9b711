//! One name, many addresses, and what becomes of loads when some of them are slow, hung, gone, or new. Each address is a
//! proxy with a cap of its own in front of the embedded server; a scripted DNS server says which addresses there are.

use std::cell::Cell;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use bytes::Bytes;
use kvgate::cache::gateway::{AfterMiss, Gateway, StoreOutcome};
use kvgate::s3::fanout::{AttemptPolicy, BreakerOptions, BreakerPhase, EndpointOptions, WindowOptions};
use kvgate::s3::net::Landing;
use kvgate::s3::object::{Condition, ErrorKind, GetRange, ObjectStore, S3, S3Options};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::{Instant, timeout};

use crate::support::backends::RETRIES;
use crate::support::capped::Capped;
use crate::support::capped_prompt::{
    ENDPOINTS, MB, MIB, NAME, Rig, carried, has, shares, space, state, tiny_space, totals, until, upstream,
};
use crate::support::dns_server::{A, AAAA, DnsServer, NXDOMAIN, Record, Reply, SRV};
use crate::support::fixture::{Prompt, arena, load_codes, soon, store_chunk};

/// As low as DNS can say, zero apart.
const TTL: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn even_addresses_get_even_shares() {
    let rig = Rig::new(4, 20 * MB, 32).await;
    let gateway = rig.gateway().await;
    let before = carried(&rig.proxies);
    rig.load(&gateway).await;
    let shares = shares("even", &rig.proxies, &before);
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
    // A load to learn from.
    rig.load(&gateway).await;
    shares("slow, learning", &rig.proxies, &[0; 4]);
    let before = carried(&rig.proxies);
    rig.load(&gateway).await;
    let shares = shares("slow", &rig.proxies, &before);
    assert!(shares[2] <= 10.0, "{shares:?}");
}

/// The proxy, once it has much in flight, and bodies are on their way.
fn busy<'a>(rig: &'a Rig, gateway: &Gateway, number: usize) -> Option<&'a Capped> {
    let proxy = &rig.proxies[number];
    let of = gateway.endpoints();
    let of = of.iter().find(|state| state.address == proxy.address())?;
    (of.in_flight >= 4 && of.totals.ok >= 2).then_some(proxy)
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
    rig.load_while(&gateway, || busy(&rig, &gateway, 1), async |proxy| proxy.kill())
        .await;
    let dead = rig.proxies[1].address();
    let lost = state(&gateway, dead).totals.lost;
    assert!(lost > 2, "{lost} ranges were lost: not enough to show anything");

    // It is left alone, but for a probe now and then.
    let opened = || state(&gateway, dead).breaker != BreakerPhase::Closed;
    rig.load_until(&gateway, soon(), opened).await;
    let before = state(&gateway, dead);
    for _ in 0..3 {
        rig.load(&gateway).await;
    }
    let more = state(&gateway, dead).totals.since(&before.totals).total();
    assert!(more <= 5, "{more} of 192 requests went to a dead endpoint");

    rig.proxies[1].revive().await.unwrap();
    let connections = rig.proxies[1].carried().connections;
    let back = || rig.proxies[1].carried().connections > connections + 2;
    rig.load_until(&gateway, soon(), back).await;
    assert_eq!(state(&gateway, dead).breaker, BreakerPhase::Closed);
}

/// Hedges take over bodies that hang in the middle, long before a time-out.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_in_the_middle_of_a_load() {
    let rig = Rig::new(4, 20 * MB, 16).await;
    let gateway = rig
        .gateway_with(&S3Options {
            // As many as it takes: on a busy machine, some were spent on what was only slow.
            attempts: AttemptPolicy {
                hedges: 100,
                ..RETRIES
            },
            read_timeout: Duration::from_secs(50),
            request_timeout: Duration::from_secs(50),
            ..rig.options()
        })
        .await;
    // It learns what is typical.
    rig.load(&gateway).await;
    let began = Instant::now();
    rig.load_while(&gateway, || busy(&rig, &gateway, 1), async |proxy| proxy.pause())
        .await;
    rig.load(&gateway).await;
    assert!(
        began.elapsed() < Duration::from_secs(40),
        "hedges and not time-outs ended it"
    );
    let hung = state(&gateway, rig.proxies[1].address());
    assert!(hung.totals.given_up > 0, "{hung:?}");
}

/// Time-outs do what hedges may not.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_in_ten_is_hedged_at_most() {
    let rig = Rig::new(3, 40 * MB, 16).await;
    let gateway = rig
        .gateway_with(&S3Options {
            read_timeout: Duration::from_secs(1),
            ..rig.options()
        })
        .await;
    rig.load(&gateway).await;
    rig.load_while(&gateway, || busy(&rig, &gateway, 1), async |proxy| proxy.pause())
        .await;
    for _ in 0..4 {
        rig.load(&gateway).await;
    }
    let all = totals(&gateway);
    eprintln!("one of three hangs: {all:?}");
    assert!(all.hedges > 0 && all.hedges * 10 <= all.total(), "{all:?}");
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
    rig.load_while(&gateway, || busy(&rig, &gateway, 1), async |proxy| proxy.pause())
        .await;
    assert_eq!(totals(&gateway).hedges, 0);
    let breaker = || state(&gateway, rig.proxies[1].address()).breaker;
    let opened = || breaker() != BreakerPhase::Closed;
    rig.load_until(&gateway, soon(), opened).await;
    rig.proxies[1].resume();
    let closed = || breaker() == BreakerPhase::Closed;
    rig.load_until(&gateway, soon(), closed).await;
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
    // Slow enough that stores are still under way when one is killed, however busy the machine is.
    let rig = Rig::new(3, 8 * MB, 1).await;
    let gateway = rig
        .gateway_with(&S3Options {
            attempts: AttemptPolicy { budget: 2, ..RETRIES },
            ..rig.options()
        })
        .await;
    let prompt = Prompt::of(space(), 12);
    // Chance decides which proxies get the stores.
    let storing = |proxy: &&Capped| {
        proxy.carried().bytes > MIB as u64 && state(&gateway, proxy.address()).in_flight > 0
    };
    let kill = async {
        let victim = Cell::new(None);
        until("stores are under way", || {
            victim.set(rig.proxies.iter().find(storing));
            victim.get().is_some()
        })
        .await;
        victim.get().unwrap().kill();
    };
    let stores = (0..12).map(|i| store_chunk(&gateway, &prompt, i));
    let (outcomes, ()) = tokio::join!(futures::future::join_all(stores), kill);
    for outcome in outcomes {
        // Present: it was there, and the answer that said so was lost.
        let stored = matches!(outcome, StoreOutcome::Stored | StoreOutcome::Present);
        assert!(stored, "{outcome:?}");
    }
    let codes = load_codes(&gateway, &prompt, AfterMiss::Continue).await;
    assert_eq!(codes, ["ok"; 12]);
    assert!(totals(&gateway).retries > 0, "{:#?}", gateway.endpoints());
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
    // The slow one is known by now.
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
        connect_timeout: Duration::from_millis(300),
        attempts: AttemptPolicy {
            retries: 1,
            ..RETRIES
        },
        ..rig.options()
    })
    .await
    .unwrap();
    for (script, words) in [
        (Reply::error(NXDOMAIN), "does not exist"),
        (Reply::new(Vec::new()), "no A or AAAA records"),
    ] {
        rig.dns.script(move |_| vec![script.clone()]);
        // Answers from before may still come.
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

/// No endpoint has more in flight than its window says, whoever asks for more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn windows_bound_what_is_in_flight() {
    let rig = Rig::new(2, 20 * MB, 4).await;
    let window = WindowOptions {
        start: 2 * MIB,
        min: 2 * MIB,
        max: 4 * MIB,
    };
    let endpoints = EndpointOptions { window, ..ENDPOINTS };
    let options = S3Options {
        endpoints,
        ..rig.options()
    };
    let store = S3::connect(&options).await.unwrap();
    let (arena, keys) = (
        arena(64 * MIB),
        [0, 1, 2, 3].map(|i| rig.site.key(&rig.prompt, i)),
    );
    let object_len = rig.prompt.space.layout().object_len();
    let gets = (0..32).map(|i| {
        let get = GetRange {
            key: &keys[i % 4],
            range: 0..MIB,
            object_len,
            if_match: None,
        };
        let slot = arena.try_reserve(MIB).unwrap();
        store.get(get, Landing::new(slot), soon())
    });
    let mut most = 0;
    let sample = async {
        loop {
            for state in store.endpoints() {
                assert!(state.in_flight_bytes <= window.max, "{state:?}");
                most = most.max(state.in_flight_bytes);
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::select! {
        got = futures::future::join_all(gets) => got.into_iter().for_each(|(_, got)| drop(got.unwrap())),
        () = sample => {}
    }
    assert!(most >= 2 * MIB, "it was used");
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
