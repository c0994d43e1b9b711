"""Context parallel ranks without an engine: vLLM's own specs of DeepSeek V3.2, blocks filled as its kernels fill them, the
connector's workers and a real gateway. What ranks that have some of the tokens each store is what one rank has.

python tests/engines/test_dealt.py     in an environment with vLLM and the wheel
"""

import functools
import tempfile
import time
import unittest
from types import SimpleNamespace
from unittest import mock

import test_model
import torch
from gateway import Gateway
from kvgate import Prompt
from kvgate.vllm import worker as worker_module
from kvgate.vllm.metadata import Load, LoadPart, Store, StorePart
from kvgate.vllm.model import describe
from kvgate.vllm.settings import Settings
from kvgate.vllm.worker import WorkerSide
from made_up import deepseek_v32
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import (
    _local_to_canonical_token,
    _RankContext,
)
from vllm.platforms import current_platform

CHUNK, CHUNKS, BLOCKS, KEYS = 48, 3, 64, 128


def setUpModule():
    """As on a GPU: no CPU deals tokens."""
    patch = mock.patch.object(type(current_platform), "is_cpu", lambda self: False)
    patch.start()
    unittest.addModuleCleanup(patch.stop)


def configuration(tp=1, pcp=1, dcp=1, interleave=1, rank=0):
    config = test_model.engine()
    vars(config.parallel_config).update(
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
        cp_kv_cache_interleave_size=interleave,
        rank=rank,
    )
    return config


def group_rank(tp, pcp, dcp, rank):
    """In vLLM's group of ranks that tokens are dealt to, as `initialize_model_parallel` makes it."""
    groups = torch.arange(tp * pcp).reshape(pcp, tp).transpose(0, 1).reshape(-1, dcp).tolist()
    return next(group.index(rank) for group in groups if rank in group)


