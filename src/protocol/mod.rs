//! The messages of the daemon and its clients. The server reads what a client writes, and the other way round, from
//! the same types. `docs/API.md` and `docs/openapi.json` describe them for everybody else.

mod calls;
mod choice;
mod words;

pub use calls::*;
pub(crate) use choice::choices;
pub use words::{EvictionPolicy, Order, ProbeMode, Strategy, Tier, WhenFull};
