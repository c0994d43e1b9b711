//! The rules without a network: who owns what, and what S3 sends when a fleet wants one prefix at once.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::time::Instant;

use super::hot::HotChunks;
use super::members::{Asks, Member, owner};
use super::*;
use crate::arena::{Arena, ArenaOptions};
use crate::format::{ChunkHash, SpaceKey};
use crate::s3::net::{Landing, NetError};

const NODES: usize = 1000;
const CHUNKS: usize = 200;

fn options() -> PeerOptions {
    let second = Duration::from_secs(1);
    PeerOptions {
        members: Vec::new(),
        listen: address(0xffff),
        token_file: None,
        tls: None,
        first_byte: second,
        stall: second,
        connections_max: 8,
        idle_timeout: second,
        breaker: BreakerOptions {
            failures: 3,
            open: second,
            open_max: second,
        },
        owners: 2,
        hot: 10 * second,
        hot_chunks: 1000,
        holder_ttl: second,
        denied_ttl: second,
        serve_bytes: 1 << 20,
        dns: DnsOptions {
            servers: Vec::new(),
            tcp: false,
            min_ttl: second,
            max_ttl: second,
            timeout: second,
        },
    }
}

fn address(node: usize) -> SocketAddr {
    let [high, low] = u16::try_from(node).unwrap().to_be_bytes();
    SocketAddr::from(([10, 0, high, low], 9181))
}

fn members(nodes: usize) -> Vec<Arc<Member>> {
    let options = options();
    let member = |node| Arc::new(Member::new(address(node), &options));
    (0..nodes).map(member).collect()
}

fn chunk(number: usize) -> ChunkHash {
    ChunkHash(*blake3::hash(&number.to_le_bytes()).as_bytes())
}

fn id(number: usize) -> ChunkId {
    (SpaceKey::from_hex(&"0".repeat(32)).unwrap(), chunk(number))
}

#[test]
fn the_owner_is_the_same_on_every_node_and_in_every_version() {
    let all = members(8);
    let owners: Vec<usize> = (0..12)
        .map(|number| {
            let owner = owner(&all, &chunk(number), None).unwrap();
            all.iter().position(|one| one.address == owner.address).unwrap()
        })
        .collect();
    assert_eq!(owners, OWNERS_OF_EIGHT);
    let mut other_order = all.clone();
    other_order.reverse();
    for number in 0..100 {
        let of = |all: &[Arc<Member>]| owner(all, &chunk(number), None).unwrap().address;
        assert_eq!(of(&all), of(&other_order));
    }
}

/// Nodes of two versions that disagreed would ask each other in vain.
const OWNERS_OF_EIGHT: [usize; 12] = [5, 2, 0, 5, 5, 0, 2, 7, 2, 0, 3, 1];

#[test]
fn a_member_that_leaves_moves_only_its_own_chunks_and_they_go_to_their_next_owner() {
    let all = members(20);
    let without: Vec<_> = all[1..].to_vec();
    let mut own = 0;
    for number in 0..1000 {
        let of = |all: &[Arc<Member>]| owner(all, &chunk(number), None).unwrap().address;
        let before = of(&all);
        if before == address(0) {
            own += 1;
            let next = owner(&all, &chunk(number), Some(&all[0])).unwrap().address;
            assert_eq!(of(&without), next);
        } else {
            assert_eq!(of(&without), before);
        }
    }
    assert!(
        (25..=75).contains(&own),
        "{own} of 1000 chunks, where 50 are its share"
    );
}

#[test]
fn a_node_knows_its_own_address() {
    let of = |listen: &str, member: &str| {
        let listen = listen.parse().unwrap();
        let options = PeerOptions { listen, ..options() };
        Member::new(member.parse().unwrap(), &options).is_self()
    };
    assert!(of("0.0.0.0:9181", "127.0.0.1:9181") && of("[::]:9181", "127.0.0.1:9181"));
    assert!(!of("0.0.0.0:9181", "127.0.0.1:9182"), "another port");
    assert!(!of("0.0.0.0:9181", "192.0.2.1:9181"), "another machine");
    assert!(of("127.0.0.1:9181", "127.0.0.1:9181"));
    assert!(
        !of("127.0.0.1:9181", "127.0.0.2:9181"),
        "another node of this machine"
    );
}

#[tokio::test(start_paused = true)]
async fn a_member_that_fails_is_passed_over_until_a_probe_works() {
    let all = members(3);
    let owned = (0..1000).find(|&number| owner(&all, &chunk(number), None).unwrap().address == address(0));
    let chunk = chunk(owned.unwrap());
    for _ in 0..3 {
        all[0].fail_to_answer();
    }
    assert_ne!(owner(&all, &chunk, None).unwrap().address, address(0));
    tokio::time::advance(Duration::from_secs(2)).await;
    assert_eq!(owner(&all, &chunk, None).unwrap().address, address(0));
    let _probe = all[0].begin(Asks::Question);
    assert_ne!(
        owner(&all, &chunk, None).unwrap().address,
        address(0),
        "one at a time"
    );
}

