//! Each eviction policy beside a slow and obvious twin, through random histories.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::protocol::EvictionPolicy;

const POLICIES: [EvictionPolicy; 4] = [
    EvictionPolicy::Lru,
    EvictionPolicy::Fifo,
    EvictionPolicy::Sieve,
    EvictionPolicy::S3Fifo,
];

/// A slow obvious twin: plain lists from oldest to newest, of keys and their uses.
struct Twin {
    policy: EvictionPolicy,
    /// S3-FIFO's small queue.
    small: Vec<(u8, u8)>,
    /// S3-FIFO's main queue; everything for the others.
    main: Vec<(u8, u8)>,
    ghosts: Vec<u8>,
    hand: Option<u8>,
}

impl Twin {
    fn new(policy: EvictionPolicy) -> Self {
        Self {
            policy,
            small: Vec::new(),
            main: Vec::new(),
            ghosts: Vec::new(),
            hand: None,
        }
    }

    fn keys(&self) -> BTreeSet<u8> {
        self.small.iter().chain(&self.main).map(|node| node.0).collect()
    }

    fn insert(&mut self, key: u8) {
        if self.keys().contains(&key) {
            return self.hit(key);
        }
        let is_back = self.ghosts.contains(&key);
        self.ghosts.retain(|&ghost| ghost != key);
        match self.policy == EvictionPolicy::S3Fifo && !is_back {
            true => self.small.push((key, 0)),
            false => self.main.push((key, 0)),
        }
    }

    fn hit(&mut self, key: u8) {
        let uses_max = match self.policy {
            EvictionPolicy::S3Fifo => 3,
            EvictionPolicy::Sieve => 1,
            EvictionPolicy::Lru | EvictionPolicy::Fifo | EvictionPolicy::Reuse => 0,
        };
        for node in self.small.iter_mut().chain(&mut self.main) {
            if node.0 == key {
                node.1 = uses_max.min(node.1 + 1);
            }
        }
        if self.policy == EvictionPolicy::Lru
            && let Some(at) = self.main.iter().position(|node| node.0 == key)
        {
            self.main[at..].rotate_left(1);
        }
    }

    fn remove(&mut self, key: u8) {
        if self.hand == Some(key) {
            self.hand = self.newer(key);
        }
        self.small.retain(|node| node.0 != key);
        self.main.retain(|node| node.0 != key);
    }

    fn newer(&self, key: u8) -> Option<u8> {
        let mut from_key = self.main.iter().skip_while(|node| node.0 != key);
        from_key.nth(1).map(|node| node.0)
    }

    fn evict(&mut self, held: &BTreeSet<u8>) -> Option<u8> {
        if self.keys().is_subset(held) {
            // Nobody goes, but all are looked at.
            self.search(held);
            return None;
        }
        Some(self.search(held).expect("one may go"))
    }

    fn search(&mut self, held: &BTreeSet<u8>) -> Option<u8> {
        match self.policy {
            EvictionPolicy::Lru | EvictionPolicy::Fifo | EvictionPolicy::Reuse => {
                let goes = self.main.iter().position(|node| !held.contains(&node.0));
                self.main.rotate_left(goes.unwrap_or(0));
                goes.map(|_| self.main.remove(0).0)
            }
            EvictionPolicy::Sieve => (0..2 * self.main.len()).find_map(|_| self.sieve(held)),
            EvictionPolicy::S3Fifo => {
                let len = self.small.len() + self.main.len();
                let (mut small_left, mut main_left) = (self.small.len(), 4 * len);
                let mut try_small = false;
                while small_left > 0 || (main_left > 0 && !self.main.is_empty()) {
                    let has_main = main_left > 0 && !self.main.is_empty();
                    if small_left > 0 && (try_small || !has_main || self.small.len() * 10 >= len) {
                        (small_left, try_small) = (small_left - 1, false);
                        if let Some(key) = self.sift_small(held) {
                            return Some(key);
                        }
                    } else {
                        main_left -= 1;
                        let (key, uses) = self.main[0];
                        try_small = uses == 0 && held.contains(&key);
                        if let Some(key) = self.sift_main(held) {
                            return Some(key);
                        }
                    }
                }
                None
            }
        }
    }

    fn sieve(&mut self, held: &BTreeSet<u8>) -> Option<u8> {
        let key = self.hand.unwrap_or(self.main[0].0);
        self.hand = self.newer(key);
        let node = self.main.iter_mut().find(|node| node.0 == key).unwrap();
        if node.1 == 0 && !held.contains(&key) {
            self.main.retain(|node| node.0 != key);
            return Some(key);
        }
        node.1 = 1 - node.1;
        None
    }

