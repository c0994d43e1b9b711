use clap::Parser;
#[derive(Parser)]
struct C {
    #[arg(long)]
    endpoint: Option<String>,
    #[arg(long)]
    bucket: Option<String>,
    #[command(flatten)]
    demo: kvgate::demo::DemoArgs,
}
#[tokio::main]
async fn main() -> std::process::ExitCode {
    let c = C::parse();
    let mut config = match kvgate::config::load(None, kvgate::config::process_env(), &[]) {
        Ok(l) => l.config,
        Err(e) => {
            eprintln!("{e}");
            return 2.into();
        }
    };
    config.s3.endpoint = c.endpoint.or(config.s3.endpoint);
    config.s3.bucket = c.bucket.or(config.s3.bucket);
    match kvgate::demo::run(&c.demo, config).await {
        Ok(true) => 0.into(),
        Ok(false) => 1.into(),
        Err(e) => {
            eprintln!("error: {e}");
            if e.is_usage() { 2.into() } else { 1.into() }
        }
    }
}
