//! The program's log: level and format as configured, `-v` on top; libraries are quieter than kvgate.

use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;
use tracing_subscriber::{Registry, reload};

use crate::config::{Log, LogFormat, LogLevel};

/// Libraries below us. They stay quiet, and even when asked are never as verbose as to log a request's headers:
/// these hold session tokens.
const LIBRARIES: [&str; 7] = ["s3s", "aws", "hyper", "rustls", "h2", "config", "hickory"];

/// Logs to the standard error. Once a process; a second call changes nothing.
pub fn init(log: &Log, verbose: u8) {
    init_without(log, verbose, None);
}

/// Logs from here on what this level says. Nothing happens before [`init`].
pub fn set_level(level: LogLevel, verbose: u8) {
    if let Some(filter) = FILTER.get() {
        // An error: the process ends, and its log with it.
        let _ = filter.reload(targets(level, verbose, None));
    }
}

/// Logging is the process's, not of one of its parts.
static FILTER: OnceLock<reload::Handle<Targets, Registry>> = OnceLock::new();

/// The same for a command that itself tells what the module `told` would warn of.
pub fn init_without(log: &Log, verbose: u8, told: Option<&str>) {
    let (filter, handle) = reload::Layer::new(targets(log.level, verbose, told));
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let lines = match log.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().boxed(),
    };
    // An error: the first call's is in use.
    if tracing_subscriber::registry()
        .with(filter)
        .with(lines)
        .try_init()
        .is_ok()
    {
        let _ = FILTER.set(handle);
    }
}

fn targets(level: LogLevel, verbose: u8, told: Option<&str>) -> Targets {
    let ours = match (verbose, level) {
        (0, level) => level,
        (1, level) if level != LogLevel::Trace => LogLevel::Debug,
        _ => LogLevel::Trace,
    };
    // The call that made a failed request tells what it means.
    let theirs = if verbose == 0 {
        LevelFilter::ERROR
    } else {
        LevelFilter::INFO
    };
    let mut targets = Targets::new()
        .with_default(level_filter(ours))
        .with_targets(LIBRARIES.map(|library| (library, theirs)))
        // The SDK would have connections closed whose server failed; ours are not its own.
        .with_target(
            "aws_smithy_runtime::client::http::connection_poisoning",
            LevelFilter::OFF,
        );
    if verbose == 0 {
        // The embedded server's refusals reach its client, which says what they mean.
        targets = targets.with_target("s3s", LevelFilter::OFF);
        targets = targets.with_targets(told.map(|told| (told, LevelFilter::ERROR)));
    }
    targets
}

fn level_filter(level: LogLevel) -> LevelFilter {
    match level {
        LogLevel::Error => LevelFilter::ERROR,
        LogLevel::Warn => LevelFilter::WARN,
        LogLevel::Info => LevelFilter::INFO,
        LogLevel::Debug => LevelFilter::DEBUG,
        LogLevel::Trace => LevelFilter::TRACE,
    }
}