#[tokio::test(start_paused = true)]
async fn the_second_node_that_asks_within_the_time_makes_a_chunk_hot() {
    let hot = HotChunks::new(Duration::from_secs(10), 2);
    let ask = |number, asker| hot.asked(id(number), asker, Instant::now());
    let (one, other) = (Some(1), Some(2));
    assert!(!ask(0, one) && !ask(0, one), "one node alone does not");
    assert!(ask(0, other) && ask(0, one));
    assert!(ask(0, None) && ask(0, None), "nodes without a name are others");
    tokio::time::advance(Duration::from_secs(11)).await;
    assert!(!ask(0, other), "too long ago");
    assert!(!ask(1, one) && !ask(2, one), "and the bound forgets the oldest");
    assert!(!ask(0, one));
}

#[test]
fn the_budget_counts_a_chunk_once() {
    let budget = ServeBudget::new(100 << 10);
    let first = budget.spend(id(0), 60 << 10).unwrap();
    let again = budget.spend(id(0), 60 << 10).unwrap();
    assert_eq!(budget.used_bytes(), 60 << 10);
    assert!(budget.spend(id(1), 60 << 10).is_none());
    drop(first);
    assert!(budget.spend(id(1), 60 << 10).is_none(), "another answer sends it");
    drop(again);
    let large = budget.spend(id(1), 1 << 30).expect("alone");
    assert_eq!(budget.used_bytes(), 100 << 10);
    drop(large);
    assert_eq!(budget.used_bytes(), 0);
}

/// What a fleet's nodes did: times that S3 sent each chunk, and chunks that each node sent to others.
struct Storm {
    s3: Vec<usize>,
    sent: Vec<usize>,
}

/// All nodes want all chunks at once: their asks come mixed. `sees`: whether a node has a member in its view. A dead member
/// answers nobody, and wants nothing.
fn storm(sees: impl Fn(usize, usize) -> bool, is_dead: impl Fn(usize) -> bool) -> Storm {
    let all = members(NODES);
    let mut random = fastrand::Rng::with_seed(7);
    let hot: Vec<_> = (0..NODES)
        .map(|_| HotChunks::new(Duration::from_secs(10), CHUNKS))
        .collect();
    let (mut s3, mut sent) = (vec![0; CHUNKS], vec![0; NODES]);
    let now = Instant::now();
    for (number, s3) in s3.iter_mut().enumerate() {
        let mut has = BTreeSet::new();
        let ranking = ranking(&all, &chunk(number));
        let mut nodes: Vec<usize> = (0..NODES).filter(|node| !is_dead(*node)).collect();
        random.shuffle(&mut nodes);
        for node in nodes {
            // It had to fetch it for others.
            if has.contains(&node) {
                continue;
            }
            let owners = ranking.iter().copied().filter(|member| sees(node, *member));
            let owner = owners
                .take(options().owners as usize)
                .find(|owner| !is_dead(*owner));
            match owner.filter(|owner| *owner != node) {
                Some(owner) if has.contains(&owner) => sent[owner] += 1,
                Some(owner) if hot[owner].asked(id(number), Some(node as u64), now) => {
                    has.insert(owner);
                    *s3 += 1;
                    sent[owner] += 1;
                }
                _ => *s3 += 1,
            }
            has.insert(node);
        }
    }
    Storm { s3, sent }
}

/// A chunk's first owners.
fn ranking(all: &[Arc<Member>], chunk: &ChunkHash) -> Vec<usize> {
    let mut ranking: Vec<usize> = Vec::new();
    for _ in 0..16 {
        let after = ranking.last().map(|last| &*all[*last]);
        let next = owner(all, chunk, after).unwrap().address;
        ranking.push((0..NODES).find(|node| address(*node) == next).unwrap());
    }
    ranking
}

#[test]
fn of_a_prefix_that_a_thousand_nodes_want_at_once_s3_sends_each_chunk_twice_at_most() {
    let storm = storm(|_, _| true, |_| false);
    assert_eq!(storm.s3.iter().max(), Some(&2), "{:?}", storm.s3);
    // A node sends the chunks that it owns to all others, and owns a few of 200.
    let most = storm.sent.iter().max().unwrap().div_ceil(NODES);
    assert!(most <= 4, "one node sent {most} chunks to all others");
}

