//! `kvgate bench`: the speed of this S3, seen through kvgate's own request path.
//!
//! **Mechanism.** A phase is many requests of one kind. As many tasks as requests may be in flight take turns from
//! a [`PhaseRun`](phase_run::PhaseRun), which counts, paces and ends them. Everything that a request needs is ready
//! before the clock starts: keys, slots in a prefaulted arena, the digest that each part must have. Reads land in
//! slots like those of loads and are digested by a [`BodyWatch`](crate::s3::net::BodyWatch) on the way; writes go
//! out of slots that were filled once, of which only the stamps change. The requests are those of the
//! [`ObjectStore`](crate::s3::object::ObjectStore) that the gateway uses, retries included; only `lookup` and
//! prompts go through a [`Gateway`](crate::cache::gateway::Gateway).
//!
//! **Why.** Each phase has two times, like elbencho's: *first done*, when the first task found nothing left to do,
//! and *last done*. Between them fewer requests were in flight than were asked for. CPU time and page faults are
//! the process's, so the cost of a byte or a request can be compared with any other client on the same server. The
//! content names itself: the report of a wrong part also says whose bytes came instead.
//!
//! **Not for** measuring an engine's copies, nor the cost of a server: the embedded one runs in this process, so
//! its work is in the CPU figures.
//!
//! | file        | what                                                         |
//! |-------------|--------------------------------------------------------------|
//! | `settings`  | the settings, and their limits                               |
//! | `content`   | the objects' bytes and their digests                         |
//! | `check`     | the watch that digests a read                                |
//! | `run`    | turns, pace, time limit, tallies: what all phases share      |
//! | `raw`       | the requests of write, read, head and delete                 |
//! | `lookup`    | lookups of chunks, through a gateway                         |
//! | `prompt`    | a prompt's chunks stored, and looked up and loaded together  |
//! | `histogram` | latencies                                                    |
//! | `usage`     | CPU time and page faults                                     |
//! | `split`     | the traffic of each address                                  |
//! | `report`    | the results, as `--json` shows them                          |
//! | `session`   | the phases one after the other                               |

mod check;
mod content;
mod error;
mod histogram;
mod lookup;
mod phase_run;
mod prompt;
mod raw;
mod report;
mod session;
mod settings;
mod split;
mod usage;

pub use error::BenchError;
pub use histogram::HistogramBucket;
pub use phase_run::{Interrupts, Live};
pub use prompt::BenchPrompt;
pub use report::{BenchReport, Errors, Latency, PhaseReport, PromptReport, ReportMark};
pub use session::{Bench, UnderWay};
pub use settings::{BenchPhase, BenchSettings, PromptSettings};
pub use split::Endpoint;
