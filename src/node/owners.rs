//! The bytes of a chunk that each rank writes: each range has one owner, the lowest rank that has it.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::ledger::Rank;
use crate::format::{Plane, Space};
use crate::protocol::Share;

/// A rank's share of the model.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Has {
    /// Half-open, in the whole model's numbering: a pipeline stage. None: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<(u32, u32)>,
    /// Tensor-parallel rank and size. None: all heads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tp: Option<(u32, u32)>,
}

/// Some bytes would have no owner.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no rank has head {head} of plane {plane} (layer {layer}): check the `layers` and `tp` that the ranks attached with"
)]
pub struct Uncovered {
    pub plane: usize,
    pub layer: u32,
    pub head: u32,
}

impl Has {
    /// Number of ranks that heads are cut for.
    pub fn tp_size(&self) -> u32 {
        self.tp.map_or(1, |(_, size)| size)
    }

    /// The heads that this rank has of a plane. Ranks cut heads into equal runs. Where there are fewer heads than ranks,
    /// neighbours have the same one.
    fn heads_of(&self, plane: &Plane) -> Range<u32> {
        let (first, end) = self.layers.unwrap_or((0, u32::MAX));
        if !(first..end).contains(&plane.layer) {
            return 0..0;
        }
        let (rank, size) = self.tp.unwrap_or((0, 1));
        let cut = |rank: u64| {
            let head = rank * u64::from(plane.heads) / u64::from(size.max(1));
            u32::try_from(head).unwrap_or(plane.heads)
        };
        let first = cut(rank.into());
        first..cut(u64::from(rank) + 1).max(first + 1)
    }
}

/// By rank, for those that own anything.
pub type Shares = BTreeMap<Rank, Vec<Share>>;

