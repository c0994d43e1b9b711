//! The calls of a bucket's upkeep: whether it may be used, copies in place, the server's clock, lifecycle rules.
//!
//! Lifecycle rules go as the server's own XML: the SDK's types would lose what they don't know of rules that others made.

use std::sync::{Arc, Mutex, PoisonError};

use aws_sdk_s3::error::ProvideErrorMetadata;
use aws_sdk_s3::types::{BucketLocationConstraint, CreateBucketConfiguration, MetadataDirective};
use aws_smithy_runtime_api::box_error::BoxError;
use aws_smithy_runtime_api::client::interceptors::context::{
    AfterDeserializationInterceptorContextRef, BeforeTransmitInterceptorContextMut,
};
use aws_smithy_runtime_api::client::interceptors::{Intercept, dyn_dispatch_hint};
use aws_smithy_runtime_api::client::runtime_components::RuntimeComponents;
use aws_smithy_types::DateTime;
use aws_smithy_types::base64;
use aws_smithy_types::body::SdkBody;
use aws_smithy_types::config_bag::ConfigBag;
use aws_smithy_types::date_time::Format;
use bytes::Bytes;
use md5::{Digest, Md5};
use tokio::time::Instant;

use super::error::{ErrorKind, ObjectError, Operation};
use super::reads::encode_key;
use super::s3::{S3, by, quoted};
use super::store::{LifecycleRules, ObjectMeta, Result};
use crate::format::RUN_KEY;

impl S3 {
    pub(super) async fn front(&self, key: &str, bytes: usize, deadline: Instant) -> Result<Bytes> {
        let operation = Operation::Get;
        self.call(operation, key, deadline, |route| async move {
            let request = self.client.get_object().bucket(&self.bucket).key(key);
            let request = request.range(format!("bytes=0-{}", bytes.saturating_sub(1)));
            let request = by(route, request.customize()).send();
            let mut answer = self.answer(operation, key, request).await?;
            // A server that gives the whole object all the same is left after the part that was asked for.
            let mut front = Vec::with_capacity(bytes);
            while front.len() < bytes
                && let Some(part) = answer.body.next().await
            {
                let broken = |cause| ObjectError::new(operation, key, ErrorKind::Broken, format!("{cause}"));
                front.extend_from_slice(&part.map_err(broken)?);
            }
            front.truncate(bytes);
            Ok(front.into())
        })
        .await
    }

    pub(super) async fn renew(&self, key: &str, meta: &ObjectMeta, deadline: Instant) -> Result<()> {
        let operation = Operation::Put;
        let source = encode_key(&format!("{}/{key}", self.bucket)).into_owned();
        let source = &source;
        self.call(operation, key, deadline, |route| async move {
            let request = self.client.copy_object().bucket(&self.bucket).key(key);
            // Without this a server refuses a copy onto itself: nothing would change.
            let request = request.metadata_directive(MetadataDirective::Replace);
            let mut request = request
                .copy_source(source)
                .copy_source_if_match(quoted(&meta.version.etag));
            // It replaces all metadata.
            if let Some(run) = &meta.run {
                request = request.metadata(RUN_KEY, &**run);
            }
            let request = by(route, request.customize()).send();
            self.answer(operation, key, request).await.map(drop)
        })
        .await
    }

    pub(super) async fn clock(&self, deadline: Instant) -> Result<i64> {
        let operation = Operation::Bucket;
        self.call(operation, &self.bucket, deadline, |route| async move {
            let seen = Seen::default();
            let request = self.client.list_objects_v2().bucket(&self.bucket);
            let request = request.prefix(&self.prefix).max_keys(1).customize();
            let request = by(route, request).interceptor(seen.clone()).send();
            self.answer(operation, &self.bucket, request).await?;
            let date = seen.take().date;
            let date = date.and_then(|date| DateTime::from_str(&date, Format::HttpDate).ok());
            let missing = "no Date in the answer";
            date.map(|date| date.secs())
                .ok_or_else(|| ObjectError::new(operation, &self.bucket, ErrorKind::Protocol, missing))
        })
        .await
    }

    pub(super) async fn get_lifecycle(&self, deadline: Instant) -> Result<Option<LifecycleRules>> {
        let operation = Operation::Bucket;
        self.call(operation, &self.bucket, deadline, |route| async move {
            let seen = Seen::default();
            let request = self.client.get_bucket_lifecycle_configuration();
            let request = by(route, request.bucket(&self.bucket).customize()).interceptor(seen.clone());
            // rclone gives a listing.
            let other = "it answers with something else";
            let other = || ObjectError::new(operation, &self.bucket, ErrorKind::Unsupported, other);
            match request.send().await {
                Err(error) if error.code() == Some("NoSuchLifecycleConfiguration") => Ok(None),
                Err(error) if error.raw_response().is_some_and(|raw| raw.status().is_success()) => {
                    Err(other())
                }
                answer => {
                    let answer = self.answer(operation, &self.bucket, async { answer }).await?;
                    let body = seen.take().body;
                    let body = body.filter(|body| body.contains("LifecycleConfiguration"));
                    let smallest = answer.transition_default_minimum_object_size();
                    Ok(Some(LifecycleRules {
                        xml: body.ok_or_else(other)?,
                        smallest_moved: smallest.map(|smallest| smallest.as_str().to_owned()),
                    }))
                }
            }
        })
        .await
    }

