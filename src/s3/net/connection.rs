//! One connection: a request out, the answer's head in, its body into a slot or a buffer.

use std::future::{Future, poll_fn};
use std::io::{self, IoSlice};
use std::pin::{Pin, pin};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::{Instant, Sleep};

use super::error::NetError;
use super::head::{self, ResponseHead};
use super::landing::Landing;
use super::lowat::LowWater;
use super::tls::TlsStream;
use crate::s3::fanout::Held;

/// Read at once while a head is expected: bytes of a body that come with it are copied, so not more.
const HEAD_READ_BYTES: usize = 4096;
/// Read at once of a body that is buffered.
const READ_BYTES: usize = 64 << 10;
/// Read at once into a slot with a watch, so that the CPU's cache still has most of it when the watch looks.
const WATCHED_BYTES: usize = 1 << 20;
/// How often a task that waits for a body looks into the socket: fewer bytes than the low-water mark wake nobody. Breakers
/// and hedges judge progress, and must not take a slow body for a silent one.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// Interim answers (100 Continue, 103 Early Hints) before the real one.
const INTERIM_MAX: usize = 8;

pub(super) enum Stream {
    Plain(TcpStream),
    Tls(Box<TlsStream>),
}

pub(super) struct Connection {
    stream: Stream,
    /// Read, and not yet used.
    ahead: BytesMut,
    stall: Stall,
    low_water: LowWater,
    /// `ahead` has, or had, room for a whole body: it keeps that for as long as it lives.
    roomy: bool,
    /// The answer came before the whole request was sent.
    cut_off: bool,
}

/// A request as it goes over the wire.
pub(crate) struct Outgoing<'a> {
    pub head: &'a [u8],
    pub body: &'a [u8],
    /// It is a HEAD: its answer has no body.
    pub bodyless: bool,
}

impl Connection {
    /// `stall` limits the time in which not a byte is sent or received.
    pub fn new(stream: Stream, stall: Duration) -> Self {
        let low_water = match stream {
            Stream::Plain(_) => LowWater::plain(),
            Stream::Tls(_) => LowWater::tls(),
        };
        Self {
            stream,
            ahead: BytesMut::new(),
            stall: Stall::new(stall),
            low_water,
            roomy: false,
            cut_off: false,
        }
    }

    /// Whether another request may be sent: nothing more came, and nobody closed it. For plain TCP it is what tokio has heard
    /// of so far, without a system call: news that comes later makes the next answer no head, or a [stale](NetError::Closed)
    /// connection, and both are tried again.
    pub fn is_open(&mut self) -> bool {
        match &mut self.stream {
            Stream::Plain(tcp) => {
                matches!(tcp.try_read(&mut [0]), Err(error) if error.kind() == io::ErrorKind::WouldBlock)
            }
            Stream::Tls(tls) => tls.is_idle_and_open(),
        }
    }

    /// Whether it may be kept, after an answer that was read to its end.
    pub fn is_reusable(&self, head: &ResponseHead) -> bool {
        head.keep_alive && !self.cut_off && self.ahead.is_empty()
    }

    /// Gives up memory that it does not need while it is idle.
    pub fn rest(&mut self) {
        if std::mem::take(&mut self.roomy) {
            self.ahead = BytesMut::new();
        }
    }

    /// Whether bytes that land are copied on their way.
    pub fn copies(&self) -> bool {
        matches!(self.stream, Stream::Tls(_))
    }

