//! kvgate: an S3-native, content-addressed KV cache gateway for LLM inference.
//!
//! `ARCHITECTURE.md` has the map and the journeys of a lookup, a load and a store. Dependencies point down only:
//! cli, demo, bench -> inventory -> gateway -> existence, object -> net, arena -> chunk.

#![cfg_attr(
    test,
    allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, clippy::float_cmp)
)]

pub mod arena;
pub mod bench;
pub mod cache;
pub mod cli;
pub mod config;
pub mod demo;
#[cfg(feature = "embedded")]
pub mod embedded;
pub mod engine;
pub mod format;
pub mod gpu;
mod host;
pub mod inventory;
pub mod node;
pub mod s3;

/// The README's example compiles.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
