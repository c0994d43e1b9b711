"""The common part of tests with a real engine and a real gateway."""

import os
import tempfile
import unittest

import tiny_model
from gateway import Gateway
from lives import alive, kvgate, prompt

CHUNK = 256
PROMPTS = [{"prompt_token_ids": prompt(seed, 1000)} for seed in (1, 2)]
# Of 1000 tokens, three chunks are full.
REUSED = 2 * 3 * CHUNK


def damage(objects):
    """A bit of each."""
    for path in objects:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)


class EngineCase(unittest.TestCase):
    models = None

    @classmethod
    def setUpClass(cls):
        """The model, and what it answers without kvgate: once for all tests."""
        if EngineCase.models is None:
            EngineCase.models = tempfile.TemporaryDirectory()
            os.environ["XDG_CACHE_HOME"] = cls.models.name + "/cache"
            EngineCase.model = tiny_model.make(cls.models.name + "/tiny")
            EngineCase.plain = cls.alive(PROMPTS)

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-vllm-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.gateway = Gateway(folder.name)
        self.addCleanup(self.gateway.end)

    @classmethod
    def alive(cls, prompts, kv=None, **engine):
        return alive(engine.pop("model", cls.model), prompts, kv, **engine)

    def kv(self, **extra):
        return kvgate(self.gateway.socket, **extra)

    def stored(self, **extra):
        """One engine's life with the gateway, after which everything is on S3."""
        self.gateway.start()
        first = self.alive(PROMPTS, self.kv(**extra))
        self.assertEqual(first["tokens"], self.plain["tokens"])
        self.assertEqual(first["external"], 0)
        self.gateway.flush()
        self.assertEqual(len(self.gateway.objects()), 6)

    def damage(self):
        damage(self.gateway.objects())

    def computes(self, kv, **engine):
        """An engine's life without anything from kvgate, and with the right answers."""
        result = self.alive(PROMPTS, kv, **engine)
        self.assertEqual((result["external"], result["tokens"]), (0, self.plain["tokens"]))
        return result

    def loads(self, kv, reused=REUSED, **engine):
        """An engine's life with the right answers, and so many tokens from kvgate."""
        result = self.alive(PROMPTS, kv, **engine)
        self.assertEqual((result["external"], result["tokens"]), (reused, self.plain["tokens"]))
        return result
