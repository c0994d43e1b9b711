"""Models, requests and blocks without an engine, for tests of the connector's parts."""

import json
from types import SimpleNamespace

import torch
from kvgate import Space
from kvgate.vllm.kinds import Kind
from kvgate.vllm.model import Model
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache

CHUNK, BLOCK = 8, 4


def kind(word="full", span=0, blocks=None, is_draft=False, chunk_tokens=CHUNK):
    """`blocks`: tokens of a block by group."""
    space = {
        "model": "m",
        "revision": "1",
        "chunk_tokens": chunk_tokens,
        "kind": {word: span} if span else word,
        "draft": "eagle" if is_draft else "",
        "planes": [{"name": "kv", "layer": 0, "heads": 1, "row_bytes": 32}],
    }
    return Kind(Space(json.dumps(space)), word, span, is_draft, blocks or {0: BLOCK}, (), ())


def model(*kinds, chunk_tokens=CHUNK, drops_last=False):
    """Of full attention in one group, unless told."""
    kinds = kinds or (kind(),)
    sizes = {group: size for one in kinds for group, size in one.blocks.items()}
    return Model(kinds, chunk_tokens, max(sizes.values()), min(sizes.values()), drops_last, len(sizes))


def deepseek_v32(block_tokens):
    """The specs that vLLM makes of two of its layers."""
    cache = SimpleNamespace(block_size=block_tokens)
    config = SimpleNamespace(cache_config=cache, model_config=SimpleNamespace(dtype=torch.bfloat16))
    latent = SimpleNamespace(
        kv_cache_dtype="fp8_ds_mla",
        head_size=576,
        sliding_window=None,
        indexer=object(),
        non_causal_multi_token_decode=False,
        topk_buffer_width=None,
    )
    keys = SimpleNamespace(head_dim=128 + 4, dtype=torch.uint8, cache_config=cache)
    latent, keys = (
        MLAAttention.get_kv_cache_spec(latent, config),
        DeepseekV32IndexerCache.get_kv_cache_spec(keys, config),
    )
    return {
        f"model.layers.{layer}.self_attn.{part}": spec
        for layer in range(2)
        for part, spec in (("attn", latent), ("indexer.k_cache", keys))
    }


def request(name="r", tokens=range(20), **more):
    fields = {
        "request_id": name,
        "all_token_ids": list(tokens),
        "num_tokens": len(tokens),
        "num_prompt_tokens": len(tokens),
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
        "prompt_embeds": None,
    }
    return SimpleNamespace(**{**fields, **more})


class Pool:
    """Counts the references to each block, as vLLM's does; one that nobody has can't be freed."""

    def __init__(self, size=100):
        self.blocks = [SimpleNamespace(block_id=number, ref_cnt=0, block_hash=None) for number in range(size)]
        self.freed = []
        """In order."""
        self.resets = 0

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            if not block.ref_cnt:
                raise AssertionError(f"block {block.block_id} is nobody's")
            block.ref_cnt -= 1
            self.freed.append(block.block_id)

    def take(self, *numbers):
        """vLLM gives them to a request."""
        self.touch([self.blocks[number] for number in numbers])

    def leave(self, *numbers):
        """Their request has no need of them any more."""
        self.free_blocks([self.blocks[number] for number in numbers])
        self.freed.clear()

    def held(self):
        """References by block, of those that have any."""
        return {block.block_id: block.ref_cnt for block in self.blocks if block.ref_cnt}

    def reset_prefix_cache(self):
        self.resets += 1
        return not self.held()
