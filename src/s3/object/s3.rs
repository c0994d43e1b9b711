//! One bucket over the AWS SDK. HEAD and ranged GET go round its typed layer (`reads.rs`).

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use aws_credential_types::provider::SharedCredentialsProvider;
use aws_sdk_s3::Client;
use aws_sdk_s3::client::customize::CustomizableOperation;
use aws_sdk_s3::error::{ProvideErrorMetadata, SdkError};
use aws_sdk_s3::operation::RequestId;
use aws_sdk_s3::primitives::{ByteStream, DateTime};
use aws_sdk_s3::types::{Object, ObjectAttributes};
use aws_smithy_runtime_api::client::orchestrator::HttpResponse;
use aws_smithy_types::base64;
use bytes::Bytes;
use tokio::time::Instant;

use super::client::{self, S3ClientError, S3Options};
use super::error::{ErrorKind, ObjectError, Operation};
use super::reads::{AnswerHead, Read, ReadError, Reads};
use super::store::{
    CallCounters, Condition, GetFuture, GetRange, LifecycleRules, ListPage, Listed, ObjectMeta, ObjectStore,
    PutExtras, RequestCounts, RequestTimes, Result, StoreFuture, Version,
};
use crate::format::RUN_KEY;
use crate::metrics::Times;
use crate::s3::dns::NameState;
use crate::s3::fanout::{Attempts, EndpointState, Handover, Requests, Route};
use crate::s3::net::{Expect, Landing, LandingCell, NetClient, Traffic, unquoted};

/// One bucket over the AWS SDK.
pub struct S3 {
    pub(super) client: Client,
    pub(super) reads: Reads,
    pub(super) http: NetClient,
    /// None: the chain is empty.
    pub(super) credentials: Option<SharedCredentialsProvider>,
    attempts: Attempts,
    pub(super) bucket: String,
    pub(super) prefix: String,
    pub(super) region: String,
    request_timeout: Duration,
    counters: CallCounters,
    /// An answer had a request id. Then one without is not this server's, but a proxy's in front of it.
    signs: AtomicBool,
    /// The latest PUT was refused because a quota is used up.
    over_quota: AtomicBool,
}

impl S3 {
    /// Sends nothing yet.
    pub async fn connect(options: &S3Options) -> Result<Self, S3ClientError> {
        let http = client::net_client(options)?;
        let shared = client::shared(options, http.clone()).await;
        Ok(Self {
            client: client::client(options, &shared),
            reads: Reads::new(options, http.clone(), shared.credentials_provider()).await?,
            http,
            credentials: shared.credentials_provider(),
            attempts: Attempts::new(options.attempts),
            bucket: options.bucket.clone(),
            prefix: options.prefix.clone(),
            region: options.region.clone(),
            request_timeout: options.request_timeout,
            counters: CallCounters::default(),
            signs: AtomicBool::new(false),
            over_quota: AtomicBool::new(false),
        })
    }

    /// Makes attempts at a call. Each is given the route to send its request by.
    pub(super) async fn call<T, F: Future<Output = Result<T>>>(
        &self,
        operation: Operation,
        target: &str,
        deadline: Instant,
        request: impl Fn(Route) -> F,
    ) -> Result<T> {
        let request = &request;
        let attempt = |route| async move {
            let request = pin!(request(route));
            self.attempt(operation, target, deadline, request).await
        };
        self.attempts.run(deadline, attempt).await
    }

