//! For people: a line a phase, written as soon as it is over.

use std::fmt::Write;

use super::endpoints;
use crate::bench::{Latency, Mark, PhaseReport, PromptReport, Settings, Share};
use crate::cli::error::CliError;
use crate::cli::output::{Out, bytes, count};

const WIDTHS: [usize; 13] = [9, 10, 8, 8, 10, 8, 8, 8, 8, 8, 9, 8, 8];

const TITLES: [&str; 2] = [
    ",first done,,,last done,,,,CPU,,latency",
    "phase,seconds,MiB/s,IOPS,seconds,MiB/s,IOPS,ops,us/op,s/GiB,p50 ms,p99 ms,max ms",
];

pub fn header(settings: &Settings, place: &str, out: &mut Out) -> Result<(), CliError> {
    out.field("where", place)?;
    if let Some(prompt) = &settings.prompt {
        let tokens = prompt.tokens;
        let each = prompt.chunk_tokens;
        out.field(
            "prompt",
            format_args!("{tokens} tokens of {}, {each} a chunk", prompt.model),
        )?;
    }
    out.field(
        "objects",
        format_args!(
            "{} of {}, parts of {}, {} at a time{}",
            settings.objects,
            bytes(settings.object_bytes),
            bytes(settings.part_bytes),
            count(settings.concurrency as u64, "request"),
            if settings.verify { "" } else { ", not verified" }
        ),
    )?;
    if settings.embedded {
        out.field("note", "that server's work is in the CPU figures, too")?;
    }
    out.line("")?;
    for titles in TITLES {
        let titles: Vec<String> = titles.split(',').map(str::to_owned).collect();
        out.line(line(&titles))?;
    }
    out.flush()
}

pub fn row(phase: &PhaseReport, out: &mut Out) -> Result<(), CliError> {
    let mut cells = vec![phase.phase.name().to_owned()];
    let moved = phase.bytes > 0;
    cells.extend(mark(&phase.first_done, moved));
    cells.extend(mark(&phase.last_done, moved));
    cells.push(phase.ops.to_string());
    cells.push(or_dash(phase.cpu_us_per_op));
    cells.push(or_dash(phase.cpu_seconds_per_gib));
    cells.extend(latency(phase.latency_us.as_ref()));
    out.line(line(&cells))?;
    if let Some(prompt) = &phase.prompt {
        prompts(prompt, out)?;
    }
    if let Some(mix) = &phase.mix {
        out.line(line(&share("- writes", &mix.writes)))?;
        out.line(line(&share("- reads", &mix.reads)))?;
    }
    endpoints::table(&phase.endpoints, out)?;
    out.flush()
}

/// Times since the prompt's start, half of the prompts within them.
fn prompts(report: &PromptReport, out: &mut Out) -> Result<(), CliError> {
    let times = [
        ("lookup", &report.lookup_us),
        ("first chunk", &report.first_chunk_us),
        ("first layer", &report.first_layer_us),
        ("last chunk", &report.last_chunk_us),
    ];
    let known = times
        .iter()
        .filter_map(|(what, time)| Some(format!("{what} {} ms", figure(time.as_ref()?.p50 / 1e3))));
    let known: Vec<String> = known.collect();
    out.line(format_args!(
        "- {} of {}: {}",
        count(report.prompts, "prompt"),
        count(report.chunks, "chunk"),
        known.join(", ")
    ))
}

fn share(name: &str, share: &Share) -> Vec<String> {
    let mut cells = vec![name.to_owned()];
    cells.resize(5, String::new());
    cells.extend([figure(share.mib_per_s), figure(share.iops), share.ops.to_string()]);
    cells.resize(10, String::new());
    cells.extend(latency(share.latency_us.as_ref()));
    cells
}

fn mark(mark: &Mark, moved: bool) -> [String; 3] {
    [
        format!("{:.3}", mark.seconds),
        or_dash(moved.then_some(mark.mib_per_s)),
        figure(mark.iops),
    ]
}

fn latency(latency: Option<&Latency>) -> [String; 3] {
    let ms = |of: fn(&Latency) -> f64| or_dash(latency.map(|latency| of(latency) / 1e3));
    [ms(|all| all.p50), ms(|all| all.p99), ms(|all| all.max)]
}

fn or_dash(number: Option<f64>) -> String {
    number.map_or_else(|| "-".to_owned(), figure)
}

/// Three digits or more.
pub fn figure(number: f64) -> String {
    let decimals = match number {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        _ => 3,
    };
    format!("{number:.decimals$}")
}

/// The first to the left, the others to the right.
fn line(cells: &[String]) -> String {
    let mut line = String::new();
    for (index, (cell, width)) in cells.iter().zip(WIDTHS).enumerate() {
        // Writing to a string can't fail.
        let _ = match index {
            0 => write!(line, "{cell:<width$}"),
            _ => write!(line, " {cell:>width$}"),
        };
    }
    line.trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_short() {
        let shown = [0.0, 0.01234, 1.5, 12.345, 99.99, 123.4, 98_765.4].map(figure);
        assert_eq!(shown, ["0.000", "0.012", "1.50", "12.3", "100.0", "123", "98765"]);
    }
}
