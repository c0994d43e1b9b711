//! Existence of chunks on S3: present, absent, or unknown. Never two states.
//!
//! An error, a time-out, a 403 or a 503 means *unknown*: the caller is told, and no answer is remembered. Known
//! answers expire, because other nodes store and remove chunks too. A question that is already under way is not
//! asked twice. A damaged object is *quarantined* by its version: as long as S3 shows that version the chunk counts
//! as absent, so the next store replaces it; any other version is a new object and is trusted until a load says
//! otherwise. So is a version that this node lacks the key of, but no store replaces that.
//!
//! [`PrefixSearch`] finds the end of a prompt's cached prefix with few questions. Its inferences are never
//! remembered. [`BoundarySearch`] finds the last place where every kind of a model's KV is stored.

mod boundary;
mod cache;
mod prefix;
mod prober;

pub use boundary::{BoundarySearch, Scope};
pub use cache::{CacheLimits, ExistenceCache, Known, Useless};
pub use prefix::{ChunkState, PrefixSearch};
pub use prober::{ProbeAnswer, Prober, Wanted};
