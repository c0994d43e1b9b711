//! First in, first out.

use super::Order;
use super::list::{At, List, Nodes};
use super::lru::evict_oldest;

/// First in, first out: uses change nothing.
pub(super) struct Fifo(List);

impl Fifo {
    pub fn new() -> Self {
        Self(List::new())
    }
}

impl<K> Order<K> for Fifo {
    fn insert(&mut self, nodes: &mut Nodes<K>, at: At) {
        self.0.push(nodes, at);
    }

    fn hit(&mut self, _nodes: &mut Nodes<K>, _at: At) {}

    fn remove(&mut self, nodes: &mut Nodes<K>, at: At) {
        self.0.remove(nodes, at);
    }

    fn evict(&mut self, nodes: &mut Nodes<K>, may_go: &mut dyn FnMut(&K) -> bool) -> Option<At> {
        evict_oldest(&mut self.0, nodes, may_go)
    }
}
