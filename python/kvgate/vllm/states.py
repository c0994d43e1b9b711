"""How tensor-parallel ranks cut the states of a layer, so that one object serves ranks of any number.

A rank's page has the states of a layer one after another: the last inputs of its convolution, then the recurrent state. Ranks cut
both along one axis, by heads. The channels of a convolution are several parts side by side, and a rank has its heads of each of
them: so each part is a plane, which has the heads of all ranks.

    Mamba 1      [positions, channels], [channels, ...]      any run of channels is a head
    Mamba 2      [positions, x B C], [heads, ...]            B and C have groups; where there is one, all ranks have it
    delta nets   [positions, q k v], [value heads, ...]      of Qwen3-Next, Olmo and Kimi (KDA)
    short conv   [positions, channels]                       of LFM2
    linear       [heads, ...]

With vLLM's layout DS a convolution's positions come last. What is not known to be cut so is one plane, which has a head for each
rank: its bytes are for ranks of the same number alone.
"""

import dataclasses
import math

from kvgate.vllm.kinds import Plane, Run

CHANNEL_HEADS = 64
"""Where channels have no heads they are dealt into so many, or into as many as divide them."""
GROUPS = ("mamba_n_groups", "n_groups", "mamba_ngroups")
"""How models' configurations call the number of Mamba 2's groups."""


@dataclasses.dataclass(frozen=True)
class Part:
    name: str
    heads: int
    """Of all ranks together."""
    channels: int
    """Of a head: along the axis that ranks cut."""


def cut(spec, ranks, config, conv_axis):
    """For each state of the layer the axis that ranks cut, and the parts that lie along it; None: all ranks have everything, or
    it is not known. `config`: the model's. `conv_axis`: of the channels."""
    if getattr(spec, "tp_replicated", False):
        return None
    found = cut_of_kind(spec, ranks, config, conv_axis)
    is_whole = found is not None and all(
        shape[axis] == sum(own(part.heads, ranks) * part.channels for part in parts)
        and all(part.heads % ranks == 0 or part.heads == 1 for part in parts)
        for shape, (axis, parts) in zip(spec.shapes, found, strict=True)
    )
    return found if is_whole else None


def cut_of_kind(spec, ranks, config, conv_axis):
    match getattr(spec.mamba_type, "name", spec.mamba_type), spec.shapes:
        case "MAMBA1", ((_, _) as conv, (_, _)):
            heads, channels = dealt(conv[conv_axis] * ranks)
            return (conv_axis, (Part("conv", heads, channels),)), (0, (Part("state", heads, channels),))
        case "SHORT_CONV", ((_, _) as conv,):
            return ((conv_axis, (Part("conv", *dealt(conv[conv_axis] * ranks)),)),)
        case "LINEAR", ((heads, _, _),):
            return ((0, (Part("state", heads * ranks, 1),)),)
        case "MAMBA2", ((_, _) as conv, (heads, head_size, state_size)):
            groups = (conv[conv_axis] - heads * head_size) // (2 * state_size)
            # A single group of a rank is one of its own, or the only one.
            of_all = next((getattr(config, name) for name in GROUPS if hasattr(config, name)), None)
            if groups > 1 or ranks == 1 or of_all == ranks:
                groups *= ranks
            elif of_all != 1:
                return None
            x = Part("conv.x", heads * ranks, head_size)
            b, c = (Part(f"conv.{name}", groups, state_size) for name in "bc")
            return (conv_axis, (x, b, c)), (0, (Part("state", heads * ranks, 1),))
        case "GDN_ATTN", ((_, _) as conv, (heads, value_size, key_size)):
            key_heads = (conv[conv_axis] - heads * value_size) // (2 * key_size)
            q, k = (Part(f"conv.{name}", key_heads * ranks, key_size) for name in "qk")
            v = Part("conv.v", heads * ranks, value_size)
            return (conv_axis, (q, k, v)), (0, (Part("state", heads * ranks, 1),))
    return None


def planes(spec, ranks, found):
    """Of a layer; `found`: by `cut`."""
    size = spec.state_content_size_bytes
    if found is None:
        heads = 1 if getattr(spec, "tp_replicated", False) else ranks
        return (Plane("kv", heads, size, (Run(0, 0, size),)),)
    planes, offset = [], 0
    for shape, dtype, (axis, parts) in zip(spec.shapes, spec.dtypes, found, strict=True):
        # Along the axis that is cut, and how often that is repeated.
        channel_bytes, times = math.prod(shape[axis + 1 :]) * dtype.itemsize, math.prod(shape[:axis])
        at = offset
        for part in parts:
            of_head = part.channels * channel_bytes
            runs = tuple(Run(at + time * shape[axis] * channel_bytes, time * of_head, of_head) for time in range(times))
            planes.append(Plane(part.name, part.heads, times * of_head, runs))
            at += own(part.heads, ranks) * of_head
        offset += math.prod(shape) * dtype.itemsize
    return tuple(planes)


def layout(spec, found):
    """What a layer's states are: of all ranks together, where they are cut."""
    shapes = [list(shape) for shape in spec.shapes]
    for shape, (axis, parts) in zip(shapes, found or (), strict=found is not None):
        shape[axis] = sum(part.heads * part.channels for part in parts)
    kind = getattr(spec.mamba_type, "name", spec.mamba_type)
    return f"{kind} {', '.join(f'{shape} {dtype}' for shape, dtype in zip(shapes, spec.dtypes, strict=True))}"


def dealt(channels):
    heads = math.gcd(channels, CHANNEL_HEADS)
    return heads, channels // heads


def own(heads, ranks):
    """Heads that a rank has."""
    return max(1, heads // ranks)