#[test]
fn views_that_differ_cost_s3_a_few_more() {
    // Each node lacks one member in twenty, and each another one.
    let sees =
        |node: usize, member: usize| fastrand::Rng::with_seed((node * NODES + member) as u64).u32(..20) > 0;
    let storm = storm(sees, |_| false);
    let all: usize = storm.s3.iter().sum();
    assert!(all <= 6 * CHUNKS, "{all}: {:?}", storm.s3);
    assert!(storm.s3.iter().max() <= Some(&12), "{:?}", storm.s3);
}

#[test]
fn dead_members_that_nobody_has_noticed_yet_cost_s3_no_more_but_for_chunks_whose_owners_are_all_dead() {
    // One in twenty. One chunk in 400 has two dead owners, and comes from S3 alone.
    let storm = storm(|_, _| true, |node| node % 20 == 0);
    let (alive, alone) = storm.s3.iter().partition::<Vec<_>, _>(|&&sent| sent <= 2);
    assert!(alone.len() <= 2, "{alone:?}");
    assert!(alone.iter().all(|&&sent| sent == NODES * 19 / 20), "{alone:?}");
    assert!(alive.len() >= CHUNKS - 2);
}

/// Members that answer as a test says, and what they were asked.
struct Script {
    asked: Mutex<Vec<(SocketAddr, &'static str)>>,
    /// Who has chunks, as all of them say.
    holder: Mutex<Option<SocketAddr>>,
    hangs: Mutex<BTreeSet<SocketAddr>>,
    /// By address and method; None: never.
    status: fn(SocketAddr, &str) -> Option<u16>,
}

impl Transport for Script {
    fn call<'a>(&'a self, to: SocketAddr, call: PeerCall<'a>) -> BoxFuture<'a, Result<Said, NetError>> {
        self.asked.lock().unwrap().push((to, call.method));
        let hangs = self.hangs.lock().unwrap().contains(&to);
        let status = (self.status)(to, call.method).filter(|_| !hangs);
        let holder = *self.holder.lock().unwrap();
        Box::pin(async move {
            tokio::time::sleep(Duration::from_millis(1)).await;
            match status {
                Some(status) => Ok(Said { status, holder }),
                None => std::future::pending().await,
            }
        })
    }

