//! The cost of a paged copy by the CPU beside memcpy of the same bytes, by layout and length of a run.
//!
//!     cargo bench --bench copy               # the table
//!     cargo bench --bench copy -- --save     # also writes bench/results/copy-<date>.md and .json
//!
//! One thread. memcpy and the copy take turns over the same chunks, which together are larger than the caches; each
//! ratio is of two neighbours, and the median of all counts.

use std::fmt::Write as _;
use std::time::Instant;

use kvgate::arena::{Arena, ArenaOptions, Slot, SlotMut};
use kvgate::engine::copy::known::{KNOWN, KnownLayout, Pages};
use kvgate::engine::copy::{CopyJob, CpuOptions, HostPages, SlotMapping};
use kvgate::format::Space;
use serde_json::{Value, json};

mod saving;

type Failure = Box<dyn std::error::Error>;

const CHUNK_TOKENS: u32 = 256;
const LAYERS: u32 = 16;
const HEADS: u32 = 8;
const WANTED: f64 = 1.3;

struct Case {
    layout: KnownLayout,
    head_dim: u32,
    block_tokens: u32,
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let given = |flag: &str| arguments.iter().any(|argument| argument == flag);
    // `cargo test --benches` only wants to see it run.
    let (rounds, chunks) = if given("--bench") { (25, 12) } else { (1, 2) };
    let mut table = String::from(
        "| layout | runs | block tokens | load / memcpy | store / memcpy | load | memcpy | wanted |\n|---|---:|---:|---:|---:|---:|---:|---|\n",
    );
    let mut rows = Vec::new();
    for case in cases()? {
        let row = case.measure(rounds, chunks)?;
        let run = row["run_bytes"].as_u64().unwrap_or_default();
        let wanted = if run >= 256 {
            format!("{WANTED}")
        } else {
            String::new()
        };
        let (load, store) = (figure(&row, "load_ratio"), figure(&row, "store_ratio"));
        let line = format!(
            "| {} | {run} B | {} | {load:.2} | {store:.2} | {:.1} GiB/s | {:.1} GiB/s | {wanted} |",
            case.layout.name,
            case.block_tokens,
            figure(&row, "load_gib_s"),
            figure(&row, "memcpy_gib_s"),
        );
        println!("{line}");
        writeln!(table, "{line}")?;
        rows.push(row);
    }
    if given("--save") {
        saving::save("copy", "copy", "one thread", &table, &rows)?;
    }
    Ok(())
}

fn figure(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_default()
}

/// Runs of 64 bytes to a whole block, of vLLM's two orders, of K and V apart, and of SGLang.
fn cases() -> Result<Vec<Case>, Failure> {
    let all = [
        ("vllm LBNHC", 16, 16),
        ("vllm LBNHC", 64, 16),
        ("vllm LBNHC", 128, 16),
        ("vllm before 0.32, 2BNHD", 64, 16),
        ("vllm before 0.32, 2BNHD", 128, 16),
        ("vllm BLNHC", 128, 16),
        ("vllm LBHNC", 128, 16),
        ("vllm LBHNC", 128, 128),
        ("sglang", 128, 64),
        ("sglang host, page_first", 128, 64),
    ];
    let case = |&(name, head_dim, block_tokens): &(&str, u32, u32)| {
        let layout = KNOWN.into_iter().find(|layout| layout.name == name);
        Ok(Case {
            layout: layout.ok_or(name)?,
            head_dim,
            block_tokens,
        })
    };
    all.iter().map(case).collect()
}

impl Case {
    fn measure(&self, rounds: usize, chunks: u32) -> Result<Value, Failure> {
        let space = Space::from_json(&format!(
            r#"{{"model": "kvgate/bench", "revision": "copy", "dtype": "float16", "chunk_tokens": {CHUNK_TOKENS},
                "mha": {{"layers": {LAYERS}, "heads": {HEADS}, "head_dim": {}}}}}"#,
            self.head_dim
        ))?;
        let pages = Pages {
            blocks: chunks * CHUNK_TOKENS / self.block_tokens,
            block_tokens: self.block_tokens,
            heads: None,
            element_bytes: 2,
        };
        let one_thread = CpuOptions {
            threads: 1,
            bytes_per_thread: 1,
        };
        let mut engine = HostPages::new(&space, &self.layout, &pages, 0, one_thread)?;
        let jobs = self.jobs(&engine, &pages, chunks)?;
        let object_len = space.layout().object_len();
        let arena = Arena::new(&ArenaOptions {
            size: (object_len + 4096) * chunks as usize * 2,
            prefault: true,
            ..ArenaOptions::default()
        })?;
        let slot = || arena.try_reserve(object_len).ok_or("no room");
        let mut sources: Vec<Slot> = Vec::new();
        let mut targets: Vec<SlotMut> = Vec::new();
        for _ in 0..chunks {
            sources.push(slot()?.freeze());
            targets.push(slot()?);
        }
        let payload = space.layout().header_len()..object_len;
        let (mut memcpy, mut load, mut store) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..rounds {
            memcpy.push(seconds(|| {
                for (source, target) in sources.iter().zip(&mut targets) {
                    target[payload.clone()].copy_from_slice(&source[payload.clone()]);
                }
                Ok(())
            })?);
            load.push(seconds(|| {
                for (source, job) in sources.iter().zip(&jobs) {
                    engine.load(source.clone(), job)?;
                }
                Ok(())
            })?);
            store.push(seconds(|| {
                for (target, job) in std::mem::take(&mut targets).into_iter().zip(&jobs) {
                    targets.push(engine.store(target, job)?);
                }
                Ok(())
            })?);
        }
        let gib = (payload.len() * chunks as usize) as f64 / f64::from(1 << 30);
        let ratio = |of: &[f64]| median(of.iter().zip(&memcpy).map(|(of, memcpy)| of / memcpy));
        let parts = if self.layout.order.contains('K') { 2 } else { 1 };
        Ok(json!({
            "layout": self.layout.name,
            "run_bytes": self.head_dim * 2 * 2 / parts,
            "block_tokens": self.block_tokens,
            "load_ratio": ratio(&load),
            "store_ratio": ratio(&store),
            "load_gib_s": gib / median(load.iter().copied()),
            "memcpy_gib_s": gib / median(memcpy.iter().copied()),
        }))
    }

    /// Each chunk in blocks in no order.
    fn jobs(&self, engine: &HostPages, pages: &Pages, chunks: u32) -> Result<Vec<CopyJob>, Failure> {
        let mut table: Vec<u32> = (0..pages.blocks).collect();
        fastrand::Rng::with_seed(1).shuffle(&mut table);
        let slot = |token: u32| {
            table[(token / self.block_tokens) as usize] * self.block_tokens + token % self.block_tokens
        };
        let job = |chunk: u32| {
            let tokens = chunk * CHUNK_TOKENS..(chunk + 1) * CHUNK_TOKENS;
            let slots: Vec<i64> = tokens.map(|token| slot(token).into()).collect();
            Ok(CopyJob {
                planes: 0..LAYERS as usize,
                spans: engine
                    .cache()
                    .spans(SlotMapping::Slots(&slots), 0..CHUNK_TOKENS)?,
                at: 0,
            })
        };
        (0..chunks).map(job).collect()
    }
}

fn seconds(what: impl FnOnce() -> Result<(), Failure>) -> Result<f64, Failure> {
    let began = Instant::now();
    what()?;
    Ok(began.elapsed().as_secs_f64())
}

fn median(values: impl Iterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
