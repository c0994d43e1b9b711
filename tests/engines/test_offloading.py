"""A real vLLM on a CPU with its own offloading, and kvgate below its CPU tier.

python tests/engines/test_offloading.py     in an environment with vLLM and the wheel (tests/run.sh makes one)
"""

import json
import os
import signal
import unittest

import families
import offloading
from case import PROMPTS, EngineCase
from kvgate.vllm.tier import KvGateTier
from lives import prompt

offloading.pretend()

# Two blocks of 128 tokens are a page; of 1000 tokens, three pages are full.
PAGE = 256
REUSED = 2 * 3 * PAGE


def settle(llm, generate=None):
    """Until what was computed has reached the gateway."""
    client = llm.llm_engine.engine_core
    while client.engine_core.scheduler.has_requests():
        client.get_output()


def spaces(folder):
    """Of all pages there."""
    return [json.loads(path.read_text()) for path in (folder / "objects" / "kvgate").rglob("space.json")]


class OffloadingTest(EngineCase):
    def kv(self, **tier):
        return offloading.offloading(self.gateway.socket, **tier)

    def filled(self, prompts=PROMPTS, plain=None, **engine):
        """One engine's life, after which all is on S3."""
        self.gateway.start()

        def act(llm, generate):
            tokens, _ = generate(prompts)
            settle(llm)
            return tokens

        first = self.alive([], self.kv(), act=act, **engine)
        self.assertEqual(first["act"], plain or self.plain["tokens"])
        self.gateway.flush()

    def test_a_new_engine_loads_what_another_stored(self):
        self.filled()
        self.assertEqual(len(self.gateway.objects()), 6)
        (space,) = spaces(self.gateway.folder)
        self.assertEqual((space["dtype"], space["hash"], space["chunk_tokens"]), ("pages", "vllm-sha256", PAGE))
        self.gateway.kill()
        self.gateway.start()
        self.loads(self.kv(), REUSED)

    def test_another_layout_is_another_space(self):
        self.filled()
        self.computes(self.kv(blocks=4))
        self.computes(self.kv(), prefix_caching_hash_algo="sha256_cbor")

    def test_damaged_objects_are_computed(self):
        self.filled()
        self.gateway.kill()
        self.damage()
        self.gateway.start()
        self.computes(self.kv())

    def test_a_gateway_that_was_killed_is_not_missed(self):
        self.filled()
        self.gateway.kill()
        self.computes(self.kv())

    def test_a_gateway_that_hangs_does_not_hold_up_the_scheduler(self):
        self.filled()
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
        self.filled(prompts, plain, model=model)
        self.assertEqual(len({space["extra"]["group"] for space in spaces(self.gateway.folder)}), 2)
        second = self.alive(prompts, self.kv(), model=model)
        self.assertEqual((second["external"], second["tokens"]), (REUSED, plain))


class RefusedTest(EngineCase):
    def refuses(self, told, kv=None, **engine):
        kv = kv or offloading.offloading(self.gateway.socket)
        with self.assertRaisesRegex(AssertionError, told):
            self.alive(PROMPTS, kv, **engine)

    def test_hashes_that_may_collide(self):
        self.refuses("take sha256 or sha256_cbor", prefix_caching_hash_algo="xxhash")

    def test_adapters_by_their_path(self):
        self.refuses("adapters_by_path", enable_lora=True)

    def test_wrong_settings(self):
        self.refuses("unknown key 'tennant'", offloading.offloading(self.gateway.socket, tennant="x"))


if __name__ == "__main__":
    unittest.main(verbosity=2)
