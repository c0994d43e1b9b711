"""The space of a model: what must be equal for the KV of two engines to be interchangeable."""

import copy
import dataclasses
import json

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.utils import extract_layer_index
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

from kvgate import Space
from kvgate.vllm.identity import architecture, extra, revision

DTYPES = {
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
    "torch.int8": "int8",
}
FP8 = {"auto": "fp8_e4m3", "fp8": "fp8_e4m3", "fp8_e4m3": "fp8_e4m3", "fp8_e5m2": "fp8_e5m2"}
"""What vLLM keeps as plain bytes with a scale for each layer, by its name. The scales are the checkpoint's, so what pins the
weights pins them; `auto` is what the scheduler's process sees where the checkpoint asked for fp8."""


OTHER_KINDS = {
    "SlidingWindowSpec": "a model all of whose layers attend to a sliding window (vLLM frees the blocks behind it)",
    "ChunkedLocalAttentionSpec": "a model all of whose layers have chunked attention (vLLM frees the blocks behind it)",
    "SlidingWindowMLASpec": "MLA with a sliding window",
    "MambaSpec": "a model of states alone (Mamba, linear attention)",
    "RSWASpec": "attention with references of its own (R-SWA)",
    "SinkFullAttentionSpec": "attention with sinks of its own",
    "CrossAttentionSpec": "an encoder's KV",
    "UniformTypeKVCacheSpecs": "a model whose layers have KV of different sizes",
}
"""By the spec of the only group."""


@dataclasses.dataclass(frozen=True)
class Model:
    space: Space
    layers: list[str]
    """vLLM's names, in the order of the space's planes."""
    heads: tuple[int, int]
    """Which KV heads this rank has, half-open."""
    block_tokens: int


def describe(vllm_config, kv_cache_config, settings):
    """The model as this rank has it. Refuses what can't be reused."""
    if settings.layerwise and vllm_config.scheduler_config.async_scheduling:
        raise ValueError(
            "with layerwise and asynchronous scheduling vLLM would go on from a load that failed: "
            "give it --no-async-scheduling, or leave layerwise out"
        )
    parallel = vllm_config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size", "pipeline_parallel_size"):
        if getattr(parallel, name, 1) > 1:
            raise ValueError(f"kvgate can't be used with {name} {getattr(parallel, name)} yet: set it to 1")
    refuse_ranks_apart(parallel)
    refuse_what_has_kv_of_its_own(vllm_config)
    refuse_what_is_no_function_of_its_prefix(vllm_config)
    spec, names = only_group(kv_cache_config)
    if settings.chunk_tokens % spec.block_size:
        least = -(-settings.chunk_tokens // spec.block_size) * spec.block_size
        raise ValueError(
            f"chunk_tokens {settings.chunk_tokens} is no multiple of vLLM's block size {spec.block_size}: "
            f"set chunk_tokens to {least} in kv_connector_extra_config, on every node"
        )
    names = sorted(names, key=extract_layer_index)
    is_mla = isinstance(spec, MLAAttentionSpec)
    total = 1 if is_mla else vllm_config.model_config.get_total_num_kv_heads()
    row_bytes = spec.state_content_size_bytes
    dtype = dtype_of(spec, vllm_config.cache_config.cache_dtype)
    space = Space(
        json.dumps(
            {
                "model": settings.model or architecture(vllm_config.model_config),
                "revision": settings.revision or revision(vllm_config),
                "dtype": dtype,
                "chunk_tokens": settings.chunk_tokens,
                "tenant": settings.tenant,
                "extra": {**extra(vllm_config), **cpu_layout(vllm_config, spec)},
                "planes": [
                    {"name": "kv", "layer": extract_layer_index(name), "heads": total, "row_bytes": row_bytes}
                    for name in names
                ],
            }
        )
    )
    ranks, own = parallel.tensor_parallel_size, spec.num_kv_heads
    # With more ranks than heads several have the same one.
    first = 0 if is_mla else (parallel.rank % ranks) * total // ranks
    return Model(space, names, (first, first + (1 if is_mla else own)), spec.block_size)


def only_group(kv_cache_config):
    """The one KV cache group that chunks can be made of."""
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in groups)
        raise ValueError(
            f"kvgate can reuse one kind of KV, and this model has {len(groups)} KV cache groups ({kinds}): give vLLM "
            "--disable-hybrid-kv-cache-manager, which makes one of windows, chunked and full attention; for other kinds, run "
            "without kvgate"
        )
    spec = groups[0].kv_cache_spec
    # With the hybrid manager off, layers with a window or chunked attention are among these: vLLM keeps all of their blocks,
    # and a token's KV does not depend on how long later tokens attend to it. A subclass is of some other attention: of
    # R-SWA, for one, KV depends on what is left out while decoding.
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
        kind = type(spec).__name__
        raise ValueError(f"kvgate can't reuse {OTHER_KINDS.get(kind, kind)} yet: run this model without kvgate")
    if getattr(spec, "num_head_slots", None) is not None:
        raise ValueError(
            "kvgate can't reuse KV of an attention backend that keeps K and V in slots of their own yet: choose another "
            "--attention-backend"
        )
    if getattr(spec, "non_causal", False) or getattr(spec, "non_causal_multi_token_decode", False):
        raise ValueError("kvgate reuses causal attention only: here a prompt's end changes what comes before it")
    return spec, groups[0].layer_names


