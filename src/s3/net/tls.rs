//! TLS for connections whose bodies land in slots: tokio-rustls over a socket with a large read buffer.
//!
//! tokio-rustls alone reads the socket in pieces of 4 KiB; with the buffer, many records come with a system call. Each
//! record is copied into rustls, deciphered there, and copied into the caller's memory. `socket.rs` is what the buffer
//! reads from.
//!
//! There is no time-out in here and nothing of HTTP. The server's certificate is checked against the roots of
//! `config.rs`; there are no client certificates.

mod config;
mod socket;
#[cfg(test)]
mod tests;

use std::io::{self, Read};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncBufRead, AsyncRead, AsyncWrite, BufReader, Join, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedWriteHalf;
use tokio_rustls::TlsConnector;

use super::lowat::LowWater;
pub use config::{TlsError, client_config};
use socket::Socket;

const KIB: usize = 1024;

/// Fifteen whole records (16 KiB + 22 bytes) for a system call. Half of it costs 5 % more CPU time, and twice of it
/// saves none.
///
/// rustls holds a part of a record and what was in the one before, 18 KiB each (of a handshake message 64 KiB), and 64
/// KiB of records that the socket does not take yet. So a connection has at most 256 + 18 + 18 + 65 = 357 KiB; one that
/// only reads has 292 KiB, as pages that were never used don't count.
const READ_BUFFER_LEN: usize = 256 * KIB;

/// The most that a record holds.
const RECORD_LEN_MAX: usize = 16 * KIB;

/// How often the system is asked in a row, without tokio. Two session tickets are usual on an idle connection, and one
/// read has room for far more.
const READS_NOW_MAX: usize = 4;

/// A connection after its handshake. Reads and writes can be dropped at any point: what was read is kept for the next
/// read, and what a write returned as written is sent by the next write or flush.
pub struct TlsStream {
    tls: tokio_rustls::client::TlsStream<Join<BufReader<Socket>, OwnedWriteHalf>>,
}

impl TlsStream {
    /// Does the handshake. Its errors have rustls's words ("invalid peer certificate: UnknownIssuer"), and the
    /// `rustls::Error` inside.
    pub async fn connect(
        tcp: TcpStream,
        config: Arc<ClientConfig>,
        server_name: ServerName<'static>,
    ) -> io::Result<Self> {
        let (reader, writer) = tcp.into_split();
        let reader = BufReader::with_capacity(READ_BUFFER_LEN, Socket::new(reader));
        let connect = TlsConnector::from(config).connect(server_name, tokio::io::join(reader, writer));
        Ok(Self { tls: connect.await? })
    }

    /// Whether a request may go out on a connection that was idle: it is open and nothing of an answer waits. Session
    /// tickets and key updates that came meanwhile are used up. It asks the system, not tokio, which may not have heard
    /// yet that the server has closed.
    pub fn is_idle_and_open(&mut self) -> bool {
        let (is_idle, reads) = self.now(|tls, cx| Pin::new(&mut tls.tls).poll_fill_buf(cx).is_pending());
        let is_drained = is_idle && reads < READS_NOW_MAX;
        // A part of a record could become anything.
        is_drained && self.socket().records.are_whole() && self.tls.get_mut().1.process_new_packets().is_ok()
    }

    /// At least `coming` bytes of application data will still come, in their records. What has come already is never
    /// waited for: a read waits only when nothing but a part of a record is left in the buffers.
    pub fn expect(&self, low_water: &mut LowWater, coming: usize) -> io::Result<()> {
        low_water.expect(self.socket().tcp(), coming.saturating_sub(RECORD_LEN_MAX))
    }

    /// Reads what the socket has now, without asking tokio. Returns whether bytes came, and how many are in `into`.
    pub fn read_now(&mut self, into: &mut [u8]) -> io::Result<(bool, usize)> {
        let mut into = ReadBuf::new(into);
        match self.now(|tls, cx| Pin::new(tls).poll_read(cx, &mut into)) {
            (Poll::Ready(Err(error)), _) => Err(error),
            (_, reads) => Ok((reads > 0, into.filled().len())),
        }
    }

    /// Lets `read` ask the system, not tokio. Returns how many reads of the socket it took, too.
    fn now<T>(&mut self, read: impl FnOnce(&mut Self, &mut Context<'_>) -> T) -> (T, usize) {
        self.socket_mut().reads_now = Some(READS_NOW_MAX);
        let read = read(self, &mut Context::from_waker(Waker::noop()));
        let left = self.socket_mut().reads_now.take().unwrap_or(0);
        (read, READS_NOW_MAX - left)
    }

    fn socket(&self) -> &Socket {
        self.tls.get_ref().0.reader().get_ref()
    }

    fn socket_mut(&mut self) -> &mut Socket {
        self.tls.get_mut().0.reader_mut().get_mut()
    }
}

impl AsyncRead for TlsStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let tls = &mut self.get_mut().tls;
        let before = into.remaining();
        let read = Pin::new(&mut *tls).poll_read(cx, into);
        if into.remaining() < before {
            return read;
        }
        // tokio-rustls tells an error of TLS once, and before the records that came whole. rustls tells it each time.
        let session = tls.get_mut().1;
        let Err(error) = session.process_new_packets() else {
            return read;
        };
        match session.reader().read(into.initialize_unfilled()) {
            Ok(len @ 1..) => into.advance(len),
            _ => return Poll::Ready(Err(io::Error::new(io::ErrorKind::InvalidData, error))),
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for TlsStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().tls).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tls).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tls).poll_shutdown(cx)
    }
}
