//! A table of each address's traffic, below a phase's line.

use crate::s3::fanout::{BreakerPhase, Requests};
use crate::tools::bench::{BenchPhase, Endpoint, PhaseReport};
use crate::tools::cli::error::CliError;
use crate::tools::cli::output::{Out, bytes};

use super::table::figure;

const HEADINGS: [&str; 10] = [
    "  address",
    ">share",
    ">MiB/s",
    ">first byte",
    ">window",
    "breaker",
    ">requests",
    ">retries",
    ">hedges",
    "not ok",
];

/// Writes the table. With one address the phase's line has the figures already.
pub fn table(phase: &PhaseReport, out: &mut Out) -> Result<(), CliError> {
    if phase.endpoints.len() < 2 {
        return Ok(());
    }
    // A lookup's 404 may be the expected answer; unexpected ones are the phase's errors.
    let refusals = phase.phase != BenchPhase::Lookup;
    let rows: Vec<Vec<String>> = phase.endpoints.iter().map(|one| row(one, refusals)).collect();
    out.table(&HEADINGS, &rows)
}

fn row(endpoint: &Endpoint, refusals: bool) -> Vec<String> {
    let (state, totals) = (&endpoint.state, &endpoint.state.totals);
    vec![
        format!("  {}", state.address),
        format!("{:.1} %", endpoint.share_percent),
        figure(endpoint.mib_per_s),
        state
            .latency_us
            .map_or_else(|| "-".to_owned(), |us| format!("{} ms", figure(us as f64 / 1e3))),
        bytes(state.window_bytes as u64),
        breaker(state.breaker).to_owned(),
        endpoint.requests.to_string(),
        totals.retries.to_string(),
        totals.hedges.to_string(),
        failed(totals, refusals),
    ]
}

/// The stable word of a state.
pub fn breaker(phase: BreakerPhase) -> &'static str {
    match phase {
        BreakerPhase::Closed => "closed",
        BreakerPhase::Open => "open",
        BreakerPhase::HalfOpen => "half-open",
    }
}

/// The requests that failed, by kind.
fn failed(totals: &Requests, refusals: bool) -> String {
    let kinds = [
        (
            if refusals {
                totals.refused + totals.denied
            } else {
                0
            },
            "refused",
        ),
        (totals.throttled, "throttled"),
        (totals.failed, "failed"),
        (totals.lost, "lost"),
        (totals.timed_out, "timed out"),
        (totals.given_up, "given up"),
    ];
    let some = kinds.iter().filter(|(count, _)| *count > 0);
    let some: Vec<String> = some.map(|(count, kind)| format!("{count} {kind}")).collect();
    match some.is_empty() {
        true => "-".to_owned(),
        false => some.join(", "),
    }
}
