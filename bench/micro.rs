//! The cost of the hot paths, each next to a floor: the least that could do the same, measured in the same run.
//!
//! `bench/README.md` says how to read it. A round measures floor and subject one after the other, in changing order;
//! the ratio is the median over the rounds' ratios, and seconds are CPU seconds of this thread, so that other work on
//! the machine changes little. Nothing here fails for being slow.

mod saving;

use std::collections::HashMap;
use std::fmt::Write as _;
use std::hint::black_box;
use std::sync::Arc;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use crc_fast::CrcAlgorithm;
use kvgate::arena::{Arena, ArenaOptions, SlotMut};
use kvgate::cache::existence::{CacheLimits, ExistenceCache, Known};
use kvgate::cache::gateway::{Gateway, GatewayOptions};
use kvgate::cache::tier::policy::{Access, Queue};
use kvgate::format::{
    ChunkHash, ChunkHasher, ChunkId, DigestKind, Header, KeyPrefix, Keyring, Kind, Mask, Mha, PlaneDigest,
    Protection, Space, SpaceId, SpaceInput, TenantSecret, header_len,
};
use kvgate::protocol::{EvictionPolicy, Strategy};
use kvgate::s3::net::{Landing, Traffic};
use kvgate::s3::object::{
    Capabilities, Condition, GetFuture, GetRange, ListPage, ObjectMeta, ObjectStore, RequestCounts,
    StoreFuture, Version,
};
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;
use tokio::runtime::Runtime;
use tokio::time::Instant;

const ROUNDS: usize = 41;
/// CPU time that one measurement takes at least.
const SAMPLE: Duration = Duration::from_millis(4);
const CHUNKS: usize = 4096;
const CHUNK_TOKENS: usize = 256;
/// Live slots in the arena.
const SLOTS: [usize; 3] = [1, 1000, 30_000];

fn main() -> std::io::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let mut bench = Bench {
        // `cargo test --benches` only wants to see it run.
        rounds: if given("--bench") { ROUNDS } else { 1 },
        filter: arguments
            .iter()
            .find(|argument| !argument.starts_with('-'))
            .cloned(),
        rows: Vec::new(),
    };
    hash(&mut bench);
    header(&mut bench);
    digest(&mut bench);
    mask(&mut bench);
    arena(&mut bench);
    existence(&mut bench);
    lookup(&mut bench);
    policy(&mut bench);
    let table = markdown(&bench.rows);
    println!("\n{table}");
    if given("--save") {
        saving::save("micro", "micro", "medians of CPU time", &table, &bench.rows)?;
    }
    Ok(())
}

// ---------------------------------------------------------------- the harness

struct Bench {
    rounds: usize,
    filter: Option<String>,
    rows: Vec<Row>,
}

/// One comparison. Times are CPU nanoseconds of one run.
#[derive(Serialize)]
struct Row {
    name: String,
    floor: &'static str,
    floor_ns: f64,
    subject_ns: f64,
    ratio: f64,
    /// Of the rounds' ratios, the 10th and the 90th percentile.
    ratio_spread: (f64, f64),
    wanted: Option<Wanted>,
}

#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "snake_case")]
enum Wanted {
    RatioAtMost(f64),
    NanosecondsBelow(f64),
}

