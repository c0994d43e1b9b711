//! The chunks of a bucket as trees, and the order in which they may go. Pure: no I/O.
//!
//! A node is one hash of a model with its objects in all of the model's spaces: a window's or a state's chunk goes with the
//! full one, never alone. A node was last *used* when the latest of its own objects was stored or refreshed, or of any of
//! its descendants: a use of a chunk needs all before it. So no node is older than its descendants, and in the order
//! (last used, deepest first) each node comes after all of them. Any start of that order may be removed, and whole
//! prefixes are left. That is why a removal may end anywhere.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet, VecDeque};
use std::ops::Range;

use crate::format::ChunkHash;

/// Nodes that are looked through for a batch and left for the next one.
const LATER_MAX: usize = 1000;

/// A chunk's object, as it was listed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Object {
    /// Of the spaces that share the hashes of a prompt's chunks: a model's.
    pub group: u32,
    pub hash: ChunkHash,
    /// Which of the spaces that were listed.
    pub space: u32,
    /// Its kind of KV is not full, so it goes before the full ones of its node.
    pub is_extra: bool,
    pub bytes: u64,
    /// Seconds since 1970.
    pub modified: i64,
}

#[derive(Debug, Clone)]
pub struct Node {
    pub objects: Range<usize>,
    pub parent: Option<usize>,
    /// When it or a descendant was last stored or refreshed, seconds since 1970.
    pub used: i64,
    /// Of its ancestors that are there.
    pub depth: u32,
    pub bytes: u64,
}

/// See the [module](self).
#[derive(Debug, Clone, Default)]
pub struct Tree {
    pub objects: Vec<Object>,
    pub nodes: Vec<Node>,
}

/// The limits that decide what goes. Without any of them everything goes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Bounds {
    /// Bytes that may stay.
    pub bytes: Option<u64>,
    /// Bytes of each tenant that may stay.
    pub tenant_bytes: Option<u64>,
    /// What was last used before this goes; seconds since 1970.
    pub unused_since: Option<i64>,
}

impl Bounds {
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }
}

impl Tree {
    /// Nodes without parents.
    pub fn new(mut objects: Vec<Object>) -> Self {
        objects.sort_unstable_by_key(|object| (object.group, object.hash, !object.is_extra, object.space));
        let mut nodes: Vec<Node> = Vec::new();
        for (i, object) in objects.iter().enumerate() {
            match nodes.last_mut() {
                Some(last) if id(&objects[last.objects.start]) == id(object) => {
                    last.objects.end = i + 1;
                    last.used = last.used.max(object.modified);
                    last.bytes += object.bytes;
                }
                _ => nodes.push(Node {
                    objects: i..i + 1,
                    parent: None,
                    used: object.modified,
                    depth: 0,
                    bytes: object.bytes,
                }),
            }
        }
        Self { objects, nodes }
    }

    #[cfg(test)]
    pub fn hash(&self, node: usize) -> ChunkHash {
        self.objects[self.nodes[node].objects.start].hash
    }

    pub fn group(&self, node: usize) -> u32 {
        self.objects[self.nodes[node].objects.start].group
    }

    pub fn find(&self, group: u32, chunk: &ChunkHash) -> Option<usize> {
        let id_of = |node: &Node| id(&self.objects[node.objects.start]);
        self.nodes.binary_search_by_key(&(group, *chunk), id_of).ok()
    }

    /// Finds each node's parent among the nodes, and with it when each was last used.
    pub fn link(&mut self, parent_of: impl Fn(&Self, usize) -> Option<ChunkHash>) {
        for node in 0..self.nodes.len() {
            let parent = parent_of(self, node);
            let parent = parent.and_then(|parent| self.find(self.group(node), &parent));
            self.nodes[node].parent = parent.filter(|&parent| parent != node);
        }
        self.set_depths();
        let mut deepest: Vec<usize> = (0..self.nodes.len()).collect();
        deepest.sort_unstable_by_key(|&node| Reverse(self.nodes[node].depth));
        for node in deepest {
            if let Some(parent) = self.nodes[node].parent {
                self.nodes[parent].used = self.nodes[parent].used.max(self.nodes[node].used);
            }
        }
    }

