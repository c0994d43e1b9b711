//! `kvgate top`: what a node does now, in a terminal: the figures of its status page.

use std::io::{self, IsTerminal};
use std::time::{Duration, Instant};

use clap::Args;
use console::{Key, Term};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::args::ConnectArgs;
use super::error::CliError;
use super::node::{self, NodeArgs};
use super::output::{Out, bytes, count};
use super::picture::spark;
use crate::engine::client::Client;

/// Shows what a node does: throughput, hits by tier, latency, fill, addresses, engines, and what is wrong.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate top --socket /tmp/kvgate.sock
  kvgate top --once
  kvgate top --json

q or Ctrl-C ends it. Without a terminal it shows the figures once.")]
pub struct TopArgs {
    /// Show the figures once, and end.
    #[arg(long)]
    once: bool,
    /// Report once as JSON: status and history as the API has them.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    connect: ConnectArgs,
}

const EVERY: Duration = Duration::from_secs(1);
/// The history has a new row every ten seconds.
const HISTORY_EVERY: Duration = Duration::from_secs(5);
/// Without a terminal.
const WIDTH: usize = 100;
/// Lines of a table.
const ROWS_MAX: usize = 12;

pub async fn run(args: TopArgs, out: &mut Out) -> Result<(), CliError> {
    let config = node::config(&args.connect)?;
    let client = args.node.client(&config);
    let (status, history) = (client.status().await?, history(&client).await?);
    if args.json {
        return out.json(&json!({"status": status, "history": history}));
    }
    if args.once || !io::stdout().is_terminal() {
        let lines = Frame {
            status: &status,
            history: &history,
            width: WIDTH,
        }
        .lines();
        return lines.iter().try_for_each(|line| out.line(line));
    }
    let term = Term::stdout();
    let screen = Screen::new(term.clone())?;
    let mut keys = keys(term);
    let (mut history, mut read) = (history, Instant::now());
    let mut shown = Ok(status);
    loop {
        screen.show(&shown, &history)?;
        let ends = tokio::select! {
            key = keys.recv() => key.is_none_or(|key| matches!(key, Key::Char('q' | 'Q') | Key::Escape | Key::CtrlC)),
            () = tokio::time::sleep(EVERY) => false,
        };
        if ends {
            return Ok(());
        }
        shown = client.status().await.map_err(|error| error.to_string());
        if read.elapsed() >= HISTORY_EVERY
            && let Ok(newer) = self::history(&client).await
        {
            (history, read) = (newer, Instant::now());
        }
    }
}

async fn history(client: &Client) -> Result<Value, CliError> {
    let text = client.get("/v1/history").await?;
    serde_json::from_slice(&text)
        .map_err(|error| CliError::Failed(format!("the history can't be understood: {error}")))
}

/// Reads keys on a thread of its own, which ends with the process: a terminal can't be asked without waiting.
fn keys(term: Term) -> mpsc::Receiver<Key> {
    let (tell, told) = mpsc::channel(1);
    std::thread::spawn(move || {
        while let Ok(key) = term.read_key_raw() {
            if tell.blocking_send(key).is_err() {
                return;
            }
        }
    });
    told
}

/// The terminal's other screen, until it is dropped.
struct Screen(Term);

impl Screen {
    fn new(term: Term) -> Result<Self, CliError> {
        term.write_str("\x1b[?1049h")?;
        term.hide_cursor()?;
        Ok(Self(term))
    }

    fn show(&self, status: &Result<Value, String>, history: &Value) -> Result<(), CliError> {
        let (height, width) = self.0.size();
        let mut lines = match status {
            Ok(status) => Frame {
                status,
                history,
                width: width.into(),
            }
            .lines(),
            Err(error) => vec![cut(
                &format!("the gateway does not answer: {error}"),
                width.into(),
            )],
        };
        lines.truncate(usize::from(height).max(1));
        // Each line is cleared behind its end, and all below the last: no flicker.
        let text = lines.join("\x1b[K\r\n");
        Ok(self.0.write_str(&format!("\x1b[H{text}\x1b[K\x1b[J"))?)
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.0.show_cursor();
        let _ = self.0.write_str("\x1b[?1049l");
    }
}

/// What is shown at one time.
struct Frame<'a> {
    status: &'a Value,
    history: &'a Value,
    width: usize,
}