    /// Counts the request and ends it in time. It is pinned: given by value, it would be here twice, and it is large.
    async fn attempt<T>(
        &self,
        operation: Operation,
        target: &str,
        deadline: Instant,
        request: Pin<&mut impl Future<Output = Result<T>>>,
    ) -> Result<T> {
        let now = Instant::now();
        if deadline <= now {
            return Err(ObjectError::new(
                operation,
                target,
                ErrorKind::Deadline,
                "before it was sent",
            ));
        }
        self.counters.add(operation);
        let limit = now + self.request_timeout;
        let ended = tokio::time::timeout_at(limit.min(deadline), request);
        match self.counters.times_of(operation).of(ended).await {
            Ok(result) => {
                self.saw_quota(operation, result.as_ref().err());
                result
            }
            Err(_) if limit < deadline => Err(ObjectError::new(
                operation,
                target,
                ErrorKind::Timeout,
                format!("{:?}", self.request_timeout),
            )),
            Err(_) => Err(ObjectError::new(operation, target, ErrorKind::Deadline, "")),
        }
    }
}

impl S3 {
    /// An answer of the SDK's, with errors as ours.
    pub(super) async fn answer<T, E>(
        &self,
        operation: Operation,
        target: &str,
        request: impl Future<Output = std::result::Result<T, SdkError<E, HttpResponse>>>,
    ) -> Result<T>
    where
        T: RequestId,
        E: ProvideErrorMetadata + std::error::Error + 'static,
    {
        let answer = request.await;
        self.saw_request_id(match &answer {
            Ok(answer) => answer.request_id().is_some(),
            Err(SdkError::ServiceError(error)) => error.err().meta().request_id().is_some(),
            Err(_) => false,
        });
        answer.map_err(|error| ObjectError::from_sdk(operation, target, &error, self.signs()))
    }

    pub(super) async fn send(&self, operation: Operation, read: Read) -> Result<AnswerHead> {
        let key = &read.key;
        match self.reads.send(&read).await {
            Ok(answer) => {
                self.saw_request_id(answer.has_request_id);
                Ok(answer)
            }
            Err(ReadError::Refused(refusal)) => {
                self.saw_request_id(refusal.request_id.is_some());
                Err(ObjectError::from_refusal(operation, key, &refusal, self.signs()))
            }
            Err(ReadError::Net(error)) => Err(ObjectError::from_net(operation, key, &error)),
            Err(ReadError::Sdk(error)) => Err(ObjectError::from_failure(operation, key, &error)),
        }
    }

    fn saw_request_id(&self, saw: bool) {
        // A write would take the line from all other cores.
        if saw && !self.signs() {
            self.signs.store(true, Ordering::Relaxed);
        }
    }

    fn signs(&self) -> bool {
        self.signs.load(Ordering::Relaxed)
    }

    fn saw_quota(&self, operation: Operation, error: Option<&ObjectError>) {
        let over = match error.map(|error| error.kind) {
            Some(ErrorKind::Quota) => true,
            None if operation == Operation::Put => false,
            // Other 403s are the keys' again.
            Some(ErrorKind::Denied | ErrorKind::Credentials) => false,
            _ => return,
        };
        if over != self.over_quota.load(Ordering::Relaxed) {
            self.over_quota.store(over, Ordering::Relaxed);
        }
    }
}

/// More than any server gives; what is known of a chunk keeps it.
const ETAG_BYTES_MAX: usize = 256;

fn meta_of(
    operation: Operation,
    key: &str,
    len: Option<u64>,
    etag: Option<&str>,
    modified: Option<&DateTime>,
) -> Result<ObjectMeta> {
    let missing = |what| {
        ObjectError::new(
            operation,
            key,
            ErrorKind::Protocol,
            format!("no {what} in the answer"),
        )
    };
    let etag = etag
        .and_then(usable_etag)
        .ok_or_else(|| missing("ETag of at most 256 bytes"))?;
    let version = Version {
        etag: etag.into(),
        modified: modified.map_or(0, DateTime::secs),
    };
    Ok(ObjectMeta {
        len: len.ok_or_else(|| missing("length"))?,
        version,
        run: None,
    })
}

/// Without its quotes. A longer one than any server gives is none: it would be kept for every chunk.
fn usable_etag(etag: &str) -> Option<&str> {
    Some(unquoted(etag)).filter(|etag| (1..=ETAG_BYTES_MAX).contains(&etag.len()))
}

