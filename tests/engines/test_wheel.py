"""The wheel's Python functions, without an engine.

python tests/engines/test_wheel.py     in an environment with the wheel
"""

import ctypes
import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from array import array
from importlib import metadata
from pathlib import Path

from gateway import KVGATE, Gateway
from kvgate import KvGateError, Lookups, PageLookups, Prompt, Space, Worker

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())
SPACES = {space["name"]: space for space in VECTORS["spaces"] if "input" in space}


def tiny_space():
    return Space(
        json.dumps({"model": "m", "revision": "1", "chunk_tokens": 4, "mha": {"layers": 1, "heads": 1, "head_dim": 8}})
    )


def planes(layers, row_bytes):
    return [{"name": "kv", "layer": layer, "heads": 1, "row_bytes": row_bytes} for layer in range(layers)]


class PackageTest(unittest.TestCase):
    def test_vllm_finds_the_plugin(self):
        (found,) = metadata.distribution("kvgate").entry_points.select(group="vllm.general_plugins")
        self.assertEqual((found.name, found.value), ("kvgate", "kvgate.plugin:register"))
        self.assertTrue(callable(found.load()))


class DoctorTest(unittest.TestCase):
    def test_the_doctor_finds_this_engine_and_loads_the_connector(self):
        parts = ("s3", "transfer", "memory", "disks", "gpu", "api")
        skipped = [word for part in parts for word in ("--skip", part)]
        command = [KVGATE, "doctor", "--json", *skipped, "--timeout", "5m"]
        said = subprocess.run([*command, "--python", sys.executable], capture_output=True, text=True, check=True)
        (found,) = (finding for finding in json.loads(said.stdout)["findings"] if finding["check"] == "engines")
        self.assertEqual(found["verdict"], "ok", found)
        for words in ("vLLM 0.", f"kvgate {metadata.version('kvgate')}", "kvgate.vllm load"):
            self.assertIn(words, found["seen"])

        # What is left of an environment without the extension, or with another kvgate.
        for broken in ("kvgate/__init__.py", "vllm/__init__.py"):
            with tempfile.TemporaryDirectory() as folder:
                module = Path(folder, broken)
                module.parent.mkdir()
                module.write_text("raise ImportError('broken by the test')\n")
                # The command itself is a Python that finds its own kvgate.
                python = Path(folder, "python")
                python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
                python.chmod(0o755)
                said = subprocess.run([*command, "--python", python], capture_output=True, text=True)
                self.assertEqual(said.returncode, 1, said)
                self.assertIn("broken by the test", said.stdout)


class PromptTest(unittest.TestCase):
    def test_hashes_are_those_of_the_vectors(self):
        for chain in VECTORS["chains"]:
            with self.subTest(chain["name"]):
                space = Space(json.dumps(SPACES[chain["space"]]["input"]))
                salt, adapter, secret = (as_bytes(chain[key]) for key in ("salt", "adapter", "tenant_secret"))
                extras = [
                    (extra["chunk"] * space.chunk_tokens + extra["offset"], as_bytes(extra["hex"]))
                    for extra in chain["extras"]
                ]
                given = Prompt(space, salt, adapter, secret)
                # A space has its tenant's secret with it.
                of_tenant = Space(space.canonical_json, secret)
                prompt = Prompt(of_tenant.another(space.canonical_json), salt, adapter)
                self.assertEqual(given.parent(0), prompt.parent(0))
                self.assertEqual(prompt.parent(0).hex(), chain["root"])
                prompt.extend(tokens_of(chain["tokens"]), extras)
                self.assertEqual(prompt.hashes(0, len(prompt)).hex(), "".join(chain["chunks"]))

    def test_a_prompt_that_grows_has_the_same_hashes(self):
        extras = [(0, b"image"), (9, b"another"), (13, b"a third")]
        whole = Prompt(tiny_space())
        whole.extend(range(20), extras)
        for step in (1, 3, 4, 7):
            grown = Prompt(tiny_space())
            for first in range(0, 20, step):
                here = [extra for extra in extras if first <= extra[0] < first + step]
                grown.extend(range(first, min(first + step, 20)), here)
            self.assertEqual(grown.hashes(0, 5), whole.hashes(0, 5), step)
        self.assertEqual(whole.parent(2), whole.hashes(1, 2))
        for other in ({"kind": "state"}, {"kind": {"window": 100}}, {"draft": "of another"}):
            kind = json.loads(tiny_space().canonical_json) | other
            prompt = Prompt(Space(json.dumps(kind)))
            prompt.extend(range(20), extras)
            self.assertEqual(prompt.hashes(0, 5), whole.hashes(0, 5), "the hashes are the model's")
        by_bytes = Prompt(tiny_space())
        by_bytes.extend(array("I", range(20)).tobytes(), extras)
        self.assertEqual(by_bytes.hashes(0, 5), whole.hashes(0, 5))

    def test_a_space_tells_its_kind_and_its_model(self):
        full, window, state, draft = (space_of(name) for name in ("full", "window", "state", "draft"))
        self.assertEqual([full.kind, window.kind, state.kind], ["full", {"window": 12}, "state"])
        self.assertEqual((full.draft, draft.draft), ("", "tiny draft"))
        self.assertEqual(len({space.model_id for space in (full, window, state, draft)}), 1)
        self.assertEqual(len({space.id for space in (full, window, state, draft)}), 4)

    def test_what_can_t_be_is_an_error(self):
        prompt = Prompt(tiny_space())
        prompt.extend(range(8))
        for wrong in (
            lambda: prompt.hashes(0, 3),
            lambda: prompt.parent(3),
            lambda: prompt.extend([1], [(3, b"in a chunk that is full")]),
            lambda: prompt.extend([-1]),
            lambda: prompt.extend(b"odd"),
            lambda: Prompt(tiny_space(), secret=b"short"),
            lambda: Space(tiny_space().canonical_json, b"short"),
            lambda: Space("{}"),
            lambda: Lookups("/nowhere/kvgate.sock", [], []),
        ):
            self.assertRaises((KvGateError, IndexError, OverflowError, TypeError), wrong)


