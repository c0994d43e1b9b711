//! KV bytes made from a prefix: as in real KV, a token's bytes depend on every token up to it, on plane and head.

use super::paged::DemoPages;

/// Odd, with bits spread evenly: the golden ratio.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
const OTHER: u64 = 0xe703_7ed1_a0b4_28db;

/// The result of comparing pages with the expected bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Comparison {
    pub bytes: u64,
    pub different_bytes: u64,
    pub first: Option<Position>,
}

/// A byte of a chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Position {
    pub plane: usize,
    pub head: usize,
    /// The token in the chunk; a state has one row.
    pub row: usize,
    pub row_byte: usize,
}

/// Both halves of the 128-bit product: one multiplication mixes all bits (as wyhash does).
#[expect(
    clippy::cast_possible_truncation,
    reason = "the two halves are what is wanted"
)]
fn fold(a: u64, b: u64) -> u64 {
    let product = u128::from(a) * u128::from(b);
    product as u64 ^ (product >> 64) as u64
}

pub(super) fn mix(state: u64, value: u64) -> u64 {
    fold(state ^ STEP, value.wrapping_add(OTHER)).wrapping_add(state.rotate_left(23))
}

/// One state for each token: a hash of the seed, all tokens before it, and the token.
pub(super) fn prefix_states(seed: u64, tokens: &[u32]) -> Vec<u64> {
    let next = |state: &mut u64, token: &u32| {
        *state = mix(*state, u64::from(*token));
        Some(*state)
    };
    tokens.iter().scan(mix(seed, 0), next).collect()
}

/// The rows of some tokens for one head of one plane.
fn fill_rows(states: &[u64], plane: usize, head: usize, rows: &mut [u8]) {
    let row_bytes = rows.len() / states.len();
    for (state, row) in states.iter().zip(rows.chunks_exact_mut(row_bytes)) {
        let mut word = mix(mix(*state, plane as u64), head as u64);
        let mut next = || {
            word = word.wrapping_add(STEP);
            fold(word, word ^ OTHER).to_le_bytes()
        };
        let mut words = row.chunks_exact_mut(8);
        words.by_ref().for_each(|eight| eight.copy_from_slice(&next()));
        let rest = words.into_remainder();
        rest.copy_from_slice(&next()[..rest.len()]);
    }
}

/// "Prefill": writes the KV of a chunk into its pages. `states`: the prefix states of its rows.
pub(super) fn generate(pages: &mut DemoPages, place: usize, states: &[u64]) {
    let block_rows = pages.block_rows();
    let blocks = pages.blocks(place).to_vec();
    for plane in 0..pages.planes() {
        for (block, states) in blocks.iter().zip(states.chunks(block_rows)) {
            for head in 0..pages.heads(plane) {
                let number = pages.number(plane);
                fill_rows(states, number, head, pages.page_mut(plane, *block, head));
            }
        }
    }
}

/// Whether a chunk's pages hold what [`generate`] would write.
pub(super) fn compare(pages: &DemoPages, place: usize, states: &[u64]) -> Comparison {
    let block_rows = pages.block_rows();
    let mut result = Comparison::default();
    let mut expected = Vec::new();
    for plane in 0..pages.planes() {
        let blocks = pages.blocks(place).iter().zip(states.chunks(block_rows));
        for (index, (block, states)) in blocks.enumerate() {
            for head in 0..pages.heads(plane) {
                let page = pages.page(plane, *block, head);
                expected.resize(page.len(), 0);
                fill_rows(states, pages.number(plane), head, &mut expected);
                result.bytes += page.len() as u64;
                if page == expected {
                    continue;
                }
                let different: Vec<usize> = (0..page.len()).filter(|&i| page[i] != expected[i]).collect();
                result.different_bytes += different.len() as u64;
                let row_bytes = page.len() / block_rows;
                result.first = result.first.or(different.first().map(|at| Position {
                    plane,
                    head,
                    row: index * block_rows + at / row_bytes,
                    row_byte: at % row_bytes,
                }));
            }
        }
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::copy::CpuOptions;
    use crate::format::Space;

    fn row(states: &[u64], token: usize, plane: usize, head: usize) -> Vec<u8> {
        let mut rows = vec![0; 21 * states.len()];
        fill_rows(states, plane, head, &mut rows);
        rows[21 * token..][..21].to_vec()
    }

    #[test]
    fn kv_depends_on_the_whole_prefix_on_plane_and_head() {
        let tokens: Vec<u32> = (0..64).collect();
        let states = prefix_states(1, &tokens);
        let last = row(&states, 63, 2, 3);
        for changed in 0..64 {
            let mut other = tokens.clone();
            other[changed] += 1;
            let other = prefix_states(1, &other);
            assert_ne!(row(&other, 63, 2, 3), last, "token {changed}");
            assert_eq!(other[..changed], states[..changed], "not on what follows");
        }
        for other in [
            row(&states, 62, 2, 3),
            row(&states, 63, 3, 3),
            row(&states, 63, 2, 2),
            row(&states, 63, 3, 2),
        ] {
            assert_ne!(other, last);
        }
        assert_ne!(row(&prefix_states(2, &tokens), 63, 2, 3), last, "the seed");
        assert_eq!(row(&prefix_states(1, &tokens), 63, 2, 3), last);
        assert_ne!(last[..8], last[8..16]);
    }

    #[test]
    fn compare_finds_the_byte() {
        let space = Space::from_json(
            r#"{"model": "m", "revision": "1", "dtype": "int8", "chunk_tokens": 12, "planes": [
                {"name": "kv", "layer": 0, "heads": 2, "row_bytes": 21},
                {"name": "kv", "layer": 1, "heads": 3, "row_bytes": 8}]}"#,
        );
        let options = CpuOptions {
            threads: 1,
            bytes_per_thread: 1,
        };
        let mut pages = DemoPages::new(&space.unwrap(), 2, 4, options).unwrap();
        pages.shuffle(&mut fastrand::Rng::with_seed(1));
        let states = prefix_states(1, &[5; 12]);
        generate(&mut pages, 1, &states);
        let bytes = 12 * (2 * 21 + 3 * 8);
        let equal = Comparison {
            bytes,
            ..Comparison::default()
        };
        assert_eq!(compare(&pages, 1, &states), equal);
        assert_ne!(
            compare(&pages, 0, &states).different_bytes,
            0,
            "another chunk's pages"
        );
        let block = pages.blocks(1)[0];
        pages.page_mut(1, block, 2)[6 * 8 + 5] ^= 1;
        pages.page_mut(1, block, 0)[9 * 8] ^= 1;
        let found = compare(&pages, 1, &states);
        assert_eq!((found.bytes, found.different_bytes), (bytes, 2));
        let first = Position {
            plane: 1,
            head: 0,
            row: 9,
            row_byte: 0,
        };
        assert_eq!(found.first, Some(first));
        pages.page_mut(1, block, 0)[9 * 8] ^= 1;
        let first = Position {
            plane: 1,
            head: 2,
            row: 6,
            row_byte: 5,
        };
        assert_eq!(compare(&pages, 1, &states).first, Some(first));
    }
}