    /// Sends the request and reads the answer's head, which must be whole within the stall time after the last byte sent.
    /// An answer that comes before the request is sent whole (a refusal) ends the sending.
    pub async fn exchange(&mut self, request: &Outgoing<'_>) -> Result<ResponseHead, NetError> {
        self.stall.progress();
        self.expect(0)?;
        let mut sending = Sending {
            left: [request.head, request.body],
            flushed: false,
            failed: None,
        };
        let mut interim = 0;
        poll_fn(|cx| {
            loop {
                if let Some(head) = self.next_head(request.bodyless, &mut interim)? {
                    // The body has the whole time to come, however long the head took.
                    self.stall.progress();
                    self.cut_off = !sending.flushed;
                    return Poll::Ready(match self.cut_off && head.is_success() {
                        true => Err(NetError::Head("it came before the request was sent whole")),
                        false => Ok(head),
                    });
                }
                if !sending.is_done() && sending.poll(cx, &mut self.stream).is_ready() {
                    self.stall.progress();
                    continue;
                }
                let read = match self.poll_ahead(cx, HEAD_READ_BYTES) {
                    Poll::Ready(read) => read,
                    Poll::Pending => return self.stall.poll(cx, "whole head of an answer").map(Err),
                };
                match (read, sending.failed.take()) {
                    (Ok(1..), failed) => sending.failed = failed,
                    // It was closed for reading, too: what failed first says more.
                    (_, Some(error)) | (Err(NetError::Io(error)), None) if self.ahead.is_empty() => {
                        return Poll::Ready(Err(NetError::Io(error)));
                    }
                    (Ok(0), _) if self.ahead.is_empty() => return Poll::Ready(Err(NetError::Closed)),
                    _ => return Poll::Ready(Err(NetError::Head("its head ends early"))),
                }
            }
        })
        .await
    }

    /// The next head that is not an interim one, if all of it is here.
    fn next_head(&mut self, bodyless: bool, interim: &mut usize) -> Result<Option<ResponseHead>, NetError> {
        while !self.ahead.is_empty() {
            let Some((head, len)) = head::parse(&self.ahead, bodyless)? else {
                break;
            };
            self.ahead.advance(len);
            if head.status >= 200 {
                return Ok(Some(head));
            }
            *interim += 1;
            if *interim > INTERIM_MAX {
                return Err(NetError::Head("it has too many interim answers"));
            }
        }
        Ok(None)
    }

    /// Reads the body into the slot, which has its length, and tells `arrived` of each stretch. Bytes that came with the head
    /// are copied; returns how many.
    pub async fn land(
        &mut self,
        landing: &mut Held<Landing>,
        mut arrived: impl FnMut(&mut Held<Landing>, usize),
    ) -> Result<usize, NetError> {
        let len = landing.slot.len();
        let copied = self.ahead.len().min(len);
        landing.slot[..copied].copy_from_slice(&self.ahead[..copied]);
        self.ahead.advance(copied);
        arrived(landing, copied);
        let mut landed = copied;
        while landed < len {
            self.expect(len - landed)?;
            // Smaller reads cost more system calls.
            let end = match landing.watch {
                Some(_) => len.min(landed + WATCHED_BYTES),
                None => len,
            };
            let read = self.read(&mut landing.slot[landed..end]).await?;
            if read == 0 {
                return Err(NetError::Cut { got: landed, len });
            }
            arrived(landing, read);
            landed += read;
        }
        Ok(copied)
    }

    /// Reads some of a body.
    async fn read(&mut self, into: &mut [u8]) -> Result<usize, NetError> {
        poll_fn(|cx| {
            loop {
                let mut buf = ReadBuf::new(into);
                let read = match &mut self.stream {
                    Stream::Plain(tcp) => Pin::new(tcp).poll_read(cx, &mut buf),
                    Stream::Tls(tls) => Pin::new(&mut **tls).poll_read(cx, &mut buf),
                };
                if let Poll::Ready(read) = read {
                    self.stall.progress();
                    return Poll::Ready(read.map(|()| buf.filled().len()).map_err(NetError::Io));
                }
                ready!(self.stall.poll_look(cx));
                // The next read finds the end and errors anew.
                if let Ok((true, read)) = self.stream.read_now(into) {
                    self.stall.progress();
                    if read > 0 {
                        return Poll::Ready(Ok(read));
                    }
                } else if let Some(late) = self.stall.late("byte of the body") {
                    return Poll::Ready(Err(late));
                }
            }
        })
        .await
    }

    /// Reads ahead until `len` bytes are there.
    pub async fn fill(&mut self, len: usize) -> Result<(), NetError> {
        self.roomy |= len > READ_BYTES;
        while self.ahead.len() < len {
            if self.more(len - self.ahead.len()).await? == 0 {
                return Err(NetError::Cut {
                    got: self.ahead.len(),
                    len,
                });
            }
        }
        Ok(())
    }

