//! What carries calls to members: HTTP, or, in a simulated fleet, a model of it.

use std::net::SocketAddr;
use std::time::Duration;

use futures::future::BoxFuture;

use super::HOLDER_HEADER;
use crate::s3::fanout::Route;
use crate::s3::net::{LandingCell, NetClient, NetError, Origin, Outgoing, head_of};

/// One call, without a time limit for its answer.
pub struct PeerCall<'a> {
    pub method: &'static str,
    pub path: &'a str,
    /// All of them.
    pub headers: &'a [(&'a str, &'a str)],
    pub body: &'a [u8],
    /// Where the body of an answer goes.
    pub landing: Option<&'a LandingCell>,
}

/// An answer, after its body.
pub struct Said {
    pub status: u16,
    /// The node that has the chunk, where the one that was asked has not.
    pub holder: Option<SocketAddr>,
}

/// Brings calls to members.
pub trait Transport: Send + Sync {
    fn call<'a>(&'a self, to: SocketAddr, call: PeerCall<'a>) -> BoxFuture<'a, Result<Said, NetError>>;

    /// It is no member any more.
    fn forget(&self, gone: SocketAddr);
}

/// HTTP over kvgate's own client, whose bodies land in slots.
pub(super) struct Http {
    pub client: NetClient,
    pub is_tls: bool,
    /// Of connecting.
    pub timeout: Duration,
}

impl Http {
    fn origin(&self, of: SocketAddr) -> Origin {
        Origin {
            tls: self.is_tls,
            host: of.ip().to_string(),
            port: of.port(),
        }
    }
}

impl Transport for Http {
    fn call<'a>(&'a self, to: SocketAddr, call: PeerCall<'a>) -> BoxFuture<'a, Result<Said, NetError>> {
        Box::pin(async move {
            let head = head_of(call.method, call.path, call.headers.iter().copied());
            let outgoing = Outgoing {
                head: head.as_bytes(),
                body: call.body,
                bodyless: call.method == "HEAD",
            };
            let (origin, route) = (self.origin(to), Route::default());
            let sent = self
                .client
                .send(&origin, &outgoing, call.landing, &route, self.timeout);
            let (head, _) = sent.await?;
            Ok(Said {
                status: head.status,
                holder: head.header(HOLDER_HEADER).and_then(|holder| holder.parse().ok()),
            })
        })
    }

    fn forget(&self, gone: SocketAddr) {
        self.client.forget(&self.origin(gone));
    }
}
