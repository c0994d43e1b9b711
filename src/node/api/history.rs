//! The node's last hour, for the status page and `kvgate top`: a row of figures every ten seconds, in a ring.
//!
//! Nothing is counted for it: each row is what the counters of `/metrics` have grown by. It has the rates that a person
//! wants to see beside each other; for all else, and for longer, there is Prometheus.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use serde::Serialize;
use serde_json::{Map, Value, json};
use tokio::time::Instant;

use super::Api;
use super::body::{self, Reply};
use super::figures::{Figures, TIERS};
use crate::cache::gateway::Gateway;
use crate::metrics::Times;

/// Between two rows.
const STEP: Duration = Duration::from_secs(10);
/// Kinds of misses in a row are few; beyond that the oldest are forgotten.
const MISSES_MAX: usize = 200;

/// Names of a row's figures. Rates are per second, times are seconds.
const COLUMNS: [&str; 22] = [
    "loaded_bytes_memory",
    "loaded_bytes_disk",
    "loaded_bytes_peer",
    "loaded_bytes_s3",
    "stored_chunks",
    "s3_bytes",
    "found_memory",
    "found_disk",
    "found_peer",
    "found_s3",
    "asked",
    "missed",
    "lookup_p50",
    "lookup_p99",
    "load_p50",
    "load_p99",
    "get_p50",
    "get_p99",
    "memory_bytes",
    "disk_bytes",
    "arena_bytes",
    "waiting_bytes",
];

/// See the [module](self).
#[derive(Debug)]
pub struct History {
    rows_max: usize,
    rows: Mutex<HistoryRows>,
}

#[derive(Debug, Default)]
struct HistoryRows {
    rows: VecDeque<HistoryRow>,
    misses: VecDeque<MissedChunks>,
    before: Option<(Instant, HistoryTotals)>,
}

#[derive(Debug, Clone)]
struct HistoryRow {
    at_ms: u64,
    /// None: nothing happened that has such a figure.
    values: [Option<f32>; COLUMNS.len()],
}

/// Chunks of a row that a load did not bring, for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct MissedChunks {
    at_ms: u64,
    reason: &'static str,
    chunks: u64,
}

/// Counters at one time.
#[derive(Debug, Clone, Default)]
struct HistoryTotals {
    loaded_bytes: [u64; TIERS.len()],
    found: [u64; TIERS.len()],
    asked: u64,
    stored: u64,
    s3_bytes: u64,
    misses: Vec<(&'static str, u64)>,
    lookup: Times,
    load: Times,
    get: Times,
}

/// Figures that go up and down.
#[derive(Debug, Clone, Copy, Default)]
struct HistoryLevels {
    memory: u64,
    disk: u64,
    arena: u64,
    waiting: u64,
}

impl History {
    /// Of so much time.
    pub fn new(time: Duration) -> Self {
        let rows = time.as_secs() / STEP.as_secs();
        Self {
            rows_max: usize::try_from(rows).unwrap_or(usize::MAX).max(1),
            rows: Mutex::default(),
        }
    }

    fn add(&self, now: Instant, at_ms: u64, totals: HistoryTotals, levels: HistoryLevels) {
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((then, before)) = rows.before.take() {
            let seconds = (now - then).as_secs_f64().max(0.001);
            let missed = totals.missed_since(&before);
            let sum = missed.iter().map(|(_, chunks)| chunks).sum();
            rows.rows.push_back(HistoryRow {
                at_ms,
                values: values(&totals, &before, levels, seconds, sum),
            });
            let of_reason = |(reason, chunks)| MissedChunks {
                at_ms,
                reason,
                chunks,
            };
            rows.misses.extend(missed.into_iter().map(of_reason));
        }
        rows.before = Some((now, totals));
        while rows.rows.len() > self.rows_max {
            rows.rows.pop_front();
        }
        let oldest = rows.rows.front().map_or(0, |row| row.at_ms);
        while rows.misses.len() > MISSES_MAX || rows.misses.front().is_some_and(|miss| miss.at_ms < oldest) {
            rows.misses.pop_front();
        }
    }

    fn json(&self) -> Value {
        let rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let column = |at: usize| rows.rows.iter().map(|row| row.values[at]).collect::<Vec<_>>();
        let columns: Map<String, Value> = COLUMNS
            .iter()
            .enumerate()
            .map(|(at, name)| ((*name).to_owned(), json!(column(at))))
            .collect();
        json!({
            "step_seconds": STEP.as_secs(),
            "at_ms": rows.rows.iter().map(|row| row.at_ms).collect::<Vec<_>>(),
            "columns": columns,
            "misses": rows.misses,
        })
    }
}

impl HistoryTotals {
    fn read(figures: &Figures, gateway: &Gateway) -> Self {
        let of = |counts: &crate::metrics::Counts, word: &str| {
            counts
                .read()
                .filter(|(name, _)| *name == word)
                .map(|(_, count)| count)
                .sum::<u64>()
        };
        let tiers = |counts| TIERS.map(|tier| of(counts, tier));
        let times = gateway.request_times();
        let get = times
            .iter()
            .find(|(kind, _)| *kind == "get")
            .map(|(_, times)| *times);
        Self {
            loaded_bytes: tiers(&figures.loaded_bytes),
            found: tiers(&figures.lookup_chunks),
            asked: figures.lookup_chunks.read().map(|(_, count)| count).sum(),
            stored: of(&figures.committed_chunks, "published"),
            s3_bytes: gateway.s3_totals().bytes,
            misses: figures.missed_chunks.read().collect(),
            lookup: figures.lookup.read(),
            load: figures.load.read(),
            get: get.unwrap_or_default(),
        }
    }

