//! Whether the worth of keys is a better guide than LRU here, by what each would have hit.
//!
//! The real cache begins as LRU. It follows the worth when a cache of fingerprints that does so has had more hits, by
//! more than chance explains, and goes back when that lead shrinks again. A change that brought a loss makes the next
//! one harder. So where LRU is better, what is lost to it is about what was won before.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use super::classes::{Chooser, Classes};
use super::table::Table;
use crate::cache::tier::policy::Access;
use crate::cache::tier::policy::list::{At, NO_REQUEST, Nodes};

/// The lead counts if it is this many standard deviations.
const DEVIATIONS: f64 = 2.0;
/// For so many times the keys that have room, uses are remembered.
const TURNS: f64 = 8.0;
/// A change throws away some of what is there, so the lead must be worth that: this share of the keys that have room.
const STAKE: f64 = 0.1;
/// Uses before the first change, for each key that has room.
const WAIT: f64 = 2.0;
/// The share of the largest lead below which it counts as gone.
const LEAST_LEFT: f64 = 0.5;
/// The most that a loss makes the next change harder.
const CAUTION_MAX: f64 = 64.0;

pub struct Guard {
    /// What is there if the worth is followed all the time.
    shadow: Shadow,
    follows_worth: bool,
    /// Hits by the worth less hits by LRU, the latest counting most.
    lead: f64,
    /// The sum of the squares of what it is made of, by prompt: the chunks of a prompt are hit or missed together.
    squares: f64,
    /// Of the prompt that uses keys now.
    request: u32,
    of_request: f64,
    /// Uses since the start, while a change must wait.
    waited: f64,
    /// The largest lead since the worth was followed.
    lead_max: f64,
    /// Hits of the real cache less those by LRU: since the start, and since the worth was followed.
    won: f64,
    won_since: f64,
    won_max: f64,
    caution: f64,
}

/// Whether a use was a hit: in the real cache, and in those that follow the worth and LRU.
pub struct Hits {
    pub real: bool,
    pub by_worth: bool,
    pub by_lru: bool,
}

struct Shadow {
    places: HashMap<u64, At, FixedState>,
    nodes: Nodes<u64>,
    classes: Classes,
}

impl Guard {
    pub fn new() -> Self {
        Self {
            shadow: Shadow {
                places: HashMap::default(),
                nodes: Nodes::new(),
                classes: Classes::new(),
            },
            follows_worth: false,
            lead: 0.0,
            squares: 0.0,
            request: NO_REQUEST,
            of_request: 0.0,
            waited: 0.0,
            lead_max: 0.0,
            won: 0.0,
            won_since: 0.0,
            won_max: 0.0,
            caution: 1.0,
        }
    }

    pub fn follows_worth(&self) -> bool {
        self.follows_worth
    }

    /// A use, as the shadow sees it. Returns whether it has the key. `uses`: with this one, if it has not.
    pub fn shadow_used(
        &mut self,
        fingerprint: u64,
        access: Access,
        uses: u8,
        capacity: usize,
        table: &Table,
    ) -> bool {
        let Shadow {
            places,
            nodes,
            classes,
        } = &mut self.shadow;
        let known = places.get(&fingerprint).copied();
        if let Some(at) = known {
            let uses = nodes.uses(at).saturating_add(1);
            classes.remove(nodes, at);
            classes.push(nodes, at, access, uses);
        } else {
            let at = nodes.add(fingerprint);
            places.insert(fingerprint, at);
            classes.push(nodes, at, access, uses);
        }
        while places.len() > capacity
            && let Some(at) = classes.evict(nodes, access.at_ms, Chooser::Worth(table), &mut |_| true)
        {
            places.remove(&nodes.free(at));
        }
        known.is_some()
    }

    /// Compares what was hit, and decides.
    pub fn compare(&mut self, hits: &Hits, request: u32, capacity: usize) {
        let capacity = capacity as f64;
        let of = |hit: bool| f64::from(u8::from(hit));
        let ahead = of(hits.by_worth) - of(hits.by_lru);
        if request != self.request || request == NO_REQUEST {
            self.squares += self.of_request * self.of_request;
            (self.request, self.of_request) = (request, 0.0);
        }
        self.of_request += ahead;
        let keeps = 1.0 - 1.0 / (TURNS * capacity).clamp(1.0, 1e6);
        self.lead = self.lead * keeps + ahead;
        self.squares *= keeps;
        let won = of(hits.real) - of(hits.by_lru);
        self.won += won;
        let margin = DEVIATIONS * self.squares.max(1.0).sqrt();
        if self.follows_worth {
            self.won_since += won;
            self.won_max = self.won_max.max(self.won_since);
            self.lead_max = (self.lead_max * keeps).max(self.lead);
            let has_lost = self.won_since < self.won_max - margin.max(STAKE * capacity);
            if self.lead < self.lead_max * LEAST_LEFT || has_lost {
                self.go_back();
            }
        } else if self.waited < WAIT * capacity {
            self.waited += 1.0;
        } else if self.lead > (self.caution * margin).max(STAKE * capacity) {
            self.follows_worth = true;
            self.lead_max = self.lead;
            (self.won_since, self.won_max) = (0.0, 0.0);
        }
    }

    fn go_back(&mut self) {
        self.follows_worth = false;
        let is_worse = self.won_since < 0.0 || self.won < 0.0;
        self.caution = if is_worse {
            CAUTION_MAX.min(2.0 * self.caution)
        } else {
            1.0
        };
        self.lead = 0.0;
    }

    /// Forgets the fingerprints that are not followed any more.
    pub fn retain(&mut self, is_followed: impl Fn(u64) -> bool) {
        let Shadow {
            places,
            nodes,
            classes,
        } = &mut self.shadow;
        places.retain(|fingerprint, at| {
            let stays = is_followed(*fingerprint);
            if !stays {
                classes.remove(nodes, *at);
                nodes.free(*at);
            }
            stays
        });
    }
}
