"""The kinds of KV that a model's layers keep, as kvgate stores them: one space each, whatever groups vLLM deals its layers
into."""

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from kvgate import Space

REFUSED = {
    "SlidingWindowMLASpec": "MLA with a sliding window",
    "RSWASpec": "attention with references of its own (R-SWA)",
    "SinkFullAttentionSpec": "attention with sinks of its own",
    "CrossAttentionSpec": "an encoder's KV",
    "EncoderOnlyAttentionSpec": "an encoder's KV",
}


@dataclasses.dataclass(frozen=True)
class EngineLayer:
    """A layer as a rank has it."""

    name: str
    """vLLM's."""
    group: int
    """Index of its KV cache group."""
    spec: object


@dataclasses.dataclass(frozen=True)
class Run:
    """A part of a state's rows in a rank's page: the same of the next head comes right behind it."""

    offset: int
    """In the page: of the rank's first head."""
    row_offset: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class Plane:
    name: str
    heads: int
    """Of all ranks together."""
    row_bytes: int
    runs: tuple[Run, ...] = ()
    """Of a state. Where attention's rows lie its tensors say."""


@dataclasses.dataclass(frozen=True)
class Kind:
    space: Space
    word: str
    """`full`, `window`, `chunked` or `state`, as in the space."""
    span: int
    """Tokens of the window or of an attention chunk."""
    is_draft: bool
    """The layers of a draft model: without its KV fewer drafts are accepted, and nothing is wrong."""
    blocks: dict[int, int]
    """Tokens of a block on all ranks together, by each KV cache group that has layers of this kind."""
    layers: tuple[EngineLayer, ...]
    """Those of this rank."""
    planes: tuple[dict[int, Plane], ...]
    """Of each of these layers, by their index in the space."""
    row_parts: tuple[int, ...] = ()
    """Bytes of the parts of a token's row, where a block has one part of all its tokens after the other."""

    def first_token(self, tokens):
        """Of those that the token after these attends to, or that its state was made from."""
        match self.word:
            case "full":
                return 0
            case "window":
                return max(0, tokens - self.span + 1)
            case "chunked":
                return tokens // self.span * self.span
        return max(0, tokens - 1)


@dataclasses.dataclass
class AllLayers(KVConnectorHandshakeMetadata):
    """What a worker tells the scheduler of: those of all pipeline stages, each with its own spec."""

    layers: list[EngineLayer]


def kind_of(spec):
    """Its kind, as a space says it. A subclass is of some other attention: of R-SWA, for one, KV depends on what is left out
    while decoding."""
    if getattr(spec, "num_head_slots", None) is not None:
        raise ValueError(
            "kvgate can't reuse KV of an attention backend that keeps K and V in slots of their own yet: choose another "
            "--attention-backend"
        )
    if getattr(spec, "non_causal", False) or getattr(spec, "non_causal_multi_token_decode", False):
        raise ValueError("kvgate reuses causal attention only: here a prompt's end changes what comes before it")
    if type(spec) is not MambaSpec and getattr(spec, "tokens_per_state", 1) != 1:
        raise ValueError(
            "kvgate can't reuse KV that is kept once for several tokens (GLM-5.3) yet: run this model without kvgate"
        )
    match type(spec):
        # With the hybrid manager off, layers with a window are among these: vLLM keeps all of their blocks, and a token's KV
        # does not depend on how long later tokens attend to it.
        case cls if cls in (FullAttentionSpec, MLAAttentionSpec):
            return "full", 0
        case cls if cls is SlidingWindowSpec:
            # Drafts of several modules want some more tokens kept.
            return "window", spec.sliding_window + spec.extra_retained_tokens
        case cls if cls is ChunkedLocalAttentionSpec:
            return "chunked", spec.attention_chunk_size
        case cls if cls is MambaSpec:
            if spec.mamba_cache_mode != "align":
                raise ValueError(
                    "kvgate reuses states (Mamba, linear attention) only where vLLM keeps them at block boundaries: give "
                    "vLLM --enable-prefix-caching"
                )
            return "state", 0
    name = type(spec).__name__
    raise ValueError(f"kvgate can't reuse {REFUSED.get(name, name)} yet: run this model without kvgate")


def context_ranks(parallel):
    """Ranks that split a prompt's prefill, each of which has all of its KV then; and those that its tokens are dealt to."""
    return getattr(parallel, "prefill_context_parallel_size", 1), getattr(parallel, "decode_context_parallel_size", 1)


def block_tokens(spec, parallel):
    """Of a block on all ranks together: those that a prompt's tokens are dealt to have the same number for it. A state, and a
    draft that is not dealt, are on each rank as a whole."""
    return spec.block_size * (context_ranks(parallel)[1] if spec.dcp_sharded else 1)


def kind_json(word, span):
    return {word: span} if span else word


def layers_of(kv_cache_config):
    """All layers whose KV is a function of the prefix, each with its own spec."""
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        if not getattr(spec, "prefix_cacheable", True):
            continue
        of_layer = getattr(spec, "kv_cache_specs", {})
        for name in group.layer_names:
            yield EngineLayer(name, number, of_layer.get(name, spec))
