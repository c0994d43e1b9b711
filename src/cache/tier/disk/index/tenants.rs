//! The bytes of each tenant on the disks, with an eviction order of its own.

use std::collections::HashMap;

use crate::cache::tier::policy::{Access, Queue};
use crate::format::ChunkId;
use crate::protocol::EvictionPolicy;

/// The bytes of each tenant, over all disks. One that was ever seen stays known: tenants come with spaces, which are
/// few.
pub(super) struct Tenants {
    /// If they are limited; else nobody needs their order.
    policy: Option<EvictionPolicy>,
    numbers: HashMap<Box<str>, usize>,
    tenants: Vec<Tenant>,
}

struct Tenant {
    bytes: u64,
    queue: Option<Queue<ChunkId>>,
}

impl Tenants {
    pub fn new(policy: Option<EvictionPolicy>) -> Self {
        Self {
            policy,
            numbers: HashMap::new(),
            tenants: Vec::new(),
        }
    }

    /// The number of a tenant; the empty name is one too.
    pub fn number(&mut self, name: &str) -> usize {
        if let Some(&number) = self.numbers.get(name) {
            return number;
        }
        self.tenants.push(Tenant {
            bytes: 0,
            queue: self.policy.map(Queue::new),
        });
        let number = self.tenants.len() - 1;
        self.numbers.insert(name.into(), number);
        number
    }

    /// Their numbers are below this.
    pub fn len(&self) -> usize {
        self.tenants.len()
    }

    pub fn bytes(&self, number: usize) -> u64 {
        self.tenants[number].bytes
    }

    /// With their names.
    pub fn all(&self) -> impl Iterator<Item = (String, u64)> {
        let numbers = self.numbers.iter();
        numbers.map(|(name, number)| (name.to_string(), self.bytes(*number)))
    }

    pub fn take_bytes(&mut self, number: usize, bytes: u64) {
        self.tenants[number].bytes += bytes;
    }

    pub fn give_bytes(&mut self, number: usize, bytes: u64) {
        self.tenants[number].bytes -= bytes;
    }

    /// Puts in a chunk whose bytes were taken.
    pub fn insert(&mut self, number: usize, key: ChunkId, access: Access) {
        if let Some(queue) = &mut self.tenants[number].queue {
            queue.insert(key, access);
        }
    }

    pub fn hit(&mut self, number: usize, key: &ChunkId, access: Access) {
        if let Some(queue) = &mut self.tenants[number].queue {
            queue.hit(key, access);
        }
    }

    pub fn remove(&mut self, number: usize, key: &ChunkId, bytes: u64) {
        self.give_bytes(number, bytes);
        if let Some(queue) = &mut self.tenants[number].queue {
            queue.remove(key);
        }
    }

    /// Takes the next out of the tenant's order; its bytes are still taken.
    pub fn evict(&mut self, number: usize, may_go: impl FnMut(&ChunkId) -> bool) -> Option<ChunkId> {
        self.tenants[number].queue.as_mut()?.evict(may_go)
    }
}