impl Bench {
    fn compare<F, S>(
        &mut self,
        name: impl Into<String>,
        floor: (&'static str, impl FnMut() -> F),
        subject: impl FnMut() -> S,
        wanted: Option<Wanted>,
    ) {
        let name = name.into();
        if self
            .filter
            .as_ref()
            .is_some_and(|filter| !name.contains(filter.as_str()))
        {
            return;
        }
        eprintln!("{name}");
        let (floor, mut floor_run) = floor;
        let mut subject_run = subject;
        let (floor_times, subject_times) = (times_for(&mut floor_run), times_for(&mut subject_run));
        let mut samples = Vec::with_capacity(self.rounds);
        for round in 0..self.rounds {
            samples.push(if round % 2 == 0 {
                let floor = cpu_ns(floor_times, &mut floor_run);
                (floor, cpu_ns(subject_times, &mut subject_run))
            } else {
                let subject = cpu_ns(subject_times, &mut subject_run);
                (cpu_ns(floor_times, &mut floor_run), subject)
            });
        }
        let quantile = |of: fn(&(f64, f64)) -> f64, share: usize| {
            let mut values: Vec<f64> = samples.iter().map(of).collect();
            values.sort_by(f64::total_cmp);
            values[(values.len() - 1) * share / 100]
        };
        let ratio: fn(&(f64, f64)) -> f64 = |(floor, subject)| subject / floor;
        self.rows.push(Row {
            name,
            floor,
            floor_ns: quantile(|sample| sample.0, 50),
            subject_ns: quantile(|sample| sample.1, 50),
            ratio: quantile(ratio, 50),
            ratio_spread: (quantile(ratio, 10), quantile(ratio, 90)),
            wanted,
        });
    }
}

/// How many runs fill a sample. Warms up on the way.
fn times_for<T>(run: &mut impl FnMut() -> T) -> u32 {
    let mut times = 1;
    loop {
        let taken = cpu_ns(times, run) * f64::from(times);
        if taken >= SAMPLE.as_nanos() as f64 || times >= 1 << 24 {
            return times;
        }
        times *= 2;
    }
}

/// CPU nanoseconds of one of `times` runs.
fn cpu_ns<T>(times: u32, run: &mut impl FnMut() -> T) -> f64 {
    let began = thread_cpu();
    for _ in 0..times {
        black_box(run());
    }
    (thread_cpu() - began) / f64::from(times)
}

/// CPU nanoseconds of this thread so far.
fn thread_cpu() -> f64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec as f64 * 1e9 + now.tv_nsec as f64
}

// ---------------------------------------------------------------- what is measured

fn space() -> Space {
    // A model of 70 billion parameters.
    let mha = Mha {
        layers: 80,
        heads: 8,
        head_dim: 128,
        v_head_dim: None,
    };
    let input = SpaceInput {
        model: "kvgate/bench".into(),
        revision: "0a1b2c3d".into(),
        mha: Some(mha),
        ..SpaceInput::default()
    };
    Space::new(input).expect("a space")
}

fn hashes(count: usize) -> Vec<ChunkHash> {
    (0..count as u64)
        .map(|i| ChunkHash(*blake3::hash(&i.to_le_bytes()).as_bytes()))
        .collect()
}

fn hash(bench: &mut Bench) {
    let hasher = ChunkHasher::new(&space(), None).expect("a hasher");
    let root = hasher.root(b"", b"").expect("a root");
    let tokens: Vec<u32> = (0..CHUNKS * CHUNK_TOKENS)
        .map(|_| fastrand::u32(..128_256))
        .collect();
    let key = space().model_id().0;
    // As docs/FORMAT.md section 3 has it: 0x01, parent, tokens, number of extras.
    let mut inputs: Vec<Vec<u8>> = tokens
        .chunks_exact(CHUNK_TOKENS)
        .map(|tokens| {
            let mut input = vec![0x01];
            input.extend(root.0);
            input.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
            input.extend(0_u32.to_le_bytes());
            input
        })
        .collect();
    let mut bare = || {
        let mut parent = root.0;
        for input in &mut inputs {
            input[1..33].copy_from_slice(&parent);
            parent = *blake3::keyed_hash(&key, input).as_bytes();
        }
        parent
    };
    let chain = || {
        *hasher
            .chain(&root, &tokens, &[])
            .expect("hashes")
            .last()
            .expect("a chunk")
    };
    assert_eq!(bare(), chain().0, "floor and subject do the same");
    bench.compare(
        "hash: chain of 4096 chunks of 256 tokens",
        ("keyed BLAKE3 over prepared bytes", bare),
        chain,
        Some(Wanted::RatioAtMost(1.15)),
    );
}

