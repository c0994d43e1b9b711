//! The types of the daemon's API. Server and client read and write the same types. `docs/API.md` and
//! `docs/openapi.json` describe them for other programs.

mod calls;
mod choice;
mod tokens;
mod words;

pub use calls::*;
pub(crate) use choice::choices;
pub use tokens::TokenShare;
pub use words::{EvictionPolicy, Order, ProbeMode, Strategy, Tier, WhenFull};