    fn forget(&self, _gone: SocketAddr) {}
}

/// A node whose peers are the first `nodes`, with the breaker's and first byte's times of [`options`].
fn peers_of(nodes: usize, status: fn(SocketAddr, &str) -> Option<u16>) -> (Arc<Peers>, Arc<Script>) {
    let script = Arc::new(Script {
        asked: Mutex::default(),
        holder: Mutex::default(),
        hangs: Mutex::default(),
        status,
    });
    let literal = |node| AddressSource::Host {
        name: address(node).ip().to_string(),
        port: address(node).port(),
    };
    let options = PeerOptions {
        members: (0..nodes).map(literal).collect(),
        ..options()
    };
    let dns = Resolver::new(options.dns.clone());
    let transport: Arc<dyn Transport> = Arc::clone(&script) as _;
    (Peers::over(options, transport, None, &dns).unwrap(), script)
}

fn landing() -> Landing {
    let arena = Arena::new(&ArenaOptions {
        size: 1 << 20,
        ..ArenaOptions::default()
    });
    Landing::new(arena.unwrap().try_reserve(4096).unwrap())
}

/// Lookups may wait less than `first_byte`.
#[tokio::test(start_paused = true)]
async fn a_member_that_hangs_is_noticed_by_lookups_that_do_not_wait_for_it() {
    let (peers, script) = peers_of(1, |_, _| None);
    for number in 0..10 {
        let found = tokio::time::timeout(Duration::from_millis(50), peers.finds(id(number)));
        assert!(!found.await.unwrap_or(false));
        tokio::time::advance(Duration::from_millis(400)).await;
    }
    assert!(!peers.members()[0].is_up());
    let asked = script.asked.lock().unwrap().len();
    assert!((3..9).contains(&asked), "{asked} times");
}

#[tokio::test(start_paused = true)]
async fn lookups_of_one_chunk_at_the_same_time_ask_once() {
    let (peers, script) = peers_of(1, |_, _| Some(200));
    let (one, other) = tokio::join!(peers.finds(id(0)), peers.finds(id(0)));
    assert!(one && other && peers.finds(id(0)).await);
    assert_eq!(script.asked.lock().unwrap().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_chunk_that_a_load_did_not_get_is_not_promised_again_for_a_while() {
    let (peers, _) = peers_of(1, |_, method| Some(if method == "HEAD" { 200 } else { 503 }));
    let soon = Instant::now() + Duration::from_secs(10);
    for _ in 0..3 {
        assert!(peers.finds(id(0)).await);
        let (_, asked) = peers.ask(id(0)).unwrap().get(landing(), soon).await;
        assert_eq!(asked, Asked::UseS3);
        assert!(!peers.finds(id(0)).await);
        tokio::time::advance(options().denied_ttl).await;
    }
}

/// As the one that has the chunk, and again as its owner.
#[tokio::test(start_paused = true)]
async fn a_member_that_hangs_is_asked_for_a_chunk_once() {
    let (peers, script) = peers_of(3, |_, method| (method == "HEAD").then_some(200));
    let owner = peers.owner(&id(0)).unwrap();
    assert!(peers.finds(id(0)).await, "the owner has it");
    let (soon, mut next) = (Instant::now() + Duration::from_secs(60), peers.ask(id(0)));
    while let Some(mut asking) = next {
        assert_eq!(asking.get(landing(), soon).await.1, Asked::Slow);
        next = asking.next();
    }
    let asked = script.asked.lock().unwrap();
    let times = |of| asked.iter().filter(|one| **one == (of, "GET")).count();
    assert_eq!(times(owner), 1);
    assert!((0..3).all(|node| times(address(node)) <= 1), "{asked:?}");
}

/// It is known to have the chunk, and its owner says so again.
#[tokio::test(start_paused = true)]
async fn a_holder_that_does_not_answer_is_not_asked_again_on_its_owners_word() {
    let (peers, script) = peers_of(3, |_, _| Some(503));
    let owner = peers.owner(&id(0)).unwrap();
    let holder = (0..3).map(address).find(|one| *one != owner).unwrap();
    *script.holder.lock().unwrap() = Some(holder);
    peers.holders.note(id(0), holder);
    script.hangs.lock().unwrap().insert(holder);
    let soon = Instant::now() + Duration::from_secs(60);
    let mut asking = peers.ask(id(0)).unwrap();
    assert_eq!(
        (asking.address(), asking.get(landing(), soon).await.1),
        (holder, Asked::Slow)
    );
    let mut asking = asking.next().unwrap();
    assert_eq!(
        (asking.address(), asking.get(landing(), soon).await.1),
        (owner, Asked::UseS3)
    );
    assert!(asking.holder().is_none());
}

/// Such loads say nothing of the member.
#[tokio::test(start_paused = true)]
async fn a_member_is_not_blamed_by_loads_that_have_less_time_than_it() {
    let (peers, _) = peers_of(1, |_, _| None);
    for number in 0..10 {
        let soon = Instant::now() + options().first_byte / 2;
        let (_, asked) = peers.ask(id(number)).unwrap().get(landing(), soon).await;
        assert_eq!(asked, Asked::Slow);
    }
    assert!(peers.members()[0].is_up());
}

/// Small questions tell whether a member is there, not whether its chunks are good.
#[tokio::test(start_paused = true)]
async fn a_member_that_answers_questions_and_sends_bad_chunks_is_left_alone() {
    let member = members(1).remove(0);
    let answers = |asks, asked| member.begin(asks).settle(asked, true);
    for _ in 0..3 {
        assert!(member.is_up());
        answers(Asks::Chunk, Asked::Wrong);
        answers(Asks::Question, Asked::Landed);
        answers(Asks::Chunk, Asked::UseS3);
    }
    assert!(!member.is_up() && !member.may_be_asked());
    tokio::time::advance(Duration::from_secs(2)).await;
    answers(Asks::Question, Asked::Landed);
    assert!(member.may_be_asked() && !member.is_up(), "a chunk is the probe");
    answers(Asks::Chunk, Asked::UseS3);
    assert!(member.may_be_asked() && !member.is_up(), "that was none");
    answers(Asks::Chunk, Asked::Landed);
    assert!(member.is_up());
}

/// An address may move from node to node.
#[tokio::test(start_paused = true)]
async fn that_an_address_is_this_node_is_believed_for_a_while() {
    let member = members(1).remove(0);
    member.begin(Asks::Question).settle(Asked::Own, true);
    assert!(member.is_self());
    tokio::time::advance(Duration::from_secs(61)).await;
    assert!(!member.is_self());
}

#[tokio::test(start_paused = true)]
async fn where_all_that_come_next_are_left_alone_nobody_is_asked() {
    let all = members(NODES);
    let ranking = ranking(&all, &chunk(0));
    for member in &ranking[..8] {
        for _ in 0..3 {
            all[*member].fail_to_answer();
        }
    }
    assert!(owner(&all, &chunk(0), None).is_none());
    let next = owner(&all, &chunk(0), Some(&all[ranking[0]]));
    assert_eq!(next.unwrap().address, address(ranking[8]));
}