class LookupsTest(unittest.TestCase):
    def answer(self, lookups, request):
        deadline = time.monotonic() + 10
        while (found := lookups.answer(request)) is None:
            self.assertLess(time.monotonic(), deadline, "nobody answers")
            time.sleep(0.001)
        return found

    def test_without_a_gateway_nothing_is_there(self):
        lookups = Lookups("/nowhere/kvgate.sock", [tiny_space()], [])
        self.assertIsNone(lookups.answer("never asked"))
        prompt = Prompt(tiny_space())
        lookups.ask("r", prompt, 2)
        self.assertEqual(lookups.answer("r"), 0, "at once: there is nothing to ask for")
        prompt.extend(range(8))
        lookups.ask("r", prompt, 0)
        self.assertEqual(lookups.answer("r"), 0, "at once: nothing may be asked for")
        lookups.ask("r", prompt, 2)
        self.assertEqual(self.answer(lookups, "r"), 0)
        self.assertEqual((lookups.full("r"), lookups.tiers("r")), (0, b""))
        lookups.forget("r")
        self.assertIsNone(lookups.answer("r"))

    def test_a_gateway_that_hangs_is_soon_left_alone(self):
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(folder + "/sock")
            listener.listen()
            accepted = []
            threading.Thread(target=lambda: accept_all(listener, accepted), daemon=True).start()
            lookups = Lookups(folder + "/sock", [tiny_space()], [], deadline_ms=20)
            prompt = Prompt(tiny_space())
            prompt.extend(range(8))
            for request in "abc":
                lookups.ask(request, prompt, 2)
                self.assertEqual(self.answer(lookups, request), 0)
            asked = len(accepted)
            lookups.ask("d", prompt, 2)
            self.assertEqual(lookups.answer("d"), 0, "at once, without asking")
            self.assertEqual(len(accepted), asked)


class PageLookupsTest(unittest.TestCase):
    def answered(self, lookups, number):
        deadline = time.monotonic() + 10
        while not (found := lookups.answers()):
            self.assertLess(time.monotonic(), deadline, "nobody answers")
            time.sleep(0.001)
        ((told, there),) = found
        self.assertEqual(told, number)
        return there

    def test_without_a_gateway_nothing_is_there(self):
        lookups = PageLookups("/nowhere/kvgate.sock", [tiny_space()])
        self.assertEqual(lookups.answers(), [])
        lookups.ask(7, 0, bytes(96))
        self.assertEqual(self.answered(lookups, 7), bytes(3))
        self.assertRaises(KvGateError, lookups.ask, 8, 1, bytes(32))
        self.assertRaises(KvGateError, lookups.ask, 8, 0, bytes(31))

    def test_a_gateway_that_hangs_is_soon_left_alone(self):
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(folder + "/sock")
            listener.listen()
            accepted = []
            threading.Thread(target=lambda: accept_all(listener, accepted), daemon=True).start()
            lookups = PageLookups(folder + "/sock", [tiny_space()], deadline_ms=20, breaker_timeouts=2)
            for number in range(2):
                lookups.ask(number, 0, bytes(32))
                self.assertEqual(self.answered(lookups, number), bytes(1))
            asked = len(accepted)
            self.assertGreater(asked, 0)
            lookups.ask(2, 0, bytes(32))
            self.assertEqual(self.answered(lookups, 2), bytes(1))
            self.assertEqual(len(accepted), asked, "without asking")


