"""What is particular to models with several kinds of KV, in a real vLLM with a real gateway: what is read of windows, states
where prompts part, ranks and stages, drafts.

python tests/engines/test_kinds.py     in an environment with vLLM and the wheel
"""

import os
import tempfile
import unittest

import families
from gateway import Gateway
from lives import alive, kvgate, life, prompt
from test_families import AMX, HAS_AMX

# The CPU's rotary_embedding computes something else for queries of three dimensions.
# On a CPU vLLM runs stages only with its warm-up.
PP2 = {"pipeline_parallel_size": 2, "enforce_eager": False}
TP2 = {"tensor_parallel_size": 2}
LFM2 = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
# The CPU's Mamba2 scan gives no states from inside a step: steps have to end where a state is kept.
MAMBA2 = {"max_num_batched_tokens": 128, "max_num_seqs": 4}
HEADER_BYTES = 4096


class KindsCase(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="kvgate-kinds-", ignore_cleanup_errors=True)
        cls.addClassCleanup(cls.folder.cleanup)
        os.environ["XDG_CACHE_HOME"] = cls.folder.name + "/cache"

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-kinds-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.gateway = Gateway(folder.name)
        self.addCleanup(self.gateway.end)
        self.gateway.start()
        self.kv = kvgate(self.gateway.socket)

    def model(self, family):
        folder = f"{self.folder.name}/{family}"
        return folder if os.path.exists(f"{folder}/config.json") else families.make(folder, family)

    def alive(self, family, prompts, kv=None, **engine):
        return alive(self.model(family), [{"prompt_token_ids": tokens} for tokens in prompts], kv, **engine)

    def anew(self):
        """Nothing is in the gateway's memory any more."""
        self.gateway.flush()
        self.gateway.kill()
        self.gateway.start()


