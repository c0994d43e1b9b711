"""The other features of `KvGateConnector`, with a real vLLM and a real gateway.

python tests/engines/test_features.py     in an environment with vLLM and the wheel
"""

import copy
import logging
import time
import unittest
from pathlib import Path

import tiny_model
from case import CHUNK, PROMPTS, REUSED, EngineCase
from gateway import Gateway
from lives import BLOCK_TOKENS, forget, kvgate, life, prompt
from vllm import SamplingParams

GRACE_SECONDS = 6
"""More than [api] grace: so long the gateway keeps the rank that an engine had."""


class LoadTest(EngineCase):
    def test_layer_by_layer(self):
        self.stored()
        result = self.loads(self.kv(layerwise=True))
        self.assertEqual(result["cached"], [REUSED // 2] * 2)
        self.assertEqual(result["metrics"]["vllm:kvgate_loads"], 2)

    def test_layer_by_layer_with_chunked_prefill_and_little_memory(self):
        self.stored()
        self.loads(
            self.kv(layerwise=True),
            max_num_batched_tokens=256,
            max_num_seqs=1,
            long_prefill_token_threshold=200,
        )

    def test_a_prompt_of_whole_chunks_leaves_a_token_to_compute(self):
        whole = [{"prompt_token_ids": PROMPTS[0]["prompt_token_ids"][: 3 * CHUNK]}]
        plain = self.alive(whole)
        self.gateway.start()
        self.alive(whole, self.kv())
        for layerwise in (False, True):
            result = self.alive(whole, self.kv(layerwise=layerwise))
            # The last block is computed.
            self.assertEqual((result["tokens"], result["external"]), (plain["tokens"], 3 * CHUNK - BLOCK_TOKENS))

    def test_preempted_requests_are_right(self):
        # Both prompts have room, and what is generated for one of them.
        few = {"num_gpu_blocks_override": 18, "max_model_len": 2048, "max_tokens": 60}
        plain = self.alive(PROMPTS, **few)
        self.gateway.start()
        for _ in range(2):
            result = self.alive(PROMPTS, self.kv(), **few)
            self.assertEqual(result["tokens"], plain["tokens"])
            self.assertGreater(result["preemptions"], 0)

    def test_copies_by_torch_as_on_a_device_that_kvgate_has_none_for(self):
        told = logging.getLogger("kvgate.vllm.worker")
        told.setLevel(logging.INFO)
        handler = logging.StreamHandler()
        told.addHandler(handler)
        self.addCleanup(told.removeHandler, handler)
        self.gateway.start()
        first = self.computes(self.kv(copies="torch"))
        self.assertIn("torch's own calls copy KV on cpu", first["said"])
        self.gateway.flush()
        self.loads(self.kv(copies="torch"))

    def test_auto_computes_what_would_take_longer_to_load(self):
        self.stored()

        def act(llm, generate):
            connector = llm.llm_engine.engine_core.engine_core.scheduler.connector
            rates = connector.scheduler.load_or_compute
            # Nothing is known, so it loads, and knows. On a busy machine the first load alone may be slower than computing.
            generate(PROMPTS)
            rates.prefill.add(1_000_000, 1)
            measured = (rates.load.tokens > 0, rates.load.seconds > 0)
            told = []
            # Tokens a second of loads.
            for rate in (10_000_000, 1000):
                rates.load.tokens, rates.load.seconds = rate, 1
                forget(llm)
                tokens, outputs = generate(PROMPTS)
                told.append((tokens, sum(output.num_cached_tokens for output in outputs)))
            return told, measured, rates.prefill.seconds_of(1) is not None

        result = self.alive([], self.kv(load_policy="auto"), act=act)
        (quick, slow), measured, _ = result["act"]
        self.assertEqual(measured, [True, True])
        self.assertEqual(quick, [self.plain["tokens"], REUSED])
        self.assertEqual(slow, [self.plain["tokens"], 0])
        self.assertEqual(result["metrics"]["vllm:kvgate_declined_loads"], 2)


class WaitingTest(EngineCase):
    """Requests of which more is there when they are admitted than when they came. vLLM keeps no prefixes itself."""

    def test_chunks_stored_while_a_request_was_queued_are_loaded(self):
        same = [PROMPTS[0]] * 2
        one_by_one = {"enable_prefix_caching": False, "max_num_seqs": 1, "max_tokens": 60}
        plain = self.alive(same, **one_by_one)
        self.gateway.start()
        result = self.alive(same, self.kv(lookup_again_ms=1), **one_by_one)
        self.assertEqual((result["tokens"], result["external"]), (plain["tokens"], 3 * CHUNK))

    def test_a_preempted_request_loads_the_chunks_that_it_stored(self):
        few = {"num_gpu_blocks_override": 18, "max_model_len": 2048, "max_tokens": 60, "enable_prefix_caching": False}
        plain = self.alive(PROMPTS, **few)
        self.gateway.start()
        result = self.alive(PROMPTS, self.kv(), **few)
        self.assertEqual(result["tokens"], plain["tokens"])
        self.assertGreater(result["preemptions"], 0)
        self.assertEqual(result["metrics"]["vllm:kvgate_loads"], result["preemptions"])
        self.assertEqual(result["metrics"]["vllm:kvgate_failed_loads"], 0)


class AdapterTest(EngineCase):
    def test_adapters_are_told_apart_by_what_they_are(self):
        folder = Path(self.models.name)
        one, other = (tiny_model.make_adapter(str(folder / f"adapter-{seed}"), seed) for seed in (1, 2))
        lora = {"enable_lora": True, "max_lora_rank": 8}
        prompts = PROMPTS[:1]
        plain = {path: self.alive(prompts, adapters=[("a", path)], **lora) for path in (one, other)}
        self.assertNotEqual(plain[one]["tokens"], plain[other]["tokens"])
        self.gateway.start()

        def run(name, path):
            result = self.alive(prompts, self.kv(), adapters=[(name, path)], **lora)
            self.assertEqual(result["tokens"], plain[path]["tokens"])
            self.gateway.flush()
            return result["external"]

        self.assertEqual(run("a", one), 0)
        self.assertEqual(run("a", other), 0, "another adapter of the same name")
        self.assertEqual(run("b", one), 3 * CHUNK, "the same adapter by another name")
        # Neither is the model without any.
        self.computes(self.kv())


class ManyTest(EngineCase):
    def test_two_ranks_write_and_one_reads(self):
        self.gateway.start()
        self.computes(self.kv(), tensor_parallel_size=2)
        self.gateway.flush()
        self.assertEqual(len(self.gateway.objects()), 6)
        self.loads(self.kv())

    def test_one_writes_and_two_ranks_read(self):
        self.stored()
        self.loads(self.kv(), tensor_parallel_size=2)

    def test_by_multi_connector(self):
        other = Gateway(self.gateway.folder, "other", ["--embedded", self.gateway.folder / "other-objects"])
        self.addCleanup(other.end)
        self.stored()
        other.start()
        kv = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [child(self.gateway.socket), child(other.socket)]},
        }
        self.loads(kv)
        other.flush()
        # The second one has got what the first one had.
        self.loads(kvgate(other.socket))

    def test_beside_a_connector_that_loads_within_the_step(self):
        """While it did, kvgate lost track of the blocks of a long prompt, and stored other requests' KV as this one's."""
        self.gateway.start()
        sibling = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": f"{self.gateway.folder}/sibling"},
        }
        long = {"prompt_token_ids": prompt(7, 2000)}
        short = [{"prompt_token_ids": prompt(100 + seed, 300)} for seed in range(12)]
        plain = self.alive([long])["tokens"]
        self.alive(short, {**sibling, "kv_load_failure_policy": "recompute"})
        kv = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [sibling, child(self.gateway.socket)]},
        }

        def act(llm, generate):
            engine, sampling = llm.llm_engine, SamplingParams(temperature=0, max_tokens=16, detokenize=False)
            scheduler = engine.engine_core.engine_core.scheduler
            schedule, within = scheduler.schedule, []

            def watched(*arguments, **named):
                output = schedule(*arguments, **named)
                within.append(output.has_sync_kv_loads and "long" in " ".join(output.num_scheduled_tokens))
                return output

            scheduler.schedule = watched
            engine.add_request("long", long, sampling)
            for number, one in enumerate(short):
                engine.step()
                engine.add_request(f"short {number}", one, sampling)
            while engine.has_unfinished_requests():
                engine.step()
            return sum(within)

        within = self.alive([], kv, act=act, long_prefill_token_threshold=96)["act"]
        self.assertGreater(within, 3, "steps of the long prompt with a load within them")
        self.gateway.flush()
        result = self.alive([long], self.kv())
        self.assertEqual((result["tokens"], result["external"]), (plain, 2000 // CHUNK * CHUNK))

    def test_roles(self):
        self.gateway.start()
        only = {role: {**self.kv(), "kv_role": role} for role in ("kv_consumer", "kv_producer")}
        self.computes(only["kv_consumer"])
        self.computes(self.kv())
        self.gateway.flush()
        self.computes(only["kv_producer"])
        self.loads(only["kv_consumer"])


def child(socket):
    kv = copy.deepcopy(kvgate(socket))
    del kv["kv_load_failure_policy"]
    return kv


class OperatorTest(EngineCase):
    def test_metrics_and_events(self):
        self.gateway.start()
        events = {"enable_kv_cache_events": True, "publisher": "null"}

        def act(llm, generate):
            scheduler = llm.llm_engine.engine_core.engine_core.scheduler
            seen = []
            publish = scheduler.kv_event_publisher.publish
            scheduler.kv_event_publisher.publish = lambda batch: (seen.extend(batch.events), publish(batch))
            generate(PROMPTS)
            self.gateway.flush()
            # A later step brings what ended after the last one.
            end, steps = time.monotonic() + 60, 0
            while True:
                generate([{"prompt_token_ids": [5, 6, 7]}])
                steps += 1
                own = [event for event in seen if event.medium == "CPU"]
                stored = [block for event in own for block in event.block_hashes]
                if len(stored) == REUSED // BLOCK_TOKENS or time.monotonic() > end:
                    break
                time.sleep(0.1)
            gpu = [block for event in seen if event.medium == "GPU" for block in event.block_hashes]
            return {
                "stored": len(stored),
                "known": set(stored) <= set(gpu),
                "tokens": [event.token_ids for event in own],
                "heads": sum(event.parent_block_hash is None for event in own),
                "steps": steps,
            }

        result = self.alive([], self.kv(), act=act, kv_events_config=events)
        act = result["act"]
        self.assertEqual((act["stored"], act["known"], act["heads"]), (REUSED // BLOCK_TOKENS, True, 2))
        firsts = [event[:CHUNK] for event in act["tokens"]]
        self.assertIn(PROMPTS[0]["prompt_token_ids"][:CHUNK], firsts)
        self.assertEqual(result["metrics"]["vllm:kvgate_stored_chunks"], 6)
        self.assertEqual(result["metrics"]["vllm:kvgate_failed_stores"], 0)
        self.assertEqual(result["metrics"]["vllm:kvgate_absent_requests"], 2 + act["steps"])
        # The last prompt has no chunk to ask for.
        self.assertEqual(result["metrics"]["vllm:kvgate_lookup_seconds"], 2)
        second = self.loads(self.kv())
        self.assertEqual(second["metrics"]["vllm:kvgate_absent_requests"], 0)
        self.assertEqual(second["metrics"]["vllm:kvgate_lookup_seconds"], 2)
        self.assertEqual(second["metrics"]["vllm:kvgate_loads"], 2)
        self.assertEqual(second["sources"], {"host": REUSED})
        self.assertEqual(
            second["metrics"]["vllm:kvgate_loaded_bytes"],
            REUSED * tiny_model.LAYERS * 2 * tiny_model.HEADS * tiny_model.HEAD_DIM * 4,
        )

    def test_a_reset_forgets(self):
        self.stored()

        def act(llm, generate):
            told = []
            for reset_connector in (False, True, False):
                forget(llm)
                llm.reset_prefix_cache(reset_connector=reset_connector)
                tokens, outputs = generate(PROMPTS)
                self.gateway.flush()
                told.append((tokens, sum(output.num_cached_tokens for output in outputs)))
            return told

        told = self.alive([], self.kv(), act=act)["act"]
        self.assertEqual([tokens for tokens, _ in told], [self.plain["tokens"]] * 3)
        # After the reset, what was stored since.
        self.assertEqual([cached for _, cached in told], [REUSED, 0, REUSED])

    def test_the_memory_goes_and_comes(self):
        self.stored()

        def act(llm, generate):
            from vllm.distributed.kv_transfer import get_kv_transfer_group

            told = []
            for change in ("unregister_kv_caches", "restore_kv_caches", "restore_kv_caches"):
                if change == "restore_kv_caches":
                    time.sleep(GRACE_SECONDS)
                getattr(get_kv_transfer_group(), change)()
                forget(llm)
                tokens, outputs = generate(PROMPTS)
                told.append((tokens, sum(output.num_cached_tokens for output in outputs)))
            return told

        told = self.alive([], self.kv(), act=act)["act"]
        self.assertEqual([tokens for tokens, _ in told], [self.plain["tokens"]] * 3)
        self.assertEqual([cached for _, cached in told][1:], [REUSED] * 2)

    def test_a_gateway_is_started_when_none_answers(self):
        objects = self.gateway.folder / "objects"
        serve = f"--embedded {objects} --arena-path {self.gateway.arena}"
        started = self.kv(serve=serve, serve_log=str(self.gateway.log))
        # Two ranks and a scheduler race for it.
        self.computes(started, tensor_parallel_size=2)
        self.assertIsNotNone(self.gateway.pid(), "it went with the engine")
        # It may have come too late for what the first engine computed.
        self.alive(PROMPTS, started)
        self.gateway.flush()
        self.loads(started)

    def test_a_gateway_that_can_t_be_started_is_told(self):
        result = life(self.model, PROMPTS, self.kv(serve="--no-such-flag", serve_log=str(self.gateway.log)))
        self.assertFalse(result["ok"])
        self.assertIn(str(self.gateway.log), result["error"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
