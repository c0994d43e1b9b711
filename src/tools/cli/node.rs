//! Connections of commands to a running `kvgate serve`.

use std::path::PathBuf;
use std::time::Duration;

use clap::Args;

use super::args::{ConnectArgs, SpaceRef};
use super::error::CliError;
use crate::config::Config;
use crate::engine::client::{Client, ClientError, DaemonAddress};

/// The daemon that is meant.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Daemon")]
pub struct NodeArgs {
    /// Unix socket of the `kvgate serve` to ask ([api] socket).
    #[arg(long, value_name = "PATH")]
    pub socket: Option<PathBuf>,
}

/// How long an answer may take beyond the time that the call gives the daemon.
const PATIENCE: Duration = Duration::from_secs(5);

impl NodeArgs {
    /// A client of the named daemon, or else of the configured one.
    pub fn client(&self, config: &Config) -> Client {
        let socket = self.socket.as_ref().unwrap_or(&config.api.socket);
        Client::new(DaemonAddress::Unix(socket.clone()))
            .trusting(config.api.socket_owner)
            .with_patience(PATIENCE)
    }
}

/// The configuration, of which only the socket is needed.
pub fn config(connect: &ConnectArgs) -> Result<Config, CliError> {
    Ok(connect.load(Vec::new())?.config)
}

/// The space's id for calls; a known space is declared there.
pub async fn declared(client: &Client, space: &SpaceRef) -> Result<String, CliError> {
    match space {
        SpaceRef::Known(space) => Ok(client.declare(space).await?.space_id.to_string()),
        SpaceRef::Id(_, Some(id)) => Ok(id.to_string()),
        SpaceRef::Id(key, None) => Ok(key.to_string()),
    }
}

impl From<ClientError> for CliError {
    fn from(error: ClientError) -> Self {
        match &error {
            ClientError::Stranger { .. } => Self::usage(error.to_string()),
            ClientError::Late(_) => Self::Failed(format!(
                "{error} Its log says what it did last (`journalctl -u kvgate`), and `systemctl restart kvgate` ends it"
            )),
            _ => Self::Failed(error.to_string()),
        }
    }
}
