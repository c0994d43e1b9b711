//! `kvgate config check` and `kvgate config show`.

use std::fmt::Write;

use clap::{Args, Subcommand};
use serde_json::json;

use super::args::ConnectArgs;
use super::error::CliError;
use super::output::Out;
use crate::config::{SettingOrigin, Shown};
use crate::node::daemon::has_room;

/// Checks the configuration, or shows it as it takes effect.
#[derive(Debug, Subcommand)]
#[command(after_help = "\
Examples:
  kvgate config check --config kvgate.toml
  KVGATE__S3__BUCKET=kv kvgate config show
  kvgate config show --toml > kvgate.toml")]
pub enum ConfigCommand {
    /// Says `ok`, or everything that is wrong. Warns of keys that are given by their old names. Opens none of the files that
    /// the configuration names: `kvgate doctor` does.
    Check(ConfigCheckArgs),
    /// Shows every key, its value and where that comes from.
    Show(ShowArgs),
}

#[derive(Debug, Args)]
pub struct ConfigCheckArgs {
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    connect: ConnectArgs,
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    /// Write a configuration file: every key with its meaning, those at their default commented out.
    #[arg(long, conflicts_with = "json")]
    toml: bool,
    #[command(flatten)]
    connect: ConnectArgs,
}

pub fn run(command: ConfigCommand, out: &mut Out) -> Result<(), CliError> {
    match command {
        ConfigCommand::Check(args) => check(&args, out),
        ConfigCommand::Show(args) => show(&args, out),
    }
}

fn check(args: &ConfigCheckArgs, out: &mut Out) -> Result<(), CliError> {
    match (args.connect.load(Vec::new()), args.json) {
        (Ok(loaded), as_json) => match (has_room(&loaded.config), as_json) {
            (Ok(()), false) => out.line("ok"),
            (Ok(()), true) => out.json(&json!({ "ok": true, "problems": [], "warnings": loaded.warnings })),
            (Err(sentence), false) => Err(CliError::Usage(sentence)),
            (Err(sentence), true) => {
                let origin = loaded.origins.get("arena.size");
                let problem = json!({ "path": "arena.size", "origin": origin, "message": sentence });
                out.json(&json!({ "ok": false, "problems": [problem], "warnings": loaded.warnings }))?;
                Err(CliError::ReportedUsage)
            }
        },
        (Err(CliError::Config(error)), true) => {
            out.json(&json!({ "ok": false, "problems": error.problems(), "warnings": [] }))?;
            Err(CliError::ReportedUsage)
        }
        (Err(error), _) => Err(error),
    }
}

fn show(args: &ShowArgs, out: &mut Out) -> Result<(), CliError> {
    let keys = args.connect.load(Vec::new())?.show();
    if args.json {
        return out.json(&keys);
    }
    if args.toml {
        return out.line(toml(&keys).trim_end());
    }
    let row = |key: &Shown| {
        let value = match key.value.as_str() {
            "" => "-".to_owned(),
            value => value.to_owned(),
        };
        let from = match key.written_as {
            Some(old) => format!("{}, as {old}", key.origin),
            None => key.origin.to_string(),
        };
        vec![key.path.to_owned(), value, from, key.doc.to_owned()]
    };
    let rows: Vec<Vec<String>> = keys.iter().map(row).collect();
    out.table(&["key", "value", "from", "meaning"], &rows)
}

fn toml(keys: &[Shown]) -> String {
    let mut text = String::from("# kvgate configuration. Lines that are commented out show the defaults.\n");
    let mut section = "";
    for key in keys {
        let (here, name) = key.path.split_once('.').unwrap_or(("", key.path));
        if here != section {
            section = here;
            let _ = writeln!(text, "\n[{section}]");
        }
        let off = if key.origin == SettingOrigin::Default {
            "# "
        } else {
            ""
        };
        let _ = writeln!(text, "# {} ({})", key.doc, key.accepts);
        let _ = writeln!(text, "{off}{name} = {}", value(key));
    }
    text
}

/// A key's value: bare where its default is a number or a truth value, else quoted; a bucket may be called `123`.
fn value(key: &Shown) -> String {
    let bare = |text: &str| matches!(text, "true" | "false") || text.parse::<u32>().is_ok();
    match bare(key.default) && bare(&key.value) {
        true => key.value.clone(),
        false => quoted(&key.value),
    }
}

/// A TOML basic string.
fn quoted(text: &str) -> String {
    let mut quoted = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => {
                let _ = write!(quoted, "\\u{:04X}", u32::from(c));
            }
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}
