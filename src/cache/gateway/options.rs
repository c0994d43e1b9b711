//! A gateway's limits, read from the configuration only here, and the opening of its bucket.

use std::sync::Arc;
use std::time::Duration;

use aws_credential_types::Credentials;

use crate::arena::{ArenaError, ArenaOptions};
use crate::cache::existence::CacheLimits;
use crate::config::units::ByteSize;
use crate::config::{Config, KeysError, read_keys};
use crate::format::{DigestKind, KeyError, KeyPrefix, Keyring, PlaneDigest, Space};
use crate::s3::dns::DnsOptions;
use crate::s3::fanout::{AttemptPolicy, BreakerOptions, EndpointOptions, WindowOptions};
use crate::s3::object::{ObjectError, ObjectStore, S3, S3ClientError, S3Options};

/// The settings of a gateway, with all of its limits.
#[derive(Debug, Clone)]
pub struct GatewayOptions {
    pub keys: KeyPrefix,
    /// Of spaces without protection.
    pub digest: DigestKind,
    /// The keys of tenants, for spaces with a protection.
    pub keyring: Keyring,
    /// Bytes that one ranged GET asks for, approximately; see [`part_bytes_of`](Self::part_bytes_of).
    pub part_bytes: usize,
    /// Bytes that one GET asks for in layer order, where it asks for whole layers.
    pub layer_part_bytes: usize,
    /// Bytes that all GETs together may have in flight; at least one part.
    pub get_bytes_max: usize,
    pub put_bytes_max: usize,
    pub cache: CacheLimits,
    pub lookup_deadline: Duration,
    /// Limit of HEADs in flight.
    pub lookup_concurrency: usize,
    /// Positions that strategy `prefix` asks for in one round.
    pub lookup_probes: usize,
    /// Chunks of lookups that are remembered: so many for run hints, and so many without an answer.
    pub run_chunks: usize,
    /// The longest pause before S3 is asked for a chunk whose lookup could not reach it.
    pub outage_pause_max: Duration,
    /// Interval at which a repeated warning is logged, with its count.
    pub log_repeat: Duration,
}

/// GETs that a large load has in flight at least.
const PARTS_AT_LEAST: usize = 8;

