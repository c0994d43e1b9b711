//! A list by time of use, where the keys of one prompt lie from its last to its first.
//!
//! A chunk is of no use without those before it, so a prompt's last chunks must leave before its first ones. They come in
//! the order of the prompt, though. So each is put in on the older side of the one before it: the keys that one prompt
//! used form a run in the list, and a map knows the older end of each run.

use std::collections::HashMap;

use foldhash::fast::FixedState;

use super::Access;
use super::list::{At, List, NO_REQUEST, Nodes};

/// A prompt's chunks that come later than this after its first ones begin a run of their own: what an engine decodes
/// is newer than the prompt.
const RUN_MS: u64 = 10_000;

pub(super) struct Recency {
    list: List,
    /// The older end of each prompt's latest run.
    runs: HashMap<u32, At, FixedState>,
    /// The older end of the newest run.
    newest_end: Option<At>,
}

impl Recency {
    pub fn new() -> Self {
        Self {
            list: List::new(),
            runs: HashMap::default(),
            newest_end: None,
        }
    }

    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// The last chunk of the oldest prompt.
    pub fn oldest(&self) -> Option<At> {
        self.list.oldest()
    }

    /// The last chunk of the newest prompt.
    pub fn newest_end(&self) -> Option<At> {
        self.newest_end
    }

    /// Puts in a node that is in no list.
    pub fn push<K>(&mut self, nodes: &mut Nodes<K>, at: At, access: Access) {
        let (request, mut used_ms) = (access.request, access.at_ms);
        let mut end = None;
        if request != NO_REQUEST {
            end = self.runs.insert(request, at);
            end = end.filter(|&end| used_ms.saturating_sub(nodes.used_ms(end)) <= RUN_MS);
        }
        if let Some(end) = end {
            // The list stays in the order of these times.
            used_ms = nodes.used_ms(end);
            self.list.push_older(nodes, at, end);
            if self.newest_end == Some(end) {
                self.newest_end = Some(at);
            }
        } else {
            self.list.push(nodes, at);
            self.newest_end = Some(at);
        }
        nodes.set_used(at, used_ms, request);
    }

    /// Takes out a node of this list.
    pub fn remove<K>(&mut self, nodes: &mut Nodes<K>, at: At) {
        let request = nodes.request(at);
        let of_run = |&newer: &At| request != NO_REQUEST && nodes.request(newer) == request;
        let rest = nodes.newer(at).filter(of_run);
        if request != NO_REQUEST && self.runs.get(&request) == Some(&at) {
            match rest {
                Some(newer) => self.runs.insert(request, newer),
                None => self.runs.remove(&request),
            };
        }
        let was_newest_end = self.newest_end == Some(at);
        self.list.remove(nodes, at);
        if was_newest_end {
            self.newest_end = rest.or_else(|| {
                let newest = self.list.newest()?;
                Some(self.runs.get(&nodes.request(newest)).copied().unwrap_or(newest))
            });
        }
    }

    /// A node of this list was used.
    pub fn renew<K>(&mut self, nodes: &mut Nodes<K>, at: At, access: Access) {
        self.remove(nodes, at);
        self.push(nodes, at, access);
    }

    /// A node of this list may not go: it becomes the newest.
    pub fn refused<K>(&mut self, nodes: &mut Nodes<K>, at: At) {
        let at_ms = nodes.used_ms(at);
        self.renew(
            nodes,
            at,
            Access {
                at_ms,
                ..Access::default()
            },
        );
    }
}
