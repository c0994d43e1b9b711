//! For spreadsheets: a line a phase; and where the server has several addresses, one for each of them below it, which has
//! the same columns as far as they make sense for an address.

use std::fs::{File, OpenOptions};
use std::io::Write;

use super::endpoints::breaker;
use crate::bench::{Endpoint, Latency, Mark, PhaseReport, Settings};
use crate::cli::error::CliError;
use crate::cli::output::Out;

/// What lines of addresses have in common with their phase's.
const SHARED: [&str; 11] = [
    "phase",
    "endpoint",
    "bucket",
    "prefix",
    "embedded",
    "object_bytes",
    "part_bytes",
    "concurrency",
    "verify",
    "mix_percent",
    "last_done_seconds",
];

/// Where lines are added; the header is written with the first.
pub struct Csv {
    /// None: the standard output.
    file: Option<(File, String)>,
    header: bool,
}

impl Csv {
    /// A file is made if it is not there, and added to if it is.
    pub fn open(name: &str) -> Result<Self, CliError> {
        if name == "-" {
            return Ok(Self {
                file: None,
                header: true,
            });
        }
        let error = |error| CliError::usage(format!("can't write --csv {name}: {error}"));
        let file = OpenOptions::new()
            .create(true)
            .append(true)
            .open(name)
            .map_err(error)?;
        let empty = file.metadata().map_err(error)?.len() == 0;
        Ok(Self {
            file: Some((file, name.to_owned())),
            header: empty,
        })
    }

    pub fn is_stdout(&self) -> bool {
        self.file.is_none()
    }

    pub fn add(&mut self, settings: &Settings, phase: &PhaseReport, out: &mut Out) -> Result<(), CliError> {
        let columns = columns(settings, phase);
        let line = |columns: &[Column]| columns.iter().map(|(_, value)| cell(value)).collect();
        let names = || columns.iter().map(|(name, _)| cell(name)).collect();
        let mut lines: Vec<Vec<String>> = std::mem::take(&mut self.header).then(names).into_iter().collect();
        lines.push(line(&columns));
        if phase.endpoints.len() > 1 {
            let endpoint = |one| line(&endpoint_columns(&columns, phase, one));
            lines.extend(phase.endpoints.iter().map(endpoint));
        }
        for line in lines.into_iter().map(|cells| cells.join(",")) {
            match &mut self.file {
                None => out.line(line)?,
                Some((file, name)) => writeln!(file, "{line}")
                    .map_err(|error| CliError::Failed(format!("can't write --csv {name}: {error}")))?,
            }
        }
        out.flush()
    }
}

