//! Life cycle of the embedded server: root folder, listener, accept loop, shutdown.
//!
//! Mechanism: one task accepts, one task per connection runs hyper's HTTP/1 loop. A `watch` channel
//! tells all of them to finish: idle connections close at once, busy ones get [`GRACE`].

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::pin::pin;
use std::time::Duration;

use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use s3s::auth::SimpleAuth;
use s3s::service::{S3Service, S3ServiceBuilder};
use tempfile::TempDir;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};

use super::store::FolderStore;

/// Access key of every embedded server. A convenience for loopback, not a secret.
pub const ACCESS_KEY: &str = "kvgate-embedded";
/// Secret key of every embedded server. Requests must really be signed with it, yet everyone knows
/// it: never expose the port beyond the machine.
pub const SECRET_KEY: &str = "kvgate-embedded-secret";

/// How long [`EmbeddedS3::stop`] waits for requests under way.
const GRACE: Duration = Duration::from_secs(2);
/// How long a start waits for a server that was just dropped to let go of the root.
const LOCK_WAIT: Duration = Duration::from_secs(2);
/// Time to send the request head; stops idle half-open connections from piling up.
const HEAD_TIMEOUT: Duration = Duration::from_mins(1);

/// Why the embedded server could not start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EmbeddedError {
    /// The data folder cannot be made, read or cleaned.
    #[error(
        "cannot use `{}` as the data folder of the embedded S3 server: {source}; \
         choose a folder that this user may write, on a disk with free space",
        path.display()
    )]
    #[allow(missing_docs, reason = "the message says what they are")]
    Root { path: PathBuf, source: io::Error },
    /// Another embedded server (of this or another process) uses the folder.
    #[error(
        "the data folder `{}` is used by another embedded S3 server; \
         stop that one or choose another folder",
        path.display()
    )]
    #[allow(missing_docs, reason = "the message says what it is")]
    InUse { path: PathBuf },
    /// The temporary data folder cannot be made.
    #[error(
        "cannot make a temporary data folder for the embedded S3 server: {source}; \
         set TMPDIR to a writable folder or name a data folder"
    )]
    #[allow(missing_docs, reason = "the message says what it is")]
    Temp { source: io::Error },
    /// The address cannot be bound.
    #[error(
        "the embedded S3 server cannot listen on {addr}: {source}; \
         choose a free port (0 lets the system choose) on an address of this machine"
    )]
    #[allow(missing_docs, reason = "the message says what they are")]
    Listen { addr: SocketAddr, source: io::Error },
}

/// A running S3 server in this process; see the [module docs](super) for what it is and is not.
///
/// Dropping it aborts requests under way; [`stop`](Self::stop) lets them finish.
#[derive(Debug)]
pub struct EmbeddedS3 {
    addr: SocketAddr,
    root: PathBuf,
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
    temp: Option<TempDir>,
}

impl EmbeddedS3 {
    /// Starts a server with its data in `root` (made if missing), or in a temporary folder that is
    /// removed at the end when `None`. `listen: None` is `127.0.0.1` with a port of the system's
    /// choice.
    ///
    /// # Errors
    /// [`EmbeddedError`] when the folder or the address cannot be used.
    pub async fn start(root: Option<&Path>, listen: Option<SocketAddr>) -> Result<Self, EmbeddedError> {
        let (root, temp) = if let Some(path) = root {
            (path.to_owned(), None)
        } else {
            let temp = tempfile::Builder::new().prefix("kvgate-s3-").tempdir();
            let temp = temp.map_err(|source| EmbeddedError::Temp { source })?;
            (temp.path().to_owned(), Some(temp))
        };
        let store = open(&root).await?;
        let root = store.root().to_owned();

        let addr = listen.unwrap_or_else(|| (Ipv4Addr::LOCALHOST, 0).into());
        let fail = |source| EmbeddedError::Listen { addr, source };
        let listener = TcpListener::bind(addr).await.map_err(fail)?;
        let addr = listener.local_addr().map_err(fail)?;
        if !addr.ip().is_loopback() {
            tracing::warn!(%addr, "embedded S3 listens beyond this machine with well-known keys");
        }

        let mut service = S3ServiceBuilder::new(store);
        service.set_auth(SimpleAuth::from_single(ACCESS_KEY, SECRET_KEY));
        let (stop, stopped) = watch::channel(false);
        let task = tokio::spawn(accept_loop(listener, service.build(), stopped));
        tracing::debug!(%addr, root = %root.display(), "embedded S3 started");
        Ok(Self {
            addr,
            root,
            stop,
            task: Some(task),
            temp,
        })
    }

    /// `http://ADDRESS:PORT`, for a path-style S3 client.
    #[must_use]
    pub fn endpoint(&self) -> String {
        let mut addr = self.addr;
        if addr.ip().is_unspecified() {
            // A client can't connect to "all addresses".
            addr.set_ip(Ipv4Addr::LOCALHOST.into());
        }
        format!("http://{addr}")
    }

    /// The access key: [`ACCESS_KEY`].
    #[must_use]
    #[allow(clippy::unused_self, reason = "callers need not know that keys are constant")]
    pub fn access_key(&self) -> &str {
        ACCESS_KEY
    }

    /// The secret key: [`SECRET_KEY`].
    #[must_use]
    #[allow(clippy::unused_self, reason = "callers need not know that keys are constant")]
    pub fn secret_key(&self) -> &str {
        SECRET_KEY
    }

    /// The data folder, as an absolute path.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Stops accepting, waits up to two seconds for requests under way, then removes a temporary
    /// data folder.
    pub async fn stop(mut self) {
        self.stop.send_replace(true);
        if let Some(task) = self.task.take() {
            // It fails only when the task panicked or was aborted: stopped either way.
            let _ = task.await;
        }
        if let Some(temp) = self.temp.take() {
            let _ = tokio::task::spawn_blocking(move || temp.close()).await;
        }
    }
}

impl Drop for EmbeddedS3 {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

/// Opens the root, patiently: a dropped server lets go of it only when the runtime has cancelled its connections.
async fn open(root: &Path) -> Result<FolderStore, EmbeddedError> {
    let deadline = tokio::time::Instant::now() + LOCK_WAIT;
    loop {
        match FolderStore::open(root) {
            Err(EmbeddedError::InUse { .. }) if tokio::time::Instant::now() < deadline => {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            result => return result,
        }
    }
}

async fn accept_loop(listener: TcpListener, service: S3Service, mut stop: watch::Receiver<bool>) {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            _ = stop.changed() => break,
            Some(_) = connections.join_next() => {} // forget finished ones
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(serve(stream, service.clone(), stop.clone()));
                }
                Err(error) => {
                    // Mostly "too many open files": it passes when connections close.
                    tracing::warn!(%error, "embedded S3 cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            },
        }
    }
    drop(listener);
    let finished = async { while connections.join_next().await.is_some() {} };
    if tokio::time::timeout(GRACE, finished).await.is_err() {
        connections.shutdown().await;
    }
}

async fn serve(stream: TcpStream, service: S3Service, mut stop: watch::Receiver<bool>) {
    // Without it, small answers wait for the peer's delayed ACK.
    let _ = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        _ = stop.changed() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        // The peer hung up or spoke no HTTP, which is no error of ours.
        tracing::debug!(%error, "embedded S3 connection ended");
    }
}
