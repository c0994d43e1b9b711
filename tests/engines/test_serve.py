"""The README's lines for vLLM (sections Install and vLLM), run as they are: a fresh environment, the wheel, the daemon,
`vllm serve`, curl.

python tests/engines/test_serve.py     in an environment with vLLM (tests/run.sh makes one), KVGATE_TEST_WHEEL: the wheel

`Lines` has all that differs from the README. `vllm` is a fork of a process that has vLLM imported (forks.py).
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import unittest
from pathlib import Path

import readme
import tiny_model

HERE = Path(__file__).parent
# The README's prompt has 2000 tokens, and the last one is always computed.
REUSED = 2000 // 256 * 256
# A CPU, a model without a tokenizer, and tokens that are compared.
CPU_FLAGS = "--dtype float32 --block-size 128 --enforce-eager --skip-tokenizer-init --kv-cache-memory-bytes 536870912"
SECONDS_MAX = 120


def wait_for(what, done, seconds=SECONDS_MAX):
    end = time.monotonic() + seconds
    while not done():
        if time.monotonic() > end:
            raise AssertionError(f"{what} takes longer than {seconds} s")
        time.sleep(0.1)


class Lines:
    """The README's commands by their first words, with what is another thing here."""

    def __init__(self, folder, model):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.other = {
            "pip install kvgate": f"pip install {os.environ['KVGATE_TEST_WHEEL']}",
            "Qwen/Qwen3-8B": str(model),
            "/tmp/kvgate-data": f"{folder}/data",
            "/tmp/kvgate.sock": f"{folder}/kvgate.sock",
            "127.0.0.1:8000": f"127.0.0.1:{self.port}",
            # Two cores that run everything at once take longer than the default.
            '"kv_connector_extra_config": {': '"kv_connector_extra_config": {"lookup_deadline_ms": 5000, ',
        }
        lines = readme.commands("Install") + readme.commands("vLLM")
        self.commands = {" ".join(line.split()[:2]): self.here(line) for line in lines}

    def here(self, line):
        for theirs, ours in self.other.items():
            line = line.replace(theirs, ours)
        return line

    def served(self):
        """The words of `vllm serve`."""
        return [*shlex.split(self.commands["vllm serve"]), *shlex.split(CPU_FLAGS), "--port", str(self.port)]


class ServeTest(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp(prefix="kvgate-serve-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        self.lines = Lines(self.folder, tiny_model.make(f"{self.folder}/tiny"))
        self.bin = self.fresh_environment()
        self.environment = {
            **os.environ,
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "KVGATE__ARENA__PATH": f"/dev/shm/{self.folder.name}.arena",
            # The wheel needs nothing else.
            "PIP_NO_INDEX": "1",
        }
        self.addCleanup(Path(self.environment["KVGATE__ARENA__PATH"]).unlink, missing_ok=True)

    def fresh_environment(self):
        environment = self.folder / "environment"
        subprocess.run([sys.executable, "-m", "venv", environment], check=True)
        return environment / "bin"

    def see_vllm(self):
        """It has 2.5 GB, and stays where it is. There may be a kvgate, too: pip must not have seen that."""
        place = sysconfig.get_path("purelib", vars={"base": str(self.bin.parent)})
        Path(place, "vllm.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def shell(self, name, **options):
        return subprocess.run(
            ["bash", "-c", self.lines.commands[name]], env=self.environment, text=True, check=True, **options
        )

    @contextlib.contextmanager
    def gateway(self):
        log = self.folder / "gateway.log"
        with log.open("wb") as out:
            line = "exec " + self.lines.commands["kvgate serve"]
            process = subprocess.Popen(["bash", "-c", line], env=self.environment, stdout=out, stderr=out)
        try:
            wait_for("kvgate serve", lambda: (self.folder / "kvgate.sock").exists() or process.poll() is not None)
            self.assertIsNone(process.poll(), log.read_text())
            yield
        finally:
            process.terminate()
            process.wait(60)

    @contextlib.contextmanager
    def forks(self):
        """The command that starts `vllm`."""
        pipe = subprocess.PIPE
        command = [self.bin / "python", "-W", "ignore", HERE / "forks.py"]
        process = subprocess.Popen(command, env=self.environment, stdin=pipe, stdout=pipe, text=True)
        try:
            yield process
        finally:
            process.stdin.close()
            process.stdout.close()
            process.wait(60)

    @contextlib.contextmanager
    def engine(self, forks, log, *more):
        vllm, *arguments = self.lines.served()
        self.assertEqual(vllm, "vllm")
        arguments += more
        order = {"arguments": arguments, "environment": {}, "log": str(log)}
        forks.stdin.write(json.dumps(order) + "\n")
        forks.stdin.flush()
        process = json.loads(forks.stdout.readline())["pid"]
        try:
            wait_for("vllm serve", lambda: self.answers("/health") or not alive(process))
            self.assertTrue(alive(process), log.read_text(errors="replace")[-3000:] if log.exists() else "")
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGTERM)
            wait_for("the engine's end", lambda: not alive(process))

    def answers(self, path):
        url = f"http://127.0.0.1:{self.lines.port}{path}"
        return subprocess.run(["curl", "-sf", url], stdout=subprocess.DEVNULL).returncode == 0

    def ask(self):
        """The tokens of the answer, and those that vLLM has not computed."""
        answer = json.loads(self.shell("python3 -c", capture_output=True).stdout)
        hits = self.shell("curl -s", capture_output=True).stdout
        return answer["choices"][0]["token_ids"], float(hits.split()[-1])

    def metrics(self):
        url = f"http://127.0.0.1:{self.lines.port}/metrics"
        return subprocess.run(["curl", "-sf", url], check=True, capture_output=True, text=True).stdout

    def beside_another(self):
        """The README's connector within MultiConnector, after one that has nothing."""
        served = self.lines.served()
        own = json.loads(served[served.index("--kv-transfer-config") + 1])
        policy = {"kv_load_failure_policy": own.pop("kv_load_failure_policy")}
        empty = {
            "kv_connector": "ExampleConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"shared_storage_path": f"{self.folder}/example"},
        }
        both = {"kv_connector_extra_config": {"connectors": [empty, own]}}
        return json.dumps({"kv_connector": "MultiConnector", "kv_role": "kv_both", **policy, **both})

    def chunks(self):
        return [path for path in (self.folder / "data" / "kvgate").rglob("*") if len(path.name) == 64]

    def test_the_readme(self):
        self.assertEqual(
            list(self.lines.commands),
            ["pip install", "kvgate serve", "vllm serve", "python3 -c", "curl -s"],
        )
        self.shell("pip install")
        self.assertTrue((self.bin / "kvgate").exists())
        self.see_vllm()
        with self.gateway(), self.forks() as forks:
            self.assertEqual(json.loads(forks.stdout.readline()), {"ready": True})
            with self.engine(forks, self.folder / "first.log"):
                tokens, hits = self.ask()
                self.assertEqual((len(tokens), hits), (16, 0))
                wait_for("storing", lambda: len(self.chunks()) == REUSED // 256)
            with self.engine(forks, self.folder / "second.log"):
                self.assertEqual(self.ask(), (tokens, REUSED))
            with self.engine(forks, self.folder / "beside.log", "--kv-transfer-config", self.beside_another()):
                self.assertEqual(self.ask(), (tokens, REUSED))
                self.assertIn("kvgate_loaded_bytes_total", self.metrics())


def alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    unittest.main(verbosity=2)