def cpu_layout(vllm_config, spec):
    """On a CPU vLLM packs the K and V of a whole block for the CPU's instructions: other blocks, and other instructions, make
    other bytes of the same KV."""
    if not current_platform.is_cpu() or isinstance(spec, MLAAttentionSpec):
        return {}
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    dtype, cache_dtype = vllm_config.model_config.dtype, vllm_config.cache_config.cache_dtype
    packing = _get_attn_isa(dtype, spec.block_size, spec.head_size, cache_dtype)
    return {"cpu_layout": f"{packing}, {spec.block_size} tokens a block"}


def dtype_of(spec, cache_dtype):
    """Of the KV, by a space's names. Bytes are what vLLM has for all that PyTorch has no type for: there its own name says
    what they mean."""
    name = getattr(spec, "cache_dtype_str", None) or cache_dtype
    dtype = FP8.get(name) if str(spec.dtype) == "torch.uint8" else DTYPES.get(str(spec.dtype))
    if dtype is None:
        raise ValueError(
            f"kvgate can't reuse KV of kv_cache_dtype {name} ({spec.dtype}) yet: set it to auto, float16, bfloat16, "
            "fp8, fp8_e4m3 or fp8_e5m2"
        )
    return dtype


def refuse_ranks_apart(parallel):
    """All ranks of an engine share one node's gateway, and one scheduler decides for them."""
    if getattr(parallel, "nnodes_within_dp", 1) > 1:
        raise ValueError("kvgate can't be used yet by an engine whose ranks are on several nodes: set --nnodes to 1")
    if (
        parallel.tensor_parallel_size > 1
        and getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
    ):
        raise ValueError(
            "kvgate can't be used with distributed_executor_backend external_launcher and several ranks: each has a scheduler "
            "of its own, and what they load would come at different times"
        )


def refuse_what_has_kv_of_its_own(vllm_config):
    model_config = vllm_config.model_config
    outputs = getattr(vllm_config, "aux_output_config", None)
    if getattr(outputs, "enabled", False) and not hasattr(AuxOutputSchedulerConnector, "cap_external_hit"):
        raise ValueError(
            "with --enable-return-routed-experts this vLLM wants the experts of each token that was loaded, and ends without "
            "them: leave it out, or take vLLM 0.33"
        )
    if getattr(model_config, "is_diffusion", False):
        raise ValueError("kvgate can't reuse KV of a diffusion model, whose tokens change: run it without kvgate")
    if model_config.runner_type == "generate" and not model_config.is_prefix_caching_supported:
        raise ValueError(
            "vLLM says that prefix caching is not supported for this model, so its KV can't be reused: run it without kvgate"
        )
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in ("ngram", "ngram_gpu", "suffix"):
        raise ValueError(
            f"kvgate can't tell the KV of speculative decoding by {speculative.method} from the model's yet: "
            "use ngram, or run without it"
        )
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ValueError(
            "kvgate can't reuse KV whose scales each engine makes itself: set calculate_kv_scales to false"
        )


def refuse_what_is_no_function_of_its_prefix(vllm_config):
    """Models for which vLLM turns its own prefix caching off. What the user has turned off looks alike, so the model's hook
    is asked what it makes of a configuration where it is on."""
    model_config = vllm_config.model_config
    architecture = getattr(model_config, "architecture", None)
    hook = MODELS_CONFIG_MAP.get(architecture)
    if hook is None or vllm_config.cache_config.enable_prefix_caching:
        return
    # The hook has run once already: all that it changes is in the cache's configuration, or was changed then.
    asked = copy.copy(vllm_config)
    asked.cache_config = copy.copy(vllm_config.cache_config)
    asked.cache_config.enable_prefix_caching = True
    hook.verify_and_update_config(asked)
    if not asked.cache_config.enable_prefix_caching:
        raise ValueError(
            f"kvgate can't reuse KV of {architecture}: vLLM turns prefix caching off for it, as its KV depends on more than "
            "the tokens before it. Run it without kvgate"
        )


def needs_whole_prompts(model_config):
    """Whether it pools over all tokens of a prompt: one of which a part was loaded would end the engine. vLLM's own cache
    is off then, but a connector is asked all the same."""
    return model_config.runner_type == "pooling" and not model_config.is_prefix_caching_supported