    /// Reads ahead at least one byte and at most `most`; 0 at the end.
    pub async fn more(&mut self, most: usize) -> Result<usize, NetError> {
        poll_fn(|cx| match self.poll_ahead(cx, most) {
            Poll::Pending => self.stall.poll(cx, "byte of the body").map(Err),
            Poll::Ready(read) => {
                self.stall.progress();
                Poll::Ready(read)
            }
        })
        .await
    }

    /// At least `coming` bytes will still come.
    fn expect(&mut self, coming: usize) -> Result<(), NetError> {
        let expected = match &mut self.stream {
            Stream::Plain(tcp) => self.low_water.expect(tcp, coming),
            Stream::Tls(tls) => tls.expect(&mut self.low_water, coming),
        };
        expected.map_err(NetError::Io)
    }

    pub fn ahead(&mut self) -> &mut BytesMut {
        &mut self.ahead
    }

    fn poll_ahead(&mut self, cx: &mut Context<'_>, most: usize) -> Poll<Result<usize, NetError>> {
        let most = most.min(READ_BYTES);
        self.ahead.reserve(most);
        let mut room = (&mut self.ahead).limit(most);
        let read = match &mut self.stream {
            Stream::Plain(tcp) => ready!(pin!(tcp.read_buf(&mut room)).poll(cx)),
            Stream::Tls(tls) => ready!(pin!(tls.read_buf(&mut room)).poll(cx)),
        };
        Poll::Ready(read.map_err(NetError::Io))
    }
}

/// A request on its way out.
struct Sending<'a> {
    /// The rest of head and body.
    left: [&'a [u8]; 2],
    flushed: bool,
    failed: Option<io::Error>,
}

impl Sending<'_> {
    fn is_done(&self) -> bool {
        self.flushed || self.failed.is_some()
    }

    /// Sends some. A failure is kept: the server may have answered before it closed.
    fn poll(&mut self, cx: &mut Context<'_>, stream: &mut Stream) -> Poll<()> {
        let [head, body] = self.left;
        let sent = match stream {
            _ if head.is_empty() && body.is_empty() => match Pin::new(&mut *stream).poll_flush(cx) {
                Poll::Ready(Ok(())) => {
                    self.flushed = true;
                    return Poll::Ready(());
                }
                other => other.map_ok(|()| 0),
            },
            Stream::Plain(tcp) if body.is_empty() => Pin::new(tcp).poll_write(cx, head),
            Stream::Plain(tcp) => {
                Pin::new(tcp).poll_write_vectored(cx, &[IoSlice::new(head), IoSlice::new(body)])
            }
            Stream::Tls(tls) => {
                Pin::new(&mut **tls).poll_write(cx, if head.is_empty() { body } else { head })
            }
        };
        match sent {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Ok(0)) => self.failed = Some(io::ErrorKind::WriteZero.into()),
            Poll::Ready(Ok(sent)) => {
                let of_head = sent.min(head.len());
                self.left = [&head[of_head..], &body[sent - of_head..]];
            }
            Poll::Ready(Err(error)) => self.failed = Some(error),
        }
        Poll::Ready(())
    }
}

impl Stream {
    /// Reads what the socket has now, without asking tokio. Returns whether bytes came, and how many are in `into`.
    fn read_now(&mut self, into: &mut [u8]) -> io::Result<(bool, usize)> {
        match self {
            Self::Plain(tcp) => Ok(rustix::io::read(tcp, into).map(|len| (len > 0, len))?),
            Self::Tls(tls) => tls.read_now(into),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            // TCP has nothing to flush.
            Self::Plain(_) => Poll::Ready(Ok(())),
            Self::Tls(tls) => Pin::new(&mut **tls).poll_flush(cx),
        }
    }
}

/// Ends a wait in which not a byte moves for too long. Cheap while bytes move: the timer is set anew only when it fires.
struct Stall {
    limit: Duration,
    last: Instant,
    timer: Pin<Box<Sleep>>,
}

impl Stall {
    fn new(limit: Duration) -> Self {
        Self {
            limit,
            last: Instant::now(),
            timer: Box::pin(tokio::time::sleep(limit.min(LOOK_EVERY))),
        }
    }

    fn progress(&mut self) {
        self.last = Instant::now();
    }

