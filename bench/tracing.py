#!/usr/bin/env python3
"""What metrics and traces cost a daemon: CPU a GiB that it loads from S3, without traces, with those in its memory, and with
OpenTelemetry.

bench/tracing.py --kvgate target/dist/kvgate [--rounds 5] [--save]

With an environment that has the wheel and numpy. One daemon for each setting, all on one throw-away Ceph, each with an arena
that the prompts don't fit into, so every load comes from S3. They are started in four orders, and each round goes over them in
another one. A figure is the median over the rounds of a daemon's CPU (user and system) against that of the daemon without
traces in the same round. Large chunks are loads as engines make them; small ones have the most spans a byte.
"""

import argparse
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/deploy"))
sys.path.insert(0, str(ROOT / "tests/engines"))

import kvgate  # noqa: E402
import numpy as np  # noqa: E402
from gateway import Collector  # noqa: E402

SETTINGS = {
    "no traces": {"KVGATE__API__TRACES": "0"},
    "the latest 200 loads (the default)": {},
    "OpenTelemetry, 1 %": {"KVGATE__OTLP__SAMPLE": "1"},
    "OpenTelemetry, all": {"KVGATE__OTLP__SAMPLE": "100"},
}
GIB = 1 << 30
ARENA = 192 << 20
"""Of each daemon. The prompts of a round are larger."""


class Node:
    def __init__(self, program, folder, number, make, environment):
        self.socket = folder / f"{number}.sock"
        self.log = folder / f"{number}.log"
        arena = {
            "KVGATE__ARENA__SIZE": f"{ARENA}B",
            "KVGATE__ARENA__PATH": f"/dev/shm/{folder.name}-{number}.arena",
            "KVGATE__LOAD__RESERVE": "96MiB",
            "KVGATE__LOAD__WINDOW": "64MiB",
            "KVGATE__STORE__WRITE_BEHIND": "64MiB",
            "KVGATE__MEMORY__POLICY": "fifo",
        }
        command = [program, "serve", *make, "--socket", self.socket]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), env={**environment, **arena}, stdout=log, stderr=log
            )
        end = time.monotonic() + 60
        while subprocess.run([program, "health", "--ready", "--socket", self.socket], capture_output=True).returncode:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(self.log.read_text())
            time.sleep(0.1)
        self.gateway = kvgate.connect(self.socket)

    def cpu(self):
        """Seconds, user and system, to the nanosecond."""
        return sum(
            int((thread / "schedstat").read_text().split()[0]) / 1e9
            for thread in Path(f"/proc/{self.process.pid}/task").iterdir()
        )

    def end(self):
        self.gateway.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)


