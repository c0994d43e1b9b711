"""A real vLLM on a CPU reuses KV of models with windows, chunked attention and latents through a real gateway.

python tests/engines/test_families.py     in an environment with vLLM and the wheel (tests/run.sh makes one)
"""

import json
import os
import subprocess
import tempfile
import unittest

import families
from case import CHUNK, PROMPTS, damage
from gateway import KVGATE, Gateway
from lives import kvgate, life

REUSED = 2 * 3 * CHUNK
# With the engine's settings. The CPU's kernel for latents has blocks of 16. gpt-oss's first token alone: on a CPU, with the
# hybrid manager off, vLLM 0.32 itself answers the second and later ones otherwise each time.
MORE = {"cohere2": {}, "llama4": {}, "gpt_oss": {"max_tokens": 1}, "deepseek_v3": {"block_size": 16}}
TRIED = {"gemma3": {}, **(MORE if os.environ.get("KVGATE_TEST_FULL") else {})}


def kept(llm, generate):
    """The KV that each kind of layer keeps, and its bytes a token, by vLLM's own specs."""
    groups = {}
    for spec in llm.collective_rpc("get_kv_cache_spec")[0].values():
        window, chunk = getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None)
        kind = f"window {window}" if window else f"chunked {chunk}" if chunk else "full"
        layers, token_bytes = groups.get(kind, (0, 0))
        groups[kind] = [layers + 1, token_bytes + spec.page_size_bytes // spec.block_size]
    return groups


def size_of(model):
    """The same by `kvgate size`."""
    said = subprocess.run([KVGATE, "size", "--config", model, "--json"], capture_output=True, text=True, check=True)
    groups = json.loads(said.stdout)["groups"]
    name = lambda group: group["kind"] + (f" {group['tokens']}" if group["tokens"] else "")  # noqa: E731
    return {name(group): [group["layers"], group["token_bytes"]] for group in groups}


class FamilyTest(unittest.TestCase):
    def reused(self, family, **engine):
        """Another engine loads what one stored, also where objects are damaged, with the tokens of plain vLLM."""
        folder = tempfile.TemporaryDirectory(prefix="kvgate-family-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        os.environ["XDG_CACHE_HOME"] = folder.name + "/cache"
        model = families.make(folder.name + "/model", family)
        gateway = Gateway(folder.name)
        self.addCleanup(gateway.end)
        gateway.start()
        plain = self.alive(model, act=kept, **engine)
        self.assertEqual(size_of(model), plain["act"])
        self.assertNotEqual(plain["tokens"][0], plain["tokens"][1])
        kv = kvgate(gateway.socket)
        first = self.alive(model, kv, **engine)
        self.assertEqual((first["external"], first["tokens"]), (0, plain["tokens"]))
        gateway.flush()
        objects = gateway.objects()
        self.assertEqual(len(objects), 6)
        second = self.alive(model, kv, **engine)
        self.assertEqual((second["external"], second["tokens"]), (REUSED, plain["tokens"]))
        gateway.kill()
        damage(objects)
        gateway.start()
        damaged = self.alive(model, kv, **engine)
        self.assertEqual(damaged["tokens"], plain["tokens"])
        self.assertGreater(damaged["metrics"]["vllm:kvgate_failed_loads"], 0)

    def alive(self, model, kv=None, **engine):
        result = life(model, PROMPTS, kv, **engine)
        if not result["ok"]:
            raise AssertionError(f"{result['error']}\n{result['said'][-5000:]}")
        return result

    def test_another_engine_loads_what_one_stored(self):
        for family, engine in TRIED.items():
            with self.subTest(family):
                self.reused(family, **engine)


if __name__ == "__main__":
    unittest.main(verbosity=2)
