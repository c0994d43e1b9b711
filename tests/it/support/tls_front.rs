//! TLS in front of any server, with a CA of its own. It ends connections as the server does, without a word of TLS.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::crypto::ring;
use rustls::pki_types::PrivateKeyDer;
use rustls::{ServerConfig, ServerConnection, StreamOwned};

/// How long it looks for bytes on one side before it looks on the other.
const LOOK: Duration = Duration::from_millis(1);

pub struct TlsFront {
    pub endpoint: String,
    pub ca_file: PathBuf,
    _folder: tempfile::TempDir,
}

impl TlsFront {
    /// `server`: an `http://` endpoint.
    pub fn new(server: &str) -> Self {
        let server = server.trim_start_matches("http://").to_owned();
        let mut ca = CertificateParams::new(Vec::new()).unwrap();
        ca.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let ca = CertifiedIssuer::self_signed(ca, KeyPair::generate().unwrap()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let ca_file = folder.path().join("ca.pem");
        std::fs::write(&ca_file, ca.pem()).unwrap();

        let key = KeyPair::generate().unwrap();
        let own = CertificateParams::new(vec!["127.0.0.1".to_owned()]).unwrap();
        let certificate = own.signed_by(&key, &ca).unwrap().der().clone();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(
                vec![certificate],
                PrivateKeyDer::try_from(key.serialize_der()).unwrap(),
            )
            .unwrap();
        let config = Arc::new(config);
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("https://{}", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for socket in listener.incoming() {
                let (config, server) = (Arc::clone(&config), server.clone());
                std::thread::spawn(move || {
                    let ours = StreamOwned::new(ServerConnection::new(config).unwrap(), socket?);
                    pass(ours, TcpStream::connect(server)?)
                });
            }
        });
        Self {
            endpoint,
            ca_file,
            _folder: folder,
        }
    }
}

/// Until one of them ends.
fn pass(mut ours: StreamOwned<ServerConnection, TcpStream>, mut theirs: TcpStream) -> io::Result<()> {
    ours.sock.set_nodelay(true)?;
    ours.sock.set_read_timeout(Some(LOOK))?;
    theirs.set_read_timeout(Some(LOOK))?;
    let mut buffer = vec![0; 16 << 10];
    loop {
        let len = some(ours.read(&mut buffer))?;
        theirs.write_all(&buffer[..len])?;
        let len = some(theirs.read(&mut buffer))?;
        ours.write_all(&buffer[..len])?;
        ours.flush()?;
    }
}

fn some(read: io::Result<usize>) -> io::Result<usize> {
    match read {
        Ok(0) => Err(ErrorKind::ConnectionAborted.into()),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => Ok(0),
        read => read,
    }
}
