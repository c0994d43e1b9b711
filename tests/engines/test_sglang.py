"""A real SGLang on a CPU, whose KV outlives it: the same tokens, most of the prompt from the storage, and from computing where
the gateway or S3 is gone.

python tests/engines/test_sglang.py     in an environment with SGLang and the wheel, with MinIO up
"""

import os
import shlex
import subprocess
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

import families
import readme
import tiny_model
from gateway import Gateway, Proxy
from sglang_lives import PAGE, Life, kvgate, prompt

TOKENS = 1000
# Of 1000 tokens 15 pages are full.
REUSED = TOKENS // PAGE * PAGE
S3_PORT = 17481
BUCKET = "kvgate-sglang"
# A CPU has no kernels to copy with, and two cores that run everything at once take longer than SGLang waits by itself.
CPU_FLAGS = shlex.split(
    "--hicache-io-backend direct --hicache-mem-layout layer_first --hicache-storage-prefetch-policy wait_complete"
)
PROMPTS = [prompt(seed, TOKENS) for seed in range(5)]
NEW = prompt(5, TOKENS)


class LifeCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="kvgate-sglang-", ignore_cleanup_errors=True)
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        os.environ["XDG_CACHE_HOME"] = str(self.folder / "cache")
        self.gateway = Gateway(self.folder)
        self.addCleanup(self.gateway.end)

    def life(self, name, *arguments, **named):
        return Life(self.model, self.folder / f"{name}.log", *arguments, **named)

    def plain(self, prompts):
        with self.life("plain") as plain:
            return plain.generate(prompts)[0]

    def stored(self, pages):
        """Waits until the gateway has so many pages, and S3 too. SGLang stores behind its answers."""
        deadline = time.monotonic() + 60
        while (have := self.gateway.metric("kvgate_behind_stored_total")) < pages:
            self.assertLess(time.monotonic(), deadline, f"{have} of {pages} pages are stored")
            time.sleep(0.1)
        self.gateway.flush()

    def forgotten(self):
        """Nothing is left in the gateway's memory."""
        self.gateway.kill()
        self.gateway.start()


