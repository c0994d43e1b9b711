"""A real vLLM on a CPU with its own offloading, and kvgate below its CPU tier.

python tests/engines/test_offloading.py     in an environment with vLLM and the wheel (tests/run.sh makes one)
"""

import json
import os
import shutil
import signal
import unittest
from pathlib import Path

import families
import offloading
from case import PROMPTS, EngineCase
from gateway import Gateway
from kvgate.vllm.tier import KvGateTier
from lives import prompt

offloading.pretend()

# Two blocks of 128 tokens are a page; of 1000 tokens, three pages are full.
PAGE = 256
REUSED = 2 * 3 * PAGE


def settle(llm):
    """Until what was computed has reached the gateway."""
    client = llm.llm_engine.engine_core
    while client.engine_core.scheduler.has_requests():
        client.get_output()


def spaces(gateway):
    """Of all pages there."""
    return [json.loads(path.read_text()) for path in (gateway.folder / "objects" / "kvgate").rglob("space.json")]


class OffloadingTest(EngineCase):
    full = None

    @classmethod
    def setUpClass(cls):
        """What an engine has stored on S3: once for all tests."""
        super().setUpClass()
        cls.full = Path(cls.models.name, "objects")
        gateway = Gateway(cls.models.name, "first", ["--embedded", cls.full])
        try:
            tokens = cls.fill(gateway, PROMPTS)
        finally:
            gateway.end()
        if tokens != cls.plain["tokens"]:
            raise AssertionError("vLLM answers otherwise when it offloads")

    def setUp(self):
        super().setUp()
        shutil.copytree(self.full, self.gateway.folder / "objects")

    @classmethod
    def fill(cls, gateway, prompts, **engine):
        def act(llm, generate):
            tokens, _ = generate(prompts)
            settle(llm)
            return tokens

        gateway.start()
        result = cls.alive([], offloading.offloading(gateway.socket), act=act, **engine)
        gateway.flush()
        return result["act"]

    def kv(self, **tier):
        return offloading.offloading(self.gateway.socket, **tier)

    def test_a_new_engine_loads_what_another_stored(self):
        self.assertEqual(len(self.gateway.objects()), 6)
        (space,) = spaces(self.gateway)
        self.assertEqual((space["dtype"], space["hash"], space["chunk_tokens"]), ("pages", "vllm-sha256", PAGE))
        self.gateway.start()
        self.loads(self.kv(), REUSED)

    def test_damaged_objects_are_computed(self):
        self.damage()
        self.gateway.start()
        self.computes(self.kv())

    def test_without_a_gateway_all_is_computed(self):
        self.computes(self.kv())

    def test_a_gateway_that_hangs_does_not_hold_up_the_scheduler(self):
        self.gateway.start()
        process = self.gateway.pid()
        steps = {"all": 0, "storing": 0}

        def act(llm, generate):
            on_schedule_end = KvGateTier.on_schedule_end

            def counted(tier, context):
                steps["all"] += 1
                steps["storing"] += bool(tier.jobs)
                return on_schedule_end(tier, context)

            KvGateTier.on_schedule_end = counted
            os.kill(process, signal.SIGSTOP)
            try:
                tokens, _ = generate(PROMPTS)
            finally:
                os.kill(process, signal.SIGCONT)
            return tokens, steps

        kv = self.kv(lookup_deadline_ms=50, store_deadline_ms=60_000, patience_ms=60_000)
        tokens, steps = self.alive([], kv, act=act)["act"]
        self.assertEqual(tokens, self.plain["tokens"])
        # All answers came while pages waited for the gateway.
        self.assertGreater(steps["storing"], 10, steps)

    def test_windows_too(self):
        model = families.make(f"{self.models.name}/gemma3", "gemma3")
        prompts = [{"prompt_token_ids": prompt(seed, 1000)} for seed in (11, 12)]
        plain = self.alive(prompts, model=model)["tokens"]
        self.assertEqual(self.fill(self.gateway, prompts, model=model), plain)
        # vLLM deals its six layers into a group each.
        self.assertEqual(len({space["extra"]["group"] for space in spaces(self.gateway)}), 6)
        second = self.alive(prompts, self.kv(), model=model)
        self.assertEqual((second["external"], second["tokens"]), (REUSED, plain))


if __name__ == "__main__":
    unittest.main(verbosity=2)
