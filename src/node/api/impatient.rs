//! A stream whose writes fail when the client takes nothing for a while.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::Sleep;

/// A stream whose writes fail when the client takes nothing for `time`; an answer would be kept for ever otherwise.
/// hyper has a time limit for heads only.
pub struct Impatient<S> {
    stream: S,
    time: Duration,
    waiting: Option<Pin<Box<Sleep>>>,
    patient: Arc<AtomicBool>,
}

/// Marks an answer that may stay unread for as long as its client lives. An attach is one: a stopped process reads
/// nothing, and must not lose its session by that.
#[derive(Debug, Clone, Copy)]
pub struct Patient;

impl<S> Impatient<S> {
    /// Its writes have no time limit once `patient` is set.
    pub fn new(stream: S, time: Duration, patient: Arc<AtomicBool>) -> Self {
        Self {
            stream,
            time,
            waiting: None,
            patient,
        }
    }

    fn timed<T>(&mut self, context: &mut Context<'_>, polled: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if polled.is_ready() || self.patient.load(Ordering::Relaxed) {
            self.waiting = None;
            return polled;
        }
        let time = self.time;
        let waiting = self
            .waiting
            .get_or_insert_with(|| Box::pin(tokio::time::sleep(time)));
        ready!(waiting.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.timed(context, polled)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.timed(context, polled)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        self.timed(context, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(context);
        self.timed(context, polled)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::time::Instant;

    use super::*;

    const TIME: Duration = Duration::from_secs(10);

    #[tokio::test(start_paused = true)]
    async fn a_write_that_nobody_takes_fails_in_time_unless_it_is_patient() {
        let (here, mut there) = duplex(8);
        let patient = Arc::new(AtomicBool::new(false));
        let mut stream = Impatient::new(here, TIME, Arc::clone(&patient));
        let began = Instant::now();
        stream.write_all(&[0; 8]).await.unwrap();
        assert_eq!(began.elapsed(), Duration::ZERO);
        let stalled = stream.write_all(&[1]).await.unwrap_err();
        assert_eq!((stalled.kind(), began.elapsed()), (io::ErrorKind::TimedOut, TIME));

        patient.store(true, Ordering::Relaxed);
        let write = tokio::time::timeout(TIME * 1000, stream.write_all(&[1])).await;
        assert!(write.is_err(), "it is still to be taken");
        there.read_exact(&mut [0; 8]).await.unwrap();
        stream.write_all(&[1]).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn each_part_that_is_taken_has_its_own_time() {
        let (here, mut there) = duplex(1);
        let mut stream = Impatient::new(here, TIME, Arc::default());
        let reads = async {
            for _ in 0..20 {
                tokio::time::sleep(TIME * 9 / 10).await;
                there.read_u8().await.unwrap();
            }
        };
        let (wrote, ()) = tokio::join!(stream.write_all(&[0; 20]), reads);
        wrote.unwrap();
    }
}
