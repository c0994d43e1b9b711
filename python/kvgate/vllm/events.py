"""KV events: they tell vLLM's subscribers, above all routers, what the node's memory and disks hold.

The gateway keeps a log of what comes and leaves, whichever engine of the node it is from. A chunk is in it once an engine has
said what vLLM's own event would tell of it: its blocks' hashes, its tokens. Each engine publishes all of it in its own stream,
where routers credit it. S3 has no events: it is the same for all engines.

After a reset vLLM's hashes are the same, and the chunks are others: what was told is told as gone, and what is stored since
has a log of its own.
"""

import base64
import dataclasses
import itertools
from array import array

import msgspec
from vllm import envs
from vllm.distributed.kv_events import MEDIUM_CPU, MEDIUM_STORAGE, BlockRemoved, BlockStored
from vllm.logger import init_logger
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

from kvgate import Follower

logger = init_logger(__name__)

MEDIA = {"memory": MEDIUM_CPU, "disk": MEDIUM_STORAGE}
PLACE = {"locality": "LOCAL", "ownership": "kvgate"}
"""In all events: the node's own, and whose tier it is."""
EVENTS_A_STEP = 64
"""Some 15 microseconds each, in which the scheduler does nothing else."""


@dataclasses.dataclass(frozen=True)
class Note:
    """What a chunk's events tell."""

    chunk: int
    hash: bytes
    tokens: bytes
    event: str
    epoch: str
    """Of the reset before it."""


class Events:
    def __init__(self, model, settings, algorithm, groups):
        """`algorithm`: vLLM's hash of blocks; `groups`: its KV cache groups."""
        self.model, self.settings, self.algorithm = model, settings, algorithm
        self.block_tokens, self.chunk_tokens = model.hash_tokens, model.chunk_tokens
        self.group = next(iter(model.kinds[0].blocks))
        spec = groups[self.group].kv_cache_spec
        self.spec = {
            "group_idx": self.group,
            "kv_cache_spec_kind": get_kv_cache_spec_kind(spec).value,
            "kv_cache_spec_sliding_window": getattr(spec, "sliding_window", None),
        }
        self.lookahead_tokens, self.epoch = 0, ""
        self.decoder = msgspec.msgpack.Decoder(BlockStored)
        self._follower = None

    def bind_pool(self, pool):
        """vLLM's hash of a block may take tokens after it."""
        self.lookahead_tokens = getattr(pool, "num_hash_lookahead_tokens", 0)
        reset = pool.reset_prefix_cache

        def reset_and_tell_anew():
            # vLLM says AllBlocksCleared then, and some routers forget also what is in the node's tiers.
            is_reset = reset()
            if is_reset and self._follower is not None:
                self._follower.tell_anew()
            return is_reset

        pool.reset_prefix_cache = reset_and_tell_anew

    def reset(self, epoch):
        """Nothing that was stored so far is found any more by this engine."""
        self.epoch = epoch.hex()
        if self._follower is not None:
            self._follower = self._follower.succeeded_by(self.scheme())

    def scheme(self):
        """Engines with the same one share what they tell."""
        seed = kv_cache_utils.NONE_HASH.hex()[:16]
        form = "int" if envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES else "bytes"
        words = ["vllm", self.algorithm, seed, self.block_tokens, form, self.lookahead_tokens, self.group, self.epoch]
        return " ".join(map(str, words))

    @property
    def follower(self):
        # vLLM seeds its hashes after it has made the connector.
        if self._follower is None:
            self._follower = Follower(
                self.settings.socket, self.model.spaces[0], self.scheme(), self.settings.socket_owner
            )
        return self._follower

    def note(self, request, prompt, chunk):
        """Of a chunk whose tokens are known. None: vLLM has no hashes of its own for its blocks."""
        size = self.block_tokens
        start, end = chunk * self.chunk_tokens, (chunk + 1) * self.chunk_tokens
        blocks = range(start, end, size)
        hashes = request.block_hashes[start // size : end // size]
        if len(hashes) < len(blocks):
            return None
        lora = request.lora_request
        told = {
            "block_hashes": [maybe_convert_block_hash(block) for block in hashes],
            "parent_block_hash": maybe_convert_block_hash(request.block_hashes[start // size - 1]) if start else None,
            "token_ids": [],
            "block_size": size,
            # Of this engine alone, and deprecated.
            "lora_id": None,
            "medium": None,
            "lora_name": lora.name if lora else None,
            "extra_keys": to_event_extra_keys(
                [generate_block_hash_extra_keys(request, token, token + size, 0)[0] for token in blocks]
            ),
            **self.spec,
            **PLACE,
        }
        if self.lookahead_tokens:
            told["lookahead_token_ids"] = [
                list(request.all_token_ids[token + size : token + size + self.lookahead_tokens]) for token in blocks
            ]
        return Note(
            chunk,
            prompt.hashes(chunk, chunk + 1),
            array("I", request.all_token_ids[start:end]).tobytes(),
            base64.b64encode(msgspec.msgpack.encode(BlockStored(**told))).decode(),
            self.epoch,
        )

    def bind(self, request, prompt, notes):
        """The node has these chunks of a prompt."""
        runs = itertools.groupby(
            enumerate(note for note in notes if note is not None and note.epoch == self.epoch),
            key=lambda place: place[1].chunk - place[0],
        )
        # A router's hashes know nothing of images.
        block_size = None if getattr(request, "mm_features", None) else self.block_tokens
        for _, run in runs:
            run = [note for _, note in run]
            self.follower.bind(
                b"".join(note.hash for note in run),
                prompt.parent(run[0].chunk) if run[0].chunk else None,
                b"".join(note.tokens for note in run),
                [note.event for note in run],
                block_size,
                request.lora_request.name if request.lora_request else "",
                request.cache_salt or "",
            )

    def take(self):
        """vLLM's events since the last step."""
        events = (self.event(*change) for change in self.follower.take(EVENTS_A_STEP))
        return [event for event in events if event is not None]

    def event(self, tier, is_stored, tokens, told):
        try:
            event = self.decoder.decode(base64.b64decode(told))
        except (msgspec.DecodeError, ValueError):
            logger.warning_once("kvgate: another program of this node has said nonsense of a chunk: it has no events")
            return None
        if not is_stored:
            return BlockRemoved(event.block_hashes, MEDIA[tier], event.group_idx, **PLACE)
        event.token_ids, event.medium = array("I", tokens).tolist(), MEDIA[tier]
        return event