CHUNK = 8
KINDS = {
    "full": {"kind": "full", "planes": planes(2, 32)},
    "window": {"kind": {"window": 12}, "planes": planes(3, 16)},
    "state": {"kind": "state", "planes": planes(2, 96)},
    "draft": {"kind": "full", "draft": "tiny draft", "planes": planes(1, 8)},
}
"""Planes of a row of bytes a token, or of a state."""


def space_of(name):
    return Space(json.dumps({"model": "kinds", "revision": "1", "dtype": "int8", "chunk_tokens": CHUNK, **KINDS[name]}))


class Rank:
    """A worker, and its tensors: for each kind the groups, as (planes, tokens of a block). Each group has its own 64 blocks."""

    def __init__(self, gateway, instance, groups):
        self.kinds = list(groups)
        self.groups = groups
        self.memory, kinds = {}, []
        for name, of_kind in groups.items():
            kinds.append({"groups": [], "is_draft": name == "draft"})
            for number, (planes, block) in enumerate(of_kind):
                row = KINDS[name]["planes"][0]["row_bytes"]
                tensors = []
                for plane in planes:
                    memory = (ctypes.c_uint8 * (64 * block * row))()
                    self.memory[name, number, plane] = memory
                    tensors.append(
                        {
                            "address": ctypes.addressof(memory),
                            "bytes": len(memory),
                            "axes": "BHNC",
                            "shape": [64, 1, block, row],
                            "strides": [block * row, block * row, row, 1],
                            "element_bytes": 1,
                            "planes": [plane],
                        }
                    )
                kinds[-1]["groups"].append(tensors)
        settings = {
            "socket": str(gateway.socket),
            "attach": {"instance": instance, "rank": 0, "world_size": 1},
            "kinds": kinds,
            "device": None,
            "load_deadline_ms": 10_000,
            "store_deadline_ms": 10_000,
            "patience_ms": 10_000,
            "breaker_timeouts": 3,
            "breaker_pause_ms": 1000,
        }
        self.worker = Worker(json.dumps(settings), [space_of(name) for name in groups])

    def table(self, name, number, chunks):
        """Blocks of these chunks, scattered over the memory."""
        block = self.groups[name][number][1]
        count = 1 if name == "state" else CHUNK // block
        return [(chunk * count + at) * 13 % 64 for chunk in chunks for at in range(count)]

    def rows(self, name, chunk):
        """Bytes of a chunk's rows, plane by plane."""
        found = {}
        for (kind, number, plane), memory in self.memory.items():
            if kind == name:
                size = len(memory) // 64
                blocks = self.table(name, number, [chunk])
                found[plane] = b"".join(bytes(memory[block * size : (block + 1) * size]) for block in blocks)
        return [found[plane] for plane in sorted(found)]

    def ended(self, poll):
        deadline = time.monotonic() + 20
        while not (ended := poll()):
            if time.monotonic() > deadline:
                raise TimeoutError
            time.sleep(0.002)
        return ended[0]


