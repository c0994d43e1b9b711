//! Where the keys come from: the SDK's chain (environment, profile, web identity, container, instance). It reads a file only
//! once in its life and would never see keys that were rotated, so where keys don't expire it is built anew each time.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use aws_config::Region;
use aws_config::default_provider::credentials::DefaultCredentialsChain;
use aws_config::provider_config::ProviderConfig;
use aws_credential_types::Credentials;
use aws_credential_types::provider::error::CredentialsError;
use aws_credential_types::provider::{self, ProvideCredentials, future};

use super::sign::EXPIRES_SOON;
use crate::s3::net::NetClient;

#[derive(Debug)]
pub(super) struct CredentialChain {
    http: NetClient,
    region: Region,
    /// Time after which keys without an expiry are asked for again.
    ttl: Duration,
    last: Mutex<Last>,
}

/// The credentials that were found last.
#[derive(Debug, Default)]
enum Last {
    #[default]
    Nothing,
    /// Keys without an expiry: a file that is being written is no reason to forget them.
    Keys(Credentials),
    /// Credentials that expire. Their chain bridges failures to renew them, as long as it lives.
    Session(Arc<DefaultCredentialsChain>),
}

impl CredentialChain {
    pub fn new(http: NetClient, region: Region, ttl: Duration) -> Self {
        Self {
            http,
            region,
            ttl,
            last: Mutex::default(),
        }
    }

    async fn credentials(&self) -> provider::Result {
        if let Some(error) = half(|name| std::env::var(name).ok()) {
            return Err(CredentialsError::invalid_configuration(error));
        }
        let kept = match &*self.lock() {
            Last::Session(chain) => Some(Arc::clone(chain)),
            Last::Nothing | Last::Keys(_) => None,
        };
        let chain = match kept {
            Some(chain) => chain,
            None => Arc::new(self.build().await),
        };
        let found = chain.provide_credentials().await;
        self.lasting(found, chain)
    }

    async fn build(&self) -> DefaultCredentialsChain {
        // It has what was read of the profiles, and so do its clones.
        let config = ProviderConfig::without_region()
            .with_region(Some(self.region.clone()))
            .with_http_client(self.http.clone());
        let chain = DefaultCredentialsChain::builder().configure(config);
        chain.region(self.region.clone()).build().await
    }

    /// Remembers what was found. Keys that never expire are given an expiry, so that their user asks again.
    fn lasting(&self, found: provider::Result, chain: Arc<DefaultCredentialsChain>) -> provider::Result {
        let mut last = self.lock();
        let keys = match (found.and_then(printable), &*last) {
            (Ok(keys), _) if keys.expiry().is_some() => {
                *last = Last::Session(chain);
                return Ok(keys);
            }
            (Ok(keys), _) => {
                *last = Last::Keys(keys.clone());
                keys
            }
            (Err(error), Last::Keys(last)) => {
                tracing::warn!(%error, "no credentials are found any more: the last ones are used");
                last.clone()
            }
            (Err(error), _) => return Err(error),
        };
        Ok(self.expiring(keys))
    }

    fn expiring(&self, mut keys: Credentials) -> Credentials {
        *keys.expiry_mut() = Some(SystemTime::now() + self.ttl + EXPIRES_SOON);
        keys
    }

