//! A TCP proxy in front of a server: as slow as wanted, and gone, hung or back again while it runs.
//!
//! It needs nothing but tokio, so that a bench can include it.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::Instant;

/// Moved at a time: small, so that many connections share the rate evenly.
const PIECE: usize = 64 << 10;
/// The time that a timer which fires late may catch up on.
const BURST: Duration = Duration::from_millis(10);

/// Dropping it kills it.
pub struct Capped {
    address: SocketAddr,
    shared: Arc<Shared>,
}

/// So far, both ways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Carried {
    pub bytes: u64,
    pub requests: u64,
    pub connections: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Works,
    /// It accepts connections, and moves nothing.
    Paused,
    Dead,
}

struct Shared {
    upstream: SocketAddr,
    rate: AtomicU64,
    /// All that was let through until now is through by then, at the rate.
    busy_until: Mutex<Instant>,
    mode: watch::Sender<Mode>,
    bytes: AtomicU64,
    requests: AtomicU64,
    connections: AtomicU64,
}

impl Capped {
    /// Port 0: one of the system's choice.
    pub async fn start(listen: SocketAddr, upstream: SocketAddr, bytes_per_second: u64) -> io::Result<Self> {
        let listener = TcpListener::bind(listen).await?;
        let proxy = Self {
            address: listener.local_addr()?,
            shared: Arc::new(Shared {
                upstream,
                rate: AtomicU64::new(bytes_per_second),
                busy_until: Mutex::new(Instant::now()),
                mode: watch::Sender::new(Mode::Works),
                bytes: AtomicU64::new(0),
                requests: AtomicU64::new(0),
                connections: AtomicU64::new(0),
            }),
        };
        tokio::spawn(accept(listener, Arc::clone(&proxy.shared)));
        Ok(proxy)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From the next bytes on.
    pub fn set_rate(&self, bytes_per_second: u64) {
        self.shared.rate.store(bytes_per_second, Ordering::Relaxed);
    }

    /// As a process that is killed: all connections are reset, new ones are refused.
    pub fn kill(&self) {
        self.shared.mode.send_replace(Mode::Dead);
    }

    pub async fn revive(&self) -> io::Result<()> {
        let listener = loop {
            match TcpListener::bind(self.address).await {
                // The old one is not closed yet.
                Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                bound => break bound?,
            }
        };
        self.shared.mode.send_replace(Mode::Works);
        tokio::spawn(accept(listener, Arc::clone(&self.shared)));
        Ok(())
    }

    /// As a process that hangs: connections are accepted, nothing moves.
    pub fn pause(&self) {
        self.shared.mode.send_replace(Mode::Paused);
    }

    pub fn resume(&self) {
        self.shared.mode.send_replace(Mode::Works);
    }

    pub fn carried(&self) -> Carried {
        Carried {
            bytes: self.shared.bytes.load(Ordering::Relaxed),
            requests: self.shared.requests.load(Ordering::Relaxed),
            connections: self.shared.connections.load(Ordering::Relaxed),
        }
    }
}

impl Drop for Capped {
    fn drop(&mut self) {
        self.kill();
    }
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let mut mode = shared.mode.subscribe();
    loop {
        tokio::select! {
            _ = mode.wait_for(|mode| *mode == Mode::Dead) => return,
            accepted = listener.accept() => if let Ok((client, _)) = accepted {
                tokio::spawn(serve(client, Arc::clone(&shared)));
            },
        }
    }
}

/// One connection, until either side ends it or the proxy dies.
async fn serve(mut client: TcpStream, shared: Arc<Shared>) -> io::Result<()> {
    let mut mode = shared.mode.subscribe();
    shared.connections.fetch_add(1, Ordering::Relaxed);
    let carry = async {
        shared.works().await;
        let mut server = TcpStream::connect(shared.upstream).await?;
        client.set_nodelay(true)?;
        server.set_nodelay(true)?;
        let (from_client, to_client) = client.split();
        let (from_server, to_server) = server.split();
        let asked = AtomicBool::new(false);
        // Bytes from the client after an answer, or the very first ones, are a new request: nobody pipelines.
        let ask = || {
            if !asked.swap(true, Ordering::Relaxed) {
                shared.requests.fetch_add(1, Ordering::Relaxed);
            }
        };
        let answer = || asked.store(false, Ordering::Relaxed);
        tokio::select! {
            ended = shared.pump(from_client, to_server, ask) => ended,
            ended = shared.pump(from_server, to_client, answer) => ended,
        }
    };
    let ended = tokio::select! {
        ended = carry => Some(ended),
        _ = mode.wait_for(|mode| *mode == Mode::Dead) => None,
    };
    if let Some(ended) = ended {
        return ended;
    }
    client.set_zero_linger()
}

impl Shared {
    async fn pump(
        &self,
        mut from: impl AsyncRead + Unpin,
        mut to: impl AsyncWrite + Unpin,
        came: impl Fn(),
    ) -> io::Result<()> {
        let mut piece = vec![0; PIECE];
        loop {
            let len = from.read(&mut piece).await?;
            if len == 0 {
                return Ok(());
            }
            came();
            self.turn(len).await;
            self.works().await;
            to.write_all(&piece[..len]).await?;
            self.bytes.fetch_add(len as u64, Ordering::Relaxed);
        }
    }

    /// Waits until so many bytes may go.
    async fn turn(&self, bytes: usize) {
        #[allow(clippy::cast_precision_loss)]
        let took = bytes as f64 / self.rate.load(Ordering::Relaxed) as f64;
        let until = {
            let mut busy_until = self.busy_until.lock().unwrap();
            let now = Instant::now();
            let from = (*busy_until).max(now.checked_sub(BURST).unwrap_or(now));
            *busy_until = from + Duration::from_secs_f64(took);
            *busy_until
        };
        tokio::time::sleep_until(until).await;
    }

    async fn works(&self) {
        // The sender is ours, so it is there.
        let _ = self.mode.subscribe().wait_for(|mode| *mode != Mode::Paused).await;
    }
}
