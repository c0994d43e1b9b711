//! Where the keys come from: the SDK's chain (environment, profile, web identity, container, instance), built anew each
//! time, for it reads a file only once in its life and would never see keys that were rotated.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use aws_config::Region;
use aws_config::default_provider::credentials::DefaultCredentialsChain;
use aws_config::provider_config::ProviderConfig;
use aws_credential_types::Credentials;
use aws_credential_types::provider::{self, ProvideCredentials, future};

use super::sign::EXPIRES_SOON;
use crate::net::Connector;

#[derive(Debug)]
pub(super) struct Chain {
    http: Connector,
    region: Region,
    /// Keys without an expiry are asked for again after so long.
    ttl: Duration,
    /// The last of those: a file that is being written is no reason to forget them.
    last: Mutex<Option<Credentials>>,
}

impl Chain {
    pub fn new(http: Connector, region: Region, ttl: Duration) -> Self {
        Self {
            http,
            region,
            ttl,
            last: Mutex::new(None),
        }
    }

    async fn credentials(&self) -> provider::Result {
        // It has what was read of the profiles, and so do its clones.
        let config = ProviderConfig::without_region()
            .with_region(Some(self.region.clone()))
            .with_http_client(self.http.clone());
        let chain = DefaultCredentialsChain::builder()
            .configure(config)
            .region(self.region.clone());
        self.lasting(chain.build().await.provide_credentials().await)
    }

    /// Keys that never expire do so for whoever keeps them.
    fn lasting(&self, found: provider::Result) -> provider::Result {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let mut keys = match (found, &*last) {
            (Ok(keys), _) if keys.expiry().is_some() => {
                *last = None;
                return Ok(keys);
            }
            (Ok(keys), _) => last.insert(keys).clone(),
            (Err(error), Some(last)) => {
                tracing::warn!(%error, "no credentials are found any more: the last ones are used");
                last.clone()
            }
            (Err(error), None) => return Err(error),
        };
        *keys.expiry_mut() = Some(SystemTime::now() + self.ttl + EXPIRES_SOON);
        Ok(keys)
    }
}

impl ProvideCredentials for Chain {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(self.credentials())
    }
}

#[cfg(test)]
mod tests {
    use aws_credential_types::provider::error::CredentialsError;

    use super::*;

    #[tokio::test]
    async fn keys_without_an_expiry_are_asked_for_again_and_not_forgotten() {
        let options = super::super::client::for_tests("http://127.0.0.1:1", "b");
        let http = super::super::client::connector(&options).unwrap();
        let ttl = Duration::from_secs(60);
        let chain = Chain::new(http, Region::new("us-east-1"), ttl);
        let none = || Err(CredentialsError::not_loaded("the file is empty"));
        assert!(chain.lasting(none()).is_err());

        let key = |keys: provider::Result| keys.unwrap().access_key_id().to_owned();
        let keys = chain.lasting(Ok(Credentials::from_keys("A", "a", None))).unwrap();
        let expiry = keys.expiry().unwrap();
        assert!(expiry <= SystemTime::now() + ttl + EXPIRES_SOON && expiry > SystemTime::now() + ttl);
        assert_eq!(key(chain.lasting(none())), "A");
        assert_eq!(
            key(chain.lasting(Ok(Credentials::from_keys("B", "b", None)))),
            "B"
        );
        assert_eq!(key(chain.lasting(none())), "B");

        // Those that expire by themselves do it when they say so.
        let expiry = SystemTime::now() + Duration::from_secs(7);
        let session = Credentials::new("C", "c", None, Some(expiry), "test");
        assert_eq!(chain.lasting(Ok(session)).unwrap().expiry(), Some(expiry));
        assert!(chain.lasting(none()).is_err());
    }
}
