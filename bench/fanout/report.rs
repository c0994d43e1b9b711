//! The table, and the files that `--save` writes.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use serde::Serialize;

use super::run::Row;
use super::scenario::{BEGIN, CONNECTION_BYTES_PER_SECOND, END, ENDPOINTS, LATENCY};

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
    rows: Vec<Row>,
}

impl Report {
    pub fn new(seed: u64, seconds: f64, rows: Vec<Row>) -> Self {
        let changed = ["status", "--porcelain", "src", "bench/fanout", "Cargo.lock"];
        let dirty = !output_of("git", &changed).is_empty();
        let commit = output_of("git", &["rev-parse", "--short=12", "HEAD"]);
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let model = cpuinfo.lines().find(|line| line.starts_with("model name"));
        let arguments = std::env::args().skip(1).filter(|argument| argument != "--bench");
        let words: Vec<String> = "cargo bench --bench fanout --"
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
            "# fanout-sim, {}\n\n- simulated in {:.0} s on {}, {} cores; seed {}\n- {}\n- commit {}\n- `{}`\n\n",
            self.date, self.seconds, self.cpu, self.cores, self.seed, self.rustc, self.commit, self.command
        );
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
        for row in &self.rows {
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

    pub fn save(&self) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("bench/results");
        let file = folder.join(format!("fanout-sim-{}", self.date));
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

fn time(ms: f64) -> String {
    match ms {
        1e3.. => format!("{:.2} s", ms / 1e3),
        _ => format!("{ms:.0} ms"),
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
