//! `kvgate doctor`: everything that a node needs, checked, with what to do.

use std::path::PathBuf;

use clap::Args;
use console::style;
use serde_json::json;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::args::ConnectArgs;
use super::error::CliError;
use super::logging;
use super::node::NodeArgs;
use super::output::{Out, count as count_of, printable, tell};
use crate::config::units::{ByteSize, MIB, parse_duration};
use crate::config::{Config, LogLevel, Override};
use crate::tools::doctor::{DoctorOptions, Finding, Part, Stop, Verdict, examine};

/// Checks all that a node needs: configuration, DNS, S3 and what it can do, memory, disks, GPU, ports, engines. Says what to
/// do about each thing that is wrong.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate doctor --config kvgate.toml
  kvgate doctor --endpoint http://rgw:8000 --bucket kv --python /opt/vllm/bin/python
  kvgate doctor --config kvgate.toml --compare http://other-node:9180
  kvgate doctor --skip engines --skip transfer --json

It writes small objects under .kvgate/ of the prefix and removes them again, also on Ctrl-C.
Run it as the user that runs kvgate, with the same environment.
Exit status: 1 if something will not work; warnings are no failure.")]
pub struct DoctorArgs {
    /// Longest time of one check.
    #[arg(long, value_name = "TIME", default_value = "30s")]
    timeout: String,
    /// A part to leave out: s3, transfer, memory, disks, gpu, api or engines. May be given more than once.
    #[arg(long, value_name = "PART", value_parser = part)]
    skip: Vec<Part>,
    /// Bytes that are written and read to see the speed.
    #[arg(long, value_name = "SIZE", default_value = "64MiB")]
    transfer_size: String,
    /// Python of an engine's environment [default: those on the path]. May be given more than once.
    #[arg(long, value_name = "FILE")]
    python: Vec<PathBuf>,
    /// A node whose spaces are compared with this node's: http://HOST:PORT, a socket, or a file with its status or a
    /// space.json. Given twice: these two are compared.
    #[arg(long, value_name = "NODE")]
    compare: Vec<String>,
    /// Report as JSON.
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    node: NodeArgs,
    #[command(flatten)]
    connect: ConnectArgs,
}

fn part(word: &str) -> Result<Part, String> {
    let found = Part::WORDS.iter().find(|(name, _)| *name == word);
    let words: Vec<&str> = Part::WORDS.iter().map(|(name, _)| *name).collect();
    found
        .map(|(_, part)| *part)
        .ok_or_else(|| format!("the parts are {}", words.join(", ")))
}

impl DoctorArgs {
    fn options(&self) -> Result<DoctorOptions, CliError> {
        let timeout = parse_duration(&self.timeout);
        let timeout = timeout.map_err(|error| CliError::usage(format!("--timeout: {error}")))?;
        let size: ByteSize = self
            .transfer_size
            .parse()
            .map_err(|error| CliError::usage(format!("--transfer-size: {error}")))?;
        if timeout.is_zero() || !(1..=1024 * MIB).contains(&size.bytes()) {
            return Err(CliError::usage(
                "--timeout must be more than 0, and --transfer-size from 1B to 1GiB",
            ));
        }
        Ok(DoctorOptions {
            timeout,
            skip: self.skip.clone(),
            transfer_bytes: usize::try_from(size.bytes()).unwrap_or(usize::MAX),
            pythons: self.python.clone(),
            compare: self.compare.clone(),
        })
    }
}

pub async fn run(args: DoctorArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let options = args.options()?;
    let socket = args.node.socket.as_ref().map(|path| Override {
        path: "api.socket",
        value: path.display().to_string(),
        flag: "--socket",
    });
    let loaded = match args.connect.load(socket.into_iter().collect()) {
        Ok(loaded) => Ok(loaded),
        Err(CliError::Config(error)) => Err(error),
        Err(error) => return Err(error),
    };
    // The findings tell what the log would warn of.
    let mut log = match &loaded {
        Ok(loaded) => loaded.config.log.clone(),
        Err(_) => Config::default().log,
    };
    log.level = LogLevel::Error;
    logging::init(&log, verbose);

    let stop = Stop::default();
    let watcher = tokio::spawn(stop_by_signal(stop.clone()));
    let (sender, mut findings) = mpsc::unbounded_channel();
    let examination = tokio::spawn({
        let stop = stop.clone();
        async move {
            // A receiver that is gone wants nothing more.
            examine(&loaded, &options, &stop, |finding| drop(sender.send(finding))).await;
        }
    });
    let (mut all, mut failure) = (Vec::new(), None);
    while let Some(finding) = findings.recv().await {
        if !args.json && failure.is_none() {
            // It goes on to its end: what was written must be removed.
            failure = show(&finding, out).err();
            if failure.is_some() {
                stop.now();
            }
        }
        all.push(finding);
    }
    watcher.abort();
    if let Err(error) = examination.await {
        return Err(CliError::Failed(error.to_string()));
    }
    if let Some(error) = failure {
        return Err(error);
    }
    conclude(&all, stop.is_set(), args.json, out)
}

async fn stop_by_signal(stop: Stop) {
    let (Ok(mut int), Ok(mut term)) = (signal(SignalKind::interrupt()), signal(SignalKind::terminate()))
    else {
        return;
    };
    tokio::select! {
        _ = int.recv() => {}
        _ = term.recv() => {}
    }
    tell("ending: what was written is removed first");
    stop.now();
}

fn show(finding: &Finding, out: &mut Out) -> Result<(), CliError> {
    let word = format!("{:<11}", finding.verdict.word());
    let word = match finding.verdict {
        Verdict::Ok => style(word).green(),
        Verdict::Warning => style(word).yellow(),
        Verdict::Failed => style(word).red().bold(),
        Verdict::NotChecked => style(word).dim(),
    };
    out.line(format_args!(
        "{word}  {:<13}  {}",
        finding.check,
        printable(&finding.seen)
    ))?;
    if let Some(advice) = &finding.advice {
        out.line(format_args!("{:<26}  -> {}", "", printable(advice)))?;
    }
    out.flush()
}

fn conclude(all: &[Finding], was_stopped: bool, json: bool, out: &mut Out) -> Result<(), CliError> {
    let count = |verdict| all.iter().filter(|finding| finding.verdict == verdict).count();
    let (ok, warnings) = (count(Verdict::Ok), count(Verdict::Warning));
    let (failed, not_checked) = (count(Verdict::Failed), count(Verdict::NotChecked));
    match json {
        true => out.json(&json!({
            "version": env!("CARGO_PKG_VERSION"),
            "findings": all,
            "ok": ok,
            "warnings": warnings,
            "failed": failed,
            "not_checked": not_checked,
            "stopped": was_stopped,
        }))?,
        false => out.line(format_args!(
            "\n{ok} ok, {}, {failed} failed, {not_checked} not checked",
            count_of(warnings as u64, "warning")
        ))?,
    }
    match failed > 0 || was_stopped {
        true => Err(CliError::Reported),
        false => Ok(()),
    }
}
