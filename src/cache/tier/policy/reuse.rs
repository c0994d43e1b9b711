//! The key that is least likely to be asked for again soon, by what was seen here; least recently used where that is
//! better.
//!
//! - **Classes** (`classes.rs`): a key's class is how often it was used, and how many chunks the prompt that used it last
//!   added. Each class is a list by time of use.
//! - **Worth** (`table.rs`): the reuses a second that keeping a key brings, from its class's chance to be used again and
//!   from its age. All classes share one table of the ages at which keys are used again. People answer after a minute,
//!   tools after a second: a key just used may be worth less than one whose next use is due. So both ends of each
//!   list are looked at, and the one that is worth least leaves.
//! - **Memory of what left** (`ghost.rs`): chances are counted over eight times the keys that have room, as fingerprints.
//! - **Guard** (`guard.rs`): two caches of fingerprints, one for each way of choosing, see the same uses. The real one
//!   begins as LRU, follows the worth while that has more hits, and goes back as soon as it loses.
//!
//! A large tier's fingerprints are sampled, so cost and memory of all this are bounded. Nothing is random: the same uses
//! give the same order.

mod classes;
mod ghost;
mod guard;
mod table;

use std::hash::{BuildHasher, Hash};

use foldhash::fast::FixedState;

use self::classes::{Chooser, Classes, class_of};
use self::ghost::Ghost;
use self::guard::{Guard, Hits};
use self::table::Table;
use super::list::{At, Nodes};
use super::{Access, Order};

/// Keys that each of the guard's caches knows at most; of more, a sample.
const SAMPLE_MAX: usize = 1 << 14;

pub(super) struct Reuse {
    classes: Classes,
    table: Table,
    ghost: Ghost,
    guard: Guard,
    hasher: FixedState,
    len: usize,
    now_ms: u64,
    /// Keys that had room when one last had to go.
    capacity: usize,
    /// Fingerprints whose lowest bits are zero, this many, are followed.
    sample_bits: u32,
}

impl Reuse {
    pub fn new() -> Self {
        Self {
            classes: Classes::new(),
            table: Table::new(),
            ghost: Ghost::new(),
            guard: Guard::new(),
            hasher: FixedState::default(),
            len: 0,
            now_ms: 0,
            capacity: usize::MAX,
            sample_bits: 0,
        }
    }

    fn now(&mut self, access: Access) -> Access {
        self.now_ms = self.now_ms.max(access.at_ms);
        Access {
            at_ms: self.now_ms,
            ..access
        }
    }

    /// Learns from a use. Returns the uses before, as far as they are remembered.
    fn learn(&mut self, fingerprint: u64, access: Access, is_hit: bool) -> Option<u8> {
        if fingerprint & ((1 << self.sample_bits) - 1) != 0 {
            return None;
        }
        let capacity = (self.capacity >> self.sample_bits).max(1);
        let seen = self.ghost.used(fingerprint, access, capacity, &mut self.table);
        let uses = seen.uses.map_or(0, |uses| uses.saturating_add(1));
        let hits = Hits {
            real: is_hit,
            by_worth: self
                .guard
                .shadow_used(fingerprint, access, uses, capacity, &self.table),
            by_lru: seen.is_in_lru,
        };
        self.guard.compare(&hits, access.request, capacity);
        if self.table.is_due() {
            self.table.learn(&self.ghost.waiting(self.now_ms));
        }
        seen.uses
    }

    /// Of many keys only a sample is followed.
    fn fit_sample(&mut self) {
        while self.len >> self.sample_bits > SAMPLE_MAX {
            self.sample_bits += 1;
            let mask = (1 << self.sample_bits) - 1;
            self.ghost.retain(|fingerprint| fingerprint & mask == 0);
            self.guard.retain(|fingerprint| fingerprint & mask == 0);
        }
    }
}

impl<K: Hash> Order<K> for Reuse {
    fn insert(&mut self, nodes: &mut Nodes<K>, at: At, access: Access) {
        let access = self.now(access);
        self.len += 1;
        self.fit_sample();
        let fingerprint = self.hasher.hash_one(nodes.key(at));
        let before = self.learn(fingerprint, access, false);
        let uses = before.map_or(0, |uses| uses.saturating_add(1));
        self.classes.push(nodes, at, access, uses);
    }

    fn hit(&mut self, nodes: &mut Nodes<K>, at: At, access: Access) {
        let access = self.now(access);
        let fingerprint = self.hasher.hash_one(nodes.key(at));
        self.learn(fingerprint, access, true);
        let uses = nodes.uses(at).saturating_add(1);
        self.classes.remove(nodes, at);
        self.classes.push(nodes, at, access, uses);
    }

    fn remove(&mut self, nodes: &mut Nodes<K>, at: At) {
        self.len -= 1;
        self.classes.remove(nodes, at);
    }

    fn evict(&mut self, nodes: &mut Nodes<K>, may_go: &mut dyn FnMut(&K) -> bool) -> Option<At> {
        self.capacity = self.len.saturating_sub(1).max(1);
        let chooser = match self.guard.follows_worth() {
            true => Chooser::Worth(&self.table),
            false => Chooser::Lru,
        };
        let at = self.classes.evict(nodes, self.now_ms, chooser, may_go)?;
        self.len -= 1;
        Some(at)
    }

    fn chance(&self, access: Access) -> Option<f64> {
        self.table.chance_of(class_of(access.added, 0))
    }
}
