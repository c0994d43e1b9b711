"""KV events of a real gateway, as vLLM's subscribers read them: after any history of stores, evictions and restarts they know
exactly what the node's memory and disks hold.

python tests/engines/test_events.py     in an environment with vLLM and the wheel

vLLM's own: requests and their hashes, the events and their encoding. test_features.py has a whole engine.
"""

import base64
import http.client
import os
import random
import re
import signal
import socket
import tempfile
import time
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")

import kvgate
import msgspec
import numpy as np
import torch
from gateway import Gateway
from kvgate.vllm.events import Events
from vllm.distributed.kv_events import KVEventBatch
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

BLOCK, CHUNK = 4, 8
STORES = int(os.environ.get("KVGATE_TEST_EVENTS", "100000"))
"""Chunks that are stored."""
SETTINGS = {
    "KVGATE__ARENA__SIZE": "24MiB",
    "KVGATE__LOAD__RESERVE": "2MiB",
    "KVGATE__LOAD__WINDOW": "2MiB",
    "KVGATE__STORE__WRITE_BEHIND": "4MiB",
    "KVGATE__DISK__SIZE": "16MiB",
    # S3 has no part in it.
    "KVGATE__DISK__LOOKUP": "stop",
    "KVGATE__DISK__STORE": "stop",
    # Readers that are behind lose some.
    "KVGATE__EVENTS__REMOVALS": "300",
}

init_none_hash(sha256_cbor)
HASHER = get_request_block_hasher(BLOCK, sha256_cbor)
SPACE = kvgate.space(
    model="test/events", revision="1", dtype="float16", layers=1, heads=1, head_dim=8, chunk_tokens=CHUNK
)


def request(tokens, **more):
    sampling = SamplingParams(max_tokens=1)
    return Request("r", list(tokens), sampling, None, block_hasher=HASHER, **more)


class Engine:
    """The connector's part of an engine, and a subscriber of its stream."""

    def __init__(self, node, block=BLOCK):
        model = SimpleNamespace(
            hash_tokens=block, chunk_tokens=CHUNK, kinds=[SimpleNamespace(blocks={0: block})], spaces=[SPACE]
        )
        spec = FullAttentionSpec(block_size=block, num_kv_heads=1, head_size=8, dtype=torch.float16)
        settings = SimpleNamespace(socket=str(node.socket), socket_owner=os.getuid())
        self.events = Events(model, settings, "sha256_cbor", [SimpleNamespace(kv_cache_spec=spec)])
        self.knows = {"CPU": set(), "STORAGE": set()}
        self.stored = []

    def bind(self, one, epoch=b""):
        prompt = kvgate.Prompt(SPACE, salt=(one.cache_salt or "").encode(), adapter=epoch)
        prompt.extend(one.all_token_ids)
        self.events.bind(one, prompt, [self.events.note(one, prompt, chunk) for chunk in range(len(prompt))])
        return prompt

    def step(self):
        """What the engine publishes after a step, over the wire."""
        events = self.events.take()
        wire = msgspec.msgpack.encode(KVEventBatch(ts=time.time(), events=events))
        for event in msgspec.msgpack.decode(wire, type=KVEventBatch).events:
            blocks = self.knows[event.medium]
            if type(event).__name__ == "BlockStored":
                self.stored.append(event)
                parent = event.parent_block_hash
                is_known = parent is None or any(parent in blocks for blocks in self.knows.values())
                assert is_known, "routers drop what follows a block that they don't know"
                assert blocks.isdisjoint(event.block_hashes), "stored once"
                blocks.update(event.block_hashes)
            else:
                assert blocks.issuperset(event.block_hashes), "only what was stored is removed"
                blocks.difference_update(event.block_hashes)
        return len(events)


