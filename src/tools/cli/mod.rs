//! The command line: a file for each command, over the library. Reports go to the standard output, as text or with
//! `--json` as one JSON document; progress, questions, logs and errors go to the standard error.
//!
//! Exit status: 0 done, 1 failed (also: damage found, something unknown, nobody answers), 2 usage or configuration.

mod args;
mod bench;
mod bucket;
mod completions;
mod config;
mod demo;
mod doctor;
mod error;
mod flush;
mod gc;
mod gpu;
mod health;
mod input;
mod interrupts;
mod lifecycle;
mod logging;
mod lookup;
mod ls;
mod node;
mod output;
mod picture;
mod prefetch;
mod progress;
mod prompt;
mod rekey;
mod replay;
mod rm;
mod serve;
mod size;
mod stat;
mod top;
mod trace;
mod usage;
mod verify;

use std::ffi::OsString;
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use error::CliError;
use output::Out;

/// S3-native, content-addressed KV cache for LLM inference.
#[derive(Debug, Parser)]
#[command(name = "kvgate", version, propagate_version = true, after_help = AFTER_HELP)]
pub struct Cli {
    /// Log more: -v what happens for each request, -vv what happens inside.
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Examples:
  kvgate demo
  kvgate bench
  kvgate serve --embedded /tmp/kvgate-data --socket /tmp/kvgate.sock
  kvgate size --model qwen3-32b --tp 4
  kvgate doctor --config kvgate.toml
  kvgate ls --endpoint http://rgw:8000 --bucket kv
  kvgate lookup --bucket kv --model llama-3-8b --revision 62bd457 --tokens prompt.txt

Credentials come from the AWS chain: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, and so on.
Exit status: 0 done, 1 failed, 2 usage or configuration.";

#[derive(Debug, Subcommand)]
enum Command {
    Serve(serve::ServeArgs),
    Health(health::HealthArgs),
    Flush(flush::FlushArgs),
    Prefetch(prefetch::PrefetchArgs),
    Demo(demo::DemoCommand),
    Doctor(doctor::DoctorArgs),
    Bench(bench::BenchArgs),
    Lookup(lookup::LookupArgs),
    Ls(ls::LsArgs),
    Stat(stat::StatArgs),
    Top(top::TopArgs),
    Trace(trace::TraceArgs),
    Verify(verify::VerifyArgs),
    Rm(rm::RmArgs),
    Usage(usage::UsageArgs),
    Gc(gc::GcArgs),
    Rekey(rekey::RekeyArgs),
    #[command(subcommand)]
    Lifecycle(lifecycle::LifecycleCommand),
    Size(size::SizeArgs),
    Replay(replay::ReplayArgs),
    #[command(subcommand)]
    Gpu(gpu::GpuCommand),
    #[command(subcommand)]
    Config(config::ConfigCommand),
    Completions(completions::CompletionsArgs),
    Man(completions::ManArgs),
}

/// The whole program.
pub fn main() -> ExitCode {
    ExitCode::from(main_of(std::env::args_os()))
}

/// The same with these arguments, the program's name first. Returns its exit status.
pub fn main_of(arguments: impl IntoIterator<Item = impl Into<OsString> + Clone>) -> u8 {
    let cli = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli,
        Err(error) => {
            // If this fails, there is no one left to tell.
            let _ = error.print();
            return u8::try_from(error.exit_code()).unwrap_or(2);
        }
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let result = match runtime {
        Ok(runtime) => {
            let result = runtime.block_on(run(cli));
            // A hanging name lookup in a thread of its own must not keep the process.
            runtime.shutdown_background();
            result
        }
        Err(error) => Err(CliError::Failed(format!("can't start: {error}"))),
    };
    match result {
        Ok(()) => 0,
        Err(error) => error.report(),
    }
}

/// Runs one command.
pub async fn run(cli: Cli) -> Result<(), CliError> {
    let mut out = Out::stdout();
    let result = dispatch(cli, &mut out).await;
    // Results from before a failure are written too.
    let flushed = out.flush();
    result.and(flushed)
}

async fn dispatch(cli: Cli, out: &mut Out) -> Result<(), CliError> {
    let verbose = cli.verbose;
    match cli.command {
        Command::Serve(args) => serve::run(args, verbose, out).await,
        Command::Health(args) => health::run(args, out).await,
        Command::Flush(args) => flush::run(args, verbose, out).await,
        Command::Prefetch(args) => prefetch::run(args, verbose, out).await,
        Command::Demo(args) => demo::run(args, verbose).await,
        Command::Doctor(args) => doctor::run(args, verbose, out).await,
        Command::Bench(args) => bench::run(args, verbose, out).await,
        Command::Lookup(args) => lookup::run(args, verbose, out).await,
        Command::Ls(args) => ls::run(args, verbose, out).await,
        Command::Stat(args) => stat::run(args, verbose, out).await,
        Command::Top(args) => top::run(args, out).await,
        Command::Trace(args) => trace::run(args, out).await,
        Command::Verify(args) => verify::run(args, verbose, out).await,
        Command::Rm(args) => rm::run(args, verbose, out).await,
        Command::Usage(args) => usage::run(args, verbose, out).await,
        Command::Gc(args) => gc::run(args, verbose, out).await,
        Command::Rekey(args) => rekey::run(args, verbose, out).await,
        Command::Lifecycle(command) => lifecycle::run(command, verbose, out).await,
        Command::Size(args) => size::run(&args, out),
        Command::Replay(args) => replay::run(&args, out),
        Command::Gpu(command) => gpu::run(command, verbose, out).await,
        Command::Config(command) => config::run(command, out),
        Command::Completions(args) => completions::run(&args, Cli::command(), out),
        Command::Man(args) => completions::man(&args, Cli::command()),
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn flags_do_not_contradict_each_other() {
        <super::Cli as clap::CommandFactory>::command().debug_assert();
    }
}
