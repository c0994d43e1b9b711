//! The slot protocol: which ranks fill which slot, when a chunk may be published, and which sessions may read what.
//!
//! Shared memory can't be revoked, so the rules say what may never happen: a slot is not reused while any session
//! that was told of it may still write or read it, and a chunk is published only when every byte of it was
//! committed by its owner, all of one engine. Pure: no clock, no I/O, no arena. The slots are abstract: `R` (a
//! reservation) and `L` (a lease); dropping one lets go of it. So `tests/it/protocol.rs` can walk through all
//! cases.
//!
//! - A *filling* is a slot that the ranks of one engine instance write one chunk into. Each rank that was told of
//!   it is one of its *writers* until the rank commits, aborts, or is gone.
//! - A filling that can't be published any more (a rank gave it up, is gone, or time passed) stays *spoilt* for as
//!   long as it has writers: only then is its slot free.
//! - A *lease* belongs to a session and a load; it ends when the slot or the load is released, or with the session.

use std::collections::{BTreeMap, BTreeSet};

pub type SessionId = u64;
pub type Rank = u32;
/// An engine instance: all ranks of one engine, under a name of its own.
pub type Instance = String;
/// The offset of a slot, and its generation, which tells it from earlier slots at that offset.
pub type SlotId = (usize, u64);
/// The session's name for a load.
pub type LoadId = String;

/// See the [module](self). `K` names a chunk.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Ledger<K, R, L> {
    sessions: BTreeMap<SessionId, AttachedEngine>,
    fillings: BTreeMap<SlotId, Filling<K, R>>,
    /// The filling of a chunk that may still be published.
    chunks: BTreeMap<K, SlotId>,
    leases: BTreeMap<(SessionId, LoadId, SlotId), Vec<L>>,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct AttachedEngine {
    instance: Instance,
    rank: Rank,
    world: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Filling<K, R> {
    chunk: K,
    instance: Instance,
    reserved: R,
    owners: BTreeSet<Rank>,
    committed: BTreeSet<Rank>,
    /// Sessions that may still write.
    writers: BTreeSet<SessionId>,
    spoilt: bool,
}

/// The reason why a session can't be attached.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AttachError {
    #[error(
        "rank {rank} of {instance:?} is attached already: let that one end first, or use another instance name"
    )]
    RankTaken { instance: Instance, rank: Rank },
    #[error("{instance:?} has {there} ranks according to its other ranks, not {world}")]
    OtherWorld {
        instance: Instance,
        there: u32,
        world: u32,
    },
}

/// The answer to a rank that wants to store a chunk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Offer {
    /// No engine stores it: reserve a slot, then [`Ledger::fill`].
    New,
    /// The engine fills this slot already; the rank writes its share.
    Join(SlotId),
    /// Another engine or another call of this session stores it, or this rank's share is done.
    Pending,
}

/// The outcome of a commit.
#[derive(Debug, PartialEq, Eq)]
pub enum Committed<K, R> {
    /// Other ranks are still to commit.
    Waits,
    /// All owners have committed: publish the chunk.
    Whole { chunk: K, reserved: R },
}

/// The reason why a slot can't be committed or given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SlotError {
    #[error("there is no such session")]
    NoSession,
    #[error("the slot is not this session's to write: it was never reserved by it, or is committed already")]
    NotYours,
    #[error(
        "the slot was not written where this rank should have: map the arena, write the whole share, then commit. The \
         chunk is not stored; reserve it again"
    )]
    Unwritten,
    #[error(
        "the chunk can't be stored any more: another rank gave it up or is gone, or it took too long. Reserve it again"
    )]
    Spoilt,
}

impl<K, R, L> Default for Ledger<K, R, L> {
    fn default() -> Self {
        Self {
            sessions: BTreeMap::new(),
            fillings: BTreeMap::new(),
            chunks: BTreeMap::new(),
            leases: BTreeMap::new(),
        }
    }
}

impl<K: Clone + Ord, R, L> Ledger<K, R, L> {
    pub fn attach(
        &mut self,
        session: SessionId,
        instance: &str,
        rank: Rank,
        world: u32,
    ) -> Result<(), AttachError> {
        for other in self.sessions.values().filter(|other| other.instance == instance) {
            let instance = instance.to_owned();
            if other.rank == rank {
                return Err(AttachError::RankTaken { instance, rank });
            }
            if other.world != world {
                let there = other.world;
                return Err(AttachError::OtherWorld {
                    instance,
                    there,
                    world,
                });
            }
        }
        let attached = AttachedEngine {
            instance: instance.to_owned(),
            rank,
            world,
        };
        self.sessions.insert(session, attached);
        Ok(())
    }