class WindowTest(KindsCase):
    def test_of_a_long_prompt_only_the_last_window_is_read(self):
        prompts = [prompt(1, 16_000)]
        plain = self.alive("gemma3", prompts)
        self.alive("gemma3", prompts, self.kv)
        self.anew()
        second = self.alive("gemma3", prompts, self.kv)
        chunks = 16_000 // 256
        self.assertEqual((second["external"], second["tokens"]), (chunks * 256, plain["tokens"]))
        kinds = self.gateway.kinds()
        self.assertEqual({kind: len(paths) for kind, paths in kinds.items()}, {"full": chunks, "window 128": chunks})
        size = {kind: paths[0].stat().st_size for kind, paths in kinds.items()}
        # A window of 128 tokens lies in the last chunk. What else moved is less than a header.
        needed = chunks * size["full"] + size["window 128"]
        self.assertEqual((self.gateway.moved() - needed) // HEADER_BYTES, 0)


class StateTest(KindsCase):
    def test_prompts_that_part_load_the_deepest_snapshot_they_share(self):
        """An engine that never saw the first prompt keeps a state where the second one leaves it."""
        begun = prompt(1, 500)
        prompts = [[*begun, *prompt(seed, 398)] for seed in (2, 3, 4)]
        plain = [self.alive("lfm2", [tokens], **LFM2)["tokens"] for tokens in prompts]
        hits = []
        for tokens, right in zip(prompts, plain, strict=True):
            result = self.alive("lfm2", [tokens], self.kv, **LFM2)
            self.assertEqual(result["tokens"], right)
            hits.append(result["external"])
            self.gateway.flush()
        # The first kept a state at its end only, the second where they part: 3 chunks of 128 tokens.
        self.assertEqual(hits, [0, 0, 3 * 128])

    def test_a_prompt_that_ends_at_a_snapshot_computes_its_last_token(self):
        longer = prompt(1, 7 * 128 + 2)
        whole = longer[: 7 * 128]
        plain = self.alive("lfm2", [whole], **LFM2)["tokens"]
        self.alive("lfm2", [longer], self.kv, **LFM2)
        self.gateway.flush()
        result = self.alive("lfm2", [whole], self.kv, **LFM2)
        # Its own last boundary is a chunk before, where the longer one has kept no state.
        self.assertEqual((result["external"], result["tokens"]), (0, plain))
        again = self.alive("lfm2", [whole], self.kv, **LFM2)
        self.assertEqual((again["external"], again["tokens"]), (6 * 128, plain))

    def test_a_next_turn_goes_on_from_the_last_one(self):
        first = prompt(1, 7 * 128 + 2)
        said = self.alive("lfm2", [first], self.kv, max_tokens=40, **LFM2)["tokens"][0]
        self.gateway.flush()
        turn = [*first, *said, *prompt(9, 60)]
        plain = self.alive("lfm2", [turn], **LFM2)["tokens"]
        result = self.alive("lfm2", [turn], self.kv, **LFM2)
        self.assertEqual((result["external"], result["tokens"]), (7 * 128, plain))


class DraftTest(KindsCase):
    PROMPTS = tuple(prompt(seed, 1000) for seed in (1, 2))

    def drafting(self, kv=None):
        """An engine with EAGLE's drafts, and the share of them that the model accepts."""
        target = self.model("llama_shallow")
        draft = f"{target}-draft"
        if not os.path.exists(draft):
            families.make_draft(draft, target)
        speculative = {"method": "eagle", "model": draft, "num_speculative_tokens": 2}
        result = self.alive("llama_shallow", self.PROMPTS, kv, max_tokens=200, speculative_config=speculative)
        counts = result["drafts"]
        return result, counts["vllm:spec_decode_num_accepted_tokens"] / counts["vllm:spec_decode_num_draft_tokens"]

    def test_drafts_are_accepted_as_often_with_what_was_loaded(self):
        plain, cold = self.drafting()
        self.assertGreater(cold, 0.1, "drafts that are never accepted show nothing")
        first, _ = self.drafting(self.kv)
        self.assertEqual((first["external"], first["tokens"]), (0, plain["tokens"]))
        self.anew()
        self.assertEqual(sorted(self.gateway.kinds()), ["draft full", "full"])
        second, warm = self.drafting(self.kv)
        # Of three full chunks the last is computed: what a draft keeps of its last token is not known.
        self.assertEqual((second["external"], second["tokens"]), (2 * 512, plain["tokens"]))
        self.assertLess(abs(warm - cold), 0.01)
        self.anew()
        for path in self.gateway.kinds()["draft full"]:
            path.unlink()
        self.gateway.kill()
        self.gateway.start()
        without, _ = self.drafting(self.kv)
        self.assertEqual((without["external"], without["tokens"]), (2 * 512, plain["tokens"]))
        self.assertEqual(without["metrics"]["vllm:kvgate_failed_loads"], 0)


if os.environ.get("KVGATE_TEST_FULL"):

    class MtpTest(KindsCase):
        PROMPTS = tuple(prompt(seed, 1000) for seed in (1, 2))

        def drafting(self, kv=None):
            """DeepSeek with its MTP layer, and the share of its drafts that the model accepts."""
            engine = AMX if HAS_AMX else {"block_size": 16}
            speculative = {"method": "mtp", "num_speculative_tokens": 1}
            result = self.alive(
                "deepseek_mtp", self.PROMPTS, kv, max_tokens=100, speculative_config=speculative, **engine
            )
            counts = result["drafts"]
            accepted, made = (counts[f"vllm:spec_decode_num_{what}_tokens"] for what in ("accepted", "draft"))
            return result, accepted / made

        def test_drafts_are_accepted_as_often_with_what_was_loaded(self):
            plain, cold = self.drafting()
            self.assertGreater(cold, 0.1, "drafts that are never accepted show nothing")
            self.drafting(self.kv)
            self.anew()
            self.assertEqual(sorted(self.gateway.kinds()), ["draft full", "full"])
            second, warm = self.drafting(self.kv)
            self.assertGreater(second["external"], 0)
            # In bfloat16, which AMX has for latents, other steps make other tokens where two are nearly as likely.
            same, apart = (20, 0.05) if HAS_AMX else (100, 0.01)
            first = lambda result: [tokens[:same] for tokens in result["tokens"]]  # noqa: E731
            self.assertEqual(first(second), first(plain))
            self.assertLess(abs(warm - cold), apart)


class RanksCase(KindsCase):
    def writes_and_reads(self, family, reused, writer, reader, more=232, **engine):
        """`more`: tokens of the prompts behind what is reused."""
        prompts = [prompt(seed, reused + more) for seed in (1, 2)]
        plain = self.alive(family, prompts, **engine)
        first = self.alive(family, prompts, self.kv, **engine, **writer)
        self.assertEqual((first["external"], first["tokens"]), (0, plain["tokens"]))
        self.anew()
        second = self.alive(family, prompts, self.kv, **engine, **reader)
        self.assertEqual((second["external"], second["tokens"]), (2 * reused, plain["tokens"]))

    def states(self, family, reused, writer, reader, **engine):
        """A wrong state shows close behind the snapshot only."""
        self.writes_and_reads(family, reused, writer, reader, more=2, **engine)


class RanksTest(RanksCase):
    def test_two_ranks_write_windows_and_one_reads(self):
        self.writes_and_reads("gemma3", 768, TP2, {})
        self.assertEqual(
            {kind: len(paths) for kind, paths in self.gateway.kinds().items()}, {"full": 6, "window 128": 6}
        )

    def test_two_ranks_write_states_and_one_reads(self):
        self.states("lfm2", 896, TP2, {}, **LFM2)
        # Of each prompt one snapshot, which is an object of both ranks.
        self.assertEqual({kind: len(paths) for kind, paths in self.gateway.kinds().items()}, {"full": 14, "state": 2})

    def test_two_stages_write_and_one_reads(self):
        self.writes_and_reads("gemma3", 768, PP2, {})


if os.environ.get("KVGATE_TEST_FULL"):

    class MoreRanksTest(RanksCase):
        def test_one_writes_windows_and_two_ranks_read(self):
            self.writes_and_reads("gemma3", 768, {}, TP2)

        def test_two_ranks_write_and_read_states(self):
            self.states("lfm2", 896, TP2, TP2, **LFM2)

        def test_one_writes_states_and_two_ranks_read(self):
            self.states("lfm2", 896, {}, TP2, **LFM2)

        def test_two_ranks_write_states_with_a_group_that_both_have(self):
            self.states("granite_hybrid", 768, TP2, {}, **MAMBA2)

        def test_two_ranks_read_states_with_a_group_that_both_have(self):
            self.states("granite_hybrid", 768, {}, TP2, **MAMBA2)

        def test_two_ranks_write_states_with_a_group_for_each(self):
            self.states("nemotron_h", 768, TP2, {}, **MAMBA2)

        def test_two_ranks_read_states_with_a_group_for_each(self):
            self.states("nemotron_h", 768, {}, TP2, **MAMBA2)

        def test_two_ranks_write_states_of_a_delta_net(self):
            self.states("qwen3_next", 768, TP2, {}, dtype="bfloat16")

        def test_two_ranks_read_states_of_a_delta_net(self):
            self.states("qwen3_next", 768, {}, TP2, dtype="bfloat16")

        def test_one_writes_and_two_stages_read(self):
            self.writes_and_reads("gemma3", 768, {}, PP2)

        def test_two_stages_write_states_and_one_reads(self):
            self.states("lfm2_stages", 896, PP2, {}, **LFM2)

        def test_one_writes_states_and_two_stages_read(self):
            self.states("lfm2_stages", 896, {}, PP2, **LFM2)

        def test_two_stages_write_states_with_heads_and_one_reads(self):
            self.states("nemotron_h_stages", 768, PP2, {}, **MAMBA2)

        def test_stages_whose_layers_overlap_are_refused(self):
            """vLLM numbers Falcon-H1's states after all of its attention."""
            result = life(self.model("falcon_h1"), [], self.kv, **PP2, **MAMBA2)
            self.assertIn("numbers apart from its attention", result["error"] + result["said"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
