//! A whole chunk from the tiers below memory, one after the other: the disk, a peer, S3.

use std::sync::Arc;

use tokio::time::Instant;

use super::{ChunkFetch, NotRead, WholeFetch};
use crate::arena::SlotMut;
use crate::cache::gateway::bucket::TurnPosition;
use crate::cache::gateway::chunk::LoadedChunk;
use crate::cache::gateway::miss::Miss;
use crate::cache::peers::Asking;
use crate::format::Section;

impl ChunkFetch {
    /// `place`: of the first section; the others come after it. `peer`: the first to ask, and until when.
    pub async fn from_below(
        self: Arc<Self>,
        slot: SlotMut,
        sections: Arc<[Section]>,
        place: TurnPosition,
        peer: Option<(Asking, Instant)>,
    ) -> Result<LoadedChunk, Miss> {
        let (mut slot, mut absent) = (Some(slot), Miss::Absent);
        if self.tiers.is_on_disk(&self.cache_key(), Instant::now())
            && let Some(into) = slot.take()
        {
            match self.read_disk(into).await {
                Ok(chunk) => return Ok(chunk),
                Err(NotRead { slot: back, no_key }) => {
                    slot = back;
                    // Where S3 does not have it either, what the disk has tells more.
                    absent = no_key.map_or(Miss::Absent, Miss::NoKey);
                }
            }
        }
        if !self.tiers.asks_s3() {
            return Err(absent);
        }
        let another = || self.tiers.arena.try_reserve(self.space.layout().object_len());
        let mut slot = slot.or_else(another).ok_or(Miss::ArenaFull)?;
        if let Some((peer, until)) = peer {
            let mut next = Some(peer);
            while let Some(peer) = next {
                (slot, next) = match self.read_peer(peer, slot, place, until).await {
                    Ok(chunk) => return Ok(chunk),
                    Err(unread) => unread,
                };
            }
        }
        let place = |section| TurnPosition {
            position: place.position + section as u64,
            ..place
        };
        let fetched = WholeFetch::new(self, slot, &sections, place).fetch().await;
        fetched.map_err(|miss| match miss {
            Miss::Absent => absent,
            miss => miss,
        })
    }
}
