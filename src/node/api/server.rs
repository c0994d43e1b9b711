//! The listeners: a unix socket and TCP. Each connection is served until the daemon stops.

use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener, UnixSocket, UnixStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use super::impatient::{Impatient, Patient};
use super::{Api, Caller, routes};
use crate::cache::episode::Episode;
use crate::cache::peers::PeerTlsError;
use crate::node::Process;

/// The addresses that the API listens on.
#[derive(Debug, Clone)]
pub struct Listening {
    pub socket: PathBuf,
    pub socket_mode: u32,
    pub listen: Option<SocketAddr>,
    /// The shortest time between two logs of the same lasting warning.
    pub log_repeat: Duration,
}

/// Why the API can't listen.
#[derive(Debug, thiserror::Error)]
pub enum ListenError {
    #[error("can't listen on {}: {source}. Give [api] socket a path in a folder that this user may write", path.display())]
    Socket { path: PathBuf, source: io::Error },
    #[error("another kvgate answers at {}: stop that one, or give another [api] socket", path.display())]
    InUse { path: PathBuf },
    #[error(
        "can't listen on {address}: {source}. Give [api] listen a free port on an address of this machine"
    )]
    Tcp { address: SocketAddr, source: io::Error },
    #[error(
        "can't listen on {address} for other nodes: {source}. Give [peers] listen a free port on an address of this machine"
    )]
    Peers { address: SocketAddr, source: io::Error },
    #[error(transparent)]
    PeerTls(PeerTlsError),
}

/// Listeners that are bound but not yet served.
pub struct Server {
    unix: UnixListener,
    tcp: Option<TcpListener>,
    path: PathBuf,
    address: Option<SocketAddr>,
    /// Accepts that failed.
    refused: Episode,
}

/// Bytes of a request's head.
const HEAD_BYTES_MAX: usize = 64 << 10;
/// Connections that the system holds until they are accepted.
const CONNECTIONS_WAITING: u32 = 1024;
/// Pause after a failed accept, such as for want of file descriptors.
const PAUSE: Duration = Duration::from_millis(50);

impl Server {
    pub async fn bind(listening: &Listening) -> Result<Self, ListenError> {
        let path = listening.socket.clone();
        let fail = |source| ListenError::Socket {
            path: path.clone(),
            source,
        };
        if let Some(folder) = path.parent() {
            std::fs::create_dir_all(folder).map_err(fail)?;
        }
        clear(&path).await?;
        let unix = bind_unix(&path, listening.socket_mode).map_err(fail)?;
        // Sets the rights that the umask took away.
        let mode = std::fs::Permissions::from_mode(listening.socket_mode);
        std::fs::set_permissions(&path, mode).map_err(fail)?;
        let (mut tcp, mut bound) = (None, None);
        if let Some(address) = listening.listen {
            let fail = |source| ListenError::Tcp { address, source };
            let listener = TcpListener::bind(address).await.map_err(fail)?;
            bound = Some(listener.local_addr().map_err(fail)?);
            tcp = Some(listener);
        }
        Ok(Self {
            unix,
            tcp,
            path,
            address: bound,
            refused: Episode::new(
                "connections can't be accepted: raise ulimit -n (LimitNOFILE), or lower [api] connections",
                listening.log_repeat,
            ),
        })
    }

    /// The TCP address, with the port that the system chose.
    pub fn address(&self) -> Option<SocketAddr> {
        self.address
    }

    /// Serves until `stop`, then gives calls under way `grace` to end.
    pub async fn serve(self, api: Arc<Api>, mut stop: watch::Receiver<bool>, grace: Duration) {
        let (end, ended) = watch::channel(false);
        let mut calls = JoinSet::new();
        loop {
            // Drops the calls that ended.
            while calls.try_join_next().is_some() {}
            tokio::select! {
                accepted = self.unix.accept() => match accepted {
                    Ok((stream, _)) => match process(&stream) {
                        Ok(process) => accept(&api, stream, Caller::Unix(process), &mut calls, &ended),
                        // The connection is closed, since its process is unknown.
                        Err(error) => tracing::warn!(%error, "the system does not say which process called"),
                    },
                    Err(error) => self.pause(&error).await,
                },
                accepted = accept_tcp(self.tcp.as_ref()) => match accepted {
                    Ok((stream, _)) => {
                        // Lines of a stream are small.
                        let _ = stream.set_nodelay(true);
                        // A connection that is gone already has no address.
                        if let Ok(local) = stream.local_addr() {
                            accept(&api, stream, Caller::Tcp { local }, &mut calls, &ended);
                        }
                    }
                    Err(error) => self.pause(&error).await,
                },
                () = stopped(&mut stop) => break,
            }
        }
        end.send_replace(true);
        let all = async { while calls.join_next().await.is_some() {} };
        // The remaining calls are cut off.
        let _ = tokio::time::timeout(grace, all).await;
    }
}

