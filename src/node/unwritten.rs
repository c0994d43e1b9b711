//! The check whether a rank wrote its share of a slot at all.
//!
//! A slot holds older bytes, and a process that never mapped the arena can still send a commit. So random marks go
//! into each rank's share before the slot is given out, at both ends of each run that it owns, and a commit finds
//! none of them left: a process that has the arena mapped wrote those bytes. A mark is 128 random bits, so no KV
//! looks like it.
//!
//! Not here: a check that the written bytes are right. Engines of one daemon trust each other.

use crate::protocol::Share;
use std::ops::Range;

use crate::format::Space;

/// Bytes of a mark. A run that is shorter has a shorter one.
const MARK_BYTES: usize = 16;

/// The marks of one slot.
pub struct Marks([u8; MARK_BYTES]);

impl Marks {
    /// Puts marks into the shares of a payload.
    pub fn put<'a>(payload: &mut [u8], space: &Space, shares: impl Iterator<Item = &'a Share>) -> Self {
        let marks = Self(fastrand::u128(..).to_le_bytes());
        for at in shares.flat_map(|share| places(space, share)) {
            let mark = &marks.0[..at.len()];
            payload[at].copy_from_slice(mark);
        }
        marks
    }

    /// Whether no mark is left in a rank's shares.
    pub fn are_gone(&self, payload: &[u8], space: &Space, shares: &[Share]) -> bool {
        let mut places = shares.iter().flat_map(|share| places(space, share));
        places.all(|at| payload[at.clone()] != self.0[..at.len()])
    }
}

/// The ranges of a share's marks in the payload: at both ends of what it has of each plane, which is
/// `[head][token][row]`.
fn places(space: &Space, share: &Share) -> impl Iterator<Item = Range<usize>> {
    let layout = space.layout();
    let (first, end) = share.heads;
    let planes = share.planes.0..share.planes.1;
    let tokens = share.tokens;
    planes.flat_map(move |plane| {
        let bytes = layout.plane(plane);
        let start = bytes.start - layout.header_len();
        let head_bytes = bytes.len() / space.planes()[plane].heads as usize;
        let mut run = start + first as usize * head_bytes..start + end as usize * head_bytes;
        let mut mark = MARK_BYTES.min(run.len());
        if !tokens.is_all() {
            // Other ranks' tokens are before the first of its runs, between them and after the last.
            let of_run = tokens.interleave as usize * space.planes()[plane].row_bytes as usize;
            run.start += tokens.rank as usize * of_run;
            run.end -= (tokens.size - 1 - tokens.rank) as usize * of_run;
            mark = mark.min(of_run);
        }
        let ends = [run.start..run.start + mark, run.end - mark..run.end];
        // They must not overlap, or the second would spoil the first.
        let count = if run.len() >= 2 * mark { 2 } else { 1 };
        ends.into_iter().take(count)
    })
}
