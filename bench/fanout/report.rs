//! The table.

use std::fmt::Write as _;

use super::run::Row;
use super::scenario::{BEGIN, CONNECTION_BYTES_PER_SECOND, END, ENDPOINTS, LATENCY};

pub fn markdown(rows: &[Row]) -> String {
    let mut text = String::new();
    // Writing to a String can't fail.
    let _ = writeln!(
        text,
        "{ENDPOINTS} endpoints, {:.0} MB/s a connection, {} ms to the first byte. {:.0} s are measured, after {BEGIN:.0} s \
         to learn.",
        CONNECTION_BYTES_PER_SECOND / 1e6,
        LATENCY.as_millis(),
        END - BEGIN,
    );
    let mut workload = "";
    for row in rows {
        if row.workload != workload {
            workload = row.workload;
            let _ = writeln!(text, "\n## Loads of {workload}\n");
            text += "| scenario | client | GB/s | load p50 | p99 | share of those | hedges | retries | in vain | failed loads |\n";
            text += "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|\n";
        }
        let _ = writeln!(
            text,
            "| {} | {} | {:.2} | {} | {} | {:.1} % | {:.1} % | {} | {:.1} % | {} of {} |",
            row.scenario,
            row.client,
            row.gb_per_s,
            time(row.p50_ms),
            time(row.p99_ms),
            row.watched_share_percent,
            row.hedges_percent,
            row.retries,
            row.waste_percent,
            row.failed_loads,
            row.loads,
        );
    }
    text
}

fn time(ms: f64) -> String {
    match ms {
        1e3.. => format!("{:.2} s", ms / 1e3),
        _ => format!("{ms:.0} ms"),
    }
}
