"""The cost of kvgate where nothing is reused: throughput beside plain vLLM, and the connector's own seconds."""

import json
import os
import random
import socketserver
import statistics
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from harness import tools

from .engines import Engine
from .gateway import Gateway
from .tables import Verdict
from .workloads import words

CASES = ("working", "down", "slow", "corrupted")
SLOW_SECONDS = 10
THROUGHPUT_LEAST, SHARE_MOST = 0.9, 0.03
HASHING_US_MOST, CALL_US_MOST = 3000, 200
# The extension's threads are named so.
THREAD = "kvgate"
CLOCKS = "KVGATE_BENCH_CLOCKS"


@dataclass(frozen=True)
class Run:
    """All prompts, with one engine."""

    case: str
    round: int
    who: str
    seconds: float
    tokens_per_s: float
    # In the connector's calls, by role, and what its threads used of the CPUs.
    scheduler_s: float
    worker_s: float
    threads_s: float
    reused: int
    answers: list[list[int]]

    @property
    def share(self) -> float:
        return (self.scheduler_s + self.worker_s + self.threads_s) / self.seconds


class Clocks:
    """The counts of `kvgate_timed` and of the kernel in an engine's processes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def read(self) -> dict[str, float]:
        """Seconds so far: of each role's calls by name, and of the threads."""
        found: dict[str, float] = {}
        processes = set()
        for methods in self.folder.glob("*.json"):
            role, _, process = methods.stem.partition("-")
            processes.add(process)
            names = json.loads(methods.read_text())
            clocks = struct.unpack(f"{2 * len(names)}d", methods.with_suffix("").read_bytes())
            for name, seconds in zip(names, clocks[::2], strict=True):
                found[f"{role} {name}"] = found.get(f"{role} {name}", 0) + seconds
        found["threads"] = sum(map(threads_s, processes))
        return found


def threads_s(process: str) -> float:
    """CPU seconds of the extension's threads that live; an idle one ends after ten seconds."""
    total = 0.0
    for task in Path(f"/proc/{process}/task").glob("*"):
        try:
            head, _, rest = (task / "stat").read_text().rpartition(")")
        except OSError:
            continue
        if head.partition("(")[2].startswith(THREAD):
            # utime and stime, the 14th and the 15th of all.
            total += sum(map(int, rest.split()[11:13])) / os.sysconf("SC_CLK_TCK")
    return total


@dataclass
class Bench:
    gateway: Gateway
    plain: Engine
    # Each call is a new engine, with these variables.
    engine: Callable[[dict[str, str]], Engine]
    folder: Path
    rounds: int
    prompts: int
    prompt_tokens: int
    answer_tokens: int
    seed: int
    runs: list[Run] = field(default_factory=list)

    def run(self) -> None:
        self.plain.start()
        self.gateway.start()
        self.live("working")
        self.gateway.flush()
        self.gateway.stop()
        self.live("down")
        with slow(self.gateway.socket):
            self.live("slow")
        objects = self.gateway.objects()
        for path in objects:
            damage(path)
        if objects:
            self.gateway.start()
            self.live("corrupted")
            self.gateway.stop()

    def live(self, case: str) -> None:
        """An engine's life: all rounds."""
        tools.say(f"the gateway is {case}")
        clocks = Clocks(self.folder / f"clocks-{case}")
        engine = self.engine({CLOCKS: str(clocks.folder)})
        engine.start()
        try:
            for one in (engine, self.plain):
                one.ready()
                for number in range(2):
                    one.ask(words("warm-up", case, random.random(), number, tokens=600), 2)
            for number in range(1, self.rounds + 1):
                pair = [(engine, "kvgate"), (self.plain, "plain")]
                for one, who in random.sample(pair, 2):
                    self.runs.append(self.measure(case, number, who, one, clocks))
                    tools.say(f"  {number} of {self.rounds}, {who}: {self.runs[-1].tokens_per_s:.0f} tokens/s")
        finally:
            engine.stop()

    def measure(self, case: str, number: int, who: str, engine: Engine, clocks: Clocks) -> Run:
        # The damaged objects were stored by the run with the gateway that works; all else is new.
        key = "working" if case == "corrupted" else case
        prompts = [words(self.seed, "overhead", key, number, i, tokens=self.prompt_tokens) for i in range(self.prompts)]
        # The plain engine may have seen them, and must not know.
        salt = str(random.random()) if who == "plain" else ""
        before, hits = clocks.read(), engine.hits()
        began = time.perf_counter()
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: engine.ask(prompt, self.answer_tokens, salt).tokens, prompts))
        seconds = time.perf_counter() - began
        spent = {name: after - before.get(name, 0) for name, after in clocks.read().items()} if not salt else {}
        return Run(
            case=case,
            round=number,
            who=who,
            seconds=seconds,
            tokens_per_s=sum(map(len, prompts + answers)) / seconds,
            scheduler_s=sum(took for name, took in spent.items() if name.startswith("scheduler ")),
            worker_s=sum(took for name, took in spent.items() if name.startswith("worker ")),
            threads_s=max(0.0, spent.get("threads", 0)),
            reused=engine.hits() - hits,
            answers=answers,
        )


