//! rustls's configuration: TLS 1.2 and 1.3, the system's roots, and a CA file.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustls::crypto::ring;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::{ClientConfig, RootCertStore};

/// The settings of TLS can't be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("can't use [s3] ca_file {}: {reason}. It must hold certificates as PEM", path.display())]
    CaFile { path: PathBuf, reason: String },
    #[error("can't set up TLS: {0}")]
    Setup(#[from] rustls::Error),
}

/// The configuration of all connections: TLS 1.2 and 1.3 with HTTP/1.1, the system's roots and those in `ca_file`, and
/// the sessions to resume. It reads files: once for each client, not for each connection.
pub fn client_config(ca_file: Option<&Path>) -> Result<Arc<ClientConfig>, TlsError> {
    let mut roots = system_roots();
    if let Some(path) = ca_file {
        add_ca_file(&mut roots, path).map_err(|reason| TlsError::CaFile {
            path: path.to_owned(),
            reason,
        })?;
    }
    client_config_with(roots)
}

pub(super) fn client_config_with(roots: RootCertStore) -> Result<Arc<ClientConfig>, TlsError> {
    let mut config = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()?
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// A system without roots is no error here: the endpoint may be plain HTTP or have a CA of its own. If it matters, the
/// handshake says "unknown issuer".
fn system_roots() -> RootCertStore {
    let found = rustls_native_certs::load_native_certs();
    for error in &found.errors {
        tracing::warn!(%error, "some of the system's certificates can't be read");
    }
    let mut roots = RootCertStore::empty();
    let (_, ignored) = roots.add_parsable_certificates(found.certs);
    if ignored > 0 {
        tracing::debug!(ignored, "some of the system's certificates can't be used");
    }
    roots
}

fn add_ca_file(roots: &mut RootCertStore, path: &Path) -> Result<(), String> {
    let pem = std::fs::read(path).map_err(|cause| cause.to_string())?;
    let mut certificates = 0;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        let certificate = certificate.map_err(|cause| cause.to_string())?;
        roots.add(certificate).map_err(|cause| cause.to_string())?;
        certificates += 1;
    }
    match certificates {
        0 => Err("it holds no certificate".to_owned()),
        _ => Ok(()),
    }
}
