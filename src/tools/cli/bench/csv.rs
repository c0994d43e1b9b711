//! CSV output: a line for each phase; and where the server has several addresses, one for each of them below it,
//! with the same columns as far as they make sense for an address.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};

use super::endpoints::breaker;
use crate::tools::bench::{BenchSettings, Endpoint, Latency, PhaseReport};
use crate::tools::cli::error::CliError;
use crate::tools::cli::output::Out;

/// The columns that an address's line shares with its phase's.
const SHARED: [&str; 22] = [
    "phase",
    "began",
    "version",
    "endpoint",
    "bucket",
    "prefix",
    "name",
    "embedded",
    "object_bytes",
    "part_bytes",
    "concurrency",
    "verify",
    "mix_percent",
    "warm_up",
    "rounds",
    "time_limit_seconds",
    "bytes_per_second",
    "requests_per_second",
    "model",
    "tokens",
    "order",
    "last_done_seconds",
];

/// The value of a column in a phase's line.
type Value = fn(&BenchSettings, &PhaseReport) -> String;

const COLUMNS: [(&str, Value); 83] = [
    ("phase", |_, phase| phase.phase.name().into()),
    ("began", |_, phase| number(phase.began)),
    ("version", |_, _| env!("CARGO_PKG_VERSION").into()),
    ("endpoint", |settings, _| {
        settings.endpoint.clone().unwrap_or_else(|| "AWS".into())
    }),
    ("bucket", |settings, _| settings.bucket.clone()),
    ("prefix", |settings, _| settings.prefix.clone()),
    ("name", |settings, _| settings.name.clone()),
    ("embedded", |settings, _| settings.embedded.to_string()),
    ("objects", |_, phase| phase.objects.to_string()),
    ("object_bytes", |settings, _| settings.object_bytes.to_string()),
    ("part_bytes", |settings, _| settings.part_bytes.to_string()),
    ("concurrency", |settings, _| settings.concurrency.to_string()),
    ("verify", |settings, _| settings.verify.to_string()),
    ("mix_percent", |settings, _| settings.mix_percent.to_string()),
    ("warm_up", |settings, _| settings.warm_up.to_string()),
    ("rounds", |settings, _| {
        of(settings.rounds.as_ref(), |rounds| Some(rounds.to_string()))
    }),
    ("time_limit_seconds", |settings, _| {
        maybe(settings.time_limit.map(|time| time.as_secs_f64()))
    }),
    ("bytes_per_second", |settings, _| {
        of(settings.bytes_per_second.as_ref(), |rate| Some(rate.to_string()))
    }),
    ("requests_per_second", |settings, _| {
        of(settings.requests_per_second.as_ref(), |rate| {
            Some(rate.to_string())
        })
    }),
    ("model", |settings, _| {
        of(settings.prompt.as_ref(), |prompt| Some(prompt.model.clone()))
    }),
    ("tokens", |settings, _| {
        of(settings.prompt.as_ref(), |prompt| Some(prompt.tokens.to_string()))
    }),
    ("order", |settings, _| {
        of(settings.prompt.as_ref(), |prompt| {
            Some(prompt.order.word().into())
        })
    }),
    ("ops", |_, phase| phase.ops.to_string()),
    ("bytes", |_, phase| phase.bytes.to_string()),
    ("first_done_seconds", |_, phase| number(phase.first_done.seconds)),
    ("first_done_ops", |_, phase| phase.first_done.ops.to_string()),
    ("first_done_bytes", |_, phase| phase.first_done.bytes.to_string()),
    ("first_done_iops", |_, phase| number(phase.first_done.iops)),
    ("first_done_mib_per_s", |_, phase| {
        number(phase.first_done.mib_per_s)
    }),
    ("last_done_seconds", |_, phase| number(phase.last_done.seconds)),
    ("last_done_iops", |_, phase| number(phase.last_done.iops)),
    ("last_done_mib_per_s", |_, phase| {
        number(phase.last_done.mib_per_s)
    }),
    ("cpu_seconds", |_, phase| number(phase.cpu_seconds)),
    ("cpu_seconds_per_gib", |_, phase| maybe(phase.cpu_seconds_per_gib)),
    ("cpu_us_per_op", |_, phase| maybe(phase.cpu_us_per_op)),
    ("minor_faults", |_, phase| phase.minor_faults.to_string()),
    ("minor_faults_per_gib", |_, phase| {
        maybe(phase.minor_faults_per_gib)
    }),
    ("latency_min_us", |_, phase| latency(phase, |all| all.min)),
    ("latency_mean_us", |_, phase| latency(phase, |all| all.mean)),
    ("latency_p50_us", |_, phase| latency(phase, |all| all.p50)),
    ("latency_p90_us", |_, phase| latency(phase, |all| all.p90)),
    ("latency_p99_us", |_, phase| latency(phase, |all| all.p99)),
    ("latency_p999_us", |_, phase| latency(phase, |all| all.p999)),
    ("latency_max_us", |_, phase| latency(phase, |all| all.max)),
    ("requests", |_, phase| phase.requests.total().to_string()),
    ("retries", |_, phase| phase.retries.to_string()),
    ("hedges", |_, phase| phase.hedges.to_string()),
    ("errors", |_, phase| phase.errors.count.to_string()),
    ("first_error", |_, phase| {
        phase.errors.first.clone().unwrap_or_default()
    }),
    ("interrupted", |_, phase| phase.interrupted.to_string()),
    // Only of a write with --mix:
    ("mixed_writes_ops", |_, phase| {
        of(phase.mix.as_ref(), |mix| Some(mix.writes.ops.to_string()))
    }),
    ("mixed_writes_mib_per_s", |_, phase| {
        of(phase.mix.as_ref(), |mix| Some(number(mix.writes.mib_per_s)))
    }),
    ("mixed_writes_p50_us", |_, phase| {
        of(phase.mix.as_ref(), |mix| Some(number(mix.writes.latency_us?.p50)))
    }),
    ("mixed_writes_p99_us", |_, phase| {
        of(phase.mix.as_ref(), |mix| Some(number(mix.writes.latency_us?.p99)))
    }),
    ("mixed_reads_ops", |_, phase| {
        of(phase.mix.as_ref(), |mix| Some(mix.reads.ops.to_string()))
    }),
    ("mixed_reads_mib_per_s", |_, phase| {
        of(phase.mix.as_ref(), |mix| Some(number(mix.reads.mib_per_s)))
    }),
    ("mixed_reads_p50_us", |_, phase| {
        of(phase.mix.as_ref(), |mix| Some(number(mix.reads.latency_us?.p50)))
    }),
    ("mixed_reads_p99_us", |_, phase| {
        of(phase.mix.as_ref(), |mix| Some(number(mix.reads.latency_us?.p99)))
    }),
    // Only of prompts:
    ("present", |_, phase| phase.present.to_string()),
    ("prompts", |_, phase| {
        of(phase.prompt.as_ref(), |report| Some(report.prompts.to_string()))
    }),
    ("prompt_chunks", |_, phase| {
        of(phase.prompt.as_ref(), |report| Some(report.chunks.to_string()))
    }),
    ("prompt_gib_per_s", |_, phase| {
        of(phase.prompt.as_ref(), |report| report.gib_per_s.map(number))
    }),
    ("prompt_lookup_p50_us", |_, phase| {
        of(phase.prompt.as_ref(), |report| {
            Some(number(report.lookup_us?.p50))
        })
    }),
    ("prompt_lookup_p99_us", |_, phase| {
        of(phase.prompt.as_ref(), |report| {
            Some(number(report.lookup_us?.p99))
        })
    }),
    ("prompt_first_chunk_p50_us", |_, phase| {
        of(phase.prompt.as_ref(), |report| {
            Some(number(report.first_chunk_us?.p50))
        })
    }),
    ("prompt_first_chunk_p99_us", |_, phase| {
        of(phase.prompt.as_ref(), |report| {
            Some(number(report.first_chunk_us?.p99))
        })
    }),
    ("prompt_first_layer_p50_us", |_, phase| {
        of(phase.prompt.as_ref(), |report| {
            Some(number(report.first_layer_us?.p50))
        })
    }),
    ("prompt_first_layer_p99_us", |_, phase| {
        of(phase.prompt.as_ref(), |report| {
            Some(number(report.first_layer_us?.p99))
        })
    }),
    ("prompt_last_chunk_p50_us", |_, phase| {
        of(phase.prompt.as_ref(), |report| {
            Some(number(report.last_chunk_us?.p50))
        })
    }),
    ("prompt_last_chunk_p99_us", |_, phase| {
        of(phase.prompt.as_ref(), |report| {
            Some(number(report.last_chunk_us?.p99))
        })
    }),
    ("addresses", |_, phase| phase.endpoints.len().to_string()),
    // Only where the line is of one address:
    ("address", |_, _| String::new()),
    ("share_percent", |_, _| String::new()),
    ("ok", |_, _| String::new()),
    ("refused", |_, _| String::new()),
    ("throttled", |_, _| String::new()),
    ("failed", |_, _| String::new()),
    ("lost", |_, _| String::new()),
    ("timed_out", |_, _| String::new()),
    ("given_up", |_, _| String::new()),
    ("first_byte_us", |_, _| String::new()),
    ("window_bytes", |_, _| String::new()),
    ("breaker", |_, _| String::new()),
];

