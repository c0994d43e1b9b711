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
mod s3fifo;
mod sieve;

pub use queue::Queue;

use list::{At, Nodes};

/// The order that a policy keeps. Every node is in exactly one of its lists from `insert` until `remove` or `evict`.
trait Order<K> {
    fn insert(&mut self, nodes: &mut Nodes<K>, at: At);

    fn hit(&mut self, nodes: &mut Nodes<K>, at: At);

    fn remove(&mut self, nodes: &mut Nodes<K>, at: At);

    /// Removes the next that may go. None only if every one was asked for and may not.
    fn evict(&mut self, nodes: &mut Nodes<K>, may_go: &mut dyn FnMut(&K) -> bool) -> Option<At>;
}

#[cfg(test)]
mod tests;
