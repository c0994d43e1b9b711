use std::path::PathBuf;
use std::sync::Arc;

use super::error::DemoError;
use crate::config::Config;
use crate::gateway::open_store;
use crate::object::ObjectStore;

#[cfg(feature = "embedded")]
use crate::embedded::EmbeddedS3;

/// The S3 server of a run: the configured one, or one in this process that ends with the run.
pub(super) struct Host {
    pub store: Arc<dyn ObjectStore>,
    /// For people.
    pub place: String,
    /// Where the objects stay after `--keep` with a server of our own.
    pub folder: Option<PathBuf>,
    #[cfg(feature = "embedded")]
    embedded: Option<EmbeddedS3>,
}

impl Host {
    pub async fn start(config: &Config, keep: bool) -> Result<Self, DemoError> {
        if config.s3.endpoint.is_none() && config.s3.bucket.is_none() {
            return Self::embedded(config, keep).await;
        }
        let store = open_store(config, None).await?;
        let endpoint = config.s3.endpoint.as_deref().unwrap_or("AWS");
        let bucket = config.s3.bucket.as_deref().unwrap_or_default();
        Ok(Self {
            store,
            place: format!("{endpoint}, bucket {bucket}"),
            folder: None,
            #[cfg(feature = "embedded")]
            embedded: None,
        })
    }

    #[cfg(not(feature = "embedded"))]
    async fn embedded(_: &Config, _: bool) -> Result<Self, DemoError> {
        Err(DemoError::NoServer)
    }

    #[cfg(feature = "embedded")]
    async fn embedded(config: &Config, keep: bool) -> Result<Self, DemoError> {
        use aws_credential_types::Credentials;

        let folder = match keep {
            true => {
                let folder = tempfile::Builder::new().prefix("kvgate-demo-").tempdir();
                Some(folder.map_err(DemoError::Folder)?.keep())
            }
            false => None,
        };
        let server = EmbeddedS3::start(folder.as_deref(), None).await?;
        let (access, secret) = (server.access_key(), server.secret_key());
        let credentials = Credentials::new(access, secret, None, None, "kvgate demo");
        let mut config = config.clone();
        config.s3.endpoint = Some(server.endpoint());
        config.s3.bucket = Some("kvgate-demo".into());
        config.s3.path_style = true;
        config.s3.ca_file = None;
        Ok(Self {
            store: open_store(&config, Some(credentials)).await?,
            place: format!("a server inside this process ({})", server.root().display()),
            folder,
            embedded: Some(server),
        })
    }

    pub fn is_embedded(&self) -> bool {
        #[cfg(feature = "embedded")]
        return self.embedded.is_some();
        #[cfg(not(feature = "embedded"))]
        false
    }

    pub async fn stop(self) {
        #[cfg(feature = "embedded")]
        if let Some(server) = self.embedded {
            server.stop().await;
        }
    }
}