    /// Whether all ranks of the session's engine are attached.
    pub fn is_complete(&self, session: SessionId) -> bool {
        self.sessions.get(&session).is_some_and(|of| {
            let ranks = self
                .sessions
                .values()
                .filter(|other| other.instance == of.instance);
            ranks.count() == of.world as usize
        })
    }

    /// The sessions of the session's engine, by rank.
    pub fn ranks(&self, session: SessionId) -> BTreeMap<Rank, SessionId> {
        let Some(of) = self.sessions.get(&session) else {
            return BTreeMap::new();
        };
        let ranks = self
            .sessions
            .iter()
            .filter(|(_, other)| other.instance == of.instance);
        ranks.map(|(session, other)| (other.rank, *session)).collect()
    }

    /// Answers a rank that wants to store a chunk. With `Join` it is a writer from here on.
    pub fn offer(&mut self, session: SessionId, chunk: &K) -> Result<Offer, SlotError> {
        let of = self.sessions.get(&session).ok_or(SlotError::NoSession)?;
        let Some(slot) = self.chunks.get(chunk) else {
            return Ok(Offer::New);
        };
        let filling = self.fillings.get_mut(slot).ok_or(SlotError::NotYours)?;
        let shares = filling.owners.contains(&of.rank) && !filling.committed.contains(&of.rank);
        // Two calls of one session at once: the first to commit would let the other write into a slot that is published.
        let is_written = filling.writers.contains(&session);
        if filling.instance != of.instance || !shares || is_written {
            return Ok(Offer::Pending);
        }
        filling.writers.insert(session);
        Ok(Offer::Join(*slot))
    }

    /// Records the chunk's slot, after [`Offer::New`]. The session is its first writer. `owners` are the ranks that
    /// have some of the chunk's bytes to write, this one among them.
    pub fn fill(
        &mut self,
        session: SessionId,
        chunk: K,
        slot: SlotId,
        reserved: R,
        owners: BTreeSet<Rank>,
    ) -> Result<(), SlotError> {
        let of = self.sessions.get(&session).ok_or(SlotError::NoSession)?;
        let filling = Filling {
            chunk: chunk.clone(),
            instance: of.instance.clone(),
            reserved,
            owners,
            committed: BTreeSet::new(),
            writers: BTreeSet::from([session]),
            spoilt: false,
        };
        self.fillings.insert(slot, filling);
        self.chunks.insert(chunk, slot);
        Ok(())
    }

    /// Whether a session writes to a slot that may still be published.
    pub fn fills(&self, session: SessionId, slot: SlotId) -> bool {
        self.fillings
            .get(&slot)
            .is_some_and(|filling| !filling.spoilt && filling.writers.contains(&session))
    }

    /// Commits a rank's share: it is written, and the rank writes no more.
    pub fn commit(&mut self, session: SessionId, slot: SlotId) -> Result<Committed<K, R>, SlotError> {
        let rank = self.sessions.get(&session).ok_or(SlotError::NoSession)?.rank;
        let filling = self.fillings.get_mut(&slot).ok_or(SlotError::NotYours)?;
        if !filling.writers.remove(&session) {
            return Err(SlotError::NotYours);
        }
        if filling.spoilt {
            self.let_go(slot);
            return Err(SlotError::Spoilt);
        }
        filling.committed.insert(rank);
        if !filling.owners.is_subset(&filling.committed) {
            return Ok(Committed::Waits);
        }
        // The owners are all that ever were writers, and each has committed.
        let filling = self.fillings.remove(&slot).ok_or(SlotError::NotYours)?;
        self.chunks.remove(&filling.chunk);
        Ok(Committed::Whole {
            chunk: filling.chunk,
            reserved: filling.reserved,
        })
    }

    /// Gives up a rank's share: the rank writes no more.
    pub fn abort(&mut self, session: SessionId, slot: SlotId) -> Result<(), SlotError> {
        let filling = self.fillings.get_mut(&slot).ok_or(SlotError::NotYours)?;
        if !filling.writers.remove(&session) {
            return Err(SlotError::NotYours);
        }
        self.spoil(slot);
        Ok(())
    }

    /// Spoils a filling: it will not be published. Its slot is free when no session may write to it any more.
    pub fn spoil(&mut self, slot: SlotId) {
        if let Some(filling) = self.fillings.get_mut(&slot)
            && !filling.spoilt
        {
            filling.spoilt = true;
            let chunk = filling.chunk.clone();
            self.chunks.remove(&chunk);
        }
        self.let_go(slot);
    }

