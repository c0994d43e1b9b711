#!/usr/bin/env python3
"""Latency and throughput of one radosgw by size and requests in flight, and the CPU that each request takes: the points that
the simulated fleet's RGWs are fitted to (docs/architecture/fleet.md).

bench/ceph_curves.py [--rounds 3] [--kvgate target/release/kvgate] [--out bench/fleet/ceph.json]

The Ceph is that of bench/ceph_sizing.py, and shares its cores with the client. Of the rounds each point has the fastest: what
else runs on the machine only makes them slower. `kvgate bench` asks, at most `--seconds` a point.
"""

import argparse
import json
import os
import re
import sys
from datetime import date
from pathlib import Path

from ceph_sizing import ROOT, WORDS, Bench, ceph_version, start_ceph

IN_FLIGHT = (1, 4, 16, 64)
KIB = 2**10
# Of objects; what a HEAD asks for doesn't matter.
WORKS = [("head", 4 * KIB), *((name, size * KIB) for size in (64, 1024, 4096, 16384) for name in ("write", "read"))]


def point(bench, name, size, in_flight, seconds):
    before = {kind: bench.server.cpu(kind) for kind in ("rgw", "osd")}
    objects = ["--objects", 64, "--object-size", size, "--part-size", size, "-t", in_flight]
    (phase,) = bench.run(name, *objects, "--time-limit", f"{seconds}s", "--no-verify", "--keep")
    assert phase["errors"]["count"] == 0, phase["errors"]
    spent = {kind: (bench.server.cpu(kind) - before[kind]) * 1e6 / phase["ops"] for kind in before}
    return {
        "request": WORDS[name].split(",")[0],
        "bytes": 0 if name == "head" else size,
        "in_flight": in_flight,
        "per_s": round(phase["ops"] / phase["seconds"], 1),
        "p50_us": round(phase["latency_us"]["p50"]),
        "p99_us": round(phase["latency_us"]["p99"]),
        "rgw_cpu_us": round(spent["rgw"]),
        "osd_cpu_us": round(spent["osd"]),
        "client_cpu_us": round(phase["cpu_us_per_op"]),
    }


def points(bench, rounds, seconds):
    for name, size in WORKS:
        bench.run("write", "--objects", 64, "--object-size", size, "--keep")
        for in_flight in IN_FLIGHT:
            tries = [point(bench, name, size, in_flight, seconds) for _ in range(rounds)]
            best = max(tries, key=lambda tried: tried["per_s"])
            print(best, file=sys.stderr)
            yield best


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--kvgate", type=Path, default=ROOT / "target/release/kvgate")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/fleet/ceph.json")
    told = parser.parse_args()
    ceph = start_ceph()
    try:
        found = list(points(Bench(ceph, told.kvgate.resolve(), told.rounds), told.rounds, told.seconds))
    finally:
        ceph.end()
    about = {
        "date": str(date.today()),
        "command": f"bench/ceph_curves.py --rounds {told.rounds} --seconds {told.seconds}",
        "ceph": f"{ceph_version()}, one radosgw, one OSD (BlueStore in a sparse file, one copy)",
        "cpu": re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1],
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[1], 1),
    }
    lines = ",\n".join(f"  {json.dumps(one)}" for one in found)
    told.out.write_text(f'{json.dumps(about, indent=1)[:-2]},\n "points": [\n{lines}\n ]\n}}\n')


if __name__ == "__main__":
    main()
