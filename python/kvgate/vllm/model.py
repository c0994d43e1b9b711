"""The spaces of a model: what must be equal for the KV of two engines to be interchangeable."""

import copy
import dataclasses
import math
import re
from types import SimpleNamespace

from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
from vllm.logger import init_logger
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import MambaSpec, MLAAttentionSpec

from kvgate.settings import space_of
from kvgate.vllm import states
from kvgate.vllm.identity import architecture, extra, fitting, revision
from kvgate.vllm.kinds import Kind, Plane, block_tokens, context_ranks, kind_json, kind_of, layers_of

logger = init_logger(__name__)

DTYPES = {
    "torch.float32": "float32",
    "torch.float16": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float8_e4m3fn": "fp8_e4m3",
    "torch.float8_e5m2": "fp8_e5m2",
    "torch.int8": "int8",
}
FP8 = {
    "auto": "fp8_e4m3",
    "fp8": "fp8_e4m3",
    "fp8_e4m3": "fp8_e4m3",
    "fp8_e5m2": "fp8_e5m2",
    "fp8_ds_mla": "fp8_ds_mla",
}
"""What vLLM keeps as plain bytes with a scale for each layer, by its name. The scales are the checkpoint's, so what pins the
weights pins them; `auto` is what the scheduler's process sees where the checkpoint asked for fp8."""
NO_KV_OF_THEIR_OWN = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding."""
DRAFT_MODEL = "draft_model."
"""How vLLM's names of the layers of a draft model begin that is a language model by itself."""
USUAL_CHUNK_TOKENS = 256
LEAST_CHUNK_TOKENS = 64


@dataclasses.dataclass(frozen=True)
class Model:
    kinds: tuple[Kind, ...]
    """The model's own first, full attention first of these."""
    chunk_tokens: int
    alignment: int
    """Tokens that a hit is a multiple of."""
    hash_tokens: int
    """Tokens of each of vLLM's own hashes."""
    drops_last: bool
    """What drafts keep of a token depends on the next one, so the last chunk of a hit is not theirs."""
    groups: int
    """KV cache groups of vLLM."""

    @property
    def spaces(self):
        return [kind.space for kind in self.kinds]

    @property
    def has_states(self):
        return any(kind.word == "state" for kind in self.kinds)

    @property
    def state_block_tokens(self):
        return max((size for kind in self.kinds if kind.word == "state" for size in kind.blocks.values()), default=0)

    @property
    def is_full(self):
        """Every token's KV is kept by itself: a hit may end within a chunk."""
        return all(kind.word == "full" for kind in self.kinds)

    @property
    def loads_in_part(self):
        """Of a load that failed vLLM can keep what came before: it is told of blocks, not of the request."""
        return self.groups == 1 and self.is_full


def describe(vllm_config, kv_cache_config, settings, layers=None):
    """The model as this rank has it. `layers`: those of all pipeline stages, where this rank does not have them all. Refuses
    what can't be reused."""
    if settings.layerwise and vllm_config.scheduler_config.async_scheduling:
        raise ValueError(
            "with layerwise and asynchronous scheduling vLLM would go on from a load that failed: "
            "give it --no-async-scheduling, or leave layerwise out"
        )
    parallel = vllm_config.parallel_config
    refuse_ranks_apart(parallel)
    refuse_what_has_kv_of_its_own(vllm_config)
    refuse_what_is_no_function_of_its_prefix(vllm_config)
    own = {layer.name for layer in layers_of(kv_cache_config)}
    layers = list(layers or layers_of(kv_cache_config))
    refuse_tokens_that_can_not_be_dealt(vllm_config, layers)
    if getattr(parallel, "pipeline_parallel_size", 1) > 1 and any(
        is_draft(vllm_config, layer)
        and layer_number(layer.name) < vllm_config.model_config.hf_text_config.num_hidden_layers
        for layer in layers
    ):
        raise ValueError("kvgate can't tell the stages of a draft model apart yet: set pipeline_parallel_size to 1")
    of_kinds = {}
    for layer in layers:
        of_kinds.setdefault(key_of(vllm_config, layer), []).append(layer)
    groups = len(kv_cache_config.kv_cache_groups)
    if settings.layerwise and (groups > 1 or any(key[0] != "full" for key in of_kinds)):
        raise ValueError(
            "with layerwise vLLM could not be told of a load of this model that failed, as it has windows, states or several "
            "KV cache groups: leave layerwise out"
        )
    sizes = {layer.group: block_tokens(layer.spec, parallel) for layer in layers}
    has_states = any(isinstance(layer.spec, MambaSpec) for layer in layers)
    chunk_tokens = chunk_tokens_of(settings, math.lcm(*sizes.values()), has_states)
    # The model's own first, and of these the whole prefix, which the others are looked for within.
    in_order = sorted(of_kinds.items(), key=lambda entry: (entry[0][1], entry[0][0] != "full", str(entry[0])))
    kinds = tuple(
        kind
        for key, of_kind in in_order
        if (kind := describe_kind(vllm_config, settings, chunk_tokens, key, of_kind, own)) is not None
    )
    speculative = vllm_config.speculative_config
    return Model(
        kinds,
        chunk_tokens,
        getattr(kv_cache_config, "cache_hit_alignment_tokens", None) or math.lcm(*sizes.values()),
        getattr(kv_cache_config, "hash_block_size", None) or math.gcd(*sizes.values()),
        speculative is not None and speculative.use_eagle_block_drop(),
        groups,
    )


