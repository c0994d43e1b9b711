//! HEAD and ranged GET without the SDK's typed operations, which cost more than the requests.
//!
//! The SDK's orchestrator resolves and renews the credentials: when they are about to expire, a request goes through it
//! ([`CredentialChain`](super::credentials::CredentialChain) has even those expire that don't). All others are signed with what it used last
//! and go straight to our HTTP client (`s3/net`).

use std::borrow::Cow;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use aws_credential_types::Credentials;
use aws_credential_types::provider::SharedCredentialsProvider;
use aws_sdk_s3::config::BehaviorVersion;
use aws_sdk_s3::config::endpoint::{DefaultResolver, Params, ResolveEndpoint};
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
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};

use super::client::{S3ClientError, S3Options};
use super::sign::{Day, EXPIRES_SOON, Signable, Signer};
use crate::metrics::Times;
use crate::s3::dns::NameState;
use crate::s3::fanout::{EndpointState, Hedge, Requests, Route};
use crate::s3::net::{LandingCell, NetClient, NetError, Origin, Outgoing, Url, head_of};

/// The name of the user metadata, as a header.
const RUN_HEADER: &str = "x-amz-meta-kvgate-run";
const SCHEME: AuthSchemeId = AuthSchemeId::new("kvgate-sigv4");

/// Makes HEADs and ranged GETs.
pub(super) struct Reads {
    operation: Operation<Read, AnswerHead, Refusal>,
    http: NetClient,
    signer: Arc<Signer>,
    bucket: BucketPath,
    connect_timeout: Duration,
}

/// Where the bucket is.
struct BucketPath {
    origin: Origin,
    host: String,
    /// Before the slash that the key follows.
    path: String,
}

/// No answer that can be used.
pub(super) enum ReadError {
    Refused(Refusal),
    Net(NetError),
    /// Not even sent: no credentials, mostly.
    Sdk(Box<SdkError<Refusal, HttpResponse>>),
}

/// One request.
#[derive(Debug, Clone)]
pub(super) struct Read {
    pub method: &'static str,
    pub key: String,
    /// As in the header.
    pub range: Option<String>,
    pub if_match: Option<String>,
    pub landing: Option<LandingCell>,
    pub route: Route,
}

/// The head of a 2xx answer.
#[derive(Debug, Default)]
pub(super) struct AnswerHead {
    pub status: u16,
    pub content_range: Option<String>,
    pub content_length: Option<u64>,
    /// As in the header.
    pub etag: Option<String>,
    pub last_modified: Option<DateTime>,
    pub has_request_id: bool,
    pub run: Option<Box<str>>,
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
        http: NetClient,
        credentials: Option<SharedCredentialsProvider>,
    ) -> Result<Self, S3ClientError> {
        let signer = Arc::new(Signer::new(options.region.clone()));
        let url = bucket_url(options).await?;
        let target = Url::parse(&url).map_err(|cause| S3ClientError::Endpoint {
            endpoint: url.clone(),
            cause: cause.into(),
        })?;
        let bucket = BucketPath {
            origin: target.origin,
            host: target.authority.to_owned(),
            path: target.path.trim_end_matches('/').to_owned(),
        };
        let mut components = RuntimeComponentsBuilder::new("kvgate reads")
            .with_auth_scheme_option_resolver(Some(StaticAuthSchemeOptionResolver::new(vec![SCHEME])))
            .with_auth_scheme(SigV4(Arc::clone(&signer)))
            // It renews what expires some seconds before it has to; the signer must not ask sooner than that.
            .with_identity_cache(Some(IdentityCache::lazy().buffer_time(2 * EXPIRES_SOON).build()));
        if let Some(credentials) = credentials {
            components = components.with_identity_resolver(SCHEME, SharedIdentityResolver::new(credentials));
        }
        let mut config = Layer::new("kvgate reads");
        config.store_put(AuthSchemeOptionResolverParams::new(()));
        let operation = Operation::builder()
            .service_name("S3")
            .operation_name("Read")
            .behavior_version(BehaviorVersion::latest())
            .http_client(http.clone())
            .endpoint_url(&url)
            .no_retry()
            // `S3` and the HTTP client keep the time.
            .timeout_config(
                TimeoutConfig::builder()
                    .connect_timeout(options.connect_timeout)
                    .build(),
            )
            .runtime_plugin(
                StaticRuntimePlugin::new()
                    .with_config(config.freeze())
                    .with_runtime_components(components),
            )
            .serializer(serialize)
            .deserializer(deserialize)
            .build();
        Ok(Self {
            operation,
            http,
            signer,
            bucket,
            connect_timeout: options.connect_timeout,
        })
    }

    pub async fn send(&self, read: &Read) -> Result<AnswerHead, ReadError> {
        let now = SystemTime::now();
        let values = [&read.range, &read.if_match].into_iter().flatten();
        if values
            .into_iter()
            .any(|value| value.bytes().any(|byte| byte.is_ascii_control()))
        {
            return Err(ReadError::Net(NetError::Header));
        }
        match self.signer.known(now) {
            Some(day) => self.send_signed(read, &day, now).await,
            // Boxed: its future is large, and would be moved about with every request.
            None => Box::pin(self.operation.invoke(read.clone()))
                .await
                .map_err(|error| match error {
                    SdkError::ServiceError(error) => ReadError::Refused(error.into_err()),
                    error => ReadError::Sdk(error.into()),
                }),
        }
    }

    /// How reads of `bytes` bytes are hedged.
    pub fn hedge(&self, bytes: usize) -> impl Hedge + use<> {
        self.http.hedge(&self.bucket.origin, bytes)
    }

    /// Where the requests go.
    pub fn origin(&self) -> &Origin {
        &self.bucket.origin
    }

    /// As in the Host header.
    pub fn host(&self) -> &str {
        &self.bucket.host
    }

    pub fn endpoints(&self) -> Vec<EndpointState> {
        self.http.endpoints(&self.bucket.origin)
    }

    pub fn totals(&self) -> Requests {
        self.http.totals(&self.bucket.origin)
    }

    pub fn window_waits(&self) -> Times {
        self.http.window_waits(&self.bucket.origin)
    }

    pub fn connection_waits(&self) -> Times {
        self.http.connection_waits(&self.bucket.origin)
    }

    pub fn names(&self) -> Vec<NameState> {
        self.http.names(&self.bucket.origin)
    }

    pub fn is_out_of_reach(&self) -> bool {
        self.http.is_out_of_reach(&self.bucket.origin)
    }

    pub fn window_bytes(&self) -> usize {
        self.http.window_bytes(&self.bucket.origin)
    }

    async fn send_signed(&self, read: &Read, day: &Day, now: SystemTime) -> Result<AnswerHead, ReadError> {
        let BucketPath { origin, host, path } = &self.bucket;
        let path = [path, "/", &encode_key(&read.key)].concat();
        let mut headers = Vec::new();
        headers.extend(read.if_match.as_deref().map(|etag| ("if-match", etag)));
        headers.extend(read.range.as_deref().map(|range| ("range", range)));
        let request = Signable {
            method: read.method,
            host,
            path: &path,
            headers: &headers,
        };
        let signed = day.sign(now, &request);
        let signed = signed.iter().map(|(name, value)| (*name, &**value));
        let head = head_of(
            read.method,
            &path,
            [("host", host.as_str())].into_iter().chain(headers).chain(signed),
        );
        let outgoing = Outgoing {
            head: head.as_bytes(),
            body: &[],
            bodyless: read.method == "HEAD",
        };
        let landing = read.landing.as_ref();
        let sent = self
            .http
            .send(origin, &outgoing, landing, &read.route, self.connect_timeout);
        let (head, body) = sent.await.map_err(ReadError::Net)?;
        answer(head.status, |name| head.header(name), &body).map_err(ReadError::Refused)
    }
}