fn header(bench: &mut Bench) {
    for planes in [80, 200] {
        let [chunk, parent, id]: [ChunkHash; 3] = hashes(3).try_into().expect("three");
        let header = Header {
            space_id: SpaceId(id.0),
            chunk,
            parent,
            tokens: 256,
            payload_len: 80 << 20,
            kind: Kind::Full,
            is_draft: false,
            digest_kind: DigestKind::Blake3,
            digests: hashes(planes).into_iter().map(|hash| hash.0).collect(),
            seal: None,
        };
        let mut bytes = vec![0; header_len(planes)];
        header.write(&mut bytes);
        let written = bytes.clone();
        let body = &written[..written.len() - 32];
        bench.compare(
            format!("header: write, {planes} planes"),
            ("BLAKE3 of it", || blake3::hash(body)),
            || header.write(black_box(&mut bytes)),
            None,
        );
        bench.compare(
            format!("header: parse, {planes} planes"),
            ("BLAKE3 of it", || blake3::hash(body)),
            || Header::parse(black_box(&written)).expect("a header"),
            None,
        );
    }
}

fn protected(protection: Protection) -> Space {
    let json = format!(
        r#"{{"model": "m", "revision": "1", "protection": "{protection}", "mha": {{"layers": 1, "heads": 1, "head_dim": 1}}}}"#
    );
    Space::from_json(&json).expect("a space")
}

/// The digest of a signed space.
fn signed() -> PlaneDigest {
    let space = protected(Protection::Signed);
    let keys = Keyring::of_one(space.protection(), TenantSecret::new([7; 32]));
    keys.writes(&space, DigestKind::default()).expect("a key")
}

fn digest(bench: &mut Bench) {
    let mut bytes = vec![0; 16 << 20];
    fastrand::fill(&mut bytes);
    let mut copy = vec![0; bytes.len()];
    for (name, kind) in [
        ("CRC64NVME", PlaneDigest::Crc64Nvme),
        ("BLAKE3", PlaneDigest::Blake3),
        ("keyed BLAKE3", signed()),
    ] {
        bench.compare(
            format!("digest: {name} of 16 MiB"),
            ("memcpy of it", || black_box(&mut copy).copy_from_slice(&bytes)),
            || kind.of(black_box(&bytes)),
            None,
        );
    }
    let space = protected(Protection::Encrypted);
    let keys = Keyring::of_one(space.protection(), TenantSecret::new([7; 32]));
    let cipher = keys
        .encrypts(&space, &hashes(1)[0], None)
        .expect("a key")
        .expect("encrypted");
    let mut plane = bytes.clone();
    bench.compare(
        "digest: AES-256-GCM of 16 MiB, encrypted in place",
        ("memcpy of it", || black_box(&mut copy).copy_from_slice(&bytes)),
        || cipher.seal(0, black_box(&mut plane)),
        None,
    );
    plane.copy_from_slice(&bytes);
    let tag = cipher.seal(0, &mut plane);
    let encrypted = plane.clone();
    bench.compare(
        "digest: AES-256-GCM of 16 MiB, copied and decrypted",
        ("memcpy of it", || black_box(&mut copy).copy_from_slice(&bytes)),
        || {
            plane.copy_from_slice(&encrypted);
            assert!(cipher.open(0, black_box(&mut plane), &tag));
        },
        None,
    );
    bench.compare(
        "digest: CRC64NVME of 16 MiB, folded by ourselves",
        ("crc-fast", || {
            crc_fast::checksum(CrcAlgorithm::Crc64Nvme, black_box(&bytes))
        }),
        || PlaneDigest::Crc64Nvme.of(black_box(&bytes)),
        None,
    );
}

fn mask(bench: &mut Bench) {
    for bits in [CHUNKS, 131_072] {
        let bools: Vec<bool> = (0..bits).map(|i| i < bits - 5).collect();
        let mask: Mask = bools.iter().copied().collect();
        bench.compare(
            format!("mask: from {bits} bools"),
            ("a loop that sets bits", || {
                let mut bytes = vec![0_u8; bits.div_ceil(8)];
                for (i, &bit) in black_box(&bools).iter().enumerate() {
                    bytes[i / 8] |= u8::from(bit) << (i % 8);
                }
                bytes
            }),
            || black_box(&bools).iter().copied().collect::<Mask>(),
            None,
        );
        bench.compare(
            format!("mask: prefix of {bits} bits"),
            ("a loop over bools", || {
                black_box(&bools).iter().take_while(|&&bit| bit).count()
            }),
            || black_box(&mask).prefix(),
            None,
        );
        bench.compare(
            format!("mask: count of {bits} bits"),
            ("a loop over bools", || {
                black_box(&bools).iter().filter(|&&bit| bit).count()
            }),
            || black_box(&mask).count(),
            None,
        );
    }
}

