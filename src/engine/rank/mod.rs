//! The common part of all engines' connectors: a [`Worker`] is one rank's, and moves chunks between the node and
//! the engine's pages.
//!
//! A worker lives in the engine's process: a [`client`](crate::engine::client) that attaches again after a daemon's
//! restart, the arena that the client maps, and [`Copier`](crate::engine::copy::Copier)s between the two. A model
//! keeps one or several kinds of KV, each a space; an engine deals the layers of a kind into groups, each with a
//! copier. There is one session and one registered arena for all of them. Every failure is a missing chunk: the
//! engine computes it.
//!
//! Not for: deciding which chunks to load and store. The engine's scheduler decides, in the connectors in Python.
//!
//! | file      | what                                                                     |
//! |-----------|--------------------------------------------------------------------------|
//! | `worker`  | session, kinds and limits of a rank                                      |
//! | `kind`    | one kind: its space, and a copier for each group                         |
//! | `load/`   | chunks of several kinds into their pages, each kind by a call of its own |
//! | `store`   | reserve, copy, commit; the pages are held until the copies are made      |
//! | `pinning` | the arena's registration with the GPU                                    |
//! | `breaker` | leaves a gateway alone that does not answer                              |

mod breaker;
mod kind;
mod load;
mod pinning;
mod store;
mod worker;

pub use breaker::LookupBreaker;
pub use kind::KindPages;
pub use load::{Failed, LoadJob, LoadProgress, WantedChunk, WantedKind};
pub use store::{ComputedChunk, ComputedKind, Hold, StoreJob, Stored};
pub use worker::{Worker, WorkerError};
