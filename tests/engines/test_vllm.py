"""A real vLLM on a CPU reuses KV through a real gateway.

python tests/engines/test_vllm.py     in an environment with vLLM and the wheel (tests/run.sh makes one)
"""

import functools
import os
import unittest
import unittest.mock

import tiny_model
from case import CHUNK, PROMPTS, REUSED, EngineCase
from gateway import Collector
from lives import life, prompt


class VllmTest(EngineCase):
    def test_a_new_engine_loads_what_another_stored(self):
        self.stored()
        second = self.alive(PROMPTS, self.kv())
        self.assertEqual(second["external"], REUSED)
        self.assertEqual(second["cached"], [REUSED // 2] * 2)
        self.assertEqual(second["tokens"], self.plain["tokens"])

    def test_a_new_gateway_has_it_from_s3(self):
        self.stored()
        self.gateway.kill()
        self.gateway.start()
        second = self.alive(PROMPTS, self.kv())
        self.assertEqual((second["external"], second["tokens"]), (REUSED, self.plain["tokens"]))

    def test_generated_tokens_are_stored_too(self):
        self.gateway.start()
        first = self.alive(PROMPTS[:1], self.kv(), max_tokens=100)
        self.gateway.flush()
        self.assertEqual(len(self.gateway.objects()), 4)
        turn = [{"prompt_token_ids": PROMPTS[0]["prompt_token_ids"] + first["tokens"][0] + prompt(9, 50)}]
        plain = self.alive(turn)
        second = self.alive(turn, self.kv())
        self.assertEqual((second["external"], second["tokens"]), (4 * CHUNK, plain["tokens"]))

    def test_local_blocks_end_inside_of_a_chunk(self):
        self.stored()
        # The same engine has computed two blocks and a bit of the prompt before: that is one chunk and a half.
        begun = {"prompt_token_ids": PROMPTS[0]["prompt_token_ids"][:400]}
        both = self.alive([begun], self.kv())
        self.assertEqual(both["external"], CHUNK)
        together = self.alive([begun, *PROMPTS], self.kv(), max_num_seqs=1)
        self.assertEqual(together["tokens"][1:], self.plain["tokens"])

    def test_a_salt_keeps_others_out(self):
        self.stored()
        salted = [{**prompt, "cache_salt": "another tenant"} for prompt in PROMPTS]
        result = self.alive(salted, self.kv())
        self.assertEqual((result["external"], result["tokens"]), (0, self.plain["tokens"]))
        again = self.alive(salted, self.kv())
        self.assertEqual((again["external"], again["tokens"]), (REUSED, self.plain["tokens"]))

    def test_the_gateway_joins_the_trace_of_a_request(self):
        collector = Collector()
        self.addCleanup(collector.end)
        settings = {"KVGATE__OTLP__ENDPOINT": collector.endpoint, "KVGATE__OTLP__SAMPLE": "0"}
        with unittest.mock.patch.dict(os.environ, settings):
            self.gateway.start()
        trace = os.urandom(16)
        headers = {"traceparent": f"00-{trace.hex()}-{os.urandom(8).hex()}-01"}

        def traced(llm, generate):
            # As vLLM's server does with --otlp-traces-endpoint.
            llm.llm_engine.add_request = functools.partial(llm.llm_engine.add_request, trace_headers=headers)

        self.alive(PROMPTS[:1], self.kv(), act=traced)
        self.gateway.flush()
        self.assertEqual(self.alive(PROMPTS[:1], self.kv(), act=traced)["external"], REUSED // 2)
        self.gateway.end()
        for name in (b"store", b"lower", b"lookup", b"load"):
            told = [body for body in collector.bodies if name in body and trace in body]
            self.assertTrue(told, (name, len(collector.bodies)))

    def test_a_tenant_with_keys(self):
        folder = self.gateway.folder
        for name, digit in (("secret", "5"), ("key", "6")):
            (folder / name).write_text(64 * digit)
            (folder / name).chmod(0o400)
        sources = f'secret = "file:{folder}/secret"\nkeys = ["file:{folder}/key"]\n'
        (folder / "keys.toml").write_text(f'[[tenant]]\nname = "acme"\nprotection = "encrypted"\n{sources}')
        (folder / "keyed.toml").write_text(f'[keys]\nfile = "{folder}/keys.toml"\n')
        self.gateway.s3 += ["--config", folder / "keyed.toml"]
        own = {"tenant": "acme", "protection": "encrypted", "tenant_secret_file": str(folder / "secret")}
        self.stored(**own)
        self.gateway.kill()
        self.gateway.start()
        # Without the protection the gateway refuses its spaces; with another secret all names are others.
        (folder / "another").write_text(64 * "7")
        (folder / "another").chmod(0o400)
        for wrong in ({"protection": ""}, {"tenant_secret_file": str(folder / "another")}):
            result = self.alive(PROMPTS, self.kv(**own | wrong))
            self.assertEqual((result["external"], result["tokens"]), (0, self.plain["tokens"]), wrong)
        result = self.alive(PROMPTS, self.kv(**own))
        self.assertEqual((result["external"], result["tokens"]), (REUSED, self.plain["tokens"]))
        result = life(self.model, PROMPTS, self.kv(**own | {"tenant_secret_file": str(folder / "keys.toml")}))
        self.assertIn("chmod 0400", result["error"])

    def test_other_weights_are_another_model(self):
        self.stored()
        other = tiny_model.make(self.models.name + "/other", seed=5)
        plain = self.alive(PROMPTS, model=other)
        result = self.alive(PROMPTS, self.kv(), model=other)
        self.assertEqual((result["external"], result["tokens"]), (0, plain["tokens"]))

    def test_a_chunk_that_is_no_multiple_of_a_block_is_refused(self):
        result = life(self.model, PROMPTS, self.kv(chunk_tokens=200))
        self.assertFalse(result["ok"])
        self.assertIn("set chunk_tokens to 256", result["error"])

    def test_wrong_settings_are_all_told(self):
        result = life(self.model, PROMPTS, self.kv(chunk_tokens="256", tennant="x"))
        self.assertFalse(result["ok"])
        self.assertIn("unknown key 'tennant'", result["error"])
        self.assertIn("chunk_tokens must be int, not '256'", result["error"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
