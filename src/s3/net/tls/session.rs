//! TLS without a socket, by rustls's unbuffered API: many records for one read.

use std::io;

use bytes::{Buf, BytesMut};
use rustls::Error;
use rustls::client::UnbufferedClientConnection;
use rustls::unbuffered::{ConnectionState, EncodeError, EncryptError, UnbufferedStatus};
use tokio::io::ReadBuf;

use super::window::ByteWindow;

const KIB: usize = 1024;

/// Records from the socket, decrypted in place: seven whole ones (16 KiB + 22 bytes) for a system call, and small enough
/// to stay in a core's cache on the way. rustls takes handshake messages of up to 64 KiB, which must be whole in here.
const INCOMING_LEN: usize = 128 * KIB;

/// The bytes that one write encrypts, in four records.
pub(super) const WRITE_LEN_MAX: usize = 64 * KIB;

/// Records for the socket: those of one write, and 4 KiB for their heads and tags (at most 29 bytes a record), and for
/// alerts and key updates. A handshake's flight is smaller.
const OUTGOING_LEN: usize = WRITE_LEN_MAX + 4 * KIB;

// Plaintext that did not fit into the caller's buffer is at most one record. When the caller writes, or checks an idle
// connection, the content of the incoming window is added: 16 + 128 KiB.
//
// So a connection has at most 128 + 68 + 144 = 340 KiB; one that only reads has 128 + 4 + 16 = 148 KiB, as pages that
// were never used don't count.

/// TLS without a socket. Ciphertext comes into `incoming` and goes out of `outgoing`.
pub(super) struct TlsSession {
    tls: UnbufferedClientConnection,
    pub incoming: ByteWindow,
    pub outgoing: ByteWindow,
    kept: BytesMut,
    end: Option<End>,
}

/// Why nothing more can be read.
#[derive(Clone)]
enum End {
    /// The server said so.
    CloseNotify,
    /// The connection ended, and the server did not say so: what came may be a part.
    Cut,
    Failed(Error),
    /// The bytes that rustls still needs are longer than its window.
    TooLong,
}

