"""A real vLLM answers as without a gateway, with any trouble of the gateway's.

python tests/engines/test_trouble.py     in an environment with vLLM and the wheel, with Ceph up
"""

import itertools
import os
import subprocess
import unittest
from unittest import mock

from case import CHUNK, PROMPTS, REUSED, EngineCase
from gateway import Gateway, Proxy
from kvgate.vllm.scheduler import SchedulerSide
from kvgate.vllm.worker import WorkerSide
from lives import forget, kvgate, prompt

# Of a proxy in front of the radosgw.
S3_PORT = 17480
BUCKET = "kvgate-engines"


class GatewayTest(EngineCase):
    def between(self, *arguments):
        """A proxy before the gateway, and the engine's settings for it."""
        path = self.gateway.folder / "proxy.sock"
        proxy = Proxy(path, self.gateway.socket, *arguments)
        self.addCleanup(proxy.end)
        return kvgate(path)

    def test_without_a_gateway_all_is_computed(self):
        self.computes(self.kv())

    def test_damaged_objects_are_computed(self):
        self.stored()
        self.gateway.kill()
        self.damage()
        self.gateway.start()
        result = self.alive(PROMPTS, self.kv())
        self.assertEqual(result["tokens"], self.plain["tokens"])
        self.assertGreater(result["metrics"]["vllm:kvgate_failed_loads"], 0)
        # The damaged chunks are out of the way, and computed ones take their place.
        self.gateway.flush()
        self.loads(self.kv())

    def test_damaged_objects_are_computed_layer_by_layer_too(self):
        self.stored()
        self.gateway.kill()
        self.damage()
        self.gateway.start()
        result = self.alive(PROMPTS, self.kv(layerwise=True))
        self.assertEqual(result["tokens"], self.plain["tokens"])
        self.assertGreater(result["metrics"]["vllm:kvgate_failed_loads"], 0)
        # Nothing was stored of what was computed from what did not come.
        self.gateway.flush()
        self.loads(self.kv())

    def test_the_gateway_is_killed_in_the_middle_of_a_load(self):
        self.stored()
        result = self.alive(PROMPTS, self.between("--kill", self.gateway.pid()))
        self.assertEqual(result["tokens"], self.plain["tokens"])
        self.assertIsNone(self.gateway.pid())
        self.assertGreater(result["metrics"]["vllm:kvgate_failed_loads"], 0)

    def test_a_gateway_that_answers_after_ten_seconds_is_not_waited_for(self):
        self.stored()
        kv = self.between("--delay", 10)
        kv["kv_connector_extra_config"]["lookup_deadline_ms"] = 50
        self.computes(kv)

    def test_a_gateway_may_come_later_and_go_and_come_again(self):
        def act(llm, generate):
            told = []
            for change in (None, self.gateway.start, self.gateway.kill, self.gateway.start):
                if change:
                    change()
                for _ in range(2):
                    forget(llm)
                    tokens, outputs = generate(PROMPTS)
                    if self.gateway.pid():
                        self.gateway.flush()
                    told.append((tokens, sum(output.num_cached_tokens for output in outputs)))
            return told

        result = self.alive([], self.kv(breaker_pause_ms=1), act=act)
        told = result["act"]
        self.assertEqual([tokens for tokens, _ in told], [self.plain["tokens"]] * 8)
        # Without a gateway nothing; then what was stored the first time; then nothing again; then what is on S3.
        self.assertEqual([cached for _, cached in told], [0, 0, 0, REUSED, 0, 0, REUSED, REUSED])
        for line in ("nobody answers at", "is lost, everything is computed", "is back"):
            self.assertEqual(result["said"].count(line), 1, line)
        missed = {
            name: result["metrics"][f"vllm:kvgate_{name}_requests"] for name in ("absent", "late", "failed", "paused")
        }
        # Four rounds without a gateway, and one with an empty one.
        self.assertEqual(missed["absent"], len(PROMPTS))
        self.assertEqual(missed["late"] + missed["failed"] + missed["paused"], 4 * len(PROMPTS), missed)


