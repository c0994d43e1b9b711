//! Output of commands: tables, numbers for people, and a standard output that may be closed at any time.

use std::fmt::Display;
use std::io::{self, BufWriter, Stdout, Write};

use aws_smithy_types::DateTime;
use aws_smithy_types::date_time::Format;
use serde::Serialize;

use super::error::CliError;

/// The standard output. Unlike `println!`, writing to a closed pipe is an error and no panic.
pub struct Out(BufWriter<Stdout>);

/// A column's heading; `>` in front aligns it right.
pub type Heading<'a> = &'a str;

impl Out {
    pub fn stdout() -> Self {
        Self(BufWriter::new(io::stdout()))
    }

    pub fn line(&mut self, text: impl Display) -> Result<(), CliError> {
        Ok(writeln!(self.0, "{text}")?)
    }

    /// A line `name  value`, with the values of all such lines aligned.
    pub fn field(&mut self, name: &str, value: impl Display) -> Result<(), CliError> {
        Ok(writeln!(self.0, "{name:<12} {}", printable(value))?)
    }

    pub fn json(&mut self, value: &impl Serialize) -> Result<(), CliError> {
        serde_json::to_writer_pretty(&mut self.0, value).map_err(io::Error::from)?;
        self.line("")
    }

    pub fn table(&mut self, headings: &[Heading<'_>], rows: &[Vec<String>]) -> Result<(), CliError> {
        let rows: Vec<Vec<String>> = rows
            .iter()
            .map(|row| row.iter().map(printable).collect())
            .collect();
        let titles: Vec<&str> = headings.iter().map(|name| name.trim_start_matches('>')).collect();
        let width = |column: usize| {
            let cells = rows.iter().filter_map(|row| row.get(column));
            let widest = cells.map(|cell| cell.chars().count()).max().unwrap_or(0);
            widest.max(titles[column].len())
        };
        let widths: Vec<usize> = (0..titles.len()).map(width).collect();
        let line = |cells: &mut dyn Iterator<Item = &str>| {
            let cells = cells.enumerate().map(|(column, cell)| {
                let width = widths.get(column).copied().unwrap_or(0);
                match headings.get(column).is_some_and(|name| name.starts_with('>')) {
                    true => format!("{cell:>width$}"),
                    false => format!("{cell:<width$}"),
                }
            });
            cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.line(line(&mut titles.iter().copied()))?;
        for row in &rows {
            self.line(line(&mut row.iter().map(String::as_str)))?;
        }
        Ok(())
    }

    pub fn flush(&mut self) -> Result<(), CliError> {
        Ok(self.0.flush()?)
    }
}

/// Words that others chose, such as names in a bucket or a server's error. A terminal acts on control characters.
pub fn printable(words: impl Display) -> String {
    let words = words.to_string();
    words
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

/// Writes a line to the standard error. Unlike `eprintln!` it doesn't panic when that is closed.
pub fn tell(text: impl Display) {
    let _ = writeln!(io::stderr().lock(), "{text}");
}

/// A size for people: exact where that is short, else about three digits.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    let mut unit = 0;
    let mut whole = bytes;
    while whole >= 1024 && unit + 1 < UNITS.len() {
        whole /= 1024;
        unit += 1;
    }
    let factor = 1_u64 << (10 * unit);
    let name = UNITS[unit];
    if bytes.is_multiple_of(factor) {
        return format!("{whole} {name}");
    }
    let value = bytes as f64 / factor as f64;
    match value {
        ..100.0 => format!("{value:.2} {name}"),
        _ => format!("{value:.1} {name}"),
    }
}

/// `1 chunk`, `2 chunks`.
pub fn count(number: u64, noun: &str) -> String {
    match number {
        1 => format!("1 {noun}"),
        _ => format!("{number} {noun}s"),
    }
}

/// Seconds since 1970 as `2026-11-20T20:33:55Z`.
pub fn time(seconds: i64) -> String {
    let time = DateTime::from_secs(seconds).fmt(Format::DateTime);
    // Too far from now to be a date.
    time.unwrap_or_else(|_| seconds.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_exact_where_that_is_short() {
        for (number, text) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (64 << 20, "64 MiB"),
            ((64 << 20) + 4096, "64.00 MiB"),
            (1_700_000_000, "1.58 GiB"),
            (700_000_000, "667.6 MiB"),
            (u64::MAX, "16384.0 PiB"),
        ] {
            assert_eq!(bytes(number), text);
        }
    }

    #[test]
    fn times_are_those_of_date() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_795_206_835, "2026-11-20T20:33:55Z"),
            (-1, "1969-12-31T23:59:59Z"),
        ] {
            assert_eq!(time(seconds), text);
        }
    }
}
