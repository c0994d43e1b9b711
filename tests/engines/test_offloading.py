"""A real vLLM on a CPU with its own offloading, and kvgate below its CPU tier.

python tests/engines/test_offloading.py     in an environment with vLLM and the wheel (tests/run.sh makes one)
"""

import json
import os
import signal
import tempfile
import unittest
from pathlib import Path

import families
import offloading
import tiny_model
from case import EngineCase, damage
from gateway import hang
from kvgate.vllm.tier import KvGateTier
from lives import prompt

offloading.pretend()

# Two blocks of 128 tokens are a page; of 1000 tokens, three pages are full.
PAGE = 256
REUSED = 2 * 3 * PAGE
# Two for each thing that happens while a second engine lives.
LOADED, DAMAGED, HUNG, GONE = (
    [{"prompt_token_ids": prompt(seed, 1000)} for seed in (first, first + 1)] for first in (1, 3, 5, 7)
)


def settle(llm):
    """Until what was computed has reached the gateway."""
    client = llm.llm_engine.engine_core
    while client.engine_core.scheduler.has_requests():
        client.get_output()


def spaces(gateway):
    """Of all pages there."""
    return [json.loads(path.read_text()) for path in (gateway.folder / "objects" / "kvgate").rglob("space.json")]


class OffloadingTest(EngineCase):
    @classmethod
    def setUpClass(cls):
        EngineCase.models = tempfile.TemporaryDirectory()
        os.environ["XDG_CACHE_HOME"] = cls.models.name + "/cache"
        EngineCase.model = tiny_model.make(cls.models.name + "/tiny")
        EngineCase.plain = cls.alive(LOADED + DAMAGED + HUNG + GONE)

    def fill(self, prompts, *others, **engine):
        """An engine that stores these prompts, then the others. The tokens of all, and the objects of the first ones."""

        def act(llm, generate):
            tokens, _ = generate(prompts)
            settle(llm)
            self.gateway.flush()
            objects = [str(path) for path in self.gateway.objects()]
            for more in others:
                tokens += generate(more)[0]
            settle(llm)
            return tokens, objects

        self.gateway.start()
        result = self.alive([], self.kv(), act=act, **engine)
        self.gateway.flush()
        # Nothing is left in its memory.
        self.gateway.kill()
        return result["act"]

    def kv(self, **tier):
        return offloading.offloading(self.gateway.socket, **tier)

    def test_a_second_engine_loads_what_another_stored_whatever_stops(self):
        """Damaged objects, a gateway that hangs, and one that is gone: it goes on, and computes."""
        plain = self.plain["tokens"]
        tokens, damaged = self.fill(DAMAGED, LOADED, HUNG, GONE)
        self.assertEqual(tokens, plain[2:4] + plain[:2] + plain[4:], "vLLM answers otherwise when it offloads")
        self.assertEqual((len(damaged), len(self.gateway.objects())), (6, 24))
        (space,) = spaces(self.gateway)
        self.assertEqual((space["dtype"], space["hash"], space["chunk_tokens"]), ("pages", "vllm-sha256", PAGE))
        damage(map(Path, damaged))
        self.gateway.start()
        process = self.gateway.pid()
        steps = {"all": 0, "storing": 0}

        def act(llm, generate):
            def answers(prompts):
                before = external(llm)
                tokens, _ = generate(prompts)
                return tokens, external(llm) - before

            on_schedule_end = KvGateTier.on_schedule_end

            def counted(tier, context):
                steps["all"] += 1
                steps["storing"] += bool(tier.jobs)
                return on_schedule_end(tier, context)

            found = [answers(LOADED), answers(DAMAGED)]
            settle(llm)
            KvGateTier.on_schedule_end = counted
            hang(process)
            try:
                found.append(answers(HUNG))
            finally:
                os.kill(process, signal.SIGCONT)
            self.gateway.kill()
            return [*found, answers(GONE)], steps

        kv = self.kv(store_deadline_ms=60_000, patience_ms=60_000)
        found, steps = self.alive([], kv, act=act)["act"]
        expected = [[plain[:2], REUSED], [plain[2:4], 0], [plain[4:6], 0], [plain[6:], 0]]
        for what, one, other in zip(("loaded", "damaged", "hangs", "gone"), found, expected, strict=True):
            with self.subTest(what):
                self.assertEqual(one, other)
        # All answers came while pages waited for the gateway.
        self.assertGreater(steps["storing"], 10, steps)

    def test_windows_too(self):
        model = families.make(f"{self.models.name}/gemma3", "gemma3")
        prompts = [{"prompt_token_ids": prompt(seed, 1000)} for seed in (11, 12)]
        # The first one computes all of it.
        plain, _ = self.fill(prompts, model=model)
        # vLLM deals its six layers into a group each.
        self.assertEqual(len({space["extra"]["group"] for space in spaces(self.gateway)}), 6)
        self.gateway.start()
        second = self.alive(prompts, self.kv(), model=model)
        self.assertEqual((second["external"], second["tokens"]), (REUSED, plain))


def external(llm):
    """Tokens that came from below vLLM's own cache so far."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:external_prefix_cache_hits")


if __name__ == "__main__":
    unittest.main(verbosity=2)
