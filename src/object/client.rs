use std::path::PathBuf;
use std::time::Duration;

use aws_config::{BehaviorVersion, Region, SdkConfig};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    Builder, Credentials, RequestChecksumCalculation, ResponseChecksumValidation,
    StalledStreamProtectionConfig,
};
use aws_smithy_runtime_api::box_error::BoxError;

use crate::net::{self, Connector, ConnectorOptions, TlsError};

/// How to reach a bucket. Credentials come from the AWS chain (environment, profile, web identity, container,
/// instance) unless given.
#[derive(Debug, Clone)]
pub struct S3Options {
    /// `http(s)://host[:port]`; None for AWS.
    pub endpoint: Option<String>,
    pub bucket: String,
    pub region: String,
    pub path_style: bool,
    /// PEM certificates to trust beside the system's.
    pub ca_file: Option<PathBuf>,
    pub connect_timeout: Duration,
    /// Longest time in which not a byte is sent or received.
    pub read_timeout: Duration,
    /// Longest time for one attempt.
    pub request_timeout: Duration,
    /// How long a connection is kept without a request.
    pub idle_timeout: Duration,
    /// Connections in use at a time.
    pub connections_max: usize,
    /// Bytes of an answer that is no chunk: an error, a page of a listing.
    pub answer_bytes_max: usize,
    pub credentials: Option<Credentials>,
}

/// The options can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("can't use [s3] endpoint {endpoint} with this bucket: {cause}")]
    Endpoint { endpoint: String, cause: BoxError },
}

/// Our connector, as the options want it.
pub(super) fn connector(options: &S3Options) -> Result<Connector, ClientError> {
    Ok(Connector::new(ConnectorOptions {
        tls: net::client_config(options.ca_file.as_deref())?,
        connect_timeout: options.connect_timeout,
        stall_timeout: options.read_timeout,
        idle_timeout: options.idle_timeout,
        connections_max: options.connections_max,
        answer_bytes_max: options.answer_bytes_max,
    }))
}

/// What every client of AWS's shares: region, credentials, our connector.
pub(super) async fn shared(options: &S3Options, http: Connector) -> SdkConfig {
    let shared = aws_config::defaults(BehaviorVersion::latest())
        .http_client(http)
        .region(Region::new(options.region.clone()))
        .retry_config(RetryConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled());
    let shared = match &options.credentials {
        Some(credentials) => shared.credentials_provider(credentials.clone()),
        None => shared,
    };
    shared.load().await
}

/// The SDK's client, for all calls but HEAD and ranged GET.
pub(super) fn client(options: &S3Options, shared: &SdkConfig) -> Client {
    // The connector watches the time without a byte: the SDK's read time-out would count a PUT's whole body.
    let timeouts = TimeoutConfig::builder().connect_timeout(options.connect_timeout);
    let mut config = Builder::from(shared)
        .force_path_style(options.path_style)
        .timeout_config(timeouts.build())
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
    if let Some(endpoint) = &options.endpoint {
        config = config.endpoint_url(endpoint);
    }
    Client::from_conf(config.build())
}
