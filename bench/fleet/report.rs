//! The tables, and the files that `--save` writes.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use serde::Serialize;

use super::run::{Row, Took};
use super::scenario::{LONG, OSD_BYTES_PER_SECOND, OSDS, PROMPTS, RGW, Times};

#[derive(Serialize)]
pub struct Report {
    date: String,
    cpu: String,
    cores: usize,
    rustc: String,
    commit: String,
    command: String,
    seed: u64,
    /// That it took to simulate.
    seconds: f64,
    pub rows: Vec<Row>,
}

impl Report {
    pub fn new(seed: u64, seconds: f64, rows: Vec<Row>) -> Self {
        let changed = ["status", "--porcelain", "src", "bench/fleet", "Cargo.lock"];
        let dirty = !output_of("git", &changed).is_empty();
        let commit = output_of("git", &["rev-parse", "--short=12", "HEAD"]);
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
        let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
        let words: Vec<String> = "cargo bench --bench fleet --"
            .split(' ')
            .map(Into::into)
            .chain(arguments)
            .collect();
        Self {
            date: output_of("date", &["-u", "+%Y-%m-%d"]),
            cpu: model
                .and_then(|line| line.split_once(": "))
                .map_or("unknown", |(_, model)| model)
                .into(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            rustc: output_of("rustc", &["--version"]),
            commit: commit + if dirty { ", with changes" } else { "" },
            command: words.join(" "),
            seed,
            seconds,
            rows,
        }
    }

    pub fn markdown(&self) -> String {
        let mut text = format!(
            "# fleet, {}\n\n- simulated in {:.0} s on {}, {} cores; seed {}\n- {}\n- commit {}\n- `{}`\n\n",
            self.date, self.seconds, self.cpu, self.cores, self.seed, self.rustc, self.commit, self.command
        );
        let Times {
            begin,
            fault,
            well,
            end,
        } = LONG;
        // Writing to a String can't fail.
        let _ = writeln!(
            text,
            "Each gateway gets {PROMPTS} prompts a second. An RGW has {} cores, {:.1} GB/s, {:.1} GB/s a connection, \
             {OSDS} OSDs of {:.0} GB/s, and {} ms to a first byte. Seconds {begin} to {fault} are the time before, {fault} \
             to {well} meanwhile, and up to {end} after.",
            RGW.cores,
            RGW.nic_bytes_per_second / 1e9,
            RGW.connection_bytes_per_second / 1e9,
            OSD_BYTES_PER_SECOND / 1e9,
            RGW.latency.as_millis(),
        );
        let mut fleet = (0, 0);
        for row in &self.rows {
            if (row.gateways, row.rgws) != fleet {
                fleet = (row.gateways, row.rgws);
                let rows: Vec<&Row> = self
                    .rows
                    .iter()
                    .filter(|row| (row.gateways, row.rgws) == fleet)
                    .collect();
                let _ = writeln!(text, "\n## {} gateways, {} RGWs\n", row.gateways, row.rgws);
                times(&mut text, &rows);
                counts(&mut text, &rows);
            }
        }
        text
    }

    /// As `fleet-DATE`, or `fleet-NAME-DATE`.
    pub fn save(&self, name: Option<&str>) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/results");
        let name = name.map(|name| format!("{name}-")).unwrap_or_default();
        let file = folder.join(format!("fleet-{name}{}", self.date));
        let json = serde_json::to_string_pretty(self).expect("a report in JSON");
        let written = std::fs::create_dir_all(&folder)
            .and_then(|()| std::fs::write(file.with_extension("md"), self.markdown()))
            .and_then(|()| std::fs::write(file.with_extension("json"), json + "\n"));
        match written {
            Ok(()) => println!("saved as {}.md and .json", file.display()),
            Err(error) => eprintln!("can't save {}: {error}", file.display()),
        }
    }
}

/// Until a prompt's last chunk is there.
fn times(text: &mut String, rows: &[&Row]) {
    *text += "Milliseconds until a prompt's last chunk is there; and of its lookup alone.\n\n";
    *text += "| scenario | before: p50 | p99 | p99.9 | meanwhile: p50 | p99 | p99.9 | p99, times before | after: p99 | \
              lookup p99: before | meanwhile | failed |\n";
    *text += "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
    for row in rows {
        let load = |took: &Took| took.load_ms.map(|ms| format!("{ms:.0}")).join(" | ");
        let _ = writeln!(
            text,
            "| {} | {} | {} | {:.2} | {:.0} | {:.1} | {:.1} | {} of {} |",
            row.scenario,
            load(&row.before),
            load(&row.meanwhile),
            row.meanwhile.load_ms[1] / row.before.load_ms[1],
            row.after.load_ms[1],
            row.before.lookup_ms[1],
            row.meanwhile.lookup_ms[1],
            row.before.failed + row.meanwhile.failed + row.after.failed,
            row.before.prompts + row.meanwhile.prompts + row.after.prompts,
        );
    }
}

fn counts(text: &mut String, rows: &[&Row]) {
    *text += "\n| scenario | requests for 1,000 tokens: before | meanwhile | attempts a call | most | peak over mean, 10 ms: \
              before | after | 100 ms: before | after | failed until avoided | after, s | back to 95 %: since then, s | since \
              it is well, s | connections | least used | DNS questions/s | by TCP |\n";
    *text += "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|\n";
    let seconds = |time: Option<f64>| time.map_or("never".to_owned(), |time| format!("{time:.1}"));
    for row in rows {
        let _ = writeln!(
            text,
            "| {} | {:.3} | {:.3} | {:.3} | {} | {:.1} | {:.1} | {:.1} | {:.1} | {} | {} | {} | {} | {} | {:.2} | {:.0} | \
             {:.0} |",
            row.scenario,
            row.requests_a_kilotoken[0],
            row.requests_a_kilotoken[1],
            row.attempts_a_call[1],
            row.attempts_most,
            row.peaks_before.in_10_ms,
            row.peaks_after.in_10_ms,
            row.peaks_before.in_100_ms,
            row.peaks_after.in_100_ms,
            row.failed_attempts,
            seconds(row.avoided_after_s),
            seconds(row.back_after_s[0]),
            seconds(row.back_after_s[1]),
            row.connections_peak,
            row.least_used,
            row.dns,
            row.dns_by_tcp,
        );
    }
}

fn output_of(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program)
        .args(arguments)
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output();
    output.map_or_else(
        |_| "unknown".into(),
        |output| String::from_utf8_lossy(&output.stdout).trim().to_owned(),
    )
}
