//! kvgate: an S3-native, content-addressed KV cache gateway for LLM inference.
//!
//! `ARCHITECTURE.md` has the map, `docs/architecture/` how each part works and why. Dependencies point down only:
//! tools -> node, engine -> cache -> s3 -> arena -> format; `protocol` has the types that node and engine exchange.

#![cfg_attr(
    test,
    allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::float_cmp)
)]

pub mod arena;
pub mod cache;
pub mod config;
#[cfg(feature = "embedded")]
pub mod embedded;
pub mod engine;
pub mod format;
pub mod inventory;
pub mod metrics;
pub mod node;
pub mod protocol;
pub mod s3;
pub mod tools;

/// The example of docs/LIBRARY.md compiles.
#[cfg(doctest)]
#[doc = include_str!("../docs/LIBRARY.md")]
struct Library;
