//! A TLS server with a CA of its own, on a thread with blocking sockets.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::{PrivateKeyDer, ServerName};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig, ServerConnection, StreamOwned, SupportedProtocolVersion,
};
use tokio::net::TcpStream;

use crate::s3::net::tls::TlsStream;
use crate::s3::net::tls::config::client_config_with;

pub const NAME: &str = "bucket.test";
/// Longer than any read takes that does not wait in vain.
pub const PATIENCE: Duration = Duration::from_secs(20);
pub const VERSIONS: [&SupportedProtocolVersion; 2] = [&rustls::version::TLS12, &rustls::version::TLS13];

pub type Peer = StreamOwned<ServerConnection, std::net::TcpStream>;

/// A CA and a server with a certificate for `NAME` that it signed.
pub struct Lab {
    pub server: Arc<ServerConfig>,
    pub client: Arc<ClientConfig>,
    pub ca_pem: String,
}

impl Lab {
    pub fn new(version: &'static SupportedProtocolVersion) -> Self {
        let mut params = CertificateParams::new(Vec::new()).unwrap();
        let name = format!("CA {}", fastrand::u64(..));
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec![NAME.to_owned()])
            .unwrap()
            .signed_by(&key, &ca)
            .unwrap();
        let mut server = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_protocol_versions(&[version])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate.der().clone()],
                PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
            )
            .unwrap();
        server.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let mut roots = RootCertStore::empty();
        roots.add(ca.der().clone()).unwrap();
        Self {
            server: Arc::new(server),
            client: client_config_with(roots).unwrap(),
            ca_pem: ca.pem(),
        }
    }

    /// Accepts one connection and leaves it to `answer`, which does the handshake with its first read or write.
    pub fn serve<T: Send + 'static>(
        &self,
        answer: impl FnOnce(Peer) -> T + Send + 'static,
    ) -> (SocketAddr, JoinHandle<T>) {
        let config = Arc::clone(&self.server);
        serve_plain(move |tcp| {
            tcp.set_nodelay(true).unwrap();
            answer(StreamOwned::new(ServerConnection::new(config).unwrap(), tcp))
        })
    }

    pub async fn connect(&self, address: SocketAddr) -> std::io::Result<TlsStream> {
        self.connect_as(address, NAME).await
    }

    pub async fn connect_as(&self, address: SocketAddr, name: &'static str) -> std::io::Result<TlsStream> {
        let tcp = TcpStream::connect(address).await.unwrap();
        TlsStream::connect(tcp, Arc::clone(&self.client), ServerName::try_from(name).unwrap()).await
    }
}

pub fn serve_plain<T: Send + 'static>(
    answer: impl FnOnce(std::net::TcpStream) -> T + Send + 'static,
) -> (SocketAddr, JoinHandle<T>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let thread = std::thread::spawn(move || answer(listener.accept().unwrap().0));
    (address, thread)
}

/// Bytes that differ from their neighbours and from those a record further.
pub fn pattern(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i ^ (i >> 7) ^ (i >> 14)) as u8).collect()
}

/// Writes it all in pieces, each in records of its own.
pub fn write_in_pieces(peer: &mut Peer, bytes: &[u8], mut piece_len: impl FnMut() -> usize) {
    use std::io::Write;
    let mut rest = bytes;
    while !rest.is_empty() {
        let (piece, after) = rest.split_at(piece_len().clamp(1, rest.len()));
        peer.write_all(piece).unwrap();
        peer.flush().unwrap();
        rest = after;
    }
}

/// Waits until something that was not read waits in the socket: data or its end.
pub async fn arrived(stream: &TlsStream) {
    stream.socket().tcp().peek(&mut [0]).await.unwrap();
}
