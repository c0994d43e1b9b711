//! The meaning of a failed request. Only a not-found of the server itself says that an object is absent.

use std::error::Error as StdError;
use std::fmt;

use aws_credential_types::provider::error::CredentialsError;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::operation::RequestId;
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;

use super::reads::Refusal;
use crate::s3::fanout::{AttemptVerdict, Failure};
use crate::s3::net::{Mismatch, NetError};

/// An operation of S3; requests are counted by these kinds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    Head,
    Attributes,
    Get,
    Put,
    List,
    Delete,
    Bucket,
}

impl Operation {
    pub const ALL: [Self; 7] = [
        Self::Head,
        Self::Attributes,
        Self::Get,
        Self::Put,
        Self::List,
        Self::Delete,
        Self::Bucket,
    ];

    /// As figures name it.
    pub fn word(self) -> &'static str {
        match self {
            Self::Head => "head",
            Self::Attributes => "attributes",
            Self::Get => "get",
            Self::Put => "put",
            Self::List => "list",
            Self::Delete => "delete",
            Self::Bucket => "bucket",
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::Head => "HEAD",
            Self::Attributes => "ATTRIBUTES",
            Self::Get => "GET",
            Self::Put => "PUT",
            Self::List => "LIST",
            Self::Delete => "DELETE",
            Self::Bucket => "BUCKET",
        }
    }
}

/// The meaning of a failed request. Only [`NotFound`](Self::NotFound) says that an object is absent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    NotFound,
    NoBucket,
    /// A condition (If-Match, If-None-Match) does not hold: 412.
    Changed,
    /// Another conditional write is under way: 409.
    Conflict,
    Denied,
    /// The bucket or its owner has as much as it may.
    Quota,
    /// No credentials, or the server does not accept them.
    Credentials,
    /// The request was signed for another region than the bucket's.
    Region,
    /// The server's clock and ours are too far apart for signatures.
    Skewed,
    /// 429 or 503.
    Throttled,
    /// 500, 502, 504.
    Unavailable,
    Timeout,
    /// No connection could be made.
    Connect,
    /// The connection broke, or the answer was not HTTP.
    Broken,
    /// The object has not the length that was expected.
    Length {
        expected: usize,
        actual: Option<u64>,
    },
    /// The answer is not what was asked for (another range, no ETag).
    Protocol,
    /// The server does not know the call: 405 or 501.
    Unsupported,
    /// The caller's deadline passed first.
    Deadline,
    /// The body that arrived has not the checksum that was sent with it.
    Checksum,
    /// Any other 4xx, or a request that could not be built.
    Refused,
}

impl ErrorKind {
    /// Whether the same request may succeed when it is tried again.
    pub fn retryable(self) -> bool {
        matches!(
            self,
            Self::Conflict
                | Self::Throttled
                | Self::Unavailable
                | Self::Timeout
                | Self::Connect
                | Self::Broken
                | Self::Protocol
        )
    }

    /// Whether the same request may succeed later: another attempt might have, or there was no time for it.
    pub fn may_pass(self) -> bool {
        self.retryable() || self == Self::Deadline
    }

    /// Whether configuration, credentials or clock must change before any request can succeed.
    pub fn is_setup(self) -> bool {
        matches!(
            self,
            Self::NoBucket | Self::Denied | Self::Credentials | Self::Region | Self::Skewed
        )
    }

    /// Advice to an operator: what to look at or type.
    pub fn advice(self) -> &'static str {
        match self {
            Self::NoBucket => {
                "the bucket does not exist: create it, or give another with --bucket ([s3] bucket)"
            }
            Self::Denied => "access denied: the credentials may not do this; check the bucket's policy",
            Self::Quota => {
                "the quota is used up: raise it, or remove chunks (kvgate gc, [gc], kvgate lifecycle apply)"
            }
            Self::Credentials => {
                "the credentials are missing or not accepted: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
            }
            Self::Region => "the bucket is in another region: give it with --region ([s3] region)",
            Self::Skewed => {
                "the clock of this machine or that of the server is wrong: compare `date -u` on both, and set them by NTP \
                 (timedatectl set-ntp true)"
            }
            Self::Throttled => "the server asks to slow down",
            Self::Unavailable => "the server failed",
            Self::Timeout => "the server did not answer in time ([s3] read_timeout, request_timeout)",
            Self::Connect => "no connection: check --endpoint ([s3] endpoint), and that the server runs",
            Self::Broken => "the connection broke",
            Self::NotFound => "no such object",
            Self::Changed => "the object changed, or exists already",
            Self::Conflict => "another write to the object is under way",
            Self::Length { .. } => "the object has a wrong length",
            Self::Protocol => "the server's answer is not what was asked for",
            Self::Unsupported => "the server does not know this call",
            Self::Deadline => "the deadline passed",
            Self::Checksum => "the bytes that arrived are not those that were sent: check memory and network",
            Self::Refused => "the server refused the request",
        }
    }
}

