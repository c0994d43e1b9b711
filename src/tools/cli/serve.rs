//! `kvgate serve`: the command around `node/daemon`.

use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;

use super::args::ConnectArgs;
use super::error::CliError;
use super::logging;
use super::output::{Out, tell};
use crate::cache::gateway::open_store;
use crate::config::{Config, Override, read_keys};
use crate::node::daemon::{Daemon, has_room};
use crate::s3::object::ObjectStore;
use crate::tools::s3_server::{S3Server, S3ServerError};

/// Serves this node's engines: lookups, loads and stores over a unix socket, through a shared arena.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  kvgate serve --embedded /tmp/kvgate-data --socket /tmp/kvgate.sock
  kvgate serve --config /etc/kvgate.toml
  kvgate serve --endpoint http://rgw:8000 --bucket kv --listen 127.0.0.1:9180

SIGTERM stores what is left and ends; SIGHUP reloads log level, keys and token. The status page is at http://LISTEN/.")]
pub struct ServeArgs {
    /// Unix socket to listen on ([api] socket).
    #[arg(long, value_name = "PATH")]
    socket: Option<String>,
    /// Address to listen on as well ([api] listen).
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<String>,
    /// Memory for slots ([arena] size).
    #[arg(long, value_name = "SIZE")]
    arena_size: Option<String>,
    /// File of the arena ([arena] path).
    #[arg(long, value_name = "PATH")]
    arena_path: Option<String>,
    /// An S3 server inside the process instead of a real one, its data in this folder: for trying out.
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["endpoint", "bucket"])]
    embedded: Option<PathBuf>,
    #[command(flatten)]
    connect: ConnectArgs,
}

pub async fn run(args: ServeArgs, verbose: u8, out: &mut Out) -> Result<(), CliError> {
    let config = args.config()?;
    logging::init(&config.log, verbose);
    if config.keys.file.is_some() {
        keep_memory_private();
    }
    let (store, host) = args.store(&config).await?;
    let reload = args.reload(verbose);
    let daemon = Daemon::start(&config, store, reload)
        .await
        .map_err(|error| CliError::usage(error.to_string()))?;
    out.line(format_args!("kvgate {} serves", env!("CARGO_PKG_VERSION")))?;
    out.field("socket", config.api.socket.display())?;
    if let Some(address) = daemon.address() {
        out.field("status", format_args!("http://{address}/"))?;
    }
    let arena = daemon.node().gateway().arena();
    if let Some(path) = arena.path() {
        out.field(
            "arena",
            format_args!("{} ({})", path.display(), config.arena.size),
        )?;
    }
    if let Some(host) = &host {
        out.field("S3", format_args!("{}, bucket {}", host.place, host.bucket))?;
    }
    // The process that started the daemon waits for these lines.
    out.flush()?;
    let ended = daemon.run(std::future::pending()).await;
    if let Some(host) = host {
        host.stop().await;
    }
    match ended
        .map_err(|error| CliError::Failed(error.to_string()))?
        .dropped
    {
        0 => Ok(()),
        dropped => {
            tell(format_args!(
                "{dropped} chunks were not stored and are lost: S3 did not take them within [store] drain"
            ));
            Err(CliError::Reported)
        }
    }
}

impl ServeArgs {
    fn config(&self) -> Result<Config, CliError> {
        let flags = [
            ("api.socket", "--socket", &self.socket),
            ("api.listen", "--listen", &self.listen),
            ("arena.size", "--arena-size", &self.arena_size),
            ("arena.path", "--arena-path", &self.arena_path),
        ];
        let given = flags.into_iter().filter_map(|(path, flag, value)| {
            let value = value.clone()?;
            Some(Override { path, value, flag })
        });
        let config = self.connect.load(given.collect())?.config;
        has_room(&config).map_err(CliError::Usage)?;
        Ok(config)
    }

    async fn store(&self, config: &Config) -> Result<(Arc<dyn ObjectStore>, Option<S3Server>), CliError> {
        let Some(folder) = &self.embedded else {
            return Ok((open_store(config, None).await?, None));
        };
        let host = S3Server::embedded_in(config, "kvgate", folder).await.map_err(
            |error: S3ServerError| match error.is_usage() {
                true => CliError::usage(error.to_string()),
                false => CliError::Failed(error.to_string()),
            },
        )?;
        Ok((Arc::clone(&host.store), Some(host)))
    }

    /// Reloads the log's level and the keys of tenants; all other settings need a restart.
    fn reload(&self, verbose: u8) -> crate::node::api::Reload {
        let connect = self.connect.clone();
        Box::new(move |gateway| {
            let loaded = connect.load(Vec::new()).map_err(|error| error.to_string())?;
            let mut reloaded = vec!["log.level".to_owned()];
            if loaded.config.keys.file.is_some() {
                // A command may take a while.
                let keys = tokio::task::block_in_place(|| read_keys(&loaded.config.keys));
                gateway.replace_keys(&keys.map_err(|error| error.to_string())?);
                reloaded.push("keys".to_owned());
            }
            logging::set_level(loaded.config.log.level, verbose);
            Ok(reloaded)
        })
    }
}

/// No core file, and no other process of the same user, has the keys in this one's memory and environment.
fn keep_memory_private() {
    use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
    let none = Rlimit {
        current: Some(0),
        maximum: Some(0),
    };
    let kept = setrlimit(Resource::Core, none).and(set_dumpable_behavior(DumpableBehavior::NotDumpable));
    if let Err(error) = kept {
        tracing::warn!(%error, "a core file after a crash may have the keys in it: set LimitCORE=0");
    }
}
