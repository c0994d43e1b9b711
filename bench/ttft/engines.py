"""`vllm serve`, asked over HTTP as any client does: the time to the first token, and the hits that it counts."""

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness import servers, tools

HERE = Path(__file__).resolve().parent
FORKS = tools.ROOT / "tests" / "engines" / "forks.py"
START_SECONDS_MAX = 900
ANSWER_SECONDS_MAX = 600
HITS = "vllm:external_prefix_cache_hits_total"


@dataclass(frozen=True)
class Answer:
    """The result of one prompt."""

    ttft_s: float
    tokens: list[int]


class Launcher:
    """Starts `vllm serve`; on a CPU out of one process that has vLLM imported, since a restart takes minutes else."""

    def __init__(self, python: Path, forked: bool, threads: int) -> None:
        """`threads`: that each engine computes with, if they are forked."""
        self.python = python
        self.environment = {**os.environ, "PYTHONPATH": str(HERE / "inside"), "VLLM_NO_USAGE_STATS": "1"}
        self.parent = None
        if forked:
            tools.say("importing vLLM")
            # Left alone, vLLM takes more or fewer cores when it is given a connector.
            self.environment |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
            pipe = subprocess.PIPE
            command = [str(python), "-W", "ignore", str(FORKS)]
            self.parent = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=self.environment, text=True)
            self.answer()

    def answer(self) -> dict:
        line = self.parent.stdout.readline()
        if not line:
            raise tools.MissingError(f"{self.python} can't import vLLM, see above")
        return json.loads(line)

    def start(self, arguments: list[str], environment: dict[str, str], log: Path) -> int:
        """The process's id."""
        if self.parent is None:
            command = [self.python.with_name("vllm"), *arguments]
            with open(log, "ab") as out:
                return subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=out,
                    env={**self.environment, **environment},
                    start_new_session=True,
                ).pid
        order = {"arguments": arguments, "environment": environment, "log": str(log)}
        self.parent.stdin.write(json.dumps(order) + "\n")
        self.parent.stdin.flush()
        return self.answer()["pid"]

    def stop(self) -> None:
        if self.parent is not None:
            self.parent.stdin.close()
            self.parent.wait(60)


@dataclass
class Engine:
    """One life of a server."""

    launcher: Launcher
    name: str
    model: str
    port: int
    arguments: list[str]
    environment: dict[str, str]
    folder: Path
    process: int = 0

    def start(self) -> None:
        """Returns at once."""
        if servers.answers(self.port):
            raise tools.MissingError(f"something else listens on port {self.port}; --port-base chooses other ports")
        arguments = ["serve", self.model, "--host", servers.LOOPBACK, "--port", str(self.port), *self.arguments]
        self.process = self.launcher.start(arguments, self.environment, self.log)

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    def ready(self) -> None:
        end = time.monotonic() + START_SECONDS_MAX
        while not self.healthy():
            if not self.lives() or time.monotonic() > end:
                raise tools.MissingError(f"vllm serve does not start: {self.log.read_text(errors='replace')[-1000:]}")
            time.sleep(0.2)

    def healthy(self) -> bool:
        try:
            return self.get("/health")[0] == http.client.OK
        except OSError:
            return False

    def lives(self) -> bool:
        """Whether any of its processes does. Right after its start it may not have its own group yet."""
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.process, os.WNOHANG)
        for kill in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError):
                kill(self.process, 0)
                return True
        return False

    def stop(self) -> None:
        """It ends its processes itself, and what it has in shared memory; what is left after a time is killed."""
        if not self.process:
            return
        for kill, how, seconds in ((os.kill, signal.SIGTERM, 30), (os.killpg, signal.SIGKILL, 10)):
            with contextlib.suppress(ProcessLookupError):
                kill(self.process, how)
            end = time.monotonic() + seconds
            while self.lives() and time.monotonic() < end:
                time.sleep(0.05)
        self.process = 0

    def get(self, path: str) -> tuple[int, str]:
        connection = http.client.HTTPConnection(servers.LOOPBACK, self.port, timeout=30)
        with contextlib.closing(connection):
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def hits(self) -> int:
        """Tokens that came from kvgate since it was started."""
        lines = self.get("/metrics")[1]
        return round(sum(float(value) for value in re.findall(rf"^{HITS}{{.*}} (\S+)$", lines, re.MULTILINE)))

    def ask(self, prompt: list[int], max_tokens: int, salt: str = "") -> Answer:
        """The first token's time is that of the first event with a token."""
        request = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
            **({"cache_salt": salt} if salt else {}),
        }
        body = json.dumps(request)
        connection = http.client.HTTPConnection(servers.LOOPBACK, self.port, timeout=ANSWER_SECONDS_MAX)
        with contextlib.closing(connection):
            began = time.perf_counter()
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise tools.MissingError(f"{self.name}: {response.status} {response.read().decode()[:500]}")
            first, tokens = None, []
            for event in events(response):
                if "error" in event:
                    raise tools.MissingError(f"{self.name}: {event['error']}")
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        first = first or time.perf_counter()
                        tokens += choice["token_ids"]
        if first is None:
            raise tools.MissingError(f"{self.name}: no token came")
        return Answer(first - began, tokens)


def events(response: http.client.HTTPResponse) -> Iterator[dict]:
    """Of a stream of server-sent events."""
    for line in response:
        if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))
