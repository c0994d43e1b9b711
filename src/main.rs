fn main() -> std::process::ExitCode {
    kvgate::cli::main()
}