fn arena(bench: &mut Bench) {
    // Pages are never touched, so this takes addresses and no memory.
    let options = ArenaOptions {
        size: 1 << 40,
        ..ArenaOptions::default()
    };
    let uniform: fn() -> usize = || 1 << 20;
    let mixed: fn() -> usize = || fastrand::usize((64 << 10)..(8 << 20));
    for live in SLOTS {
        for (sizes, size) in [("one size", uniform), ("mixed sizes", mixed)] {
            for shape in ["packed", "as many holes", "replaced at random"] {
                arena_with(bench, &options, live, (sizes, size), shape);
            }
        }
    }
}

fn arena_with(
    bench: &mut Bench,
    options: &ArenaOptions,
    live: usize,
    (sizes, size): (&str, fn() -> usize),
    shape: &str,
) {
    let arena = Arena::new(options).expect("an arena");
    let reserve = || arena.try_reserve(size()).expect("room");
    let mut slots: Vec<SlotMut> = (0..2 * live).map(|_| reserve()).collect();
    if shape == "as many holes" {
        let mut keep = [false, true].into_iter().cycle();
        slots.retain(|_| keep.next() == Some(true));
    } else {
        slots.truncate(live);
    }
    let lock = Mutex::new(0_usize);
    let floor = || {
        for _ in 0..2 {
            *lock.lock().expect("no panic") += size();
        }
        Arc::new([0_usize; 4])
    };
    bench.compare(
        format!("arena: reserve and drop, {live} live, {sizes}, {shape}"),
        ("two locks, an allocation", floor),
        || {
            if shape == "replaced at random" {
                drop(slots.swap_remove(fastrand::usize(..slots.len())));
                slots.push(reserve());
            } else {
                drop(reserve());
            }
        },
        None,
    );
}

fn limits() -> CacheLimits {
    CacheLimits {
        present_ttl: Duration::from_hours(1),
        absent_ttl: Duration::from_hours(1),
        bytes: 64 << 20,
    }
}

fn existence(bench: &mut Bench) {
    let space = space().key();
    let keys: Vec<ChunkId> = hashes(CHUNKS).into_iter().map(|hash| (space, hash)).collect();
    let strangers: Vec<ChunkId> = hashes(2 * CHUNKS)[CHUNKS..]
        .iter()
        .map(|&hash| (space, hash))
        .collect();
    let etag: Arc<str> = "d41d8cd98f00b204e9800998ecf8427e".into();
    let known = || Known::Present(Arc::clone(&etag));
    let fill = |map: &mut HashMap<ChunkId, Known>| {
        for key in &keys {
            map.insert(*key, known());
        }
    };
    let learn = |cache: &ExistenceCache| {
        for key in &keys {
            cache.learn(*key, known(), Instant::now());
        }
    };
    let mut map = HashMap::new();
    fill(&mut map);
    let cache = ExistenceCache::new(limits());
    learn(&cache);
    bench.compare(
        "existence: learn 4096 new keys",
        ("into a new HashMap", || {
            let mut map = HashMap::new();
            fill(&mut map);
            map
        }),
        || {
            let cache = ExistenceCache::new(limits());
            learn(&cache);
            cache
        },
        None,
    );
    bench.compare(
        "existence: is_present of 4096 known keys",
        ("HashMap::get", || {
            keys.iter().filter(|key| map.contains_key(key)).count()
        }),
        || {
            let now = Instant::now();
            keys.iter()
                .filter(|key| cache.is_present(key, now) == Some(true))
                .count()
        },
        None,
    );
    bench.compare(
        "existence: is_present of 4096 unknown keys",
        ("HashMap::get", || {
            strangers.iter().filter(|key| map.contains_key(key)).count()
        }),
        || {
            let now = Instant::now();
            strangers
                .iter()
                .filter(|key| cache.is_present(key, now).is_none())
                .count()
        },
        None,
    );
    // Last, as it fills what remembers the order of learning.
    bench.compare(
        "existence: learn 4096 known keys again",
        ("HashMap::insert", || fill(&mut map)),
        || learn(&cache),
        None,
    );
}