    /// Spoils the fillings that `late` selects; returns them with the sessions that may still write there.
    pub fn spoil_where(&mut self, late: impl Fn(&R) -> bool) -> Vec<(SlotId, BTreeSet<SessionId>)> {
        let open = self.fillings.iter().filter(|(_, filling)| !filling.spoilt);
        let late: Vec<_> = open
            .filter(|(_, filling)| late(&filling.reserved))
            .map(|(slot, filling)| (*slot, filling.writers.clone()))
            .collect();
        late.iter().for_each(|(slot, _)| self.spoil(*slot));
        late
    }

    fn let_go(&mut self, slot: SlotId) {
        let free = |filling: &Filling<K, R>| filling.spoilt && filling.writers.is_empty();
        if self.fillings.get(&slot).is_some_and(free) {
            self.fillings.remove(&slot);
        }
    }

    /// Lends a slot: the session may read it from here on. False if the session is gone, and the lease with it.
    pub fn lend(&mut self, session: SessionId, load: &str, slot: SlotId, lease: L) -> bool {
        if !self.sessions.contains_key(&session) {
            return false;
        }
        let leases = self.leases.entry((session, load.to_owned(), slot)).or_default();
        leases.push(lease);
        true
    }

    /// Ends a session's leases of a slot for one of its loads. Returns them.
    pub fn release(&mut self, session: SessionId, load: &str, slot: SlotId) -> Vec<L> {
        let lent = self.leases.remove(&(session, load.to_owned(), slot));
        lent.unwrap_or_default()
    }

    /// Ends a session's leases of all slots of a load. Returns them.
    pub fn release_load(&mut self, session: SessionId, load: &str) -> Vec<L> {
        let of = |key: &(SessionId, LoadId, SlotId)| key.0 == session && key.1 == load;
        self.end_leases(of)
    }

    fn end_leases(&mut self, of: impl Fn(&(SessionId, LoadId, SlotId)) -> bool) -> Vec<L> {
        let ended = self.leases.extract_if(.., |key, _| of(key));
        ended.flat_map(|(_, leases)| leases).collect()
    }

    /// Ends a session: its process is gone, and can write or read no more.
    pub fn end(&mut self, session: SessionId) -> Vec<L> {
        let Some(of) = self.sessions.remove(&session) else {
            return Vec::new();
        };
        let mut lost = Vec::new();
        for (slot, filling) in &mut self.fillings {
            filling.writers.remove(&session);
            // Its share will not come any more. Nor may another process of that name bring it: the rest is of this
            // process's engine.
            let owes = filling.owners.contains(&of.rank) && !filling.committed.contains(&of.rank);
            if filling.spoilt || (owes && filling.instance == of.instance) {
                lost.push(*slot);
            }
        }
        lost.into_iter().for_each(|slot| self.spoil(slot));
        self.end_leases(|key| key.0 == session)
    }

    pub fn sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Numbers of slots being filled, of spoilt slots, and of leases.
    pub fn counts(&self) -> (usize, usize, usize) {
        let spoilt = self.fillings.values().filter(|filling| filling.spoilt).count();
        (self.fillings.len() - spoilt, spoilt, self.leases.len())
    }

    /// Numbers of slots that a session may write, and of its leases.
    pub fn counts_of(&self, session: SessionId) -> (usize, usize) {
        let writes = |filling: &&Filling<K, R>| filling.writers.contains(&session);
        let of = |key: &&(SessionId, LoadId, SlotId)| key.0 == session;
        (
            self.fillings.values().filter(writes).count(),
            self.leases.keys().filter(of).count(),
        )
    }

    /// The slots that some sessions may write.
    pub fn fillings_of(&self, is_one: impl Fn(SessionId) -> bool) -> impl Iterator<Item = (SlotId, &R)> {
        let of = move |filling: &Filling<K, R>| filling.writers.iter().any(|&session| is_one(session));
        let fillings = self.fillings.iter().filter(move |(_, filling)| of(filling));
        fillings.map(|(slot, filling)| (*slot, &filling.reserved))
    }

    /// The slots that some sessions may read.
    pub fn leases_of(&self, is_one: impl Fn(SessionId) -> bool) -> impl Iterator<Item = (SlotId, &L)> {
        let leases = self.leases.iter().filter(move |(key, _)| is_one(key.0));
        leases.filter_map(|(key, leases)| Some((key.2, leases.first()?)))
    }

    pub fn reserved(&self, slot: SlotId) -> Option<&R> {
        self.fillings.get(&slot).map(|filling| &filling.reserved)
    }
}
