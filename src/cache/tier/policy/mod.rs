//! Eviction policies: which key leaves first when room is needed. No I/O, no locks, no clock and no sizes: a tier asks
//! for one after another until there is room.
//!
//! A [`Queue`] knows its keys by a map and keeps them in lists whose nodes share one vector (`list.rs`). Each policy is
//! an order over such nodes, in a file of its own. A key that may not go now, because something reads it, counts as
//! used and is passed over; so the next call does not meet it again.

mod fifo;
mod ghost;
mod list;
mod lru;
mod queue;
mod recency;
mod reuse;
mod s3fifo;
mod sieve;

pub use queue::Queue;

use list::{At, Nodes};

/// A use of a key, or its coming.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Access {
    /// When, in milliseconds of the tier's clock, which never goes back.
    pub at_ms: u64,
    /// The number of the prompt that it was for; 0 if that is not known.
    pub request: u32,
    /// Chunks of that prompt that were nowhere yet.
    pub added: u32,
}

/// The order that a policy keeps. Every node is in exactly one of its lists from `insert` until `remove` or `evict`.
trait Order<K> {
    fn insert(&mut self, nodes: &mut Nodes<K>, at: At, access: Access);

    fn hit(&mut self, nodes: &mut Nodes<K>, at: At, access: Access);

    fn remove(&mut self, nodes: &mut Nodes<K>, at: At);

    /// Removes the next that may go. None only if every one was asked for and may not.
    fn evict(&mut self, nodes: &mut Nodes<K>, may_go: &mut dyn FnMut(&K) -> bool) -> Option<At>;

    /// The chance that a new key with this access is used again; none if the policy does not know.
    fn chance(&self, _access: Access) -> Option<f64> {
        None
    }
}

#[cfg(test)]
mod tests;
