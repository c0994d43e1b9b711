"""A real vLLM on a CPU reuses every kind of KV that today's models keep, through a real gateway: windows, chunked attention,
states, latents.

python tests/engines/test_families.py     in an environment with vLLM and the wheel (tests/run.sh makes one)
"""

import dataclasses
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

import families
from case import damage
from gateway import KVGATE, Gateway
from lives import alive, kvgate, prompt


@dataclasses.dataclass(frozen=True)
class Tried:
    """A family in an engine, and what of its prompts another engine loads."""

    family: str
    kinds: tuple[str, ...]
    """What its spaces are."""
    reused: int
    """Tokens of each prompt."""
    prompt_tokens: int = 1000
    engine: dict = dataclasses.field(default_factory=dict)
    kv: dict = dataclasses.field(default_factory=dict)
    sizes: bool = True
    """`kvgate size` tells the same as vLLM's own specs."""
    without: dict = dataclasses.field(default_factory=dict)
    """Tokens that are loaded all the same where nothing of a kind is there, by kind."""


# Each is close behind a boundary where that shows most.
STATES = {"prompt_tokens": 3 * 256 + 2, "reused": 3 * 256}
# The CPU's rotary_embedding computes something else for queries of three dimensions.
PLAIN_ROPE = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
# The CPU's Mamba2 scan gives no states from inside a step: steps have to end where a state is kept.
MAMBA2 = {"max_num_batched_tokens": 128, "max_num_seqs": 4}
HAS_AMX = "amx_tile" in Path("/proc/cpuinfo").read_text()
AMX = {"block_size": 32, "dtype": "bfloat16"}
UNIFIED = {"disable_hybrid_kv_cache_manager": True}
IN_CI = (
    Tried("gemma3", ("full", "window 128"), 768),
    Tried("lfm2", ("full", "state"), 896, prompt_tokens=7 * 128 + 2, engine=PLAIN_ROPE),
)
ALL = (
    *IN_CI,
    Tried("gemma3", ("full",), 768, engine=UNIFIED),
    Tried("gpt_oss", ("full", "window 128"), 768),
    # On a CPU, with the hybrid manager off, vLLM 0.32 itself answers its second and later tokens otherwise each time.
    Tried("gpt_oss", ("full",), 768, engine={**UNIFIED, "max_tokens": 1}),
    Tried("cohere2", ("full", "window 129"), 768),
    Tried("cohere2", ("full",), 768, engine=UNIFIED),
    # Boundaries within an attention chunk need a part of it.
    Tried("llama4", ("chunked 256", "full"), 896, kv={"chunk_tokens": 128}, without={"chunked 256": 768}),
    Tried("llama4", ("full",), 768, engine=UNIFIED),
    Tried("granite_hybrid", ("full", "state"), **STATES, engine=MAMBA2),
    Tried("nemotron_h", ("full", "state"), **STATES, engine=MAMBA2),
    Tried("falcon_h1", ("full", "state"), **STATES, engine=MAMBA2),
    # Some CPUs keep its states in float32 whatever the configuration says.
    Tried("qwen3_next", ("full", "state"), **STATES, engine={"dtype": "bfloat16"}, sizes=False),
    # The CPU's kernel for latents has blocks of 16; the one for AMX has blocks of 32, and takes no float32.
    # In bfloat16 vLLM alone makes other second tokens after a hit in its own cache.
    Tried("deepseek_v3", ("full",), 768, engine={**AMX, "max_tokens": 1} if HAS_AMX else {"block_size": 16}),
)
TRIED = ALL if os.environ.get("KVGATE_TEST_FULL") else IN_CI


def kept(llm, generate):
    """The KV that each kind of layer keeps, and its bytes a token, by vLLM's own specs."""
    groups = {}
    for spec in llm.collective_rpc("get_kv_cache_spec")[0].values():
        window, chunk = getattr(spec, "sliding_window", None), getattr(spec, "attention_chunk_size", None)
        is_state = hasattr(spec, "mamba_type")
        kind = "state" if is_state else f"window {window}" if window else f"chunked {chunk}" if chunk else "full"
        layers, token_bytes = groups.get(kind, (0, 0))
        size = spec.state_content_size_bytes if is_state else spec.page_size_bytes // spec.block_size
        groups[kind] = [layers + 1, token_bytes + size]
    return groups


def size_of(model, engine):
    """The same by `kvgate size`."""
    command = [KVGATE, "size", "--config", model, "--json"]
    command += ["--dtype", engine["dtype"]] if "dtype" in engine else []
    kinds = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["kinds"]
    name = lambda kind: kind if isinstance(kind, str) else " ".join(map(str, next(iter(kind.items()))))  # noqa: E731
    return {name(of["kind"]): [of["layers"], of["token_bytes"] or of["snapshot_bytes"]] for of in kinds}


class FamilyTest(unittest.TestCase):
    def begin(self, tried):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-family-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        os.environ["XDG_CACHE_HOME"] = folder.name + "/cache"
        self.tried = tried
        self.model = families.make(folder.name + "/model", tried.family)
        self.prompts = [{"prompt_token_ids": prompt(seed, tried.prompt_tokens)} for seed in (1, 2)]
        self.gateway = Gateway(folder.name)
        self.addCleanup(self.gateway.end)
        self.gateway.start()
        self.kv = kvgate(self.gateway.socket, **tried.kv)

    def alive(self, kv=None, prompts=None, **more):
        return alive(self.model, prompts or self.prompts, kv, **{**self.tried.engine, **more})

    def anew(self):
        """Nothing is in the gateway's memory any more."""
        self.gateway.flush()
        self.gateway.kill()

    def reused(self, tried):
        """Another engine loads what one stored, with the tokens of plain vLLM; what is damaged, or missing, of any kind is
        computed."""
        self.begin(tried)
        plain = self.alive(act=kept)
        if tried.sizes:
            self.assertEqual(size_of(self.model, tried.engine), plain["act"])
        self.assertNotEqual(plain["tokens"][0], plain["tokens"][1])
        first = self.alive(self.kv)
        self.assertEqual((first["external"], first["tokens"]), (0, plain["tokens"]))
        self.anew()
        self.assertEqual(tuple(sorted(self.gateway.kinds())), tried.kinds)
        self.gateway.start()
        second = self.alive(self.kv)
        self.assertEqual((second["external"], second["tokens"]), (2 * tried.reused, plain["tokens"]))
        for kind in tried.kinds:
            with self.subTest(damaged=kind):
                self.anew()
                damage(self.gateway.kinds()[kind])
                self.gateway.start()
                damaged = self.alive(self.kv)
                self.assertEqual(damaged["tokens"], plain["tokens"])
                self.assertGreater(damaged["metrics"]["vllm:kvgate_failed_loads"], 0)
                # What was damaged is stored anew.
                self.gateway.flush()
                again = self.alive(self.kv)
                self.assertEqual((again["external"], again["tokens"]), (2 * tried.reused, plain["tokens"]))
            with self.subTest(missing=kind):
                self.anew()
                for path in self.gateway.kinds()[kind]:
                    path.unlink()
                self.gateway.start()
                missing = self.alive(self.kv)
                reused = 2 * tried.without.get(kind, 0)
                self.assertEqual((missing["external"], missing["tokens"]), (reused, plain["tokens"]))
        return plain

    def test_another_engine_loads_what_one_stored(self):
        for tried in TRIED:
            with self.subTest(tried.family, engine=tried.engine):
                self.reused(tried)


if __name__ == "__main__":
    unittest.main(verbosity=2)