/// The request goes by this route.
pub(super) fn by<T, E, B>(
    route: Route,
    request: CustomizableOperation<T, E, B>,
) -> CustomizableOperation<T, E, B> {
    request.mutate_request(move |request| request.add_extension(route.clone()))
}

pub(super) fn quoted(etag: &str) -> String {
    format!("\"{etag}\"")
}

fn length(len: Option<i64>) -> Option<u64> {
    len.and_then(|len| len.try_into().ok())
}

impl ObjectStore for S3 {
    fn head<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        let operation = Operation::Head;
        Box::pin(async move {
            let hedge = self.reads.hedge(0);
            let attempt = |route| async move {
                let read = Read {
                    method: "HEAD",
                    key: key.to_owned(),
                    range: None,
                    if_match: None,
                    landing: None,
                    route,
                };
                let request = pin!(async {
                    let answer = self.send(operation, read).await?;
                    let meta = meta_of(
                        operation,
                        key,
                        answer.content_length,
                        answer.etag.as_deref(),
                        answer.last_modified.as_ref(),
                    );
                    meta.map(|meta| ObjectMeta {
                        run: answer.run,
                        ..meta
                    })
                });
                self.attempt(operation, key, deadline, request).await
            };
            let nothing = None::<&Handover<()>>;
            self.attempts.run_hedged(deadline, &hedge, nothing, attempt).await
        })
    }

    fn attributes<'a>(&'a self, key: &'a str, deadline: Instant) -> StoreFuture<'a, ObjectMeta> {
        let operation = Operation::Attributes;
        Box::pin(self.call(operation, key, deadline, move |route| async move {
            let request = self.client.get_object_attributes().bucket(&self.bucket).key(key);
            let request = request.object_attributes(ObjectAttributes::ObjectSize);
            let request = request.object_attributes(ObjectAttributes::Etag);
            let request = by(route, request.customize()).send();
            let answer = self.answer(operation, key, request).await?;
            meta_of(
                operation,
                key,
                length(answer.object_size()),
                answer.e_tag(),
                answer.last_modified(),
            )
        }))
    }

    fn get<'a>(&'a self, get: GetRange<'a>, landing: Landing, deadline: Instant) -> GetFuture<'a> {
        let operation = Operation::Get;
        let expect = Expect {
            range: get.range.start as u64..get.range.end as u64,
            object_len: get.object_len as u64,
            etag: get.if_match.map(Into::into),
        };
        let cell = LandingCell::new(landing, expect);
        Box::pin(async move {
            let hedge = self.reads.hedge(get.range.len());
            let cell = &cell;
            let attempt = |route| async move {
                let read = Read {
                    method: "GET",
                    key: get.key.to_owned(),
                    range: Some(format!("bytes={}-{}", get.range.start, get.range.end - 1)),
                    if_match: get.if_match.map(quoted),
                    landing: Some(cell.clone()),
                    route,
                };
                let (key, len) = (get.key, get.object_len);
                let request = pin!(async {
                    let answer = self.send(operation, read).await.map_err(|mut error| {
                        if let ErrorKind::Length { expected, .. } = &mut error.kind {
                            *expected = len;
                        }
                        error
                    })?;
                    let (len, etag) = (Some(len as u64), answer.etag.as_deref());
                    meta_of(operation, key, len, etag, answer.last_modified.as_ref())
                });
                self.attempt(operation, key, deadline, request).await
            };
            let handover = Some(cell.handover());
            let result = self.attempts.run_hedged(deadline, &hedge, handover, attempt);
            let result = result.await;
            // All requests are over or given up, so nothing else holds it.
            let landing = cell.take().expect("the HTTP client gives the landing back");
            (landing, result)
        })
    }

    fn read<'a>(&'a self, key: &'a str, limit: usize, deadline: Instant) -> StoreFuture<'a, Bytes> {
        let operation = Operation::Get;
        Box::pin(self.call(operation, key, deadline, move |route| async move {
            let request = self.client.get_object().bucket(&self.bucket).key(key);
            let request = by(route, request.customize()).send();
            let answer = self.answer(operation, key, request).await?;
            let len = answer.content_length().and_then(|len| usize::try_from(len).ok());
            if len.is_none_or(|len| len > limit) {
                let detail = format!("{len:?} bytes, at most {limit} were expected");
                return Err(ObjectError::new(operation, key, ErrorKind::Refused, detail));
            }
            let body = answer.body.collect().await;
            let body =
                body.map_err(|cause| ObjectError::new(operation, key, ErrorKind::Broken, cause.to_string()))?;
            Ok(body.into_bytes())
        }))
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        when: Condition<'a>,
        deadline: Instant,
    ) -> StoreFuture<'a, Arc<str>> {
        self.put_with(key, body, PutExtras::default(), when, deadline)
    }

    fn put_with<'a>(
        &'a self,
        key: &'a str,
        body: Bytes,
        extras: PutExtras<'a>,
        when: Condition<'a>,
        deadline: Instant,
    ) -> StoreFuture<'a, Arc<str>> {
        let operation = Operation::Put;
        let checksum = extras.crc64.map(|crc64| base64::encode(crc64.to_be_bytes()));
        Box::pin(self.call(operation, key, deadline, move |route| {
            let (body, checksum) = (ByteStream::from(body.clone()), checksum.clone());
            async move {
                let mut request = self.client.put_object().bucket(&self.bucket).key(key).body(body);
                // Given with the request, so that the SDK reads no body for it.
                request = request.set_checksum_crc64_nvme(checksum);
                if let Some(run) = extras.run {
                    request = request.metadata(RUN_KEY, run);
                }
                let request = match when {
                    Condition::Always => request,
                    Condition::IfAbsent => request.if_none_match("*"),
                    // Without quotes: with them, RGW 16 never finds it equal; the others take both.
                    Condition::IfMatch(etag) => request.if_match(etag),
                };
                // The payload has digests of its own; hashing it for the signature would cost more than sending it.
                let request = by(route, request.customize()).disable_payload_signing().send();
                let answer = self.answer(operation, key, request).await?;
                Ok(answer.e_tag().and_then(usable_etag).unwrap_or_default().into())
            }
        }))
    }

    fn list<'a>(
        &'a self,
        prefix: &'a str,
        from: Option<&'a str>,
        deadline: Instant,
    ) -> StoreFuture<'a, ListPage> {
        self.list_from(prefix, from, None, deadline)
    }

    fn list_after<'a>(
        &'a self,
        prefix: &'a str,
        after: &'a str,
        deadline: Instant,
    ) -> StoreFuture<'a, ListPage> {
        self.list_from(prefix, None, Some(after), deadline)
    }

    fn delete_matching<'a>(
        &'a self,
        objects: &'a [(String, String)],
        deadline: Instant,
    ) -> StoreFuture<'a, usize> {
        Box::pin(self.delete_versions(objects, deadline))
    }

    fn read_front<'a>(&'a self, key: &'a str, bytes: usize, deadline: Instant) -> StoreFuture<'a, Bytes> {
        Box::pin(self.front(key, bytes, deadline))
    }

    fn copy_in_place<'a>(
        &'a self,
        key: &'a str,
        meta: &'a ObjectMeta,
        deadline: Instant,
    ) -> StoreFuture<'a, ()> {
        Box::pin(self.renew(key, meta, deadline))
    }

    fn server_time(&self, deadline: Instant) -> StoreFuture<'_, i64> {
        Box::pin(self.clock(deadline))
    }

    fn lifecycle(&self, deadline: Instant) -> StoreFuture<'_, Option<LifecycleRules>> {
        Box::pin(self.get_lifecycle(deadline))
    }

    fn set_lifecycle<'a>(
        &'a self,
        rules: Option<&'a LifecycleRules>,
        deadline: Instant,
    ) -> StoreFuture<'a, ()> {
        Box::pin(self.put_lifecycle(rules, deadline))
    }

    fn delete<'a>(&'a self, keys: &'a [String], deadline: Instant) -> StoreFuture<'a, ()> {
        Box::pin(self.delete_keys(keys, deadline))
    }

    fn check_bucket(&self, deadline: Instant) -> StoreFuture<'_, ()> {
        Box::pin(self.check(deadline))
    }

    fn create_bucket(&self, deadline: Instant) -> StoreFuture<'_, ()> {
        Box::pin(self.create(deadline))
    }

    fn endpoints(&self) -> Vec<EndpointState> {
        self.reads.endpoints()
    }

    fn totals(&self) -> Requests {
        self.reads.totals()
    }

    fn is_out_of_reach(&self) -> bool {
        self.reads.is_out_of_reach()
    }

    fn window_bytes(&self) -> usize {
        self.reads.window_bytes()
    }

    fn requests(&self) -> RequestCounts {
        self.counters.read()
    }

    fn request_times(&self) -> RequestTimes {
        self.counters.times()
    }

    fn window_waits(&self) -> Times {
        self.reads.window_waits()
    }

    fn connection_waits(&self) -> Times {
        self.reads.connection_waits()
    }

    fn names(&self) -> Vec<NameState> {
        self.reads.names()
    }

    fn traffic(&self) -> Traffic {
        self.http.traffic()
    }

    fn is_over_quota(&self) -> bool {
        self.over_quota.load(Ordering::Relaxed)
    }
}

