//! One HTTP connection to the daemon, over a unix socket or TCP. The caller that waits for an answer drives it.

use std::io;
use std::pin::Pin;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use super::owner::Owner;
use super::{ClientError, DaemonAddress};

trait Stream: AsyncRead + AsyncWrite + Send {}
impl<S: AsyncRead + AsyncWrite + Send> Stream for S {}

type Io = Pin<Box<http1::Connection<TokioIo<Pin<Box<dyn Stream>>>, Full<Bytes>>>>;

/// One connection; ends when it is dropped. The caller that waits for an answer drives it: a task of its own would
/// cost two more switches between threads in each call.
pub(super) struct ApiConnection {
    sender: SendRequest<Full<Bytes>>,
    /// None when it is closed.
    io: Option<Io>,
}

/// A connection that broke off before the answer was whole.
pub(super) struct Unanswered {
    pub error: hyper::Error,
    /// The node can't have received the whole request, and so has done nothing.
    pub unsent: bool,
}

impl From<hyper::Error> for Unanswered {
    fn from(error: hyper::Error) -> Self {
        Self { error, unsent: false }
    }
}

/// Only a write ends in a broken pipe, so the last bytes of the request were not sent. The node resets a connection
/// when it closes it with some of the request unread; had it read all and answered nothing, the connection would
/// just end.
fn is_cut(error: &hyper::Error) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<io::Error>());
    source.is_some_and(|source| {
        matches!(
            source.kind(),
            io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset
        )
    })
}

impl ApiConnection {
    pub async fn open(target: &DaemonAddress, owner: Owner) -> Result<Self, ClientError> {
        let stream: io::Result<Pin<Box<dyn Stream>>> = match target {
            DaemonAddress::Unix(path) => match UnixStream::connect(path).await {
                Ok(stream) => {
                    owner.check(&stream, path)?;
                    Ok(Box::pin(stream) as _)
                }
                Err(error) => Err(error),
            },
            DaemonAddress::Tcp(address) => TcpStream::connect(address).await.map(|stream| {
                // Calls are small: no delay.
                let _ = stream.set_nodelay(true);
                Box::pin(stream) as _
            }),
        };
        let stream = stream.map_err(|source| ClientError::Connect {
            at: match target {
                DaemonAddress::Unix(path) => path.display().to_string(),
                DaemonAddress::Tcp(address) => address.to_string(),
            },
            source,
        })?;
        let (sender, io) = http1::handshake(TokioIo::new(stream)).await?;
        Ok(Self {
            sender,
            io: Some(Box::pin(io)),
        })
    }

    pub fn is_open(&self) -> bool {
        self.io.is_some() && !self.sender.is_closed()
    }

    /// The whole answer.
    pub async fn call(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, HeaderMap, Bytes), Unanswered> {
        let answer = self.stream(request).await?;
        let (head, body) = answer.into_parts();
        let body = self.while_it_works(body.collect()).await?.to_bytes();
        Ok((head.status, head.headers, body))
    }

    /// An answer whose body comes in parts.
    pub async fn stream(&mut self, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, Unanswered> {
        let Self { sender, io } = self;
        let answer = async {
            if let Err(error) = sender.ready().await {
                return Err(Unanswered { error, unsent: true });
            }
            let answer = sender.try_send_request(request).await;
            answer.map_err(|mut failed| {
                let untouched = failed.take_message().is_some();
                let error = failed.into_error();
                let unsent = untouched || is_cut(&error);
                Unanswered { error, unsent }
            })
        };
        work(io, answer).await
    }

    /// Waits for `what`, which comes over this connection.
    pub async fn while_it_works<T>(&mut self, what: impl Future<Output = T>) -> T {
        work(&mut self.io, what).await
    }
}

async fn work<T>(io: &mut Option<Io>, what: impl Future<Output = T>) -> T {
    let mut what = std::pin::pin!(what);
    if let Some(working) = io {
        tokio::select! {
            biased;
            done = &mut what => return done,
            // The answer's own error says what went wrong.
            _ = working.as_mut() => {}
        }
    }
    *io = None;
    what.await
}
