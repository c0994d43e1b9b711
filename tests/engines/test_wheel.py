"""The wheel's Python functions, without an engine.

python tests/engines/test_wheel.py     in an environment with the wheel
"""

import json
import socket
import tempfile
import threading
import time
import unittest
from array import array
from pathlib import Path

from gateway import Gateway
from kvgate import KvGateError, Lookups, Prompt, Space

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "vectors.json").read_text())
SPACES = {space["name"]: space for space in VECTORS["spaces"] if "input" in space}


def tiny_space():
    return Space(
        json.dumps({"model": "m", "revision": "1", "chunk_tokens": 4, "mha": {"layers": 1, "heads": 1, "head_dim": 8}})
    )


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
                prompt = Prompt(space, salt, adapter, secret)
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
        by_bytes = Prompt(tiny_space())
        by_bytes.extend(array("I", range(20)).tobytes(), extras)
        self.assertEqual(by_bytes.hashes(0, 5), whole.hashes(0, 5))

    def test_impossible_arguments_are_errors(self):
        prompt = Prompt(tiny_space())
        prompt.extend(range(8))
        for wrong in (
            lambda: prompt.hashes(0, 3),
            lambda: prompt.parent(3),
            lambda: prompt.extend([1], [(3, b"in a chunk that is full")]),
            lambda: prompt.extend([-1]),
            lambda: prompt.extend(b"odd"),
            lambda: Prompt(tiny_space(), secret=b"short"),
            lambda: Space("{}"),
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
        lookups = Lookups("/nowhere/kvgate.sock", tiny_space())
        self.assertIsNone(lookups.answer("never asked"))
        prompt = Prompt(tiny_space())
        lookups.ask("r", prompt)
        self.assertEqual(lookups.answer("r"), 0, "at once: there is nothing to ask for")
        prompt.extend(range(8))
        lookups.ask("r", prompt)
        self.assertEqual(self.answer(lookups, "r"), 0)
        lookups.forget("r")
        self.assertIsNone(lookups.answer("r"))

    def test_a_gateway_that_hangs_is_soon_left_alone(self):
        with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
            listener.bind(folder + "/sock")
            listener.listen()
            accepted = []
            threading.Thread(target=lambda: accept_all(listener, accepted), daemon=True).start()
            lookups = Lookups(folder + "/sock", tiny_space(), deadline_ms=20)
            prompt = Prompt(tiny_space())
            prompt.extend(range(8))
            for request in "abc":
                lookups.ask(request, prompt)
                self.assertEqual(self.answer(lookups, request), 0)
            asked = len(accepted)
            lookups.ask("d", prompt)
            self.assertEqual(lookups.answer("d"), 0, "at once, without asking")
            self.assertEqual(len(accepted), asked)


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
