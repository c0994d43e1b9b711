//! The table for people: a line for each phase, written as soon as it is over, with its details below.

use std::fmt::Write;

use super::endpoints;
use crate::tools::bench::{BenchSettings, HistogramBucket, Latency, PhaseReport, PromptReport, ReportMark};
use crate::tools::cli::error::CliError;
use crate::tools::cli::output::{Out, bytes, count};

/// The longest line.
const WIDTH: usize = 120;

/// Columns, with their widths: 103, and 14 between them.
const COLUMNS: [(&str, usize); 15] = [
    ("phase", 8),
    ("seconds", 8),
    ("MiB/s", 7),
    ("IOPS", 7),
    ("seconds", 8),
    ("MiB/s", 7),
    ("IOPS", 7),
    ("ops", 8),
    ("us/op", 7),
    ("s/GiB", 6),
    ("min", 6),
    ("avg", 6),
    ("p50", 6),
    ("p99", 6),
    ("max", 6),
];

/// The headings over several columns, with the number of columns.
const GROUPS: [(&str, usize); 5] = [
    ("", 1),
    (" first done ", 3),
    (" last done ", 4),
    (" CPU ", 2),
    (" latency, ms ", 5),
];

pub fn header(settings: &BenchSettings, place: &str, out: &mut Out) -> Result<(), CliError> {
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
    out.line(groups())?;
    out.line(line(&COLUMNS.map(|(name, _)| name.to_owned())))?;
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
    if moved {
        out.line(format_args!("- {} in all", bytes(phase.bytes)))?;
    }
    if phase.present > 0 {
        let all = count(phase.ops, "chunk");
        out.line(format_args!(
            "- {} of {all} were there already, so these are no figures of writes: remove them first (kvgate bench delete)",
            phase.present
        ))?;
    }
    for line in histogram(&phase.histogram) {
        out.line(line)?;
    }
    if let Some(prompt) = &phase.prompt {
        prompts(prompt, out)?;
    }
    endpoints::table(phase, out)?;
    out.flush()
}

/// Times since the prompt's start; half of the prompts took no longer.
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
    ))?;
    match report.gib_per_s {
        Some(speed) => out.line(format_args!(
            "- {} GiB/s from a prompt's lookup to its last chunk",
            figure(speed)
        )),
        None => Ok(()),
    }
}

fn mark(mark: &ReportMark, moved: bool) -> [String; 3] {
    [
        format!("{:.3}", mark.seconds),
        or_dash(moved.then_some(mark.mib_per_s)),
        figure(mark.iops),
    ]
}

fn latency(latency: Option<&Latency>) -> [String; 5] {
    let ms = |of: fn(&Latency) -> f64| or_dash(latency.map(|latency| of(latency) / 1e3));
    [
        ms(|all| all.min),
        ms(|all| all.mean),
        ms(|all| all.p50),
        ms(|all| all.p99),
        ms(|all| all.max),
    ]
}

/// The distribution of latencies: each octave with the requests that no earlier octave has.
fn histogram(octaves: &[HistogramBucket]) -> Vec<String> {
    const START: &str = "- latency up to";
    let some = octaves.iter().filter(|octave| octave.count > 0);
    let mut lines: Vec<String> = Vec::new();
    for octave in some {
        let cell = format!(" {} ms: {}", figure(octave.up_to_us / 1e3), octave.count);
        match lines.last_mut() {
            Some(line) if line.len() + 1 + cell.len() < WIDTH => {
                line.push(',');
                line.push_str(&cell);
            }
            Some(line) => {
                line.push(',');
                lines.push(format!("{:len$}{cell}", "", len = START.len()));
            }
            None => lines.push(format!("{START}{cell}")),
        }
    }
    lines
}

fn or_dash(number: Option<f64>) -> String {
    number.map_or_else(|| "-".to_owned(), figure)
}

/// A number with three digits or more.
pub fn figure(number: f64) -> String {
    let decimals = match number {
        100.0.. => 0,
        10.0.. => 1,
        1.0.. => 2,
        _ => 3,
    };
    format!("{number:.decimals$}")
}

/// The headings above their columns.
fn groups() -> String {
    let mut widths = COLUMNS.iter().map(|(_, width)| width);
    let group = |(name, columns): (&str, usize)| {
        let width = widths.by_ref().take(columns).sum::<usize>() + columns - 1;
        match name {
            "" => " ".repeat(width),
            _ => format!("{name:-^width$}"),
        }
    };
    GROUPS.map(group).join(" ")
}

/// A line: the first cell to the left, the others to the right.
fn line(cells: &[String]) -> String {
    let mut line = String::new();
    for (index, (cell, (_, width))) in cells.iter().zip(COLUMNS).enumerate() {
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

    #[test]
    fn lines_are_not_too_long() {
        let columns = line(&COLUMNS.map(|(name, width)| format!("{name:_>width$}")));
        assert!(columns.len() <= WIDTH, "{}", columns.len());
        assert_eq!(groups().len(), columns.len());
        let octaves: Vec<HistogramBucket> = (0..42)
            .map(|octave| HistogramBucket {
                up_to_us: f64::from(octave).exp2() / 1e3,
                count: 1 << octave,
            })
            .collect();
        let lines = histogram(&octaves);
        assert!(lines.iter().all(|line| line.len() <= WIDTH), "{lines:#?}");
        let counts: usize = lines.iter().map(|line| line.matches(" ms: ").count()).sum();
        assert_eq!(counts, octaves.len(), "{lines:#?}");
    }

    #[test]
    fn a_histogram_has_those_of_each_octave() {
        let octaves = [(262.144, 3), (524.288, 0), (1048.576, 40)]
            .map(|(up_to_us, count)| HistogramBucket { up_to_us, count });
        assert_eq!(histogram(&octaves), ["- latency up to 0.262 ms: 3, 1.05 ms: 40"]);
        assert!(histogram(&[]).is_empty());
    }
}
