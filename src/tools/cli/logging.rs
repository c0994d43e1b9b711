use std::io::IsTerminal;
use std::sync::OnceLock;

use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::prelude::*;
use tracing_subscriber::{Registry, reload};

use crate::config::{Log, LogFormat, LogLevel};

/// Libraries below us. They stay quiet, and even when enabled never log a request's headers, which hold session
/// tokens.
const LIBRARIES: [&str; 7] = ["s3s", "aws", "hyper", "rustls", "h2", "config", "hickory"];

/// Logs to the standard error. Once in a process; a second call changes nothing.
pub fn init(log: &Log, verbose: u8) {
    init_without(log, verbose, None);
}

/// Changes the level of the log from here on. Does nothing before [`init`].
pub fn set_level(level: LogLevel, verbose: u8) {
    if let Some(filter) = FILTER.get() {
        // An error: the process ends, and its log with it.
        let _ = filter.reload(targets(level, verbose, None));
    }
}

/// The log belongs to the process, not to one of its parts.
static SET: OnceLock<Box<dyn Fn(EnvFilter) + Send + Sync>> = OnceLock::new();

/// The same for a command that itself reports the warnings of the module `told`.
pub fn init_without(log: &Log, verbose: u8, told: Option<&str>) {
    let (filter, handle) = reload::Layer::new(targets(log.level, verbose, told));
    let lines = tracing_subscriber::fmt::layer()
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    // On an error the first call's log is in use.
    match log.format {
        LogFormat::Text => {
            let builder = builder.with_filter_reloading();
            let handle = builder.reload_handle();
            if builder.try_init().is_ok() {
                let _ = SET.set(Box::new(move |filter| drop(handle.reload(filter))));
            }
        }
        LogFormat::Json => {
            let builder = builder.json().with_filter_reloading();
            let handle = builder.reload_handle();
            if builder.try_init().is_ok() {
                let _ = SET.set(Box::new(move |filter| drop(handle.reload(filter))));
            }
        }
    }
}

fn targets(level: LogLevel, verbose: u8, told: Option<&str>) -> Targets {
    let ours = match (verbose, level) {
        (0, level) => level,
        (1, level) if level != LogLevel::Trace => LogLevel::Debug,
        _ => LogLevel::Trace,
    };
    // The caller of a failed request reports its meaning.
    let theirs = if verbose == 0 { "error" } else { "info" };
    let theirs = LIBRARIES.map(|library| match (library, verbose) {
        // The embedded server's refusals reach its client, which reports them.
        ("s3s", 0) => "s3s=off".to_owned(),
        _ => format!("{library}={theirs}"),
    });
    // The SDK would have connections closed whose server failed; ours are not its own.
    let poisoning = "aws_smithy_runtime::client::http::connection_poisoning=off";
    let filter = format!("{ours},{},{poisoning}", theirs.join(","));
    match (verbose, told) {
        (0, Some(told)) => format!("{filter},{told}=error"),
        _ => filter,
    }
}
