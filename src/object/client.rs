use std::path::PathBuf;
use std::time::Duration;

use aws_config::{BehaviorVersion, Region};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::retry::RetryConfig;
use aws_sdk_s3::config::timeout::TimeoutConfig;
use aws_sdk_s3::config::{
    Builder, Credentials, RequestChecksumCalculation, ResponseChecksumValidation,
    StalledStreamProtectionConfig,
};
use aws_smithy_http_client::tls::rustls_provider::CryptoMode;
use aws_smithy_http_client::tls::{Provider, TlsContext, TrustStore};
use rustls::RootCertStore;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

/// RGW closes an idle connection after 65 s; a request on one that is closing fails.
const IDLE_MAX: Duration = Duration::from_secs(50);

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
    /// Longest time without a byte of an answer.
    pub read_timeout: Duration,
    /// Longest time for one attempt.
    pub request_timeout: Duration,
    pub credentials: Option<Credentials>,
}

/// The options can't be used.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    #[error("can't use [s3] ca_file {}: {reason}. It must hold certificates as PEM", path.display())]
    CaFile { path: PathBuf, reason: String },
}

pub(super) async fn connect(options: &S3Options) -> Result<Client, ClientError> {
    let tls = Provider::Rustls(CryptoMode::Ring);
    let http = aws_smithy_http_client::Builder::new()
        .pool_idle_timeout(IDLE_MAX)
        .tls_provider(tls)
        .tls_context(tls_context(options)?)
        .build_https();
    let shared = aws_config::defaults(BehaviorVersion::latest())
        .http_client(http)
        .region(Region::new(options.region.clone()))
        .retry_config(RetryConfig::disabled())
        .stalled_stream_protection(StalledStreamProtectionConfig::disabled());
    let shared = match &options.credentials {
        Some(credentials) => shared.credentials_provider(credentials.clone()),
        None => shared,
    };
    // Its read time-out would count a PUT's whole body: the time without a byte is watched in `s3.rs`.
    let timeouts = TimeoutConfig::builder().connect_timeout(options.connect_timeout);
    let mut config = Builder::from(&shared.load().await)
        .force_path_style(options.path_style)
        .timeout_config(timeouts.build())
        .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
        .response_checksum_validation(ResponseChecksumValidation::WhenRequired);
    if let Some(endpoint) = &options.endpoint {
        config = config.endpoint_url(endpoint);
    }
    Ok(Client::from_conf(config.build()))
}

/// Checks the file itself first: the HTTP client panics on one that it can't read.
fn tls_context(options: &S3Options) -> Result<TlsContext, ClientError> {
    let mut trusted = TrustStore::default();
    if let Some(path) = &options.ca_file {
        let error = |reason: String| ClientError::CaFile {
            path: path.clone(),
            reason,
        };
        let pem = std::fs::read(path).map_err(|cause| error(cause.to_string()))?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|cause| error(cause.to_string()))?;
            roots.add(certificate).map_err(|cause| error(cause.to_string()))?;
        }
        if roots.is_empty() {
            return Err(error("it holds no certificate".into()));
        }
        trusted = trusted.with_pem_certificate(pem);
    }
    // The only way that this can fail is a feature that is not built in.
    TlsContext::builder()
        .with_trust_store(trusted)
        .build()
        .map_err(|cause| ClientError::CaFile {
            path: options.ca_file.clone().unwrap_or_default(),
            reason: cause.to_string(),
        })
}
