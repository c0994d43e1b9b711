//! Keys that left lately, by fingerprint, for S3-FIFO.

use std::collections::HashMap;

use foldhash::fast::RandomState;

use super::list::{At, List, Nodes};

/// Keys that went lately, by a fingerprint: 32 bits of a hash. Two with the same one are mixed up now and then, which
/// costs a key that stays longer than it should.
pub(super) struct Ghost {
    places: HashMap<u32, At, RandomState>,
    nodes: Nodes<u32>,
    list: List,
}

impl Ghost {
    pub fn new() -> Self {
        Self {
            places: HashMap::default(),
            nodes: Nodes::new(),
            list: List::new(),
        }
    }

    /// Remembers it as the newest of at most `entries_max`.
    pub fn insert(&mut self, fingerprint: u32, entries_max: usize) {
        self.take(fingerprint);
        let at = self.nodes.add(fingerprint);
        self.list.push(&mut self.nodes, at);
        self.places.insert(fingerprint, at);
        while self.list.len() > entries_max {
            let Some(oldest) = self.list.oldest() else {
                break;
            };
            let oldest = *self.nodes.key(oldest);
            self.take(oldest);
        }
    }

    /// Forgets it; false if it was not known.
    pub fn take(&mut self, fingerprint: u32) -> bool {
        let place = self.places.remove(&fingerprint);
        if let Some(at) = place {
            self.list.remove(&mut self.nodes, at);
            self.nodes.free(at);
        }
        place.is_some()
    }
}