/// A request that failed, and what it means.
#[derive(Debug)]
pub struct ObjectError {
    pub operation: Operation,
    /// Key, prefix or bucket.
    pub target: String,
    pub kind: ErrorKind,
    /// The server's or the library's own words.
    detail: String,
}

impl ObjectError {
    pub fn new(operation: Operation, target: &str, kind: ErrorKind, detail: impl Into<String>) -> Self {
        Self {
            operation,
            target: target.to_owned(),
            kind,
            detail: detail.into(),
        }
    }

    /// The server's or the library's own words.
    pub fn detail(&self) -> &str {
        &self.detail
    }

    /// `signs`: the server is known to give its answers request ids.
    pub(super) fn from_sdk<E>(
        operation: Operation,
        target: &str,
        error: &SdkError<E, HttpResponse>,
        signs: bool,
    ) -> Self
    where
        E: ProvideErrorMetadata + StdError + 'static,
    {
        let SdkError::ServiceError(service) = error else {
            return Self::from_failure(operation, target, error);
        };
        let (status, error) = (service.raw().status().as_u16(), service.err());
        let refusal = Refusal {
            status,
            code: error.code().map(Into::into),
            message: error.message().unwrap_or_default().to_owned(),
            request_id: error.meta().request_id().map(Into::into),
        };
        Self::from_refusal(operation, target, &refusal, signs)
    }

    /// No answer, or none that could be used.
    pub(super) fn from_failure<E>(
        operation: Operation,
        target: &str,
        error: &SdkError<E, HttpResponse>,
    ) -> Self
    where
        E: StdError + 'static,
    {
        if let Some(error) = sources(error).find_map(|error| error.downcast_ref::<NetError>()) {
            return Self::from_net(operation, target, error);
        }
        let kind = match error {
            SdkError::TimeoutError(_) => ErrorKind::Timeout,
            SdkError::DispatchFailure(failure) if failure.is_timeout() => ErrorKind::Timeout,
            SdkError::DispatchFailure(_) if has_credentials_error(error) => ErrorKind::Credentials,
            SdkError::ResponseError(_) | SdkError::DispatchFailure(_) => ErrorKind::Broken,
            _ => ErrorKind::Refused,
        };
        Self::new(operation, target, kind, words(error))
    }

    /// An answer that is no success.
    pub(super) fn from_refusal(operation: Operation, target: &str, refusal: &Refusal, signs: bool) -> Self {
        let code = refusal.code.as_deref();
        let from_s3 = refusal.request_id.is_some() || !signs;
        let detail = format!(
            "HTTP {} {} {} (request {})",
            refusal.status,
            code.unwrap_or("-"),
            refusal.message,
            refusal.request_id.as_deref().unwrap_or("-")
        );
        let kind = match kind_of_status(operation, refusal.status, code, from_s3) {
            // "... the region 'here' is wrong; expecting 'there'"
            ErrorKind::Credentials
                if code == Some("AuthorizationHeaderMalformed") && refusal.message.contains("region") =>
            {
                ErrorKind::Region
            }
            kind => kind,
        };
        Self::new(operation, target, kind, detail)
    }

