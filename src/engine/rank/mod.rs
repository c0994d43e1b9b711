//! The common part of all engines' connectors: [`Worker`] is one rank's, and moves chunks between the node and
//! the engine's pages.
//!
//! It lives in the engine's process: a [`client`](crate::engine::client) that attaches again when the daemon was restarted, the
//! arena as that maps it, and a [`Copier`](crate::engine::copy::Copier) between the two. Whatever goes wrong is a chunk that is not
//! there: the engine computes it.
//!
//! Not for: deciding what to load and what to store. That is the engine's scheduler's business, in the connectors in
//! Python.

mod breaker;
mod load;
mod pinning;
mod store;
mod worker;

pub use breaker::LookupBreaker;
pub use load::{Failed, LoadJob, LoadProgress, WantedChunk};
pub use store::{ComputedChunk, Hold, StoreJob, Stored};
pub use worker::{Worker, WorkerError};
