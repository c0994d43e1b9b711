//! The content of a bucket: its spaces and chunks, whether they are whole, how much there is, and their removal.
//!
//! There is no index, so all of it comes from listing: a page of up to 1000 keys at a time, and nothing but a removal
//! down to a size (`gc`) keeps more than a page. Keys that kvgate did not write are counted and left alone. [`Inventory::verify`] loads chunks
//! through the gateway, so a good chunk is exactly one that an engine would get.
//!
//! Removal is careful: a damaged chunk goes only while the object is still the one that was checked, and a space's
//! `space.json` goes last, so that the rest after an interruption can still be read and removed.
//!
//! Not for requests: a lookup never lists. No printing here: `cli` does that.

mod gc;
mod lease;
mod lifecycle;
mod list;
mod rekey;
mod remove;
mod select;
mod space_json;
mod stat;
mod summary;
mod usage;
mod verify;

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

pub use gc::{Collected, GcError, GcLimits, GcSpec, Parents, Plan, Step};
pub use lease::Lease;
pub use lifecycle::{Lifecycle, LifecycleError, LifecycleRule};
pub use list::{Page, StoredChunk};
pub use rekey::{RekeyError, RekeySpec, Rekeyed};
pub use remove::Removed;
pub use select::Select;
pub use space_json::SpaceJson;
pub use stat::{ChunkStat, HeaderState};
pub use summary::{SpaceSummary, Summary};
pub use usage::{AGES, Count, DAYS, SpaceUsage, Usage, UsageError};
pub use verify::{ObjectChecked, ObjectVerdict};

use crate::format::{KeyPrefix, Keyring};
use crate::s3::object::ObjectStore;

/// See the [module](self). Cheap to clone.
#[derive(Clone)]
pub struct Inventory {
    store: Arc<dyn ObjectStore>,
    keys: KeyPrefix,
    keyring: Keyring,
    /// Limit for one request, its retries included.
    call_timeout: Duration,
}

impl Inventory {
    pub fn new(
        store: Arc<dyn ObjectStore>,
        keys: KeyPrefix,
        keyring: Keyring,
        call_timeout: Duration,
    ) -> Self {
        Self {
            store,
            keys,
            keyring,
            call_timeout,
        }
    }

    pub fn keys(&self) -> &KeyPrefix {
        &self.keys
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.call_timeout
    }
}