    /// Ready when the limit has passed.
    fn poll(&mut self, cx: &mut Context<'_>, what: &'static str) -> Poll<NetError> {
        loop {
            ready!(self.poll_look(cx));
            if let Some(late) = self.late(what) {
                return Poll::Ready(late);
            }
        }
    }

    /// Ready when it is time to look, and when the limit passes.
    fn poll_look(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        ready!(self.timer.as_mut().poll(cx));
        let now = Instant::now();
        let left = (self.last + self.limit).saturating_duration_since(now);
        let next = if left.is_zero() {
            LOOK_EVERY
        } else {
            left.min(LOOK_EVERY)
        };
        self.timer.as_mut().reset(now + next);
        Poll::Ready(())
    }

    fn late(&self, what: &'static str) -> Option<NetError> {
        let limit = self.limit;
        (self.last.elapsed() >= limit).then_some(NetError::Timeout { what, limit })
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    use tokio::io::AsyncWriteExt;
    use tokio::net::TcpListener;
    use tokio::sync::mpsc;

    use super::super::landing::{BodyWatch, Expect, LandingCell};
    use super::*;
    use crate::arena::{Arena, ArenaOptions};
    use crate::s3::fanout::Start;

    const BODY_BYTES: usize = 64 << 20;

    /// Takes its time, in which more arrives; knows the longest stretch.
    struct Slow(Arc<AtomicUsize>);

    impl BodyWatch for Slow {
        fn arrived(&mut self, _at: usize, bytes: &[u8]) {
            self.0.fetch_max(bytes.len(), Ordering::Relaxed);
            thread::sleep(Duration::from_millis(5));
        }
    }

    async fn connected() -> (Connection, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (ours, theirs) = tokio::join!(
            TcpStream::connect(listener.local_addr().unwrap()),
            listener.accept()
        );
        let connection = Connection::new(Stream::Plain(ours.unwrap()), Duration::from_secs(30));
        (connection, theirs.unwrap().0)
    }

    async fn landing(watch: Option<Box<dyn BodyWatch>>) -> Held<Landing> {
        let arena = Arena::new(&ArenaOptions {
            size: BODY_BYTES,
            ticket_bytes: 0,
            path: None,
            mode: 0,
            huge_pages: false,
            prefault: false,
            mlock: false,
        })
        .unwrap();
        let landing = Landing {
            slot: arena.try_reserve(BODY_BYTES).unwrap(),
            watch,
        };
        let expect = Expect {
            range: 0..BODY_BYTES as u64,
            object_len: BODY_BYTES as u64,
            etag: None,
        };
        LandingCell::new(landing, expect).claim(Start::First).await
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_watch_gets_stretches_that_fit_in_a_cache() {
        let (mut connection, mut server) = connected().await;
        let sent = tokio::spawn(async move { server.write_all(&vec![1; BODY_BYTES]).await });
        let longest = Arc::new(AtomicUsize::new(0));
        let mut landing = landing(Some(Box::new(Slow(Arc::clone(&longest))))).await;
        let mut landed = 0;
        let arrived = |landing: &mut Held<Landing>, len| {
            landing.arrived(landed, len);
            landed += len;
        };
        connection.land(&mut landing, arrived).await.unwrap();
        sent.await.unwrap().unwrap();
        let longest = longest.load(Ordering::Relaxed);
        assert!(longest <= WATCHED_BYTES, "{longest}");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn bytes_too_few_to_wake_the_reader_are_seen_nevertheless() {
        let (mut connection, mut server) = connected().await;
        let (saw, mut seen) = mpsc::unbounded_channel();
        let sent = tokio::spawn(async move {
            let body = vec![1; BODY_BYTES];
            let (little, rest) = body.split_at(1000);
            server.write_all(little).await.unwrap();
            // The whole limit is longer.
            let saw = tokio::time::timeout(Duration::from_secs(20), seen.recv()).await;
            server.write_all(rest).await.unwrap();
            saw
        });
        let mut landing = landing(None).await;
        let arrived = |_: &mut Held<Landing>, len| {
            if len > 0 {
                saw.send(len).unwrap_or_default();
            }
        };
        connection.land(&mut landing, arrived).await.unwrap();
        assert_eq!(sent.await.unwrap(), Ok(Some(1000)));
    }
}
