//! kvgate: an S3-native, content-addressed KV cache gateway for LLM inference.
//!
//! `ARCHITECTURE.md` has the map, `docs/architecture/` how each part works and why. Dependencies point down only:
//! cli, demo, bench -> inventory -> gateway -> existence, object -> net, arena -> chunk.

#![cfg_attr(
    test,
    allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::float_cmp)
)]

pub mod api;
pub mod arena;
pub mod bench;
pub mod chunk;
pub mod cli;
pub mod client;
pub mod config;
pub mod connector;
pub mod copy;
pub mod daemon;
pub mod demo;
pub mod dns;
#[cfg(feature = "embedded")]
pub mod embedded;
mod episode;
pub mod existence;
pub mod fanout;
pub mod gateway;
pub mod gpu;
mod host;
pub mod inventory;
pub mod net;
pub mod node;
pub mod object;
pub mod tier;
pub mod units;

/// The example of docs/LIBRARY.md compiles.
#[cfg(doctest)]
#[doc = include_str!("../docs/LIBRARY.md")]
struct Library;
