//! The common part of all engines' connectors: a [`Worker`] is one rank's, and moves chunks between the node and
//! the engine's pages.
//!
//! A worker lives in the engine's process: a [`client`](crate::engine::client) that attaches again after a daemon's
//! restart, the arena that the client maps, and a [`Copier`](crate::engine::copy::Copier) between the two. Every
//! failure is a missing chunk: the engine computes it.
//!
//! Not for: deciding which chunks to load and store. The engine's scheduler decides, in the connectors in Python.

mod breaker;
mod load;
mod pinning;
mod store;
mod worker;

pub use breaker::LookupBreaker;
pub use load::{Failed, LoadJob, LoadProgress, WantedChunk};
pub use store::{ComputedChunk, Hold, StoreJob, Stored};
pub use worker::{Worker, WorkerError};
