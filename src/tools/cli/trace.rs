//! `kvgate trace`: the latest loads of a node, and where the time of one went.

use std::fmt::Write;

use clap::Args;
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use super::args::ConnectArgs;
use super::error::CliError;
use super::node::{self, NodeArgs};
use super::output::{Out, time};

/// Shows a node's latest loads; or of one request's load, what it waited for and what came when.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate trace --socket /tmp/kvgate.sock
  kvgate trace --socket /tmp/kvgate.sock cmpl-5f3a
  kvgate trace --json cmpl-5f3a#12

The node keeps the latest [api] traces loads. A request is the engine's name of it; its loads are
named after it.")]
pub struct TraceArgs {
    /// A request, or one of its loads; without it the latest loads are listed.
    #[arg(value_name = "REQUEST")]
    request: Option<String>,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    connect: ConnectArgs,
}

/// Letters of the longest bar.
const BAR: usize = 40;
/// Letters of a load's name in the list.
const NAME: usize = 40;

pub async fn run(args: TraceArgs, out: &mut Out) -> Result<(), CliError> {
    let config = node::config(&args.connect)?;
    let query = args.request.as_ref().map_or_else(String::new, |request| {
        format!("?load={}", utf8_percent_encode(request, NON_ALPHANUMERIC))
    });
    let answer = args
        .node
        .client(&config)
        .get(&format!("/v1/traces{query}"))
        .await?;
    let answer: Value = serde_json::from_slice(&answer)
        .map_err(|error| CliError::Failed(format!("the answer can't be understood: {error}")))?;
    let loads = answer["loads"].as_array().map(Vec::as_slice).unwrap_or_default();
    if args.json {
        return out.json(&answer);
    }
    match &args.request {
        None => list(loads, out),
        Some(request) if loads.is_empty() => Err(CliError::Failed(format!(
            "the node knows of no load of {request:?}: it keeps the latest [api] traces loads. `kvgate trace` lists them"
        ))),
        Some(_) => loads.iter().try_for_each(|load| show(load, out)),
    }
}

fn list(loads: &[Value], out: &mut Out) -> Result<(), CliError> {
    let row = |load: &Value| {
        let name: String = text(&load["load"]).chars().take(NAME).collect();
        vec![
            time(i64::try_from(load["at_ms"].as_u64().unwrap_or(0) / 1000).unwrap_or(0)),
            name,
            text(&load["instance"]).to_owned(),
            load["rank"].to_string(),
            load["chunks"].to_string(),
            took(load),
            counts(&load["loaded"]),
            counts(&load["missed"]),
        ]
    };
    let rows: Vec<_> = loads.iter().map(row).collect();
    out.table(
        &[
            "at", "load", "engine", ">rank", ">chunks", ">took", "from", "missed",
        ],
        &rows,
    )
}

fn show(load: &Value, out: &mut Out) -> Result<(), CliError> {
    out.field("load", text(&load["load"]))?;
    let engine = format!(
        "{} rank {}, {}",
        text(&load["instance"]),
        load["rank"],
        text(&load["model"])
    );
    out.field("engine", engine)?;
    out.field(
        "chunks",
        format_args!("{}: {}", load["chunks"], counts(&load["loaded"])),
    )?;
    if load["missed"]
        .as_object()
        .is_some_and(|missed| !missed.is_empty())
    {
        out.field("missed", counts(&load["missed"]))?;
    }
    out.field("took", took(load))?;
    let mut spans: Vec<&Value> = load["spans"].as_array().into_iter().flatten().collect();
    spans.sort_by_key(|span| (span["start_us"].as_u64(), span["end_us"].as_u64()));
    let end = spans
        .iter()
        .filter_map(|span| span["end_us"].as_u64())
        .max()
        .unwrap_or(0)
        .max(1);
    let rows: Vec<_> = spans.iter().map(|span| row(span, end)).collect();
    out.line("")?;
    out.table(&[">from", ">took", "what", "", "about"], &rows)?;
    if let Some(more @ 1..) = load["spans_left_out"].as_u64() {
        out.line(format_args!("and {more} more than [api] trace_spans"))?;
    }
    out.line("")
}

fn row(span: &Value, end: u64) -> Vec<String> {
    let of = |name: &str| span[name].as_u64().unwrap_or(0);
    let (from, to, is_part) = (of("start_us"), of("end_us"), of("parent") != 0);
    let marks = span["marks"].as_array().into_iter().flatten();
    let attributes = span["attributes"].as_object().into_iter().flatten();
    let words = attributes.map(|(name, value)| format!("{name} {}", text(value)));
    let mut about = words.collect::<Vec<_>>().join(", ");
    for mark in marks {
        let _ = write!(
            about,
            "; {} at {}",
            text(&mark[0]),
            seconds(mark[1].as_u64().unwrap_or(0))
        );
    }
    vec![
        seconds(from),
        seconds(to.saturating_sub(from)),
        format!("{}{}", if is_part { "  " } else { "" }, text(&span["name"])),
        bar(from, to, end),
        about,
    ]
}

fn bar(from: u64, to: u64, end: u64) -> String {
    let at = |us: u64| {
        usize::try_from(us.saturating_mul(BAR as u64) / end)
            .unwrap_or(BAR)
            .min(BAR)
    };
    let (first, last) = (at(from).min(BAR - 1), at(to));
    let length = last.saturating_sub(first).max(1);
    format!("{:first$}{:<rest$}", "", "█".repeat(length), rest = BAR - first)
}

fn took(load: &Value) -> String {
    let micros = |seconds: f64| seconds * 1e6;
    load["seconds"]
        .as_f64()
        .map_or("under way".to_owned(), |time| words(micros(time)))
}

fn seconds(us: u64) -> String {
    words(us as f64)
}

fn words(us: f64) -> String {
    match us {
        ..1000.0 => format!("{us:.0} us"),
        ..1e6 => format!("{:.2} ms", us / 1e3),
        _ => format!("{:.2} s", us / 1e6),
    }
}

fn counts(of: &Value) -> String {
    let counts = of.as_object().into_iter().flatten();
    counts
        .map(|(name, count)| format!("{count} {name}"))
        .collect::<Vec<_>>()
        .join(", ")
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_begins_and_ends_with_its_span() {
        assert_eq!(bar(0, 100, 100).trim_end().chars().count(), BAR);
        assert_eq!(
            bar(50, 100, 100)
                .chars()
                .take_while(|letter| *letter == ' ')
                .count(),
            BAR / 2
        );
        for (from, to) in [(0, 0), (100, 100), (99, 100)] {
            let bar = bar(from, to, 100);
            assert!(bar.contains('█') && bar.chars().count() <= BAR, "{bar:?}");
        }
    }
}
