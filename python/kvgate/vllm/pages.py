"""The spaces of pages that vLLM's own offloading keeps in its CPU tier: one for each of its KV cache groups.

kvgate takes such a page as it lies there. So all that decides what its bytes mean is in the space: the weights and the flags
as for the connector, and the layout of the page, which depends on vLLM's version, the ranks and all groups. vLLM's block
hashes are the keys; the function and the seed that they come from are in the space, too.
"""

import dataclasses
import json
import sys

from vllm import __version__ as vllm_version
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import build_offloading_config
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    SlidingWindowSpec,
)

from kvgate import Space
from kvgate.settings import space_of
from kvgate.vllm.identity import architecture, extra, fitting, items_have_digests, revision
from kvgate.vllm.model import (
    NO_KV_OF_THEIR_OWN,
    conv_layout,
    cpu_layout,
    draft_identity,
    refuse_what_has_kv_of_its_own,
    refuse_what_is_no_function_of_its_prefix,
)

HASHES = ("sha256", "sha256_cbor")
"""vLLM's functions whose hashes have 32 bytes, and that nobody finds two prompts with the same one of."""


@dataclasses.dataclass(frozen=True)
class PageGroup:
    """A KV cache group of vLLM."""

    number: int
    """vLLM's, as in its keys."""
    chunk_tokens: int
    """Of a page."""
    is_chain: bool
    """A prefix needs all of its pages, not its last ones alone."""
    space: Space

    def of_epoch(self, epoch):
        """The same group, apart from what all others have: the weights may be others by now."""
        space = json.loads(self.space.canonical_json)
        space["extra"]["epoch"] = epoch
        return dataclasses.replace(self, space=self.space.another(json.dumps(space)))


def describe(offloading_spec, page_bytes, settings):
    """The groups in vLLM's order. Refuses what can't be reused."""
    vllm_config, kv_cache_config = configuration(offloading_spec.config)
    refuse(vllm_config, settings)
    common = {
        **extra(vllm_config),
        **draft(vllm_config, settings),
        **layout(vllm_config, kv_cache_config, offloading_spec.config),
        "hashes": hashes(vllm_config.cache_config.prefix_caching_hash_algo),
    }
    pinned = settings.revision or revision(vllm_config)
    groups = []
    for group in offloading_spec.config.groups:
        spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
        chunk_tokens = group.tokens_per_block * offloading_spec.blocks_per_chunk
        space = {
            "model": settings.model or architecture(vllm_config.model_config),
            "revision": pinned,
            "dtype": "pages",
            "hash": "vllm-sha256",
            "chunk_tokens": chunk_tokens,
            "extra": {**common, "group": str(group.group_id)},
            "planes": [{"name": "page", "layer": 0, "heads": 1, "row_bytes": page_bytes}],
        }
        is_chain = not isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec | MambaSpec)
        groups.append(PageGroup(group.group_id, chunk_tokens, is_chain, space_of(space, settings)))
    return groups


def configuration(offloading_config):
    """The engine's configuration, which vLLM does not hand to tiers. The functions that make the tier have it."""
    frame = sys._getframe()
    while frame is not None:
        engine, cache = (frame.f_locals.get(name) for name in ("vllm_config", "kv_cache_config"))
        is_one = isinstance(engine, VllmConfig) and isinstance(cache, KVCacheConfig)
        # Within MultiConnector another connector has another one.
        if is_one and build_offloading_config(engine, cache) == offloading_config:
            return engine, cache
        frame = frame.f_back
    raise ValueError(
        f"kvgate does not find the engine's configuration in vLLM {vllm_version}, and without it nothing says what the bytes "
        "of a page mean: take vLLM 0.32 or 0.33"
    )


def refuse(vllm_config, settings):
    refuse_what_has_kv_of_its_own(vllm_config)
    refuse_what_is_no_function_of_its_prefix(vllm_config)
    algorithm = vllm_config.cache_config.prefix_caching_hash_algo
    if algorithm not in HASHES:
        raise ValueError(
            f"with --prefix-caching-hash-algo {algorithm} two prompts may have the same hash, and one would get the other's "
            f"KV: take {' or '.join(HASHES)}"
        )
    if vllm_config.lora_config is not None and not settings.adapters_by_path:
        raise ValueError(
            "vLLM's hashes know a LoRA adapter by its name and path alone: set adapters_by_path in secondary_tiers if every "
            "node has the same weights at the same path, for all time. Or use KvGateConnector, which reads adapters' files"
        )
    if not items_have_digests(vllm_config):
        raise ValueError("vLLM makes no digests of images: leave mm_processor_cache_gb at more than 0")


def hashes(algorithm):
    """vLLM's function, and the hash that all its chains begin with. It comes from PYTHONHASHSEED where that is set."""
    function = get_hash_fn_by_name(algorithm)
    return f"{algorithm} {function(resolve_none_hash_seed(function)).hex()}"


def draft(vllm_config, settings):
    """A draft model's KV is in the same pages."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in NO_KV_OF_THEIR_OWN:
        return {}
    return {"draft": fitting(draft_identity(vllm_config, settings))}


def layout(vllm_config, kv_cache_config, offloading_config):
    """All that decides where in a page what lies. Every group counts: a page has room for any of them."""
    parallel, platform = offloading_config.parallel, current_platform
    groups = [
        [group.group_id, group.tokens_per_block, list(group.layer_names), *specs(vllm_config, kv_cache_config, group)]
        for group in offloading_config.groups
    ]
    device = {
        "platform": platform.device_name,
        "capability": str(platform.get_device_capability() or ""),
        "attention": str(vllm_config.attention_config.backend or ""),
        "v2": bool(vllm_config.use_v2_model_runner),
    }
    ranks = {name: getattr(parallel, name) for name in ("world_size", "tp_size", "pp_size", "pcp_size", "dcp_size")}
    return {
        "vllm": vllm_version,
        "ranks": json.dumps(ranks, sort_keys=True),
        "device": json.dumps(device, sort_keys=True),
        "kv_dtype": offloading_config.model.dtype,
        "page": json.dumps(
            {
                "blocks": offloading_config.cache.blocks_per_chunk,
                "hash_tokens": offloading_config.cache.tokens_per_hash,
                "layout": offloading_config.kv_cache_layout or "",
                "canonical": offloading_config.canonical_layout,
                "replicated": offloading_config.replicated_layout,
            },
            sort_keys=True,
        ),
        "groups": fitting(json.dumps(groups)),
        "memory": fitting(json.dumps(list(memory(kv_cache_config)))),
    }


def specs(vllm_config, kv_cache_config, group):
    """A group's spec as vLLM writes it, and how a CPU's kernels or a state's pack its bytes."""
    spec = kv_cache_config.kv_cache_groups[group.group_id].kv_cache_spec
    yield repr(spec)
    if isinstance(spec, AttentionSpec):
        yield cpu_layout(vllm_config, spec)
    elif isinstance(spec, MambaSpec):
        yield conv_layout()


def memory(kv_cache_config):
    """The layers of each of vLLM's tensors, which tensor lies in the same memory, and whether the layers of a block are
    neighbours. How many blocks the engine has must not count."""
    tensors = kv_cache_config.kv_cache_tensors
    places = [(tensor.offset, tensor.layer_stride, tensor.block_stride) for tensor in tensors]
    for tensor, place in zip(tensors, places, strict=True):
        yield tensor.layers, places.index(place), tensor.block_stride, tensor.layer_stride < tensor.block_stride