/// Quoted where it must be.
fn cell(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

/// A name and a value.
type Column = (&'static str, String);

fn number(number: f64) -> String {
    format!("{number:.6}")
}

fn columns(settings: &Settings, phase: &PhaseReport) -> Vec<Column> {
    let maybe = |some: Option<f64>| some.map(number).unwrap_or_default();
    let latency = |of: fn(&Latency) -> f64| maybe(phase.latency_us.as_ref().map(of));
    let mark = |of: fn(&PhaseReport) -> Mark| of(phase);
    let (first, last) = (mark(|phase| phase.first_done), mark(|phase| phase.last_done));
    vec![
        ("phase", phase.phase.name().into()),
        (
            "endpoint",
            settings.endpoint.clone().unwrap_or_else(|| "AWS".into()),
        ),
        ("bucket", settings.bucket.clone()),
        ("prefix", settings.prefix.clone()),
        ("embedded", settings.embedded.to_string()),
        ("objects", phase.objects.to_string()),
        ("object_bytes", settings.object_bytes.to_string()),
        ("part_bytes", settings.part_bytes.to_string()),
        ("concurrency", settings.concurrency.to_string()),
        ("verify", settings.verify.to_string()),
        ("mix_percent", settings.mix_percent.to_string()),
        ("ops", phase.ops.to_string()),
        ("bytes", phase.bytes.to_string()),
        ("first_done_seconds", number(first.seconds)),
        ("first_done_ops", first.ops.to_string()),
        ("first_done_bytes", first.bytes.to_string()),
        ("first_done_iops", number(first.iops)),
        ("first_done_mib_per_s", number(first.mib_per_s)),
        ("last_done_seconds", number(last.seconds)),
        ("last_done_iops", number(last.iops)),
        ("last_done_mib_per_s", number(last.mib_per_s)),
        ("cpu_seconds", number(phase.cpu_seconds)),
        ("cpu_seconds_per_gib", maybe(phase.cpu_seconds_per_gib)),
        ("cpu_us_per_op", maybe(phase.cpu_us_per_op)),
        ("minor_faults", phase.minor_faults.to_string()),
        ("minor_faults_per_gib", maybe(phase.minor_faults_per_gib)),
        ("latency_min_us", latency(|all| all.min)),
        ("latency_mean_us", latency(|all| all.mean)),
        ("latency_p50_us", latency(|all| all.p50)),
        ("latency_p90_us", latency(|all| all.p90)),
        ("latency_p99_us", latency(|all| all.p99)),
        ("latency_p999_us", latency(|all| all.p999)),
        ("latency_max_us", latency(|all| all.max)),
        ("requests", phase.requests.total().to_string()),
        ("retries", phase.retries.to_string()),
        ("hedges", phase.hedges.to_string()),
        ("errors", phase.errors.count.to_string()),
        ("first_error", phase.errors.first.clone().unwrap_or_default()),
        ("interrupted", phase.interrupted.to_string()),
        ("addresses", phase.endpoints.len().to_string()),
        // Only where the line is of one address:
        ("address", String::new()),
        ("share_percent", String::new()),
        ("ok", String::new()),
        ("refused", String::new()),
        ("throttled", String::new()),
        ("failed", String::new()),
        ("lost", String::new()),
        ("timed_out", String::new()),
        ("given_up", String::new()),
        ("first_byte_us", String::new()),
        ("window_bytes", String::new()),
        ("breaker", String::new()),
    ]
}

/// The phase's columns with the figures of one address, empty where it has none.
fn endpoint_columns(columns: &[Column], phase: &PhaseReport, endpoint: &Endpoint) -> Vec<Column> {
    let (state, totals) = (&endpoint.state, &endpoint.state.totals);
    let of_address = |name: &str| {
        Some(match name {
            "bytes" => totals.bytes.to_string(),
            "last_done_mib_per_s" => number(endpoint.mib_per_s),
            "last_done_iops" => number(endpoint.requests as f64 / phase.seconds),
            "requests" => endpoint.requests.to_string(),
            "retries" => totals.retries.to_string(),
            "hedges" => totals.hedges.to_string(),
            "address" => state.address.to_string(),
            "share_percent" => number(endpoint.share_percent),
            "ok" => totals.ok.to_string(),
            "refused" => totals.refused.to_string(),
            "throttled" => totals.throttled.to_string(),
            "failed" => totals.failed.to_string(),
            "lost" => totals.lost.to_string(),
            "timed_out" => totals.timed_out.to_string(),
            "given_up" => totals.given_up.to_string(),
            "first_byte_us" => state.latency_us?.to_string(),
            "window_bytes" => state.window_bytes.to_string(),
            "breaker" => breaker(state.breaker).to_owned(),
            _ => return None,
        })
    };
    let value = |(name, of_phase): &Column| {
        let shared = SHARED.contains(name).then(|| of_phase.clone());
        (*name, of_address(name).or(shared).unwrap_or_default())
    };
    columns.iter().map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_quoted_where_they_must_be() {
        let cells = ["plain", "a,b", "say \"x\"", "two\nlines"].map(cell);
        assert_eq!(cells, ["plain", "\"a,b\"", "\"say \"\"x\"\"\"", "\"two\nlines\""]);
    }
}