class Slow(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        self.connection.recv(1 << 16)
        time.sleep(SLOW_SECONDS)
        self.connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")


class SlowServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """The caller has given up."""


@contextmanager
def slow(path: Path) -> Iterator[None]:
    """A gateway that takes every connection, and answers after ten seconds that it can't."""
    server = SlowServer(str(path), Slow)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        path.unlink(missing_ok=True)


def damage(path: Path) -> None:
    """One bit in the middle."""
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def scheduler_calls(python: Path, gateway: Gateway, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Microseconds of each call, by its name."""
    tools.say(f"calls on the scheduler's thread, {tokens:,} tokens")
    script = Path(__file__).parent / "inside" / "scheduler_calls.py"
    gateway.start()
    said = tools.run(python, "-W", "ignore", script, gateway.socket, str(tokens), str(rounds))
    gateway.stop()
    return json.loads(said.splitlines()[-1])


class Results:
    def __init__(self, runs: list[Run], calls: dict[str, list[float]], tokens: int) -> None:
        self.calls, self.tokens = calls, tokens
        self.found = {(run.case, run.round, run.who): run for run in runs}
        self.cases = [case for case in CASES if any(run.case == case for run in runs)]

    def pairs(self, case: str) -> list[tuple[Run, Run]]:
        """With kvgate and plain, of each round."""
        return [
            (run, self.found[case, number, "plain"])
            for (name, number, who), run in self.found.items()
            if (name, who) == (case, "kvgate")
        ]

    def verdicts(self) -> list[Verdict]:
        rows = []
        for case in self.cases:
            pairs = self.pairs(case)
            ratio = statistics.median(run.tokens_per_s / plain.tokens_per_s for run, plain in pairs)
            share = statistics.median(run.share for run, _ in pairs)
            same = sum(run.answers == plain.answers for run, plain in pairs)
            name = f"gateway {case}"
            rows.append(
                Verdict(f"{name}: tokens/s / plain", f"{ratio:.3f}", f"≥ {THROUGHPUT_LEAST}", ratio >= THROUGHPUT_LEAST)
            )
            rows.append(
                Verdict(f"{name}: its seconds of the run", f"{share:.2%}", f"≤ {SHARE_MOST:.0%}", share <= SHARE_MOST)
            )
            rows.append(Verdict(f"{name}: runs with plain's answers", f"{same}", f"{len(pairs)}", same == len(pairs)))
        for name, us in self.calls.items():
            most = HASHING_US_MOST if name == "on_new_request" else CALL_US_MOST
            middle = statistics.median(us)
            rows.append(
                Verdict(f"`{name}`, {self.tokens:,} tokens", f"{middle:.1f} µs", f"≤ {most} µs", middle <= most)
            )
        return rows

    def markdown(self, title: str, facts: list[str]) -> str:
        lines = [f"# {title}", "", *(f"- {fact}" for fact in facts), "", "## Wanted", ""]
        lines += ["| what, median | got | wanted | |", "|---|---:|---:|---|"]
        for row in self.verdicts():
            lines.append(f"| {row.what} | {row.got} | {row.wanted} | {'kept' if row.kept else '**MISSED**'} |")
        lines += ["", "## Throughput without reuse", "", "Medians of the rounds.", ""]
        lines += ["| gateway | plain, tokens/s | with kvgate, tokens/s | scheduler's calls, s | worker's calls, s "]
        lines[-1] += "| threads, CPU s | of a run of, s | reused tokens |"
        lines += ["|---|---:|---:|---:|---:|---:|---:|---:|"]
        for case in self.cases:
            pairs = self.pairs(case)
            runs = [run for run, _ in pairs]
            cells = [case, f"{statistics.median(plain.tokens_per_s for _, plain in pairs):.0f}"]
            cells += [f"{statistics.median(run.tokens_per_s for run in runs):.0f}"]
            for what in ("scheduler_s", "worker_s", "threads_s"):
                cells += [f"{statistics.median(getattr(run, what) for run in runs):.4f}"]
            cells += [f"{statistics.median(run.seconds for run in runs):.1f}", str(max(run.reused for run in runs))]
            lines.append(f"| {' | '.join(cells)} |")
        lines += ["", f"## Calls on the scheduler's thread, {self.tokens:,} tokens", ""]
        lines += ["| call | median, µs | most, µs | calls |", "|---|---:|---:|---:|"]
        for name, us in self.calls.items():
            lines.append(f"| `{name}` | {statistics.median(us):.1f} | {max(us):.1f} | {len(us)} |")
        return "\n".join(lines) + "\n"
