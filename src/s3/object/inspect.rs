//! What `kvgate doctor` asks of a server beyond the calls of a gateway: where it is, who asks, and how it answers.

use std::net::SocketAddr;

use aws_credential_types::provider::ProvideCredentials;
use aws_sdk_s3::error::ProvideErrorMetadata;
use aws_sdk_s3::types::{
    BucketVersioningStatus, ExpirationStatus, LifecycleExpiration, LifecycleRule, Transition,
};
use tokio::time::Instant;

use super::client::{self, S3ClientError, S3Options};
use super::error::Operation;
use super::reads::Read;
use super::s3::{S3, by, quoted};
use super::store::Result;
use crate::s3::dns::AddressSource;
use crate::s3::fanout::Route;
use crate::s3::net::{NetClient, Origin, ServerAddress};

/// The answer to a ranged GET, which may have been refused.
#[derive(Debug, Clone)]
pub struct RangeAnswer {
    pub status: u16,
    pub content_length: Option<u64>,
    /// As in the header.
    pub content_range: Option<String>,
}

/// A lifecycle rule that is in force.
#[derive(Debug, Clone)]
pub struct AgeRule {
    /// The start of the keys that it is for.
    pub prefix: String,
    /// Days after which objects are removed.
    pub days: Option<i32>,
    /// Days after which objects move to a class of storage that can't be read at once, maybe.
    pub moves_after: Option<i32>,
}

impl S3 {
    /// The origin of all requests for objects.
    pub(crate) fn origin(&self) -> &Origin {
        self.reads.origin()
    }

    /// As in the Host header of requests for objects.
    pub(crate) fn host(&self) -> &str {
        self.reads.host()
    }

    /// The sources of the addresses of that origin.
    pub(crate) fn places(&self) -> Vec<ServerAddress> {
        self.http.places(self.origin())
    }

    /// A client of the same server that knows one of its addresses alone.
    pub(crate) fn client_at(
        &self,
        options: &S3Options,
        address: SocketAddr,
        server_name: &str,
    ) -> Result<NetClient, S3ClientError> {
        let place = ServerAddress {
            server_name: server_name.to_owned(),
            source: AddressSource::Host {
                name: address.ip().to_string(),
                port: address.port(),
            },
        };
        client::net_client_with(options, Some((self.origin().host.clone(), vec![place])))
    }

    /// The access key that requests are signed with. Fails with the chain's own words.
    pub async fn access_key_id(&self) -> Result<String, String> {
        let Some(provider) = &self.credentials else {
            return Err("the chain has no source of credentials".into());
        };
        let found = provider.provide_credentials().await;
        let found = found.map_err(|error| {
            let causes =
                std::iter::successors(Some(&error as &dyn std::error::Error), |error| error.source());
            let words = causes.last().map(ToString::to_string).unwrap_or_default();
            // The others say of each source that it has none.
            words
                .lines()
                .next()
                .unwrap_or_default()
                .trim_end_matches(". Attempted:")
                .to_owned()
        })?;
        Ok(found.access_key_id().to_owned())
    }

    /// One ranged GET of the first `len` bytes. Any status is an answer.
    pub async fn range_answer(
        &self,
        key: &str,
        len: usize,
        if_match: Option<&str>,
        deadline: Instant,
    ) -> Result<RangeAnswer> {
        let operation = Operation::Get;
        let range = format!("bytes=0-{}", len.saturating_sub(1));
        self.call(operation, key, deadline, |route: Route| {
            let read = Read {
                method: "GET",
                key: key.to_owned(),
                range: Some(range.clone()),
                if_match: if_match.map(quoted),
                landing: None,
                route,
            };
            async move {
                let answer = self.send(operation, read).await?;
                Ok(RangeAnswer {
                    status: answer.status,
                    content_length: answer.content_length,
                    content_range: answer.content_range,
                })
            }
        })
        .await
    }

    /// The rules of the bucket that are in force.
    pub async fn age_rules(&self, deadline: Instant) -> Result<Vec<AgeRule>> {
        let operation = Operation::Bucket;
        self.call(operation, &self.bucket, deadline, |route| async {
            let request = self
                .client
                .get_bucket_lifecycle_configuration()
                .bucket(&self.bucket);
            match by(route, request.customize()).send().await {
                Err(error) if error.code() == Some("NoSuchLifecycleConfiguration") => Ok(Vec::new()),
                answer => {
                    let answer = self.answer(operation, &self.bucket, async { answer }).await?;
                    Ok(answer.rules().iter().filter_map(age_rule).collect())
                }
            }
        })
        .await
    }

    /// Whether the bucket keeps what is overwritten or removed.
    pub async fn keeps_versions(&self, deadline: Instant) -> Result<bool> {
        let operation = Operation::Bucket;
        self.call(operation, &self.bucket, deadline, |route| async {
            let request = self.client.get_bucket_versioning().bucket(&self.bucket);
            let request = by(route, request.customize()).send();
            let answer = self.answer(operation, &self.bucket, request).await?;
            Ok(answer.status() == Some(&BucketVersioningStatus::Enabled))
        })
        .await
    }
}

fn age_rule(rule: &LifecycleRule) -> Option<AgeRule> {
    if rule.status() != &ExpirationStatus::Enabled {
        return None;
    }
    let filter = rule.filter();
    let of_filter = filter.and_then(|filter| filter.prefix().or(filter.and().and_then(|and| and.prefix())));
    #[expect(deprecated, reason = "older servers still answer with it")]
    let prefix = of_filter.or(rule.prefix()).unwrap_or_default().to_owned();
    Some(AgeRule {
        prefix,
        days: rule.expiration().and_then(LifecycleExpiration::days),
        moves_after: rule.transitions().iter().filter_map(Transition::days).min(),
    })
}
