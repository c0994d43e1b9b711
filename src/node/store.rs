//! Stores of attached engines: reserve a slot, let each rank write its share, commit with the last one.

use crate::protocol::Share;
use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::time::Instant;

use super::ledger::{Committed, Offer, Rank, SlotError, SlotId};
use super::owners::{Has, Shares};
use super::session::SessionEvent;
use super::unwritten::Marks;
use super::{Node, NodeError, Session};
use crate::cache::gateway::{Reserved, Skip};
use crate::format::{ChunkHash, Space};

/// A chunk that an engine wants to store.
#[derive(Debug, Clone, Copy)]
pub struct ToStore {
    pub hash: ChunkHash,
    /// The hash of the chunk before, or the root.
    pub parent: ChunkHash,
}

/// A slot that is being filled.
pub(super) struct Filled {
    pub reserved: Reserved,
    pub parent: ChunkHash,
    unwritten: Marks,
    /// The share that each of its owners writes.
    shares: Arc<Shares>,
    pub since: Instant,
}

impl Filled {
    fn is_written_by(&self, rank: Rank) -> bool {
        let slot = &self.reserved.slot;
        let shares = self.shares.get(&rank).map_or(&[][..], Vec::as_slice);
        self.unwritten.are_gone(slot.payload(), slot.space(), shares)
    }
}

/// The answer to a rank for a chunk that it wants to store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReserveOutcome {
    /// The slot to write to.
    Slot {
        /// The slot's offset in the arena's file, and its generation: a commit names both.
        slot: usize,
        generation: u64,
        /// The payload's offset in the arena's file.
        offset: usize,
    },
    Skip(Skip),
    /// Other ranks write all of the chunk.
    OtherRank,
}

/// The answer to a reserve.
#[derive(Debug, Clone)]
pub struct Reservations {
    /// This rank's share of every chunk; the whole chunk, if nothing else is said.
    pub shares: Vec<Share>,
    /// One for each chunk.
    pub chunks: Vec<ReserveOutcome>,
    /// Whether ranks are missing: until all are attached, the shares are unknown.
    pub ranks_missing: bool,
}

impl Node {
    /// Reserves slots for chunks to store. Never waits.
    pub fn reserve(
        &self,
        session: &Session,
        space: &Space,
        chunks: &[ToStore],
    ) -> Result<Reservations, NodeError> {
        self.takes_work()?;
        session.uses(space.key());
        let mut ledger = self.ledger();
        if !ledger.is_complete(session.id) {
            return Ok(Reservations {
                shares: Vec::new(),
                chunks: vec![ReserveOutcome::Skip(Skip::Pending); chunks.len()],
                ranks_missing: true,
            });
        }
        let ranks: BTreeMap<Rank, Has> = {
            let ranks = ledger.ranks(session.id).into_iter();
            let has = |id| self.0.by_id.get(&id).map(|session| session.has.clone());
            ranks.filter_map(|(rank, id)| Some((rank, has(id)?))).collect()
        };
        let shares = session.shares(space, ranks)?;
        let Some(own) = shares.get(&session.rank) else {
            return Ok(Reservations {
                shares: Vec::new(),
                chunks: vec![ReserveOutcome::OtherRank; chunks.len()],
                ranks_missing: false,
            });
        };
        let mut answers = Vec::with_capacity(chunks.len());
        let mut call = self.0.gateway.reserve_behind(space, Some(&session.credit));
        for chunk in chunks {
            let key = (space.key(), chunk.hash);
            let slot = match ledger.offer(session.id, &key)? {
                // A rank came back with other heads than it had when the filling began: some bytes would have no
                // writer.
                Offer::Join(slot) if ledger.reserved(slot).is_none_or(|filled| filled.shares != shares) => {
                    ledger.abort(session.id, slot)?;
                    answers.push(ReserveOutcome::Skip(Skip::Pending));
                    continue;
                }
                Offer::Join(slot) => slot,
                Offer::Pending => {
                    answers.push(ReserveOutcome::Skip(Skip::Pending));
                    continue;
                }
                Offer::New => match call.reserve(&chunk.hash, &chunk.parent) {
                    Err(skip) => {
                        answers.push(ReserveOutcome::Skip(skip));
                        continue;
                    }
                    Ok(mut reserved) => {
                        let payload = reserved.slot.payload_mut();
                        let unwritten = Marks::put(payload, space, shares.values().flatten());
                        let slot = (reserved.slot.slot_offset(), reserved.slot.generation());
                        let filled = Filled {
                            reserved,
                            parent: chunk.parent,
                            unwritten,
                            shares: Arc::clone(&shares),
                            since: Instant::now(),
                        };
                        let owners = shares.keys().copied().collect();
                        ledger.fill(session.id, key, slot, filled, owners)?;
                        slot
                    }
                },
            };
            let offset = ledger
                .reserved(slot)
                .map(|filled| filled.reserved.slot.payload_offset());
            answers.push(match offset {
                Some(offset) => ReserveOutcome::Slot {
                    slot: slot.0,
                    generation: slot.1,
                    offset,
                },
                None => ReserveOutcome::Skip(Skip::Pending),
            });
        }
        Ok(Reservations {
            shares: own.clone(),
            chunks: answers,
            ranks_missing: false,
        })
    }

    /// Commits a rank's share of a slot. True if the chunk is a hit from now on. Fails where a reload has taken the
    /// space's key away since the reserve: then the chunk is not kept.
    pub fn commit(&self, session: &Session, slot: SlotId) -> Result<bool, NodeError> {
        let mut ledger = self.ledger();
        let is_written = ledger
            .reserved(slot)
            .is_none_or(|filled| filled.is_written_by(session.rank));
        if !is_written && ledger.fills(session.id, slot) {
            ledger.abort(session.id, slot)?;
            let Session { instance, rank, .. } = session;
            self.0
                .unwritten
                .tell(&format_args!("slot {} by rank {rank} of {instance:?}", slot.0));
            return Err(SlotError::Unwritten.into());
        }
        match ledger.commit(session.id, slot)? {
            Committed::Waits => Ok(false),
            Committed::Whole { chunk, reserved } => {
                // Under the lock, so that no rank reserves the chunk in between.
                self.0
                    .gateway
                    .commit(chunk.1, reserved.parent, reserved.reserved)?;
                Ok(true)
            }
        }
    }

    /// Gives up a rank's share of a slot, and with it the chunk.
    pub fn abort(&self, session: &Session, slot: SlotId) -> Result<(), SlotError> {
        self.ledger().abort(session.id, slot)
    }

    /// Spoils fillings that take too long; sessions that may still write there are told.
    pub(super) fn spoil_late(&self) {
        let most = self.0.options.commit_timeout;
        let late = {
            let mut ledger = self.ledger();
            ledger.spoil_where(|filled| filled.since.elapsed() > most)
        };
        for (slot, writers) in late {
            self.0.late.tell(&format_args!("slot {} after {most:?}", slot.0));
            for writer in writers {
                if let Some(session) = self.0.by_id.get(&writer) {
                    session.tell(SessionEvent::Revoked {
                        slot: slot.0,
                        generation: slot.1,
                    });
                }
            }
        }
    }
}