impl Frame<'_> {
    fn lines(&self) -> Vec<String> {
        let mut lines = vec![self.title()];
        for trouble in self.list("/troubles") {
            let mark = if trouble["is_bad"] == true {
                "Broken"
            } else {
                "Look"
            };
            lines.push(format!("{mark}: {}", text(&trouble["what"])));
            lines.push(format!("    {}", text(&trouble["todo"])));
        }
        lines.push(String::new());
        lines.extend(self.rates());
        lines.push(String::new());
        lines.extend(self.levels());
        lines.extend(self.endpoints());
        lines.extend(self.engines());
        lines.extend(self.spaces());
        lines.iter().map(|line| cut(line, self.width)).collect()
    }

    fn title(&self) -> String {
        let ready = self
            .at("/not_ready")
            .as_str()
            .map_or("ready".to_owned(), |why| format!("not ready: {why}"));
        let up = self.number("/uptime_seconds");
        format!(
            "kvgate {}   {ready}   up {}",
            text(self.at("/version")),
            uptime(up)
        )
    }

    fn rates(&self) -> [String; 5] {
        let found = |tier: &str| self.sum(&format!("found_{tier}"));
        let (asked, tiers) = (self.sum("asked"), ["memory", "disk", "peer", "s3"]);
        let percent = |part: f64| match asked {
            0.0 => "-".to_owned(),
            _ => format!("{:.1} %", 100.0 * part / asked),
        };
        let [memory, disk, peers, s3] = tiers.map(found);
        let loaded = |tier: &str| self.last(&format!("loaded_bytes_{tier}"));
        let rate =
            |value: Option<f64>| value.map_or("-".to_owned(), |value| format!("{}/s", bytes(whole(value))));
        let times = |name: &str| {
            let of = |share| {
                self.last(&format!("{name}_{share}"))
                    .map_or("-".to_owned(), seconds)
            };
            format!("half {}, 99 % {}", of("p50"), of("p99"))
        };
        [
            self.line(
                "found",
                &format!(
                    "{}: memory {}, disk {}, peers {}, S3 {}",
                    percent(memory + disk + peers + s3),
                    percent(memory),
                    percent(disk),
                    percent(peers),
                    percent(s3)
                ),
                "found_memory",
            ),
            self.line(
                "loaded",
                &format!(
                    "memory {}, disk {}, peers {}, S3 {}",
                    rate(loaded("memory")),
                    rate(loaded("disk")),
                    rate(loaded("peer")),
                    rate(loaded("s3"))
                ),
                "loaded_bytes_memory",
            ),
            self.line("lookup", &times("lookup"), "lookup_p99"),
            self.line("load", &times("load"), "load_p99"),
            self.line("GET", &times("get"), "get_p99"),
        ]
    }

    fn levels(&self) -> Vec<String> {
        let size = |path: &str| bytes(self.number(path));
        let mut lines = vec![
            self.line(
                "arena",
                &format!(
                    "{} of {}, {} read",
                    size("/arena/used_bytes"),
                    size("/arena/size_bytes"),
                    self.number("/slots/leases")
                ),
                "arena_bytes",
            ),
            self.line(
                "memory",
                &format!(
                    "{} in {}",
                    size("/tiers/memory/bytes"),
                    self.chunks("/tiers/memory/chunks")
                ),
                "memory_bytes",
            ),
        ];
        for disk in self.list("/tiers/disk/disks") {
            let of = |name: &str| bytes(disk[name].as_u64().unwrap_or(0));
            let state = if disk["state"] == "ok" { "" } else { ", taken out" };
            let about = format!(
                "{} of {}{state}  {}",
                of("bytes"),
                of("size_bytes"),
                text(&disk["path"])
            );
            lines.push(self.line("disk", &about, "disk_bytes"));
        }
        let behind = "/tiers/write_behind";
        let about = format!(
            "{} in {}; {} given up",
            size(&format!("{behind}/waiting_bytes")),
            self.chunks(&format!("{behind}/waiting_chunks")),
            self.number(&format!("{behind}/dropped"))
        );
        lines.push(self.line("waiting", &about, "waiting_bytes"));
        lines
    }

    fn endpoints(&self) -> Vec<String> {
        let row = |one: &Value| {
            let of = |name: &str| one[name].as_u64().unwrap_or(0);
            let failed = ["failed", "lost", "timed_out", "throttled"]
                .map(of)
                .iter()
                .sum::<u64>();
            let first = one["latency_us"]
                .as_u64()
                .map_or("-".to_owned(), |us| seconds(us as f64 / 1e6));
            let health = if one["breaker"] == "closed" {
                "in use"
            } else {
                "left alone"
            };
            format!(
                "  {:<22} {health:<10}  {first:>8} to first byte, {} in flight, {failed} failed, {} hedges",
                text(&one["address"]),
                bytes(of("in_flight_bytes")),
                of("hedges")
            )
        };
        table("addresses of S3", self.list("/s3/endpoints"), row)
    }

    fn engines(&self) -> Vec<String> {
        let row = |one: &Value| {
            format!(
                "  {}  rank {} of {}, {} slots read, {} written",
                text(&one["instance"]),
                one["rank"],
                one["world_size"],
                one["leases"],
                one["writes"]
            )
        };
        table("engines", self.list("/sessions"), row)
    }

    fn spaces(&self) -> Vec<String> {
        let row = |one: &Value| {
            let kind = one["kind"]
                .as_str()
                .map_or_else(|| one["kind"].to_string(), str::to_owned);
            format!(
                "  {}  {kind}, {} tokens a chunk, {}",
                text(&one["model"]),
                one["chunk_tokens"],
                bytes(one["object_bytes"].as_u64().unwrap_or(0))
            )
        };
        table("spaces", self.list("/spaces"), row)
    }

    /// A name, a figure, and its column of the history as a picture, where there is room for it.
    fn line(&self, name: &str, about: &str, column: &str) -> String {
        let line = format!("{name:<9} {about}");
        let room = self.width.saturating_sub(line.chars().count() + 2).min(60);
        match room {
            ..8 => line,
            _ => format!("{line}  {:>room$}", spark(&self.column(column), room)),
        }
    }

    fn at(&self, path: &str) -> &Value {
        self.status.pointer(path).unwrap_or(&Value::Null)
    }

    fn number(&self, path: &str) -> u64 {
        self.at(path).as_u64().unwrap_or(0)
    }

    fn chunks(&self, path: &str) -> String {
        count(self.number(path), "chunk")
    }

    fn list(&self, path: &str) -> &[Value] {
        self.at(path).as_array().map_or(&[], Vec::as_slice)
    }

    fn column(&self, name: &str) -> Vec<Option<f64>> {
        let values = self.history["columns"][name].as_array();
        values.into_iter().flatten().map(Value::as_f64).collect()
    }

    fn sum(&self, column: &str) -> f64 {
        self.column(column).into_iter().flatten().sum()
    }

    /// The latest one that there is.
    fn last(&self, column: &str) -> Option<f64> {
        self.column(column).into_iter().flatten().next_back()
    }
}