def key_of(vllm_config, layer):
    """All layers with the same are one space."""
    word, span = kind_of(layer.spec)
    dtype = dtype_of(layer.spec, vllm_config.cache_config.cache_dtype)
    return word, is_draft(vllm_config, layer), span, dtype


def is_draft(vllm_config, layer):
    """Whether it is a draft model's. vLLM numbers the layers of MTP and EAGLE on from the model's."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method in NO_KV_OF_THEIR_OWN:
        return False
    if getattr(layer.spec, "is_draft", False) or layer.name.startswith(DRAFT_MODEL):
        return True
    if ".mtp." in f".{layer.name}":
        return True
    # Falcon-H1's states have such numbers, too: a state that was taken for a draft's would not be waited for.
    is_state = isinstance(layer.spec, MambaSpec)
    return not is_state and layer_number(layer.name) >= vllm_config.model_config.hf_text_config.num_hidden_layers


def layer_number(name):
    """The first number in vLLM's name of a layer."""
    number = re.search(r"\.(\d+)\.", f".{name}.")
    if number is None:
        raise ValueError(f"kvgate does not know the layer {name}: run this model without kvgate")
    return int(number[1])


def chunk_tokens_of(settings, block_tokens, has_states):
    """Whole blocks of all groups. A state is there only where one of its blocks ends, so its chunks are no longer than
    they must be."""
    if settings.chunk_tokens:
        if settings.chunk_tokens % block_tokens:
            least = -(-settings.chunk_tokens // block_tokens) * block_tokens
            raise ValueError(
                f"chunk_tokens {settings.chunk_tokens} is no multiple of vLLM's block size {block_tokens}: "
                f"set chunk_tokens to {least} in kv_connector_extra_config, on every node"
            )
        return settings.chunk_tokens
    least = LEAST_CHUNK_TOKENS if has_states else USUAL_CHUNK_TOKENS
    derived = -(-least // block_tokens) * block_tokens
    if derived != USUAL_CHUNK_TOKENS:
        logger.info_once(
            "kvgate: chunks of this model have %d tokens, by vLLM's block sizes. Engines share KV only with chunks of the "
            "same size: where their block sizes differ, set chunk_tokens in kv_connector_extra_config on all of them",
            derived,
        )
    return derived


def describe_kind(vllm_config, settings, chunk_tokens, key, layers, own):
    """`own`: names of the layers that this rank has. None: a draft model that nothing pins, whose KV is not kept."""
    word, draft, span, dtype = key
    layers = sorted(layers, key=lambda layer: (layer_number(layer.name), layer.name))
    try:
        draft = draft_identity(vllm_config, settings) if draft else ""
    except ValueError as error:
        logger.warning_once(
            "kvgate: the draft model's KV is not kept: %s (for a draft the key is draft_revision)", str(error)
        )
        return None
    numbers = [layer_number(layer.name) for layer in layers]
    written, planes = [], []
    for at, (layer, number) in enumerate(zip(layers, numbers, strict=True)):
        # Of several layers with the same number.
        again = numbers[:at].count(number) or ""
        of_layer = planes_of(vllm_config, layer, draft)
        planes.append(dict(enumerate(of_layer, len(written))))
        for plane in of_layer:
            written.append(
                {"name": f"{plane.name}{again}", "layer": number, "heads": plane.heads, "row_bytes": plane.row_bytes}
            )
    space = {
        "model": settings.model or architecture(vllm_config.model_config),
        "revision": settings.revision or revision(vllm_config),
        "dtype": dtype,
        "chunk_tokens": chunk_tokens,
        "kind": kind_json(word, span),
        "draft": draft,
        "extra": {**extra(vllm_config), **content(vllm_config, layers)},
        "planes": written,
    }
    return Kind(
        space_of(space, settings),
        word,
        span,
        bool(draft),
        {layer.group: block_tokens(layer.spec, vllm_config.parallel_config) for layer in layers},
        tuple(layer for layer in layers if layer.name in own),
        tuple(of_layer for layer, of_layer in zip(layers, planes, strict=True) if layer.name in own),
        indexer_parts(vllm_config, layers[0].spec),
    )


def draft_identity(vllm_config, settings):
    speculative = vllm_config.speculative_config
    own = speculative.draft_model_config
    if speculative.method == "mtp" or own is None or own.model == vllm_config.model_config.model:
        return speculative.method
    # vLLM's own function, which reads the draft's configuration.
    own = copy.copy(own)
    own.hf_overrides = {}
    load_config = getattr(speculative, "draft_load_config", None) or vllm_config.load_config
    pinned = settings.draft_revision or revision(SimpleNamespace(model_config=own, load_config=load_config))
    return f"{speculative.method} {architecture(own)} {pinned}"


def planes_of(vllm_config, layer, is_draft):
    """Of all ranks together."""
    spec, ranks = layer.spec, vllm_config.parallel_config.tensor_parallel_size
    if isinstance(spec, MambaSpec):
        return states.planes(spec, ranks, state_cut(vllm_config, spec))
    return (Plane("kv", heads(vllm_config, spec, ranks, is_draft), spec.state_content_size_bytes),)


def state_cut(vllm_config, spec):
    parallel, config = vllm_config.parallel_config, vllm_config.model_config.hf_text_config
    return states.cut(spec, parallel.tensor_parallel_size, config, 0 if conv_layout() == "DS" else 1)


def heads(vllm_config, spec, ranks, is_draft):
    if isinstance(spec, MLAAttentionSpec):
        return 1
    if ranks == 1 or spec.num_kv_heads > 1:
        return spec.num_kv_heads * ranks
    # With more ranks than heads several have the same one.
    config = vllm_config.speculative_config.draft_model_config if is_draft else vllm_config.model_config
    return min(config.get_total_num_kv_heads(), ranks)


def content(vllm_config, layers):
    """What the bytes of these layers mean, beyond their dtype."""
    spec = layers[0].spec
    if isinstance(spec, MambaSpec):
        found = sorted({states.layout(layer.spec, state_cut(vllm_config, layer.spec)) for layer in layers})
        # A CPU's kernels read and write some states the other way round, in the same shape.
        memory = "cpu" if current_platform.is_cpu() else "gpu"
        return {"states": fitting("; ".join(found)), "convolution": conv_layout(), "state_memory": memory}
    return indexer_content(vllm_config, spec) if is_indexer(spec) else cpu_layout(vllm_config, spec)


def is_indexer(spec):
    """Whether it keeps what sparse attention chooses tokens by."""
    return getattr(getattr(spec, "cache_role", None), "name", "") == "INDEXER"


def indexer_parts(vllm_config, spec):
    """On CUDA a block has the keys of all its tokens, then a scale of four bytes for each 128 of them. Nothing: it is no
    indexer's, or a layout that kvgate does not know."""
    scales = spec.head_size // 33 if is_indexer(spec) else 0
    keys = spec.head_size - scales if scales else 0
    is_known = keys and scales * 128 == keys * 4 and not indexer_dtype(vllm_config) and not current_platform.is_rocm()
    return (keys, scales) if is_known else ()


def indexer_dtype(vllm_config):
    """Of the keys, where it is not vLLM's usual one: the bytes are as many."""
    told = getattr(getattr(vllm_config, "attention_config", None), "indexer_kv_dtype", None)
    return "" if told in (None, "auto", "fp8") else told


def indexer_content(vllm_config, spec):
    role = {"cache_role": "indexer"}
    if parts := indexer_parts(vllm_config, spec):
        return {**role, "indexer_rows": f"keys {parts[0]}, scales {parts[1]}"}
    # Whole blocks of a layout that is as the kernels like it.
    device, dtype = current_platform.device_type, indexer_dtype(vllm_config) or "fp8"
    device = "rocm" if current_platform.is_rocm() else device
    return {**role, "indexer_blocks": f"{device}, {dtype}, {spec.block_size} tokens a block"}


def conv_layout():
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return get_conv_state_layout()


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
    if isinstance(spec, MambaSpec) or is_indexer(spec):
        return "bytes"
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
        parallel.tensor_parallel_size * context_ranks(parallel)[0] > 1
        and getattr(parallel, "distributed_executor_backend", None) == "external_launcher"
    ):
        raise ValueError(
            "kvgate can't be used with distributed_executor_backend external_launcher and several ranks: each has a scheduler "
            "of its own, and what they load would come at different times"
        )


def refuse_tokens_that_can_not_be_dealt(vllm_config, layers):
    """With decode context parallelism each rank has some of a block's tokens, each of which has to be found by itself."""
    parallel = vllm_config.parallel_config
    name, ranks = "decode_context_parallel_size", context_ranks(parallel)[1]
    if ranks == 1:
        return
    interleave = parallel.cp_kv_cache_interleave_size
    for spec in (layer.spec for layer in layers if layer.spec.dcp_sharded):
        word, _ = kind_of(spec)
        if word != "full":
            what = "windows" if word == "window" else "chunked attention"
            raise ValueError(f"vLLM can't deal the tokens of {what} to several ranks: set {name} {ranks} to 1")
        if spec.block_size % interleave:
            raise ValueError(
                f"with {name} {ranks} vLLM's blocks of {spec.block_size} tokens must be a multiple of "
                f"cp_kv_cache_interleave_size {interleave}: set it to 1"
            )
        if cpu_layout(vllm_config, spec) or (is_indexer(spec) and not indexer_parts(vllm_config, spec)):
            raise ValueError(
                f"kvgate can't take KV apart whose tokens are packed together here: set {name} {ranks} to 1"
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
