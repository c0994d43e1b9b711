"""A real SGLang on a CPU, whose KV outlives it: the same tokens, most of the prompt from the storage, and from computing where
the gateway or S3 is gone.

python tests/engines/test_sglang.py     in an environment with SGLang and the wheel, with MinIO up
"""

import os
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

import tiny_model
from gateway import Gateway, Proxy
from sglang_lives import PAGE, Life, kvgate, prompt

TOKENS = 1000
# Of 1000 tokens 15 pages are full.
REUSED = TOKENS // PAGE * PAGE
S3_PORT = 17481
BUCKET = "kvgate-sglang"
PROMPTS = [prompt(seed, TOKENS) for seed in range(5)]


class SglangTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-sglang-", ignore_cleanup_errors=True)
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        os.environ["XDG_CACHE_HOME"] = str(cls.folder / "cache")
        cls.model = tiny_model.make(cls.folder / "tiny")
        with Life(cls.model, cls.folder / "plain.log") as plain:
            cls.plain = plain.generate(PROMPTS)[0]
        cls.s3 = cls.bucket()

    @classmethod
    def bucket(cls):
        endpoint = os.environ.get("KVGATE_TEST_MINIO_ENDPOINT")
        if not endpoint:
            raise AssertionError("bring MinIO up: tests/servers/minio.sh up, and source its env")
        os.environ["AWS_ACCESS_KEY_ID"] = os.environ["KVGATE_TEST_MINIO_ACCESS_KEY"]
        os.environ["AWS_SECRET_ACCESS_KEY"] = os.environ["KVGATE_TEST_MINIO_SECRET_KEY"]
        user = ":".join(os.environ[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"))
        sign = ["--aws-sigv4", "aws:amz:us-east-1:s3", "--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]
        subprocess.run(
            ["curl", "-s", "-o", "/dev/null", "-X", "PUT", *sign, "--user", user, f"{endpoint}/{BUCKET}"], check=True
        )
        proxy = Proxy(f"127.0.0.1:{S3_PORT}", endpoint.removeprefix("http://"))
        cls.addClassCleanup(proxy.end)
        cls.proxy = proxy
        return ["--endpoint", f"http://127.0.0.1:{S3_PORT}", "--bucket", BUCKET, "--prefix", f"sglang-{os.getpid()}"]

    def stored(self, gateway, pages):
        """Waits until the gateway has so many pages, and S3 too. SGLang stores behind its answers."""
        deadline = time.monotonic() + 60
        while (have := gateway.metric("kvgate_behind_stored_total")) < pages:
            self.assertLess(time.monotonic(), deadline, f"{have} of {pages} pages are stored")
            time.sleep(0.1)
        gateway.flush()

    def test_a_second_life_loads_what_the_first_one_stored(self):
        gateway = Gateway(self.folder, s3=self.s3)
        self.addCleanup(gateway.end)
        gateway.start()
        storage = kvgate(gateway.socket)
        with Life(self.model, self.folder / "first.log", storage) as first:
            tokens, stored = first.generate(PROMPTS)
            self.assertEqual((tokens, sum(stored)), (self.plain, 0))
            self.stored(gateway, len(PROMPTS) * (REUSED // PAGE))
        # Nothing is left in the gateway's memory.
        gateway.kill()
        gateway.start()
        with Life(self.model, self.folder / "second.log", storage) as second:
            tokens, stored = second.generate(PROMPTS[:2])
            self.assertEqual((tokens, stored), (self.plain[:2], [REUSED] * 2))
            with self.subTest("the gateway is killed"):
                gateway.kill()
                tokens, stored = second.generate(PROMPTS[2:3])
                self.assertEqual((tokens, stored), (self.plain[2:3], [0]))
            with self.subTest("it comes back"):
                gateway.start()
                tokens, stored = second.generate(PROMPTS[3:4])
                self.assertEqual((tokens, stored), (self.plain[3:4], [REUSED]))
            with self.subTest("S3 stops"):
                self.proxy.end()
                tokens, stored = second.generate(PROMPTS[4:5])
                self.assertEqual((tokens, stored), (self.plain[4:5], [0]))


if __name__ == "__main__":
    unittest.main(verbosity=2)
