//! Two leaders at once, with prompts that are stored and used meanwhile: every order of their steps is tried. And one whose
//! last look at a chunk and its removal are two steps, with uses in between.

use std::collections::BTreeSet;

use super::tree::{Bounds, Object, Tree};
use crate::format::ChunkHash;

/// 0 - 1 - 2 is a prompt, 0 - 3 another one, and 4 will follow 2.
const PARENTS: [Option<usize>; 5] = [None, Some(0), Some(1), Some(0), Some(2)];
/// Chunks that may stay.
const LIMIT: u64 = 2;

fn hash(number: usize) -> ChunkHash {
    ChunkHash([number as u8 + 1; 32])
}

/// When each chunk was stored or refreshed; None: it is not there.
type Bucket = [Option<i64>; PARENTS.len()];

#[derive(Clone, Default)]
struct Leader {
    began: i64,
    listed: Bucket,
    plan: Option<(Tree, Vec<usize>)>,
    next: usize,
    stays: BTreeSet<usize>,
    /// Between the last look and the removal others have their turn.
    is_slow: bool,
    has_looked: bool,
    /// Chunks that went although they were refreshed after the last look.
    lost: usize,
}

impl Leader {
    fn lists(&mut self, bucket: &Bucket, now: i64) {
        self.began = now;
        self.listed = *bucket;
        let there = bucket
            .iter()
            .enumerate()
            .filter_map(|(number, at)| Some((number, (*at)?)));
        let object = |(number, modified)| Object {
            group: 0,
            hash: hash(number),
            space: 0,
            is_extra: false,
            bytes: 1,
            modified,
        };
        let mut tree = Tree::new(there.map(object).collect());
        tree.link(|tree, node| PARENTS[usize::from(tree.hash(node).0[0]) - 1].map(hash));
        let bounds = Bounds {
            bytes: Some(LIMIT),
            ..Bounds::default()
        };
        let nodes = tree.choose(bounds, now, |_| None);
        self.plan = Some((tree, nodes));
    }

    fn is_done(&self) -> bool {
        self.plan
            .as_ref()
            .is_some_and(|(_, nodes)| self.next == nodes.len())
    }

    /// A batch of one.
    fn removes(&mut self, bucket: &mut Bucket) {
        let Some((tree, nodes)) = &self.plan else { return };
        let node = nodes[self.next];
        let number = usize::from(tree.hash(node).0[0]) - 1;
        if !self.has_looked && bucket[number].is_some() && bucket[number] != self.listed[number] {
            self.stays.extend(tree.with_ancestors(node));
        }
        self.has_looked = self.is_slow && !self.has_looked;
        if self.has_looked {
            return;
        }
        self.next += 1;
        if !self.stays.contains(&node) {
            // A copy onto itself has the same ETag, so the removal does not see it.
            let is_new = bucket[number].take().is_some_and(|at| at > self.began);
            assert!(
                !is_new || self.is_slow,
                "{number} was stored or used after the removal began"
            );
            self.lost += usize::from(is_new);
        }
    }
}

#[derive(Clone)]
struct World {
    now: i64,
    bucket: Bucket,
    leaders: [Leader; 2],
    /// Events that are still to come.
    uses: usize,
    stores: usize,
}

impl World {
    /// A lookup finds the leading chunks of a prompt, and they are refreshed.
    fn uses(&mut self, prompt: &[usize]) -> bool {
        for &number in prompt {
            match &mut self.bucket[number] {
                Some(at) => *at = self.now,
                None => return false,
            }
        }
        true
    }

    fn next(&self) -> Vec<Self> {
        let mut worlds = Vec::new();
        for leader in 0..2 {
            let mut world = self.clone();
            world.now += 1;
            match &world.leaders[leader].plan {
                None => world.leaders[leader].lists(&self.bucket, self.now),
                Some(_) if self.leaders[leader].is_done() => continue,
                Some(_) => world.leaders[leader].removes(&mut world.bucket),
            }
            worlds.push(world);
        }
        if self.uses > 0 {
            let mut world = self.clone();
            (world.now, world.uses) = (self.now + 1, self.uses - 1);
            world.uses(&[0, 1, 2]);
            worlds.push(world);
        }
        if self.stores > 0 {
            let mut world = self.clone();
            (world.now, world.stores) = (self.now + 1, self.stores - 1);
            if world.uses(&[0, 1, 2]) {
                world.bucket[4] = Some(world.now);
            }
            worlds.push(world);
        }
        worlds
    }

    fn check(&self) {
        for (number, parent) in PARENTS.iter().enumerate() {
            let lacks =
                self.bucket[number].is_some() && parent.is_some_and(|parent| self.bucket[parent].is_none());
            assert!(!lacks, "{number} is there without its parent: {:?}", self.bucket);
        }
        assert!(self.left() >= LIMIT, "more went than had to: {:?}", self.bucket);
    }

    fn left(&self) -> u64 {
        self.bucket.iter().flatten().count() as u64
    }
}

/// All orders of the steps from here; calls `end` with each last state, and returns how many there were.
fn explore(world: &World, end: &mut impl FnMut(&World)) -> u64 {
    world.check();
    let next = world.next();
    if next.is_empty() {
        end(world);
        return 1;
    }
    next.iter().map(|world| explore(world, end)).sum()
}

fn world(uses: usize, stores: usize) -> World {
    World {
        now: 10,
        bucket: [Some(1), Some(2), Some(3), Some(4), None],
        leaders: Default::default(),
        uses,
        stores,
    }
}

#[test]
fn two_leaders_remove_what_one_would() {
    let mut ends = BTreeSet::new();
    let orders = explore(&world(0, 0), &mut |world| {
        ends.insert(world.bucket);
    });
    assert_eq!(
        ends.into_iter().collect::<Vec<_>>(),
        [[Some(1), None, None, Some(4), None]]
    );
    assert!(orders > 10, "{orders} orders");
}

#[test]
fn two_leaders_leave_what_is_stored_and_used_meanwhile() {
    let orders = explore(&world(2, 1), &mut |world| assert!(world.left() >= LIMIT));
    assert!(orders > 1000, "{orders} orders");
}

#[test]
fn a_use_between_the_last_look_and_the_removal_loses_one_chunk_at_most() {
    let mut world = world(2, 0);
    world.leaders[0].is_slow = true;
    // The other one has nothing to do.
    world.leaders[1].plan = Some(Default::default());
    let mut most = 0;
    let orders = explore(&world, &mut |world| {
        let uses = 2;
        let lost = world.leaders[0].lost;
        assert!(lost <= uses, "{lost} chunks of {uses} uses");
        most = most.max(lost);
    });
    assert!(most > 0 && orders > 20, "{most} lost in {orders} orders");
}
