//! The S3 server of a command that works without one: the configured server, or one in this process that ends with
//! it.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::cache::gateway::{OpenError, open_store};
use crate::config::Config;
use crate::s3::object::ObjectStore;

#[cfg(feature = "embedded")]
use crate::embedded::EmbeddedS3;

pub(crate) struct S3Server {
    pub store: Arc<dyn ObjectStore>,
    /// None: AWS.
    pub endpoint: Option<String>,
    pub bucket: String,
    /// For people.
    pub place: String,
    /// The folder with the objects of our own server, if they are to be kept.
    pub folder: Option<PathBuf>,
    #[cfg(feature = "embedded")]
    embedded: Option<EmbeddedS3>,
}

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub enum S3ServerError {
    #[error("this kvgate was built without the embedded S3 server: give --endpoint URL and --bucket NAME")]
    NoServer,
    #[cfg(feature = "embedded")]
    #[error(transparent)]
    Embedded(#[from] crate::embedded::EmbeddedError),
    #[error("can't make a folder for the objects that --keep keeps: {0}. Set TMPDIR to a writable folder")]
    Folder(std::io::Error),
    #[error(transparent)]
    Open(#[from] OpenError),
}

impl S3ServerError {
    /// Whether flags or configuration must change.
    pub fn is_usage(&self) -> bool {
        match self {
            Self::NoServer => true,
            Self::Open(OpenError::Object(error)) => error.kind.is_setup(),
            Self::Open(error) => matches!(error, OpenError::NoBucket | OpenError::Client(_)),
            _ => false,
        }
    }
}

impl S3Server {
    /// The configured server, or else one of our own, where `name` is the bucket and the start of its folder's
    /// name. Sends nothing yet.
    pub async fn start(config: &Config, name: &str, keep: bool) -> Result<Self, S3ServerError> {
        if config.s3.endpoint.is_none() && config.s3.bucket.is_none() {
            return Self::embedded(config, name, keep).await;
        }
        let store = open_store(config, None).await?;
        let bucket = config.s3.bucket.clone().unwrap_or_default();
        let endpoint = config.s3.endpoint.clone();
        Ok(Self {
            store,
            place: format!("{}, bucket {bucket}", endpoint.as_deref().unwrap_or("AWS")),
            endpoint,
            bucket,
            folder: None,
            #[cfg(feature = "embedded")]
            embedded: None,
        })
    }

    #[cfg(not(feature = "embedded"))]
    async fn embedded(_: &Config, _: &str, _: bool) -> Result<Self, S3ServerError> {
        Err(S3ServerError::NoServer)
    }

    /// A server of our own whose objects stay in `folder`.
    #[cfg(feature = "embedded")]
    pub async fn embedded_in(config: &Config, bucket: &str, folder: &Path) -> Result<Self, S3ServerError> {
        let server = Self::serve(config, bucket, Some(folder.to_owned())).await?;
        let deadline = tokio::time::Instant::now() + config.s3.request_timeout;
        server
            .store
            .create_bucket(deadline)
            .await
            .map_err(OpenError::from)?;
        Ok(server)
    }

    #[cfg(not(feature = "embedded"))]
    pub async fn embedded_in(_: &Config, _: &str, _: &Path) -> Result<Self, S3ServerError> {
        Err(S3ServerError::NoServer)
    }

    #[cfg(feature = "embedded")]
    async fn embedded(config: &Config, name: &str, keep: bool) -> Result<Self, S3ServerError> {
        let folder = match keep {
            true => {
                let folder = tempfile::Builder::new().prefix(&format!("{name}-")).tempdir();
                Some(folder.map_err(S3ServerError::Folder)?.keep())
            }
            false => None,
        };
        Self::serve(config, name, folder).await
    }

    #[cfg(feature = "embedded")]
    async fn serve(config: &Config, name: &str, folder: Option<PathBuf>) -> Result<Self, S3ServerError> {
        use aws_credential_types::Credentials;

        let server = EmbeddedS3::start(folder.as_deref(), None).await?;
        let (access, secret) = (server.access_key(), server.secret_key());
        let credentials = Credentials::new(access, secret, None, None, "a server of our own");
        let mut config = config.clone();
        config.s3.endpoint = Some(server.endpoint());
        config.s3.bucket = Some(name.to_owned());
        config.s3.path_style = Some(true);
        config.s3.ca_file = None;
        Ok(Self {
            store: open_store(&config, Some(credentials)).await?,
            endpoint: config.s3.endpoint,
            bucket: name.to_owned(),
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

    /// The folder with the objects of our own server, and its free bytes.
    pub fn room(&self) -> Option<(&Path, u64)> {
        #[cfg(feature = "embedded")]
        if let Some(server) = &self.embedded {
            let room = rustix::fs::statvfs(server.root()).ok()?;
            return Some((server.root(), room.f_bavail.saturating_mul(room.f_frsize)));
        }
        None
    }

    pub async fn stop(self) {
        #[cfg(feature = "embedded")]
        if let Some(server) = self.embedded {
            server.stop().await;
        }
    }
}
