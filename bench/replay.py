#!/usr/bin/env python3
"""A recorded trace, replayed against a real daemon and a real S3: what it hits beside what `kvgate replay` says in simulation,
its memory, and its own figures beside what was really asked.

bench/replay.py --kvgate target/release/kvgate [--trace conversation_trace.jsonl] [--requests 1000] [--speed 20]

With an environment that has the wheel and numpy. The trace is Mooncake's format; without one, conversations are made up. A
block of the trace is a chunk of 4 KiB. Each request is looked up, what is there is loaded and compared, the rest is stored, as an
engine does. `--speed`: so many times as fast as it was recorded. Without `--endpoint` a throw-away Ceph is started. Exit 1: the
hits are more than a point beside the simulation's, an answer was wrong, or a figure does not fit.
"""

import argparse
import json
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

BLOCK_TOKENS, CHUNK = 512, 16
"""Of the trace's blocks, and of the chunks that stand for them."""
SPACE = kvgate.space(
    model="bench/replay", revision="1", dtype="float16", layers=1, heads=1, head_dim=64, chunk_tokens=CHUNK
)
SLOT = 8192
"""A chunk in the arena: header and payload, in pages."""
POINTS_MAX = 1.0


def made_up(requests):
    """Conversations: each turn has the one before and its answer, most end soon, and all begin with one of a few texts."""
    numbers, ids, at, open_ones, trace = random.Random(1), iter(range(1 << 30)), 0, [], []
    openings = [[next(ids) for _ in range(numbers.randint(1, 4))] for _ in range(8)]
    for _ in range(requests):
        at += numbers.expovariate(1 / 300)
        if open_ones and numbers.random() < 0.65:
            blocks = open_ones.pop(min(int(numbers.expovariate(0.2)), len(open_ones) - 1))
        else:
            blocks = list(numbers.choice(openings))
        blocks = blocks + [next(ids) for _ in range(1 + int(numbers.expovariate(0.12)))]
        trace.append({"timestamp": int(at), "blocks": blocks})
        if numbers.random() < 0.75 and len(blocks) < 250:
            open_ones.insert(0, blocks)
    return trace