/// Where the bucket is, by the SDK's own rules: addressing style, AWS's partitions.
async fn bucket_url(options: &S3Options) -> Result<String, S3ClientError> {
    let error = |cause: BoxError| S3ClientError::Endpoint {
        endpoint: options.endpoint.clone().unwrap_or_else(|| "AWS".into()),
        cause,
    };
    let params = Params::builder()
        .bucket(&options.bucket)
        .region(&options.region)
        .set_endpoint(options.first_endpoint().map(Into::into))
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
    request.add_extension(read.route);
    if let Some(landing) = read.landing {
        request.add_extension(landing);
    }
    Ok(request)
}

fn deserialize(response: &HttpResponse) -> Result<AnswerHead, OrchestratorError<Refusal>> {
    let header = |name: &str| response.headers().get(name);
    let body = response.body().bytes().unwrap_or_default();
    answer(response.status().as_u16(), header, body).map_err(OrchestratorError::operation)
}

fn answer<'a>(
    status: u16,
    header: impl Fn(&str) -> Option<&'a str>,
    body: &[u8],
) -> Result<AnswerHead, Refusal> {
    let request_id = header("x-amz-request-id");
    if (200..300).contains(&status) {
        return Ok(AnswerHead {
            status,
            content_range: header("content-range").map(Into::into),
            content_length: header("content-length").and_then(|len| len.parse().ok()),
            etag: header("etag").map(Into::into),
            last_modified: header("last-modified")
                .and_then(|date| DateTime::from_str(date, Format::HttpDate).ok()),
            has_request_id: request_id.is_some(),
            run: header(RUN_HEADER).map(Into::into),
        });
    }
    let body = String::from_utf8_lossy(body);
    let element = |name: &str| {
        let (_, rest) = body.split_once(&format!("<{name}>"))?;
        Some(rest.split_once("</")?.0.to_owned())
    };
    Err(Refusal {
        status,
        code: element("Code"),
        message: element("Message").unwrap_or_default(),
        request_id: request_id.map(Into::into),
    })
}

/// All but what S3's signature leaves alone.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC
    .remove(b'-')
    .remove(b'.')
    .remove(b'_')
    .remove(b'~')
    .remove(b'/');

pub(super) fn encode_key(key: &str) -> Cow<'_, str> {
    utf8_percent_encode(key, ENCODED).into()
}

#[derive(Debug)]
struct SigV4(Arc<Signer>);

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
        let now = SystemTime::now();
        let day = self.0.learn(credentials, now);
        let Url { authority, path, .. } = Url::parse(request.uri())?;
        let (host, path) = (authority.to_owned(), path.to_owned());
        let headers: Vec<(&str, &str)> = request.headers().iter().collect();
        let signable = Signable {
            method: request.method(),
            host: &host,
            path: &path,
            headers: &headers,
        };
        let signed = day.sign(now, &signable);
        let headers = request.headers_mut();
        headers.insert("host", host);
        for (name, value) in signed {
            headers.insert(name, value.into_owned());
        }
        Ok(())
    }
}
