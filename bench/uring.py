#!/usr/bin/env python3
"""Would io_uring receive cheaper than recv? And do bound threads? CPU a GiB of each way, beside the raw floor's, on loopback.

    bench/uring.py                       everything, 7 rounds
    bench/uring.py --rounds 3 --part-sizes 16MiB --connections 16

Installs what is missing, ends its servers, and writes uring-DATE.md and .json. bench/README.md says how to read them.
"""

import argparse
import datetime
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness import clients, rounds, servers, tools
from harness.clients import Measured, Program, Work
from harness.rounds import Case, Client, Samples
from harness.rows import Row, evaluate
from harness.servers import Ports, Server
from harness.workload import BUCKET, MIB, Workload, parse_size

FLOOR = "recv, low water (the floor)"
# What `floor` is called with, without the server and the load.
WAYS = {
    FLOOR: ["receive"],
    "recv, bytes dropped in the kernel": ["receive", "--drop"],
    "ring": ["receive-ring"],
    "ring, low water, poll first": ["receive-ring", "--with", "low-water,poll-first"],
    "ring, low water, multishot": ["receive-ring", "--with", "low-water,multishot"],
    "ring, wait for all, poll first": ["receive-ring", "--with", "wait-all,poll-first"],
    "ring, wait for all, poll first, batches": ["receive-ring", "--with", "wait-all,poll-first,batch"],
}
KVGATE = "2 threads (as it comes here)"
WORKER = "tokio-rt-worker"


@dataclass(frozen=True)
class Both(Measured):
    """With the CPU of the floor's server, whose warm-up counts half."""

    server_cpu_seconds: float

    @property
    def both_per_gib(self) -> float:
        return self.cpu_per_gib + replace(self, cpu_seconds=self.server_cpu_seconds).cpu_per_gib


class Way(Program):
    """A client of the floor's server."""

    def __init__(self, words: list[str], server: Server, workload: Workload) -> None:
        floor = tools.built("floor")
        super().__init__(
            {"read": lambda work: [floor, *words, "--server", server.floor, *clients.load_flags(workload, work)]}
        )
        self.pid = server.floor_pid

    def run(self, work: Work) -> Both:
        before = self.server_cpu()
        measured = super().run(work)
        return Both(**asdict(measured), server_cpu_seconds=(self.server_cpu() - before) / 2)

    def server_cpu(self) -> float:
        """It has one thread."""
        return int(Path(f"/proc/{self.pid}/schedstat").read_text().split()[0]) / 1e9