/// The shares of all ranks that own anything.
pub fn shares(space: &Space, ranks: &BTreeMap<Rank, Has>) -> Result<Shares, Uncovered> {
    let mut shares = Shares::new();
    for (plane, of) in space.planes().iter().enumerate() {
        // Half-open ranges of heads that have no owner so far.
        let mut open: Vec<Range<u32>> = std::iter::once(0..of.heads).collect();
        for (&rank, has) in ranks {
            let heads = has.heads_of(of);
            let mut left = Vec::with_capacity(open.len() + 1);
            for range in open {
                let own = range.start.max(heads.start)..range.end.min(heads.end);
                if own.is_empty() {
                    left.push(range);
                    continue;
                }
                let rest = [range.start..own.start, own.end..range.end];
                left.extend(rest.into_iter().filter(|range| !range.is_empty()));
                let of_rank = shares.entry(rank).or_default();
                match of_rank.last_mut() {
                    // The same heads of the plane before.
                    Some(last) if last.planes.1 == plane && last.heads == (own.start, own.end) => {
                        last.planes.1 += 1;
                    }
                    _ => of_rank.push(Share {
                        planes: (plane, plane + 1),
                        heads: (own.start, own.end),
                    }),
                }
            }
            open = left;
        }
        if let Some(range) = open.first() {
            return Err(Uncovered {
                plane,
                layer: of.layer,
                head: range.start,
            });
        }
    }
    Ok(shares)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn space(planes: &str) -> Space {
        Space::from_json(&format!(
            r#"{{"model": "m", "revision": "1", "dtype": "float16", "chunk_tokens": 16, {planes}}}"#
        ))
        .unwrap()
    }

    type Pair = Option<(u32, u32)>;

    /// Ranks that have these layers, and are this one of so many.
    fn ranks(of: &[(Pair, Pair)]) -> BTreeMap<Rank, Has> {
        let has = of.iter().map(|&(layers, tp)| Has { layers, tp });
        (0..).zip(has).collect()
    }

    fn tp(size: u32) -> BTreeMap<Rank, Has> {
        let of: Vec<_> = (0..size).map(|rank| (None, Some((rank, size)))).collect();
        ranks(&of)
    }

    /// A rank, its planes and its heads.
    type Owned = (Rank, (usize, usize), (u32, u32));

    /// One share for each rank that owns anything.
    fn owned<const N: usize>(shares: [Owned; N]) -> BTreeMap<Rank, Vec<Share>> {
        shares
            .map(|(rank, planes, heads)| (rank, vec![Share { planes, heads }]))
            .into()
    }

    #[test]
    fn each_rank_owns_its_heads() {
        let space = space(r#""mha": {"layers": 3, "heads": 4, "head_dim": 8}"#);
        assert_eq!(
            shares(&space, &tp(2)).unwrap(),
            owned([(0, (0, 3), (0, 2)), (1, (0, 3), (2, 4))])
        );
        assert_eq!(
            shares(&space, &tp(3)).unwrap(),
            owned([(0, (0, 3), (0, 1)), (1, (0, 3), (1, 2)), (2, (0, 3), (2, 4))]),
            "no head is left out"
        );
    }

    #[test]
    fn a_range_that_several_have_is_the_lowest_rank_s() {
        let space = space(r#""mha": {"layers": 2, "heads": 2, "head_dim": 8}"#);
        assert_eq!(
            shares(&space, &tp(4)).unwrap(),
            owned([(0, (0, 2), (0, 1)), (2, (0, 2), (1, 2))])
        );
        // Each rank has everything: context parallel.
        let all = ranks(&[(None, Some((0, 1))), (None, Some((0, 1)))]);
        assert_eq!(shares(&space, &all).unwrap(), owned([(0, (0, 2), (0, 2))]));
    }

    #[test]
    fn a_latent_is_the_first_ranks() {
        let space = space(r#""mla": {"layers": 2, "latent_dim": 32}"#);
        assert_eq!(shares(&space, &tp(16)).unwrap(), owned([(0, (0, 2), (0, 1))]));
    }

    #[test]
    fn each_rank_owns_its_part_of_a_state_and_the_first_a_replicated_one() {
        let space = space(
            r#""kind": "state", "planes": [
                {"name": "state", "layer": 0, "heads": 2, "row_bytes": 4096},
                {"name": "replicated", "layer": 1, "heads": 1, "row_bytes": 64},
                {"name": "state", "layer": 2, "heads": 2, "row_bytes": 4096}]"#,
        );
        let share = |planes, heads| Share { planes, heads };
        assert_eq!(
            shares(&space, &tp(2)).unwrap(),
            BTreeMap::from([
                (0, vec![share((0, 3), (0, 1))]),
                (1, vec![share((0, 1), (1, 2)), share((2, 3), (1, 2))]),
            ])
        );
    }

    #[test]
    fn one_session_has_heads_of_each_space() {
        let full = space(r#""mha": {"layers": 2, "heads": 8, "head_dim": 8}"#);
        let window = space(r#""kind": {"window": 32}, "mha": {"layers": 2, "heads": 2, "head_dim": 8}"#);
        let four = tp(4);
        assert_eq!(shares(&full, &four).unwrap()[&3][0].heads, (6, 8));
        assert_eq!(
            shares(&window, &four).unwrap(),
            owned([(0, (0, 2), (0, 1)), (2, (0, 2), (1, 2))])
        );
    }

    #[test]
    fn stages_of_ranks_own_their_heads_of_their_layers() {
        let space = space(r#""mha": {"layers": 4, "heads": 2, "head_dim": 8}"#);
        let grid = ranks(&[
            (Some((0, 3)), Some((0, 2))),
            (Some((0, 3)), Some((1, 2))),
            (Some((3, 4)), Some((0, 2))),
            (Some((3, 4)), Some((1, 2))),
        ]);
        assert_eq!(
            shares(&space, &grid).unwrap(),
            owned([
                (0, (0, 3), (0, 1)),
                (1, (0, 3), (1, 2)),
                (2, (3, 4), (0, 1)),
                (3, (3, 4), (1, 2))
            ])
        );
    }

    proptest! {
        #[test]
        fn every_head_has_one_owner(heads in 1_u32..40, size in 1_u32..40) {
            let space = space(&format!(r#""mha": {{"layers": 1, "heads": {heads}, "head_dim": 1}}"#));
            let mut owned: Vec<u32> = shares(&space, &tp(size)).unwrap().values().flatten()
                .flat_map(|share| share.heads.0..share.heads.1).collect();
            owned.sort_unstable();
            prop_assert_eq!(owned, (0..heads).collect::<Vec<_>>());
        }
    }

    #[test]
    fn stages_own_their_layers_and_a_gap_is_told() {
        let space = space(r#""mha": {"layers": 4, "heads": 2, "head_dim": 8}"#);
        let stages = ranks(&[(Some((0, 2)), None), (Some((2, 4)), None)]);
        assert_eq!(shares(&space, &stages).unwrap()[&1][0].planes, (2, 4));
        let gap = ranks(&[(Some((0, 2)), None), (Some((3, 4)), None)]);
        assert_eq!(shares(&space, &gap).unwrap_err().layer, 2);
    }
}
