//! The types of the daemon's API. Server and client read and write the same types. `docs/API.md` and
//! `docs/openapi.json` describe them for other programs.

mod calls;
mod choice;
mod tokens;
mod words;

/// This kvgate's.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

/// The version in a `server` or `user-agent` header, `kvgate/0.1.0`. None: it is no kvgate, or an older one.
pub fn version_in(header: Option<&[u8]>) -> Option<&str> {
    let version = std::str::from_utf8(header?).ok()?.strip_prefix("kvgate/")?;
    // It comes from outside, and goes into logs and errors.
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-+".contains(&byte);
    (version.len() <= 32 && version.bytes().all(is_plain)).then_some(version)
}

pub use calls::*;
pub(crate) use choice::choices;
pub use tokens::TokenShare;
pub use words::{EvictionPolicy, Order, ProbeMode, Strategy, Tier, WhenFull};
