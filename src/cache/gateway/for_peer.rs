//! What a node answers to a peer that asks for a chunk: from memory, from a fetch under way, or, for a chunk that several
//! ask for, from a fetch of its own. Never from another peer: so no two nodes wait for each other.

use std::sync::Arc;

use tokio::time::Instant;

use super::bucket::TurnPosition;
use super::chunk::LoadedChunk;
use super::fetch::ChunkFetch;
use super::lower::resident;
use super::tiers::{Flight, Tiers};
use crate::cache::peers::{Peers, Serving};
use crate::format::{ChunkHash, Protection, Space};

/// The answer to a peer.
pub enum ForPeer {
    Memory(LoadedChunk, Arc<Serving>),
    /// On its way here already.
    Arriving(Arc<Flight>, Arc<Serving>),
    /// On its way here for those that ask.
    Fetched(Arc<Flight>, Arc<Serving>),
    /// It is not here, or may not leave.
    UseS3,
    /// It would be here, or come, but there is no room for it now.
    Full,
}

/// Whether a peer that asks would be answered the chunk, now or soon. Is no use of it.
pub fn has_for_peer(tiers: &Tiers, peers: &Peers, space: &Space, chunk: &ChunkHash) -> bool {
    let key = (space.key(), *chunk);
    space.protection() != Protection::Encrypted
        && (tiers.memory.has(&key) || (tiers.arriving.join(&key).is_some() && !peers.is_asking(&key)))
}

/// `asker`: the peer's id.
pub fn for_peer(
    tiers: &Arc<Tiers>,
    peers: &Peers,
    space: &Space,
    chunk: &ChunkHash,
    asker: Option<&str>,
) -> ForPeer {
    // In memory they are plain.
    if space.protection() == Protection::Encrypted {
        return ForPeer::UseS3;
    }
    let (key, bytes) = ((space.key(), *chunk), space.layout().object_len());
    let is_hot = peers.is_hot(key, asker);
    if tiers.memory.has(&key) {
        let Some(serving) = peers.budget.spend(key, bytes) else {
            return ForPeer::Full;
        };
        // Its header may be still to come.
        let found = resident(tiers, space, chunk).filter(|found| found.object().is_some());
        return found.map_or(ForPeer::UseS3, |found| ForPeer::Memory(found, serving));
    }
    let flight = tiers.arriving.join(&key);
    // Looked at after joining: whoever asks a peer says so before others can join.
    if peers.is_asking(&key) || (flight.is_none() && !(is_hot && tiers.asks_s3())) {
        return ForPeer::UseS3;
    }
    let Some(serving) = peers.budget.spend(key, bytes) else {
        return ForPeer::Full;
    };
    if let Some(flight) = flight {
        return ForPeer::Arriving(flight, serving);
    }
    if tiers.bucket.missing(space, chunk).is_some() {
        return ForPeer::UseS3;
    }
    let Some(slot) = tiers.arena.try_reserve(bytes) else {
        return ForPeer::Full;
    };
    match tiers.arriving.announce(key) {
        Ok(announcement) => {
            let deadline = Instant::now() + tiers.options.load_deadline;
            let wanted = Arc::new(ChunkFetch::new(tiers, space, chunk, deadline));
            let sections = space.layout().sections(tiers.bucket.options.part_bytes).into();
            // In turn with the loads of this node, one of which may join it.
            let place = TurnPosition {
                load: tiers.bucket.get_turns.load(),
                position: 0,
            };
            let fetch = wanted.from_below(slot, sections, place, None);
            ForPeer::Fetched(announcement.fly(fetch), serving)
        }
        // Another call was faster.
        Err(flight) if !peers.is_asking(&key) => ForPeer::Arriving(flight, serving),
        Err(_) => ForPeer::UseS3,
    }
}
