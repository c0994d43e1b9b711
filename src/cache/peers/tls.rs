//! TLS between peers: each side shows a certificate of the fleet's authority.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::WebPkiClientVerifier;
use rustls::{ClientConfig, RootCertStore, ServerConfig};

use crate::s3::net::TlsError;

/// Where a node's certificate is. All nodes may have the same one.
#[derive(Debug, Clone)]
pub struct PeerTls {
    pub cert_file: PathBuf,
    pub key_file: PathBuf,
    /// The authority of all nodes' certificates, and of no others.
    pub ca_file: PathBuf,
    /// The name that the certificates have.
    pub name: String,
}

/// The files of `[peers]` can't be used.
#[derive(Debug, thiserror::Error)]
pub enum PeerTlsError {
    #[error("can't use [peers] {key} {}: {reason}", path.display())]
    File {
        key: &'static str,
        path: PathBuf,
        reason: String,
    },
    #[error("can't set up TLS between peers: {0}")]
    Setup(#[from] rustls::Error),
    #[error(transparent)]
    Client(#[from] TlsError),
}

impl PeerTls {
    pub fn client(&self) -> Result<Arc<ClientConfig>, PeerTlsError> {
        let (chain, key) = self.identity()?;
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(self.roots()?)
            .with_client_auth_cert(chain, key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    pub fn server(&self) -> Result<Arc<ServerConfig>, PeerTlsError> {
        let (chain, key) = self.identity()?;
        let provider = Arc::new(ring::default_provider());
        let roots = Arc::new(self.roots()?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
        let verifier = verifier.map_err(|error| self.ca(&error.to_string()))?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain, key)?;
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    fn identity(&self) -> Result<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>), PeerTlsError> {
        let chain = certificates("cert_file", &self.cert_file)?;
        let error = |reason: String| PeerTlsError::File {
            key: "key_file",
            path: self.key_file.clone(),
            reason,
        };
        let pem = fs::read(&self.key_file).map_err(|cause| error(cause.to_string()))?;
        let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|cause| error(cause.to_string()))?;
        Ok((chain, key))
    }

    fn roots(&self) -> Result<RootCertStore, PeerTlsError> {
        let mut roots = RootCertStore::empty();
        for certificate in certificates("ca_file", &self.ca_file)? {
            roots
                .add(certificate)
                .map_err(|cause| self.ca(&cause.to_string()))?;
        }
        Ok(roots)
    }

    fn ca(&self, reason: &str) -> PeerTlsError {
        PeerTlsError::File {
            key: "ca_file",
            path: self.ca_file.clone(),
            reason: reason.to_owned(),
        }
    }
}

fn certificates(key: &'static str, path: &Path) -> Result<Vec<CertificateDer<'static>>, PeerTlsError> {
    let error = |reason: String| PeerTlsError::File {
        key,
        path: path.to_owned(),
        reason,
    };
    let pem = fs::read(path).map_err(|cause| error(cause.to_string()))?;
    let read: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&pem).collect();
    let read = read.map_err(|cause| error(cause.to_string()))?;
    match read.is_empty() {
        true => Err(error("it holds no certificate as PEM".to_owned())),
        false => Ok(read),
    }
}
