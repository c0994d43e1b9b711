//! Why a request got no answer that can be used.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use super::landing::Mismatch;

/// Why a request got no answer that can be used.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    #[error("the URL {0:?} can't be used: it must be http(s)://host[:port]/...")]
    Url(String),
    #[error("the request's body is a stream; only bodies in memory can be sent")]
    Body,
    #[error("a header of the request has bytes that no header can have")]
    Header,
    /// The cause is a sentence of its own.
    #[error("{host} has no address yet: {cause}")]
    Resolve { host: String, cause: Arc<str> },
    #[error("no connection to {to}: {cause}")]
    Connect { to: SocketAddr, cause: io::Error },
    #[error("no {what} for {limit:?}")]
    Timeout { what: &'static str, limit: Duration },
    #[error("the connection was closed before an answer")]
    Closed,
    #[error("the connection broke: {0}")]
    Io(#[from] io::Error),
    #[error("the answer is not HTTP: {0}")]
    Head(&'static str),
    #[error("the answer's body is not well-formed: {0}")]
    Framing(&'static str),
    #[error("the answer ended after {got} of {len} bytes")]
    Cut { got: usize, len: usize },
    #[error("the answer has more than {limit} bytes")]
    TooLong { limit: usize },
    #[error("no other endpoint has room for a hedge")]
    NoRoom,
    #[error(transparent)]
    Mismatch(#[from] Mismatch),
}

impl NetError {
    /// An answer came, and is none that can be used.
    pub fn is_of_the_answer(&self) -> bool {
        matches!(
            self,
            Self::Head(_) | Self::Framing(_) | Self::TooLong { .. } | Self::Mismatch(_)
        )
    }

    /// Nothing of an answer came: on a kept connection, the server had closed it.
    pub(super) fn before_answer(&self) -> bool {
        match self {
            Self::Closed => true,
            Self::Io(error) => matches!(
                error.kind(),
                io::ErrorKind::ConnectionReset
                    | io::ErrorKind::ConnectionAborted
                    | io::ErrorKind::BrokenPipe
                    // TLS that was ended without a word.
                    | io::ErrorKind::UnexpectedEof
            ),
            _ => false,
        }
    }

    /// Why TLS could not be agreed on, if it is that.
    pub fn tls(&self) -> Option<&rustls::Error> {
        let Self::Connect { cause, .. } = self else {
            return None;
        };
        cause.get_ref().and_then(|inner| inner.downcast_ref())
    }

    /// The server's certificate is of a CA that nobody named.
    pub fn is_untrusted(&self) -> bool {
        matches!(
            self.tls(),
            Some(rustls::Error::InvalidCertificate(
                rustls::CertificateError::UnknownIssuer
            ))
        )
    }
}