/// The reason why a gateway can't start.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("no bucket: give --bucket NAME, or [s3] bucket in the configuration, or KVGATE__S3__BUCKET")]
    NoBucket,
    #[error(transparent)]
    Client(#[from] S3ClientError),
    #[error(transparent)]
    Arena(#[from] ArenaError),
    #[error(transparent)]
    Object(#[from] ObjectError),
    #[error(transparent)]
    Keys(#[from] KeysError),
}

impl GatewayOptions {
    /// With the keys of tenants, which may come from commands.
    pub async fn with_keys(config: &Config) -> Result<Self, KeysError> {
        let keys = config.keys.clone();
        let keyring = match tokio::task::spawn_blocking(move || read_keys(&keys)).await {
            Ok(keyring) => keyring?,
            // The runtime ends.
            Err(_) => Keyring::default(),
        };
        Ok(Self {
            keyring,
            ..Self::from(config)
        })
    }

    /// Bytes that one ranged GET asks for in a load of `bytes`: twice as many in a large load, which takes half the requests
    /// then. It is large when others wait for their turn all the time, and as long as enough may be in flight to keep every
    /// endpoint busy.
    pub fn part_bytes_of(&self, bytes: usize) -> usize {
        let twice = self.part_bytes.saturating_mul(2);
        let is_large = bytes / 2 >= self.get_bytes_max && self.get_bytes_max / PARTS_AT_LEAST >= twice;
        if is_large { twice } else { self.part_bytes }
    }

    /// How new objects of a space are digested.
    pub fn writes(&self, space: &Space) -> Result<PlaneDigest, KeyError> {
        self.keyring.writes(space, self.digest)
    }
}

/// Without the keys of tenants.
impl From<&Config> for GatewayOptions {
    fn from(config: &Config) -> Self {
        Self {
            keys: KeyPrefix::new(&config.s3.prefix),
            digest: config.s3.digest,
            keyring: Keyring::default(),
            part_bytes: bytes(config.s3.part_size),
            layer_part_bytes: bytes(config.load.layer_part_size),
            get_bytes_max: bytes(config.load.in_flight),
            put_bytes_max: bytes(config.store.in_flight),
            cache: CacheLimits {
                present_ttl: config.lookup.present_ttl,
                absent_ttl: config.lookup.absent_ttl,
                bytes: bytes(config.lookup.cache_size),
            },
            lookup_deadline: config.lookup.deadline,
            lookup_concurrency: config.lookup.concurrency as usize,
            lookup_probes: config.lookup.probes as usize,
            run_chunks: config.lookup.run_chunks as usize,
            outage_pause_max: config.store.retry_max,
            log_repeat: config.log.repeat,
        }
    }
}

fn bytes(size: ByteSize) -> usize {
    usize::try_from(size.bytes()).unwrap_or(usize::MAX)
}

/// Opens the configured bucket. Credentials come from the AWS chain unless given.
pub async fn open_store(
    config: &Config,
    credentials: Option<Credentials>,
) -> Result<Arc<dyn ObjectStore>, OpenError> {
    let options = S3Options {
        credentials,
        ..s3_options(config)?
    };
    Ok(Arc::new(S3::connect(&options).await?))
}

/// How the configured bucket is reached; credentials come from the AWS chain. Fails where no bucket is configured.
pub fn s3_options(config: &Config) -> Result<S3Options, OpenError> {
    Ok(S3Options {
        endpoint: config.s3.endpoint.clone(),
        bucket: config.s3.bucket.clone().ok_or(OpenError::NoBucket)?,
        prefix: KeyPrefix::new(&config.s3.prefix).as_str().to_owned(),
        region: config.s3.region.clone(),
        // AWS promises the bucket in the host name alone; other servers often lack the name for it.
        path_style: config.s3.path_style.unwrap_or(config.s3.endpoint.is_some()),
        ca_file: config.s3.ca_file.clone(),
        connect_timeout: config.s3.connect_timeout,
        read_timeout: config.s3.read_timeout,
        request_timeout: config.s3.request_timeout,
        idle_timeout: config.s3.idle_timeout,
        connections_max: config.s3.connections as usize,
        answer_bytes_max: bytes(config.s3.answer_max),
        credentials: None,
        credentials_ttl: config.s3.credentials_ttl,
        attempts: AttemptPolicy {
            retries: config.s3.retries,
            base: config.s3.retry_base,
            max: config.s3.retry_max,
            budget: config.s3.retry_budget,
            hedges: config.endpoints.hedges,
        },
        endpoints: EndpointOptions {
            window: WindowOptions {
                start: bytes(config.endpoints.window),
                min: bytes(config.endpoints.window_min),
                max: bytes(config.endpoints.window_max),
            },
            breaker: BreakerOptions {
                failures: config.endpoints.breaker_failures,
                open: config.endpoints.breaker_open,
                open_max: config.endpoints.breaker_open_max,
            },
            hedge_min: config.endpoints.hedge_min,
            subset: config.endpoints.subset as usize,
        },
        dns: DnsOptions {
            servers: config.dns.servers.clone(),
            tcp: config.dns.tcp,
            min_ttl: config.dns.min_ttl,
            max_ttl: config.dns.max_ttl,
            timeout: config.dns.timeout,
        },
        srv: config.dns.srv.clone(),
    })
}

/// The arena options of a library.
pub(super) fn arena(config: &Config) -> ArenaOptions {
    ArenaOptions {
        size: bytes(config.arena.size),
        path: config.arena.path.clone(),
        huge_pages: config.arena.huge_pages,
        prefault: config.arena.prefault,
        mlock: config.arena.mlock,
        ..ArenaOptions::default()
    }
}