    /// A circle, which only forged headers can make, is cut.
    fn set_depths(&mut self) {
        const UNKNOWN: u32 = u32::MAX;
        const UNDER_WAY: u32 = u32::MAX - 1;
        self.nodes.iter_mut().for_each(|node| node.depth = UNKNOWN);
        let mut way = Vec::new();
        for node in 0..self.nodes.len() {
            let mut at = node;
            let mut depth = loop {
                match self.nodes[at].depth {
                    UNKNOWN => {}
                    UNDER_WAY => {
                        if let Some(&last) = way.last() {
                            let last: &mut Node = &mut self.nodes[last];
                            last.parent = None;
                        }
                        break 0;
                    }
                    known => break known + 1,
                }
                self.nodes[at].depth = UNDER_WAY;
                way.push(at);
                match self.nodes[at].parent {
                    Some(parent) => at = parent,
                    None => break 0,
                }
            };
            while let Some(on_way) = way.pop() {
                self.nodes[on_way].depth = depth;
                depth += 1;
            }
        }
    }

    /// The nodes in the order in which they may go. Two that see the same bucket get the same order.
    pub fn order(&self) -> Vec<usize> {
        let mut order: Vec<usize> = (0..self.nodes.len()).collect();
        // Nodes are in order of group and hash.
        order.sort_unstable_by_key(|&node| (self.nodes[node].used, Reverse(self.nodes[node].depth), node));
        order
    }

    /// The nodes that go, in their order. `tenant_of` a group; what was stored or refreshed after `began`, and all that it
    /// needs, stays.
    pub fn choose(&self, bounds: Bounds, began: i64, tenant_of: impl Fn(u32) -> Option<u32>) -> Vec<usize> {
        let mut order = self.order();
        order.retain(|&node| self.nodes[node].used <= began);
        if bounds.is_none() {
            return order;
        }
        let mut goes = vec![false; self.nodes.len()];
        if let Some(since) = bounds.unused_since {
            order
                .iter()
                .for_each(|&node| goes[node] = self.nodes[node].used < since);
        }
        let mut tenants: HashMap<Option<u32>, u64> = HashMap::new();
        let mut total = 0;
        for node in (0..self.nodes.len()).filter(|&node| !goes[node]) {
            total += self.nodes[node].bytes;
            *tenants.entry(tenant_of(self.group(node))).or_default() += self.nodes[node].bytes;
        }
        if let Some(most) = bounds.tenant_bytes {
            for &node in &order {
                let tenant = tenant_of(self.group(node)).and_then(|tenant| tenants.get_mut(&Some(tenant)));
                if let Some(of) = tenant.filter(|of| **of > most && !goes[node]) {
                    goes[node] = true;
                    *of -= self.nodes[node].bytes;
                    total -= self.nodes[node].bytes;
                }
            }
        }
        if let Some(most) = bounds.bytes {
            for &node in &order {
                if total > most && !goes[node] {
                    goes[node] = true;
                    total -= self.nodes[node].bytes;
                }
            }
        }
        order.retain(|&node| goes[node]);
        order
    }

    /// The nodes that are marked, and all that follow one, in the order in which they may go. What was stored or refreshed
    /// after `began` stays, and what it needs, but for marked ones.
    pub fn choose_marked(&self, marked: &[bool], began: i64) -> Vec<usize> {
        let mut first: Vec<usize> = (0..self.nodes.len()).collect();
        first.sort_unstable_by_key(|&node| self.nodes[node].depth);
        let mut goes = marked.to_vec();
        for node in first {
            goes[node] |= self.nodes[node].parent.is_some_and(|parent| goes[parent]);
        }
        let own = |node: usize| {
            let times = self.objects[self.nodes[node].objects.clone()].iter();
            times.map(|object| object.modified).max().unwrap_or(i64::MAX)
        };
        let used = |node: usize| {
            if marked[node] {
                own(node)
            } else {
                self.nodes[node].used
            }
        };
        let mut order = self.order();
        order.retain(|&node| goes[node] && used(node) <= began);
        order
    }

