//! Daemon and client of different versions: what to say where one does not understand the other.
//!
//! Each answer has the daemon's version in its `server` header, each call the client's in its `user-agent`.

use hyper::HeaderMap;
use hyper::header::{HeaderValue, SERVER};

use super::ClientError;
use crate::protocol::{Problem, VERSION, version_in};

pub(super) const USER_AGENT: HeaderValue =
    HeaderValue::from_static(concat!("kvgate/", env!("CARGO_PKG_VERSION")));

/// Refusals that another version may be the reason of: a field, a value or a call that it does not know.
const OF_VERSIONS: [&str; 3] = ["bad_request", "not_found", "method_not_allowed"];

/// An answer that this client does not understand.
pub(super) fn not_understood(headers: &HeaderMap, why: impl std::fmt::Display) -> ClientError {
    ClientError::Answer(format!("{why}{}", advice(headers)))
}

/// A refusal, and what to do if the versions are its reason.
pub(super) fn refused(headers: &HeaderMap, mut problem: Problem) -> ClientError {
    if OF_VERSIONS.contains(&problem.code.as_str()) {
        problem.detail.push_str(&advice(headers));
    }
    ClientError::Refused(problem)
}

/// Empty where both are of the same version.
fn advice(headers: &HeaderMap) -> String {
    const DO: &str = "install the same version on both sides, the daemon's program and the engine's wheel, and start both anew";

    match version_in(headers.get(SERVER).map(HeaderValue::as_bytes)) {
        Some(VERSION) => String::new(),
        Some(theirs) => {
            format!("; the daemon is kvgate {theirs}, and its client here is kvgate {VERSION}: {DO}")
        }
        None => format!(
            "; what answers there does not say which kvgate it is, so it is older than this kvgate {VERSION}, or none: {DO}"
        ),
    }
}
