//! The cost of the disk tier: a start with many chunks, lookups, and the way to the disk and back.
//!
//!     cargo bench --bench disk               # the table
//!     cargo bench --bench disk -- --save     # also writes bench/results/disk-<date>.md and .json
//!     cargo bench --bench disk -- --cold     # as root: starts after the system's caches were dropped, too
//!
//! The folders are on the disk that the target folder is on.

use std::fmt::Write as _;
use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use kvgate::arena::{Arena, ArenaOptions};
use kvgate::cache::tier::{Below, Disk, DiskOptions, Wrote};
use kvgate::format::{ChunkHash, ChunkId, Space};
use serde_json::json;

mod saving;

type Failure = Box<dyn std::error::Error>;

/// On the disk at a start.
const CHUNKS: u32 = 100_000;
/// A prompt's.
const ASKED: u32 = 4096;
/// Written and read.
const MOVED: u32 = 500;

struct Row {
    what: String,
    wanted: &'static str,
    times: Vec<Duration>,
}

impl Row {
    fn new(what: impl Into<String>, wanted: &'static str) -> Self {
        Self {
            what: what.into(),
            wanted,
            times: Vec::new(),
        }
    }

    fn time<T>(&mut self, what: impl FnOnce() -> T) -> T {
        let began = Instant::now();
        let done = what();
        self.times.push(began.elapsed());
        done
    }
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |flag: &str| arguments.iter().any(|argument| argument == flag);
    // `cargo test --benches` only wants to see it run.
    let (rounds, part) = if given("--bench") { (5, 1) } else { (1, 100) };
    let mut rows = starts(rounds, CHUNKS / part, given("--cold"))?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    rows.extend(runtime.block_on(transfers(rounds, MOVED / part))?);
    for row in &mut rows {
        row.times.sort();
    }
    let mut table = String::from("| what | median | least | most | wanted |\n|---|---:|---:|---:|---|\n");
    for Row { what, wanted, times } in &rows {
        let [median, least, most] = [times.len() / 2, 0, times.len() - 1].map(|at| times[at]);
        writeln!(
            table,
            "| {what} | {median:.2?} | {least:.2?} | {most:.2?} | {wanted} |"
        )?;
    }
    print!("{table}");
    if given("--save") {
        let ms = |time: &Duration| time.as_secs_f64() * 1e3;
        let row = |row: &Row| json!({ "what": row.what, "ms": row.times.iter().map(ms).collect::<Vec<_>>() });
        let rows: Vec<_> = rows.iter().map(row).collect();
        saving::save("disk", "disk", "one disk", &table, &rows)?;
    }
    Ok(())
}

/// Starts with files that are there, and questions to what was found.
fn starts(rounds: usize, chunks: u32, cold: bool) -> Result<Vec<Row>, Failure> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let (options, space) = (options(folder.path().into()), space(4096)?);
    drop(Disk::open(&options)?);
    let space_folder = folder.path().join(space.key().to_string());
    fs::create_dir(&space_folder)?;
    fs::write(space_folder.join("space.json"), space.canonical_json())?;
    for chunk in 0..chunks {
        // Holes have a length too.
        let file = fs::File::create(space_folder.join(hash(chunk).to_string()))?;
        file.set_len(space.layout().object_len() as u64)?;
    }
    let mut rows = vec![Row::new(format!("start with {chunks} chunks"), "seconds")];
    if cold {
        rows.push(Row::new(
            format!("start with {chunks} chunks, caches dropped"),
            "seconds",
        ));
    }
    for _ in 0..rounds {
        for (is_cold, row) in rows.iter_mut().enumerate() {
            if is_cold == 1 {
                fs::write("/proc/sys/vm/drop_caches", "3")?;
            }
            let disk = row.time(|| Disk::open(&options))?;
            assert_eq!(disk.stats().disks[0].chunks, u64::from(chunks));
        }
    }
    for ttl in [None, Some(Duration::from_hours(1))] {
        let disk = Disk::open(&DiskOptions {
            ttl,
            ..options.clone()
        })?;
        let with = if ttl.is_some() {
            "with a TTL"
        } else {
            "without TTL"
        };
        let mut row = Row::new(format!("whether {ASKED} chunks are there, {with}"), "");
        let keys: Vec<ChunkId> = (0..ASKED).map(|i| (space.key(), hash(i * 7 % chunks))).collect();
        for _ in 0..rounds * 4 {
            let now = tokio::time::Instant::now();
            assert!(row.time(|| keys.iter().all(|key| disk.has(key, now))));
        }
        rows.push(row);
    }
    Ok(rows)
}

/// Slots to files, as many at a time as the disk takes, and back one after the other.
async fn transfers(rounds: usize, chunks: u32) -> Result<Vec<Row>, Failure> {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR"))?;
    let disk = Disk::open(&options(folder.path().into()))?;
    let arena = Arena::new(&ArenaOptions {
        size: 16 << 20,
        prefault: true,
        ..ArenaOptions::default()
    })?;
    let space = space(1 << 20)?;
    let object_len = space.layout().object_len();
    let mut slot = arena.try_reserve(object_len).ok_or("no room")?;
    slot.fill(7);
    let slot = slot.freeze();
    let mut written = Row::new(format!("{chunks} chunks of 1 MiB written"), "");
    let mut read = Row::new(format!("{chunks} chunks of 1 MiB read one by one"), "");
    for round in 0..u32::try_from(rounds)? {
        let hashes: Vec<ChunkHash> = (0..chunks).map(|i| hash(round * chunks + i)).collect();
        let (began, since) = (Instant::now(), tokio::time::Instant::now());
        let writes = hashes
            .iter()
            .map(|hash| disk.write(&space, hash, slot.clone(), since, Below::Has));
        for wrote in futures::future::join_all(writes).await {
            assert_eq!(wrote?, Wrote::Stored);
        }
        written.times.push(began.elapsed());
        let began = Instant::now();
        for hash in &hashes {
            let slot = arena.try_reserve(object_len).ok_or("no room")?;
            disk.read(&space, hash, slot).await.1?;
        }
        read.times.push(began.elapsed());
    }
    Ok(vec![written, read])
}

fn options(path: PathBuf) -> DiskOptions {
    DiskOptions {
        paths: vec![path],
        size_bytes: 1 << 40,
        watermark_percent: 100,
        depth: 4,
        ..DiskOptions::default()
    }
}

/// Chunks of one plane of so many bytes.
fn space(payload_len: u32) -> Result<Space, Failure> {
    Ok(Space::from_json(&format!(
        r#"{{"model": "kvgate/bench", "revision": "disk", "dtype": "int8", "chunk_tokens": 1,
            "planes": [{{"name": "kv", "layer": 0, "heads": 1, "row_bytes": {payload_len}}}]}}"#
    ))?)
}

fn hash(chunk: u32) -> ChunkHash {
    ChunkHash(*blake3::hash(&chunk.to_le_bytes()).as_bytes())
}
