//! The bytes of a chunk that each rank writes: each range has one owner, the lowest rank that has it.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::ledger::Rank;
use crate::format::Space;
use crate::protocol::Share;

/// A rank's share of the model: half-open ranges in the whole model's numbering; None: all.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Has {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<(u32, u32)>,
    /// KV heads. A plane with one head is on every rank that has its layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heads: Option<(u32, u32)>,
}

/// Some bytes would have no owner.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no rank has head {head} of plane {plane} (layer {layer}): check the layers and heads that the ranks attached with"
)]
pub struct Uncovered {
    pub plane: usize,
    pub layer: u32,
    pub head: u32,
}

impl Has {
    fn heads_of(&self, layer: u32, heads: u32) -> Range<u32> {
        let (first, end) = self.layers.unwrap_or((0, u32::MAX));
        if !(first..end).contains(&layer) {
            return 0..0;
        }
        match self.heads {
            Some((first, end)) if heads > 1 => first.min(heads)..end.min(heads),
            _ => 0..heads,
        }
    }
}

/// The shares of all ranks that own anything.
pub fn shares(space: &Space, ranks: &BTreeMap<Rank, Has>) -> Result<BTreeMap<Rank, Vec<Share>>, Uncovered> {
    let mut shares: BTreeMap<Rank, Vec<Share>> = BTreeMap::new();
    for (plane, of) in space.planes().iter().enumerate() {
        // Half-open ranges of heads that have no owner so far.
        let mut open: Vec<Range<u32>> = std::iter::once(0..of.heads).collect();
        for (&rank, has) in ranks {
            let heads = has.heads_of(of.layer, of.heads);
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

    fn space(planes: &str) -> Space {
        Space::from_json(&format!(
            r#"{{"model": "m", "revision": "1", "dtype": "float16", "chunk_tokens": 16, {planes}}}"#
        ))
        .unwrap()
    }

    type Part = Option<(u32, u32)>;

    fn ranks(of: &[(Part, Part)]) -> BTreeMap<Rank, Has> {
        let has = of.iter().map(|&(layers, heads)| Has { layers, heads });
        (0..).zip(has).collect()
    }

    #[test]
    fn each_rank_owns_its_heads() {
        let space = space(r#""mha": {"layers": 3, "heads": 4, "head_dim": 8}"#);
        let shares = shares(&space, &ranks(&[(None, Some((0, 2))), (None, Some((2, 4)))])).unwrap();
        let share = |heads| {
            vec![Share {
                planes: (0, 3),
                heads,
            }]
        };
        assert_eq!(shares, BTreeMap::from([(0, share((0, 2))), (1, share((2, 4)))]));
    }

    #[test]
    fn a_range_that_several_have_is_the_lowest_rank_s() {
        let space = space(r#""mha": {"layers": 2, "heads": 2, "head_dim": 8}"#);
        let four = ranks(&[
            (None, Some((0, 1))),
            (None, Some((0, 1))),
            (None, Some((1, 2))),
            (None, Some((1, 2))),
        ]);
        let owners: Vec<Rank> = shares(&space, &four).unwrap().into_keys().collect();
        assert_eq!(owners, [0, 2]);
    }

    #[test]
    fn a_latent_is_the_first_ranks() {
        let space = space(r#""mla": {"layers": 2, "latent_dim": 32}"#);
        let two = ranks(&[(None, Some((0, 8))), (None, Some((8, 16)))]);
        assert_eq!(shares(&space, &two).unwrap().into_keys().collect::<Vec<_>>(), [0]);
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