def read(path, requests):
    trace = []
    for line in path.read_text().splitlines()[:requests]:
        one = json.loads(line)
        trace.append({"timestamp": one["timestamp"], "blocks": one["hash_ids"][: one["input_length"] // BLOCK_TOKENS]})
    return sorted(trace, key=lambda one: one["timestamp"])


class Node:
    """A daemon whose memory holds so many chunks, with S3 below it."""

    def __init__(self, kvgate_path, folder, endpoint, bucket, chunks, environment):
        self.socket = folder / "kvgate.sock"
        self.log = folder / "kvgate.log"
        arena = chunks * SLOT + (48 << 20)
        settings = {
            "KVGATE__ARENA__SIZE": f"{arena}B",
            "KVGATE__ARENA__PATH": f"/dev/shm/{folder.name}.arena",
            # The memory tier has the rest.
            "KVGATE__LOAD__RESERVE": "16MiB",
            "KVGATE__LOAD__WINDOW": "8MiB",
            "KVGATE__STORE__WRITE_BEHIND": "16MiB",
            "KVGATE__MEMORY__WATERMARK": str(int(100 * chunks * SLOT / arena)),
            "KVGATE__LOOKUP__DEADLINE": "5s",
        }
        command = [kvgate_path, "serve", "--endpoint", endpoint, "--bucket", bucket, "--socket", self.socket]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                list(map(str, command)), env={**environment, **settings}, stdout=log, stderr=log
            )
        self.kvgate = kvgate_path
        end = time.monotonic() + 60
        while subprocess.run(
            [kvgate_path, "health", "--ready", "--socket", self.socket], capture_output=True
        ).returncode:
            if self.process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(self.log.read_text())
            time.sleep(0.1)

    def figures(self):
        """Each metric's sum over its labels, and each series by itself."""
        import http.client
        import socket

        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.socket))
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        found = {}
        for line in lines:
            if not line.startswith("#"):
                name, value = line.rsplit(" ", 1)
                found[name] = float(value)
                bare = name.partition("{")[0]
                if bare != name:
                    found[bare] = found.get(bare, 0) + float(value)
        return found

    def resident(self):
        """Bytes of its own, without the arena."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no RssAnon")

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(120)


class Replay:
    def __init__(self, node, trace, speed):
        self.node, self.trace, self.speed = node, trace, speed
        self.asked = self.there = self.in_memory = self.loaded = self.new = self.refused = 0
        self.resident, self.chunks, self.late = [], 0, []

    def run(self):
        gateway = kvgate.connect(self.node.socket)
        largest = max(len(one["blocks"]) for one in self.trace) * CHUNK
        loaded = np.zeros((1, 2, largest, 1, 64), np.float16)
        start = time.monotonic()
        for number, one in enumerate(self.trace):
            wait = one["timestamp"] / 1000 / self.speed - (time.monotonic() - start)
            time.sleep(max(0, wait))
            self.late.append(max(0, -wait))
            self.request(gateway, one["blocks"], loaded)
            if number % max(1, len(self.trace) // 60) == 0:
                self.resident.append(self.node.resident())
                self.chunks = max(self.chunks, int(self.node.figures()["kvgate_memory_chunks"]))
        gateway.flush(deadline=600)
        self.seconds = time.monotonic() - start
        gateway.close()

    def request(self, gateway, blocks, loaded):
        if not blocks:
            return
        ids = np.asarray(blocks, np.uint32)
        tokens = np.repeat(ids, CHUNK)
        kv = np.zeros((1, 2, len(tokens), 1, 64), np.float16)
        kv.view(np.uint32)[..., 0] = tokens[None, None, :, None]
        self.asked += len(blocks)
        hit = gateway.lookup(SPACE, tokens, deadline=5.0)
        assert hit.complete, "S3 did not answer in time"
        tiers = list(hit.tiers)
        self.there += len(tiers)
        self.in_memory += next((at for at, tier in enumerate(tiers) if tier != "memory"), len(tiers))
        if tiers:
            done = gateway.load_into(hit, loaded)
            assert done.reason is None, done.reason
            words = loaded.view(np.uint32)[0, :, : done.tokens, 0, 0]
            assert (words == tokens[None, : done.tokens]).all(), "wrong bytes"
            self.loaded += done.tokens // CHUNK
        stored = gateway.store_from(SPACE, tokens, kv)
        self.new += stored.new_chunks
        self.refused += stored.refused_chunks


def simulated(kvgate_path, folder, trace, chunks):
    path = folder / "trace.jsonl"
    lines = (
        {
            "timestamp": one["timestamp"],
            "input_length": len(one["blocks"]) * BLOCK_TOKENS,
            "output_length": 1,
            "hash_ids": one["blocks"],
        }
        for one in trace
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [kvgate_path, "replay", path, "--blocks", str(chunks), "--policy", "reuse,lru", "--json"]
    return json.loads(subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stdout)


def odd_figures(replay, figures):
    """The daemon's own figures that do not fit what was asked."""
    expected = {
        "kvgate_lookup_chunks_total": replay.asked,
        "kvgate_load_chunks_total": replay.loaded,
        'kvgate_store_commits_total{outcome="published"}': replay.new,
        "kvgate_load_misses_total": 0,
        "kvgate_behind_dropped_total": 0,
        "kvgate_behind_waiting_chunks": 0,
    }
    return {name: (figures.get(name), value) for name, value in expected.items() if figures.get(name) != value}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kvgate", type=Path, default=ROOT / "target/release/kvgate")
    parser.add_argument("--trace", type=Path, help="Mooncake's format; not given: made up")
    parser.add_argument("--requests", type=int, help="the first so many")
    parser.add_argument("--speed", type=float, default=20.0)
    parser.add_argument("--chunks", type=int, default=10_000, help="that the memory holds")
    parser.add_argument("--endpoint", help="an S3 that is there, with keys in the environment")
    parser.add_argument("--bucket", default="kvgate-replay")
    parser.add_argument("--save", action="store_true", help="writes bench/results/replay-DATE.md")
    args = parser.parse_args()
    program = args.kvgate.resolve()
    trace = read(args.trace, args.requests) if args.trace else made_up(args.requests or 1000)
    ceph, environment, endpoint = None, dict(os.environ), args.endpoint
    if endpoint is None:
        from lab import PORT, Ceph

        ceph = Ceph(73, ["127.0.0.73"])
        environment, endpoint = ceph.environment, f"http://127.0.0.73:{PORT}"
    try:
        with tempfile.TemporaryDirectory(prefix="kvgate-replay-") as name:
            folder = Path(name)
            make = ["--endpoint", endpoint, "--bucket", args.bucket]
            subprocess.run(
                [program, "demo", *make, "--tokens", "512"], env=environment, capture_output=True, check=True
            )
            node = Node(program, folder, endpoint, args.bucket, args.chunks, environment)
            try:
                replay = Replay(node, trace, args.speed)
                replay.run()
                figures = node.figures()
            finally:
                node.end()
            simulation = simulated(program, folder, trace, replay.chunks)
    finally:
        if ceph is not None:
            ceph.end()
    return report(args, replay, figures, simulation)


