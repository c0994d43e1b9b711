"""`kvgate.Gateway` and `kvgate.AsyncGateway` with a real gateway: arrays of numpy and torch, in every shape.

python tests/engines/test_client.py     in an environment with the wheel, numpy and torch
"""

import asyncio
import dataclasses
import gc
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

import kvgate
import numpy as np
import torch
from gateway import Gateway, hang
from kvgate import KvGateError

LAYERS, HEADS, HEAD_DIM, CHUNK = 3, 2, 8, 8
TOKENS, FULL = 36, 32
"""Of a prompt, and of its full chunks."""
ROOT = Path(__file__).parents[2]


def space(**other):
    return kvgate.space(
        **{
            "model": "test/client",
            "revision": "1",
            "dtype": "float16",
            "layers": LAYERS,
            "heads": HEADS,
            "head_dim": HEAD_DIM,
            "chunk_tokens": CHUNK,
            **other,
        }
    )


def computed(seed, tokens=TOKENS):
    """[layers, 2, tokens, heads, head_dim], as an engine computed it."""
    shape = (LAYERS, 2, tokens, HEADS, HEAD_DIM)
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


class OnlyDLPack:
    """An array that nothing but DLPack knows."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


class Case(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-client-", ignore_cleanup_errors=True)
        cls.addClassCleanup(folder.cleanup)
        cls.node = Gateway(folder.name).start()
        cls.addClassCleanup(cls.node.end)

    def setUp(self):
        self.gateway = kvgate.connect(self.node.socket)
        self.addCleanup(self.gateway.close)
        # A prompt of its own for each test.
        first = int.from_bytes(self.id().encode()[-3:]) % 1_000_000
        self.tokens = list(range(first, first + TOKENS))

    def stored(self, kv, **how):
        done = self.gateway.store_from(space(), self.tokens, kv, **how)
        self.assertEqual((done.tokens, done.refused_chunks, done.reason), (FULL, 0, None))
        return done

    def hit(self, tokens=FULL, **how):
        hit = self.gateway.lookup(space(), self.tokens, **how)
        self.assertEqual((hit.tokens, hit.complete), (tokens, True))
        self.assertEqual(len(hit.tiers), tokens // CHUNK)
        return hit


class ArraysTest(Case):
    def test_numpy(self):
        kv = computed(1)
        self.hit(0)
        self.assertEqual(self.stored(kv).new_chunks, 4)
        self.assertEqual(self.stored(kv).new_chunks, 0, "they are there")
        hit = self.hit()
        self.assertEqual(set(hit.tiers), {"memory"})
        out = np.full_like(kv, 7)
        self.assertEqual(self.gateway.load_into(hit, out), kvgate.Loaded(FULL, None))
        np.testing.assert_array_equal(out[:, :, :FULL], kv[:, :, :FULL])
        self.assertTrue((out[:, :, FULL:] == 7).all(), "nothing else is written")

        part = hit.first(19)
        self.assertEqual((part.tokens, len(part.hashes), len(part.tiers)), (16, 64, 2))
        out[:] = 7
        self.assertEqual(self.gateway.load_into(part, out).tokens, 16)
        np.testing.assert_array_equal(out[:, :, :16], kv[:, :, :16])
        self.assertTrue((out[:, :, 16:] == 7).all())
        self.assertEqual(self.gateway.load_into(hit.first(0), out).tokens, 0)

    def test_torch_with_strides_of_its_own(self):
        kv = computed(2)
        # [tokens, 2, layers, heads, head_dim] in memory, and a type that numpy does not have.
        stored = torch.from_numpy(kv).view(torch.bfloat16).permute(2, 1, 0, 3, 4).contiguous().permute(2, 1, 0, 3, 4)
        self.stored(stored)
        out = torch.zeros(LAYERS, 2, TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        self.assertEqual(self.gateway.load_into(self.hit(), out).tokens, FULL)
        same = out.view(torch.int16)[:, :, :FULL] == stored.view(torch.int16)[:, :, :FULL]
        self.assertTrue(same.all())

    def test_pages_and_slots(self):
        kv = computed(3)
        self.stored(kv)
        hit = self.hit()
        pages = np.zeros((LAYERS, 2, 16, 4, HEADS, HEAD_DIM), np.float16)
        slots = np.random.default_rng(3).permutation(64)[:TOKENS]
        self.assertEqual(self.gateway.load_into(hit, pages, slots=slots).tokens, FULL)
        rows = pages.reshape(LAYERS, 2, 64, HEADS, HEAD_DIM)
        np.testing.assert_array_equal(rows[:, :, slots[:FULL]], kv[:, :, :FULL])
        self.assertEqual(np.count_nonzero(rows.any(axis=(0, 1, 3, 4))), FULL)

        # Negative: left out. And each layer by itself, as engines have it.
        layers = [torch.zeros(2, 16, 4, HEADS, HEAD_DIM, dtype=torch.float16) for _ in range(LAYERS)]
        some = torch.from_numpy(slots).clone()
        some[:10] = -1
        self.assertEqual(self.gateway.load_into(hit, layers, slots=some).tokens, FULL)
        for layer, tensor in enumerate(layers):
            rows = tensor.view(2, 64, HEADS, HEAD_DIM).numpy()
            np.testing.assert_array_equal(rows[:, slots[10:FULL]], kv[layer, :, 10:FULL])
            self.assertFalse(rows[:, slots[:10]].any())

        # Out of pages again, for another prompt.
        self.tokens = [token + 1 for token in self.tokens]
        self.stored(pages, slots=slots)
        out = np.zeros_like(kv)
        self.gateway.load_into(self.hit(), out)
        np.testing.assert_array_equal(out[:, :, :FULL], kv[:, :, :FULL])

    def test_other_axes(self):
        kv = computed(4)
        self.stored(kv)
        out = np.zeros((TOKENS, HEADS, 2, LAYERS, HEAD_DIM), np.float16)
        self.gateway.load_into(self.hit(), out, axes="SHKLD")
        np.testing.assert_array_equal(out.transpose(3, 2, 0, 1, 4)[:, :, :FULL], kv[:, :, :FULL])

    def test_mla(self):
        fields = {"model": "test/mla", "revision": "1", "dtype": "float16", "chunk_tokens": CHUNK}
        mla = kvgate.Space(json.dumps({**fields, "mla": {"layers": 3, "latent_dim": 32}}))
        kv = np.random.default_rng(5).standard_normal((3, TOKENS, 32)).astype(np.float16)
        self.assertEqual(self.gateway.store_from(mla, self.tokens, kv).tokens, FULL)
        out = np.zeros_like(kv)
        hit = self.gateway.lookup(mla, self.tokens)
        self.assertEqual(self.gateway.load_into(hit, out).tokens, FULL)
        np.testing.assert_array_equal(out[:, :FULL], kv[:, :FULL])

    def test_dlpack(self):
        kv = computed(6)
        self.stored(OnlyDLPack(kv))
        out = np.zeros_like(kv)
        self.assertEqual(self.gateway.load_into(self.hit(), OnlyDLPack(out)).tokens, FULL)
        np.testing.assert_array_equal(out[:, :, :FULL], kv[:, :, :FULL])

    def test_salt_adapter_and_prompt_tell_prompts_apart(self):
        kv = computed(7)
        self.stored(kv, salt=b"one")
        self.hit(0)
        self.hit(0, salt=b"one", adapter=b"lora")
        self.hit(FULL, salt=b"one")
        prompt = kvgate.Prompt(space(), b"one")
        prompt.extend(self.tokens)
        self.assertEqual(self.gateway.lookup(space(), prompt).tokens, FULL)
        self.assertEqual(self.gateway.lookup(space(), np.array(self.tokens), salt=b"one").tokens, FULL)
        self.assertEqual(self.gateway.lookup(space(tenant="another"), self.tokens, salt=b"one").tokens, 0)
        self.assertEqual(self.gateway.lookup(space(), self.tokens[:7]).tokens, 0, "less than a chunk")

    def test_neither_numpy_nor_torch_is_imported(self):
        program = "import kvgate, sys; print(sorted({'numpy', 'torch', 'vllm'} & set(sys.modules)))"
        said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
        self.assertEqual(said.stdout.strip(), "[]")


class MistakesTest(Case):
    def refused(self, what, work):
        with self.assertRaisesRegex(KvGateError, what):
            work()

    def test_arrays_that_do_not_fit(self):
        kv = computed(1)
        self.stored(kv)
        hit, gateway = self.hit(), self.gateway
        for what, array in (
            ("layer 2", kv[:2]),
            ("32 bytes", kv[..., :4]),
            ("axis H has size 1", kv[:, :, :, :1]),
            (r"kv has room for 20 tokens, and the hit has 32: give hit\.first\(20\)", kv[:, :, :20]),
            (r"kv has room for 5 tokens, and the hit has 32: give hit\.first\(5\)", kv[:, :, :5]),
            ("plane 3", np.zeros((5, *kv.shape[1:]), np.float16)),
            ("1 dimensions", kv.reshape(-1)),
            ("runs backwards", kv[:, :, ::-1]),
            ("holds no KV", kv.astype(object)),
            ("side by side", np.asfortranarray(kv)),
            ("a dict shares no memory", {}),
            ("is on meta", torch.zeros(kv.shape, device="meta")),
            ("overlaps itself", torch.zeros(LAYERS, 2, 1, HEADS, HEAD_DIM).half().expand(kv.shape)),
        ):
            with self.subTest(what):
                self.refused(what, lambda array=array: gateway.load_into(hit, array))
        read_only = kv.copy()
        read_only.flags.writeable = False
        self.refused("read-only", lambda: gateway.load_into(hit, read_only))
        pages = np.zeros((LAYERS, 2, 16, 4, HEADS, HEAD_DIM), np.float16)
        self.refused("20 places", lambda: gateway.load_into(hit, pages, slots=range(20)))
        self.refused("block 16", lambda: gateway.load_into(hit, pages, slots=range(33, 33 + FULL)))
        self.refused("two tokens", lambda: gateway.load_into(hit, pages, slots=[1] * FULL))
        self.refused("axes", lambda: gateway.load_into(hit, kv, axes="LKS"))
        self.refused("salt", lambda: gateway.lookup(space(), kvgate.Prompt(space()), salt=b"x"))
        whole = "kv has 20 tokens, and the whole chunks of the prompt 32"
        self.refused(whole, lambda: gateway.store_from(space(), self.tokens, kv[:, :, :20]))
        for deadline in (-1, float("nan"), None, "1"):
            self.refused("deadline is a number", lambda given=deadline: gateway.lookup(space(), [1], deadline=given))
        window = kvgate.Space(space().canonical_json.replace('"full"', '{"window":12}'))
        self.refused("Window", lambda: gateway.lookup(window, self.tokens))
        self.refused("Window", lambda: gateway.store_from(window, self.tokens, kv))
        self.refused("revision", lambda: space(revision="main"))

    def test_tokens_and_slots_that_are_none(self):
        kv, square = computed(1), np.zeros((2, FULL), np.int64)
        for wrong in ([-1] * TOKENS, [1 << 32], square, np.zeros(TOKENS), "hello" * 10, [None], 7, None):
            with self.subTest(wrong):
                told = "tokens are whole numbers from 0, in one dimension"
                self.refused(told, lambda given=wrong: self.gateway.lookup(space(), given))
                self.refused(told, lambda given=wrong: self.gateway.store_from(space(), given, kv))
        self.stored(kv)
        hit, pages = self.hit(), np.zeros((LAYERS, 2, 16, 4, HEADS, HEAD_DIM), np.float16)
        for wrong in (square, np.zeros(FULL), "hello" * 10):
            with self.subTest(wrong):
                told = "slots are whole numbers, in one dimension"
                self.refused(told, lambda given=wrong: self.gateway.load_into(hit, pages, slots=given))

    def test_there_is_no_gateway(self):
        self.refused("kvgate serve", lambda: kvgate.connect("/nowhere/kvgate.sock"))
        with kvgate.connect(self.node.socket) as gateway:
            pass
        self.refused(r"kvgate\.connect", lambda: gateway.lookup(space(), self.tokens))

    def test_a_prompt_of_another_space(self):
        prompt = kvgate.Prompt(space(chunk_tokens=2 * CHUNK))
        prompt.extend(range(TOKENS))
        for call in (
            lambda: self.gateway.lookup(space(), prompt),
            lambda: self.gateway.store_from(space(), prompt, computed(1)),
        ):
            self.refused("another model, or other chunks", call)

    def test_chunks_that_are_gone_are_told(self):
        kv = computed(2)
        self.stored(kv)
        hit = self.hit()
        connection = http.client.HTTPConnection("kvgate")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.node.socket))
        connection.request("DELETE", f"/v1/chunks/{hit.space.id}/{hit.hashes[64:96].hex()}")
        self.assertLess(connection.getresponse().status, 300)
        connection.close()
        loaded = self.gateway.load_into(hit, np.zeros_like(kv))
        self.assertEqual(loaded.tokens, 16)
        self.assertIn("absent", loaded.reason)


class RoomTest(unittest.TestCase):
    def test_a_prompt_larger_than_the_room_is_stored_whole(self):
        kv = self.large(chunks=24)
        tokens = range(kv.shape[2])
        with kvgate.connect(self.node().socket) as gateway:
            stored = gateway.store_from(self.space, tokens, kv, deadline=60)
            self.assertEqual((stored.tokens, stored.refused_chunks, stored.reason), (len(tokens), 0, None))
            out = np.zeros_like(kv)
            hit = gateway.lookup(self.space, tokens, deadline=10)
            self.assertEqual(gateway.load_into(hit, out), kvgate.Loaded(len(tokens), None))
            np.testing.assert_array_equal(out, kv)

    def test_without_s3_it_waits_until_its_deadline(self):
        kv = self.large(chunks=12)
        with kvgate.connect(self.node(["--endpoint", "http://127.0.0.1:9", "--bucket", "none"]).socket) as gateway:
            stored = gateway.store_from(self.space, range(kv.shape[2]), kv, deadline=1)
            self.assertEqual((stored.tokens // 64 + stored.refused_chunks, stored.reason), (12, None))
            self.assertGreater(stored.refused_chunks, 4)
            self.assertGreater(stored.new_chunks, 4)

    space = kvgate.space(model="large", revision="1", dtype="float16", layers=8, heads=8, head_dim=128, chunk_tokens=64)
    """Chunks of 2 MiB."""

    def large(self, chunks):
        kv = np.zeros((8, 2, chunks * 64, 8, 128), np.float16)
        kv[:] = np.arange(chunks * 64, dtype=np.float16)[:, None, None]
        return kv

    def node(self, s3=None):
        """A gateway with room for 16 MiB that S3 has not."""
        folder = tempfile.TemporaryDirectory(prefix="kvgate-client-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        with mock.patch.dict(os.environ, KVGATE__STORE__WRITE_BEHIND="16MiB"):
            node = Gateway(folder.name, s3=s3).start()
        self.addCleanup(node.end)
        return node


class LivesTest(unittest.TestCase):
    """A gateway that goes and comes."""

    def test_another_process_and_another_gateway(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-client-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        node = Gateway(folder.name).start()
        self.addCleanup(node.end)
        kv, tokens = computed(1), list(range(TOKENS))
        with kvgate.connect(node.socket) as gateway:
            gateway.store_from(space(), tokens, kv)
            gateway.flush()
            node.kill()
            with self.assertRaises(KvGateError):
                gateway.lookup(space(), tokens)
            node.start()
            hit = gateway.lookup(space(), tokens)
            self.assertEqual(set(hit.tiers), {"s3"})
            out = np.zeros_like(kv)
            self.assertEqual(gateway.load_into(hit, out), kvgate.Loaded(FULL, None))
            np.testing.assert_array_equal(out[:, :, :FULL], kv[:, :, :FULL])
        # The notebook-sized example, twice: the second life finds what the first stored.
        for found in ("0 of", "96 of"):
            said = subprocess.run(
                [sys.executable, ROOT / "examples" / "python_api.py", "--socket", node.socket],
                capture_output=True,
                text=True,
                check=False,
            )
            self.assertEqual(said.returncode, 0, said.stderr)
            self.assertIn(found, said.stdout)


class WaitsTest(unittest.TestCase):
    """A gateway that hangs, and calls that end all the same."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-client-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.node = Gateway(folder.name).start()
        self.addCleanup(self.node.end)
        self.kv, self.tokens = computed(1), list(range(TOKENS))

    def hang(self):
        hang(self.node.pid())
        self.addCleanup(os.kill, self.node.pid(), signal.SIGCONT)

    def test_the_gil_is_free_and_patience_ends(self):
        gateway = kvgate.connect(self.node.socket, patience=1)
        gateway.store_from(space(), self.tokens, self.kv)
        hit = gateway.lookup(space(), self.tokens)
        self.hang()
        errors, ticks = [], []

        def load():
            try:
                gateway.load_into(hit, np.zeros_like(self.kv), deadline=0.5)
            except KvGateError as error:
                errors.append(str(error))

        thread = threading.Thread(target=load)
        thread.start()
        while thread.is_alive():
            ticks.append(time.monotonic())
            time.sleep(0.01)
        self.assertIn("does its process hang", errors[0])
        self.assertGreater(len(ticks), 10, "the GIL was held")

    def test_ctrl_c_ends_a_call_first(self):
        program = f"""
import kvgate, os, signal, sys, threading, numpy as np
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_client import *
# A job in the background is started with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
gateway = kvgate.connect({str(self.node.socket)!r}, patience=2)
kv, tokens = computed(1), list(range(TOKENS))
gateway.store_from(space(), tokens, kv)
hit = gateway.lookup(space(), tokens)
hang({self.node.pid()})
# Also when somebody presses it again while it waits.
for after in (0.2, 0.4, 0.6):
    threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT)).start()
out = np.zeros_like(kv)
before = sys.getrefcount(out)
try:
    gateway.load_into(hit, out, deadline=60)
except KeyboardInterrupt as error:
    error.__traceback__ = None
    print("interrupted", sys.getrefcount(out) - before)
finally:
    os.kill({self.node.pid()}, signal.SIGCONT)
"""
        said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        self.assertEqual((said.stdout.strip(), said.returncode), ("interrupted 0", 0), said.stderr)

    def test_ctrl_c_while_a_call_begins(self):
        gateway = kvgate.connect(self.node.socket, patience=1)
        gateway.store_from(space(), self.tokens, self.kv)
        hit, out = gateway.lookup(space(), self.tokens), np.zeros_like(self.kv)
        self.hang()
        before, made = sys.getrefcount(out), gateway._load_into

        def interrupted(*arguments):
            operation = made(*arguments)

            def begin(call):
                operation.begin(call)
                # As if it came when the call had just begun.
                raise KeyboardInterrupt

            return dataclasses.replace(operation, begin=begin)

        gateway._load_into = interrupted
        with self.assertRaises(KeyboardInterrupt) as raised:
            gateway.load_into(hit, out)
        raised.exception.__traceback__ = None
        del raised
        self.assertEqual(sys.getrefcount(out), before, "the call still has the array")

    def test_asyncio(self):
        async def work():
            async with kvgate.AsyncGateway(self.node.socket, patience=1) as gateway:
                kvs = [computed(seed) for seed in range(4)]
                prompts = [[seed * 1000 + token for token in self.tokens] for seed in range(4)]
                calls = zip(prompts, kvs, strict=True)
                stored = await asyncio.gather(*(gateway.store_from(space(), *call) for call in calls))
                self.assertEqual([done.tokens for done in stored], [FULL] * 4)
                await gateway.flush()
                hits = await asyncio.gather(*(gateway.lookup(space(), prompt) for prompt in prompts))
                outs = [np.zeros_like(kv) for kv in kvs]
                await asyncio.gather(*(gateway.load_into(hit, out) for hit, out in zip(hits, outs, strict=True)))
                for kv, out in zip(kvs, outs, strict=True):
                    np.testing.assert_array_equal(out[:, :, :FULL], kv[:, :, :FULL])
                self.hang()
                before = sys.getrefcount(outs[0])
                call = asyncio.create_task(gateway.load_into(hits[0], outs[0], deadline=60))
                await asyncio.sleep(0.2)
                # Also when somebody cancels it again while it waits.
                call.cancel()
                await asyncio.sleep(0.05)
                call.cancel()
                await asyncio.wait([call])
                self.assertTrue(call.cancelled())
                del call
                gc.collect()
                self.assertEqual(sys.getrefcount(outs[0]), before, "the cancelled call still has the array")
                with self.assertRaises(KvGateError):
                    await gateway.lookup(space(), prompts[0])
            with self.assertRaises(KvGateError):
                await gateway.lookup(space(), prompts[0])

        asyncio.run(work())


if __name__ == "__main__":
    unittest.main(verbosity=2)