    pub(super) fn from_net(operation: Operation, target: &str, error: &NetError) -> Self {
        let kind = match error {
            NetError::Url(_) | NetError::Body | NetError::Header => ErrorKind::Refused,
            NetError::Resolve { .. } | NetError::Connect { .. } => ErrorKind::Connect,
            NetError::NoRoom => ErrorKind::Throttled,
            NetError::Timeout { .. } => ErrorKind::Timeout,
            NetError::Closed
            | NetError::Io(_)
            | NetError::Head(_)
            | NetError::Framing(_)
            | NetError::Cut { .. } => ErrorKind::Broken,
            NetError::TooLong { .. } | NetError::Mismatch(Mismatch::Range(_)) => ErrorKind::Protocol,
            NetError::Mismatch(Mismatch::Etag) => ErrorKind::Changed,
            NetError::Mismatch(Mismatch::Length { expected, actual }) => ErrorKind::Length {
                expected: usize::try_from(*expected).unwrap_or(usize::MAX),
                actual: Some(*actual),
            },
        };
        let advice = if error.is_untrusted() {
            "; give its CA as [s3] ca_file"
        } else {
            ""
        };
        Self::new(operation, target, kind, format!("{error}{advice}"))
    }
}

impl fmt::Display for ObjectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} {}: {}",
            self.operation.name(),
            self.target,
            self.kind.advice()
        )?;
        if let ErrorKind::Length {
            expected,
            actual: Some(actual),
        } = self.kind
        {
            write!(f, " ({actual} bytes, not {expected})")?;
        }
        if self.detail.is_empty() {
            Ok(())
        } else {
            write!(f, " [{}]", self.detail)
        }
    }
}

impl StdError for ObjectError {}

impl Failure for ObjectError {
    fn verdict(&self) -> AttemptVerdict {
        match self.kind {
            ErrorKind::Connect => AttemptVerdict::Unreached,
            ErrorKind::Broken => AttemptVerdict::Lost,
            ErrorKind::Deadline => AttemptVerdict::Late,
            kind if kind.retryable() => AttemptVerdict::Again,
            _ => AttemptVerdict::Final,
        }
    }
}

/// `from_s3`: the answer looks like the S3 server's own.
fn kind_of_status(operation: Operation, status: u16, code: Option<&str>, from_s3: bool) -> ErrorKind {
    match (status, code) {
        (404, Some("NoSuchBucket")) => ErrorKind::NoBucket,
        (404, Some("NoSuchKey")) => ErrorKind::NotFound,
        // It has no body that could say more.
        (404, _) if operation == Operation::Head && from_s3 => ErrorKind::NotFound,
        (412, _) => ErrorKind::Changed,
        (409, _) => ErrorKind::Conflict,
        (400 | 401 | 403, Some("RequestTimeTooSkewed")) => ErrorKind::Skewed,
        (
            400 | 401 | 403,
            Some(
                "InvalidAccessKeyId"
                | "SignatureDoesNotMatch"
                | "ExpiredToken"
                | "InvalidToken"
                | "AuthorizationHeaderMalformed",
            ),
        ) => ErrorKind::Credentials,
        // AWS's, for a bucket that is elsewhere.
        (301 | 307 | 400, Some("PermanentRedirect" | "TemporaryRedirect" | "InvalidRegion")) => {
            ErrorKind::Region
        }
        (400, Some("BadDigest" | "XAmzContentChecksumMismatch")) => ErrorKind::Checksum,
        // RGW's, and MinIO's.
        (400 | 403, Some("QuotaExceeded" | "XMinioAdminBucketQuotaExceeded")) => ErrorKind::Quota,
        (401 | 403, _) => ErrorKind::Denied,
        (416, _) => ErrorKind::Length {
            expected: 0,
            actual: None,
        },
        (408, _) => ErrorKind::Timeout,
        (429 | 503, _) => ErrorKind::Throttled,
        (405 | 501, _) => ErrorKind::Unsupported,
        // A proxy whose servers are gone says 404, too: that is no absence.
        (404 | 500.., _) => ErrorKind::Unavailable,
        _ => ErrorKind::Refused,
    }
}

fn sources<'a>(error: &'a (dyn StdError + 'static)) -> impl Iterator<Item = &'a (dyn StdError + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

fn has_credentials_error<E: StdError + 'static>(error: &SdkError<E, HttpResponse>) -> bool {
    sources(error).any(<dyn std::error::Error + 'static>::is::<CredentialsError>)
}

/// The innermost cause is the one that helps.
fn words<E: StdError + 'static>(error: &SdkError<E, HttpResponse>) -> String {
    sources(error).last().map(ToString::to_string).unwrap_or_default()
}
