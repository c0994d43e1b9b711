//! For spreadsheets: a line a phase; and where the server has several addresses, one for each of them below it, which has
//! the same columns as far as they make sense for an address.

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader, Read, Seek, SeekFrom, Write};
use std::net::SocketAddr;

use csv::WriterBuilder;
use serde::Serialize;

use super::endpoints::breaker;
use crate::protocol::Order;
use crate::tools::bench::{BenchSettings, Endpoint, Latency, PhaseReport};
use crate::tools::cli::error::CliError;
use crate::tools::cli::output::Out;

/// The columns, in order.
#[derive(Debug, Clone, Copy, Default, Serialize)]
struct Row<'a> {
    phase: &'a str,
    began: f64,
    version: &'a str,
    endpoint: &'a str,
    bucket: &'a str,
    prefix: &'a str,
    name: &'a str,
    embedded: bool,
    objects: Option<u64>,
    object_bytes: u64,
    part_bytes: u64,
    concurrency: usize,
    verify: bool,
    warm_up: bool,
    rounds: Option<u64>,
    time_limit_seconds: Option<f64>,
    bytes_per_second: Option<u64>,
    requests_per_second: Option<u64>,
    model: Option<&'a str>,
    tokens: Option<u32>,
    order: Option<&'a str>,
    ops: Option<u64>,
    bytes: u64,
    first_done_seconds: Option<f64>,
    first_done_ops: Option<u64>,
    first_done_bytes: Option<u64>,
    first_done_iops: Option<f64>,
    first_done_mib_per_s: Option<f64>,
    last_done_seconds: f64,
    last_done_iops: f64,
    last_done_mib_per_s: f64,
    cpu_seconds: Option<f64>,
    cpu_seconds_per_gib: Option<f64>,
    cpu_us_per_op: Option<f64>,
    minor_faults: Option<u64>,
    minor_faults_per_gib: Option<f64>,
    latency_min_us: Option<f64>,
    latency_mean_us: Option<f64>,
    latency_p50_us: Option<f64>,
    latency_p90_us: Option<f64>,
    latency_p99_us: Option<f64>,
    latency_p999_us: Option<f64>,
    latency_max_us: Option<f64>,
    requests: u64,
    retries: u64,
    hedges: u64,
    errors: Option<u64>,
    first_error: Option<&'a str>,
    interrupted: Option<bool>,
    present: Option<u64>,
    prompts: Option<u64>,
    prompt_chunks: Option<u64>,
    prompt_gib_per_s: Option<f64>,
    prompt_lookup_p50_us: Option<f64>,
    prompt_lookup_p99_us: Option<f64>,
    prompt_first_chunk_p50_us: Option<f64>,
    prompt_first_chunk_p99_us: Option<f64>,
    prompt_first_layer_p50_us: Option<f64>,
    prompt_first_layer_p99_us: Option<f64>,
    prompt_last_chunk_p50_us: Option<f64>,
    prompt_last_chunk_p99_us: Option<f64>,
    addresses: Option<usize>,
    address: Option<SocketAddr>,
    share_percent: Option<f64>,
    ok: Option<u64>,
    refused: Option<u64>,
    throttled: Option<u64>,
    failed: Option<u64>,
    lost: Option<u64>,
    timed_out: Option<u64>,
    given_up: Option<u64>,
    first_byte_us: Option<u64>,
    window_bytes: Option<usize>,
    breaker: Option<&'a str>,
}

impl<'a> Row<'a> {
    fn of_settings(settings: &'a BenchSettings) -> Self {
        let prompt = settings.prompt.as_ref();
        Self {
            version: env!("CARGO_PKG_VERSION"),
            endpoint: settings.endpoint.as_deref().unwrap_or("AWS"),
            bucket: &settings.bucket,
            prefix: &settings.prefix,
            name: &settings.name,
            embedded: settings.embedded,
            object_bytes: settings.object_bytes,
            part_bytes: settings.part_bytes,
            concurrency: settings.concurrency,
            verify: settings.verify,
            warm_up: settings.warm_up,
            rounds: settings.rounds,
            time_limit_seconds: settings.time_limit.map(|time| time.as_secs_f64()),
            bytes_per_second: settings.bytes_per_second,
            requests_per_second: settings.requests_per_second,
            model: prompt.map(|prompt| prompt.model.as_str()),
            tokens: prompt.map(|prompt| prompt.tokens),
            order: prompt.map(|prompt| Order::word(prompt.order)),
            ..Self::default()
        }
    }