class EventsCase(unittest.TestCase):
    settings = SETTINGS

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-events-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.disk = Path(folder.name) / "disk"
        self.disk.mkdir()
        environment = mock.patch.dict(os.environ, {**self.settings, "KVGATE__DISK__PATHS": str(self.disk)})
        environment.start()
        self.addCleanup(environment.stop)
        self.node = Gateway(folder.name)
        self.addCleanup(self.node.end)
        self.node.start()
        self.blocks = {}
        """Of each chunk that was ever stored."""
        self.parents = {}

    def store(self, gateway, tokens, *engines, **more):
        """Chunks that were new. Each of the engines is told."""
        one = request(tokens, **more)
        kv = np.zeros((1, 2, len(tokens), 1, 8), np.float16)
        done = gateway.store_from(SPACE, tokens, kv, salt=(one.cache_salt or "").encode())
        for engine in engines:
            prompt = engine.bind(one)
        per_chunk = CHUNK // BLOCK
        for chunk in range(len(prompt)):
            blocks = one.block_hashes[chunk * per_chunk : (chunk + 1) * per_chunk]
            self.blocks[prompt.hashes(chunk, chunk + 1)] = [maybe_convert_block_hash(block) for block in blocks]
            self.parents[prompt.hashes(chunk, chunk + 1)] = prompt.parent(chunk) if chunk else None
        return done.new_chunks

    def index(self):
        """Blocks in memory, by what a lookup says, and on the disk, by its files. Also those of them that all of their prompt
        before them is there with: routers know of the others only if they were told before something left."""
        chunks, memory = list(self.blocks), set()
        for first in range(0, len(chunks), 60_000):
            some = chunks[first : first + 60_000]
            connection = http.client.HTTPConnection("localhost")
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.connect(str(self.node.socket))
            octets = {"content-type": "application/octet-stream", "accept": "application/octet-stream"}
            path = f"/v1/lookup?space={SPACE.id}&strategy=exact&tiers=true"
            connection.request("POST", path, b"".join(some), octets)
            answer = connection.getresponse()
            masks = np.frombuffer(answer.read(), np.uint8)
            connection.close()
            if answer.status == 404:
                # A new daemon, to which no engine has come.
                break
            assert answer.status == 200, masks.tobytes()
            size = -(-len(some) // 8)
            bits = np.unpackbits(masks[3 * size : 4 * size], bitorder="little")[: len(some)]
            memory.update(chunk for chunk, is_here in zip(some, bits, strict=True) if is_here)
        files = (path.name for path in self.disk.rglob("*") if re.fullmatch("[0-9a-f]{64}", path.name))
        # Those of another epoch are nobody's here.
        disk = {bytes.fromhex(name) for name in files} & self.blocks.keys()
        whole = set()
        # Parents are stored first.
        for chunk, parent in self.parents.items():
            if (chunk in memory or chunk in disk) and (parent is None or parent in whole):
                whole.add(chunk)

        def blocks(chunks):
            return {block for chunk in chunks for block in self.blocks[chunk]}

        here = {"CPU": memory, "STORAGE": disk}
        return {medium: (blocks(chunks & whole), blocks(chunks)) for medium, chunks in here.items()}

    def agree(self, *engines):
        """Once nothing is under way. Answers what is there."""
        end = time.monotonic() + 60
        while True:
            while any([engine.step() for engine in engines]):
                pass
            index = self.index()
            if all(
                least <= engine.knows[medium] <= most for engine in engines for medium, (least, most) in index.items()
            ):
                return {medium: most for medium, (_, most) in index.items()}
            if time.monotonic() > end:
                for engine in engines:
                    for medium, (least, most) in index.items():
                        knows = engine.knows[medium]
                        print(medium, "has", len(most), "more", len(knows - most), "less", len(least - knows))
                raise AssertionError("the subscriber has another picture than the node")
            time.sleep(0.05)


class HistoryTest(EventsCase):
    def test_subscribers_know_what_the_node_holds(self):
        numbers = random.Random(1)
        engines = [Engine(self.node)]
        prompts, stored, next_check, checks = [[]], 0, STORES // 20, 0
        gateway = kvgate.connect(self.node.socket)
        while stored < STORES:
            shared = numbers.choice(prompts[-50:])
            shared = shared[: numbers.randrange(len(shared) + 1) // CHUNK * CHUNK]
            new = CHUNK * numbers.randrange(1, 30) + numbers.randrange(CHUNK)
            tokens = shared + [numbers.randrange(100_000) for _ in range(new)]
            prompts.append(tokens)
            stored += self.store(gateway, tokens, numbers.choice(engines))
            if numbers.random() < 0.3:
                # Engines step late.
                numbers.choice(engines).step()
            if stored < next_check and stored < STORES:
                continue
            next_check += STORES // 20
            checks += 1
            index = self.agree(*engines)
            self.assertTrue(index["CPU"] and index["STORAGE"])
            if checks % 4 == 1:
                gateway.close()
                self.node.stop(signal.SIGKILL if checks % 8 == 1 else signal.SIGTERM)
                self.node.start()
                gateway = kvgate.connect(self.node.socket)
                self.assertTrue(self.agree(*engines)["STORAGE"], "disks are there again")
            if checks == 3:
                # A second engine is told of what the first has stored.
                engines.append(Engine(self.node))
                self.agree(*engines)
        gateway.close()
        self.assertGreaterEqual(checks, 20)
        self.assertLess(len(index["STORAGE"]), sum(map(len, self.blocks.values())), "some were evicted")


class EventTest(EventsCase):
    def test_events_say_what_vllms_own_say(self):
        engine, other = Engine(self.node), Engine(self.node)
        lora = LoRARequest("adapter", 3, "/nowhere")
        with kvgate.connect(self.node.socket) as gateway:
            self.store(gateway, list(range(2 * CHUNK + 3)), engine, cache_salt="salt", lora_request=lora)
        self.agree(engine, other)
        one = request(range(2 * CHUNK), cache_salt="salt", lora_request=lora)
        hashes = [maybe_convert_block_hash(block) for block in one.block_hashes]
        events = [event for event in other.stored if event.medium == "CPU"]
        self.assertEqual([event.block_hashes for event in events], [hashes[:2], hashes[2:]])
        self.assertEqual([event.parent_block_hash for event in events], [None, hashes[1]])
        self.assertEqual([event.token_ids for event in events], [list(range(CHUNK)), list(range(CHUNK, 2 * CHUNK))])
        for event in events:
            self.assertEqual((event.block_size, event.lora_name, event.locality), (BLOCK, "adapter", "LOCAL"))
            self.assertEqual((event.group_idx, event.kv_cache_spec_kind), (0, "full_attention"))
        self.assertEqual(events[0].extra_keys[0], ("adapter", "salt"))

    def test_after_a_reset_of_vllms_cache_all_is_told_anew(self):
        engine = Engine(self.node)
        pool = BlockPool(8, True, BLOCK, enable_kv_cache_events=True)
        engine.events.bind_pool(pool)
        with kvgate.connect(self.node.socket) as gateway:
            self.store(gateway, list(range(2 * CHUNK)), engine)
        index = self.agree(engine)
        self.assertTrue(pool.reset_prefix_cache())
        self.assertEqual([type(event).__name__ for event in pool.take_events()], ["AllBlocksCleared"])
        engine.stored.clear()
        self.agree(engine)
        stored = {block for event in engine.stored if event.medium == "CPU" for block in event.block_hashes}
        self.assertEqual(stored, index["CPU"])

    def test_a_reset_that_other_weights_may_follow_leaves_nothing_told(self):
        engine, other = Engine(self.node), Engine(self.node)
        tokens, kv = list(range(2 * CHUNK)), np.zeros((1, 2, 2 * CHUNK, 1, 8), np.float16)
        one, epoch = request(tokens), b"another epoch"
        with kvgate.connect(self.node.socket) as gateway:
            self.store(gateway, tokens, engine)
            index = self.agree(engine, other)
            engine.events.reset(epoch)
            engine.step()
            self.assertEqual(engine.knows, {"CPU": set(), "STORAGE": set()})
            gateway.store_from(SPACE, tokens, kv, adapter=epoch)
        # vLLM's hashes are the same, and what is stored now is something else.
        engine.bind(one, epoch)
        end = time.monotonic() + 60
        while engine.step() or engine.knows["CPU"] != index["CPU"]:
            self.assertLess(time.monotonic(), end)
            time.sleep(0.05)
        self.assertEqual(self.agree(other)["CPU"], index["CPU"])

    def test_engines_with_other_blocks_are_apart(self):
        engine, other = Engine(self.node), Engine(self.node, block=8)
        with kvgate.connect(self.node.socket) as gateway:
            self.store(gateway, list(range(CHUNK)), engine)
        self.agree(engine)
        other.step()
        time.sleep(0.5)
        self.assertEqual(other.step(), 0)

    def test_nonsense_of_another_program_is_no_event(self):
        engine = Engine(self.node)
        with kvgate.connect(self.node.socket) as gateway:
            self.store(gateway, list(range(CHUNK)), engine)
            while not self.agree(engine)["STORAGE"]:
                # Its write to the disk is an event of its own.
                time.sleep(0.05)
            tokens = list(range(100, 100 + CHUNK))
            gateway.store_from(SPACE, tokens, np.zeros((1, 2, CHUNK, 1, 8), np.float16))
        for nonsense in ("%", base64.b64encode(b"\xc1").decode()):
            prompt = kvgate.Prompt(SPACE)
            prompt.extend(tokens)
            bytes_of = np.asarray(tokens, np.uint32).tobytes()
            engine.events.follower.bind(prompt.hashes(0, 1), None, bytes_of, [nonsense])
        time.sleep(0.5)
        self.assertEqual(engine.step(), 0)


OFF = {**SETTINGS, "KVGATE__EVENTS__CHUNKS": "0"}


class OffTest(EventsCase):
    settings = OFF

    def test_a_node_without_events_has_none(self):
        engine = Engine(self.node)
        with kvgate.connect(self.node.socket) as gateway:
            self.store(gateway, list(range(CHUNK)), engine)
        time.sleep(0.5)
        self.assertEqual(engine.step(), 0)


if __name__ == "__main__":
    unittest.main()
