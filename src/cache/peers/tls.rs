//! TLS between peers: each side shows a certificate of the fleet's authority.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

use rustls::client::ResolvesClientCert;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::server::{ClientHello, ResolvesServerCert, WebPkiClientVerifier};
use rustls::sign::CertifiedKey;
use rustls::{ClientConfig, RootCertStore, ServerConfig, SignatureScheme};

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

/// The certificate that this node shows, to those that it asks and to those that ask it. A renewed one takes its place
/// at the next handshake.
#[derive(Debug)]
pub struct Identity {
    files: PeerTls,
    shown: RwLock<Arc<CertifiedKey>>,
}

impl Identity {
    pub fn new(files: PeerTls) -> Result<Self, PeerTlsError> {
        let shown = RwLock::new(files.certified()?);
        Ok(Self { files, shown })
    }

    /// Reads certificate and key again. What can't be used takes nobody's place.
    pub fn read_again(&self) -> Result<(), PeerTlsError> {
        let read = self.files.certified()?;
        *self.shown.write().unwrap_or_else(PoisonError::into_inner) = read;
        Ok(())
    }

    fn shown(&self) -> Arc<CertifiedKey> {
        let shown = self.shown.read();
        Arc::clone(&shown.unwrap_or_else(PoisonError::into_inner))
    }

    pub fn client(self: &Arc<Self>) -> Result<Arc<ClientConfig>, PeerTlsError> {
        let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(self.files.roots()?)
            .with_client_cert_resolver(Arc::clone(self) as _);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }

    pub fn server(self: &Arc<Self>) -> Result<Arc<ServerConfig>, PeerTlsError> {
        let provider = Arc::new(ring::default_provider());
        let roots = Arc::new(self.files.roots()?);
        let verifier = WebPkiClientVerifier::builder_with_provider(roots, Arc::clone(&provider)).build();
        let verifier = verifier.map_err(|error| self.files.ca(&error.to_string()))?;
        let mut config = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(Arc::clone(self) as _);
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(Arc::new(config))
    }
}

impl ResolvesServerCert for Identity {
    fn resolve(&self, _hello: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.shown())
    }
}

impl ResolvesClientCert for Identity {
    fn resolve(&self, _authorities: &[&[u8]], _schemes: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.shown())
    }

    fn has_certs(&self) -> bool {
        true
    }
}

impl PeerTls {
    fn certified(&self) -> Result<Arc<CertifiedKey>, PeerTlsError> {
        let chain = certificates("cert_file", &self.cert_file)?;
        let error = |reason: String| PeerTlsError::File {
            key: "key_file",
            path: self.key_file.clone(),
            reason,
        };
        let pem = fs::read(&self.key_file).map_err(|cause| error(cause.to_string()))?;
        let key = PrivateKeyDer::from_pem_slice(&pem).map_err(|cause| error(cause.to_string()))?;
        let certified = CertifiedKey::from_der(chain, key, &ring::default_provider());
        Ok(Arc::new(certified.map_err(|cause| error(cause.to_string()))?))
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

#[cfg(test)]
mod tests {
    use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
    use rustls::pki_types::ServerName;
    use tempfile::TempDir;
    use tokio_rustls::{TlsAcceptor, TlsConnector};

    use super::*;

    /// What each side of a handshake saw of the other.
    async fn seen(server: &Arc<ServerConfig>, client: &Arc<ClientConfig>) -> [CertificateDer<'static>; 2] {
        let (near, far) = tokio::io::duplex(1 << 16);
        let name = ServerName::try_from("peers.test").unwrap();
        let (server, client) = tokio::join!(
            TlsAcceptor::from(Arc::clone(server)).accept(near),
            TlsConnector::from(Arc::clone(client)).connect(name, far)
        );
        let (server, client) = (server.unwrap(), client.unwrap());
        [
            server.get_ref().1.peer_certificates(),
            client.get_ref().1.peer_certificates(),
        ]
        .map(|shown| shown.unwrap()[0].clone().into_owned())
    }

    #[tokio::test]
    async fn a_renewed_certificate_is_shown_without_a_restart() {
        let folder = TempDir::new().unwrap();
        let file = |name: &str| folder.path().join(name);
        let mut ca = CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(ca, KeyPair::generate().unwrap()).unwrap();
        fs::write(file("ca.pem"), ca.pem()).unwrap();
        let renew = || {
            let key = KeyPair::generate().unwrap();
            let own = CertificateParams::new(vec!["peers.test".to_owned()]).unwrap();
            let own = own.signed_by(&key, &ca).unwrap();
            fs::write(file("cert.pem"), own.pem()).unwrap();
            fs::write(file("key.pem"), key.serialize_pem()).unwrap();
            own.der().clone()
        };
        let first = renew();
        let files = PeerTls {
            cert_file: file("cert.pem"),
            key_file: file("key.pem"),
            ca_file: file("ca.pem"),
            name: "peers.test".to_owned(),
        };
        let identity = Arc::new(Identity::new(files).unwrap());
        let (server, client) = (identity.server().unwrap(), identity.client().unwrap());
        assert_eq!(seen(&server, &client).await, [first.clone(), first]);

        let second = renew();
        identity.read_again().unwrap();
        assert_eq!(seen(&server, &client).await, [second.clone(), second.clone()]);

        // Half of a renewal: the certificate is not that key's.
        fs::write(file("key.pem"), KeyPair::generate().unwrap().serialize_pem()).unwrap();
        let refused = identity.read_again().unwrap_err().to_string();
        assert!(refused.contains("key_file"), "{refused}");
        assert_eq!(seen(&server, &client).await, [second.clone(), second]);
    }
}
