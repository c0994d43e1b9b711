//! A recorded trace through the eviction policies of the daemon, in simulation: what each would have hit at each size,
//! and what lookups ask S3, and what the requests would have cost. Needs no server. It never knows how the command line shows it.

mod belady;
mod cost;
mod lookups;
mod plot;
mod simulation;
mod trace;

pub use self::belady::{Best, best};
pub use self::cost::{Cost, CostSettings, S3Plan, cost};
pub use self::lookups::{LookupPlan, Lookups, lookups};
pub use self::plot::{Curve, svg};
pub use self::simulation::{Hits, infinite, simulate};
pub use self::trace::{Prompt, Trace, TraceError};

#[cfg(test)]
mod tests;
