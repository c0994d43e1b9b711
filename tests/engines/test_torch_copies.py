"""Copies by torch's own calls: on a device that only torch reaches. (test_features.py has them in a real vLLM.)

python tests/engines/test_torch_copies.py     in an environment with the wheel and torch, with g++
"""

import json
import os
import sys
import tempfile
import time
import unittest
from unittest import mock

import foreign_device
import torch
from gateway import Gateway
from kvgate import Prompt, Space, Worker, torch_check
from kvgate.tensors import describe
from kvgate.torch_copies import TorchCopies, are_needed
from torch.utils._python_dispatch import TorchDispatchMode

FOREIGN = foreign_device.load()
CHUNK, LAYERS, HEADS, DIM, BLOCKS = 8, 2, 4, 6, 16
"""Rows of 24 bytes, so that not all are as wide as a number."""
SPACE = Space(
    json.dumps(
        {
            "model": "foreign",
            "revision": "1",
            "dtype": "float16",
            "chunk_tokens": CHUNK,
            "mha": {"layers": LAYERS, "heads": HEADS, "head_dim": DIM},
        }
    )
)


class Watched(TorchCopies):
    """Notes what is waited for, and fails when told to."""

    def __init__(self, tensors):
        super().__init__(tensors)
        self.said, self.fails, self.fails_to_mark = [], False, False

    def mark(self):
        if self.fails_to_mark:
            raise RuntimeError("the device has no more events")
        mark = super().mark()
        self.said.append("marked")
        return Watch(self.said, mark)

    def load(self, *arguments):
        if self.fails:
            raise RuntimeError("the device is out of order")
        super().load(*arguments)
        self.said.append("loaded")

    def store(self, *arguments):
        if self.fails:
            raise RuntimeError("the device is out of order")
        super().store(*arguments)
        self.said.append("stored")


class Watch:
    def __init__(self, said, mark):
        self.said, self.mark = said, mark

    def synchronize(self):
        self.said.append("waited")
        self.mark.synchronize()


class Calls(TorchDispatchMode):
    """Counts calls of torch."""

    calls = 0

    def __torch_dispatch__(self, call, types, arguments=(), named=None):
        self.calls += 1
        return call(*arguments, **(named or {}))


