fn main() -> std::process::ExitCode {
    kvgate::tools::cli::main()
}