/// The bytes to encrypt when the state of the connection lets us.
#[derive(Clone, Copy)]
pub(super) enum ToSend<'a> {
    Nothing,
    /// At most `WRITE_LEN_MAX`; `outgoing` is empty.
    Bytes(&'a [u8]),
    CloseNotify,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum TlsStep {
    /// There may be more to do.
    More,
    /// No whole record is left, and nothing can be sent: the handshake goes on, or both sides have closed.
    Waits,
    /// No whole record is left, and what was to be sent is in `outgoing`.
    Ready,
    /// See `finished`.
    Failed,
}

impl TlsSession {
    pub fn new(tls: UnbufferedClientConnection) -> Self {
        Self {
            tls,
            incoming: ByteWindow::new(INCOMING_LEN),
            outgoing: ByteWindow::new(OUTGOING_LEN),
            kept: BytesMut::new(),
            end: None,
        }
    }

    /// Goes on by one record or state. Application data goes into `into` and what does not fit there is kept.
    pub fn step(&mut self, into: &mut ReadBuf<'_>, send: ToSend<'_>) -> TlsStep {
        let UnbufferedStatus { discard, state } = self.tls.process_tls_records(self.incoming.filled_mut());
        let mut discard = discard;
        let step = match state {
            Ok(ConnectionState::ReadTraffic(mut records)) => loop {
                match records.next_record() {
                    None => break Ok(TlsStep::More),
                    Some(Err(error)) => break Err(error),
                    Some(Ok(record)) => {
                        discard += record.discard;
                        let (fits, rest) = record
                            .payload
                            .split_at(record.payload.len().min(into.remaining()));
                        into.put_slice(fits);
                        self.kept.extend_from_slice(rest);
                    }
                }
            },
            Ok(ConnectionState::EncodeTlsData(mut message)) => match message.encode(self.outgoing.room()) {
                Ok(len) => {
                    self.outgoing.grow(len);
                    Ok(TlsStep::More)
                }
                Err(error) => Err(encode_error(&error)),
            },
            Ok(ConnectionState::TransmitTlsData(transmit)) => {
                // It is in `outgoing`, in order: as good as sent.
                transmit.done();
                Ok(TlsStep::More)
            }
            Ok(ConnectionState::PeerClosed) => {
                self.end = Some(End::CloseNotify);
                Ok(TlsStep::More)
            }
            Ok(ConnectionState::WriteTraffic(mut traffic)) => {
                let encrypted = match send {
                    ToSend::Nothing => Ok(0),
                    ToSend::Bytes(bytes) => traffic.encrypt(bytes, self.outgoing.room()),
                    ToSend::CloseNotify => traffic.queue_close_notify(self.outgoing.room()),
                };
                match encrypted {
                    Ok(len) => {
                        self.outgoing.grow(len);
                        Ok(TlsStep::Ready)
                    }
                    Err(error) => Err(encrypt_error(&error)),
                }
            }
            Ok(ConnectionState::BlockedHandshake | ConnectionState::Closed) => Ok(TlsStep::Waits),
            Ok(_) => Err(Error::General("unknown state of the connection".to_owned())),
            Err(error) => Err(error),
        };
        self.incoming.consume(discard);
        step.unwrap_or_else(|error| self.failed(error))
    }

    /// Decrypts whole records until `into` is full or none is left.
    pub fn read(&mut self, into: &mut ReadBuf<'_>) {
        let fits = self.kept.len().min(into.remaining());
        into.put_slice(&self.kept[..fits]);
        self.kept.advance(fits);
        while into.remaining() > 0 && self.end.is_none() && self.step(into, ToSend::Nothing) == TlsStep::More
        {
        }
    }

    /// Decrypts all whole records and keeps what they hold.
    pub fn read_ahead(&mut self) {
        let nowhere = &mut ReadBuf::new(&mut []);
        while self.end.is_none() && self.step(nowhere, ToSend::Nothing) == TlsStep::More {}
    }

    /// Puts `send` into `outgoing`, which is empty.
    pub fn write(&mut self, send: ToSend<'_>) -> io::Result<()> {
        if let Some(End::Failed(_) | End::TooLong) = self.end {
            return self.finished();
        }
        // Application data that comes before our turn is kept for the next read.
        let nowhere = &mut ReadBuf::new(&mut []);
        loop {
            match self.step(nowhere, send) {
                TlsStep::More => {}
                TlsStep::Ready => return Ok(()),
                TlsStep::Waits => return Err(io::ErrorKind::NotConnected.into()),
                TlsStep::Failed => return self.finished(),
            }
        }
    }

    /// Where the socket's next bytes go. Not empty while `is_open`.
    pub fn room(&mut self) -> &mut [u8] {
        self.incoming.room()
    }

    /// The bytes that the socket put into the room: 0 at its end.
    pub fn received(&mut self, len: usize) {
        match len {
            0 => self.end = self.end.take().or(Some(End::Cut)),
            len => self.incoming.grow(len),
        }
    }

    /// More can be read from the socket. It is asked when no whole record is left.
    pub fn is_open(&mut self) -> bool {
        if self.end.is_none() && self.incoming.is_full() {
            self.end = Some(End::TooLong);
        }
        self.end.is_none()
    }

    /// Application data waits for a read.
    pub fn has_kept(&self) -> bool {
        !self.kept.is_empty()
    }

    /// How reading ended, when it has: fine or an error, and the same each time.
    pub fn finished(&self) -> io::Result<()> {
        match &self.end {
            None | Some(End::CloseNotify) => Ok(()),
            Some(End::Cut) => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the connection ended without TLS's close_notify",
            )),
            Some(End::Failed(error)) => Err(io::Error::new(io::ErrorKind::InvalidData, error.clone())),
            Some(End::TooLong) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "the server sent a TLS message that is too long",
            )),
        }
    }

    /// Remembers the error and collects the alert that tells the server. After an error rustls is asked for nothing
    /// else: it would go on with what is in the window.
    fn failed(&mut self, error: Error) -> TlsStep {
        self.end = Some(End::Failed(error));
        while self.tls.wants_write() {
            let UnbufferedStatus { discard, state } =
                self.tls.process_tls_records(self.incoming.filled_mut());
            let Ok(ConnectionState::EncodeTlsData(mut alert)) = state else {
                break;
            };
            let Ok(len) = alert.encode(self.outgoing.room()) else {
                break;
            };
            self.outgoing.grow(len);
            self.incoming.consume(discard);
        }
        TlsStep::Failed
    }
}

fn encode_error(error: &EncodeError) -> Error {
    Error::General(format!("a message of the handshake: {error}"))
}

fn encrypt_error(error: &EncryptError) -> Error {
    Error::General(format!("a write: {error}"))
}