class Threads(clients.Kvgate):
    """kvgate with so many runtime threads, each bound to a core of its own if told so."""

    def __init__(self, program: Path, server: Server, workload: Workload, threads: int, *, bound: bool = False) -> None:
        super().__init__(program, server, workload)
        self.env["TOKIO_WORKER_THREADS"] = str(threads)
        self.threads, self.bound = threads, bound

    def execute(self, command: list) -> str:
        words = [str(word) for word in command]
        with subprocess.Popen(words, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
            # The warm-up is not over yet.
            if self.bound:
                self.bind(child.pid)
            out, error = child.communicate(timeout=clients.RUN_SECONDS_MAX)
        if child.returncode:
            raise tools.FailedError(error.strip()[-300:])
        return out

    def bind(self, process: int) -> None:
        end = time.monotonic() + 5
        while len(workers := sorted(self.workers(process))) < self.threads:
            if time.monotonic() > end:
                raise tools.FailedError("its threads can't be found")
            time.sleep(0.001)
        for core, worker in zip(sorted(os.sched_getaffinity(0)), workers, strict=False):
            os.sched_setaffinity(worker, {core})

    def workers(self, process: int) -> Iterator[int]:
        for task in Path(f"/proc/{process}/task").iterdir():
            if (task / "comm").read_text().startswith(WORKER):
                yield int(task.name)


def ways(server: Server, workload: Workload) -> dict[str, Client]:
    return {name: Way(words, server, workload) for name, words in WAYS.items()}


def threads(program: Path, server: Server, workload: Workload) -> dict[str, Client]:
    return {
        KVGATE: Threads(program, server, workload, 2),
        "2 threads, each bound to a core": Threads(program, server, workload, 2, bound=True),
        "1 thread": Threads(program, server, workload, 1),
        "1 thread, bound to a core": Threads(program, server, workload, 1, bound=True),
    }


def table(samples: Samples, server: str, work: Work, names: list[str], both: bool) -> list[str]:
    """Ratios are those of a round to the first name's."""

    def median(name: str, metric: str) -> float:
        return evaluate(Row(name, metric, Case(server, work.name, name)), samples).value or 0

    def ratio(name: str, metric: str) -> str:
        got = evaluate(Row(name, metric, Case(server, work.name, name), Case(server, work.name, names[0])), samples)
        return f"{got.value:.2f} | {got.low:.2f} to {got.high:.2f}" if got.value else f"{got.verdict} |"

    more = " with its server's, ratio | 10 % to 90 % |" if both else ""
    lines = [f"| | CPU s/GiB | ratio | 10 % to 90 % |{more} GB/s |", f"|---|---:|---:|---|{'---:|---|' * both}---:|"]
    for name in names:
        columns = [name, f"{median(name, 'cpu_per_gib'):.3f}", ratio(name, "cpu_per_gib")]
        columns += [ratio(name, "both_per_gib")] if both else []
        lines.append(f"| {' | '.join(columns)} | {median(name, 'gb_per_s'):.2f} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=7, help="how often everyone is measured (default: 7)")
    add("--part-sizes", default="1MiB,8MiB,16MiB", help="bytes of one GET (default: 1MiB,8MiB,16MiB)")
    add("--connections", default="16,64", help="GETs under way at a time (default: 16,64)")
    add("--objects", type=int, default=64, help="default: 64")
    add("--kvgate", type=Path, help="the program (default: this checkout's, built)")
    add("--port-base", type=int, default=9021, help="8 ports from here on (default: 9021)")
    add("--out", type=Path, default=tools.BENCH / "results", help="folder for what is written (default: bench/results)")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    works = [Work("read", parse_size(size)) for size in given.part_sizes.split(",")]
    command = shlex.join(["bench/uring.py", *sys.argv[1:]])
    title = f"uring-{datetime.date.today()}"
    samples, lines = Samples(), []
    given.out.mkdir(parents=True, exist_ok=True)

    def measure(name: str, who: dict[str, Client], works: list[Work], *, both: bool) -> None:
        """And writes what there is so far: it takes long."""
        rounds.run(name, who, works, given.rounds, samples)
        for work in works:
            lines.extend(["", f"## {work.name}, {name}", "", *table(samples, name, work, list(who), both)])
        facts = [
            f"# {title}",
            "",
            f"- {tools.machine()}",
            f"- {given.objects} objects of 16 MiB; medians of {given.rounds} rounds; clients and servers on the same"
            " cores, over loopback",
            f"- commit {tools.commit()}; io-uring {tools.locked('io-uring')}",
            f"- `{command}`",
        ]
        failures = [{**asdict(case), "reason": why} for case, why in samples.failures.items()]
        raw = {"command": command, "hardware": tools.hardware(), "failures": failures, "samples": samples.as_json()}
        (given.out / f"{title}.md").write_text("\n".join([*facts, *lines]) + "\n")
        (given.out / f"{title}.json").write_text(json.dumps(raw, indent=1) + "\n")

    with servers.memory_folder() as folder:
        (folder / "www" / BUCKET).mkdir(parents=True)
        workload = Workload(given.objects, 16 * MIB, 16, 0, 0)
        workload.write(folder / "www" / BUCKET)
        program = clients.kvgate_program(given.kvgate)
        with servers.nginx(folder, Ports(given.port_base), workload) as server:
            for connections in map(int, given.connections.split(",")):
                enough = [work for work in works if workload.bytes // work.part_size >= connections]
                who = ways(server, replace(workload, in_flight=connections))
                measure(f"{connections} connections", who, enough, both=True)
            who = threads(program, server, workload)
            who[KVGATE].seed()
            measure("kvgate from nginx, 16 connections", who, works[-1:], both=False)
    print((given.out / f"{title}.md").read_text())
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
