//! What tokio-rustls reads from: the socket, by tokio or by asking the system at once.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use rustix::io::Errno;
use tokio::io::{AsyncRead, ReadBuf};
use tokio::net::TcpStream;
use tokio::net::tcp::OwnedReadHalf;

/// The type, the version and the length.
const RECORD_HEAD_LEN: usize = 5;

/// The reading half of a socket. It follows the records that come.
pub(super) struct Socket {
    half: OwnedReadHalf,
    /// While Some, the system is asked, not tokio, for as many reads.
    pub reads_now: Option<usize>,
    pub records: RecordEnds,
}

impl Socket {
    pub fn new(half: OwnedReadHalf) -> Self {
        Self {
            half,
            reads_now: None,
            records: RecordEnds::default(),
        }
    }

    pub fn tcp(&self) -> &TcpStream {
        self.half.as_ref()
    }

    fn poll_socket(&mut self, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.reads_now {
            None => Pin::new(&mut self.half).poll_read(cx, into),
            Some(0) => Poll::Pending,
            Some(left) => match rustix::io::read(self.tcp(), into.initialize_unfilled()) {
                Ok(len) => {
                    into.advance(len);
                    self.reads_now = Some(left - 1);
                    Poll::Ready(Ok(()))
                }
                Err(Errno::AGAIN) => Poll::Pending,
                Err(error) => Poll::Ready(Err(error.into())),
            },
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, into: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        let before = into.filled().len();
        ready!(this.poll_socket(cx, into))?;
        this.records.follow(&into.filled()[before..]);
        Poll::Ready(Ok(()))
    }
}

/// Where the records of a stream end. rustls does not tell whether it holds a part of one.
#[derive(Default)]
pub(super) struct RecordEnds {
    head_len: usize,
    /// The last two bytes of the head, once it is whole.
    len: u16,
    /// Bytes of the record that are still to come after its head.
    left: usize,
}

impl RecordEnds {
    fn follow(&mut self, mut bytes: &[u8]) {
        while let [byte, rest @ ..] = bytes {
            if self.left > 0 {
                let skipped = self.left.min(bytes.len());
                self.left -= skipped;
                bytes = &bytes[skipped..];
                continue;
            }
            self.len = self.len << 8 | u16::from(*byte);
            self.head_len += 1;
            if self.head_len == RECORD_HEAD_LEN {
                self.head_len = 0;
                self.left = usize::from(self.len);
            }
            bytes = rest;
        }
    }

    /// No record has come in part.
    pub fn are_whole(&self) -> bool {
        self.head_len == 0 && self.left == 0
    }
}