    fn sift_small(&mut self, held: &BTreeSet<u8>) -> Option<u8> {
        let len = self.small.len() + self.main.len();
        let (key, uses) = self.small.remove(0);
        if uses > 1 || held.contains(&key) {
            self.main.push((key, 0));
            return None;
        }
        self.ghosts.push(key);
        let too_many = self.ghosts.len().saturating_sub(len - len.div_ceil(10));
        self.ghosts.drain(..too_many);
        Some(key)
    }

    fn sift_main(&mut self, held: &BTreeSet<u8>) -> Option<u8> {
        let (key, uses) = self.main.remove(0);
        if uses == 0 && !held.contains(&key) {
            return Some(key);
        }
        self.main.push((key, uses.saturating_sub(1)));
        None
    }
}

#[derive(Debug, Clone)]
enum Act {
    Insert(u8),
    Hit(u8),
    Remove(u8),
    /// Nobody may take it.
    Hold(u8),
    LetGo(u8),
    Evict,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        6 => (0_u8..40).prop_map(Act::Insert),
        8 => (0_u8..40).prop_map(Act::Hit),
        1 => (0_u8..40).prop_map(Act::Remove),
        1 => (0_u8..40).prop_map(Act::Hold),
        2 => (0_u8..40).prop_map(Act::LetGo),
        4 => Just(Act::Evict),
    ]
}

proptest! {
    #[test]
    fn every_policy_does_as_its_twin(acts in prop::collection::vec(act(), 1..400)) {
        for policy in POLICIES {
            let (mut queue, mut twin) = (Queue::new(policy), Twin::new(policy));
            let mut held = BTreeSet::new();
            for act in &acts {
                match *act {
                    Act::Insert(key) => {
                        queue.insert(key, Access::default());
                        twin.insert(key);
                    }
                    Act::Hit(key) => {
                        queue.hit(&key, Access::default());
                        twin.hit(key);
                    }
                    Act::Remove(key) => {
                        prop_assert_eq!(queue.remove(&key), twin.keys().contains(&key));
                        twin.remove(key);
                    }
                    Act::Hold(key) => drop(held.insert(key)),
                    Act::LetGo(key) => drop(held.remove(&key)),
                    Act::Evict => {
                        prop_assert_eq!(queue.evict(|key| !held.contains(key)), twin.evict(&held), "{:?}", policy);
                    }
                }
                prop_assert_eq!(queue.len(), twin.keys().len());
            }
            // Each key is in once, and all of them come out.
            let mut rest: Vec<u8> = std::iter::from_fn(|| queue.evict(|_| true)).collect();
            rest.sort_unstable();
            prop_assert!(rest.iter().eq(&twin.keys()), "{policy:?}: {rest:?}");
            prop_assert!(queue.is_empty() && queue.nodes_in_use() == 0);
        }
    }
}

/// A history of prompts: each has a document's chunks up to some depth.
fn prompts() -> impl Strategy<Value = Vec<(u8, u8, u16)>> {
    prop::collection::vec((0_u8..12, 1_u8..9, 0_u16..3000), 1..300)
}

/// Replays it with room for so many keys. Returns what left, in order.
fn gone(policy: EvictionPolicy, history: &[(u8, u8, u16)], most: usize, held: Option<u8>) -> Vec<u32> {
    let (mut queue, mut gone, mut at_ms) = (Queue::new(policy), Vec::new(), 0);
    for (number, (document, depth, later_ms)) in history.iter().enumerate() {
        at_ms += 20_000 + u64::from(*later_ms);
        let request = u32::try_from(number).unwrap() + 1;
        for chunk in 0..u32::from(*depth) {
            let access = Access {
                at_ms,
                request,
                added: u32::from(*depth),
            };
            queue.insert(u32::from(*document) * 100 + chunk, access);
            while queue.len() > most {
                match queue.evict(|key| held != Some(u8::try_from(key / 100).unwrap())) {
                    Some(key) => gone.push(key),
                    None => break,
                }
            }
        }
    }
    gone
}

/// The plainest LRU with the last chunks of a prompt first.
fn gone_from_twin(history: &[(u8, u8, u16)], most: usize) -> Vec<u32> {
    let (mut here, mut gone) = (Vec::<(usize, u32, u32)>::new(), Vec::new());
    for (number, (document, depth, ..)) in history.iter().enumerate() {
        for chunk in 0..u32::from(*depth) {
            let key = u32::from(*document) * 100 + chunk;
            here.retain(|node| node.2 != key);
            here.push((number, u32::MAX - chunk, key));
            here.sort_unstable();
            if here.len() > most {
                gone.push(here.remove(0).2);
            }
        }
    }
    gone
}