    fn lock(&self) -> MutexGuard<'_, Last> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Half a pair of keys in the environment. The chain would go on to other places, and the message would be of those.
fn half(variable: impl Fn(&str) -> Option<String>) -> Option<String> {
    let is_set = |name| variable(name).is_some_and(|value| !value.trim().is_empty());
    let (id, secret) = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY");
    // The SDK's other name.
    let has_secret = is_set(secret) || is_set("SECRET_ACCESS_KEY");
    match (is_set(id), has_secret) {
        (true, false) => Some(format!("{id} is set and {secret} is not: set both, or neither")),
        (false, true) if is_set(secret) => {
            Some(format!("{secret} is set and {id} is not: set both, or neither"))
        }
        _ => None,
    }
}

/// A key goes into request heads as it is, and a line break that somebody's `echo` left at its end would end a line there.
fn printable(keys: Credentials) -> provider::Result {
    let parts = [
        ("access key id", keys.access_key_id()),
        ("secret access key", keys.secret_access_key()),
        ("session token", keys.session_token().unwrap_or_default()),
    ];
    let is_broken = |part: &str| !part.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    match parts.iter().find(|(_, part)| is_broken(part)) {
        Some((name, _)) => Err(CredentialsError::invalid_configuration(format!(
            "the {name} has a line break or another character that can't be printed: set it again without, as with \
             `printf %s` in place of `echo`"
        ))),
        None => Ok(keys),
    }
}

impl ProvideCredentials for CredentialChain {
    fn provide_credentials<'a>(&'a self) -> future::ProvideCredentials<'a>
    where
        Self: 'a,
    {
        future::ProvideCredentials::new(self.credentials())
    }

    /// When the SDK has waited for long enough.
    fn fallback_on_interrupt(&self) -> Option<Credentials> {
        match &*self.lock() {
            Last::Nothing => None,
            Last::Keys(keys) => Some(self.expiring(keys.clone())),
            Last::Session(chain) => chain.fallback_on_interrupt(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn half_a_pair_of_keys_names_the_other_half() {
        let (id, secret) = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY");
        let of = |set: &[&str]| half(|name| set.contains(&name).then(|| "x".to_owned()));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&[id, secret]), None);
        assert_eq!(of(&[id, "SECRET_ACCESS_KEY"]), None);
        assert_eq!(of(&["SECRET_ACCESS_KEY"]), None, "anybody's");
        assert!(of(&[id]).unwrap().contains("AWS_SECRET_ACCESS_KEY is not"));
        assert!(of(&[secret]).unwrap().contains("AWS_ACCESS_KEY_ID is not"));
        assert_eq!(
            half(|name| Some(if name == id { " " } else { "" }.to_owned())),
            None
        );
    }

    #[tokio::test]
    async fn keys_without_an_expiry_are_asked_for_again_and_not_forgotten() {
        let options = super::super::client::for_tests("http://127.0.0.1:1", "b");
        let http = super::super::client::net_client(&options).unwrap();
        let ttl = Duration::from_secs(60);
        let chain = CredentialChain::new(http, Region::new("us-east-1"), ttl);
        let none = || Err(CredentialsError::not_loaded("the file is empty"));
        let built = Arc::new(chain.build().await);
        let lasting = |found| chain.lasting(found, Arc::clone(&built));
        assert!(lasting(none()).is_err());

        let key = |keys: provider::Result| keys.unwrap().access_key_id().to_owned();
        let of = |key: &str| Ok(Credentials::from_keys(key, "secret", None));
        let keys = lasting(of("A")).unwrap();
        let expiry = keys.expiry().unwrap();
        assert!(expiry <= SystemTime::now() + ttl + EXPIRES_SOON && expiry > SystemTime::now() + ttl);
        assert_eq!(key(lasting(none())), "A");
        assert_eq!(key(lasting(of("B"))), "B");
        assert_eq!(key(lasting(none())), "B");
        let fallback = chain.fallback_on_interrupt().unwrap();
        assert!(fallback.access_key_id() == "B" && fallback.expiry().is_some());

        for (id, secret, token) in [
            ("D\n", "d", None),
            ("D", "d\r\n", None),
            ("D", "d", Some("é".into())),
        ] {
            assert!(printable(Credentials::from_keys(id, secret, token.clone())).is_err());
            let keys = lasting(Ok(Credentials::from_keys(id, secret, token)));
            assert_eq!(key(keys), "B", "the last that can be used");
        }

        // Keys with an expiry expire by it, and their source is asked again.
        let expiry = SystemTime::now() + Duration::from_secs(7);
        let session = Credentials::new("C", "c", None, Some(expiry), "test");
        assert_eq!(lasting(Ok(session)).unwrap().expiry(), Some(expiry));
        assert!(matches!(&*chain.lock(), Last::Session(kept) if Arc::ptr_eq(kept, &built)));
        assert!(lasting(none()).is_err());
    }
}
