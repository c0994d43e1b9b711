//! Names become addresses, and stay addresses: whatever a DNS server says or does not say.

use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use kvgate::s3::dns::{AddressSource, DnsOptions, Resolved, Resolver};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::support::dns_server::{
    A, AAAA, DnsServer, Dnsmasq, Fault, NXDOMAIN, Question, REFUSED, Record, Reply, SERVFAIL, SRV,
};

const NAME: &str = "s3.kvgate.test";
const MIN_TTL: Duration = Duration::from_millis(50);

fn options(server: &DnsServer) -> DnsOptions {
    DnsOptions {
        servers: vec![server.address],
        tcp: false,
        min_ttl: MIN_TTL,
        max_ttl: Duration::from_secs(600),
        timeout: Duration::from_secs(10),
    }
}

fn host() -> AddressSource {
    AddressSource::Host {
        name: NAME.into(),
        port: 9000,
    }
}

fn watch(options: DnsOptions) -> watch::Receiver<Resolved> {
    Resolver::new(options).watch(&host())
}

/// Waits for it as long as a busy machine may need.
async fn until(told: &mut watch::Receiver<Resolved>, wanted: impl FnMut(&Resolved) -> bool) -> Resolved {
    let found = tokio::time::timeout(Duration::from_secs(30), told.wait_for(wanted)).await;
    let found = found.map(|resolved| resolved.expect("the task lives").clone());
    found.unwrap_or_else(|_| panic!("it does not come to pass: {:?}", told.borrow()))
}

/// Good and with exactly these addresses.
async fn until_at(told: &mut watch::Receiver<Resolved>, addresses: &[SocketAddr]) {
    let wanted = |resolved: &Resolved| *resolved.addresses == *addresses && resolved.error.is_none();
    let resolved = until(told, wanted).await;
    assert!(
        resolved
            .answered
            .is_some_and(|answered| answered.elapsed() < Duration::from_mins(1))
    );
}

/// An error with the name and these words; and the addresses beside it.
async fn until_error(told: &mut watch::Receiver<Resolved>, words: &str) -> Vec<SocketAddr> {
    let said = |error: &str| error.contains(words) && error.contains(".kvgate.test");
    let resolved = until(told, |resolved| resolved.error.as_deref().is_some_and(said)).await;
    assert_eq!(
        resolved.answered.is_some(),
        !resolved.addresses.is_empty(),
        "the last good answer's"
    );
    resolved.addresses.to_vec()
}