/// The destination of lines; the header is written with the first.
pub struct Csv {
    /// The file and its name; None: the standard output.
    file: Option<(File, String)>,
    header: bool,
}

impl Csv {
    /// Opens a file: makes a missing one, and appends to one with the same columns.
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
        if !empty && first_line(name).map_err(error)? != header() {
            return Err(CliError::usage(format!(
                "--csv {name}: its first line does not name this version's columns; give it a new file"
            )));
        }
        if !empty && !is_ended(name).map_err(error)? {
            return Err(CliError::usage(format!(
                "--csv {name}: its last line has no end, so it may be cut off: end it or remove it, or give it a new file"
            )));
        }
        Ok(Self {
            file: Some((file, name.to_owned())),
            header: empty,
        })
    }

    pub fn is_stdout(&self) -> bool {
        self.file.is_none()
    }

    pub fn add(
        &mut self,
        settings: &BenchSettings,
        phase: &PhaseReport,
        out: &mut Out,
    ) -> Result<(), CliError> {
        let mut lines: Vec<String> = std::mem::take(&mut self.header)
            .then(header)
            .into_iter()
            .collect();
        lines.push(line(|_, of_phase| of_phase(settings, phase)));
        if phase.endpoints.len() > 1 {
            let of_address = |endpoint| {
                line(|name, of_phase| match of_address(name, phase, endpoint) {
                    None if SHARED.contains(&name) => of_phase(settings, phase),
                    value => value.unwrap_or_default(),
                })
            };
            lines.extend(phase.endpoints.iter().map(of_address));
        }
        match &mut self.file {
            None => lines.iter().try_for_each(|line| out.line(line))?,
            Some((file, name)) => append(file, &(lines.join("\n") + "\n"))
                .map_err(|error| CliError::Failed(format!("can't write --csv {name}: {error}")))?,
        }
        out.flush()
    }
}

