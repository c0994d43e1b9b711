//! For spreadsheets: a line a phase.

use std::fs::{File, OpenOptions};
use std::io::Write;

use crate::bench::{Latency, Mark, PhaseReport, Settings};
use crate::cli::error::CliError;
use crate::cli::output::Out;

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
        let (names, values): (Vec<String>, Vec<String>) = columns
            .iter()
            .map(|(name, value)| (cell(name), cell(value)))
            .unzip();
        let header = std::mem::take(&mut self.header).then_some(names);
        for line in header.into_iter().chain([values]).map(|cells| cells.join(",")) {
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

fn columns(settings: &Settings, phase: &PhaseReport) -> Vec<(&'static str, String)> {
    let number = |number: f64| format!("{number:.6}");
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
        (
            "retries",
            phase.retries.map(|count| count.to_string()).unwrap_or_default(),
        ),
        ("errors", phase.errors.count.to_string()),
        ("first_error", phase.errors.first.clone().unwrap_or_default()),
        ("interrupted", phase.interrupted.to_string()),
    ]
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