    pub(super) async fn put_lifecycle(
        &self,
        rules: Option<&LifecycleRules>,
        deadline: Instant,
    ) -> Result<()> {
        let operation = Operation::Bucket;
        self.call(operation, &self.bucket, deadline, |route| async move {
            let Some(rules) = rules else {
                let request = self.client.delete_bucket_lifecycle().bucket(&self.bucket);
                let request = by(route, request.customize()).send();
                return self.answer(operation, &self.bucket, request).await.map(drop);
            };
            let request = self.client.put_bucket_lifecycle_configuration();
            let smallest = rules.smallest_moved.as_deref().map(Into::into);
            let request = request.set_transition_default_minimum_object_size(smallest);
            let request = by(route, request.bucket(&self.bucket).customize());
            let request = request.interceptor(Body(rules.xml.clone())).send();
            self.answer(operation, &self.bucket, request).await.map(drop)
        })
        .await
    }

    pub(super) async fn check(&self, deadline: Instant) -> Result<()> {
        // Not HeadBucket: its errors have no body, so they can't tell wrong credentials from a missing right.
        let operation = Operation::Bucket;
        self.call(operation, &self.bucket, deadline, |route| async move {
            let request = self.client.list_objects_v2().bucket(&self.bucket);
            let request = request.prefix(&self.prefix).max_keys(1);
            let request = by(route, request.customize()).send();
            self.answer(operation, &self.bucket, request).await.map(drop)
        })
        .await
    }

    pub(super) async fn create(&self, deadline: Instant) -> Result<()> {
        let operation = Operation::Bucket;
        self.call(operation, &self.bucket, deadline, |route| async move {
            // AWS wants the region here, except for the one that is the default.
            let place = (self.region != "us-east-1").then(|| {
                let region = BucketLocationConstraint::from(self.region.as_str());
                let place = CreateBucketConfiguration::builder().location_constraint(region);
                place.build()
            });
            let request = self.client.create_bucket().bucket(&self.bucket);
            let request = request.set_create_bucket_configuration(place);
            match by(route, request.customize()).send().await {
                Ok(_) => Ok(()),
                Err(error) if error.code() == Some("BucketAlreadyOwnedByYou") => Ok(()),
                answer => {
                    let answer = self.answer(operation, &self.bucket, async { answer });
                    answer.await.map(drop)
                }
            }
        })
        .await
    }
}

/// What the SDK's types leave out of an answer.
#[derive(Debug, Clone, Default)]
struct Seen(Arc<Mutex<Parts>>);

#[derive(Debug, Default)]
struct Parts {
    date: Option<String>,
    body: Option<String>,
}

impl Seen {
    fn take(&self) -> Parts {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[dyn_dispatch_hint]
impl Intercept for Seen {
    fn name(&self) -> &'static str {
        "Seen"
    }

    fn read_after_deserialization(
        &self,
        context: &AfterDeserializationInterceptorContextRef<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> std::result::Result<(), BoxError> {
        let answer = context.response();
        let body = answer.body().bytes().map(<[u8]>::to_vec);
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Parts {
            date: answer.headers().get("date").map(ToOwned::to_owned),
            body: body.and_then(|body| String::from_utf8(body).ok()),
        };
        Ok(())
    }
}

/// A request's body in place of the SDK's, before the SDK calculates its checksum and signs it.
#[derive(Debug)]
struct Body(String);

#[dyn_dispatch_hint]
impl Intercept for Body {
    fn name(&self) -> &'static str {
        "Body"
    }

    fn modify_before_retry_loop(
        &self,
        context: &mut BeforeTransmitInterceptorContextMut<'_>,
        _components: &RuntimeComponents,
        _config: &mut ConfigBag,
    ) -> std::result::Result<(), BoxError> {
        let request = context.request_mut();
        let headers = request.headers_mut();
        headers.insert("content-type", "application/xml");
        headers.insert("content-length", self.0.len().to_string());
        // Older servers know no other checksum of it, and want one.
        headers.insert("content-md5", base64::encode(Md5::digest(self.0.as_bytes())));
        *request.body_mut() = SdkBody::from(self.0.as_str());
        Ok(())
    }
}