    fn of_phase(settings: &'a BenchSettings, phase: &'a PhaseReport) -> Self {
        let (first, last, latency) = (phase.first_done, phase.last_done, phase.latency_us);
        let prompt = phase.prompt.as_ref();
        let (p50, p99) = (|all: Latency| all.p50, |all: Latency| all.p99);
        let lookup = prompt.and_then(|prompt| prompt.lookup_us);
        let first_chunk = prompt.and_then(|prompt| prompt.first_chunk_us);
        let first_layer = prompt.and_then(|prompt| prompt.first_layer_us);
        let last_chunk = prompt.and_then(|prompt| prompt.last_chunk_us);
        Self {
            phase: phase.phase.name(),
            began: phase.began,
            objects: Some(phase.objects),
            ops: Some(phase.ops),
            bytes: phase.bytes,
            first_done_seconds: Some(first.seconds),
            first_done_ops: Some(first.ops),
            first_done_bytes: Some(first.bytes),
            first_done_iops: Some(first.iops),
            first_done_mib_per_s: Some(first.mib_per_s),
            last_done_seconds: last.seconds,
            last_done_iops: last.iops,
            last_done_mib_per_s: last.mib_per_s,
            cpu_seconds: Some(phase.cpu_seconds),
            cpu_seconds_per_gib: phase.cpu_seconds_per_gib,
            cpu_us_per_op: phase.cpu_us_per_op,
            minor_faults: Some(phase.minor_faults),
            minor_faults_per_gib: phase.minor_faults_per_gib,
            latency_min_us: latency.map(|all| all.min),
            latency_mean_us: latency.map(|all| all.mean),
            latency_p50_us: latency.map(p50),
            latency_p90_us: latency.map(|all| all.p90),
            latency_p99_us: latency.map(p99),
            latency_p999_us: latency.map(|all| all.p999),
            latency_max_us: latency.map(|all| all.max),
            requests: phase.requests.total(),
            retries: phase.retries,
            hedges: phase.hedges,
            errors: Some(phase.errors.count),
            first_error: phase.errors.first.as_deref(),
            interrupted: Some(phase.interrupted),
            present: Some(phase.present),
            prompts: prompt.map(|prompt| prompt.prompts),
            prompt_chunks: prompt.map(|prompt| prompt.chunks),
            prompt_gib_per_s: prompt.and_then(|prompt| prompt.gib_per_s),
            prompt_lookup_p50_us: lookup.map(p50),
            prompt_lookup_p99_us: lookup.map(p99),
            prompt_first_chunk_p50_us: first_chunk.map(p50),
            prompt_first_chunk_p99_us: first_chunk.map(p99),
            prompt_first_layer_p50_us: first_layer.map(p50),
            prompt_first_layer_p99_us: first_layer.map(p99),
            prompt_last_chunk_p50_us: last_chunk.map(p50),
            prompt_last_chunk_p99_us: last_chunk.map(p99),
            addresses: Some(phase.endpoints.len()),
            ..Self::of_settings(settings)
        }
    }

    fn of_address(settings: &'a BenchSettings, phase: &'a PhaseReport, endpoint: &'a Endpoint) -> Self {
        let (state, totals) = (&endpoint.state, &endpoint.state.totals);
        Self {
            phase: phase.phase.name(),
            began: phase.began,
            bytes: totals.bytes,
            last_done_seconds: phase.last_done.seconds,
            last_done_mib_per_s: endpoint.mib_per_s,
            last_done_iops: endpoint.requests as f64 / phase.seconds,
            requests: endpoint.requests,
            retries: totals.retries,
            hedges: totals.hedges,
            address: Some(state.address),
            share_percent: Some(endpoint.share_percent),
            ok: Some(totals.ok),
            refused: Some(totals.refused + totals.denied),
            throttled: Some(totals.throttled),
            failed: Some(totals.failed),
            lost: Some(totals.lost),
            timed_out: Some(totals.timed_out),
            given_up: Some(totals.given_up),
            first_byte_us: state.latency_us,
            window_bytes: Some(state.window_bytes),
            breaker: Some(breaker(state.breaker)),
            ..Self::of_settings(settings)
        }
    }
}

/// Where lines are added; the header is written with the first.
pub struct Csv {
    /// None: the standard output.
    file: Option<(File, String)>,
    header: bool,
}

impl Csv {
    /// A file is made if it is not there, and added to if it has the same columns.
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
        let columns = header().map_err(error)?;
        if !empty && first_line(name, columns.len()).map_err(error)? != columns {
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
        let mut rows = vec![Row::of_phase(settings, phase)];
        if phase.endpoints.len() > 1 {
            let of_address = |endpoint| Row::of_address(settings, phase, endpoint);
            rows.extend(phase.endpoints.iter().map(of_address));
        }
        let lines = lines(std::mem::take(&mut self.header), &rows)
            .map_err(|error| CliError::Failed(format!("can't make --csv: {error}")))?;
        match &mut self.file {
            None => lines.lines().try_for_each(|line| out.line(line))?,
            Some((file, name)) => append(file, &lines)
                .map_err(|error| CliError::Failed(format!("can't write --csv {name}: {error}")))?,
        }
        out.flush()
    }
}

/// The rows' lines, below the columns' names where there is to be a `header`.
fn lines(header: bool, rows: &[Row<'_>]) -> io::Result<String> {
    let mut writer = WriterBuilder::new().has_headers(header).from_writer(Vec::new());
    rows.iter().try_for_each(|row| writer.serialize(row))?;
    let bytes = writer.into_inner().map_err(csv::IntoInnerError::into_error)?;
    String::from_utf8(bytes).map_err(io::Error::other)
}

/// The columns' names.
fn header() -> io::Result<String> {
    let lines = lines(true, &[Row::default()])?;
    Ok(lines.lines().next().unwrap_or_default().to_owned())
}

/// The first line of a file, cut where it is longer than a line of `len` bytes.
fn first_line(name: &str, len: usize) -> io::Result<String> {
    let most = len as u64 + 2;
    let mut bytes = Vec::new();
    BufReader::new(File::open(name)?.take(most)).read_until(b'\n', &mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).trim_end().to_owned())
}

/// Writes all lines, or none where the file can be cut.
fn append(file: &mut File, lines: &str) -> io::Result<()> {
    let before = file.metadata()?.len();
    file.write_all(lines.as_bytes()).inspect_err(|_| {
        // A device can't be cut.
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