proptest! {
    #[test]
    fn the_last_chunks_of_the_oldest_prompt_leave_first(history in prompts(), most in 1_usize..60) {
        prop_assert_eq!(gone(EvictionPolicy::Lru, &history, most, None), gone_from_twin(&history, most));
    }

    #[test]
    fn reuse_gives_the_same_order_each_time_and_spares_what_is_held(history in prompts(), most in 1_usize..60) {
        let first = gone(EvictionPolicy::Reuse, &history, most, Some(3));
        prop_assert!(first.iter().all(|key| key / 100 != 3));
        prop_assert_eq!(gone(EvictionPolicy::Reuse, &history, most, Some(3)), first);
    }

    #[test]
    fn reuse_has_each_key_once_and_lets_all_go(acts in prop::collection::vec(act(), 1..400)) {
        let (mut queue, mut here, mut held) = (Queue::new(EvictionPolicy::Reuse), BTreeSet::new(), BTreeSet::new());
        for (number, act) in acts.iter().enumerate() {
            let access = Access { at_ms: 100 * number as u64, request: u32::try_from(number / 7).unwrap(), added: 3 };
            match *act {
                Act::Insert(key) => {
                    queue.insert(key, access);
                    here.insert(key);
                }
                Act::Hit(key) => queue.hit(&key, access),
                Act::Remove(key) => prop_assert_eq!(queue.remove(&key), here.remove(&key)),
                Act::Hold(key) => drop(held.insert(key)),
                Act::LetGo(key) => drop(held.remove(&key)),
                Act::Evict => match queue.evict(|key| !held.contains(key)) {
                    Some(key) => prop_assert!(here.remove(&key) && !held.contains(&key)),
                    None => prop_assert!(here.is_subset(&held)),
                },
            }
            prop_assert_eq!(queue.len(), here.len());
        }
        let mut rest: Vec<u8> = std::iter::from_fn(|| queue.evict(|_| true)).collect();
        rest.sort_unstable();
        prop_assert!(rest.iter().eq(&here), "{rest:?}");
        prop_assert!(queue.is_empty() && queue.nodes_in_use() == 0);
    }
}

/// Keeps at most `most` keys.
fn insert_within(queue: &mut Queue<u32>, key: u32, most: usize) {
    queue.insert(key, Access::default());
    while queue.len() > most {
        queue.evict(|_| true);
    }
}

/// How many of a hot set of 50 are still there after a scan of 2000 keys that are used once, where 100 have room.
fn hot_after_scan(policy: EvictionPolicy) -> usize {
    let mut queue = Queue::new(policy);
    // The hot ones are used again and again, among others.
    for round in 0..6 {
        for hot in 0..50 {
            insert_within(&mut queue, hot, 100);
            insert_within(&mut queue, 10_000 + 50 * round + hot, 100);
        }
    }
    (0..2000).for_each(|i| insert_within(&mut queue, 20_000 + i, 100));
    (0..50).filter(|hot| queue.remove(hot)).count()
}

#[test]
fn a_scan_flushes_lru_but_neither_sieve_nor_s3fifo() {
    assert_eq!(hot_after_scan(EvictionPolicy::Lru), 0);
    assert_eq!(hot_after_scan(EvictionPolicy::Fifo), 0);
    assert_eq!(hot_after_scan(EvictionPolicy::Sieve), 50);
    assert_eq!(hot_after_scan(EvictionPolicy::S3Fifo), 50);
}

#[test]
fn s3fifo_keeps_a_key_that_comes_back_soon() {
    let mut queue = Queue::new(EvictionPolicy::S3Fifo);
    (0..100).for_each(|key| queue.insert(key, Access::default()));
    assert_eq!(queue.evict(|_| true), Some(0));
    queue.insert(0, Access::default());
    let gone: Vec<u32> = (0..99).filter_map(|_| queue.evict(|_| true)).collect();
    assert_eq!(gone.len(), 99);
    assert!(!gone[..80].contains(&0), "its ghost told that it is wanted");
}

#[test]
fn those_in_use_are_passed_over_and_not_asked_for_again() {
    for policy in POLICIES.into_iter().chain([EvictionPolicy::Reuse]) {
        let mut queue = Queue::new(policy);
        (0..1000_u32).for_each(|key| queue.insert(key, Access::default()));
        let mut asked = 0;
        let mut evict = |queue: &mut Queue<u32>| {
            queue.evict(|key| {
                asked += 1;
                *key >= 500
            })
        };
        for _ in 0..500 {
            assert!(evict(&mut queue).is_some_and(|key| key >= 500), "{policy:?}");
        }
        assert_eq!(evict(&mut queue), None);
        assert_eq!(queue.len(), 500);
        // Each key that went; those that may not once or twice meanwhile, and at the end once more for each round.
        assert!(asked <= 4 * 1000, "{policy:?} asked {asked} times");
    }
}