    fn missed_since(&self, before: &Self) -> Vec<(&'static str, u64)> {
        let grown = self.misses.iter().zip(&before.misses);
        let grown = grown.map(|((reason, now), (_, before))| (*reason, now.saturating_sub(*before)));
        grown.filter(|(_, chunks)| *chunks > 0).collect()
    }
}

#[expect(clippy::cast_possible_truncation, reason = "for a picture")]
fn values(
    now: &HistoryTotals,
    before: &HistoryTotals,
    levels: HistoryLevels,
    seconds: f64,
    missed: u64,
) -> [Option<f32>; COLUMNS.len()] {
    // An address that left takes its bytes along.
    let rate = |now: u64, before: u64| Some(now.saturating_sub(before) as f64 / seconds);
    let of_tier =
        |now: &[u64; TIERS.len()], before: &[u64; TIERS.len()], tier: usize| rate(now[tier], before[tier]);
    let quantile = |now: &Times, before: &Times, share| now.since(before).quantile(share);
    let level = |bytes: u64| Some(bytes as f64);
    [
        of_tier(&now.loaded_bytes, &before.loaded_bytes, 0),
        of_tier(&now.loaded_bytes, &before.loaded_bytes, 1),
        of_tier(&now.loaded_bytes, &before.loaded_bytes, 2),
        of_tier(&now.loaded_bytes, &before.loaded_bytes, 3),
        rate(now.stored, before.stored),
        rate(now.s3_bytes, before.s3_bytes),
        of_tier(&now.found, &before.found, 0),
        of_tier(&now.found, &before.found, 1),
        of_tier(&now.found, &before.found, 2),
        of_tier(&now.found, &before.found, 3),
        rate(now.asked, before.asked),
        rate(missed, 0),
        quantile(&now.lookup, &before.lookup, 0.5),
        quantile(&now.lookup, &before.lookup, 0.99),
        quantile(&now.load, &before.load, 0.5),
        quantile(&now.load, &before.load, 0.99),
        quantile(&now.get, &before.get, 0.5),
        quantile(&now.get, &before.get, 0.99),
        level(levels.memory),
        level(levels.disk),
        level(levels.arena),
        level(levels.waiting),
    ]
    .map(|value| value.map(|value| value as f32))
}

/// Adds rows for as long as the API lives.
pub async fn run(api: Arc<Api>) {
    let api = Arc::downgrade(&api);
    let mut ticks = tokio::time::interval(STEP);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let Some(api) = api.upgrade() else { return };
        let gateway = api.node.gateway();
        let tiers = gateway.tier_stats();
        let levels = HistoryLevels {
            memory: tiers.memory.bytes,
            disk: tiers
                .disk
                .map_or(0, |disk| disk.disks.iter().map(|disk| disk.bytes).sum()),
            arena: gateway.arena().stats().used_bytes as u64,
            waiting: tiers.write_behind.waiting_bytes,
        };
        let at = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let at_ms = u64::try_from(at.as_millis()).unwrap_or(u64::MAX);
        api.history.add(
            Instant::now(),
            at_ms,
            HistoryTotals::read(&api.figures, gateway),
            levels,
        );
    }
}

/// `GET /v1/history`.
pub fn history(api: &Api) -> Reply {
    body::json(&api.history.json())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals(loaded: u64, misses: u64) -> HistoryTotals {
        HistoryTotals {
            loaded_bytes: [loaded, 0, 40 * misses, 0],
            misses: vec![("absent", misses), ("bad_digest", 0)],
            ..HistoryTotals::default()
        }
    }

    fn levels(memory: u64) -> HistoryLevels {
        HistoryLevels {
            memory,
            ..HistoryLevels::default()
        }
    }

    #[test]
    fn a_row_has_what_the_counters_grew_by() {
        let (history, start) = (History::new(Duration::from_mins(1)), Instant::now());
        history.add(start, 1000, totals(5000, 1), levels(7));
        assert_eq!(history.json()["at_ms"], json!([]), "one reading says nothing");
        history.add(start + STEP, 11_000, totals(6000, 4), levels(8));
        let shown = history.json();
        assert_eq!(shown["at_ms"], json!([11_000]));
        assert_eq!(shown["columns"]["loaded_bytes_memory"], json!([100.0]));
        assert_eq!(shown["columns"]["loaded_bytes_peer"], json!([12.0]));
        assert_eq!(shown["columns"]["loaded_bytes_s3"], json!([0.0]));
        assert_eq!(shown["columns"]["memory_bytes"], json!([8.0]));
        assert_eq!(shown["columns"]["lookup_p99"], json!([null]));
        assert_eq!(
            shown["misses"],
            json!([{"at_ms": 11_000, "reason": "absent", "chunks": 3}])
        );
        // After a pause, such as a suspended machine's, it is a rate all the same.
        history.add(start + 11 * STEP, 111_000, totals(16_000, 4), levels(8));
        assert_eq!(
            history.json()["columns"]["loaded_bytes_memory"],
            json!([100.0, 100.0])
        );
    }

    #[test]
    fn the_oldest_rows_and_misses_go() {
        let (history, start) = (History::new(Duration::from_mins(1)), Instant::now());
        for row in 0..20 {
            let at = start + STEP * row;
            history.add(at, u64::from(row), totals(0, row.into()), levels(0));
        }
        let shown = history.json();
        assert_eq!(shown["at_ms"], json!([14, 15, 16, 17, 18, 19]));
        assert_eq!(shown["misses"].as_array().unwrap().len(), 6);
        for name in COLUMNS {
            assert_eq!(shown["columns"][name].as_array().unwrap().len(), 6, "{name}");
        }
    }
}