class WorkerTest(unittest.TestCase):
    """Several kinds of KV, dealt into other groups by the engine that loads than by the one that stored."""

    def test_what_one_engine_stored_another_loads(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-wheel-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        gateway = Gateway(folder.name).start()
        self.addCleanup(gateway.end)
        prompt = Prompt(space_of("full"))
        prompt.extend(range(CHUNK * 5))
        lookups = Lookups(
            str(gateway.socket),
            [space_of(name) for name in ("full", "window", "state")],
            [space_of("draft")],
            state_every=2,
        )
        self.assertEqual(self.asked(lookups, "first", prompt, 5), (0, 0, b""))
        self.assertEqual(lookups.outcome("first"), "answered", "a gateway that did not know any of the spaces")
        writer = Rank(
            gateway,
            "writer",
            {
                "full": [([0, 1], 4)],
                "window": [([0, 2], 4), ([1], 2)],
                "state": [([0, 1], 1)],
                "draft": [([0], 8)],
            },
        )
        for at, memory in enumerate(writer.memory.values()):
            memory[:] = bytes((byte * 7 + byte // 251 + at) % 256 for byte in range(len(memory)))
        # The snapshots are of chunks that are not neighbours; of the draft there is one chunk.
        stored = {"full": range(4), "window": range(4), "state": [1, 3], "draft": [0]}
        self.store(writer, prompt, stored)
        self.assertEqual(self.asked(lookups, "all", prompt, 5), (4, 4, b"mmmm"))
        self.assertEqual(self.asked(lookups, "some", prompt, 3), (2, 3, b"mm"), "the snapshot before")
        ahead = Lookups(str(gateway.socket), [space_of("full"), space_of("state")], [], state_every=2, lookahead=1)
        self.assertEqual(self.asked(ahead, "all", prompt, 5)[:2], (2, 4), "one full chunk more than the boundary")

        reader = Rank(
            gateway,
            "reader",
            {
                "draft": [([0], 2)],
                "state": [([1], 1), ([0], 1)],
                "full": [([0], 8), ([1], 2), ([], 4)],
                "window": [([0, 1, 2], 8)],
            },
        )
        wanted = {"full": range(4), "window": range(2, 4), "state": [3], "draft": range(4)}
        kinds = []
        for name, chunks in wanted.items():
            rows = len(chunks) * (1 if name == "state" else CHUNK)
            tables = [
                ((0, rows), reader.table(name, number, chunks) if planes else [-1])
                for number, (planes, _) in enumerate(reader.groups[name])
            ]
            hashes = b"".join(prompt.hashes(chunk, chunk + 1) for chunk in chunks)
            kinds.append((reader.kinds.index(name), hashes, tables))
        reader.worker.load("load", kinds, by_layer=True)
        reader.worker.wait_layer(reader.kinds.index("full"), 1)
        for chunk in wanted["full"]:
            self.assertEqual(reader.rows("full", chunk)[1], writer.rows("full", chunk)[1])
        reader.worker.wait_layers()
        loaded = reader.ended(reader.worker.loaded)
        self.assertEqual((loaded.missing, loaded.missing_drafts), ([], 3), loaded.error)
        for name, chunks in {**wanted, "draft": [0]}.items():
            for chunk in chunks:
                self.assertEqual(reader.rows(name, chunk), writer.rows(name, chunk), (name, chunk))
        self.assertNotEqual(reader.rows("window", 1), writer.rows("window", 1), "nothing else is written")

        # What is missing in one kind is missing in that kind alone.
        full, window = (reader.kinds.index(name) for name in ("full", "window"))
        tables = [((0, CHUNK), reader.table("window", 0, [0]))]
        kinds = [(window, prompt.hashes(4, 5), tables)]
        kinds += [(full, prompt.hashes(4, 5), [((2, 5), [7]), ((2, 5), [7, 8, 9, 10]), ((0, 0), [])])]
        reader.worker.load("missing", kinds)
        loaded = reader.ended(reader.worker.loaded)
        self.assertEqual(sorted(loaded.missing), sorted([(window, 0), (full, 0)]))
        self.assertIn("absent", loaded.error)
        for wrong in (
            [(9, b"", [])],
            [(window, prompt.hashes(0, 1), [])],
            [(window, b"short", tables)],
            [(window, prompt.hashes(0, 1), [((0, CHUNK), [])])],
            [(window, prompt.hashes(0, 1), [((0, CHUNK), [-1])])],
        ):
            self.assertRaises(KvGateError, reader.worker.load, "wrong", wrong)
        for rank in (writer, reader):
            rank.worker.close()

    def store(self, rank, prompt, chunks_of):
        kinds = []
        for name, chunks in chunks_of.items():
            tables = [rank.table(name, number, chunks) for number in range(len(rank.groups[name]))]
            hashes = b"".join(prompt.hashes(chunk, chunk + 1) for chunk in chunks)
            parents = b"".join(prompt.parent(chunk) for chunk in chunks)
            kinds.append((rank.kinds.index(name), hashes, parents, tables))
        rank.worker.store("store", kinds)
        stored = rank.ended(rank.worker.stored)
        expected = [
            (rank.kinds.index(name), index) for name, chunks in chunks_of.items() for index in range(len(chunks))
        ]
        self.assertEqual((sorted(stored.there), stored.refused, stored.error), (sorted(expected), 0, None))
        self.assertEqual(rank.worker.freed(), ["store"])

    def asked(self, lookups, request, prompt, most):
        lookups.ask(request, prompt, most)
        deadline = time.monotonic() + 10
        while (boundary := lookups.answer(request)) is None:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.001)
        return boundary, lookups.full(request), lookups.tiers(request)


class CommandTest(unittest.TestCase):
    def test_a_gateway_outlives_clients_that_go(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-wheel-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        gateway = Gateway(folder.name).start()
        self.addCleanup(gateway.end)
        pid = gateway.pid()
        for _ in range(100):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(str(gateway.socket))
                client.sendall(b"GET /metrics HTTP/1.1\r\nHost: kvgate\r\n\r\n" * 20)
        gateway.call("stat")
        self.assertEqual(gateway.pid(), pid)


def accept_all(listener, accepted):
    try:
        while True:
            accepted.append(listener.accept())
    except OSError:
        pass


def tokens_of(tokens):
    """A list, or what the vectors' "about" says."""
    if isinstance(tokens, list):
        return tokens
    return [(tokens["a"] * at + tokens["b"]) % tokens["m"] for at in range(tokens["n"])]


def as_bytes(text):
    return None if text is None else bytes.fromhex(text)


if __name__ == "__main__":
    unittest.main(verbosity=2)