fn header() -> String {
    COLUMNS.map(|(name, _)| name).join(",")
}

fn line(value: impl Fn(&'static str, Value) -> String) -> String {
    COLUMNS
        .map(|(name, of_phase)| cell(&value(name, of_phase)))
        .join(",")
}

fn first_line(name: &str) -> io::Result<String> {
    // A longer first line is another header.
    let most = header().len() as u64 + 2;
    let mut bytes = Vec::new();
    BufReader::new(File::open(name)?.take(most)).read_until(b'\n', &mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
}

/// Appends all of it, or nothing where possible.
fn append(file: &mut File, lines: &str) -> io::Result<()> {
    let before = file.metadata()?.len();
    file.write_all(lines.as_bytes()).inspect_err(|_| {
        // A device can't be truncated.
        let _ = file.set_len(before);
    })
}

fn is_ended(name: &str) -> io::Result<bool> {
    let mut file = File::open(name)?;
    // Not empty; what is no file of lines can't be looked at.
    if file.seek(SeekFrom::End(-1)).is_err() {
        return Ok(true);
    }
    let mut last = [0];
    file.read_exact(&mut last)?;
    Ok(last == *b"\n")
}

/// A cell, quoted where necessary.
fn cell(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

fn number(number: f64) -> String {
    format!("{number:.6}")
}

fn maybe(some: Option<f64>) -> String {
    some.map(number).unwrap_or_default()
}

fn latency(phase: &PhaseReport, of: fn(&Latency) -> f64) -> String {
    maybe(phase.latency_us.as_ref().map(of))
}

/// The value, empty where there is none.
fn of<T>(some: Option<&T>, value: fn(&T) -> Option<String>) -> String {
    some.and_then(value).unwrap_or_default()
}

/// A column's value for one address; None where an address has no such figure.
fn of_address(name: &str, phase: &PhaseReport, endpoint: &Endpoint) -> Option<String> {
    let (state, totals) = (&endpoint.state, &endpoint.state.totals);
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
