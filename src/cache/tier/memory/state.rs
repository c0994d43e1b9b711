//! The memory tier's state, under its one lock: which chunks are here, what they count for, and which goes next.

use std::collections::HashMap;
use std::sync::Arc;

use foldhash::fast::RandomState;
use tokio::time::Instant;

use super::{MemoryHit, MemoryStats};
use crate::arena::Slot;
use crate::cache::tier::events::KvEvents;
use crate::cache::tier::policy::Queue;
use crate::cache::tier::removals::Removals;
use crate::format::{ChunkId, Space};
use crate::protocol::{EvictionPolicy, Tier};

#[derive(Default)]
pub(super) struct MemoryState {
    pub chunks: HashMap<ChunkId, Resident, RandomState>,
    pub tenants: HashMap<Arc<str>, Tenant>,
    /// The time until which each pinned chunk stays.
    pub pins: Pins,
    pub removals: Removals,
    pub stats: MemoryStats,
    pub events: Option<Arc<KvEvents>>,
}

pub(super) struct Tenant {
    pub queue: Queue<ChunkId>,
    pub bytes: usize,
    /// For chunks that are about to come.
    pub reserved: usize,
}

pub(super) struct Resident {
    pub tenant: Arc<str>,
    pub held: ReaderHold,
    pub bytes: usize,
    pub dirty: bool,
    /// It came from a peer, and no lower tier is known to have it.
    pub unproven: bool,
    pub accesses: u32,
    pub was_due: bool,
    pub since: Instant,
}

/// The slot's content.
#[derive(Clone)]
pub(super) enum ReaderHold {
    /// The header is not written yet.
    Payload(Slot),
    /// Header and payload.
    Object(Slot),
}

/// Which chunks may go.
#[derive(Clone, Copy)]
pub(super) struct Going {
    pub now: Instant,
    /// Only slots that begin before this offset are of use.
    pub before: usize,
    /// Whether pinned chunks may go, too.
    pub pinned: bool,
}

impl Going {
    pub fn any(now: Instant) -> Self {
        Self {
            now,
            before: usize::MAX,
            pinned: false,
        }
    }
}

pub(super) type Pins = HashMap<ChunkId, Instant, RandomState>;

pub(super) fn is_pinned(pins: &Pins, key: &ChunkId, now: Instant) -> bool {
    pins.get(key).is_some_and(|until| *until > now)
}

impl MemoryState {
    pub fn tenant_bytes(&self, tenant: &str) -> usize {
        let tenant = self.tenants.get(tenant);
        tenant.map_or(0, |tenant| tenant.bytes + tenant.reserved)
    }

    /// The tenant's name as it is kept; it is known from here on.
    pub fn tenant(&mut self, name: &str, policy: EvictionPolicy) -> Arc<str> {
        if let Some((name, _)) = self.tenants.get_key_value(name) {
            return Arc::clone(name);
        }
        let name: Arc<str> = name.into();
        let tenant = Tenant {
            queue: Queue::new(policy),
            bytes: 0,
            reserved: 0,
        };
        self.tenants.insert(Arc::clone(&name), tenant);
        name
    }

    pub fn forget_empty(&mut self, tenant: &Arc<str>) {
        let empty = |of: &Tenant| of.bytes + of.reserved == 0;
        if self.tenants.get(tenant).is_some_and(empty) {
            self.tenants.remove(tenant);
        }
    }

    /// The next that may go: of the tenant that has the most, else of any.
    pub fn evict(&mut self, going: Going) -> Option<ReaderHold> {
        let mut tenants: Vec<_> = self
            .tenants
            .iter()
            .map(|(name, tenant)| (tenant.bytes, Arc::clone(name)))
            .collect();
        tenants.sort_by_key(|(bytes, _)| std::cmp::Reverse(*bytes));
        tenants.iter().find_map(|(_, name)| self.evict_of(name, going))
    }

    pub fn evict_of(&mut self, tenant: &str, going: Going) -> Option<ReaderHold> {
        let Self {
            chunks,
            tenants,
            pins,
            ..
        } = self;
        let may_go = |key: &ChunkId| {
            chunks.get(key).is_none_or(|resident| {
                let helps = resident.held.slot().slot_offset() < going.before;
                let stays = !going.pinned && is_pinned(pins, key, going.now);
                helps && !stays && !resident.is_used()
            })
        };
        let key = tenants.get_mut(tenant)?.queue.evict(may_go)?;
        self.stats.evicted += 1;
        self.take(&key).map(|resident| resident.held)
    }

    pub fn set_dirty(&mut self, key: &ChunkId, dirty: bool) {
        if let Some(resident) = self.chunks.get_mut(key) {
            self.stats.dirty_bytes -= resident.dirty_bytes();
            resident.dirty = dirty;
            // It is below, or on its way there.
            resident.unproven = false;
            self.stats.dirty_bytes += resident.dirty_bytes();
        }
    }

    pub fn take(&mut self, key: &ChunkId) -> Option<Resident> {
        let resident = self.chunks.remove(key)?;
        if let Some(events) = &self.events {
            events.removed(key, Tier::Memory);
        }
        self.pins.remove(key);
        self.stats.bytes -= resident.bytes as u64;
        self.stats.dirty_bytes -= resident.dirty_bytes();
        if let Some(tenant) = self.tenants.get_mut(&resident.tenant) {
            tenant.queue.remove(key);
            tenant.bytes -= resident.bytes;
        }
        self.forget_empty(&resident.tenant);
        Some(resident)
    }
}

impl Resident {
    /// While the lock is held nobody can begin to use it.
    pub fn is_used(&self) -> bool {
        self.dirty || self.held.slot().is_used_by_others(1)
    }

    pub fn dirty_bytes(&self) -> u64 {
        if self.dirty { self.bytes as u64 } else { 0 }
    }

    pub fn found(&self, space: &Space, is_due: bool) -> MemoryHit {
        match &self.held {
            ReaderHold::Payload(payload) => MemoryHit {
                payload: payload.clone(),
                object: None,
                is_due,
            },
            ReaderHold::Object(object) => MemoryHit {
                payload: object.slice(space.layout().header_len()..object.len()),
                object: Some(object.clone()),
                is_due,
            },
        }
    }
}

impl ReaderHold {
    pub fn slot(&self) -> &Slot {
        let (Self::Payload(slot) | Self::Object(slot)) = self;
        slot
    }
}
