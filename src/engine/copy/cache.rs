//! An engine's KV memory, checked once against a space. The result is a list of parts: addresses, strides and runs
//! of bytes for each plane.

use std::ops::Range;

use super::error::{CopyError, LayoutError};
use super::overlap::{self, Extent};
use super::tensor::{Axes, Tensor};
use crate::format::Space;
use crate::protocol::{Share, TokenShare};

/// An engine's KV memory, as far as it has a space's planes: checked once, when the engine attaches.
#[derive(Debug, Clone)]
pub struct PagedCache {
    space: Space,
    /// By plane, then by offset in the row.
    parts: Vec<PlanePart>,
    blocks: u32,
    block_tokens: u32,
    /// Those of each chunk that it has, one after the other in its blocks.
    tokens: TokenShare,
}

/// The place of a plane's rows, or of its K or V where those are apart. A run is at `address + block * block_stride
/// + token * token_stride + head * head_stride`, `head` counted from the first of `heads`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlanePart {
    /// Index in the space.
    pub plane: usize,
    pub address: u64,
    /// Bytes of the row before the run.
    pub row_offset: u32,
    pub run_bytes: u32,
    /// Half-open, in the plane's numbering.
    pub heads: (u32, u32),
    pub block_stride: u64,
    pub token_stride: u64,
    pub head_stride: u64,
}

impl PagedCache {
    /// Checks the tensors; an error lists all that doesn't fit.
    pub fn new(space: &Space, tensors: &[Tensor]) -> Result<Self, LayoutError> {
        let mut problems = Vec::new();
        let mut parts = Vec::new();
        let mut size: Option<(u64, u64)> = None;
        for (index, tensor) in tensors.iter().enumerate() {
            let checked = tensor.axes().and_then(|axes| {
                let heads = check_tensor(space, tensor, &axes)?;
                Ok((axes, heads))
            });
            match checked {
                Ok((axes, heads)) => {
                    let own = (axes.block.count, axes.token.count);
                    let all = *size.get_or_insert(own);
                    if all != own {
                        problems.push(format!(
                            "tensor {index}: it has {} blocks of {} tokens, the first one {} of {}",
                            own.0, own.1, all.0, all.1
                        ));
                    }
                    parts.extend(tensor.parts(&axes, heads));
                }
                Err(problem) => problems.push(format!("tensor {index}: {problem}")),
            }
        }
        let (blocks, block_tokens) = size.unwrap_or_default();
        let fits = |count: u64| u32::try_from(count).ok();
        let cache = fits(blocks)
            .zip(fits(block_tokens))
            .filter(|_| problems.is_empty());
        let Some((blocks, block_tokens)) = cache else {
            if problems.is_empty() {
                problems.push(format!("{blocks} blocks of {block_tokens} tokens are too many"));
            }
            return Err(LayoutError(problems));
        };
        parts.sort_by_key(|part: &PlanePart| (part.plane, part.row_offset));
        let cache = Self {
            space: space.clone(),
            parts,
            blocks,
            block_tokens,
            tokens: TokenShare::ALL,
        };
        cache.check_rows(&mut problems);
        if problems.is_empty() {
            cache.check_overlap(&mut problems);
        }
        match problems.is_empty() {
            true => Ok(cache),
            false => Err(LayoutError(problems)),
        }
    }

    /// The same memory of an engine that deals each prompt's tokens over its ranks: it has these alone, side by side.
    pub fn with_tokens(mut self, tokens: TokenShare) -> Result<Self, LayoutError> {
        let chunk_tokens = self.space.chunk_rows();
        if !tokens.is_valid() || !tokens.deals(chunk_tokens) {
            return Err(LayoutError(vec![format!(
                "chunks of {chunk_tokens} tokens can't be dealt to {} ranks in runs of {}: take a multiple of {}",
                tokens.size,
                tokens.interleave,
                tokens.round()
            )]));
        }
        self.tokens = tokens;
        Ok(self)
    }

    /// The same memory, but only a rank's own share.
    #[must_use]
    pub fn only(&self, shares: &[Share]) -> Self {
        let narrow = |share: &Share| {
            let (planes, heads) = (share.planes.0..share.planes.1, share.heads.0..share.heads.1);
            let of_share = self.parts.iter().filter(move |part| planes.contains(&part.plane));
            of_share.filter_map(move |part| part.with_heads(&heads))
        };
        let mut parts: Vec<PlanePart> = shares.iter().flat_map(narrow).collect();
        parts.sort_by_key(|part| (part.plane, part.heads.0, part.row_offset));
        Self {
            parts,
            tokens: shares.first().map_or(self.tokens, |share| share.tokens),
            ..self.clone()
        }
    }

