//! `kvgate demo`: the whole path of a KV cache, on one machine, with nothing to install.
//!
//! **Mechanism.** Conversations that share a system prompt are "prefilled" by a generator of synthetic KV, in a
//! paged cache laid out as vLLM's, with shuffled block tables. Chunks that S3 lacks are gathered from the pages
//! into arena slots and stored; then the cache is poisoned and a new, empty
//! [`Gateway`](crate::cache::gateway::Gateway) starts. All chunks are looked up and loaded into other pages, and
//! every byte is compared with the generator's for the same tokens. The S3 server is the configured one, or one
//! inside the process.
//!
//! **Why.** A newcomer sees hits, requests and speeds of their own machine or cluster before connecting an engine,
//! and the comparison is an end-to-end test of gather, format, transfer, verification and scatter that needs no
//! copy of the bytes: the KV of a token is a function of all tokens up to it, the layer and the head.
//!
//! **Not for** benchmarks: client and embedded server share the cores, and the generator is no GPU. Each phase is
//! timed by itself, so that the generator's time is not in the store's speed.
//!
//! | file        | what                                                       |
//! |-------------|------------------------------------------------------------|
//! | `args`      | flags, and the defaults that keep memory in bounds         |
//! | `plan`      | conversations, their tokens, turns and chunk hashes        |
//! | `synthetic` | KV bytes from a prefix                                     |
//! | `paged`     | the paged cache: gather and scatter                        |
//! | `session`   | open, forget, remove: the common part of the phases        |
//! | `prefill`   | the phases lookup, generate and store                      |
//! | `reuse`     | the phases lookup, load and compare                        |
//! | `report`    | the results, as `--json` shows them; `text` for people     |

mod args;
mod error;
mod paged;
mod plan;
mod prefill;
mod progress;
mod report;
mod reuse;
mod run;
mod session;
mod synthetic;
mod text;

pub use args::DemoArgs;
pub use error::DemoError;
pub use plan::{Conversation, Plan, Shape};
pub use report::{DemoKind, DemoPhase, DemoReport, Difference, Missed};
pub use run::run;
pub use session::Demo;
