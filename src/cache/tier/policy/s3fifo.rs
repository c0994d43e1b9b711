//! S3-FIFO: "FIFO queues are all you need for cache eviction", SOSP '23.
//!
//! New keys go into a small queue, which has a tenth of all keys. When a key is the oldest there, it goes on to the main
//! queue if it was used at least twice. Otherwise it leaves, and its ghost stays for a while: a key that comes back while
//! its ghost is there goes to the main queue at once. In the main queue a used key goes round again, with one use less.
//!
//! The paper gives the queues fixed sizes. Here a tier says when room is needed, so the shares are of the keys that are
//! in at that moment; the ghosts are as many as the main queue's share.

use std::hash::{BuildHasher, Hash};

use foldhash::fast::RandomState;

use super::ghost::Ghost;
use super::list::{At, List, Nodes};
use super::{Access, Order};

/// The small queue has one key in ten.
const SMALL_SHARE: usize = 10;
/// The number of the main queue among the lists.
const MAIN: u8 = 1;
/// Uses are counted in two bits.
const USES_MAX: u8 = 3;
/// Uses that bring a key from the small queue to the main one.
const USES_FOR_MAIN: u8 = 2;

/// The fate of the oldest key of the main queue.
enum Main {
    Goes(At),
    /// It goes round again.
    Used,
    /// It may not go.
    Refused,
}

pub(super) struct S3Fifo {
    small: List,
    main: List,
    ghost: Ghost,
    hasher: RandomState,
}

impl S3Fifo {
    pub fn new() -> Self {
        Self {
            small: List::new(),
            main: List::new(),
            ghost: Ghost::new(),
            hasher: RandomState::default(),
        }
    }

    fn len(&self) -> usize {
        self.small.len() + self.main.len()
    }

    #[expect(clippy::cast_possible_truncation, reason = "any 32 bits will do")]
    fn fingerprint<K: Hash>(&self, key: &K) -> u32 {
        self.hasher.hash_one(key) as u32
    }

    /// Looks at the oldest of the small queue: it leaves, or goes on to the main queue.
    fn sift_small<K: Hash>(
        &mut self,
        nodes: &mut Nodes<K>,
        may_go: &mut dyn FnMut(&K) -> bool,
    ) -> Option<At> {
        let at = self.small.oldest()?;
        let goes = nodes.uses(at) < USES_FOR_MAIN && may_go(nodes.key(at));
        if goes {
            let ghosts_max = self.len() - self.len().div_ceil(SMALL_SHARE);
            self.ghost.insert(self.fingerprint(nodes.key(at)), ghosts_max);
        }
        self.small.remove(nodes, at);
        if goes {
            return Some(at);
        }
        self.push_main(nodes, at);
        None
    }

    /// Looks at the oldest of the main queue, which there must be: it leaves, or goes round again.
    fn sift_main<K>(&mut self, nodes: &mut Nodes<K>, may_go: &mut dyn FnMut(&K) -> bool) -> Main {
        let Some(at) = self.main.oldest() else {
            return Main::Used;
        };
        let uses = nodes.uses(at);
        if uses > 0 {
            nodes.set_uses(at, uses - 1);
            self.main.renew(nodes, at);
            return Main::Used;
        }
        if may_go(nodes.key(at)) {
            self.main.remove(nodes, at);
            return Main::Goes(at);
        }
        self.main.renew(nodes, at);
        Main::Refused
    }

    fn push_main<K>(&mut self, nodes: &mut Nodes<K>, at: At) {
        nodes.set_uses(at, 0);
        nodes.set_list(at, MAIN);
        self.main.push(nodes, at);
    }
}

impl<K: Hash> Order<K> for S3Fifo {
    fn insert(&mut self, nodes: &mut Nodes<K>, at: At, _access: Access) {
        let fingerprint = self.fingerprint(nodes.key(at));
        if self.ghost.take(fingerprint) {
            self.push_main(nodes, at);
        } else {
            self.small.push(nodes, at);
        }
    }

    fn hit(&mut self, nodes: &mut Nodes<K>, at: At, _access: Access) {
        let uses = nodes.uses(at);
        nodes.set_uses(at, USES_MAX.min(uses + 1));
    }

    fn remove(&mut self, nodes: &mut Nodes<K>, at: At) {
        match nodes.list(at) {
            MAIN => self.main.remove(nodes, at),
            _ => self.small.remove(nodes, at),
        }
    }

    fn evict(&mut self, nodes: &mut Nodes<K>, may_go: &mut dyn FnMut(&K) -> bool) -> Option<At> {
        let mut small_left = self.small.len();
        // A key goes round as often as its uses say before it is asked for.
        let mut main_left = (usize::from(USES_MAX) + 1) * self.len();
        let mut is_main_refused = false;
        loop {
            let has_main = main_left > 0 && self.main.len() > 0;
            let is_small_due = self.small.len() * SMALL_SHARE >= self.len();
            if small_left > 0 && (is_small_due || is_main_refused || !has_main) {
                small_left -= 1;
                is_main_refused = false;
                if let Some(at) = self.sift_small(nodes, may_go) {
                    return Some(at);
                }
            } else if has_main {
                main_left -= 1;
                match self.sift_main(nodes, may_go) {
                    Main::Goes(at) => return Some(at),
                    Main::Used => {}
                    // A main queue full of those in use is not searched through each time.
                    Main::Refused => is_main_refused = true,
                }
            } else {
                return None;
            }
        }
    }
}
