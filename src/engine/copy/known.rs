//! The layouts of today's engines, by name.

use super::tensor::Tensor;
use crate::format::{Plane, Space};

/// An engine's order of bytes in its KV memory, and the tensors that it shows of that memory.
#[derive(Debug, Clone, Copy)]
pub struct KnownLayout {
    pub name: &'static str,
    /// The axes of [`Tensor`], by their strides, largest first. `K` is there only where K and V are apart.
    pub order: &'static str,
    /// Axes that the engine splits into tensors of their own.
    pub split: &'static str,
}

/// Sizes of a cache.
#[derive(Debug, Clone, Copy)]
pub struct Pages {
    pub blocks: u32,
    pub block_tokens: u32,
    /// This rank's KV heads, half-open; None: all.
    pub heads: Option<(u32, u32)>,
    pub element_bytes: u32,
}

const fn layout(name: &'static str, order: &'static str, split: &'static str) -> KnownLayout {
    KnownLayout { name, order, split }
}

/// Layouts without an axis of heads, such as `[B, N, D]`, are for planes with one head.
pub const KNOWN: [KnownLayout; 18] = [
    layout("vllm LBHNC", "LBHNC", "L"),
    layout("vllm LBNHC", "LBNHC", "L"),
    layout("vllm LHBNC", "LHBNC", "L"),
    layout("vllm BLHNC", "BLHNC", "L"),
    layout("vllm BLNHC", "BLNHC", "L"),
    layout("vllm BHLNC", "BHLNC", "L"),
    layout("vllm before 0.32, 2BNHD", "LKBNHD", "L"),
    layout("vllm before 0.32, 2BHND", "LKBHND", "L"),
    layout("flashinfer NHD, B2NHD", "LBKNHD", "L"),
    layout("flashinfer HND, B2HND", "LBKHND", "L"),
    layout("sglang", "KLSHD", "KL"),
    layout("sglang host, layer_first", "KLSHD", ""),
    layout("sglang host, page_first", "KSLHD", ""),
    layout("sglang host, page_first_direct", "KBLNHD", ""),
    layout("sglang host, page_head", "KBHNLD", ""),
    layout("mla BND", "LBNC", "L"),
    layout("mla BLND", "BLNC", "L"),
    layout("mla, sglang", "LSC", "L"),
];

impl KnownLayout {
    /// Whether a rank with the heads of `pages` can have a plane like this.
    pub fn fits(&self, plane: &Plane, pages: &Pages) -> bool {
        let parts = if self.order.contains('K') { 2 } else { 1 };
        (self.order.contains('H') || heads(plane, pages) == 1)
            && plane.row_bytes.is_multiple_of(parts * pages.element_bytes)
    }

    /// Bytes of the whole cache, and its tensors, with addresses that count from its start. Planes of the same kind
    /// share one allocation.
    pub fn tensors(&self, space: &Space, pages: &Pages) -> (u64, Vec<Tensor>) {
        let planes = space.planes();
        let alike = |one: &usize, other: &usize| {
            (planes[*one].heads, planes[*one].row_bytes) == (planes[*other].heads, planes[*other].row_bytes)
        };
        let mut order: Vec<usize> = (0..planes.len()).collect();
        order.sort_by_key(|&index| (planes[index].heads, planes[index].row_bytes));
        let mut end = 0;
        let mut tensors = Vec::new();
        for group in order.chunk_by(alike) {
            // Aligned as by every allocator.
            end = u64::next_multiple_of(end, 512);
            let whole = self.allocation(planes, group, pages, end);
            end += whole.bytes;
            tensors.extend(self.split(whole));
        }
        (end, tensors)
    }

    fn allocation(&self, planes: &[Plane], group: &[usize], pages: &Pages, address: u64) -> Tensor {
        let plane = &planes[group[0]];
        let (blocks, block_tokens) = (u64::from(pages.blocks), u64::from(pages.block_tokens));
        let elements = u64::from(plane.row_bytes / pages.element_bytes);
        let size = |axis| match axis {
            'L' => group.len() as u64,
            'B' => blocks,
            'N' => block_tokens,
            'S' => blocks * block_tokens,
            'H' => heads(plane, pages).into(),
            'K' => 2,
            'D' => elements / 2,
            _ => elements,
        };
        let shape: Vec<u64> = self.order.chars().map(size).collect();
        Tensor {
            address,
            bytes: shape.iter().product::<u64>() * u64::from(pages.element_bytes),
            axes: self.order.to_owned(),
            strides: Tensor::contiguous_strides(&shape, pages.element_bytes),
            shape,
            element_bytes: pages.element_bytes,
            planes: group.to_vec(),
            heads: pages.heads.filter(|_| plane.heads > 1),
            row_offset: 0,
        }
    }

    fn split(&self, whole: Tensor) -> Vec<Tensor> {
        let axis_by_axis = |tensors: Vec<Tensor>, axis| {
            let split = tensors.into_iter().flat_map(|tensor| split_axis(&tensor, axis));
            split.collect()
        };
        self.split.chars().fold(vec![whole], axis_by_axis)
    }
}

fn heads(plane: &Plane, pages: &Pages) -> u32 {
    match pages.heads {
        Some((first, end)) if plane.heads > 1 => end - first,
        _ => plane.heads,
    }
}

/// One tensor for each index of an axis, if the tensor has it.
fn split_axis(whole: &Tensor, axis: char) -> Vec<Tensor> {
    let Some(at) = whole.axes.find(axis) else {
        return vec![whole.clone()];
    };
    let element = |letter: char| whole.axes.find(letter).map_or(0, |at| whole.shape[at]);
    let part = |index: u64| {
        let mut tensor = whole.clone();
        let skip = index * tensor.strides.remove(at);
        tensor.shape.remove(at);
        tensor.axes.remove(at);
        tensor.address += skip;
        tensor.bytes -= skip;
        if axis == 'L' {
            tensor.planes = vec![whole.planes[usize::try_from(index).unwrap_or(usize::MAX)]];
        } else {
            let bytes = index * element('D') * u64::from(whole.element_bytes);
            tensor.row_offset += u32::try_from(bytes).unwrap_or(u32::MAX);
        }
        tensor
    };
    (0..whole.shape[at]).map(part).collect()
}