class Rank:
    """A worker whose tensors are on the device: each layer [blocks, heads, block tokens, K and V], in an order of its own."""

    def __init__(self, gateway, instance, block_tokens, rank=0, ranks=1, tokens=None):
        """`tokens`: those of a chunk that it has, of all heads; else it has some heads of all tokens."""
        self.block_tokens, heads = block_tokens, HEADS if tokens else HEADS // ranks
        self.chunk = CHUNK // (tokens["size"] if tokens else 1)
        shape = (heads, BLOCKS, block_tokens, 2 * DIM)
        self.layers = [torch.zeros(shape, dtype=torch.float16).to(FOREIGN).transpose(0, 1) for _ in range(LAYERS)]
        own = (0, heads) if tokens else (rank * heads, (rank + 1) * heads)
        attach = {"instance": instance, "rank": rank, "world_size": ranks}
        if tokens:
            attach["tokens"] = tokens
        elif ranks > 1:
            attach["tp"] = [rank, ranks]
        tensors = [describe(tensor, "BHNC", plane, own) for plane, tensor in enumerate(self.layers)]
        settings = {
            "socket": str(gateway.socket),
            "attach": attach,
            "kinds": [{"groups": [tensors], "tokens": [tokens], "is_draft": False}],
            "device": None,
            "load_deadline_ms": 10_000,
            "store_deadline_ms": 10_000,
            "patience_ms": 10_000,
            "breaker_timeouts": 3,
            "breaker_pause_ms": 1000,
        }
        self.copies = Watched(self.layers)
        self.worker = Worker(json.dumps(settings), [SPACE], self.copies)

    def table(self, chunks):
        return [
            (chunk * (self.chunk // self.block_tokens) + at) * 5 % BLOCKS
            for chunk in range(chunks)
            for at in range(self.chunk // self.block_tokens)
        ]

    def rows(self, chunks):
        """[layer, head, token, K and V] of the leading chunks."""
        blocks = torch.tensor(self.table(chunks))
        layers = [layer.cpu()[blocks].transpose(0, 1).flatten(1, 2) for layer in self.layers]
        return torch.stack(layers)

    def fill(self, chunks, rows):
        blocks = torch.tensor(self.table(chunks))
        for layer, of_layer in zip(self.layers, rows, strict=True):
            host = layer.cpu()
            host[blocks] = of_layer.unflatten(1, (-1, self.block_tokens)).transpose(0, 1)
            layer.copy_(host)

    def store(self, prompt, chunks):
        parents = b"".join(prompt.parent(chunk) for chunk in range(chunks))
        self.worker.store("store", [(0, prompt.hashes(0, chunks), parents, [self.table(chunks)])])
        return lambda: self.ended(self.worker.stored)

    def load(self, prompt, chunks, tokens):
        return self.begin_load(prompt, chunks, tokens)()

    def begin_load(self, prompt, chunks, tokens):
        self.worker.load("load", [(0, prompt.hashes(0, chunks), [(tokens, self.table(chunks))])])
        return lambda: self.ended(self.worker.loaded)

    def attached(self):
        deadline = time.monotonic() + 20
        while not self.worker.is_attached():
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.01)

    def ended(self, poll):
        deadline = time.monotonic() + 20
        while not (ended := poll()):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.002)
        return ended[0]


class DeviceTest(unittest.TestCase):
    def gateway(self, **settings):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-foreign-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        with mock.patch.dict(os.environ, settings):
            gateway = Gateway(folder.name).start()
        self.addCleanup(gateway.end)
        return gateway

    def test_each_layout_of_engines(self):
        for device in (FOREIGN, torch.device("cpu")):
            for name, axes in torch_check.LAYOUTS.items():
                with self.subTest(f"{name} on {device}"):
                    self.assertTrue(torch_check.check(device, True, *axes))

    def test_other_devices_than_cpus_and_cudas_need_them(self):
        needed = [are_needed(torch.device(name)) for name in ("cpu", "cuda:0", "foreign:0", "xpu", "meta")]
        self.assertEqual(needed, [False, torch.version.hip is not None, True, True, True])

    def test_two_ranks_store_and_one_loads(self):
        gateway = self.gateway()
        prompt = Prompt(SPACE)
        prompt.extend(range(CHUNK * 3))
        rows = torch.randn(LAYERS, HEADS, CHUNK * 3, 2 * DIM, generator=torch.Generator().manual_seed(1)).half()
        ranks = [Rank(gateway, "writer", 4, rank, 2) for rank in range(2)]
        # Until both are attached nobody knows who writes what.
        for rank in ranks:
            rank.attached()
        for rank, heads in zip(ranks, rows.split(HEADS // 2, dim=1), strict=True):
            rank.fill(3, heads)
        for stored in [rank.store(prompt, 3) for rank in ranks]:
            stored = stored()
            self.assertEqual((stored.stored, stored.refused, stored.error), (3, 0, None))
        for rank in ranks:
            self.assertEqual(rank.copies.said[:2], ["marked", "waited"], "a store comes after the step")
            self.assertEqual(rank.copies.said.count("stored"), 3)
            rank.worker.close()

        reader = Rank(gateway, "reader", 2)
        loaded = reader.load(prompt, 3, (4, CHUNK * 3))
        self.assertEqual((loaded.missing, loaded.error), ([], None))
        self.assertEqual(reader.copies.said[:2], ["marked", "waited"], "a load comes after the step")
        self.assertTrue(torch.equal(reader.rows(3)[:, :, 4:], rows[:, :, 4:]))
        self.assertFalse(reader.rows(3)[:, :, :4].any(), "tokens that are there already are not written")
        self.assertEqual(sum(layer.cpu().any(dim=(1, 2, 3)).sum() for layer in reader.layers).item(), LAYERS * 10)

        # A device that fails costs the chunk, and nothing else.
        reader.copies.fails = True
        loaded = reader.load(prompt, 3, (0, CHUNK * 3))
        self.assertEqual(loaded.missing, [(0, 0), (0, 1), (0, 2)])
        self.assertIn("the device is out of order", loaded.error)
        prompt.extend(range(CHUNK))
        stored = reader.store(prompt, 4)()
        self.assertEqual(stored.stored, 0)
        self.assertIn("the device is out of order", stored.error)
        reader.copies.fails = False
        self.assertEqual(reader.load(prompt, 3, (0, CHUNK * 3)).missing, [])
        stored = reader.store(prompt, 4)()
        self.assertEqual((stored.stored, stored.error), (1, None))
        reader.worker.close()

    def test_ranks_that_have_some_of_the_tokens_each(self):
        """Decode context parallel: each copies its own rows and no others, and writes none of the other's into the object."""
        gateway = self.gateway()
        prompt = Prompt(SPACE)
        prompt.extend(range(CHUNK * 3))
        rows = torch.randn(LAYERS, HEADS, CHUNK * 3, 2 * DIM, generator=torch.Generator().manual_seed(2)).half()
        runs = [rows.unflatten(2, (-1, 2, 2))[:, :, :, rank].flatten(2, 3) for rank in range(2)]

        def dealt(rank):
            return {"rank": rank, "size": 2, "interleave": 2}

        ranks = [Rank(gateway, "writer", 4, rank, 2, dealt(rank)) for rank in range(2)]
        for rank in ranks:
            rank.attached()
        for rank, own in zip(ranks, runs, strict=True):
            rank.fill(3, own)
        for stored in [rank.store(prompt, 3) for rank in ranks]:
            stored = stored()
            self.assertEqual((stored.stored, stored.refused, stored.error), (3, 0, None))
        whole = Rank(gateway, "whole", 4)
        self.assertEqual(whole.load(prompt, 3, (0, CHUNK * 3)).missing, [])
        self.assertTrue(torch.equal(whole.rows(3), rows))

        readers = [Rank(gateway, "reader", 2, rank, 2, dealt(rank)) for rank in range(2)]
        for rank in readers:
            rank.attached()
        loads = [rank.begin_load(prompt, 3, (4, CHUNK * 3)) for rank in readers]
        for reader, load, own in zip(readers, loads, runs, strict=True):
            self.assertEqual(load().missing, [])
            self.assertTrue(torch.equal(reader.rows(3)[:, :, 2:], own[:, :, 2:]))
            self.assertFalse(reader.rows(3)[:, :, :2].any())
        for rank in (*ranks, whole, *readers):
            rank.worker.close()

    def test_a_rank_that_can_not_mark_its_stream_holds_up_no_other(self):
        """The others' window is full until it has had what is in it, or has said that it takes no part."""
        gateway = self.gateway(KVGATE__LOAD__WINDOW="1MiB", KVGATE__LOAD__JOIN_GRACE="1h")
        prompt, chunks = Prompt(SPACE), 200
        prompt.extend(range(CHUNK * chunks))
        writer = Rank(gateway, "writer", 4)
        writer.attached()
        self.assertEqual(writer.store(prompt, chunks)().stored, chunks)
        ranks = [Rank(gateway, "reader", 4, rank, 2) for rank in range(2)]
        for rank in ranks:
            rank.attached()
        ranks[1].copies.fails_to_mark = True
        failed = ranks[1].load(prompt, chunks, (0, CHUNK * chunks))
        self.assertEqual(len(failed.missing), chunks)
        self.assertIn("no more events", failed.error)
        loaded = ranks[0].load(prompt, chunks, (0, CHUNK * chunks))
        self.assertEqual((loaded.missing, loaded.error), ([], None))
        for rank in (writer, *ranks):
            rank.worker.close()

    def test_a_load_that_fails_half_way_leaves_nothing_under_way(self):
        copies, arguments = self.one_plane_each()
        make, before, during = copies.make, sys.getswitchinterval(), []

        def once(*of):
            during.append(sys.getswitchinterval())
            if len(during) == 2:
                raise RuntimeError("out of order")
            return make(*of)

        copies.make = once
        with self.assertRaisesRegex(RuntimeError, "out of order"):
            copies.load(*arguments)
        # What the first plane's copy began was waited for.
        self.assertEqual(copies.said, ["marked", "waited"])
        # The engine's threads leave the interpreter to a copy sooner, and only to a copy.
        self.assertLess(max(during), before)
        self.assertEqual(sys.getswitchinterval(), before)

    def test_a_plane_takes_few_calls_of_torch(self):
        """After each of them the thread waits for the interpreter, up to 5 ms where the engine is busy."""
        copies, (*address, parts, spans, sizes, after) = self.one_plane_each()

        def calls(copy, parts):
            with Calls() as counted:
                copy(*address, parts, spans, sizes, after)
            return counted.calls

        for copy, most in ((copies.load, 1), (copies.store, 4)):
            # Views are made in the first one.
            copy(*address, parts, spans, sizes, after)
            self.assertLessEqual(calls(copy, parts) - calls(copy, parts[:1]), most)

    def test_a_longer_object_has_larger_buffers(self):
        copies, (_, length, *more) = self.one_plane_each()
        for longer, payload in enumerate((self.payload, -self.payload)):
            # The same parts, and bytes of others behind them.
            object_ = torch.cat([payload.flatten(), torch.zeros(longer * length, dtype=torch.float16)])
            copies.load(object_.data_ptr(), length * (longer + 1), *more)
            for layer, plane in zip(self.layers, payload, strict=True):
                self.assertTrue(torch.equal(layer.cpu()[3], plane))

    def test_without_memory_for_its_buffers_a_copy_fails_and_the_next_one_has_both(self):
        copies, arguments = self.one_plane_each()
        length = arguments[1]
        empty = torch.empty

        def full(*sizes, **named):
            if named.get("device") == FOREIGN:
                raise RuntimeError("no memory is left")
            return empty(*sizes, **named)

        with mock.patch.object(torch, "empty", full), self.assertRaisesRegex(RuntimeError, "no memory"):
            copies.load(*arguments)
        copies.load(*arguments)
        self.assertEqual([len(buffer) for buffer in copies.buffers(length)], [length] * 2)
        for layer, plane in zip(self.layers, self.payload, strict=True):
            self.assertTrue(torch.equal(layer.cpu()[3], plane))

    def one_plane_each(self):
        """Two layers of one block each [blocks, heads, block tokens, K and V], and what a load of a chunk into block 3 is given."""
        shape = (BLOCKS, HEADS, CHUNK, 2 * DIM)
        self.layers = [torch.zeros(shape, dtype=torch.float16).to(FOREIGN) for _ in range(LAYERS)]
        self.payload = torch.randn((LAYERS, *shape[1:]), generator=torch.Generator().manual_seed(2)).half()
        row = 2 * DIM * 2
        plane = HEADS * CHUNK * row
        parts = [
            ((at * plane, row, CHUNK * row, HEADS, row), (layer.data_ptr(), plane, row, CHUNK * row))
            for at, layer in enumerate(self.layers)
        ]
        spans, sizes = [(0, CHUNK, 3, 0)], (CHUNK, BLOCKS, CHUNK)
        return Watched(self.layers), (self.payload.data_ptr(), LAYERS * plane, parts, spans, sizes, None)


if __name__ == "__main__":
    unittest.main(verbosity=2)