class FullAttentionTest(LifeCase):
    def setUp(self):
        super().setUp()
        self.model = tiny_model.make(self.folder / "tiny")

    def bucket(self):
        """A bucket of MinIO, through a proxy."""
        endpoint = os.environ.get("KVGATE_TEST_MINIO_ENDPOINT")
        self.assertTrue(endpoint, "bring MinIO up: tests/servers/minio.sh up, and source its env")
        keys = {
            "AWS_ACCESS_KEY_ID": os.environ["KVGATE_TEST_MINIO_ACCESS_KEY"],
            "AWS_SECRET_ACCESS_KEY": os.environ["KVGATE_TEST_MINIO_SECRET_KEY"],
        }
        changed = mock.patch.dict(os.environ, keys)
        changed.start()
        self.addCleanup(changed.stop)
        sign = ["--aws-sigv4", "aws:amz:us-east-1:s3", "--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD"]
        make = [
            "curl",
            "-s",
            "-o",
            "/dev/null",
            "-X",
            "PUT",
            *sign,
            "--user",
            ":".join(keys.values()),
            f"{endpoint}/{BUCKET}",
        ]
        subprocess.run(make, check=True)
        proxy = Proxy(f"127.0.0.1:{S3_PORT}", endpoint.removeprefix("http://"))
        self.addCleanup(proxy.end)
        return proxy, [
            "--endpoint",
            f"http://127.0.0.1:{S3_PORT}",
            "--bucket",
            BUCKET,
            "--prefix",
            f"sglang-{os.getpid()}",
        ]

    def test_a_second_life_loads_what_the_first_one_stored_whatever_stops(self):
        plain = self.plain(PROMPTS)
        proxy, self.gateway.s3 = self.bucket()
        self.gateway.start()
        storage = kvgate(self.gateway.socket)
        with self.life("first", storage) as first:
            tokens, stored = first.generate(PROMPTS)
            self.assertEqual((tokens, sum(stored)), (plain, 0))
            self.stored(len(PROMPTS) * (REUSED // PAGE))
            with self.subTest("new weights load no KV of the old ones"):
                first.update_weights(tiny_model.make(self.folder / "other", 77))
                tokens, stored = first.generate([PROMPTS[0], NEW])
                self.assertNotEqual(tokens[0], plain[0])
                self.assertEqual(stored, [0, 0])
                self.stored((len(PROMPTS) + 2) * (REUSED // PAGE))
        self.forgotten()
        with self.life("second", kvgate(self.gateway.socket, fixed_weights=True)) as second:
            tokens, stored = second.generate(PROMPTS[:2])
            self.assertEqual((tokens, stored), (plain[:2], [REUSED] * 2))
            with self.subTest("what the new weights have computed is no other engine's"):
                self.assertEqual(second.generate([NEW])[1], [0])
            with self.subTest("weights that never change are not forgotten"):
                second.flush()
                tokens, stored = second.generate(PROMPTS[:2])
                self.assertEqual((tokens, stored), (plain[:2], [REUSED] * 2))
            with self.subTest("the gateway is killed"):
                self.gateway.kill()
                tokens, stored = second.generate(PROMPTS[2:3])
                self.assertEqual((tokens, stored), (plain[2:3], [0]))
            with self.subTest("it comes back"):
                self.gateway.start()
                tokens, stored = second.generate(PROMPTS[3:4])
                self.assertEqual((tokens, stored), (plain[3:4], [REUSED]))
            with self.subTest("S3 stops"):
                proxy.end()
                tokens, stored = second.generate(PROMPTS[4:5])
                self.assertEqual((tokens, stored), (plain[4:5], [0]))

    def test_the_readme_s_lines(self):
        (line,) = readme.commands("SGLang")
        program, *flags = shlex.split(line.replace("\\\n", "").replace("/tmp/kvgate.sock", str(self.gateway.socket)))
        self.assertEqual(
            (program, flags[:4]), ("python", ["-m", "sglang.launch_server", "--model-path", "Qwen/Qwen3-8B"])
        )
        flags = [*flags[4:], *CPU_FLAGS]
        prompts = PROMPTS[:1]
        plain = self.plain(prompts)
        self.gateway.start()
        with self.life("first", flags=flags) as first:
            self.assertEqual(first.generate(prompts), (plain, [0]))
            self.stored(REUSED // PAGE)
        self.forgotten()
        with self.life("second", flags=flags) as second:
            self.assertEqual(second.generate(prompts), (plain, [REUSED]))


class RanksTest(LifeCase):
    def test_two_ranks_are_one_engine(self):
        """Each has its own heads, in one object for both, which an engine of one rank loads too."""
        self.model = tiny_model.make(self.folder / "tiny")
        prompts = PROMPTS[:2]
        # A core each: left alone, SGLang wants a NUMA node for each rank.
        cores = sorted(os.sched_getaffinity(0))
        cores = "|".join(str(cores[rank % len(cores)]) for rank in range(2))
        changed = mock.patch.dict(os.environ, SGLANG_CPU_OMP_THREADS_BIND=cores)
        changed.start()
        self.addCleanup(changed.stop)
        with self.life("plain", tp_size=2) as plain:
            plain = plain.generate(prompts)[0]
        self.gateway.start()
        storage = kvgate(self.gateway.socket)
        pages = len(prompts) * (REUSED // PAGE)
        with self.life("first", storage, tp_size=2) as first:
            self.assertEqual(first.generate(prompts), (plain, [0, 0]))
            self.stored(pages)
            self.assertEqual({kind: len(files) for kind, files in self.gateway.kinds().items()}, {"full": pages})
            # Both know that there was one flush.
            first.flush()
            self.assertEqual(first.generate(prompts), (plain, [0, 0]))
            self.stored(2 * pages)
        self.forgotten()
        for ranks in (2, 1):
            os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores.split("|")[:ranks])
            with self.subTest(ranks=ranks), self.life(f"{ranks} ranks", storage, tp_size=ranks) as second:
                self.assertEqual(second.generate(prompts), (plain, [REUSED] * 2))


class WindowTest(LifeCase):
    def test_windows_are_loaded_at_their_end_only(self):
        """Three layers of four have a window of two pages."""
        self.model = families.make(self.folder / "mellum", "mellum")
        prompts = PROMPTS[:2]
        plain = self.plain(prompts)
        self.gateway.start()
        storage = kvgate(self.gateway.socket)
        full, windows = 2 * (REUSED // PAGE), 2 * 2
        with self.life("first", storage) as first:
            self.assertEqual(first.generate(prompts), (plain, [0, 0]))
            self.stored(full + windows)
        kinds = {kind: len(files) for kind, files in self.gateway.kinds().items()}
        self.assertEqual(kinds, {"full": full, "window 128": windows})
        self.forgotten()
        with self.life("second", storage) as second:
            self.assertEqual(second.generate(prompts), (plain, [REUSED] * 2))


if __name__ == "__main__":
    unittest.main(verbosity=2)
