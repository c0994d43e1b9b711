//! The program `kvgate`. Everything is in the library; the commands are in `tools/cli`.

fn main() -> std::process::ExitCode {
    kvgate::tools::cli::main()
}
