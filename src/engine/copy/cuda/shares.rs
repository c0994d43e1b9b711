//! A rank's share of each plane, cut into pieces that fit a staging buffer.

use std::ops::Range;

use super::dma::PinnedBlock;
use super::gpu::CudaError;
use super::kernel::{PartRow, tiles};
use crate::engine::copy::cache::PagedCache;
use crate::protocol::TokenShare;

/// This rank's share of one plane: heads that are side by side in the object, so one run of bytes. Of these the rank may
/// have some tokens only.
#[derive(Debug, Clone)]
pub(super) struct PlaneRun {
    /// Offset in the object.
    pub object: usize,
    pub bytes: usize,
    pub row_bytes: usize,
    /// Offset in the shares of all planes one after the other, each at a multiple of [`ALIGN`].
    pub offset: usize,
    /// Parts of the cache.
    pub parts: Range<usize>,
}

/// All shares of a cache, and its parts as the kernel reads them.
pub(super) struct KernelShares {
    pub all: Vec<PlaneRun>,
    pub rows: Vec<PartRow>,
    /// Bytes of an access.
    pub unit: u32,
    tokens: TokenShare,
}

/// Neighbouring shares that are copied together.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub shares: Range<usize>,
    pub parts: Range<usize>,
    pub bytes: usize,
}

/// Alignment in staging, so that rows can be read 16 bytes at a time after any share.
const ALIGN: usize = 16;

impl KernelShares {
    pub fn new(cache: &PagedCache) -> Result<Self, CudaError> {
        let (space, parts) = (cache.space(), cache.parts());
        let chunk_tokens = space.chunk_rows();
        let mut shares = Self {
            all: Vec::new(),
            rows: Vec::with_capacity(parts.len()),
            unit: 16,
            tokens: cache.tokens(),
        };
        let (mut first, mut offset) = (0, 0_usize);
        for of_share in parts.chunk_by(|one, other| (one.plane, one.heads) == (other.plane, other.heads)) {
            let (plane, heads) = (of_share[0].plane, of_share[0].heads);
            let row_bytes = space.planes()[plane].row_bytes;
            let of_head = row_bytes as usize * chunk_tokens as usize;
            let bytes = (heads.1 - heads.0) as usize * of_head;
            for part in of_share {
                let row = PartRow::new(part, row_bytes, offset as u64);
                shares.unit = shares.unit.min(row.unit());
                if row.units(chunk_tokens, 1).is_none() {
                    return Err(CudaError::TooLarge(format!(
                        "plane {plane} has {bytes} bytes a chunk for this rank, and less than 2 GiB are possible: use a smaller chunk_tokens"
                    )));
                }
                shares.rows.push(row);
            }
            shares.all.push(PlaneRun {
                object: space.layout().plane(plane).start + heads.0 as usize * of_head,
                bytes,
                row_bytes: row_bytes as usize,
                offset,
                parts: first..first + of_share.len(),
            });
            first += of_share.len();
            offset = (offset + bytes).next_multiple_of(ALIGN);
        }
        Ok(shares)
    }

    /// The least size of a staging buffer.
    pub fn largest(&self) -> usize {
        self.all.iter().map(|share| share.bytes).max().unwrap_or_default()
    }

    /// The shares of these parts in pieces of at most `piece_bytes`, or of one share.
    pub fn pieces(&self, parts: &Range<usize>, piece_bytes: usize) -> Vec<Piece> {
        let before = |part| self.all.partition_point(|share| share.parts.start < part);
        let mut pieces: Vec<Piece> = Vec::new();
        for index in before(parts.start)..before(parts.end) {
            let share = &self.all[index];
            let end = share.offset + share.bytes;
            match pieces.last_mut() {
                Some(piece) if end - self.all[piece.shares.start].offset <= piece_bytes => {
                    piece.bytes = end - self.all[piece.shares.start].offset;
                    piece.shares.end = index + 1;
                    piece.parts.end = share.parts.end;
                }
                _ => pieces.push(Piece {
                    shares: index..index + 1,
                    parts: share.parts.clone(),
                    bytes: share.bytes,
                }),
            }
        }
        pieces
    }

    /// The DMA blocks of a piece, between the object, whose byte `at` is at address `host`, and `staging`.
    pub fn blocks(&self, piece: &Piece, host: usize, at: usize, staging: u64) -> Vec<PinnedBlock> {
        let shares = &self.all[piece.shares.clone()];
        let start = shares[0].offset;
        let mut blocks: Vec<PinnedBlock> = Vec::new();
        for share in shares {
            let host = host + share.object - at;
            let device = staging + (share.offset - start) as u64;
            if !self.tokens.is_all() {
                blocks.push(share.runs(self.tokens, host, device));
                continue;
            }
            let taken = blocks
                .last_mut()
                .is_some_and(|last| last.take_row(host, device, share.bytes));
            if !taken {
                blocks.push(PinnedBlock {
                    host,
                    host_pitch: share.bytes,
                    device,
                    device_pitch: share.bytes,
                    row_bytes: share.bytes,
                    rows: 1,
                });
            }
        }
        blocks
    }

    /// Tiles of one pair of part and span, at most, for spans of at most `span_tokens` tokens.
    pub fn tiles(&self, parts: &Range<usize>, span_tokens: u32) -> u32 {
        let of = |row: &PartRow| row.units(span_tokens, self.unit).map_or(0, tiles);
        self.rows[parts.clone()].iter().map(of).max().unwrap_or_default()
    }
}

impl PlaneRun {
    /// Its runs of tokens: the bytes between them are other ranks'. Each head has as many, so they are at one distance
    /// over all heads.
    fn runs(&self, tokens: TokenShare, host: usize, device: u64) -> PinnedBlock {
        let run = tokens.interleave as usize * self.row_bytes;
        let pitch = tokens.size as usize * run;
        let first = tokens.rank as usize * run;
        PinnedBlock {
            host: host + first,
            host_pitch: pitch,
            device: device + first as u64,
            device_pitch: pitch,
            row_bytes: run,
            rows: self.bytes / pitch,
        }
    }
}

impl PinnedBlock {
    /// Takes the row into this block if it is the block's next one; returns whether it did.
    fn take_row(&mut self, host: usize, device: u64, bytes: usize) -> bool {
        if bytes != self.row_bytes {
            return false;
        }
        if self.rows == 1 {
            self.host_pitch = host - self.host;
            self.device_pitch = (device - self.device) as usize;
        }
        let follows = host == self.host + self.rows * self.host_pitch
            && device == self.device + (self.rows * self.device_pitch) as u64;
        self.rows += usize::from(follows);
        follows
    }
}
