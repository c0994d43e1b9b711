//! HEAD and ranged GET without the SDK's typed operations, which cost more than the requests: the same orchestrator, with
//! our signer and nothing to serialise.

use std::time::SystemTime;

use aws_credential_types::Credentials;
use aws_credential_types::provider::SharedCredentialsProvider;
use aws_sdk_s3::config::BehaviorVersion;
use aws_sdk_s3::config::endpoint::{DefaultResolver, Params, ResolveEndpoint};
use aws_smithy_async::rt::sleep::TokioSleep;
use aws_smithy_runtime::client::identity::IdentityCache;
use aws_smithy_runtime::client::orchestrator::operation::Operation;
use aws_smithy_runtime_api::box_error::BoxError;
use aws_smithy_runtime_api::client::auth::static_resolver::StaticAuthSchemeOptionResolver;
use aws_smithy_runtime_api::client::auth::{
    AuthScheme, AuthSchemeEndpointConfig, AuthSchemeId, AuthSchemeOptionResolverParams, Sign,
};
use aws_smithy_runtime_api::client::identity::{Identity, SharedIdentityResolver};
use aws_smithy_runtime_api::client::orchestrator::{HttpRequest, HttpResponse, OrchestratorError};
use aws_smithy_runtime_api::client::result::SdkError;
use aws_smithy_runtime_api::client::runtime_components::{
    GetIdentityResolver, RuntimeComponents, RuntimeComponentsBuilder,
};
use aws_smithy_runtime_api::client::runtime_plugin::StaticRuntimePlugin;
use aws_smithy_types::DateTime;
use aws_smithy_types::body::SdkBody;
use aws_smithy_types::config_bag::{ConfigBag, Layer};
use aws_smithy_types::date_time::Format;
use aws_smithy_types::timeout::TimeoutConfig;

use super::client::{ClientError, S3Options};
use super::sign::Signer;
use crate::net::{Connector, LandingCell};

const SCHEME: AuthSchemeId = AuthSchemeId::new("kvgate-sigv4");

/// Makes HEADs and ranged GETs.
pub(super) struct Reads {
    operation: Operation<Read, Answer, Refusal>,
}

/// One request.
#[derive(Debug)]
pub(super) struct Read {
    pub method: &'static str,
    pub key: String,
    /// As in the header.
    pub range: Option<String>,
    pub if_match: Option<String>,
    pub landing: Option<LandingCell>,
}

/// The head of a 2xx answer.
#[derive(Debug, Default)]
pub(super) struct Answer {
    pub content_length: Option<u64>,
    pub etag: Option<String>,
    pub last_modified: Option<String>,
    pub has_request_id: bool,
}

impl Answer {
    pub fn last_modified(&self) -> Option<DateTime> {
        DateTime::from_str(self.last_modified.as_deref()?, Format::HttpDate).ok()
    }
}

/// Any other answer, in the server's words.
#[derive(Debug, thiserror::Error)]
#[error("HTTP {status}")]
pub(super) struct Refusal {
    pub status: u16,
    pub code: Option<String>,
    pub message: String,
    pub request_id: Option<String>,
}

impl Reads {
    /// `credentials`: None where the chain is empty; then requests fail as those of the SDK do.
    pub async fn new(
        options: &S3Options,
        http: Connector,
        credentials: Option<SharedCredentialsProvider>,
    ) -> Result<Self, ClientError> {
        let mut components = RuntimeComponentsBuilder::new("kvgate reads")
            .with_auth_scheme_option_resolver(Some(StaticAuthSchemeOptionResolver::new(vec![SCHEME])))
            .with_auth_scheme(SigV4(Signer::new(options.region.clone())))
            .with_identity_cache(Some(IdentityCache::lazy().build()));
        if let Some(credentials) = credentials {
            components = components.with_identity_resolver(SCHEME, SharedIdentityResolver::new(credentials));
        }
        let mut config = Layer::new("kvgate reads");
        config.store_put(AuthSchemeOptionResolverParams::new(()));
        let operation = Operation::builder()
            .service_name("S3")
            .operation_name("Read")
            .behavior_version(BehaviorVersion::latest())
            .http_client(http)
            .endpoint_url(&bucket_url(options).await?)
            .no_retry()
            // `S3` and the connector keep the time.
            .timeout_config(
                TimeoutConfig::builder()
                    .connect_timeout(options.connect_timeout)
                    .build(),
            )
            .sleep_impl(TokioSleep::new())
            .runtime_plugin(
                StaticRuntimePlugin::new()
                    .with_config(config.freeze())
                    .with_runtime_components(components),
            )
            .serializer(serialize)
            .deserializer(deserialize)
            .build();
        Ok(Self { operation })
    }

