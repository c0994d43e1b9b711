//! `kvgate completions` and `kvgate man`: what a shell and `man` know of this command line.

use std::path::PathBuf;

use clap::{Args, Command};
use clap_complete::Shell;

use super::error::CliError;
use super::output::Out;

/// Writes the completions of a shell to the standard output.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate completions bash > /etc/bash_completion.d/kvgate
  kvgate completions zsh > /usr/share/zsh/site-functions/_kvgate
  kvgate completions fish > ~/.config/fish/completions/kvgate.fish")]
pub struct CompletionsArgs {
    shell: Shell,
}

/// Writes a manual page for each command into a folder.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate man /usr/local/share/man/man1")]
pub struct ManArgs {
    /// Folder for the pages; it is made if there is none.
    folder: PathBuf,
}

pub fn run(args: &CompletionsArgs, mut program: Command, out: &mut Out) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut program, "kvgate", &mut script);
    out.line(String::from_utf8_lossy(&script).trim_end())
}

pub fn man(args: &ManArgs, program: Command) -> Result<(), CliError> {
    std::fs::create_dir_all(&args.folder)
        .and_then(|()| clap_mangen::generate_to(program, &args.folder))
        .map_err(|error| CliError::usage(format!("can't write to {}: {error}", args.folder.display())))
}