class Prompts:
    """As many as are more than an arena holds, in chunks of so many bytes."""

    def __init__(self, chunk_bytes, chunks):
        # 64 tokens a chunk; a row of one head is K and V of 64 values.
        heads, layers = 8, max(1, chunk_bytes // (64 * 8 * 256))
        self.space = kvgate.space(
            model=f"bench/tracing-{chunk_bytes}",
            revision="1",
            dtype="float16",
            layers=layers,
            heads=heads,
            head_dim=64,
            chunk_tokens=64,
        )
        count = max(2, 3 * ARENA // (chunk_bytes * chunks))
        self.tokens = [np.full(64 * chunks, 7 + number, np.uint32) for number in range(count)]
        self.kv = np.zeros((layers, 2, 64 * chunks, heads, 64), np.float16)

    def store(self, gateway):
        for tokens in self.tokens:
            # Bytes that depend on the prompt, so that a wrong one would be seen.
            self.kv[...] = tokens[0]
            start = 0
            while start < len(tokens):
                stored = gateway.store_from(self.space, tokens, self.kv)
                gateway.flush(deadline=600)
                start = stored.tokens
        return self

    def load(self, gateway):
        """Bytes that came from S3."""
        loaded = 0
        for tokens in self.tokens:
            hit = gateway.lookup(self.space, tokens, deadline=30.0)
            assert hit.complete and hit.tokens == len(tokens), hit
            done = gateway.load_into(hit, self.kv)
            assert done.reason is None, done.reason
            assert (self.kv[:, :, -1] == tokens[0]).all(), "wrong bytes"
            loaded += self.kv.nbytes * list(hit.tiers).count("s3") // len(hit.tiers)
        return loaded


def measure(nodes, prompts, rounds, found):
    """Adds CPU seconds a GiB, by daemon, of each round."""
    for node in nodes.values():
        prompts.load(node.gateway)
    for _ in range(rounds):
        order = list(nodes)
        random.shuffle(order)
        for name in order:
            began = nodes[name].cpu()
            loaded = prompts.load(nodes[name].gateway)
            found[name].append((nodes[name].cpu() - began) / (loaded / GIB))


def table(found):
    first = found[next(iter(found))]
    lines = ["| | CPU s/GiB | against no traces | rounds, lowest to highest |", "|---|---:|---:|---|"]
    for name, costs in found.items():
        against = [cost / base for cost, base in zip(costs, first, strict=True)]
        lines.append(
            f"| {name} | {statistics.median(costs):.3f} | {statistics.median(against):.3f} | "
            f"{min(against):.3f} to {max(against):.3f} |"
        )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvgate", type=Path, default=ROOT / "target/dist/kvgate")
    parser.add_argument("--rounds", type=int, default=5, help="for each order of the daemons")
    parser.add_argument("--save", action="store_true", help="writes bench/results/tracing-DATE.md")
    args = parser.parse_args()
    program, collector = args.kvgate.resolve(), Collector()
    from lab import PORT, Ceph

    ceph, nodes, tables = Ceph(74, ["127.0.0.74"]), {}, []
    environment = {**ceph.environment, "KVGATE__OTLP__ENDPOINT": collector.endpoint}
    make = ["--endpoint", f"http://127.0.0.74:{PORT}", "--bucket", "kvgate-tracing"]
    try:
        with tempfile.TemporaryDirectory(prefix="kvgate-tracing-") as name:
            subprocess.run(
                [program, "demo", *make, "--tokens", "512"], env=environment, capture_output=True, check=True
            )
            for chunk_bytes, chunks in ((8 << 20, 8), (256 << 10, 32)):
                writer = Node(program, Path(name), "writer", make, environment)
                prompts = Prompts(chunk_bytes, chunks).store(writer.gateway)
                writer.end()
                found = {setting: [] for setting in SETTINGS}
                settings = list(SETTINGS)
                for _ in settings:
                    # The first to start gets other pages for its arena, and needs a sixth more CPU: each is the first once.
                    settings = settings[1:] + settings[:1]
                    for number, setting in enumerate(settings):
                        of = {**environment, **SETTINGS[setting]}
                        if "KVGATE__OTLP__SAMPLE" not in of:
                            del of["KVGATE__OTLP__ENDPOINT"]
                        nodes[setting] = Node(program, Path(name), number, make, of)
                    measure(nodes, prompts, args.rounds, found)
                    for node in nodes.values():
                        node.end()
                tables += ["", f"Chunks of {chunk_bytes >> 10} KiB, {chunks} a load:", "", *table(found)]
    finally:
        for node in nodes.values():
            if node.process.poll() is None:
                node.process.kill()
        ceph.end()
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    lines = [
        "# What traces cost a daemon",
        "",
        f"`bench/tracing.py --rounds {args.rounds}`; {date.today()}; {cpu.partition(':')[2].strip()}, "
        f"{os.cpu_count()} cores, daemons, engine and a real Ceph on the same ones.",
        *tables,
        "",
    ]
    print("\n".join(lines))
    if args.save:
        (ROOT / f"bench/results/tracing-{date.today()}.md").write_text("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
