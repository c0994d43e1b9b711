use std::pin::Pin;

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper::{HeaderMap, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};

use super::{ClientError, Target};

trait Stream: AsyncRead + AsyncWrite + Send {}
impl<S: AsyncRead + AsyncWrite + Send> Stream for S {}

/// One connection; ends when it is dropped.
pub(super) struct Connection {
    sender: SendRequest<Full<Bytes>>,
    task: tokio::task::JoinHandle<()>,
}

impl Connection {
    pub async fn open(target: &Target) -> Result<Self, ClientError> {
        let stream: std::io::Result<Pin<Box<dyn Stream>>> = match target {
            Target::Unix(path) => UnixStream::connect(path)
                .await
                .map(|stream| Box::pin(stream) as _),
            Target::Tcp(address) => TcpStream::connect(address).await.map(|stream| {
                // Calls are small.
                let _ = stream.set_nodelay(true);
                Box::pin(stream) as _
            }),
        };
        let stream = stream.map_err(|source| ClientError::Connect {
            at: match target {
                Target::Unix(path) => path.display().to_string(),
                Target::Tcp(address) => address.to_string(),
            },
            source,
        })?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        let task = tokio::spawn(async move {
            // The call says what went wrong.
            let _ = connection.await;
        });
        Ok(Self { sender, task })
    }

    pub fn is_open(&self) -> bool {
        !self.sender.is_closed()
    }

    /// The whole answer.
    pub async fn call(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<(StatusCode, HeaderMap, Bytes), hyper::Error> {
        let answer = self.stream(request).await?;
        let (head, body) = answer.into_parts();
        let body = body.collect().await?.to_bytes();
        Ok((head.status, head.headers, body))
    }

    /// An answer whose body comes bit by bit.
    pub async fn stream(
        &mut self,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, hyper::Error> {
        self.sender.ready().await?;
        self.sender.send_request(request).await
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.task.abort();
    }
}
