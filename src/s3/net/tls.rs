//! TLS for connections whose bodies land in slots.
//!
//! Records are read from the socket into a window of fixed length, decrypted there in place, and what they hold goes
//! into the caller's memory: many records for a system call. tokio-rustls reads the socket in pieces of 4 KiB.
//! `session.rs` is TLS without a socket; here is the socket.
//!
//! There is no time-out in here and nothing of HTTP. The server's certificate is checked against the roots of
//! `config.rs`; there are no client certificates.

mod config;
mod session;
#[cfg(test)]
mod tests;
mod window;

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use rustls::ClientConfig;
use rustls::client::UnbufferedClientConnection;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

use super::lowat::LowWater;
pub use config::{TlsError, client_config};
use session::{TlsSession, TlsStep, ToSend, WRITE_LEN_MAX};

/// The bytes that a server may send to an idle connection before it is not worth keeping: two session tickets are
/// usual, and one read has room for far more.
const IDLE_READS_MAX: usize = 4;

/// A connection after its handshake. Reads and writes can be dropped at any point: what was read is kept for the next
/// read, and what a write returned as written is sent by the next write or flush.
pub struct TlsStream {
    tcp: TcpStream,
    session: TlsSession,
    closing: bool,
}

impl TlsStream {
    /// Does the handshake. Its errors have rustls's words ("invalid peer certificate: UnknownIssuer"), and the
    /// `rustls::Error` inside.
    pub async fn connect(
        tcp: TcpStream,
        config: Arc<ClientConfig>,
        server_name: ServerName<'static>,
    ) -> io::Result<Self> {
        let tls = UnbufferedClientConnection::new(config, server_name)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let mut stream = Self {
            tcp,
            session: TlsSession::new(tls),
            closing: false,
        };
        poll_fn(|cx| stream.poll_handshake(cx)).await?;
        Ok(stream)
    }

    /// Whether a request may go out on a connection that was idle: it is open and nothing of an answer waits. Session
    /// tickets and key updates that came meanwhile are used up. It asks the system, not tokio, which may not have heard
    /// yet that the server has closed.
    pub fn is_idle_and_open(&mut self) -> bool {
        for _ in 0..IDLE_READS_MAX {
            self.session.read_ahead();
            if self.closing || self.session.has_kept() || !self.session.is_open() {
                return false;
            }
            match rustix::io::read(&self.tcp, self.session.room()) {
                Ok(len) => self.session.received(len),
                Err(rustix::io::Errno::INTR) => {}
                // A part of a record could become anything.
                Err(rustix::io::Errno::AGAIN) => return self.session.incoming.is_empty() && self.send_now(),
                Err(_) => return false,
            }
        }
        false
    }

    /// At least `coming` bytes of application data will still come, in their records.
    pub fn expect(&self, low_water: &mut LowWater, coming: usize) -> io::Result<()> {
        low_water.expect(
            &self.tcp,
            coming.saturating_sub(self.session.incoming.filled().len()),
        )
    }

    /// Reads what the socket has now, without asking tokio. Returns the number of bytes read, and how many came into `into`.
    pub fn read_now(&mut self, into: &mut [u8]) -> io::Result<(usize, usize)> {
        let len = rustix::io::read(&self.tcp, self.session.room())?;
        self.session.received(len);
        let mut into = ReadBuf::new(into);
        self.session.read(&mut into);
        Ok((len, into.filled().len()))
    }

    fn poll_handshake(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        loop {
            // The server's first application data may come with the end of its handshake: it is kept.
            let step = self.session.step(&mut ReadBuf::new(&mut []), ToSend::Nothing);
            match step {
                TlsStep::More => {}
                TlsStep::Ready | TlsStep::Waits => {
                    ready!(self.poll_send(cx))?;
                    if step == TlsStep::Ready {
                        return Poll::Ready(self.session.finished());
                    }
                    if !self.session.is_open() {
                        return Poll::Ready(Err(self.no_handshake()));
                    }
                    ready!(self.poll_receive(cx))?;
                }
                TlsStep::Failed => {
                    self.send_now();
                    return Poll::Ready(Err(self.no_handshake()));
                }
            }
        }
    }

    fn no_handshake(&self) -> io::Error {
        match self.session.finished() {
            Err(error) => error,
            Ok(()) => io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the server ended the TLS handshake with close_notify",
            ),
        }
    }

    /// Reads from the socket into the session, which is open.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut room = ReadBuf::new(self.session.room());
        ready!(Pin::new(&mut self.tcp).poll_read(cx, &mut room))?;
        let len = room.filled().len();
        self.session.received(len);
        Poll::Ready(Ok(()))
    }

    /// Everything from the session into the socket.
    fn poll_send(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let outgoing = &mut self.session.outgoing;
        while !outgoing.is_empty() {
            match ready!(Pin::new(&mut self.tcp).poll_write(cx, outgoing.filled()))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                len => outgoing.consume(len),
            }
        }
        Poll::Ready(Ok(()))
    }

    /// Sends what the socket takes at once, and returns whether that was all. It is for alerts and the like while reading: a
    /// wait for the socket there would take the place of a writer that waits.
    fn send_now(&mut self) -> bool {
        let outgoing = &mut self.session.outgoing;
        while !outgoing.is_empty() {
            match self.tcp.try_write(outgoing.filled()) {
                Ok(len) if len > 0 => outgoing.consume(len),
                _ => return false,
            }
        }
        true
    }
}

impl AsyncRead for TlsStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = into.remaining();
        loop {
            this.session.read(into);
            this.send_now();
            if into.remaining() < before || before == 0 {
                return Poll::Ready(Ok(()));
            }
            if !this.session.is_open() {
                return Poll::Ready(this.session.finished());
            }
            ready!(this.poll_receive(cx))?;
        }
    }
}

impl AsyncWrite for TlsStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.closing {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        ready!(this.poll_send(cx))?;
        let bytes = &bytes[..bytes.len().min(WRITE_LEN_MAX)];
        this.session.write(ToSend::Bytes(bytes))?;
        // They are in a record now, so they are written, even if the socket is full.
        match this.poll_send(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            _ => Poll::Ready(Ok(bytes.len())),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.get_mut().poll_send(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        ready!(this.poll_send(cx))?;
        if !this.closing {
            this.closing = true;
            // A session that failed has sent its alert instead.
            let _ = this.session.write(ToSend::CloseNotify);
            ready!(this.poll_send(cx))?;
        }
        Pin::new(&mut this.tcp).poll_shutdown(cx)
    }
}
