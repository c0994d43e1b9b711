"""SGLang's host pools: the space of each, and where its pages lie.

A pool is one kind of KV, and a page of it is a chunk. Attention's pools become planes of rows, so that any layout and any number
of ranks can load them. Other pools become opaque rows: their bytes are kept as they are, and the space says what they mean."""

import dataclasses
import json
import math

from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

from kvgate.settings import space_of
from kvgate.sglang.identity import fitting

LEAST_PAGE_TOKENS = 64
"""Smaller pages would be as many objects on S3, each of a few hundred KB."""
DTYPES = {
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
    "torch.int8": "int8",
}
ATTENTION = (PoolName.KV, PoolName.SWA, PoolName.DRAFT)
INDEXERS = (PoolName.INDEXER, PoolName.DRAFT_INDEXER)
DRAFTS = (PoolName.DRAFT, PoolName.DRAFT_INDEXER)
MHA_AXES = {
    "layer_first": "LSHD",
    "page_first": "SLHD",
    "page_first_direct": "BLNHD",
    "page_head": "BHNLD",
}
"""The meaning of the axes of K, and of V, by layout. `S`: token slots, that is pages of tokens."""
MLA_AXES = {"layer_first": "LSHC", "page_first": "SLHC", "page_first_direct": "BLNHC"}


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This rank among those of its pipeline stage, and the stage."""

    rank: int
    size: int
    stage: int = 0
    stages: int = 1

    def share(self, heads):
        """The heads that this rank has of a plane, half-open. Where there are fewer heads than ranks, neighbours have the same."""
        first = self.rank * heads // self.size
        return first, max(first + 1, (self.rank + 1) * heads // self.size)


def describe(name, pool, page_tokens, engine, ranks):
    """The space of a pool, and its tensors as JSON for `Pages.add`. Raises ValueError where its KV can't be reused.

    `page_tokens`: those of a page of the prefix, which is a chunk."""
    name = PoolName(name)
    kind = type(pool)
    if name in ATTENTION and kind in (MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost):
        dtype, planes, tensors, extra = mha(name, pool, engine, ranks)
    elif name in ATTENTION and kind is MLATokenToKVPoolHost:
        dtype, planes, tensors, extra = mla(pool)
    elif name in INDEXERS and kind is DSAIndexerPoolHost:
        dtype, planes, tensors, extra = indexer(pool)
    elif name is PoolName.MAMBA and kind is MambaPoolHost:
        dtype, planes, tensors, extra = states(pool, ranks)
    else:
        raise ValueError(
            f"kvgate can't reuse what SGLang keeps in the pool {name} ({kind.__name__}) yet, and without it the rest would give "
            "wrong answers: run this model without kvgate"
        )
    if page_tokens < LEAST_PAGE_TOKENS:
        raise ValueError(
            f"kvgate: pages of {page_tokens} tokens would make too many small objects on S3: give SGLang --page-size "
            f"{LEAST_PAGE_TOKENS} or more"
        )
    space = {
        "model": engine.model,
        "revision": engine.revision,
        "dtype": dtype,
        "chunk_tokens": page_tokens,
        "hash": "sglang-sha256",
        "kind": kind_of(name, page_tokens, engine),
        "draft": draft_of(engine, name) if name in DRAFTS else "",
        "extra": {**engine.extra, **{key: fitting(value) for key, value in (extra | packed(pool, engine)).items()}},
        "planes": planes,
    }
    if name is PoolName.SWA or name in INDEXERS:
        space["extra"]["pool"] = str(name)
    if tag := pool.storage_format_tag:
        space["extra"]["format"] = tag
    if ranks.stages > 1:
        layers = [plane["layer"] for plane in planes]
        space["extra"]["stage"] = f"{ranks.stage} of {ranks.stages}"
        space["shard"] = {
            "layers": [min(layers), max(layers) + 1],
            "heads": [0, max(plane["heads"] for plane in planes)],
        }
    return space_of(space, engine.settings), json.dumps(tensors)


def window_pages(page_tokens, engine):
    """Pages that SGLang wants of a window."""
    return -(-engine.window_tokens // page_tokens)


def kind_of(name, page_tokens, engine):
    if name is PoolName.MAMBA:
        return "state"
    if name is not PoolName.SWA:
        return "full"
    if not engine.window_tokens:
        raise ValueError(
            "kvgate: the model's configuration has no sliding window, and its layers have: set window_tokens in "
            "--hicache-storage-backend-extra-config to its tokens"
        )
    # In whole pages, as SGLang loads them.
    return {"window": window_pages(page_tokens, engine) * page_tokens}


def draft_of(engine, name):
    if not engine.draft:
        raise ValueError(
            f"kvgate: SGLang has a pool {name} and no speculative algorithm: run this model without kvgate"
        )
    return engine.draft


def mha(name, pool, engine, ranks):
    axes = axes_of(pool, MHA_AXES)
    is_draft = name is PoolName.DRAFT
    extra = {}
    # Nothing tells which ranks have the same heads of a draft: each is kept for itself.
    heads = pool.head_num * ranks.size if is_draft else engine.heads(pool.head_num, ranks.size, name is PoolName.SWA)
    if is_draft and ranks.size > 1:
        extra["ranks"] = str(ranks.size)
    item = pool.dtype.itemsize
    widths = [pool.head_dim * item, pool.v_head_dim * item]
    planes = planes_of(pool, heads, sum(widths))
    own, offset, tensors = ranks.share(heads), 0, []
    if own[1] - own[0] != pool.head_num:
        raise ValueError(
            f"kvgate: rank {ranks.rank} of {ranks.size} has {pool.head_num} of {heads} heads, which it can't have"
        )
    for buffer, width in zip((pool.k_buffer, pool.v_buffer), widths, strict=True):
        tensors.append(tensor(buffer, axes, pool.page_size, range(len(planes)), own, offset))
        offset += width
    dtype = dtype_of(pool, extra)
    return dtype, planes, tensors, extra


def mla(pool):
    axes = axes_of(pool, MLA_AXES)
    if pool.kv_buffer is None:
        raise ValueError("kvgate can't reuse KV of a pool that keeps nothing itself: run this model without kvgate")
    planes = planes_of(pool, 1, pool.kv_cache_dim * pool.dtype.itemsize)
    extra = {}
    dtype = dtype_of(pool, extra)
    return dtype, planes, [tensor(pool.kv_buffer, axes, pool.page_size, range(len(planes)))], extra


def indexer(pool):
    """Packed keys and scales of whole pages. A page's bytes are dealt to its tokens as they come."""
    buffer, page = pool.index_k_with_scale_buffer, pool.page_size
    width = buffer.shape[-1] // page
    if buffer.shape[-1] % page or pool.layout not in MLA_AXES:
        raise ValueError(f"kvgate can't reuse an index of layout {pool.layout} with {buffer.shape[-1]} bytes a page")
    buffer = buffer.unflatten(-1, (page, width))
    planes = [{"name": "index", "layer": layer, "heads": 1, "row_bytes": width} for layer in range(pool.layer_num)]
    axes = "LBNC" if pool.layout == "layer_first" else "BLHNC"
    return "bytes", planes, [tensor(buffer, axes, page, range(len(planes)))], {"dtype": str(buffer.dtype)}