    pub async fn send(&self, read: Read) -> Result<Answer, SdkError<Refusal, HttpResponse>> {
        self.operation.invoke(read).await
    }
}

/// Where the bucket is, by the SDK's own rules: addressing style, AWS's partitions.
async fn bucket_url(options: &S3Options) -> Result<String, ClientError> {
    let error = |cause: BoxError| ClientError::Endpoint {
        endpoint: options.endpoint.clone().unwrap_or_else(|| "AWS".into()),
        cause,
    };
    let params = Params::builder()
        .bucket(&options.bucket)
        .region(&options.region)
        .set_endpoint(options.endpoint.clone())
        .force_path_style(options.path_style)
        .build()
        .map_err(|cause| error(cause.into()))?;
    let endpoint = DefaultResolver::new()
        .resolve_endpoint(&params)
        .await
        .map_err(error)?;
    Ok(endpoint.url().trim_end_matches('/').to_owned())
}

fn serialize(read: Read) -> Result<HttpRequest, BoxError> {
    let mut request = HttpRequest::new(SdkBody::empty());
    request.set_method(read.method)?;
    request.set_uri(format!("/{}", encode_key(&read.key)))?;
    let headers = request.headers_mut();
    if let Some(range) = read.range {
        headers.insert("range", range);
    }
    if let Some(etag) = read.if_match {
        headers.insert("if-match", etag);
    }
    if let Some(landing) = read.landing {
        request.add_extension(landing);
    }
    Ok(request)
}

fn deserialize(response: &HttpResponse) -> Result<Answer, OrchestratorError<Refusal>> {
    let header = |name: &str| response.headers().get(name);
    let request_id = header("x-amz-request-id");
    if response.status().is_success() {
        return Ok(Answer {
            content_length: header("content-length").and_then(|len| len.parse().ok()),
            etag: header("etag").map(Into::into),
            last_modified: header("last-modified").map(Into::into),
            has_request_id: request_id.is_some(),
        });
    }
    let body = response
        .body()
        .bytes()
        .map(String::from_utf8_lossy)
        .unwrap_or_default();
    let element = |name: &str| {
        let (_, rest) = body.split_once(&format!("<{name}>"))?;
        Some(rest.split_once("</")?.0.to_owned())
    };
    Err(OrchestratorError::operation(Refusal {
        status: response.status().as_u16(),
        code: element("Code"),
        message: element("Message").unwrap_or_default(),
        request_id: request_id.map(Into::into),
    }))
}

/// Percent-encodes all but what S3's signature leaves alone.
fn encode_key(key: &str) -> String {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    let mut encoded = String::with_capacity(key.len());
    for byte in key.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                encoded.push(byte.into());
            }
            _ => encoded.extend([
                '%',
                HEX[usize::from(byte >> 4)].into(),
                HEX[usize::from(byte & 15)].into(),
            ]),
        }
    }
    encoded
}

#[derive(Debug)]
struct SigV4(Signer);

impl AuthScheme for SigV4 {
    fn scheme_id(&self) -> AuthSchemeId {
        SCHEME
    }

    fn identity_resolver(&self, resolvers: &dyn GetIdentityResolver) -> Option<SharedIdentityResolver> {
        resolvers.identity_resolver(SCHEME)
    }

    fn signer(&self) -> &dyn Sign {
        self
    }
}

impl Sign for SigV4 {
    fn sign_http_request(
        &self,
        request: &mut HttpRequest,
        identity: &Identity,
        _: AuthSchemeEndpointConfig<'_>,
        _: &RuntimeComponents,
        _: &ConfigBag,
    ) -> Result<(), BoxError> {
        let credentials: &Credentials = identity.data().ok_or("the credentials are no keys")?;
        self.0
            .sign(credentials, SystemTime::now(), request)
            .map_err(Into::into)
    }
}