    /// Those of each chunk that it has.
    pub fn tokens(&self) -> TokenShare {
        self.tokens
    }

    pub fn space(&self) -> &Space {
        &self.space
    }

    pub fn blocks(&self) -> u32 {
        self.blocks
    }

    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    /// Bytes of a token in this cache, over all planes.
    pub fn token_bytes(&self) -> u64 {
        let of = |part: &PlanePart| u64::from(part.run_bytes) * u64::from(part.heads.1 - part.heads.0);
        self.parts.iter().map(of).sum()
    }

    /// Whether it has any of these planes.
    pub fn has_some_of(&self, planes: &Range<usize>) -> bool {
        self.parts_of(planes).is_ok_and(|parts| !parts.is_empty())
    }

    pub fn parts(&self) -> &[PlanePart] {
        &self.parts
    }

    #[cfg(test)]
    pub(super) fn part_mut(&mut self, index: usize) -> &mut PlanePart {
        &mut self.parts[index]
    }

    /// Indices of the parts of some planes.
    pub(super) fn parts_of(&self, planes: &Range<usize>) -> Result<Range<usize>, CopyError> {
        if planes.start > planes.end || planes.end > self.space.planes().len() {
            return Err(CopyError::Planes {
                first: planes.start,
                end: planes.end,
                planes: self.space.planes().len(),
            });
        }
        let before = |plane| self.parts.partition_point(|part| part.plane < plane);
        Ok(before(planes.start)..before(planes.end))
    }

    /// Checks that each plane has whole rows, once, for the same heads.
    fn check_rows(&self, problems: &mut Vec<String>) {
        if self.parts.is_empty() {
            problems.push("there are none".into());
        }
        for parts in self.parts.chunk_by(|one, other| one.plane == other.plane) {
            let plane = &self.space.planes()[parts[0].plane];
            let name = || format!("plane {} (layer {})", parts[0].plane, plane.layer);
            let end = parts.iter().try_fold(0_u32, |end, part| {
                (part.row_offset == end).then(|| end.saturating_add(part.run_bytes))
            });
            if end != Some(plane.row_bytes) {
                let got: Vec<String> = parts
                    .iter()
                    .map(|part| {
                        let end = u64::from(part.row_offset) + u64::from(part.run_bytes);
                        format!("{} to {end}", part.row_offset)
                    })
                    .collect();
                problems.push(format!(
                    "{} has rows of {} bytes, and its tensors have bytes {} of them",
                    name(),
                    plane.row_bytes,
                    got.join(", ")
                ));
            }
            if parts.iter().any(|part| part.heads != parts[0].heads) {
                problems.push(format!("{}: its tensors have different heads", name()));
            }
        }
    }

    fn check_overlap(&self, problems: &mut Vec<String>) {
        let extent = Extent {
            blocks: self.blocks.into(),
            block_tokens: self.block_tokens.into(),
        };
        if let Some((one, other)) = overlap::find(&self.parts, extent) {
            problems.push(format!(
                "planes {} and {} share memory: layers that share their KV are one plane",
                self.parts[one].plane, self.parts[other].plane
            ));
        }
    }
}

impl PlanePart {
    fn with_heads(&self, heads: &Range<u32>) -> Option<Self> {
        let (first, end) = (self.heads.0.max(heads.start), self.heads.1.min(heads.end));
        (first < end).then(|| Self {
            address: self.address + u64::from(first - self.heads.0) * self.head_stride,
            heads: (first, end),
            ..self.clone()
        })
    }
}

/// Checks that a tensor fits the space; returns its heads.
fn check_tensor(space: &Space, tensor: &Tensor, axes: &Axes) -> Result<(u32, u32), String> {
    if tensor.planes.len() as u64 != axes.layer.count {
        return Err(format!(
            "it has {} layers, and {} planes are named",
            axes.layer.count,
            tensor.planes.len()
        ));
    }
    let planes = space.planes();
    if let Some(plane) = tensor.planes.iter().find(|&&plane| plane >= planes.len()) {
        return Err(format!("plane {plane} is not in a space of {}", planes.len()));
    }
    let of_first = planes[tensor.planes[0]].heads;
    let (first, end) = tensor.heads.unwrap_or((0, of_first));
    for &plane in &tensor.planes {
        if first >= end || end > planes[plane].heads {
            return Err(format!(
                "heads {first} to {end} are not in plane {plane}, which has {}",
                planes[plane].heads
            ));
        }
    }
    match u64::from(end - first) == axes.head.count {
        true => Ok((first, end)),
        false => Err(format!(
            "axis H has size {}, and heads {first} to {end} are named",
            axes.head.count
        )),
    }
}
