//! The content of the objects: one block of 1 MiB repeated, each copy stamped with its object and offset. So any
//! byte's origin can be told, and the digest of a part is combined from digests without touching its bytes.

use std::ops::Range;

use crc_fast::{CrcAlgorithm, Digest, checksum};

use crate::format::Append;

const CRC: CrcAlgorithm = CrcAlgorithm::Crc64Nvme;
const BLOCK: usize = 1 << 20;
const MAGIC: [u8; 8] = *b"kvgbench";
/// Bytes of a stamp: magic, object, offset.
const STAMP: usize = 24;

pub(super) struct Content {
    block: Box<[u8]>,
    /// Digest of the block without its stamp.
    rest_crc: u64,
    after_stamp: Append,
    whole_block: Append,
}

impl Content {
    pub fn new() -> Self {
        let mut block = vec![0; BLOCK].into_boxed_slice();
        blake3::Hasher::new()
            .update(b"kvgate bench")
            .finalize_xof()
            .fill(&mut block);
        Self {
            rest_crc: checksum(CRC, &block[STAMP..]),
            after_stamp: Append::new(BLOCK - STAMP),
            whole_block: Append::new(BLOCK),
            block,
        }
    }

    /// Fills in everything but the stamps; `bytes` are the object's first.
    pub fn fill(&self, bytes: &mut [u8]) {
        for block in bytes.chunks_mut(BLOCK) {
            block.copy_from_slice(&self.block[..block.len()]);
        }
    }

    /// Stamps bytes from [`fill`](Self::fill) as this object's.
    pub fn stamp(object: u64, bytes: &mut [u8]) {
        for (index, block) in bytes.chunks_mut(BLOCK).enumerate() {
            let stamp = stamp(object, (index * BLOCK) as u64);
            let len = block.len().min(STAMP);
            block[..len].copy_from_slice(&stamp[..len]);
        }
    }

    /// The digest that `range` of an object must have.
    pub fn crc(&self, object: u64, range: Range<u64>) -> u64 {
        let mut crc = checksum(CRC, &[]);
        for (at, len) in pieces(range) {
            let stamp = stamp(object, at - at % BLOCK as u64);
            let start = usize::try_from(at % BLOCK as u64).unwrap_or_default();
            crc = if len == BLOCK {
                let whole = self.after_stamp.sum(checksum(CRC, &stamp), self.rest_crc);
                self.whole_block.sum(crc, whole)
            } else {
                let (of_stamp, of_block) = (
                    start.min(STAMP)..STAMP.min(start + len),
                    start.max(STAMP)..start + len,
                );
                let mut digest = Digest::new_with_init_state(CRC, !crc);
                digest.update(&stamp[of_stamp]);
                digest.update(self.block.get(of_block).unwrap_or_default());
                digest.finalize()
            };
        }
        crc
    }

    /// The first wrong byte of `bytes`, which begin at `at` of the object, and the origin that the stamp of its
    /// block gives.
    pub fn first_difference(&self, object: u64, at: u64, bytes: &[u8]) -> Option<(u64, Option<(u64, u64)>)> {
        let mut expected = Vec::new();
        for (piece_at, len) in pieces(at..at + bytes.len() as u64) {
            let from = usize::try_from(piece_at - at).ok()?;
            let piece = &bytes[from..from + len];
            expected.resize(len, 0);
            self.generate(object, piece_at, &mut expected);
            if let Some(different) = expected.iter().zip(piece).position(|(a, b)| a != b) {
                let whose = piece_at.is_multiple_of(BLOCK as u64).then(|| read_stamp(piece));
                return Some((piece_at + different as u64, whose.flatten()));
            }
        }
        None
    }

    /// The bytes from `at` on, all in one block.
    fn generate(&self, object: u64, at: u64, bytes: &mut [u8]) {
        let start = usize::try_from(at % BLOCK as u64).unwrap_or_default();
        bytes.copy_from_slice(&self.block[start..start + bytes.len()]);
        if start < STAMP {
            let stamp = stamp(object, at - start as u64);
            let len = bytes.len().min(STAMP - start);
            bytes[..len].copy_from_slice(&stamp[start..start + len]);
        }
    }
}

