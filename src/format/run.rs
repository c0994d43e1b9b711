//! Run hints: which chunks follow one in the prompt that it was stored for, as text that an object keeps as user metadata.
//!
//! They save a search questions, and prove nothing: the chunks may never have been stored, or be gone, and whoever may write
//! to the bucket may write any hint. A reader only asks elsewhere first.

use std::sync::Arc;

use super::hash::ChunkHash;

/// The name of the user metadata.
pub const RUN_KEY: &str = "kvgate-run";
/// Chunks in a hint, at most: 1,367 bytes of text. S3 allows 2 KiB for all user metadata of an object.
pub const RUN_CHUNKS_MAX: usize = 256;

/// How the text begins.
const VERSION: char = '1';
const BASE64: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

/// The chunks that follow one, each by the first 32 bits of its hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run(Arc<[[u8; 4]]>);

impl Run {
    pub fn of<'a>(following: impl IntoIterator<Item = &'a ChunkHash>) -> Self {
        let first = following.into_iter().take(RUN_CHUNKS_MAX);
        Self(first.map(fingerprint).collect())
    }

    /// How many of these chunks, from the first on, follow as the hint says.
    pub fn agrees(&self, following: &[ChunkHash]) -> usize {
        let mut pairs = self.0.iter().zip(following);
        let differ = pairs.position(|(said, chunk)| *said != fingerprint(chunk));
        differ.unwrap_or(self.0.len().min(following.len()))
    }

    /// The version, then Base64 without padding.
    pub fn text(&self) -> String {
        let bytes = self.0.as_flattened();
        let mut text = String::with_capacity(1 + bytes.len().div_ceil(3) * 4);
        text.push(VERSION);
        for three in bytes.chunks(3) {
            let at = |i| u32::from(*three.get(i).unwrap_or(&0));
            let bits = at(0) << 16 | at(1) << 8 | at(2);
            let letters =
                (0..=three.len()).map(|letter| char::from(BASE64[(bits >> (18 - 6 * letter) & 63) as usize]));
            text.extend(letters);
        }
        text
    }

    /// None: no hint of this version.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.strip_prefix(VERSION)?.as_bytes();
        if text.len() > (RUN_CHUNKS_MAX * 4 * 4).div_ceil(3) {
            return None;
        }
        let mut bytes = Vec::with_capacity(text.len());
        for four in text.chunks(4) {
            let mut bits = 0;
            for &letter in four {
                bits = bits << 6 | u32::from(value(letter)?);
            }
            bits <<= 6 * (4 - four.len());
            bytes.extend_from_slice(&bits.to_be_bytes()[1..four.len()]);
        }
        let (fingerprints, rest) = bytes.as_chunks();
        // A letter too many is 6 bits of nothing.
        (rest.is_empty() && text.len() % 4 != 1).then(|| Self(fingerprints.into()))
    }
}

fn fingerprint(chunk: &ChunkHash) -> [u8; 4] {
    let [a, b, c, d, ..] = chunk.0;
    [a, b, c, d]
}

fn value(letter: u8) -> Option<u8> {
    Some(match letter {
        b'A'..=b'Z' => letter - b'A',
        b'a'..=b'z' => letter - b'a' + 26,
        b'0'..=b'9' => letter - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn chunks(n: usize) -> Vec<ChunkHash> {
        (0..n)
            .map(|i| ChunkHash(*blake3::hash(&i.to_le_bytes()).as_bytes()))
            .collect()
    }

    #[test]
    fn a_hint_says_how_far_a_chain_agrees() {
        let chunks = chunks(300);
        let run = Run::of(&chunks);
        assert_eq!(run.agrees(&chunks), RUN_CHUNKS_MAX);
        assert_eq!(run.agrees(&chunks[..7]), 7);
        assert_eq!(run.agrees(&chunks[1..]), 0);
        let mut other = chunks.clone();
        other[40] = ChunkHash([0; 32]);
        assert_eq!(run.agrees(&other), 40);
        let last = Run::of([]);
        assert_eq!((last.agrees(&chunks), last.text().as_str()), (0, "1"));
    }

    #[test]
    fn the_longest_hint_leaves_room_for_other_metadata() {
        let text = Run::of(&chunks(RUN_CHUNKS_MAX)).text();
        assert_eq!(text.len(), 1367);
        assert!(Run::parse(&(text + "AAAAAA")).is_none());
    }

    #[test]
    fn what_is_no_hint_is_none() {
        for bad in [
            "",
            "0",
            "2AAAAAA",
            "1AAAAAA==",
            "1AAAAA",
            "1A",
            "1AAAAAA ",
            "1AAAAAAA",
            "1\u{e4}",
        ] {
            assert_eq!(Run::parse(bad), None, "{bad:?}");
        }
    }

    proptest! {
        #[test]
        fn text_there_and_back(n in 0_usize..RUN_CHUNKS_MAX) {
            let run = Run::of(&chunks(n));
            prop_assert_eq!(Run::parse(&run.text()), Some(run));
        }

        #[test]
        fn noise_never_panics(text in "1[A-Za-z0-9+/=]{0,40}|.{0,40}") {
            let _ = Run::parse(&text);
        }
    }
}
