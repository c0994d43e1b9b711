//! Doubly linked lists from oldest to newest, whose nodes share one vector: no allocation for a node, and moving one
//! between lists copies nothing.

/// A node's place in [`Nodes`].
pub(super) type At = u32;

/// The number of no prompt.
pub(super) const NO_REQUEST: u32 = 0;

/// No node.
const NONE: At = At::MAX;

/// The nodes of all lists of a queue; a place that is given back is used again.
pub(super) struct Nodes<K> {
    nodes: Vec<Node<K>>,
    /// The first place that is free; the others follow by `newer`.
    free: At,
}

struct Node<K> {
    key: K,
    older: At,
    newer: At,
    /// When it was last used, in the clock of its tier.
    used_ms: u64,
    /// The prompt that used it last; [`NO_REQUEST`] if that is not known.
    request: u32,
    /// The policy's count of uses; at most a few.
    uses: u8,
    /// Which of the policy's lists it is in, for one that has several.
    list: u8,
}

/// Some of the nodes, in order.
pub(super) struct List {
    oldest: At,
    newest: At,
    len: usize,
}

impl<K: Copy> Nodes<K> {
    pub fn new() -> Self {
        Self {
            nodes: Vec::new(),
            free: NONE,
        }
    }

    /// A node in no list yet.
    pub fn add(&mut self, key: K) -> At {
        let node = Node {
            key,
            older: NONE,
            newer: NONE,
            used_ms: 0,
            request: NO_REQUEST,
            uses: 0,
            list: 0,
        };
        if self.free == NONE {
            let at = At::try_from(self.nodes.len()).ok().filter(|&at| at != NONE);
            self.nodes.push(node);
            return at.expect("fewer than 2^32 chunks in a tier");
        }
        let at = self.free;
        self.free = self.nodes[at as usize].newer;
        self.nodes[at as usize] = node;
        at
    }

    /// Gives back the place of a node that is in no list.
    pub fn free(&mut self, at: At) -> K {
        self.nodes[at as usize].newer = self.free;
        self.free = at;
        self.nodes[at as usize].key
    }
}

impl<K> Nodes<K> {
    #[cfg(test)]
    pub fn in_use(&self) -> usize {
        let next = |&at: &At| Some(self.nodes[at as usize].newer).filter(|&at| at != NONE);
        let first = Some(self.free).filter(|&at| at != NONE);
        self.nodes.len() - std::iter::successors(first, next).count()
    }

    /// Places of nodes, in use or free.
    pub fn places(&self) -> usize {
        self.nodes.len()
    }

    pub fn key(&self, at: At) -> &K {
        &self.nodes[at as usize].key
    }

    /// The next newer one in its list.
    pub fn newer(&self, at: At) -> Option<At> {
        Some(self.nodes[at as usize].newer).filter(|&newer| newer != NONE)
    }

    pub fn uses(&self, at: At) -> u8 {
        self.nodes[at as usize].uses
    }

    pub fn set_uses(&mut self, at: At, uses: u8) {
        self.nodes[at as usize].uses = uses;
    }

    pub fn list(&self, at: At) -> u8 {
        self.nodes[at as usize].list
    }

    pub fn set_list(&mut self, at: At, list: u8) {
        self.nodes[at as usize].list = list;
    }

    pub fn used_ms(&self, at: At) -> u64 {
        self.nodes[at as usize].used_ms
    }

    pub fn request(&self, at: At) -> u32 {
        self.nodes[at as usize].request
    }

    pub fn set_used(&mut self, at: At, used_ms: u64, request: u32) {
        let node = &mut self.nodes[at as usize];
        (node.used_ms, node.request) = (used_ms, request);
    }
}

impl List {
    pub fn new() -> Self {
        Self {
            oldest: NONE,
            newest: NONE,
            len: 0,
        }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn oldest(&self) -> Option<At> {
        Some(self.oldest).filter(|&at| at != NONE)
    }

    pub fn newest(&self) -> Option<At> {
        Some(self.newest).filter(|&at| at != NONE)
    }

    /// Puts in a node that is in no list.
    pub fn push<K>(&mut self, nodes: &mut Nodes<K>, at: At) {
        let node = &mut nodes.nodes[at as usize];
        (node.older, node.newer) = (self.newest, NONE);
        match self.newest {
            NONE => self.oldest = at,
            newest => nodes.nodes[newest as usize].newer = at,
        }
        self.newest = at;
        self.len += 1;
    }

    /// Puts in a node that is in no list, as the next older one of `newer`, which is in this list.
    pub fn push_older<K>(&mut self, nodes: &mut Nodes<K>, at: At, newer: At) {
        let older = std::mem::replace(&mut nodes.nodes[newer as usize].older, at);
        let node = &mut nodes.nodes[at as usize];
        (node.older, node.newer) = (older, newer);
        match older {
            NONE => self.oldest = at,
            older => nodes.nodes[older as usize].newer = at,
        }
        self.len += 1;
    }

    /// Takes out a node that is in this list.
    pub fn remove<K>(&mut self, nodes: &mut Nodes<K>, at: At) {
        let node = &nodes.nodes[at as usize];
        let (older, newer) = (node.older, node.newer);
        match older {
            NONE => self.oldest = newer,
            older => nodes.nodes[older as usize].newer = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => nodes.nodes[newer as usize].older = older,
        }
        self.len -= 1;
    }

    /// Makes a node of this list its newest.
    pub fn renew<K>(&mut self, nodes: &mut Nodes<K>, at: At) {
        if self.newest != at {
            self.remove(nodes, at);
            self.push(nodes, at);
        }
    }
}
