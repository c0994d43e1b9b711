//! Fingerprints of the keys that were used lately, eight times as many as have room. It is a list by time of use, so its
//! newest part is what LRU would have kept.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use super::classes::{USES_MAX, class_of};
use super::table::{Table, Waits, bin, no_waits};
use crate::cache::tier::policy::Access;
use crate::cache::tier::policy::list::{At, Nodes};
use crate::cache::tier::policy::recency::Recency;

/// Keys that are remembered, for each that has room.
const TIMES: usize = 8;
/// Keys that are looked at to see for how long keys have waited; of more, some.
const LOOKED_AT_MAX: usize = 1 << 14;
/// The bit of a node's list that says that LRU would have it.
const IN_LRU: u8 = 0x80;

pub struct Ghost {
    places: HashMap<u64, At, FixedState>,
    nodes: Nodes<u64>,
    /// The newest, as many as have room.
    lru: Recency,
    rest: Recency,
    ended: usize,
}

/// The answer to a use.
pub struct Seen {
    /// Uses before; none if the key is not remembered.
    pub uses: Option<u8>,
    pub is_in_lru: bool,
}

impl Ghost {
    pub fn new() -> Self {
        Self {
            places: HashMap::default(),
            nodes: Nodes::new(),
            lru: Recency::new(),
            rest: Recency::new(),
            ended: 0,
        }
    }

    pub fn used(&mut self, fingerprint: u64, access: Access, capacity: usize, table: &mut Table) -> Seen {
        let known = self.places.get(&fingerprint).copied();
        let mut seen = Seen {
            uses: None,
            is_in_lru: false,
        };
        let at = if let Some(at) = known {
            let (class, age_ms) = self.wait(at, access.at_ms);
            table.reused(class, age_ms);
            seen.uses = Some(self.nodes.uses(at));
            seen.is_in_lru = self.nodes.list(at) & IN_LRU != 0;
            self.take_out(at);
            at
        } else {
            let at = self.nodes.add(fingerprint);
            self.places.insert(fingerprint, at);
            at
        };
        let uses = seen.uses.map_or(0, |uses| USES_MAX.min(uses + 1));
        self.nodes.set_uses(at, uses);
        #[expect(clippy::cast_possible_truncation, reason = "there are few classes")]
        let class = class_of(access.added, uses) as u8;
        self.nodes.set_list(at, class | IN_LRU);
        self.lru.push(&mut self.nodes, at, access);
        self.fit(capacity, access.at_ms, table);
        seen
    }

    /// Forgets what is too much.
    fn fit(&mut self, capacity: usize, now_ms: u64, table: &mut Table) {
        while self.lru.len() > capacity
            && let Some(at) = self.lru.oldest()
        {
            self.lru.remove(&mut self.nodes, at);
            self.nodes.set_list(at, self.nodes.list(at) & !IN_LRU);
            let access = Access {
                at_ms: self.nodes.used_ms(at),
                ..Access::default()
            };
            self.rest.push(&mut self.nodes, at, access);
        }
        while self.rest.len() > capacity.saturating_mul(TIMES - 1)
            && let Some(at) = self.rest.oldest()
        {
            let (class, age_ms) = self.wait(at, now_ms);
            table.ended(class, age_ms);
            self.forget(at);
            self.ended += 1;
            if self.ended >= TIMES * TIMES * capacity {
                self.ended = 0;
                table.fade();
            }
        }
    }

    /// Forgets the fingerprints that are not followed any more.
    pub fn retain(&mut self, is_followed: impl Fn(u64) -> bool) {
        let mut gone: Vec<At> = Vec::new();
        gone.extend(
            self.places
                .iter()
                .filter(|(key, _)| !is_followed(**key))
                .map(|(_, &at)| at),
        );
        gone.into_iter().for_each(|at| self.forget(at));
    }

    /// The keys that wait for their next use, by class and age.
    pub fn waiting(&self, now_ms: u64) -> Waits {
        let mut waits = no_waits();
        let step = self.nodes.places().div_ceil(LOOKED_AT_MAX).max(1);
        for at in (0..self.nodes.places()).step_by(step) {
            #[expect(clippy::cast_possible_truncation, reason = "it is a place")]
            let at = at as At;
            if self.places.get(self.nodes.key(at)) == Some(&at) {
                let (class, age_ms) = self.wait(at, now_ms);
                waits[class][bin(age_ms)] += step as f64;
            }
        }
        waits
    }

    /// The class of a key, and for how long it has waited.
    fn wait(&self, at: At, now_ms: u64) -> (usize, u64) {
        let class = usize::from(self.nodes.list(at) & !IN_LRU);
        (class, now_ms.saturating_sub(self.nodes.used_ms(at)))
    }

    fn take_out(&mut self, at: At) {
        match self.nodes.list(at) & IN_LRU != 0 {
            true => self.lru.remove(&mut self.nodes, at),
            false => self.rest.remove(&mut self.nodes, at),
        }
    }

    fn forget(&mut self, at: At) {
        self.take_out(at);
        let fingerprint = self.nodes.free(at);
        self.places.remove(&fingerprint);
    }
}
