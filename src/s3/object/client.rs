//! Builds the SDK's client and our HTTP client from the options.

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

use super::credentials::CredentialChain;
use crate::s3::dns::{AddressSource, DnsOptions, Resolver};
use crate::s3::fanout::{AttemptPolicy, EndpointOptions};
use crate::s3::net::{self, NetClient, NetOptions, Origin, ServerAddress, TlsError, Url};

/// How to reach a bucket. Credentials come from the AWS chain (environment, profile, web identity, container,
/// instance) unless given.
#[derive(Debug, Clone)]
pub struct S3Options {
    /// `http(s)://host[:port]`, several with commas: the first is what requests are signed for. None for AWS.
    pub endpoint: Option<String>,
    pub bucket: String,
    /// The start of keys under which the bucket is listed to check it: there may be no right to list the rest.
    pub prefix: String,
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
    /// Time after which the chain's keys without an expiry are asked for again: files may be rewritten.
    pub credentials_ttl: Duration,
    pub attempts: AttemptPolicy,
    pub endpoints: EndpointOptions,
    pub dns: DnsOptions,
    /// Name of SRV records that say where the server is, instead of its host name.
    pub srv: Option<String>,
}

/// The options can't be used.
#[derive(Debug, thiserror::Error)]
pub enum S3ClientError {
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error("can't use [s3] endpoint {endpoint} with this bucket: {cause}")]
    Endpoint { endpoint: String, cause: BoxError },
}

impl S3Options {
    /// The endpoint that requests are signed for.
    pub(super) fn first_endpoint(&self) -> Option<&str> {
        self.endpoint.as_deref().and_then(|urls| urls.split(',').next())
    }

    /// The server's host, and where it is, if that is not for DNS to say of its name.
    fn places(&self) -> Result<Option<(String, Vec<ServerAddress>)>, S3ClientError> {
        let Some(urls) = &self.endpoint else {
            return Ok(None);
        };
        let mut targets = Vec::new();
        for url in urls.split(',') {
            let target = Url::parse(url).map_err(|cause| S3ClientError::Endpoint {
                endpoint: url.to_owned(),
                cause: cause.into(),
            })?;
            targets.push(target.origin);
        }
        let Some(host) = targets.first().map(|first| first.host.clone()) else {
            return Ok(None);
        };
        let by_hand = |origin: Origin| ServerAddress {
            server_name: origin.host.clone(),
            source: AddressSource::Host {
                name: origin.host,
                port: origin.port,
            },
        };
        let places = match &self.srv {
            Some(name) => vec![ServerAddress {
                server_name: host.clone(),
                source: AddressSource::Srv { name: name.clone() },
            }],
            None => targets.into_iter().map(by_hand).collect(),
        };
        Ok((self.srv.is_some() || places.len() > 1).then_some((host, places)))
    }
}

/// Our HTTP client, with these options.
pub(super) fn net_client(options: &S3Options) -> Result<NetClient, S3ClientError> {
    net_client_with(options, options.places()?)
}

pub(super) fn net_client_with(
    options: &S3Options,
    places: Option<(String, Vec<ServerAddress>)>,
) -> Result<NetClient, S3ClientError> {
    Ok(NetClient::new(NetOptions {
        tls: net::client_config(options.ca_file.as_deref())?,
        connect_timeout: options.connect_timeout,
        stall_timeout: options.read_timeout,
        idle_timeout: options.idle_timeout,
        connections_max: options.connections_max,
        answer_bytes_max: options.answer_bytes_max,
        endpoints: options.endpoints,
        dns: Resolver::new(options.dns.clone()),
        places,
        server_name: None,
    }))
}

/// The common part of all AWS clients: region, credentials, our HTTP client.
pub(super) async fn shared(options: &S3Options, http: NetClient) -> SdkConfig {
    let shared = aws_config::defaults(BehaviorVersion::latest())
        .http_client(http.clone())
        .region(Region::new(options.region.clone()))
        .retry_config(RetryConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled());
    let shared = match &options.credentials {
        Some(credentials) => shared.credentials_provider(credentials.clone()),
        None => shared.credentials_provider(CredentialChain::new(
            http,
            Region::new(options.region.clone()),
            options.credentials_ttl,
        )),
    };
    shared.load().await
}

/// The SDK's client, for all calls but HEAD and ranged GET.
pub(super) fn client(options: &S3Options, shared: &SdkConfig) -> Client {
    // Our HTTP client watches the time without a byte: the SDK's read time-out would count a PUT's whole body.
    let timeouts = TimeoutConfig::builder().connect_timeout(options.connect_timeout);
    let mut config = Builder::from(shared)
        .force_path_style(options.path_style)
        .timeout_config(timeouts.build())
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
    if let Some(endpoint) = options.first_endpoint() {
        config = config.endpoint_url(endpoint);
    }
    Client::from_conf(config.build())
}

#[cfg(test)]
pub(super) fn for_tests(endpoint: &str, bucket: &str) -> S3Options {
    use crate::s3::fanout::{BreakerOptions, WindowOptions};
    let second = Duration::from_secs(1);
    S3Options {
        endpoint: Some(endpoint.into()),
        bucket: bucket.into(),
        prefix: String::new(),
        region: "us-east-1".into(),
        path_style: true,
        ca_file: None,
        connect_timeout: second,
        read_timeout: second,
        request_timeout: second,
        idle_timeout: second,
        connections_max: 1,
        answer_bytes_max: 1 << 20,
        credentials: Some(Credentials::from_keys("key", "secret", None)),
        credentials_ttl: second,
        attempts: AttemptPolicy {
            retries: 0,
            base: second,
            max: second,
            budget: 0,
            hedges: 0,
        },
        endpoints: EndpointOptions {
            window: WindowOptions {
                start: 1 << 20,
                min: 1 << 20,
                max: 1 << 20,
            },
            breaker: BreakerOptions {
                failures: 5,
                open: second,
                open_max: second,
            },
            hedge_min: second,
            subset: 16,
        },
        dns: DnsOptions {
            servers: Vec::new(),
            tcp: false,
            min_ttl: second,
            max_ttl: second,
            timeout: second,
        },
        srv: None,
    }
}

#[cfg(test)]
mod tests {
    use aws_smithy_runtime::client::orchestrator::operation::Operation;
    use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse, OrchestratorError};
    use aws_smithy_types::body::SdkBody;

    use super::*;

    /// A provider of credentials has less time than S3 has.
    #[tokio::test]
    async fn the_callers_own_read_timeout_is_kept() {
        let hangs = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = format!("http://{}", hangs.local_addr().unwrap());
        let minutes = Duration::from_secs(600);
        let http = net_client(&S3Options {
            read_timeout: minutes,
            ..for_tests(&endpoint, "b")
        });
        let timeouts = TimeoutConfig::builder()
            .connect_timeout(Duration::from_millis(100))
            .read_timeout(Duration::from_millis(100));
        let operation = Operation::builder()
            .service_name("instance")
            .operation_name("credentials")
            .behavior_version(BehaviorVersion::latest())
            .http_client(http.unwrap())
            .endpoint_url(&endpoint)
            .no_auth()
            .no_retry()
            .timeout_config(timeouts.build())
            .serializer(|()| Ok(HttpRequest::new(SdkBody::empty())))
            .deserializer(|_: &HttpResponse| Ok::<(), OrchestratorError<std::io::Error>>(()))
            .build();
        let answer = tokio::time::timeout(minutes / 10, operation.invoke(())).await;
        let error = answer.expect("it gives up").expect_err("nobody answers");
        assert!(format!("{error:?}").contains("whole answer"), "{error:?}");
    }
}
