//! The keys by class, each class a list by time of use; and the choice of the one that leaves.

use super::table::Table;
use crate::cache::tier::policy::Access;
use crate::cache::tier::policy::list::{At, Nodes};
use crate::cache::tier::policy::recency::Recency;

/// Prompts by the chunks that they added: 0 or 1, 2, 4, ... 64 and more.
const SIZES: usize = 7;
/// Keys by their uses: 0, 1, 2, 3 and more.
pub const USES_MAX: u8 = 3;
pub const CLASSES: usize = SIZES * (USES_MAX as usize + 1);
/// The class of keys that could not go when it was their turn. They are in use, so they count as worth the most.
pub const HELD: usize = CLASSES;

/// The way of choosing.
#[derive(Clone, Copy)]
pub enum Chooser<'a> {
    Lru,
    Worth(&'a Table),
}

pub struct Classes(Vec<Recency>);

/// The number of a class; those of the same uses are next to each other.
pub fn class_of(added: u32, uses: u8) -> usize {
    let size = (added.max(1).ilog2() as usize).min(SIZES - 1);
    usize::from(uses.min(USES_MAX)) * SIZES + size
}

/// The classes with the same uses as this one.
pub fn same_uses(class: usize) -> std::ops::Range<usize> {
    let first = class - class % SIZES;
    first..first + SIZES
}

impl Classes {
    pub fn new() -> Self {
        Self((0..=CLASSES).map(|_| Recency::new()).collect())
    }

    /// Puts in a node that is in no list.
    pub fn push<K>(&mut self, nodes: &mut Nodes<K>, at: At, access: Access, uses: u8) {
        nodes.set_uses(at, uses.min(USES_MAX));
        self.push_to(nodes, at, access, class_of(access.added, uses));
    }

    #[expect(clippy::cast_possible_truncation, reason = "there are few classes")]
    fn push_to<K>(&mut self, nodes: &mut Nodes<K>, at: At, access: Access, class: usize) {
        nodes.set_list(at, class as u8);
        self.0[class].push(nodes, at, access);
    }

    pub fn remove<K>(&mut self, nodes: &mut Nodes<K>, at: At) {
        self.0[usize::from(nodes.list(at))].remove(nodes, at);
    }

    /// Removes the next that may go. One that may not goes to the class of those in use; there each is asked for once.
    pub fn evict<K>(
        &mut self,
        nodes: &mut Nodes<K>,
        now_ms: u64,
        chooser: Chooser<'_>,
        may_go: &mut dyn FnMut(&K) -> bool,
    ) -> Option<At> {
        let mut held_left = self.0[HELD].len();
        loop {
            let at = self.least(nodes, now_ms, chooser, held_left > 0)?;
            if usize::from(nodes.list(at)) == HELD {
                held_left -= 1;
            }
            self.remove(nodes, at);
            if may_go(nodes.key(at)) {
                return Some(at);
            }
            let access = Access {
                at_ms: now_ms,
                ..Access::default()
            };
            self.push_to(nodes, at, access, HELD);
        }
    }

    fn least<K>(&self, nodes: &Nodes<K>, now_ms: u64, chooser: Chooser<'_>, with_held: bool) -> Option<At> {
        let classes = if with_held { HELD + 1 } else { HELD };
        let lists = self.0[..classes]
            .iter()
            .enumerate()
            .filter(|(_, list)| list.len() > 0);
        match chooser {
            Chooser::Lru => {
                let oldest = lists.filter_map(|(_, list)| list.oldest());
                // Of one prompt's chunks those of fewer uses are further down, and their lists come first.
                oldest.min_by_key(|&at| (nodes.used_ms(at), nodes.request(at)))
            }
            Chooser::Worth(table) => {
                let mut least: Option<(f32, At)> = None;
                for (class, list) in lists {
                    // One in use is asked for again when all others of its class were.
                    let newest = list.newest_end().filter(|_| class != HELD);
                    for at in [list.oldest(), newest].into_iter().flatten() {
                        let worth = table.worth(class, now_ms.saturating_sub(nodes.used_ms(at)));
                        if least.is_none_or(|(than, _)| worth < than) {
                            least = Some((worth, at));
                        }
                    }
                }
                least.map(|(_, at)| at)
            }
        }
    }
}