def states(pool, ranks):
    """A snapshot of all layers: each layer has the temporal state and the convolutions'. Each rank has its share."""
    if pool.layout not in ("page_first", "page_first_direct"):
        raise ValueError(f"kvgate can't reuse states of layout {pool.layout}: set --hicache-mem-layout page_first")
    named = {"temporal": pool.temporal_buffer, **{f"conv{at}": buffer for at, buffer in enumerate(pool.conv_buffer)}}
    named = {name: buffer for name, buffer in named.items() if buffer.numel()}
    layers, buffers = pool.num_mamba_layers, {}
    for name, buffer in named.items():
        buffers[name] = buffer.flatten(3), "BLNC", range(layers)
    # What goes with a snapshot and is no layer's.
    for at, buffer in enumerate(pool.slot_state_buffers):
        buffers[f"side{at}"] = buffer.flatten(1).unsqueeze(1), "BNC", [layers + at]
    planes = sorted((layer, name) for name, (_, _, of) in buffers.items() for layer in of)
    tensors = [
        tensor(buffer, axes, 1, [planes.index((layer, name)) for layer in of], (ranks.rank, ranks.rank + 1))
        for name, (buffer, axes, of) in buffers.items()
    ]
    content = {
        name: [str(buffer.dtype), *named.get(name, buffer).shape[1:]] for name, (buffer, _, _) in buffers.items()
    }
    described = [
        {
            "name": name,
            "layer": layer,
            "heads": ranks.size,
            "row_bytes": buffers[name][0].shape[-1] * buffers[name][0].element_size(),
        }
        for layer, name in planes
    ]
    return "bytes", described, tensors, {"states": json.dumps(content, sort_keys=True)}


def axes_of(pool, known):
    if pool.layout not in known:
        raise ValueError(
            f"kvgate can't reuse KV of layout {pool.layout}: set --hicache-mem-layout to one of {', '.join(known)}"
        )
    return known[pool.layout]


def packed(pool, engine):
    """MTP layers that SGLang keeps behind the model's own, in the same pages."""
    is_states = isinstance(pool, MambaPoolHost)
    drafts = len(pool.mtp_draft_buffer_infos) if is_states else pool.layer_num - pool.target_layer_num
    return {"drafts": f"{drafts} {engine.draft}"} if drafts else {}


def planes_of(pool, heads, row_bytes):
    first = pool.start_layer or 0
    return [
        {"name": "kv", "layer": first + layer, "heads": heads, "row_bytes": row_bytes}
        for layer in range(pool.layer_num)
    ]


def dtype_of(pool, extra):
    """Its name in the space; `bytes` where it has none, and `extra` says which it is then."""
    dtype = DTYPES.get(str(pool.dtype))
    if dtype is None:
        extra["dtype"] = str(pool.dtype)
    return dtype or "bytes"


def tensor(buffer, axes, page_rows, planes, heads=None, row_offset=0):
    """A tensor by the meaning of its axes."""
    if "S" in axes:
        buffer = buffer.unflatten(axes.index("S"), (-1, page_rows))
        axes = axes.replace("S", "BN")
    item = buffer.element_size()
    last = sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
    return {
        "address": buffer.data_ptr(),
        "bytes": (last + 1) * item if math.prod(buffer.shape) else 0,
        "axes": axes,
        "shape": list(buffer.shape),
        "strides": [stride * item for stride in buffer.stride()],
        "element_bytes": item,
        "planes": list(planes),
        **({"heads": list(heads)} if heads else {}),
        "row_offset": row_offset,
    }
