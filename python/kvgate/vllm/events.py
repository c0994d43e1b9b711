"""KV events: they tell vLLM's subscribers, above all routers, which blocks the gateway has."""

from vllm.distributed.kv_events import MEDIUM_STORAGE, BlockStored
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)


class Events:
    def __init__(self, block_tokens, chunk_tokens):
        self.block_tokens, self.chunk_tokens = block_tokens, chunk_tokens
        self.ready = []

    def add(self, events):
        self.ready.extend(event for event in events if event)

    def take(self):
        ready, self.ready = self.ready, []
        return ready

    def stored(self, request, chunk):
        """The event that the gateway has a chunk. None: vLLM has no hashes of its own for its blocks."""
        size = self.block_tokens
        start, end = chunk * self.chunk_tokens, (chunk + 1) * self.chunk_tokens
        hashes = request.block_hashes[start // size : end // size]
        if len(hashes) < (end - start) // size:
            return None
        extra_keys = [
            generate_block_hash_extra_keys(request, token, token + size, 0)[0] for token in range(start, end, size)
        ]
        lora = request.lora_request
        return BlockStored(
            block_hashes=[maybe_convert_block_hash(block) for block in hashes],
            parent_block_hash=maybe_convert_block_hash(request.block_hashes[start // size - 1]) if start else None,
            token_ids=list(request.all_token_ids[start:end]),
            block_size=size,
            lora_id=lora.adapter_id if lora else None,
            medium=MEDIUM_STORAGE,
            lora_name=lora.name if lora else None,
            extra_keys=to_event_extra_keys(extra_keys),
        )
