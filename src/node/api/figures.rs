//! What engines asked for and got: counted here, where their calls end, and shown by `metrics.rs`.

use crate::cache::gateway::{Lookup, Miss};
use crate::metrics::{Counts, Histogram};
use crate::node::Lent;
use crate::protocol::{ReservedChunk, Tier};

#[derive(Debug)]
pub struct Figures {
    /// Until the answer.
    pub lookup: Histogram,
    /// Until the first chunk that came, and until the last line.
    pub load_first: Histogram,
    pub load: Histogram,
    pub lookup_chunks: Counts,
    pub loaded_chunks: Counts,
    pub loaded_bytes: Counts,
    pub missed_chunks: Counts,
    pub reserved_chunks: Counts,
    pub committed_chunks: Counts,
}

pub(super) const TIERS: [&str; 4] = ["memory", "disk", "peer", "s3"];

impl Default for Figures {
    fn default() -> Self {
        Self {
            lookup: Histogram::default(),
            load_first: Histogram::default(),
            load: Histogram::default(),
            lookup_chunks: Counts::new(&["memory", "disk", "peer", "s3", "unknown", "absent"]),
            loaded_chunks: Counts::new(&TIERS),
            loaded_bytes: Counts::new(&TIERS),
            missed_chunks: Counts::new(Miss::CODES),
            reserved_chunks: Counts::new(&["reserved", "present", "pending", "full", "other_rank"]),
            committed_chunks: Counts::new(&["published", "share", "refused"]),
        }
    }
}

impl Figures {
    pub fn looked_up(&self, found: &Lookup) {
        let of = |tier| -> usize {
            let runs = found.tiers.iter().filter(|run| run.tier == tier);
            runs.map(|run| run.count).sum()
        };
        let tiers = [Tier::Memory, Tier::Disk, Tier::Peer, Tier::S3].map(|tier| (tier.word(), of(tier)));
        let there: usize = tiers.iter().map(|(_, chunks)| chunks).sum();
        let unknown = found.unknown.count();
        let absent = found.chunks.saturating_sub(there + unknown);
        for (word, chunks) in tiers
            .into_iter()
            .chain([("unknown", unknown), ("absent", absent)])
        {
            self.lookup_chunks.add(word, chunks as u64);
        }
    }

    /// A chunk, or a group of its layers. Chunks are counted once, with their first plane.
    pub fn loaded(&self, lent: &Lent) {
        let tier = lent.tier.word();
        self.loaded_chunks.add(tier, u64::from(lent.planes.0 == 0));
        self.loaded_bytes.add(tier, lent.bytes as u64);
    }

    pub fn reserved(&self, chunk: &ReservedChunk) {
        let word = match chunk {
            ReservedChunk::Slot { .. } => "reserved",
            ReservedChunk::Skip { skip } => skip,
        };
        self.reserved_chunks.add(word, 1);
    }
}