/// One use each, in a tier of a million chunks. Prompts of 16 chunks come 10 ms apart.
fn policy(bench: &mut Bench) {
    const KEYS: u64 = 1_000_000;
    let access = |number: u64| Access {
        at_ms: number / 16 * 10,
        request: (number / 16 % 0xFFFF_FFFE) as u32 + 1,
        added: 1 << (number / 16 % 7),
    };
    let full = |policy| {
        let mut queue = Queue::new(policy);
        // The chunks that leave teach it, too.
        for number in 0..2 * KEYS {
            queue.insert(number, access(number));
            while queue.len() as u64 > KEYS {
                queue.evict(|_| true);
            }
        }
        (queue, 2 * KEYS)
    };
    let hit = |(queue, number): &mut (Queue<u64>, u64)| {
        *number += 1;
        // All over the tier.
        queue.hit(&(KEYS + number.wrapping_mul(0x9E37_79B9) % KEYS), access(*number));
    };
    let turn_over = |(queue, number): &mut (Queue<u64>, u64)| {
        *number += 1;
        queue.insert(*number, access(*number));
        queue.evict(|_| true)
    };
    let (mut lru, mut reuse) = (full(EvictionPolicy::Lru), full(EvictionPolicy::Reuse));
    bench.compare(
        "policy: a hit among a million",
        ("LRU", || hit(&mut lru)),
        || hit(&mut reuse),
        Some(Wanted::NanosecondsBelow(1000.0)),
    );
    bench.compare(
        "policy: a new key and an eviction among a million",
        ("LRU", || turn_over(&mut lru)),
        || turn_over(&mut reuse),
        Some(Wanted::NanosecondsBelow(1000.0)),
    );
}

fn lookup(bench: &mut Bench) {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    let (space, chunks) = (space(), hashes(CHUNKS));
    let store = Arc::new(Heads {
        object_len: space.layout().object_len() as u64,
        heads: AtomicU64::new(0),
    });
    let gateway = gateway(&store);
    let known: HashMap<ChunkHash, u64> = chunks.iter().map(|&chunk| (chunk, 0)).collect();
    let floor = || {
        chunks
            .iter()
            .map(|chunk| known.contains_key(chunk))
            .collect::<Mask>()
    };
    let look = |strategy| look(&runtime, &gateway, &space, &chunks, strategy);

    look(Strategy::Exact);
    let filled = store.requests();
    assert_eq!(filled.head, CHUNKS as u64, "a HEAD for each unknown chunk");
    for (name, strategy) in [("exact", Strategy::Exact), ("prefix", Strategy::Prefix)] {
        bench.compare(
            format!("lookup: 4096 known chunks, {name}"),
            ("HashMap::get into a Mask", floor),
            || look(strategy),
            Some(Wanted::NanosecondsBelow(1e6)),
        );
    }
    assert_eq!(store.requests(), filled, "a warm lookup sends nothing");
    for (name, strategy) in [("exact", Strategy::Exact), ("prefix", Strategy::Prefix)] {
        bench.compare(
            format!("lookup: 4096 unknown chunks, {name}, HEADs answered at once"),
            ("HashMap::get into a Mask", floor),
            || {
                gateway.forget_existence();
                look(strategy);
            },
            None,
        );
    }
}

fn look(runtime: &Runtime, gateway: &Gateway, space: &Space, chunks: &[ChunkHash], strategy: Strategy) {
    let deadline = Instant::now() + Duration::from_mins(1);
    let found = runtime.block_on(gateway.lookup(space, chunks, strategy, deadline));
    assert_eq!(found.prefix, chunks.len());
}

