#!/usr/bin/env python3
"""The storm: a prefix that all nodes of a fleet want at the same time, with peers and without.

bench/storm.py [--nodes 8] [--chunks 200] [--rounds 3] [--kvgate target/release/kvgate] [--save]

A throw-away Ceph of ceph/up.sh with one radosgw, which has the prefix, and a real daemon for each node, cold. All of them are
asked for all chunks at once. Cases: peers off; peers on; and peers on with one node killed and one stopped in the middle, whose
chunks all others must get all the same. Of each: what the radosgw sent, by its own counters, its CPU, and how long a chunk and a
whole prefix took. Exit 1: a chunk was not loaded, or S3 sent more than 2.05 times the prefix with peers on. A chunk comes
twice, for the first node that asks and for the owner; one in twenty may come once more, where an owner answers late.

With the Python of the tests' environment, which has boto3.
"""

import argparse
import json
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/deploy"))

from harness import tools  # noqa: E402
from harness.node import as_peers, running_nodes  # noqa: E402
from lab import PORT, Ceph  # noqa: E402

ADDRESS, BUCKET, PEERS = "127.0.0.42", "storm", 9400
TICKS = os.sysconf("SC_CLK_TCK")
MIB = 2**20
# Chunks of 1 MiB and a header.
SPACE = {
    "model": "kvgate/bench",
    "revision": "storm",
    "chunk_tokens": 16,
    "mha": {"layers": 16, "heads": 8, "head_dim": 128},
}
CASES = ("off", "on", "on, two gone")
# With peers on; see above.
PREFIXES_MAX = 2.05


class Radosgw:
    def __init__(self, ceph):
        self.ceph = ceph
        folder = Path(ceph.environment["KVGATE_CEPH_DIR"])
        (self.pid,) = [int(path.read_text()) for path in (folder / "pid").iterdir() if path.name.startswith("rgw")]
        (self.admin,) = folder.glob("run/*rgw*.asok")

    def cpu(self):
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def sent(self):
        """Bytes of GETs."""
        dumped = json.loads(self.ceph.run("ceph", "--admin-daemon", self.admin, "perf", "dump").stdout)
        return dumped["rgw"]["get_b"]