/// Until the server was asked so often.
async fn until_asked(server: &DnsServer, times: usize) {
    let limit = Instant::now() + Duration::from_secs(30);
    while server.asked().len() < times {
        assert!(
            Instant::now() < limit,
            "asked {} times of {times}",
            server.asked().len()
        );
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

fn v4(last: u8) -> Ipv4Addr {
    Ipv4Addr::new(10, 0, 0, last)
}

fn v6(last: u16) -> Ipv6Addr {
    Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, last)
}

fn at(last: u8) -> SocketAddr {
    (v4(last), 9000).into()
}

fn at_v6(last: u16) -> SocketAddr {
    (v6(last), 9000).into()
}

fn a(lasts: &[u8], ttl: u32) -> Vec<Record> {
    let records = lasts.iter().map(|&last| Record::a(NAME, ttl, v4(last)));
    records.collect()
}

/// These addresses of the one family, none of the other.
fn only_a(lasts: &'static [u8], ttl: u32) -> impl FnMut(&Question) -> Vec<Reply> + Send {
    move |question| {
        let records = if question.kind == A {
            a(lasts, ttl)
        } else {
            Vec::new()
        };
        vec![Reply::new(records)]
    }
}

fn nonsense(len: usize) -> Reply {
    Reply::faulty(Vec::new(), Fault::Nonsense(vec![0xff; len]))
}

fn always(reply: Reply) -> impl FnMut(&Question) -> Vec<Reply> + Send {
    move |_| vec![reply.clone()]
}

#[tokio::test]
async fn all_addresses_sorted_and_once() {
    let server = DnsServer::start(only_a(&[3, 1, 2, 1], 60)).await;
    let mut told = watch(options(&server));
    assert_eq!(*told.borrow(), Resolved::default(), "nothing is waited for");
    until_at(&mut told, &[at(1), at(2), at(3)]).await;
}

#[tokio::test]
async fn a_ttl_of_zero_is_no_spin() {
    let server = DnsServer::start(only_a(&[1], 0)).await;
    let began = Instant::now();
    let mut told = watch(options(&server));
    until_at(&mut told, &[at(1)]).await;
    until_asked(&server, 12).await;
    let lookups = server.asked().iter().filter(|asked| asked.kind == A).count();
    // The first one waited for nothing, and asked by TCP as well.
    let most = began.elapsed().div_duration_f64(MIN_TTL) + 2.0;
    assert!(lookups as f64 <= most, "{lookups} lookups, {most} at most");
    assert!(!told.has_changed().unwrap(), "the same again is not told again");
}

#[tokio::test]
async fn the_ceiling_bounds_a_long_ttl_and_a_long_ttl_is_kept() {
    let server = DnsServer::start(only_a(&[1], 86400)).await;
    let ceiling = DnsOptions {
        max_ttl: Duration::from_millis(100),
        ..options(&server)
    };
    let mut told = watch(ceiling);
    until_at(&mut told, &[at(1)]).await;
    server.script(only_a(&[2], 86400));
    until_at(&mut told, &[at(2)]).await;

    let other = DnsServer::start(only_a(&[1], 86400)).await;
    until_at(&mut watch(options(&other)), &[at(1)]).await;
    until_asked(&server, 40).await;
    assert!(
        other.asked().len() <= 6,
        "one lookup: A and AAAA, each at most three times over UDP"
    );
}

#[tokio::test]
async fn a_chain_of_cnames() {
    let chain = |ttls: [u32; 3]| {
        vec![
            Record::cname(NAME, ttls[0], "a.kvgate.test"),
            Record::cname("a.kvgate.test", ttls[1], "b.kvgate.test"),
            Record::cname("b.kvgate.test", ttls[2], "c.kvgate.test"),
        ]
    };
    let whole = move |last| {
        move |question: &Question| {
            let mut records = chain([60, 0, 60]);
            if question.kind == A {
                records.push(Record::a("c.kvgate.test", 60, v4(last)));
                // Nobody asked for this one.
                records.push(Record::a("x.kvgate.test", 60, v4(99)));
            }
            vec![Reply::new(records)]
        }
    };
    let server = DnsServer::start(whole(1)).await;
    let mut told = watch(options(&server));
    until_at(&mut told, &[at(1)]).await;
    server.script(whole(2));
    until_at(&mut told, &[at(2)]).await; // The TTL in the middle was 0.

    // A server that gives one record at a time.
    let piecemeal = move |last| {
        move |question: &Question| {
            let mut records = chain([0, 60, 60]);
            records.retain(|record| record.name() == question.name);
            if question.name == "c.kvgate.test" && question.kind == A {
                records = vec![Record::a("c.kvgate.test", 60, v4(last))];
            }
            vec![Reply::new(records)]
        }
    };
    server.script(piecemeal(3));
    until_at(&mut told, &[at(3)]).await;
    server.script(piecemeal(4));
    until_at(&mut told, &[at(4)]).await;

    server.script(|question| {
        vec![Reply::new(vec![Record::cname(
            &question.name,
            0,
            "again.kvgate.test",
        )])]
    });
    assert_eq!(until_error(&mut told, "CNAME").await, [at(4)]);
}

#[tokio::test]
async fn aaaa_beside_a() {
    let server = DnsServer::start(|question| {
        vec![Reply::new(match question.kind {
            A => a(&[1], 0),
            _ => vec![Record::aaaa(NAME, 60, v6(1))],
        })]
    })
    .await;
    let mut told = watch(options(&server));
    until_at(&mut told, &[at(1), at_v6(1)]).await;

    server.script(|question| {
        vec![match question.kind {
            A => Reply::error(SERVFAIL),
            _ => Reply::new(vec![Record::aaaa(NAME, 0, v6(2))]),
        }]
    });
    // The addresses of A stay, since these may be the only ones that can be reached.
    until_at(&mut told, &[at(1), at_v6(2)]).await;

    server.script(|question| match question.kind {
        A => vec![Reply::new(Vec::new())],
        _ => vec![Reply::new(vec![Record::aaaa(NAME, 0, v6(2))])],
    });
    until_at(&mut told, &[at_v6(2)]).await; // An answer: there are none.
}

#[tokio::test]
async fn a_works_while_aaaa_fails() {
    for replies in [vec![Reply::error(SERVFAIL)], vec![], vec![nonsense(40)]] {
        let server = DnsServer::start(move |question| match question.kind {
            A => vec![Reply::new(a(&[1], 60))],
            _ => replies.clone(),
        })
        .await;
        let options = DnsOptions {
            timeout: Duration::from_millis(300),
            ..options(&server)
        };
        let mut told = watch(options);
        until_at(&mut told, &[at(1)]).await;
        let asked = server.asked().len();
        until_asked(&server, asked + 1).await; // It goes on asking, whatever the TTL of A is.
        assert_eq!(told.borrow().error, None);
    }
}

#[tokio::test]
async fn of_srv_the_ports_and_the_first_priority() {
    const SERVICE: &str = "_s3._tcp.kvgate.test";
    let zone = |far: u16| {
        move |question: &Question| {
            let srv = |priority, port, target| Record::srv(SERVICE, 0, priority, port, target);
            vec![Reply::new(match (question.name.as_str(), question.kind) {
                (SERVICE, SRV) => vec![
                    srv(far, 7000, "far.kvgate.test"),
                    srv(10, 9001, "b.kvgate.test"),
                    srv(10, 9000, "a.kvgate.test"),
                ],
                ("a.kvgate.test", A) => vec![
                    Record::a("a.kvgate.test", 60, v4(1)),
                    Record::a("a.kvgate.test", 60, v4(2)),
                ],
                ("b.kvgate.test", AAAA) => vec![Record::aaaa("b.kvgate.test", 60, v6(3))],
                ("far.kvgate.test", A) => vec![Record::a("far.kvgate.test", 60, v4(9))],
                _ => Vec::new(),
            })]
        }
    };
    let server = DnsServer::start(zone(20)).await;
    let source = AddressSource::Srv { name: SERVICE.into() };
    let mut told = Resolver::new(options(&server)).watch(&source);
    let b = SocketAddr::from((v6(3), 9001));
    until_at(&mut told, &[at(1), at(2), b]).await;
    let far = |asked: &Question| asked.name == "far.kvgate.test";
    assert!(!server.asked().iter().any(far));

    server.script(zone(5));
    until_at(&mut told, &[(v4(9), 7000).into()]).await;
    server.script(only_a(&[], 0));
    let kept = until_error(&mut told, "_s3._tcp.kvgate.test has no SRV records").await;
    assert_eq!(kept, [(v4(9), 7000).into()]);
    server.script(|_| vec![Reply::new(vec![Record::srv(SERVICE, 0, 0, 0, ".")])]);
    assert_eq!(until_error(&mut told, "names a target").await, kept);
}

#[tokio::test]
async fn the_last_good_answer_stays_while_dns_fails() {
    let server = DnsServer::start(only_a(&[1, 2], 0)).await;
    let options = DnsOptions {
        timeout: Duration::from_millis(300),
        ..options(&server)
    };
    let mut told = watch(options);
    for (reply, words) in [
        (Some(Reply::error(NXDOMAIN)), "does not exist"),
        (Some(Reply::error(SERVFAIL)), "Server Failure"),
        (Some(Reply::error(REFUSED)), "Refused"),
        (Some(Reply::new(Vec::new())), "no A or AAAA records"),
        (None, "no answer"),
        (Some(nonsense(40)), "did not resolve"),
        (Some(nonsense(0)), "did not resolve"),
    ] {
        until_at(&mut told, &[at(1), at(2)]).await;
        server.script(move |_| reply.clone().into_iter().collect());
        assert_eq!(until_error(&mut told, words).await, [at(1), at(2)]);
        server.script(only_a(&[1, 2], 0));
    }
    until_at(&mut told, &[at(1), at(2)]).await;
}

#[tokio::test]
async fn nothing_at_first() {
    let server = DnsServer::start(always(Reply::error(SERVFAIL))).await;
    let mut told = watch(options(&server));
    assert_eq!(until_error(&mut told, "Server Failure").await, []);
    server.script(only_a(&[1], 60));
    until_at(&mut told, &[at(1)]).await;

    let source = AddressSource::Host {
        name: "no..name.kvgate.test".into(),
        port: 1,
    };
    let mut told = Resolver::new(options(&server)).watch(&source);
    assert_eq!(until_error(&mut told, "is no domain name").await, []);
}

#[tokio::test]
async fn an_answer_that_comes_too_late_harms_nothing() {
    let server = DnsServer::start(only_a(&[1], 0)).await;
    let options = DnsOptions {
        timeout: Duration::from_millis(200),
        ..options(&server)
    };
    let mut told = watch(options);
    until_at(&mut told, &[at(1)]).await;
    server.script(always(Reply {
        after: Duration::from_millis(400),
        ..Reply::new(a(&[7], 60))
    }));
    assert_eq!(until_error(&mut told, "no answer").await, [at(1)]);
    let asked = server.asked().len();
    until_asked(&server, asked + 6).await; // By now late ones have come.
    assert_eq!(until_error(&mut told, "no answer").await, [at(1)]);
    server.script(only_a(&[2], 0));
    until_at(&mut told, &[at(2)]).await;
}

#[tokio::test]
async fn truncated_answers_are_asked_for_by_tcp() {
    let truncated = |question: &Question| {
        let records = if question.kind == A {
            a(&[1], 0)
        } else {
            Vec::new()
        };
        vec![Reply::faulty(records, Fault::Truncated)]
    };
    let server = DnsServer::start(truncated).await;
    until_at(&mut watch(options(&server)), &[at(1)]).await;
    assert!(server.asked().iter().any(|asked| asked.tcp));

    for (fault, words) in [
        (Fault::OtherQuestion, "another question"),
        (Fault::NoQuestion, "another question"),
        (Fault::OtherId, "no answer"),
        (Fault::Nonsense(vec![0xff; 40]), "no answer"),
    ] {
        let server = DnsServer::start(move |question| match question.tcp {
            true => vec![Reply::faulty(a(&[9], 0), fault.clone())],
            false => truncated(question),
        })
        .await;
        let options = DnsOptions {
            timeout: Duration::from_millis(300),
            ..options(&server)
        };
        let mut told = watch(options);
        assert_eq!(until_error(&mut told, words).await, []);
        server.script(truncated);
        until_at(&mut told, &[at(1)]).await;
    }
}

#[tokio::test]
async fn truncated_and_no_tcp() {
    let server = DnsServer::start_without_tcp(only_a(&[1], 0)).await;
    let mut told = watch(options(&server));
    until_at(&mut told, &[at(1)]).await;
    server.script(always(Reply::faulty(a(&[1, 2], 0), Fault::Truncated)));
    let kept = until_error(&mut told, "did not give it over TCP").await;
    assert_eq!(kept, [at(1)], "half an answer is none");
}

/// As Consul does without `enable_truncate`: UDP has a part of the answer and does not say so.
#[tokio::test]
async fn an_answer_that_was_cut_in_silence_is_completed_by_tcp() {
    let server = DnsServer::start(|question| {
        let addresses: &[u8] = if question.tcp {
            &[1, 2, 3, 4, 5]
        } else {
            &[1, 2, 3]
        };
        only_a(addresses, 60)(question)
    })
    .await;
    let mut told = watch(options(&server));
    until(&mut told, |resolved| resolved.addresses.len() == 5).await;
    drop(told);
    let asked = server.asked().len();
    let by_tcp = DnsOptions {
        tcp: true,
        ..options(&server)
    };
    until_at(&mut watch(by_tcp), &[1, 2, 3, 4, 5].map(at)).await;
    assert!(server.asked()[asked..].iter().all(|asked| asked.tcp));
}

/// The same where TCP is blocked: each answer has others.
#[tokio::test]
async fn without_tcp_what_answers_have_lately_had_is_kept() {
    let first = std::sync::atomic::AtomicUsize::new(0);
    let server = DnsServer::start_without_tcp(move |question| {
        let sets: [&[u8]; 3] = [&[1, 2], &[3, 4], &[1, 5]];
        let set = match question.kind {
            A => first.fetch_add(1, std::sync::atomic::Ordering::Relaxed) % 3,
            _ => 0,
        };
        only_a(sets[set], 0)(question)
    })
    .await;
    let mut told = watch(options(&server));
    until_at(&mut told, &[1, 2, 3, 4, 5].map(at)).await;
    let asked = server.asked().len();
    until_asked(&server, asked + 6).await;
    assert!(!told.has_changed().unwrap(), "{:?}", told.borrow());
}

#[tokio::test]
async fn answers_to_others_are_ignored() {
    let server = DnsServer::start(|question| {
        let good = only_a(&[1], 60)(question).remove(0);
        let faults = [Fault::OtherId, Fault::OtherQuestion, Fault::NoQuestion];
        let spoiled = faults.map(|fault| Reply::faulty(a(&[9], 0), fault));
        spoiled.into_iter().chain([good]).collect()
    })
    .await;
    let mut told = watch(options(&server));
    until(&mut told, |resolved| *resolved != Resolved::default()).await;
    assert_eq!(*told.borrow().addresses, [at(1)]);
}

#[tokio::test]
async fn a_hundred_addresses() {
    let all: Vec<u8> = (1..=100).collect();
    let lasts: &'static [u8] = all.clone().leak();
    let server = DnsServer::start(only_a(lasts, 60)).await;
    let addresses: Vec<_> = all.iter().map(|&last| at(last)).collect();
    until_at(&mut watch(options(&server)), &addresses).await;
    assert!(server.asked().iter().any(|asked| asked.tcp));
}

#[tokio::test]
async fn nobody_asks_when_nobody_listens() {
    let server = DnsServer::start(only_a(&[1], 0)).await;
    let resolver = Resolver::new(options(&server));
    let mut told = resolver.watch(&host());
    until_at(&mut told, &[at(1)]).await;
    let second = told.clone();
    drop(told);
    let asked = server.asked().len();
    until_asked(&server, asked + 4).await;
    drop(second);

    // Another server's questions are the clock: many refreshes pass.
    let clock = DnsServer::start(only_a(&[1], 0)).await;
    let _ticks = watch(options(&clock));
    until_asked(&clock, 4).await;
    let asked = server.asked().len();
    until_asked(&clock, 20).await;
    assert_eq!(server.asked().len(), asked);
}

#[tokio::test]
async fn the_next_server_when_the_first_one_fails() {
    let good = DnsServer::start(only_a(&[1], 60)).await;
    for replies in [vec![], vec![Reply::error(REFUSED)], vec![Reply::error(SERVFAIL)]] {
        let bad = DnsServer::start(move |_| replies.clone()).await;
        let both = DnsOptions {
            servers: vec![bad.address, good.address],
            timeout: Duration::from_secs(2),
            ..options(&bad)
        };
        until_at(&mut watch(both), &[at(1)]).await;
    }
    // "No such name" is an answer: the order of the servers says whom to believe.
    let first = DnsServer::start(always(Reply::error(NXDOMAIN))).await;
    let both = DnsOptions {
        servers: vec![first.address, good.address],
        ..options(&first)
    };
    assert_eq!(until_error(&mut watch(both), "does not exist").await, []);
}

#[tokio::test]
async fn a_name_without_a_dot_is_taken_as_it_is() {
    let server = DnsServer::start(|question| {
        let named = question.name == "storage" && question.kind == A;
        vec![Reply::new(match named {
            true => vec![Record::a("storage", 60, v4(1))],
            false => Vec::new(),
        })]
    })
    .await;
    let source = AddressSource::Host {
        name: "Storage".into(),
        port: 9000,
    };
    let mut told = Resolver::new(options(&server)).watch(&source);
    until_at(&mut told, &[at(1)]).await;
}

/// Bytes that no server would send: the task survives all of them.
#[tokio::test]
async fn any_bytes() {
    let stop = Arc::new(AtomicBool::new(false));
    let good = Arc::clone(&stop);
    let server = DnsServer::start(move |question| {
        if good.load(Ordering::Relaxed) {
            return only_a(&[1], 60)(question);
        }
        // Often enough with a good start of a header: an answer, with one question and some records.
        let mut bytes: Vec<u8> = (0..fastrand::usize(..200)).map(|_| fastrand::u8(..)).collect();
        let start = [0x81, 0x80, 0, 1, 0, fastrand::u8(..3), 0, 0, 0, 0];
        let len = fastrand::usize(..=start.len()).min(bytes.len());
        bytes[..len].copy_from_slice(&start[..len]);
        vec![Reply::faulty(Vec::new(), Fault::Nonsense(bytes))]
    })
    .await;
    let options = DnsOptions {
        min_ttl: Duration::ZERO,
        timeout: Duration::from_millis(50),
        ..options(&server)
    };
    let mut told = watch(options);
    until_asked(&server, 200).await;
    assert!(told.borrow().addresses.is_empty());
    stop.store(true, Ordering::Relaxed);
    until_at(&mut told, &[at(1)]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_real_dns_server() {
    let addresses = |lasts: std::ops::RangeInclusive<u8>| -> Vec<String> {
        lasts.map(|last| v4(last).to_string()).collect()
    };
    let expected = |lasts: std::ops::RangeInclusive<u8>| -> Vec<SocketAddr> { lasts.map(at).collect() };
    let Some(server) = Dnsmasq::start("dns::a_real_dns_server", &addresses(1..=4)) else {
        return;
    };
    let source = AddressSource::Host {
        name: server.name.into(),
        port: 9000,
    };
    let resolver = Resolver::new(DnsOptions {
        servers: vec![server.address],
        tcp: false,
        min_ttl: MIN_TTL,
        max_ttl: Duration::from_secs(600),
        timeout: Duration::from_secs(2),
    });
    let mut told = resolver.watch(&source);
    until_at(&mut told, &expected(1..=4)).await;

    server.set(&addresses(1..=100));
    until_at(&mut told, &expected(1..=100)).await;
    server.set(&addresses(2..=3));
    until_at(&mut told, &expected(2..=3)).await;

    server.set(&[]);
    assert_eq!(until_error(&mut told, "does not exist").await, expected(2..=3));
    server.set(&addresses(5..=5));
    until_at(&mut told, &expected(5..=5)).await;

    server.kill();
    assert_eq!(until_error(&mut told, "no answer").await, expected(5..=5));
}
