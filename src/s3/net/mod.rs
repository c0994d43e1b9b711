//! Hosts and HTTP/1.1: connections of our own under the AWS SDK's runtime, so that the body of a ranged GET goes from the
//! socket straight into a slot.
//!
//! [`NetClient`] is what the SDK calls ([`HttpClient`](aws_smithy_runtime_api::client::http::HttpClient)). A request that
//! carries a [`LandingCell`] has its body landed: the head is read into a small buffer, checked against what was asked for,
//! the few bytes of body that came with it are copied, and everything else is read by the kernel into the slot. Any other
//! body is small (an error, a page of a listing) and is buffered, up to a limit.
//!
//! It keeps time on connecting, sending, waiting and reading; the caller limits the whole. It tries nothing again, except
//! a request on a kept connection that turns out to be closed: that costs nobody an attempt.
//!
//! A request goes to one of the endpoints of its host ([`fanout`](crate::s3::fanout)); there is a pool of connections to each.
//!
//! It never knows chunks.

mod body;
mod connection;
mod error;
#[cfg(any(test, fuzzing))]
mod fuzz;
mod head;
mod host;
mod http_client;
mod landing;
mod lowat;
mod pool;
mod stats;
mod tls;

pub(crate) use connection::Outgoing;
pub use error::NetError;
pub use host::ServerAddress;
pub(crate) use http_client::head_of;
pub use http_client::{NetClient, NetOptions, Url};
pub(crate) use landing::unquoted;
pub use landing::{BodyWatch, Expect, Landing, LandingCell, Mismatch};
pub use lowat::LowWater;
pub(crate) use pool::Origin;
pub use stats::Traffic;
pub use tls::{TlsError, client_config};

#[cfg(fuzzing)]
pub use fuzz::answer as fuzz_answer;