@functools.cache
def row(layer, width, token):
    """What a model keeps of a token in a layer."""
    seed = hash((layer, token)) & 0xFFFF_FFFF
    return torch.randint(0, 256, (width,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


class Rank:
    def __init__(self, gateway, instance, block_tokens, rank=0, **parallel):
        self.block_tokens = block_tokens
        self.specs = deepseek_v32(block_tokens)
        config = configuration(**parallel, rank=rank)
        settings = Settings.read({"socket": str(gateway.socket), "chunk_tokens": CHUNK})
        model = describe(config, test_model.uniform(self.specs, block_tokens), settings)
        tp, pcp, dcp = (parallel.get(name, 1) for name in ("tp", "pcp", "dcp"))
        own = group_rank(tp, pcp, dcp, rank)
        with mock.patch.object(worker_module, "get_dcp_group", lambda: SimpleNamespace(rank_in_group=own)):
            self.side = WorkerSide(model, settings, config.parallel_config, instance)
        self.size = dcp
        # vLLM's own word on which token of a block that is dealt lies where.
        context = _RankContext(dcp, dcp, 1, parallel.get("interleave", 1), 1, own)
        self.tokens = [_local_to_canonical_token(local, context) for local in range(block_tokens)]
        self.memory = {
            name: torch.zeros(BLOCKS, 1, block_tokens, spec.state_content_size_bytes, dtype=torch.uint8)
            for name, spec in self.specs.items()
        }
        self.side.register(self.memory)
        self.prompt = Prompt(model.spaces[0])
        self.prompt.extend(list(range(CHUNK * CHUNKS)))

    @property
    def table(self):
        """A block has the tokens of all ranks."""
        return [1 + at * 5 % (BLOCKS - 1) for at in range(CHUNK * CHUNKS // (self.block_tokens * self.size))]

    def rows(self):
        """Of each of its tokens: the token, and the places of its row in memory, one after the other."""
        for name, spec in self.specs.items():
            for at, block in enumerate(self.table):
                bytes_ = self.memory[name][block].view(-1)
                for local, in_block in enumerate(self.tokens):
                    token = at * self.block_tokens * self.size + in_block
                    if "indexer" in name:
                        scales = bytes_[self.block_tokens * KEYS :]
                        places = bytes_[local * KEYS : (local + 1) * KEYS], scales[local * 4 : local * 4 + 4]
                    else:
                        width = spec.state_content_size_bytes
                        places = (bytes_[local * width : (local + 1) * width],)
                    yield token, row(name, spec.state_content_size_bytes, token), places

    def fill(self):
        for _, right, places in self.rows():
            for place, part in zip(places, right.split([len(place) for place in places]), strict=True):
                place.copy_(part)
        return self

    def wrong(self, first):
        """Tokens from `first` on whose rows are not right, and those before it that were written."""
        return {
            token
            for token, right, places in self.rows()
            if not torch.equal(torch.cat(places), right if token >= first else torch.zeros_like(right))
        }

    def attached(self):
        until(self.side.worker.is_attached)
        return self

    def store(self):
        prompt, chunks = self.prompt, list(range(CHUNKS))
        parents = b"".join(prompt.parent(chunk) for chunk in chunks)
        parts = [StorePart(kind, chunks, prompt.hashes(0, CHUNKS), parents, {0: self.table}) for kind in range(2)]
        self.side.store([Store("store", "r", parts)], None)

    def stored(self):
        until(lambda: self.side.collect() or "store" in self.side.report.stored)
        return self.side.report.stored["store"][1]

    def load(self, first):
        table = ((first, CHUNK * CHUNKS), self.table)
        parts = [LoadPart(kind, self.prompt.hashes(0, CHUNKS), 0, {0: table}) for kind in range(2)]
        self.side.load([Load("load", "r", parts)], None)

    def loaded(self):
        received = until(self.side.results)
        return received, self.side.take_failed_blocks()


def until(is_there):
    deadline = time.monotonic() + 20
    while not (there := is_there()) or there == (set(), set()):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.002)
    return there


ENGINES = {
    "alone": (8, 1, {}),
    "alone, other blocks": (16, 1, {}),
    "two ranks, token by token": (8, 2, {"tp": 2, "dcp": 2}),
    "two ranks, runs of four": (8, 2, {"tp": 2, "dcp": 2, "interleave": 4}),
    "two ranks, block by block": (8, 2, {"tp": 2, "dcp": 2, "interleave": 8}),
    "four ranks in two groups": (4, 4, {"tp": 4, "dcp": 2, "interleave": 2}),
    "two that split prefills": (8, 2, {"pcp": 2}),
    "two that split prefills, and have half of the tokens": (8, 2, {"pcp": 2, "dcp": 2}),
    "four, dealt to all": (4, 4, {"tp": 2, "pcp": 2, "dcp": 4}),
    "four, dealt to those that split prefills": (4, 4, {"tp": 2, "pcp": 2, "dcp": 2, "interleave": 4}),
}
"""Tokens of a rank's block, ranks, and how they share work."""


class DealtTest(unittest.TestCase):
    def ranks(self, gateway, instance, name):
        block_tokens, ranks, parallel = ENGINES[name]
        found = [Rank(gateway, instance, block_tokens, rank, **parallel) for rank in range(ranks)]
        for rank in found:
            self.addCleanup(rank.side.close)
        return [rank.attached() for rank in found]

    def test_what_any_engine_stores_any_other_loads(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-dealt-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        for number, writer in enumerate(ENGINES):
            gateway = Gateway(folder.name, f"gateway{number}").start()
            self.addCleanup(gateway.end)
            writers = [rank.fill() for rank in self.ranks(gateway, "writer", writer)]
            for rank in writers:
                rank.store()
            for rank in writers:
                self.assertEqual(rank.stored(), {(kind, chunk) for kind in range(2) for chunk in range(CHUNKS)})
            for reader in ENGINES:
                # Blocks that are there already end within a chunk.
                first = 0 if reader != writer else 32
                with self.subTest(writer=writer, reader=reader):
                    readers = self.ranks(gateway, f"reader {reader}", reader)
                    for rank in readers:
                        rank.load(first)
                    for rank in readers:
                        self.assertEqual(rank.loaded(), (({"r"}, set()), set()))
                        self.assertEqual(rank.wrong(first), set())
            gateway.end()


if __name__ == "__main__":
    unittest.main(verbosity=2)
