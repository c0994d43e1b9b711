//! The keys of a tier, with the policy that says who leaves first.

use super::{Access, Order};
use crate::protocol::EvictionPolicy;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::Hash;

use foldhash::fast::RandomState;

use super::fifo::Fifo;
use super::list::{At, Nodes};
use super::lru::Lru;
use super::reuse::Reuse;
use super::s3fifo::S3Fifo;
use super::sieve::Sieve;

/// The keys of a tier, in the order in which a policy lets them go.
pub struct Queue<K> {
    places: HashMap<K, At, RandomState>,
    nodes: Nodes<K>,
    order: Box<dyn Order<K> + Send>,
}

impl<K: Copy + Eq + Hash> Queue<K> {
    pub fn new(policy: EvictionPolicy) -> Self {
        let order: Box<dyn Order<K> + Send> = match policy {
            EvictionPolicy::Lru => Box::new(Lru::new()),
            EvictionPolicy::Fifo => Box::new(Fifo::new()),
            EvictionPolicy::Sieve => Box::new(Sieve::new()),
            EvictionPolicy::S3Fifo => Box::new(S3Fifo::new()),
            EvictionPolicy::Reuse => Box::new(Reuse::new()),
        };
        Self {
            places: HashMap::default(),
            nodes: Nodes::new(),
            order,
        }
    }

    /// Puts in a new key; one that is in is hit.
    pub fn insert(&mut self, key: K, access: Access) {
        match self.places.entry(key) {
            Entry::Occupied(place) => self.order.hit(&mut self.nodes, *place.get(), access),
            Entry::Vacant(place) => {
                let at = *place.insert(self.nodes.add(key));
                self.order.insert(&mut self.nodes, at, access);
            }
        }
    }

    pub fn has(&self, key: &K) -> bool {
        self.places.contains_key(key)
    }

    /// The chance that a new key with this access is used again; none if the policy does not know.
    pub fn chance(&self, access: Access) -> Option<f64> {
        self.order.chance(access)
    }

    /// The key was used. One that is not in is ignored.
    pub fn hit(&mut self, key: &K, access: Access) {
        if let Some(&at) = self.places.get(key) {
            self.order.hit(&mut self.nodes, at, access);
        }
    }

    /// Takes a key out; false if it was not in.
    pub fn remove(&mut self, key: &K) -> bool {
        let place = self.places.remove(key);
        if let Some(at) = place {
            self.order.remove(&mut self.nodes, at);
            self.nodes.free(at);
        }
        place.is_some()
    }

    /// Takes out the next that may go. One that may not counts as used. Amortised O(1) as long as few are refused; None,
    /// after a few rounds at most, only if all were.
    pub fn evict(&mut self, mut may_go: impl FnMut(&K) -> bool) -> Option<K> {
        let at = self.order.evict(&mut self.nodes, &mut may_go)?;
        let key = self.nodes.free(at);
        self.places.remove(&key);
        Some(key)
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Nodes in use, in all lists.
    #[cfg(test)]
    pub(super) fn nodes_in_use(&self) -> usize {
        self.nodes.in_use()
    }
}