    /// Takes nodes for the next batch, of so many objects or a few more: the first ones, without any that another one of
    /// the batch needs. Those stay in front.
    pub fn batch(&self, nodes: &mut VecDeque<usize>, objects_max: usize) -> Vec<usize> {
        let (mut batch, mut later, mut needed, mut objects) = (Vec::new(), Vec::new(), HashSet::new(), 0);
        while objects < objects_max
            && later.len() < LATER_MAX
            && let Some(node) = nodes.pop_front()
        {
            if needed.contains(&node) {
                later.push(node);
            } else {
                objects += self.nodes[node].objects.len();
                batch.push(node);
            }
            needed.extend(self.nodes[node].parent);
        }
        later.into_iter().rev().for_each(|node| nodes.push_front(node));
        batch
    }

    /// The node and all of its ancestors.
    pub fn with_ancestors(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        std::iter::successors(Some(node), |&node| self.nodes[node].parent)
    }
}

fn id(object: &Object) -> (u32, ChunkHash) {
    (object.group, object.hash)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hash(number: usize) -> ChunkHash {
        let mut hash = [0; 32];
        // Not in the order of the tree.
        hash[..8].copy_from_slice(&(number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_le_bytes());
        ChunkHash(hash)
    }

    /// A node for each: its parent, when it was stored, and its bytes.
    fn tree(nodes: &[(Option<usize>, i64, u64)]) -> Tree {
        let object = |(number, &(_, modified, bytes)): (usize, &(Option<usize>, i64, u64))| Object {
            group: 0,
            hash: hash(number),
            space: 0,
            is_extra: false,
            bytes,
            modified,
        };
        let mut tree = Tree::new(nodes.iter().enumerate().map(object).collect());
        let parents: HashMap<ChunkHash, ChunkHash> = nodes
            .iter()
            .enumerate()
            .filter_map(|(number, (parent, ..))| Some((hash(number), hash((*parent)?))))
            .collect();
        tree.link(|tree, node| parents.get(&tree.hash(node)).copied());
        tree
    }

    fn numbers(tree: &Tree, nodes: &[usize]) -> Vec<usize> {
        let number = |&node: &usize| (0..1000).find(|&number| hash(number) == tree.hash(node)).unwrap();
        nodes.iter().map(number).collect()
    }

    #[test]
    fn the_oldest_leaf_goes_first_and_a_head_counts_as_used_with_its_tails() {
        // 0 - 1 - 2 is an old prompt, 0 - 3 one of today; 4 is alone.
        let nodes = [
            (None, 10, 1),
            (Some(0), 11, 1),
            (Some(1), 12, 1),
            (Some(0), 50, 1),
            (None, 20, 1),
        ];
        let tree = tree(&nodes);
        assert_eq!(numbers(&tree, &tree.order()), [2, 1, 4, 3, 0]);
        let chosen = |bounds| numbers(&tree, &tree.choose(bounds, 100, |_| None));
        let unused = Bounds {
            unused_since: Some(20),
            ..Bounds::default()
        };
        assert_eq!(chosen(unused), [2, 1]);
        assert_eq!(
            chosen(Bounds {
                bytes: Some(2),
                ..Bounds::default()
            }),
            [2, 1, 4]
        );
        assert_eq!(chosen(Bounds::default()), [2, 1, 4, 3, 0]);
        // 3 was stored after it began: that keeps 0, too.
        assert_eq!(
            numbers(&tree, &tree.choose(Bounds::default(), 49, |_| None)),
            [2, 1, 4]
        );
    }

    #[test]
    fn only_a_tenant_above_its_limit_gives() {
        let object = |number: usize, group, bytes| Object {
            group,
            hash: hash(number),
            space: group,
            is_extra: false,
            bytes,
            modified: i64::try_from(number).unwrap(),
        };
        let tree = Tree::new(vec![
            object(0, 0, 60),
            object(1, 1, 50),
            object(2, 1, 50),
            object(3, 2, 500),
        ]);
        let bounds = Bounds {
            tenant_bytes: Some(60),
            ..Bounds::default()
        };
        // The third group's tenant is not known.
        let chosen = tree.choose(bounds, 100, |group| (group < 2).then_some(group));
        assert_eq!(numbers(&tree, &chosen), [1]);
    }

    #[test]
    fn what_is_marked_goes_with_all_that_follows_it() {
        // 0 - 1 - 2 - 3 is a prompt, 0 - 4 another one; 2 is marked.
        let at = |last: i64, middle: i64| {
            let nodes = [
                (None, 10, 1),
                (Some(0), 11, 1),
                (Some(1), middle, 1),
                (Some(2), last, 1),
                (Some(0), 5, 1),
            ];
            let tree = tree(&nodes);
            let marked: Vec<bool> = (0..5).map(|node| tree.hash(node) == hash(2)).collect();
            numbers(&tree, &tree.choose_marked(&marked, 20))
        };
        assert_eq!(at(13, 12), [3, 2]);
        // A chunk that is stored meanwhile does not keep what is marked, and is itself kept.
        assert_eq!(at(21, 12), [2]);
        assert_eq!(at(13, 21), [3]);
    }

    #[test]
    fn kinds_of_one_model_go_together_the_full_one_last() {
        let object = |space, is_extra, modified| Object {
            group: 7,
            hash: hash(1),
            space,
            is_extra,
            bytes: 10,
            modified,
        };
        let tree = Tree::new(vec![object(0, false, 5), object(1, true, 9)]);
        assert_eq!(
            (tree.nodes.len(), tree.nodes[0].used, tree.nodes[0].bytes),
            (1, 9, 20)
        );
        assert!(tree.objects[0].is_extra && !tree.objects[1].is_extra);
    }

    #[test]
    fn forged_circles_are_cut() {
        let tree = tree(&[(Some(1), 1, 1), (Some(0), 2, 1), (Some(1), 3, 1), (Some(3), 4, 1)]);
        assert_eq!(tree.order().len(), 4);
        assert!(tree.nodes.iter().all(|node| node.depth < 4), "{:?}", tree.nodes);
    }

    proptest! {
        /// Wherever a removal ends, no chunk that is left lacks an ancestor that was there before.
        #[test]
        fn any_start_of_the_order_leaves_whole_prefixes(
            nodes in prop::collection::vec((any::<prop::sample::Index>(), 0_i64..20, 1_u64..5), 1..60),
            (most, since, began) in (prop::option::of(0_u64..100), prop::option::of(0_i64..25), 0_i64..25),
            batch in 1_usize..9,
        ) {
            // A parent comes before; the first has none, and some others.
            let nodes: Vec<_> = nodes.iter().enumerate().map(|(number, (parent, modified, bytes))| {
                let parent = parent.index(number + 1);
                ((parent != number).then_some(parent), *modified, *bytes)
            }).collect();
            let tree = tree(&nodes);
            let bounds = Bounds { bytes: most, tenant_bytes: None, unused_since: since };
            let mut left = vec![true; nodes.len()];
            let mut chosen: VecDeque<usize> = tree.choose(bounds, began, |_| None).into();
            while !chosen.is_empty() {
                // The other way round, as a server might.
                for number in numbers(&tree, &tree.batch(&mut chosen, batch)).into_iter().rev() {
                    prop_assert!(nodes[number].1 <= began, "it was stored later");
                    left[number] = false;
                    for (child, (parent, ..)) in nodes.iter().enumerate() {
                        prop_assert!(!left[child] || parent.is_none_or(|parent| left[parent]), "{child} lacks its parent");
                    }
                }
            }
            let bytes = |which: &dyn Fn(usize) -> bool| -> u64 {
                nodes.iter().enumerate().filter(|(number, _)| which(*number)).map(|(_, node)| node.2).sum()
            };
            let least = nodes.iter().map(|node| node.2).max().unwrap_or(0);
            if let (Some(most), None) = (most, since) {
                let stays = bytes(&|number| left[number]);
                prop_assert!(stays + least > most.min(bytes(&|_| true)), "no more goes than must: {stays}");
            }
        }
    }
}
