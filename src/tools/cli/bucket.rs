//! The bucket that a command works on: opened from the configuration, with the space that the command names.

use std::sync::Arc;

use tokio::time::Instant;

use super::args::SpaceRef;
use super::error::CliError;
use crate::arena::{Arena, ArenaOptions};
use crate::cache::gateway::{Gateway, GatewayOptions, OpenError, open_store};
use crate::config::Config;
use crate::format::{Space, SpaceId};
use crate::inventory::{Inventory, SpaceJson};
use crate::protocol::ProbeMode;
use crate::s3::object::{Capabilities, ObjectStore};

/// The configured bucket, which exists.
pub struct OpenBucket {
    pub config: Config,
    pub inventory: Inventory,
    store: Arc<dyn ObjectStore>,
    options: GatewayOptions,
}

impl OpenBucket {
    /// Opens the bucket. Fails with the problem of endpoint, bucket or credentials.
    pub async fn open(config: Config) -> Result<Self, CliError> {
        let options = GatewayOptions::with_keys(&config)
            .await
            .map_err(OpenError::from)?;
        let store = open_store(&config, None).await?;
        let limit = config.s3.request_timeout;
        // Needed also because a HEAD can't tell a missing bucket from a missing object.
        store.check_bucket(Instant::now() + limit).await?;
        let (keys, keyring) = (options.keys.clone(), options.keyring.clone());
        Ok(Self {
            inventory: Inventory::new(Arc::clone(&store), keys, keyring, limit),
            options,
            config,
            store,
        })
    }

    /// Server, bucket and prefix, for a file that must not be used with others.
    pub fn place(&self) -> String {
        let s3 = &self.config.s3;
        let endpoint = s3.endpoint.as_deref().unwrap_or("AWS");
        format!(
            "{endpoint} {} {}",
            s3.bucket.as_deref().unwrap_or_default(),
            s3.prefix
        )
    }

    /// A gateway that only reads: it probes nothing, since that would write to the bucket, and its arena is its
    /// own, not the file of a `kvgate serve` with the same configuration.
    pub fn reader(&self, arena_bytes: usize) -> Result<Gateway, CliError> {
        let arena = Arena::new(&ArenaOptions {
            size: arena_bytes,
            ..ArenaOptions::default()
        });
        let capabilities = Capabilities {
            attributes: self.config.s3.probe == ProbeMode::Attributes,
            ..Capabilities::default()
        };
        Ok(Gateway::new(
            Arc::clone(&self.store),
            arena.map_err(OpenError::from)?,
            capabilities,
            self.options.clone(),
        ))
    }

    /// The space itself; read from the bucket where only its id is given.
    pub async fn space(&self, space: SpaceRef) -> Result<Space, CliError> {
        let (key, id) = match space {
            SpaceRef::Known(space) => return Ok(space),
            SpaceRef::Id(key, id) => (key, id),
        };
        match self.inventory.read_space(key).await? {
            SpaceJson::Good(space) => same(space, id),
            SpaceJson::Missing => Err(self.unknown_space(&key.to_string())),
            SpaceJson::Damaged(reason) => Err(CliError::usage(format!(
                "{} can't be used: {reason}. Describe the space in a file and give --space FILE",
                self.inventory.keys().space_json(key)
            ))),
            SpaceJson::Unreadable(reason) => Err(CliError::usage(format!(
                "{} can't be used: {reason}",
                self.inventory.keys().space_json(key)
            ))),
        }
    }

    pub fn unknown_space(&self, space: &str) -> CliError {
        let bucket = self.config.s3.bucket.as_deref().unwrap_or_default();
        let prefix = match self.config.s3.prefix.as_str() {
            "" => "without a prefix".to_owned(),
            prefix => format!("under prefix {prefix:?}"),
        };
        CliError::usage(format!(
            "unknown space: {space} is not in bucket {bucket} {prefix}. `kvgate ls` lists the spaces; check --bucket \
             and --prefix"
        ))
    }
}

/// Checks the whole id: the key has only half of it.
fn same(space: Space, id: Option<SpaceId>) -> Result<Space, CliError> {
    match id {
        Some(id) if id != space.id() => Err(CliError::usage(format!(
            "unknown space: {id}; the bucket has {} with the same first half",
            space.id()
        ))),
        _ => Ok(space),
    }
}