fn table<'a>(name: &str, rows: &'a [Value], line: impl Fn(&'a Value) -> String) -> Vec<String> {
    let mut lines = vec![String::new(), format!("{name}: {}", rows.len())];
    lines.extend(rows.iter().take(ROWS_MAX).map(line));
    if rows.len() > ROWS_MAX {
        lines.push(format!(
            "  and {} more: kvgate stat --json",
            rows.len() - ROWS_MAX
        ));
    }
    lines
}

/// The next whole number.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a figure that is not negative"
)]
fn whole(value: f64) -> u64 {
    value.max(0.0).round() as u64
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn cut(line: &str, width: usize) -> String {
    // A terminal acts on what is no letter.
    let shown = line
        .chars()
        .map(|letter| if letter.is_control() { '?' } else { letter });
    shown.take(width).collect::<String>().trim_end().to_owned()
}

fn seconds(seconds: f64) -> String {
    match seconds {
        ..0.001 => format!("{:.0} us", seconds * 1e6),
        ..1.0 => format!("{:.1} ms", seconds * 1e3),
        _ => format!("{seconds:.1} s"),
    }
}

fn uptime(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} days", seconds / 86_400),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(width: usize) -> Vec<String> {
        let status = json!({
            "version": "1.2.3", "uptime_seconds": 65, "not_ready": null,
            "troubles": [{"is_bad": true, "what": "All fail", "todo": "Look there."}],
            "arena": {"used_bytes": 1024, "size_bytes": 4096}, "slots": {"leases": 2},
            "tiers": {"memory": {"bytes": 512, "chunks": 1}, "disk": null, "write_behind": {"waiting_bytes": 0, "waiting_chunks": 0, "dropped": 0}},
            "s3": {"endpoints": [{"address": "10.0.0.1:80", "breaker": "open", "latency_us": 1500, "in_flight_bytes": 0, "failed": 3}]},
            "sessions": [{"instance": "a\u{1b}[2J", "rank": 0, "world_size": 1, "leases": 0, "writes": 0}],
            "spaces": [],
        });
        let history = json!({"columns": {
            "asked": [10.0, 10.0], "found_memory": [0.0, 5.0], "found_disk": [0.0, 0.0], "found_s3": [5.0, 0.0],
            "loaded_bytes_memory": [0.0, 2048.0], "loaded_bytes_peer": [0.0, 4096.0], "lookup_p99": [0.0005, null],
        }});
        Frame {
            status: &status,
            history: &history,
            width,
        }
        .lines()
    }

    #[test]
    fn it_says_what_is_wrong_and_what_there_is() {
        let lines = frame(120);
        assert_eq!(lines[0], "kvgate 1.2.3   ready   up 65 s");
        assert_eq!(lines[1..3], ["Broken: All fail", "    Look there."]);
        let all = lines.join("\n");
        for words in [
            "found     50.0 %: memory 25.0 %",
            "memory 2 KiB/s, disk -, peers 4 KiB/s, S3 -",
            "99 % 500 us",
            "1 KiB of 4 KiB, 2 read",
            "left alone",
            "3 failed",
            "spaces: 0",
        ] {
            assert!(all.contains(words), "{words}: {all}");
        }
        assert!(all.contains("▁█"), "a picture of the rate");
    }

    #[test]
    fn a_narrow_terminal_gets_short_lines_and_none_gets_control_characters() {
        for width in [1, 20, 40] {
            assert!(frame(width).iter().all(|line| line.chars().count() <= width));
        }
        assert!(!frame(120).join("").contains('\u{1b}'));
    }

    #[test]
    fn a_node_without_a_past_is_shown() {
        let lines = Frame {
            status: &json!({}),
            history: &json!({}),
            width: 80,
        }
        .lines();
        assert!(lines.join("\n").contains("found     -"));
    }
}