impl Server {
    async fn pause(&self, error: &io::Error) {
        self.refused.tell(error);
        tokio::time::sleep(PAUSE).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Linux gives the file the mode that the socket has when it is bound, less the umask: others can't connect at any
/// moment.
fn bind_unix(path: &Path, mode: u32) -> io::Result<UnixListener> {
    let socket = UnixSocket::new_stream()?;
    rustix::fs::fchmod(&socket, rustix::fs::Mode::from_raw_mode(mode))?;
    socket.bind(path)?;
    socket.listen(CONNECTIONS_WAITING)
}

/// Removes a socket without a listener: the daemon before was killed.
async fn clear(path: &Path) -> Result<(), ListenError> {
    let Ok(there) = std::fs::symlink_metadata(path) else {
        return Ok(());
    };
    let fail = |source| ListenError::Socket {
        path: path.into(),
        source,
    };
    if !there.file_type().is_socket() {
        return Err(fail(io::Error::new(
            io::ErrorKind::AlreadyExists,
            "there is a file that is no socket",
        )));
    }
    match UnixStream::connect(path).await {
        Ok(_) => Err(ListenError::InUse { path: path.into() }),
        Err(_) => std::fs::remove_file(path).map_err(fail),
    }
}

fn process(stream: &UnixStream) -> io::Result<Process> {
    let peer = stream.peer_cred()?;
    Ok(Process {
        // 0: the process is not in our PID namespace.
        pid: peer.pid().filter(|&pid| pid > 0),
        uid: peer.uid(),
    })
}

async fn accept_tcp(listener: Option<&TcpListener>) -> io::Result<(tokio::net::TcpStream, SocketAddr)> {
    match listener {
        Some(listener) => listener.accept().await,
        None => std::future::pending().await,
    }
}

pub(super) async fn stopped(stop: &mut watch::Receiver<bool>) {
    // An error means that the sender is gone, which is a stop too.
    let _ = stop.wait_for(|stop| *stop).await;
}

fn accept<S: AsyncRead + AsyncWrite + Send + Unpin + 'static>(
    api: &Arc<Api>,
    stream: S,
    caller: Caller,
    calls: &mut JoinSet<()>,
    ended: &watch::Receiver<bool>,
) {
    let Some(connected) = api.connections.open() else {
        // All others have calls under way. The connection is closed at once; the client may come again.
        return;
    };
    let connected = Arc::new(connected);
    let (api, mut ended) = (Arc::clone(api), ended.clone());
    calls.spawn(async move {
        let timeout = api.options.timeout;
        let patient = Arc::new(AtomicBool::new(false));
        let stream = Impatient::new(stream, timeout, Arc::clone(&patient));
        let of = Arc::clone(&connected);
        let service = service_fn(move |request| {
            let (api, busy, patient) = (Arc::clone(&api), of.busy(), Arc::clone(&patient));
            async move {
                let answer = routes::serve(api, caller, request).await;
                if answer.extensions().get::<Patient>().is_some() {
                    patient.store(true, Ordering::Relaxed);
                }
                let answer = answer.map(|body| WhileSent::new(body, busy));
                Ok::<_, Infallible>(answer)
            }
        });
        let serve = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(timeout)
            .max_buf_size(HEAD_BYTES_MAX)
            .serve_connection(TokioIo::new(stream), service);
        tokio::pin!(serve);
        tokio::select! {
            // The end of a connection is the client's business.
            _ = serve.as_mut() => {}
            () = connected.must_close() => {}
            () = stopped(&mut ended) => {
                serve.as_mut().graceful_shutdown();
                let _ = serve.await;
            }
        }
    });
}

pin_project_lite::pin_project! {
    /// The connection has a call until its answer was sent.
    pub(super) struct WhileSent<B> {
        #[pin]
        body: B,
        _busy: super::connections::Busy,
    }
}

impl<B> WhileSent<B> {
    pub(super) fn new(body: B, busy: super::connections::Busy) -> Self {
        Self { body, _busy: busy }
    }
}

impl<B: hyper::body::Body> hyper::body::Body for WhileSent<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: std::pin::Pin<&mut Self>,
        context: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<hyper::body::Frame<B::Data>, B::Error>>> {
        self.project().body.poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_socket_has_its_mode_from_the_first_moment() {
        let folder = tempfile::tempdir().unwrap();
        for mode in [0o600, 0o200, 0o000] {
            let path = folder.path().join(format!("{mode:o}"));
            let _bound = bind_unix(&path, mode).unwrap();
            let made = std::fs::metadata(&path).unwrap().permissions().mode();
            assert_eq!(made & 0o777, mode);
        }
    }
}
