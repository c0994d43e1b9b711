//! The bytes of a chunk that each rank writes: each row has one owner, the lowest rank that has it.

use std::collections::BTreeMap;
use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::ledger::Rank;
use crate::format::{Plane, Space};
use crate::protocol::{Share, TokenShare};

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
    /// Of each chunk, but of states.
    #[serde(default, skip_serializing_if = "TokenShare::is_all")]
    pub tokens: TokenShare,
}

/// Some bytes would have no owner.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Uncovered {
    #[error(
        "no rank has head {head} of plane {plane} (layer {layer}), of tokens {share} of {shares}: check the `layers`, `tp` and `tokens` that the ranks attached with"
    )]
    Head {
        plane: usize,
        layer: u32,
        head: u32,
        share: u32,
        shares: u32,
    },
    #[error(
        "chunks of {chunk_tokens} tokens can't be dealt to ranks in rounds of {round}: declare the space with a chunk_tokens that is a multiple of it"
    )]
    Chunk { chunk_tokens: u32, round: u64 },
}

impl Has {
    /// Number of ranks that heads are cut for.
    pub fn tp_size(&self) -> u32 {
        self.tp.map_or(1, |(_, size)| size)
    }

    /// How tokens are dealt, whatever this rank has of them.
    pub fn dealt(&self) -> (u32, u32) {
        match self.tokens.is_all() {
            true => (1, 1),
            false => (self.tokens.size, self.tokens.interleave),
        }
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

/// The shares of all ranks that own anything. All ranks deal tokens alike.
pub fn shares(space: &Space, ranks: &BTreeMap<Rank, Has>) -> Result<Shares, Uncovered> {
    // A snapshot has no tokens that could be dealt: each rank has all of its own heads'.
    let is_dealt = space.chunk_rows() == space.chunk_tokens();
    let of = |has: &Has| if is_dealt { has.tokens } else { TokenShare::ALL };
    let any = ranks.values().next().map(of).unwrap_or_default();
    if !any.deals(space.chunk_tokens()) {
        return Err(Uncovered::Chunk {
            chunk_tokens: space.chunk_tokens(),
            round: any.round(),
        });
    }
    let mut shares = Shares::new();
    for rank in 0..any.size {
        let tokens = TokenShare { rank, ..any };
        let having: Vec<(Rank, &Has)> = ranks
            .iter()
            .filter(|(_, has)| of(has).rank == rank)
            .map(|(&rank, has)| (rank, has))
            .collect();
        add_shares(space, &having, tokens, &mut shares)?;
    }
    Ok(shares)
}

/// The shares of these tokens, by the ranks that have them.
fn add_shares(
    space: &Space,
    ranks: &[(Rank, &Has)],
    tokens: TokenShare,
    shares: &mut Shares,
) -> Result<(), Uncovered> {
    for (plane, of) in space.planes().iter().enumerate() {
        // Half-open ranges of heads that have no owner so far.
        let mut open: Vec<Range<u32>> = std::iter::once(0..of.heads).collect();
        for &(rank, has) in ranks {
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
                        tokens,
                    }),
                }
            }
            open = left;
        }
        if let Some(range) = open.first() {
            return Err(Uncovered::Head {
                plane,
                layer: of.layer,
                head: range.start,
                share: tokens.rank,
                shares: tokens.size,
            });
        }
    }
    Ok(())
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
        let has = of.iter().map(|&(layers, tp)| Has {
            layers,
            tp,
            tokens: TokenShare::ALL,
        });
        (0..).zip(has).collect()
    }

    fn tp(size: u32) -> BTreeMap<Rank, Has> {
        let of: Vec<_> = (0..size).map(|rank| (None, Some((rank, size)))).collect();
        ranks(&of)
    }

    /// A rank, its planes and its heads.
    type Owned = (Rank, (usize, usize), (u32, u32));

    fn share(planes: (usize, usize), heads: (u32, u32)) -> Share {
        Share {
            planes,
            heads,
            tokens: TokenShare::ALL,
        }
    }

    /// One share for each rank that owns anything.
    fn owned<const N: usize>(shares: [Owned; N]) -> BTreeMap<Rank, Vec<Share>> {
        shares
            .map(|(rank, planes, heads)| (rank, vec![share(planes, heads)]))
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
        // Each rank has everything: prefill context parallel.
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
        let uncovered = shares(&space, &gap).unwrap_err();
        assert!(
            matches!(uncovered, Uncovered::Head { layer: 2, .. }),
            "{uncovered}"
        );
    }

    /// Ranks of a tensor parallelism whose neighbours have the same heads: their tokens are dealt to `size` of them.
    fn dealt(tp_size: u32, size: u32, interleave: u32) -> BTreeMap<Rank, Has> {
        let mut ranks = tp(tp_size);
        for (rank, has) in &mut ranks {
            has.tokens = TokenShare {
                rank: rank % size,
                size,
                interleave,
            };
        }
        ranks
    }

    #[test]
    fn heads_and_tokens_decide_together() {
        let tokens = |rank| TokenShare {
            rank,
            size: 2,
            interleave: 4,
        };
        let of = |heads, rank| Share {
            tokens: tokens(rank),
            ..share((0, 2), heads)
        };
        // Ranks 0 to 3 have the first head, and two of them all of its tokens.
        let space_of = |heads| {
            space(&format!(
                r#""mha": {{"layers": 2, "heads": {heads}, "head_dim": 8}}"#
            ))
        };
        assert_eq!(
            shares(&space_of(2), &dealt(8, 2, 4)).unwrap(),
            BTreeMap::from([
                (0, vec![of((0, 1), 0)]),
                (1, vec![of((0, 1), 1)]),
                (4, vec![of((1, 2), 0)]),
                (5, vec![of((1, 2), 1)]),
            ])
        );
        let latents = space(r#""mla": {"layers": 2, "latent_dim": 32}"#);
        assert_eq!(
            shares(&latents, &dealt(4, 2, 4)).unwrap(),
            BTreeMap::from([(0, vec![of((0, 1), 0)]), (1, vec![of((0, 1), 1)])])
        );
    }

    #[test]
    fn a_state_is_not_dealt() {
        let space = space(
            r#""kind": "state", "planes": [{"name": "state", "layer": 0, "heads": 2, "row_bytes": 64}]"#,
        );
        assert_eq!(
            shares(&space, &dealt(2, 2, 16)).unwrap(),
            shares(&space, &tp(2)).unwrap()
        );
    }

    #[test]
    fn tokens_without_a_rank_and_chunks_that_can_t_be_dealt_are_told() {
        let space = space(r#""mla": {"layers": 1, "latent_dim": 32}"#);
        let mut ranks = dealt(2, 2, 4);
        ranks.get_mut(&1).unwrap().tokens.rank = 0;
        let uncovered = shares(&space, &ranks).unwrap_err();
        assert!(uncovered.to_string().contains("of tokens 1 of 2"), "{uncovered}");
        let uncovered = shares(&space, &dealt(2, 2, 16)).unwrap_err();
        assert!(
            matches!(
                uncovered,
                Uncovered::Chunk {
                    chunk_tokens: 16,
                    round: 32
                }
            ),
            "{uncovered}"
        );
    }

    proptest! {
        #[test]
        fn every_row_has_one_owner(heads in 1_u32..5, copies in 1_u32..4, size in 1_u32..4, interleave in 1_u32..5) {
            let space = Space::from_json(&format!(
                r#"{{"model": "m", "revision": "1", "dtype": "float16", "chunk_tokens": {},
                    "mha": {{"layers": 1, "heads": {heads}, "head_dim": 1}}}}"#, 2 * size * interleave
            )).unwrap();
            let owned = shares(&space, &dealt(heads * copies * size, size, interleave)).unwrap();
            let mut rows: Vec<(u32, u32)> = owned.values().flatten().flat_map(|share| {
                let tokens: Vec<u32> = share.tokens.runs(0..space.chunk_tokens()).flatten().collect();
                (share.heads.0..share.heads.1).flat_map(move |head| tokens.clone().into_iter().map(move |token| (head, token)))
            }).collect();
            rows.sort_unstable();
            let all: Vec<(u32, u32)> =
                (0..heads).flat_map(|head| (0..space.chunk_tokens()).map(move |token| (head, token))).collect();
            prop_assert_eq!(rows, all);
        }
    }
}