def report(args, replay, figures, simulation):
    (at_size,) = simulation["sizes"]
    percent = 100 * replay.in_memory / replay.asked
    everywhere = 100 * replay.there / replay.asked
    expected, lru = (at_size["hits_percent"][policy] for policy in ("reuse", "lru"))
    infinite = simulation["infinite_hits_percent"]
    quarter = max(1, len(replay.resident) // 4)
    flat = [
        statistics.median(part) / 2**20 for part in (replay.resident[quarter : 2 * quarter], replay.resident[-quarter:])
    ]
    odd = odd_figures(replay, figures)
    late = sum(seconds > 1 for seconds in replay.late)
    rows = [
        ("requests, blocks", f"{len(replay.trace)}, {replay.asked}"),
        ("seconds, requests that began more than 1 s late", f"{replay.seconds:.0f}, {late}"),
        ("blocks in memory at the fullest", replay.chunks),
        ("hits in memory, %", f"{percent:.2f}"),
        ("the same in simulation: `reuse`, `lru`", f"{expected:.2f}, {lru:.2f}"),
        ("hits in memory and on S3, %", f"{everywhere:.2f}"),
        ("the same in simulation", f"{infinite:.2f}"),
        ("blocks loaded and compared", replay.loaded),
        ("blocks stored, refused for want of room", f"{replay.new}, {replay.refused}"),
        ("memory beside the arena, MiB: second quarter, last", f"{flat[0]:.1f}, {flat[1]:.1f}"),
        ("figures of the daemon that do not fit", odd or "none"),
    ]
    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    command = f"bench/replay.py --speed {args.speed:g} --chunks {args.chunks}"
    command += f" --trace {args.trace.name}" if args.trace else ""
    command += f" --requests {args.requests}" if args.requests else ""
    lines = [
        "# A trace against a real daemon and a real Ceph",
        "",
        f"`{command}`; {date.today()}; {cpu.partition(':')[2].strip()}, {os.cpu_count()} cores.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in rows),
        "",
    ]
    print("\n".join(lines))
    if args.save:
        (ROOT / f"bench/results/replay-{date.today()}.md").write_text("\n".join(lines))
    wrong = []
    if abs(percent - expected) > POINTS_MAX or abs(everywhere - infinite) > POINTS_MAX:
        wrong.append(f"the hits are more than {POINTS_MAX} points beside the simulation's")
    if odd:
        wrong.append(f"figures do not fit: {odd}")
    if flat[1] > 1.5 * flat[0] + 16:
        wrong.append(f"memory grew from {flat[0]:.0f} to {flat[1]:.0f} MiB")
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