/// Cuts a range of an object where its blocks begin: offset and length of each piece.
fn pieces(range: Range<u64>) -> impl Iterator<Item = (u64, usize)> {
    let mut at = range.start;
    std::iter::from_fn(move || {
        let end = (at / BLOCK as u64 + 1) * BLOCK as u64;
        let piece = (at, usize::try_from(end.min(range.end).checked_sub(at)?).ok()?);
        at += piece.1 as u64;
        (piece.1 > 0).then_some(piece)
    })
}

fn stamp(object: u64, offset: u64) -> [u8; STAMP] {
    let mut stamp = [0; STAMP];
    stamp[..8].copy_from_slice(&MAGIC);
    stamp[8..16].copy_from_slice(&object.to_le_bytes());
    stamp[16..].copy_from_slice(&offset.to_le_bytes());
    stamp
}

/// Object and offset of a stamp.
fn read_stamp(block: &[u8]) -> Option<(u64, u64)> {
    let rest = block.strip_prefix(&MAGIC)?;
    let (object, rest) = rest.split_first_chunk()?;
    let (offset, _) = rest.split_first_chunk()?;
    Some((u64::from_le_bytes(*object), u64::from_le_bytes(*offset)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn object(content: &Content, number: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        content.fill(&mut bytes);
        Content::stamp(number, &mut bytes);
        bytes
    }

    #[test]
    fn digests_are_those_of_the_bytes() {
        let content = Content::new();
        let len = 3 * BLOCK + 777;
        let bytes = object(&content, 5, len);
        for range in [
            0..len,
            0..BLOCK,
            BLOCK..3 * BLOCK,
            0..1,
            0..STAMP,
            3..9,
            BLOCK - 1..BLOCK + 1,
            BLOCK + 7..2 * BLOCK + STAMP - 1,
            3 * BLOCK..len,
            3 * BLOCK + 700..len,
        ] {
            let expected = checksum(CRC, &bytes[range.clone()]);
            let wide = range.start as u64..range.end as u64;
            assert_eq!(content.crc(5, wide.clone()), expected, "{range:?}");
            let other = content.crc(6, wide);
            let stamped = pieces(range.start as u64..range.end as u64)
                .any(|(at, len)| (at..at + len as u64).contains(&(at / BLOCK as u64 * BLOCK as u64 + 8)));
            assert_eq!(
                other != expected,
                stamped,
                "{range:?}: the numbers differ in one byte"
            );
        }
        // An object shorter than its stamp.
        assert_eq!(content.crc(5, 0..11), checksum(CRC, &object(&content, 5, 11)));
    }

    #[test]
    fn a_wrong_byte_is_found_and_a_wrong_block_names_itself() {
        let content = Content::new();
        let mut bytes = object(&content, 5, 2 * BLOCK);
        assert_eq!(content.first_difference(5, 0, &bytes), None);
        bytes[BLOCK + 99] ^= 1;
        let (at, whose) = content.first_difference(5, 0, &bytes).unwrap();
        assert_eq!((at, whose), (BLOCK as u64 + 99, Some((5, BLOCK as u64))));
        let other = object(&content, 6, 2 * BLOCK);
        let (at, whose) = content
            .first_difference(5, BLOCK as u64, &other[BLOCK..])
            .unwrap();
        assert_eq!((at, whose), (BLOCK as u64 + 8, Some((6, BLOCK as u64))));
        let found = content.first_difference(5, 10, &other[10..BLOCK + 10]);
        assert_eq!(found, Some((BLOCK as u64 + 8, None)), "a stamp that was cut off");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(32))]
        #[test]
        fn any_cut_gives_the_same_digest(from in 0_usize..2_200_000, len in 0_usize..1_500_000, number: u64) {
            let content = Content::new();
            let bytes = object(&content, number, from + len);
            let range = from as u64..(from + len) as u64;
            prop_assert_eq!(content.crc(number, range), checksum(CRC, &bytes[from..]));
        }
    }
}
