//! Whether two parts of a cache have bytes in common.

use super::cache::PlanePart;
use super::tensor::Axis;

/// Sizes that the parts of one cache share.
#[derive(Debug, Clone, Copy)]
pub(super) struct Extent {
    pub blocks: u64,
    pub block_tokens: u64,
}

/// Two parts that have bytes in common, as indices. Parts may interleave, as the layers of vLLM's BLHNC do.
pub(super) fn find(parts: &[PlanePart], of: Extent) -> Option<(usize, usize)> {
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_unstable_by_key(|&index| parts[index].address);
    for (at, &one) in order.iter().enumerate() {
        let end = parts[one].address.saturating_add(bytes(&parts[one], of));
        let near = order[at + 1..]
            .iter()
            .take_while(|&&other| parts[other].address < end);
        for &other in near {
            if collide(&parts[one], &parts[other], of) {
                return Some((one.min(other), one.max(other)));
            }
        }
    }
    None
}

/// Number of bytes from the first to the last.
fn bytes(part: &PlanePart, of: Extent) -> u64 {
    reach(&axes(part, of), part.run_bytes)
}

fn reach(axes: &[Axis], run_bytes: u32) -> u64 {
    let reach = |axis: &Axis| (axis.count - 1) * axis.stride;
    u64::from(run_bytes) + axes.iter().map(reach).sum::<u64>()
}

/// Those with more than one index, by their strides, largest first.
fn axes(part: &PlanePart, of: Extent) -> Vec<Axis> {
    let heads = u64::from(part.heads.1 - part.heads.0);
    let axis = |count, stride| Axis { count, stride };
    let mut axes = vec![
        axis(of.blocks, part.block_stride),
        axis(of.block_tokens, part.token_stride),
        axis(heads, part.head_stride),
    ];
    axes.retain(|axis| axis.count > 1);
    axes.sort_unstable_by_key(|axis| std::cmp::Reverse(axis.stride));
    axes
}

fn collide(one: &PlanePart, other: &PlanePart, of: Extent) -> bool {
    let (mine, others) = (axes(one, of), axes(other, of));
    let distance = i128::from(other.address) - i128::from(one.address);
    meet(distance, &mine, &others, (one.run_bytes, other.run_bytes))
}

/// Whether a run of one part and a run of the other, which begins `distance` bytes later, can share bytes: whether
/// some difference of indices, times strides, brings them together. Where their axes differ, as rows of different
/// widths in one page do, all that is inside counts as one run.
fn meet(distance: i128, mine: &[Axis], others: &[Axis], runs: (u32, u32)) -> bool {
    let (Some((axis, my_inner)), Some((other, others_inner))) = (mine.split_first(), others.split_first())
    else {
        return touch(distance, reach(mine, runs.0), reach(others, runs.1));
    };
    if axis != other {
        return touch(distance, reach(mine, runs.0), reach(others, runs.1));
    }
    // The inner axes reach over less than a stride, so no other difference can.
    let (stride, most) = (i128::from(axis.stride), i128::from(axis.count - 1));
    let steps = distance.div_euclid(stride);
    [steps, steps + 1]
        .into_iter()
        .filter(|steps| steps.abs() <= most)
        .any(|steps| meet(distance - steps * stride, my_inner, others_inner, runs))
}

fn touch(distance: i128, bytes: u64, other_bytes: u64) -> bool {
    -i128::from(other_bytes) < distance && distance < i128::from(bytes)
}