def storm(told, case, space, chunks, radosgw, environment):
    """All nodes at once, a few chunks at a time on each, in the order of the prompt."""
    prefix = told.chunks * MIB * 9 // 8
    settings = {
        "KVGATE__LOAD__RESERVE": "64MiB",
        "KVGATE__LOAD__WINDOW": "64MiB",
        "KVGATE__STORE__WRITE_BEHIND": "16MiB",
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        each = [settings] * told.nodes
        if case != "off":
            each = [settings | as_peers(Path(folder), told.nodes, number, PEERS) for number in range(told.nodes)]
        running = running_nodes(told.kvgate, Path(folder), prefix + 160 * MIB, each, environment)
        nodes = stack.enter_context(running)
        for node in nodes:
            status, answer = node.call("PUT", "/v1/spaces", json.dumps(SPACE))
            assert status == 200, answer
        gone = nodes[-2:] if case == "on, two gone" else []
        asking = [node for node in nodes if node not in gone]
        before, spent = radosgw.sent(), radosgw.cpu()
        pools = [stack.enter_context(ThreadPoolExecutor(told.at_a_time)) for _ in asking]
        began, lock, loads = time.monotonic(), threading.Lock(), []
        done = dict.fromkeys(range(len(asking)), 0.0)

        def load(number, chunk):
            seconds = asking[number].load(space, chunk)
            with lock:
                loads.append(seconds)
                done[number] = max(done[number], time.monotonic() - began)

        futures = []
        for position, chunk in enumerate(chunks):
            futures += [pool.submit(load, number, chunk) for number, pool in enumerate(pools)]
            if gone and position == len(chunks) // 4:
                # One is gone at once, the other hangs.
                gone[0].process.kill()
                gone[1].process.send_signal(signal.SIGSTOP)
        for future in futures:
            future.result()
        asked = [node.metrics("kvgate_peer_asked_total") for node in asking]
        found = sorted(seconds for seconds in loads if seconds is not None)
        return {
            "case": case,
            "failed": len(loads) - len(found),
            "prefixes": (radosgw.sent() - before) / (len(chunks) * told.object_bytes),
            "cpu_s": radosgw.cpu() - spent,
            "p50_ms": statistics.median(found) * 1000,
            "p99_ms": found[int(len(found) * 0.99)] * 1000,
            "prefix_s": max(done.values()),
            "asked": {word: round(sum(one[word] for one in asked)) for word in asked[0]} if asked[0] else {},
        }


def report(told, rows):
    machine = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    version = subprocess.run(["ceph", "--version"], capture_output=True, text=True).stdout.split()[2]
    # Without the folders of this machine.
    flags = [re.sub(r"(^|=)/.*/", r"\1", flag.replace(f"{ROOT.resolve()}/", "")) for flag in sys.argv[1:]]
    lines = [
        "# The storm",
        "",
        f"`{shlex.join(['bench/storm.py', *flags])}`; {date.today()}; commit {tools.commit()}; Ceph {version},",
        f"one radosgw, one OSD (memory); {machine}, {os.cpu_count()} cores for all of it; load average at the end",
        f"{os.getloadavg()[0]:.1f}; the program is {told.kvgate.parent.name}. {told.nodes} nodes, {told.chunks} chunks of 1 MiB,",
        f"{told.at_a_time} loads at a time on each node. Medians of {told.rounds} rounds.",
        "Prefixes: what the radosgw sent, by its own counters, over the prefix's bytes.",
        "",
        "| peers | prefixes that S3 sent | radosgw, CPU s | a chunk, p50 ms | p99 ms | the last node has all, s | not loaded |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for case in CASES:
        of = [row for row in rows if row["case"] == case]
        middle = {key: statistics.median(row[key] for row in of) for key in of[0] if key not in ("case", "asked")}
        lines.append(
            "| {case} | {prefixes:.2f} | {cpu_s:.2f} | {p50_ms:.0f} | {p99_ms:.0f} | {prefix_s:.1f} | {failed:.0f} |".format(
                case=case, **middle
            )
        )
    if told.save:
        name = ROOT / "bench/results" / f"storm-{date.today()}"
        name.with_suffix(".md").write_text("\n".join([*lines, ""]))
        name.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=200)
    parser.add_argument("--at-a-time", type=int, default=8, help="loads under way on each node")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kvgate", type=Path, default=ROOT / "target/release/kvgate")
    parser.add_argument("--save", action="store_true", help="write bench/results/storm-DATE.md and .json")
    told = parser.parse_args()
    told.kvgate = told.kvgate.resolve()
    ceph = Ceph(4, [ADDRESS])
    try:
        ceph.s3(ADDRESS).create_bucket(Bucket=BUCKET)
        where = ["--endpoint", f"http://{ADDRESS}:{PORT}", "--bucket", BUCKET]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as space:
            json.dump(SPACE, space)
            space.flush()
            tokens = told.chunks * SPACE["chunk_tokens"]
            ceph.run(told.kvgate, "bench", "write", *where, "--space", space.name, "--tokens", tokens, "--keep")
        objects = [
            one
            for page in ceph.s3(ADDRESS).get_paginator("list_objects_v2").paginate(Bucket=BUCKET)
            for one in page["Contents"]
            if re.fullmatch(r"[0-9a-f]{64}", one["Key"].rpartition("/")[2])
        ]
        assert len(objects) == told.chunks, f"{len(objects)} chunks"
        *prefix, space, _ = objects[0]["Key"].split("/")
        told.object_bytes = objects[0]["Size"]
        chunks = [one["Key"].rpartition("/")[2] for one in objects]
        environment = {
            **ceph.environment,
            "KVGATE__S3__ENDPOINT": f"http://{ADDRESS}:{PORT}",
            "KVGATE__S3__BUCKET": BUCKET,
            "KVGATE__S3__PREFIX": "/".join(prefix),
        }
        radosgw, rows = Radosgw(ceph), []
        for number in range(told.rounds):
            for case in random.sample(CASES, len(CASES)):
                rows.append(storm(told, case, space, chunks, radosgw, environment))
                print(number, json.dumps(rows[-1]), file=sys.stderr)
        report(told, rows)
    finally:
        ceph.end()
    wrong = [row for row in rows if row["failed"] or (row["case"] != "off" and row["prefixes"] > PREFIXES_MAX)]
    return f"wrong: {wrong}" if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
