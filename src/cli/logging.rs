use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::config::{Log, LogFormat, LogLevel};

/// Libraries below us. They stay quiet, and even when asked are never as verbose as to log a request's headers:
/// these hold session tokens.
const LIBRARIES: [&str; 7] = ["s3s", "aws", "hyper", "rustls", "h2", "config", "hickory"];

/// Logs to the standard error. Once a process; a second call changes nothing.
pub fn init(log: &Log, verbose: u8) {
    init_without(log, verbose, None);
}

/// The same for a command that itself tells what the module `told` would warn of.
pub fn init_without(log: &Log, verbose: u8, told: Option<&str>) {
    let ours = match (verbose, log.level) {
        (0, level) => level,
        (1, level) if level != LogLevel::Trace => LogLevel::Debug,
        _ => LogLevel::Trace,
    };
    // What a failed request means is told by whoever made it.
    let theirs = if verbose == 0 { "error" } else { "info" };
    let theirs = LIBRARIES.map(|library| match (library, verbose) {
        // The embedded server's refusals reach its client, who says what they mean.
        ("s3s", 0) => "s3s=off".to_owned(),
        _ => format!("{library}={theirs}"),
    });
    let mut filter = format!("{ours},{}", theirs.join(","));
    if let (0, Some(told)) = (verbose, told) {
        filter = format!("{filter},{told}=error");
    }
    let builder = tracing_subscriber::fmt()
        .with_env_filter(EnvFilter::new(filter))
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    let _ = match log.format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().try_init(),
    };
}
