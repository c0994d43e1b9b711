//! A tensor of an engine's KV memory, described by the meaning of its axes.

use serde::{Deserialize, Serialize};

use super::cache::PlanePart;

/// A tensor of an engine's KV memory, by the meaning of its axes.
///
/// | axis       | index of                                                                |
/// |------------|-------------------------------------------------------------------------|
/// | `L`        | the layer: one of `planes`                                              |
/// | `B`        | the block (page)                                                        |
/// | `N`        | the token in its block                                                  |
/// | `S`        | the token slot, in place of `B` and `N`                                 |
/// | `H`        | the KV head: one of `heads`. Without it there is one                    |
/// | `K`        | 0: K, 1: V                                                              |
/// | `C` or `D` | the element: of a row (K then V, or the latent), or of K or V alone     |
///
/// vLLM's views are `BHNC`, whatever order of bytes the strides give; earlier versions have `KBNHD` or `BKNHD`;
/// SGLang's pools are `SHD`, K and V each a tensor; MLA is `BNC`. The order of the letters is that of `shape`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Tensor {
    /// Address of the first element, in the engine's process: host memory, or memory of its GPU.
    pub address: u64,
    /// Bytes of the tensor's memory from there on.
    pub bytes: u64,
    pub axes: String,
    pub shape: Vec<u64>,
    /// Bytes from one index to the next.
    pub strides: Vec<u64>,
    pub element_bytes: u32,
    /// Indices of its planes in the space: one, or as many as axis `L` has.
    pub planes: Vec<usize>,
    /// KV heads, half-open, in the plane's numbering; None: all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub heads: Option<(u32, u32)>,
    /// Bytes of the row that come before this tensor's, where K and V are apart.
    #[serde(default)]
    pub row_offset: u32,
}

const AXES: &str = "LBNSHKCD";

/// An axis: count and stride in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Axis {
    pub count: u64,
    pub stride: u64,
}

impl Axis {
    /// Stands for a missing axis.
    pub const NONE: Self = Self { count: 1, stride: 0 };
}

/// A tensor's axes, found and checked by themselves.
pub(super) struct Axes {
    pub layer: Axis,
    pub block: Axis,
    pub token: Axis,
    pub head: Axis,
    pub kv: Axis,
    /// Bytes of the innermost axis.
    pub run_bytes: u64,
}

impl Tensor {
    /// The strides of a contiguous tensor, from its shape.
    pub fn contiguous_strides(shape: &[u64], element_bytes: u32) -> Vec<u64> {
        let mut strides = vec![0; shape.len()];
        let mut stride = u64::from(element_bytes);
        for (of, &count) in strides.iter_mut().zip(shape).rev() {
            *of = stride;
            stride = stride.saturating_mul(count);
        }
        strides
    }

    pub(super) fn axes(&self) -> Result<Axes, String> {
        self.check_letters()?;
        let (dims, axes) = (self.shape.len(), &self.axes);
        if dims != axes.len() || self.strides.len() != dims {
            return Err(format!(
                "axes {axes} need as many sizes and strides, not {dims} and {}",
                self.strides.len()
            ));
        }
        if let Some(at) = self.shape.iter().position(|&count| count == 0) {
            return Err(format!("axis {} has size 0", &axes[at..=at]));
        }
        let axis = |letter| {
            axes.find(letter).map(|at| Axis {
                count: self.shape[at],
                stride: self.strides[at],
            })
        };
        let element = axis('C').or(axis('D')).unwrap_or(Axis::NONE);
        if self.element_bytes == 0 || (element.count > 1 && element.stride != u64::from(self.element_bytes)) {
            return Err(format!(
                "the elements of a row must lie side by side: their stride is {} bytes, an element has {}",
                element.stride, self.element_bytes
            ));
        }
        let slots = axis('S');
        let axes = Axes {
            layer: axis('L').unwrap_or(Axis::NONE),
            block: axis('B').unwrap_or(Axis::NONE),
            token: slots.or(axis('N')).unwrap_or(Axis::NONE),
            head: axis('H').unwrap_or(Axis::NONE),
            kv: axis('K').unwrap_or(Axis::NONE),
            run_bytes: element.count.saturating_mul(self.element_bytes.into()),
        };
        if axes.kv.count > 2 || (axes.kv.count == 1 && self.axes.contains('K')) {
            return Err(format!("axis K has size {}, and must have 2", axes.kv.count));
        }
        axes.check_extent(self.bytes)?;
        Ok(axes)
    }

    fn check_letters(&self) -> Result<(), String> {
        let axes = &self.axes;
        if let Some(other) = axes.chars().find(|&letter| !AXES.contains(letter)) {
            return Err(format!("axes {axes:?} have {other:?}: the letters are {AXES}"));
        }
        if let Some(twice) = axes.chars().find(|&letter| axes.matches(letter).count() > 1) {
            return Err(format!("axes {axes} have {twice} twice"));
        }
        let tokens = (axes.contains('B'), axes.contains('N'), axes.contains('S'));
        if !matches!(tokens, (true, true, false) | (false, false, true)) {
            return Err(format!("axes {axes} need B and N, or S in their place"));
        }
        if axes.contains('C') == axes.contains('D') {
            return Err(format!("axes {axes} need C or D"));
        }
        Ok(())
    }

    /// The parts of its rows, K before V. `axes` are its own.
    pub(super) fn parts(&self, axes: &Axes, heads: (u32, u32)) -> impl Iterator<Item = PlanePart> {
        let (base, row_offset) = (self.address, self.row_offset);
        let planes = self.planes.clone();
        let (block, token, head) = (axes.block, axes.token, axes.head);
        let (layer, kv, run_bytes) = (axes.layer, axes.kv, axes.run_bytes);
        (0_u64..).zip(planes).flat_map(move |(index, plane)| {
            (0..kv.count).map(move |of| PlanePart {
                plane,
                address: base + index * layer.stride + of * kv.stride,
                // The check of a plane's coverage finds out if that was too much.
                row_offset: row_offset.saturating_add(u32::try_from(of * run_bytes).unwrap_or(u32::MAX)),
                run_bytes: u32::try_from(run_bytes).unwrap_or(u32::MAX),
                heads,
                block_stride: block.stride,
                token_stride: token.stride,
                head_stride: head.stride,
            })
        })
    }
}

impl Axes {
    /// Checks that the tensor is in the storage, and no two indices at the same bytes: each axis steps over all
    /// that is inside it.
    fn check_extent(&self, bytes: u64) -> Result<(), String> {
        let mut axes = [self.layer, self.block, self.token, self.head, self.kv];
        axes.sort_unstable_by_key(|axis| axis.stride);
        let mut extent = self.run_bytes;
        for axis in axes.iter().filter(|axis| axis.count > 1) {
            if axis.stride < extent {
                return Err(format!(
                    "it overlaps itself: a stride is {} bytes, and what is inside has {extent}",
                    axis.stride
                ));
            }
            extent = (axis.count - 1)
                .checked_mul(axis.stride)
                .and_then(|last| last.checked_add(extent))
                .ok_or("it ends behind the last address")?;
        }
        match extent <= bytes {
            true => Ok(()),
            false => Err(format!(
                "it reaches over {extent} bytes, and its storage has {bytes}"
            )),
        }
    }
}