fn gateway(store: &Arc<Heads>) -> Gateway {
    let arena = Arena::new(&ArenaOptions {
        size: 4096,
        ..ArenaOptions::default()
    });
    let options = GatewayOptions {
        keys: KeyPrefix::new("kv"),
        digest: DigestKind::default(),
        keyring: Keyring::default(),
        part_bytes: 8 << 20,
        layer_part_bytes: 4 << 20,
        get_bytes_max: 64 << 20,
        put_bytes_max: 64 << 20,
        cache: limits(),
        lookup_deadline: Duration::from_secs(1),
        lookup_concurrency: 64,
        lookup_probes: 15,
        run_chunks: 1 << 15,
        outage_pause_max: Duration::from_secs(30),
        log_repeat: Duration::from_mins(1),
    };
    let store: Arc<dyn ObjectStore> = Arc::<Heads>::clone(store);
    Gateway::new(store, arena.expect("an arena"), Capabilities::default(), options)
}

/// Has every object, and says so at once; nothing else.
struct Heads {
    object_len: u64,
    heads: AtomicU64,
}

impl ObjectStore for Heads {
    fn head<'a>(&'a self, _key: &'a str, _deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        self.heads.fetch_add(1, Ordering::Relaxed);
        let meta = ObjectMeta {
            len: self.object_len,
            version: Version {
                etag: "d41d8cd98f00b204e9800998ecf8427e".into(),
                modified: 0,
            },
            run: None,
        };
        Box::pin(async move { Ok(meta) })
    }

    fn attributes<'a>(&'a self, _key: &'a str, _deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        unreachable!("lookups ask by HEAD")
    }

    fn get<'a>(&'a self, _: GetRange<'a>, _: Landing, _: Instant) -> GetFuture<'a> {
        unreachable!("nothing is loaded")
    }

    fn read<'a>(&'a self, _key: &'a str, _limit: usize, _deadline: Instant) -> StoreFuture<'a, Bytes> {
        unreachable!("nothing is read")
    }

    fn put<'a>(&'a self, _: &'a str, _: Bytes, _: Condition<'a>, _: Instant) -> StoreFuture<'a, Arc<str>> {
        unreachable!("nothing is stored")
    }

    fn list<'a>(&'a self, _: &'a str, _: Option<&'a str>, _: Instant) -> StoreFuture<'a, ListPage> {
        unreachable!("nothing is listed")
    }

    fn delete<'a>(&'a self, _keys: &'a [String], _deadline: Instant) -> StoreFuture<'a, ()> {
        unreachable!("nothing is removed")
    }

    fn check_bucket(&self, _deadline: Instant) -> StoreFuture<'_, ()> {
        unreachable!("there is no bucket")
    }

    fn create_bucket(&self, _deadline: Instant) -> StoreFuture<'_, ()> {
        unreachable!("there is no bucket")
    }

    fn requests(&self) -> RequestCounts {
        RequestCounts {
            head: self.heads.load(Ordering::Relaxed),
            ..RequestCounts::default()
        }
    }

    fn traffic(&self) -> Traffic {
        Traffic::default()
    }
}

// ---------------------------------------------------------------- the report

fn markdown(rows: &[Row]) -> String {
    let mut text = "| what | CPU time | floor | its CPU time | ratio | 10 % to 90 % | wanted |\n".to_owned();
    text += "|---|---:|---|---:|---:|---:|---|\n";
    for row in rows {
        let (low, high) = row.ratio_spread;
        let wanted = match row.wanted {
            None => String::new(),
            Some(Wanted::RatioAtMost(most)) => format!("≤ {most}x: {}", kept(row.ratio <= most)),
            Some(Wanted::NanosecondsBelow(most)) => {
                format!("< {}: {}", duration(most), kept(row.subject_ns < most))
            }
        };
        // Writing to a String can't fail.
        let _ = writeln!(
            text,
            "| {} | {} | {} | {} | {:.2} | {low:.2} to {high:.2} | {wanted} |",
            row.name,
            duration(row.subject_ns),
            row.floor,
            duration(row.floor_ns),
            row.ratio,
        );
    }
    text
}

fn kept(kept: bool) -> &'static str {
    if kept { "kept" } else { "MISSED" }
}

fn duration(ns: f64) -> String {
    match ns {
        ..1e3 => format!("{ns:.1} ns"),
        1e3..1e6 => format!("{:.1} µs", ns / 1e3),
        _ => format!("{:.2} ms", ns / 1e6),
    }
}
