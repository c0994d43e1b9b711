//! One name, many addresses: which of them gets the next request, how much each may have in flight, and what becomes of a
//! request whose endpoint is slow or gone.
//!
//! [`Endpoints`] are the addresses behind one name. A sender asks them for a [`Permit`] first, which says where
//! the request goes, and reports the outcome to the permit. The endpoints learn from nothing else. [`Attempts`] is the one place where
//! something is tried again, moved to another endpoint, or hedged.
//!
//! It knows neither names nor sockets nor HTTP: `T` is the caller's part of an endpoint, and time is tokio's, so that all of
//! it can be tested, and simulated, with a paused clock.

mod attempts;
mod breaker;
mod endpoints;
mod estimate;
mod handover;
mod member;
mod permit;
mod queue;
mod route;
mod state;
mod subset;
#[cfg(test)]
mod tests;
mod token_bucket;
mod window;

pub use attempts::{AttemptPolicy, AttemptVerdict, Attempts, Failure, Hedge};
pub use breaker::{BreakerOptions, BreakerPhase, EndpointBreaker};
pub use endpoints::{EndpointOptions, Endpoints, HedgeTo};
pub use handover::{Handover, Held};
pub use permit::{Class, Loss, Outcome, Permit};
pub use route::{Route, Start};
pub use state::{EndpointState, Requests};
pub use window::WindowOptions;
