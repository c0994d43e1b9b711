//! A demo from its start to its end: opens the store, runs the phases, and removes what was stored.

use std::io::Write;
use std::path::Path;

use super::args::DemoArgs;
use super::error::DemoError;
use super::plan::Plan;
use super::session::Demo;
use crate::config::Config;
use crate::format::Space;
use crate::tools::s3_server::S3Server;

/// Runs the demo and prints the results; returns whether every byte came back unchanged. The objects are removed
/// also after a failure or Ctrl-C, unless they are to be kept.
pub async fn run(args: &DemoArgs, config: Config) -> Result<bool, DemoError> {
    let (spaces, shape) = args.shape()?;
    let plan = Plan::new(&spaces, shape, config.arena.size)?;
    if let Some(path) = &args.save_tokens {
        save_tokens(path, &plan)?;
    }
    let host = S3Server::start(&config, "kvgate-demo", args.keep).await?;
    let done = run_on(&host, spaces, plan, config, args).await;
    let (embedded, folder) = (host.is_embedded(), host.folder.clone());
    host.stop().await;
    let demo = done?;
    if args.json {
        let json = serde_json::to_string_pretty(demo.report()).map_err(std::io::Error::from)?;
        print(&format!("{json}\n"))?;
    } else {
        print(&demo.report().summary())?;
        print(&demo.report().advice(embedded, args.keep, folder.as_deref()))?;
    }
    Ok(demo.report().equal)
}

async fn run_on(
    host: &S3Server,
    spaces: Vec<Space>,
    plan: Plan,
    config: Config,
    args: &DemoArgs,
) -> Result<Demo, DemoError> {
    let mut demo = Demo::open(host.store.clone(), spaces, plan, config).await?;
    demo.report.place.clone_from(&host.place);
    demo.show_progress();
    if !args.json {
        print(&demo.report.header())?;
    }
    let phases = tokio::select! {
        result = phases(&mut demo) => result,
        _ = tokio::signal::ctrl_c() => Err(DemoError::Interrupted),
    };
    let removed = match args.keep {
        true => Ok(()),
        false => demo.remove().await,
    };
    demo.finish();
    if let (Err(_), Err(error)) = (&phases, &removed) {
        tracing::warn!(%error, model = demo.report.model, "the demo's objects could not be removed");
    }
    phases.and(removed)?;
    Ok(demo)
}

async fn phases(demo: &mut Demo) -> Result<(), DemoError> {
    demo.prefill_and_store().await?;
    demo.forget();
    demo.look_up().await?;
    demo.load_and_compare().await
}

fn save_tokens(path: &Path, plan: &Plan) -> Result<(), DemoError> {
    let conversations: Vec<&[u32]> = plan
        .conversations
        .iter()
        .map(|one| one.tokens.as_slice())
        .collect();
    let json = serde_json::to_vec(&conversations).map_err(std::io::Error::from)?;
    std::fs::write(path, json).map_err(|source| DemoError::SaveTokens {
        path: path.into(),
        source,
    })
}

fn print(text: &str) -> Result<(), DemoError> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}