impl S3 {
    fn list_from<'a>(
        &'a self,
        prefix: &'a str,
        token: Option<&'a str>,
        after: Option<&'a str>,
        deadline: Instant,
    ) -> StoreFuture<'a, ListPage> {
        let operation = Operation::List;
        Box::pin(self.call(operation, prefix, deadline, move |route| async move {
            let request = self.client.list_objects_v2().bucket(&self.bucket).prefix(prefix);
            let request = request.set_continuation_token(token.map(Into::into));
            let request = request.set_start_after(after.map(Into::into));
            let request = by(route, request.customize()).send();
            let answer = self.answer(operation, prefix, request).await?;
            // An unreadable answer must not look like an end, or like nothing.
            let odd = |what| ObjectError::new(operation, prefix, ErrorKind::Protocol, what);
            let next = match (answer.is_truncated, answer.next_continuation_token) {
                (Some(true), None) => {
                    return Err(odd("a page that is not the last, without a token for the next"));
                }
                (Some(true), token) => token,
                _ => None,
            };
            let listed = |object: Object| {
                Some(Listed {
                    len: length(object.size())?,
                    etag: object.e_tag().map(unquoted).unwrap_or_default().to_owned(),
                    modified: object.last_modified().map_or(0, DateTime::secs),
                    key: object.key?,
                })
            };
            let objects: Option<Vec<Listed>> = answer
                .contents
                .unwrap_or_default()
                .into_iter()
                .map(listed)
                .collect();
            Ok(ListPage {
                objects: objects.ok_or_else(|| odd("an entry without key or size"))?,
                next,
            })
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use aws_sdk_s3::presigning::PresigningConfig;

    #[tokio::test]
    async fn the_bucket_is_in_the_path_or_in_the_host() {
        for (path_style, start) in [
            (true, "http://rgw.test:8000/chunks/pre/key?"),
            (false, "http://chunks.rgw.test:8000/pre/key?"),
        ] {
            let second = Duration::from_secs(1);
            let options = S3Options {
                path_style,
                ..client::for_tests("http://rgw.test:8000", "chunks")
            };
            let s3 = S3::connect(&options).await.unwrap();
            let request = s3.client.get_object().bucket(&s3.bucket).key("pre/key");
            let signed = request
                .presigned(PresigningConfig::expires_in(second).unwrap())
                .await
                .unwrap();
            assert!(signed.uri().starts_with(start), "{}", signed.uri());
        }
    }
}