class CephTest(EngineCase):
    """Gateways on Ceph's radosgw."""

    def setUp(self):
        super().setUp()
        endpoints = os.environ.get("KVGATE_TEST_RGW_ENDPOINTS", "").split()
        self.assertTrue(endpoints, "bring Ceph up: ceph/up.sh, and source its env")
        self.endpoint = endpoints[0]
        self.prefix = f"engines-{os.getpid()}-{self._testMethodName}"
        self.gateway.s3 = self.s3(self.endpoint)
        user = ":".join(os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
        sign = ["--aws-sigv4", "aws:amz:us-east-1:s3", "--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]
        make = ["curl", "-sf", "-X", "PUT", *sign, "--user", user, f"{self.endpoint}/{BUCKET}"]
        subprocess.run(make, check=True)

    def s3(self, endpoint):
        return ["--endpoint", endpoint, "--bucket", BUCKET, "--prefix", self.prefix]

    def test_two_engines_share_a_bucket_through_two_gateways(self):
        self.gateway.start()
        self.computes(self.kv())
        self.gateway.flush()
        other = Gateway(self.gateway.folder, "other", self.gateway.s3)
        self.addCleanup(other.end)
        other.start()
        self.loads(kvgate(other.socket))

    def test_a_decode_engine_finds_what_s3_does_not_have_yet(self):
        proxy = Proxy(f"127.0.0.1:{S3_PORT}", self.endpoint.removeprefix("http://"))
        self.addCleanup(proxy.end)
        self.gateway.s3 = self.s3(f"http://127.0.0.1:{S3_PORT}")
        self.gateway.start()
        # Nothing can be written from here on.
        proxy.end()
        self.computes({**self.kv(), "kv_role": "kv_producer"})
        self.loads({**self.kv(), "kv_role": "kv_consumer"})

    def test_s3_stops(self):
        proxy = Proxy(f"127.0.0.1:{S3_PORT}", self.endpoint.removeprefix("http://"))
        self.addCleanup(proxy.end)
        self.gateway.s3 = self.s3(f"http://127.0.0.1:{S3_PORT}")
        self.gateway.start()
        self.computes(self.kv())
        self.gateway.flush()
        self.gateway.kill()
        self.gateway.start()
        # The gateway has none of it in memory.
        first = PROMPTS[:1]

        def act(llm, generate):
            forget(llm)
            tokens, outputs = generate(first)
            proxy.end()
            forget(llm)
            both, _ = generate(PROMPTS)
            generate([{"prompt_token_ids": prompt(77, 600)}])
            return tokens, sum(output.num_cached_tokens for output in outputs), both

        tokens, cached, both = self.alive([], self.kv(), act=act)["act"]
        self.assertEqual((tokens, cached), (self.plain["tokens"][:1], 3 * CHUNK))
        self.assertEqual(both, self.plain["tokens"])


class GuardTest(EngineCase):
    def test_after_any_error_the_engine_answers_like_plain_vllm(self):
        self.stored()
        for owner, name, call in (
            (SchedulerSide, "new_request", 0),
            (SchedulerSide, "matched_tokens", 0),
            (SchedulerSide, "allocated", 1),
            (SchedulerSide, "step", 4),
            (SchedulerSide, "ended", 4),
            (SchedulerSide, "finished", 0),
            (WorkerSide, "load", 0),
            (WorkerSide, "collect", 2),
        ):
            calls, real = itertools.count(), getattr(owner, name)

            def throws(*arguments, calls=calls, real=real, call=call, **named):
                if next(calls) == call:
                    raise RuntimeError("broken by a test")
                return real(*arguments, **named)

            with self.subTest(name), mock.patch.object(owner, name, throws):
                result = self.alive(PROMPTS, self.kv())
                self.assertEqual(result["tokens"], self.plain["tokens"])
                self.assertIn("kvgate is off", result["said"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
