//! Traces replayed over a fleet in which nothing goes wrong: each prompt comes at its time to any gateway, which loads what is
//! there, and computes and stores the rest.

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use kvgate::format::ChunkHash;
use kvgate::tools::replay::{Trace, infinite};
use serde::Serialize;
use tokio::time::{Instant, sleep, sleep_until};

use super::bucket::{CHUNK_TOKENS, CHUNKS, traced};
use super::names::Names;
use super::rgw::lock;
use super::run::{DRAIN, Running, Took, in_simulated_time};
use super::scenario::{Fleet, PROMPTS, TTL};

/// In a block of the made-up trace.
const AGENT_TOKENS: u64 = 256;

/// The result.
#[derive(Serialize, PartialEq, Debug)]
pub struct Replay {
    pub gateways: usize,
    pub rgws: usize,
    /// How many times as fast as they came.
    pub speed: f64,
    pub took: Took,
    pub chunks_a_prompt: f64,
    /// Of a hundred chunks: those that were loaded, and those that came before in the trace.
    pub loaded_percent: f64,
    pub most_percent: f64,
    /// HEADs, GETs and PUTs, with those that were sent again.
    pub requests_a_prompt: [f64; 3],
    pub attempts_a_call: f64,
}

/// A file's, or else a made-up one, with blocks that are chunks of the fleet.
pub fn read(file: Option<&str>, block_tokens: Option<u64>) -> Trace {
    let text = if let Some(file) = file {
        std::fs::read(file).unwrap_or_else(|error| panic!("--trace {file}: {error}"))
    } else {
        let program = concat!(env!("CARGO_MANIFEST_DIR"), "/bench/agent_trace.py");
        let said = Command::new("python3").arg(program).output();
        let said = said.unwrap_or_else(|error| panic!("{program}: {error}; give --trace FILE"));
        said.stdout
    };
    let block_tokens = block_tokens.or(file.is_none().then_some(AGENT_TOKENS));
    let trace = Trace::parse(&String::from_utf8_lossy(&text), block_tokens);
    let mut trace = trace.unwrap_or_else(|error| panic!("--trace: {error}"));
    let blocks = usize::try_from(CHUNK_TOKENS / trace.block_tokens).map_or(1, |blocks| blocks.max(1));
    for prompt in &mut trace.prompts {
        // A block's id stands for all tokens up to its end.
        let ends = prompt.blocks.chunks_exact(blocks).map(|chunk| chunk[blocks - 1]);
        prompt.blocks = ends.collect();
    }
    trace
}

/// How many times as fast it must be for a fleet to move as many chunks as in the other scenarios.
pub fn busy(trace: &Trace, fleet: Fleet) -> f64 {
    let took = Duration::from_millis(last_ms(trace)).as_secs_f64();
    PROMPTS * CHUNKS * fleet.gateways as f64 * took / trace.blocks() as f64
}

fn last_ms(trace: &Trace) -> u64 {
    trace.prompts.last().map_or(0, |last| last.at_ms)
}

/// The same for the same seed.
pub fn replay(fleet: Fleet, trace: &Trace, speed: f64, seed: u64) -> Replay {
    in_simulated_time(seed, replay_now(fleet, trace, speed))
}

async fn replay_now(fleet: Fleet, trace: &Trace, speed: f64) -> Replay {
    let running = Running::start(fleet, 0, Names::new(TTL, None), false).await;
    let begin = Instant::now();
    for prompt in &trace.prompts {
        sleep_until(begin + Duration::from_millis(prompt.at_ms).div_f64(speed)).await;
        let node = Arc::clone(&running.nodes[fastrand::usize(..running.nodes.len())]);
        let chunks: Vec<ChunkHash> = prompt.blocks.iter().map(|&id| traced(id)).collect();
        tokio::spawn(async move { node.answer(&chunks).await });
    }
    sleep(Duration::from_secs_f64(DRAIN)).await;
    let end = running.began.elapsed().as_secs_f64();
    let (prompts, counts) = (lock(&running.prompts), &running.world.counts);
    let number = prompts.len() as f64;
    let hits = infinite(&trace.prompts);
    let loaded: usize = prompts.iter().map(|prompt| prompt.loaded).sum();
    let requests = [&counts.heads, &counts.gets, &counts.puts].map(|attempts| attempts.sum(0.0, end) as f64);
    Replay {
        gateways: fleet.gateways,
        rgws: fleet.rgws,
        speed,
        took: Took::of(&prompts.iter().collect::<Vec<_>>()),
        chunks_a_prompt: hits.asked as f64 / number,
        loaded_percent: 100.0 * loaded as f64 / hits.asked as f64,
        most_percent: hits.percent(),
        requests_a_prompt: requests.map(|attempts| attempts / number),
        attempts_a_call: counts.attempts(0.0, end) as f64 / counts.calls.sum(0.0, end) as f64,
    }
}
