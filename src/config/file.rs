//! Reads a configuration file: TOML, YAML or JSON, by its extension.
//!
//! The text is read here and not by the `config` crate, which would replace bytes that are not UTF-8 and try other
//! names when a file is missing.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use ::config::{FileFormat, Source};

use super::sources::Table;
use crate::config::units::{ByteSize, KIB};

/// The largest configuration is a few KiB; a larger file is some other file.
const FILE_BYTES_MAX: u64 = 64 * KIB;
/// The YAML parser recurses for each `- ` on a line without a limit and would overflow its stack. With this limit
/// it nests at most 360 deep: by indentation, n levels take n * n / 2 bytes.
const YAML_LINE_BYTES_MAX: usize = 512;

/// The file's values, or why it can't be used.
pub(super) fn read_file(path: &Path) -> Result<Table, String> {
    let extension = path
        .extension()
        .unwrap_or_default()
        .to_string_lossy()
        .to_lowercase();
    let format = match extension.as_str() {
        "toml" => FileFormat::Toml,
        "yaml" | "yml" => FileFormat::Yaml,
        "json" => FileFormat::Json,
        _ => {
            let message = "use .toml, .yaml, .yml or .json";
            return Err(format!("unknown extension {extension:?}; {message}"));
        }
    };
    let text = read_text(path).map_err(|error| format!("cannot be read: {error}"))?;
    let long = |line: &str| line.len() > YAML_LINE_BYTES_MAX;
    if format == FileFormat::Yaml
        && let Some(index) = text.lines().position(long)
    {
        return Err(format!(
            "line {} is longer than {YAML_LINE_BYTES_MAX} bytes",
            index + 1
        ));
    }
    ::config::File::from_str(&text, format)
        .collect()
        .map_err(|error| {
            let name = format!("{format:?}").to_uppercase();
            format!("is not valid {name}: {}", one_line(&error.to_string()))
        })
}

fn read_text(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    let bytes = File::open(path)?
        .take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)?;
    if bytes as u64 > FILE_BYTES_MAX {
        let message = format!("it is larger than {}", ByteSize(FILE_BYTES_MAX));
        return Err(io::Error::other(message));
    }
    Ok(text.strip_prefix('\u{feff}').map(str::to_owned).unwrap_or(text))
}

/// The first line of a TOML error: it has the line number, and the parser draws the place below.
fn one_line(message: &str) -> String {
    let drawn = |line: &&str| {
        line.trim_start_matches(|c: char| c.is_ascii_digit() || c == ' ')
            .starts_with('|')
    };
    let told: Vec<&str> = message.lines().filter(|line| !drawn(line)).collect();
    told.join(": ")
}
