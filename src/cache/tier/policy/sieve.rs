//! SIEVE: "SIEVE is Simpler than LRU: an Efficient Turn-Key Eviction Algorithm for Web Caches", NSDI '24.
//!
//! A use sets a bit and moves nothing. A hand goes from the oldest to the newest and round again: it clears the bits that
//! are set and takes the first key whose bit is not. So what was used since the hand last came by stays where it is, and
//! the hand soon works among the newest, which keeps a scan from pushing out what was there before.

use super::list::{At, List, Nodes};
use super::{Access, Order};

pub(super) struct Sieve {
    list: List,
    /// The key that is looked at next; none: the oldest.
    hand: Option<At>,
}

impl Sieve {
    pub fn new() -> Self {
        Self {
            list: List::new(),
            hand: None,
        }
    }
}

impl<K> Order<K> for Sieve {
    fn insert(&mut self, nodes: &mut Nodes<K>, at: At, _access: Access) {
        self.list.push(nodes, at);
    }

    fn hit(&mut self, nodes: &mut Nodes<K>, at: At, _access: Access) {
        nodes.set_uses(at, 1);
    }

    fn remove(&mut self, nodes: &mut Nodes<K>, at: At) {
        if self.hand == Some(at) {
            self.hand = nodes.newer(at);
        }
        self.list.remove(nodes, at);
    }

    fn evict(&mut self, nodes: &mut Nodes<K>, may_go: &mut dyn FnMut(&K) -> bool) -> Option<At> {
        // After one round no bit is set but of those that may not go, so in the second everyone else is asked for.
        for _ in 0..2 * self.list.len() {
            let at = self.hand.or(self.list.oldest())?;
            self.hand = nodes.newer(at);
            if nodes.uses(at) > 0 {
                nodes.set_uses(at, 0);
            } else if may_go(nodes.key(at)) {
                self.list.remove(nodes, at);
                return Some(at);
            } else {
                nodes.set_uses(at, 1);
            }
        }
        None
    }
}
