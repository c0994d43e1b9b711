//! The connections to one address: kept while they are good.

use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::time::Instant;

use super::connection::{Connection, Stream};
use super::error::NetError;
use super::http_client::NetOptions;
use super::stats::{NetCounters, add};
use super::tls::TlsStream;

/// Where requests go: the part of a URL that connections depend on.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Origin {
    pub tls: bool,
    /// Without brackets.
    pub host: String,
    pub port: u16,
}

pub(super) struct Pool {
    address: SocketAddr,
    /// The name that the certificate must have; None: without TLS.
    tls: Option<String>,
    options: Arc<NetOptions>,
    counters: Arc<NetCounters>,
    /// The one used last is taken first, so that the others can grow old.
    idle: Mutex<Vec<(Connection, Instant)>>,
}

impl Pool {
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn new(
        address: SocketAddr,
        tls: Option<String>,
        options: Arc<NetOptions>,
        counters: Arc<NetCounters>,
    ) -> Self {
        Self {
            address,
            tls,
            options,
            counters,
            idle: Mutex::default(),
        }
    }

    /// A kept connection that is still good.
    pub fn kept(&self) -> Option<Connection> {
        let mut idle = self.lock();
        while let Some((mut connection, since)) = idle.pop() {
            if since.elapsed() >= self.options.idle_timeout {
                // So are all that were used before it.
                idle.clear();
            } else if connection.is_open() {
                return Some(connection);
            }
        }
        None
    }

    /// Keeps a connection for the next request.
    pub fn keep(&self, mut connection: Connection) {
        connection.rest();
        self.lock().push((connection, Instant::now()));
    }

    /// Closes connections that were idle for too long.
    pub fn sweep(&self) {
        let now = Instant::now();
        let mut idle = self.lock();
        let old = idle.partition_point(|(_, since)| now - *since >= self.options.idle_timeout);
        idle.drain(..old);
    }

    pub async fn connect(&self, limit: Duration) -> Result<Connection, NetError> {
        let connect = async {
            let tcp = TcpStream::connect(self.address).await?;
            tcp.set_nodelay(true)?;
            let Some(name) = &self.tls else {
                return Ok(Stream::Plain(tcp));
            };
            let name = ServerName::try_from(name.clone())
                .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
            let tls = TlsStream::connect(tcp, Arc::clone(&self.options.tls), name).await?;
            Ok(Stream::Tls(Box::new(tls)))
        };
        let error = |cause| NetError::Connect {
            to: self.address,
            cause,
        };
        // A host that is gone answers nothing, and is as lost as one that refuses.
        let late = |_| {
            error(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("none for {limit:?}"),
            ))
        };
        let connected = tokio::time::timeout(limit, connect).await.map_err(late)?;
        let stream = connected.map_err(error)?;
        add(&self.counters.connections, 1);
        Ok(Connection::new(stream, self.options.stall_timeout))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<(Connection, Instant)>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
