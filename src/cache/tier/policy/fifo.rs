//! First in, first out.

use super::list::{At, List, Nodes};
use super::{Access, Order};

/// First in, first out: uses change nothing.
pub(super) struct Fifo(List);

impl Fifo {
    pub fn new() -> Self {
        Self(List::new())
    }
}

impl<K> Order<K> for Fifo {
    fn insert(&mut self, nodes: &mut Nodes<K>, at: At, _access: Access) {
        self.0.push(nodes, at);
    }

    fn hit(&mut self, _nodes: &mut Nodes<K>, _at: At, _access: Access) {}

    fn remove(&mut self, nodes: &mut Nodes<K>, at: At) {
        self.0.remove(nodes, at);
    }

    fn evict(&mut self, nodes: &mut Nodes<K>, may_go: &mut dyn FnMut(&K) -> bool) -> Option<At> {
        evict_oldest(&mut self.0, nodes, may_go)
    }
}

/// Removes the oldest that may go; those that may not become the newest, so each is asked for once.
fn evict_oldest<K>(list: &mut List, nodes: &mut Nodes<K>, may_go: &mut dyn FnMut(&K) -> bool) -> Option<At> {
    for _ in 0..list.len() {
        let at = list.oldest()?;
        if may_go(nodes.key(at)) {
            list.remove(nodes, at);
            return Some(at);
        }
        list.renew(nodes, at);
    }
    None
}
