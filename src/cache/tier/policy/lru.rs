//! Least recently used.

use super::list::{At, Nodes};
use super::recency::Recency;
use super::{Access, Order};

/// Least recently used: a use makes a key the newest, and of one prompt's keys the last ones are the oldest.
pub(super) struct Lru(Recency);

impl Lru {
    pub fn new() -> Self {
        Self(Recency::new())
    }
}

impl<K> Order<K> for Lru {
    fn insert(&mut self, nodes: &mut Nodes<K>, at: At, access: Access) {
        self.0.push(nodes, at, access);
    }

    fn hit(&mut self, nodes: &mut Nodes<K>, at: At, access: Access) {
        self.0.renew(nodes, at, access);
    }

    fn remove(&mut self, nodes: &mut Nodes<K>, at: At) {
        self.0.remove(nodes, at);
    }

    fn evict(&mut self, nodes: &mut Nodes<K>, may_go: &mut dyn FnMut(&K) -> bool) -> Option<At> {
        for _ in 0..self.0.len() {
            let at = self.0.oldest()?;
            if may_go(nodes.key(at)) {
                self.0.remove(nodes, at);
                return Some(at);
            }
            // Each is asked for once.
            self.0.refused(nodes, at);
        }
        None
    }
}
