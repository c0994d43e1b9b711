//! The latest chunks that something happened to, each with a value. Bounded: the oldest are forgotten.

use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;

use foldhash::fast::RandomState;

use crate::format::ChunkId;

/// See the [module](self).
pub struct Recent<V, K = ChunkId> {
    most: usize,
    /// With the place in the order.
    chunks: HashMap<K, (u64, V), RandomState>,
    order: BTreeMap<u64, K>,
    added: u64,
}

impl<V, K: Copy + Eq + Hash> Recent<V, K> {
    /// Knows so many chunks at most.
    pub fn new(most: usize) -> Self {
        Self {
            most,
            chunks: HashMap::default(),
            order: BTreeMap::new(),
            added: 0,
        }
    }

    /// It is the latest from now on, also if it was here before. Answers the value of the one that is forgotten for it.
    pub fn add(&mut self, key: K, value: V) -> Option<V> {
        self.added += 1;
        if let Some((before, _)) = self.chunks.insert(key, (self.added, value)) {
            self.order.remove(&before);
        }
        self.order.insert(self.added, key);
        if self.order.len() <= self.most {
            return None;
        }
        let (_, oldest) = self.order.pop_first()?;
        self.chunks.remove(&oldest).map(|(_, value)| value)
    }

    pub fn get(&self, key: &K) -> Option<&V> {
        self.chunks.get(key).map(|(_, value)| value)
    }

    pub fn get_mut(&mut self, key: &K) -> Option<&mut V> {
        self.chunks.get_mut(key).map(|(_, value)| value)
    }

    pub fn has(&self, key: &K) -> bool {
        self.chunks.contains_key(key)
    }

    pub fn remove(&mut self, key: &K) -> Option<V> {
        let (place, value) = self.chunks.remove(key)?;
        self.order.remove(&place);
        Some(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{ChunkHash, SpaceKey};

    fn key(number: u8) -> ChunkId {
        (
            SpaceKey::from_hex(&"0".repeat(32)).unwrap(),
            ChunkHash([number; 32]),
        )
    }

    fn here(recent: &Recent<u8>, keys: impl IntoIterator<Item = u8>) -> Vec<u8> {
        keys.into_iter().filter(|&of| recent.has(&key(of))).collect()
    }

    #[test]
    fn one_that_comes_again_is_the_latest() {
        let mut recent = Recent::<u8>::new(3);
        assert!((0..3).all(|of| recent.add(key(of), of).is_none()));
        assert_eq!(recent.add(key(0), 10), None);
        assert_eq!(recent.add(key(3), 3), Some(1), "the oldest is forgotten");
        assert_eq!(here(&recent, 0..4), [0, 2, 3]);
        assert_eq!(recent.get(&key(0)), Some(&10));
    }

    #[test]
    fn one_that_was_removed_and_comes_again_is_the_latest() {
        let mut recent = Recent::<u8>::new(2);
        recent.add(key(0), 0);
        recent.add(key(1), 1);
        recent.remove(&key(0));
        recent.add(key(0), 0);
        recent.add(key(2), 2);
        assert_eq!(here(&recent, 0..3), [0, 2]);
    }
}
