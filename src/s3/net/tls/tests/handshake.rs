//! Handshakes: versions, authorities and names, and servers that speak no TLS.

use std::io::{ErrorKind, Read, Write};

use rustls::{CertificateError, Error};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use super::server::{Lab, VERSIONS, serve_plain};
use crate::s3::net::tls::client_config;

fn cause(error: &std::io::Error) -> &Error {
    error.get_ref().unwrap().downcast_ref().unwrap()
}

#[tokio::test]
async fn both_versions_shake_hands_and_offer_http_1_1() {
    for version in VERSIONS {
        let lab = Lab::new(version);
        let (address, server) = lab.serve(|mut peer| {
            let mut request = [0; 4];
            peer.read_exact(&mut request).unwrap();
            peer.write_all(&request).unwrap();
            (
                peer.conn.protocol_version(),
                peer.conn.alpn_protocol().map(<[u8]>::to_vec),
            )
        });
        let mut stream = lab.connect(address).await.unwrap();
        stream.write_all(b"ping").await.unwrap();
        stream.flush().await.unwrap();
        let mut answer = [0; 4];
        stream.read_exact(&mut answer).await.unwrap();
        assert_eq!(&answer, b"ping");
        let (spoken, alpn) = server.join().unwrap();
        assert_eq!(spoken, Some(version.version));
        assert_eq!(alpn.as_deref(), Some(b"http/1.1".as_slice()));
    }
}

#[tokio::test]
async fn a_server_of_another_ca_is_refused_and_hears_why() {
    let (lab, other) = (Lab::new(VERSIONS[1]), Lab::new(VERSIONS[1]));
    let (address, server) = lab.serve(|mut peer| peer.read(&mut [0]).unwrap_err().to_string());
    let error = other.connect(address).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::InvalidData);
    assert_eq!(
        *cause(&error),
        Error::InvalidCertificate(CertificateError::UnknownIssuer)
    );
    assert_eq!(error.to_string(), "invalid peer certificate: UnknownIssuer");
    assert!(server.join().unwrap().contains("UnknownCA"));
}

#[tokio::test]
async fn another_name_is_refused() {
    let lab = Lab::new(VERSIONS[1]);
    let (address, server) = lab.serve(|mut peer| peer.read(&mut [0]).is_err());
    let error = lab.connect_as(address, "other.test").await.err().unwrap();
    let shown = error.to_string();
    assert!(
        shown.contains("other.test") && shown.contains("bucket.test"),
        "{shown}"
    );
    assert!(server.join().unwrap());
}

#[tokio::test]
async fn a_server_without_tls_is_an_error() {
    let lab = Lab::new(VERSIONS[1]);
    let (address, server) = serve_plain(|mut tcp| {
        tcp.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        tcp
    });
    let error = lab.connect(address).await.err().unwrap();
    assert!(matches!(cause(&error), Error::InvalidMessage(_)), "{error}");
    drop(server);
    let (address, _server) = serve_plain(drop);
    let error = lab.connect(address).await.err().unwrap();
    assert!(
        matches!(
            error.kind(),
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe
        ),
        "{error}"
    );
}

#[test]
fn the_error_of_a_ca_file_names_its_problem() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("ca.pem");
    let error = || client_config(Some(&path)).unwrap_err().to_string();
    let missing = error();
    assert!(
        missing.starts_with("can't use [s3] ca_file") && missing.contains("No such file"),
        "{missing}"
    );
    std::fs::write(&path, "not PEM").unwrap();
    assert!(error().contains("it holds no certificate"));
    std::fs::write(
        &path,
        "-----BEGIN CERTIFICATE-----\n%%%\n-----END CERTIFICATE-----\n",
    )
    .unwrap();
    assert!(error().contains("ca.pem: "));
    std::fs::write(
        &path,
        "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
    )
    .unwrap();
    assert!(error().contains("invalid peer certificate"));
    std::fs::write(&path, Lab::new(VERSIONS[1]).ca_pem).unwrap();
    let config = client_config(Some(&path)).unwrap();
    assert_eq!(config.alpn_protocols, [b"http/1.1"]);
    client_config(None).unwrap();
}
