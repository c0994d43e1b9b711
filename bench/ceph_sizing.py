#!/usr/bin/env python3
"""What a request and a GiB cost a Ceph: CPU of radosgw and of the OSD, and the memory of a radosgw. docs/CEPH.md sizes by it.

bench/ceph_sizing.py [--rounds 3] [--kvgate target/release/kvgate]

A throw-away Ceph of ceph/up.sh with one OSD (BlueStore in a sparse file, no second copy) and one radosgw; `kvgate bench` asks.
Each figure is the median of the rounds. Disks play no part: the file is in the kernel's page cache.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests/deploy"))

from lab import PORT, Ceph  # noqa: E402

ADDRESS = "127.0.0.41"
TICKS = os.sysconf("SC_CLK_TCK")
MIB = 2**20


def start_ceph():
    # What is overwritten and deleted goes at once: the file has no room for two hours of it.
    gc = "rgw gc obj min wait = 1\nrgw gc processor period = 5"
    size = str(12 * 2**30)
    return Ceph(3, [ADDRESS], KVGATE_CEPH_STORE="bluestore", KVGATE_CEPH_SIZE=size, KVGATE_CEPH_RGW_EXTRA=gc)


class Server:
    """CPU seconds and memory of the Ceph's daemons."""

    def __init__(self, ceph):
        folder = Path(ceph.environment["KVGATE_CEPH_DIR"], "pid")
        self.pids = {path.name: int(path.read_text()) for path in folder.iterdir()}

    def pid(self, kind):
        (found,) = [pid for name, pid in self.pids.items() if name.startswith(kind)]
        return found

    def cpu(self, kind):
        fields = Path(f"/proc/{self.pid(kind)}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def resident(self, kind):
        status = Path(f"/proc/{self.pid(kind)}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024


class Bench:
    def __init__(self, ceph, kvgate, rounds):
        self.ceph, self.kvgate, self.rounds = ceph, kvgate, rounds
        self.server = Server(ceph)
        ceph.s3(ADDRESS).create_bucket(Bucket="sizing")

    def run(self, *arguments):
        where = ["--endpoint", f"http://{ADDRESS}:{PORT}", "--bucket", "sizing", "--json"]
        return json.loads(self.ceph.run(self.kvgate, "bench", *arguments, *where).stdout)["phases"]

    def phase(self, name, *arguments):
        """CPU seconds of radosgw and OSD, operations and bytes of a phase: medians."""
        found = []
        for _ in range(self.rounds):
            before = {kind: self.server.cpu(kind) for kind in ("rgw", "osd")}
            (phase,) = self.run(name, *arguments, "-t", 4)
            assert phase["errors"]["count"] == 0, phase["errors"]
            spent = {kind: self.server.cpu(kind) - before[kind] for kind in before}
            found.append((spent["rgw"], spent["osd"], phase["ops"], phase["bytes"]))
        return [statistics.median(column) for column in zip(*found, strict=True)]


def by_size(bench):
    for size in (1, 4, 16, 64):
        objects = ["--objects", 1024 // size, "--object-size", f"{size}MiB", "--part-size", f"{min(size, 16)}MiB"]
        for name in ("write", "read"):
            rgw, osd, _, moved = bench.phase(name, *objects)
            gib = moved / 2**30
            yield {"object_mib": size, "phase": name, "rgw_s_per_gib": rgw / gib, "osd_s_per_gib": osd / gib}
        bench.run("delete", *objects)


def requests(bench):
    small = ["--objects", 4000, "--object-size", "4KiB"]
    for shards in (1, 11, 101):
        reshard = ["radosgw-admin", "bucket", "reshard", "--bucket=sizing", f"--num-shards={shards}"]
        if shards > 1:
            bench.ceph.run(*reshard, "--yes-i-really-mean-it")
        for name in ("write", "head", "lookup"):
            rgw, osd, ops, _ = bench.phase(name, *small)
            yield {"shards": shards, "phase": name, "rgw_us": rgw / ops * 1e6, "osd_us": osd / ops * 1e6}
        bench.run("delete", *small)


def memory(bench):
    yield {"in_flight": 0, "rgw_mib": bench.server.resident("rgw") / MIB}
    objects = ["--objects", 64, "--object-size", "16MiB"]
    for in_flight in (16, 64):
        bench.run("write", "read", "delete", *objects, "-t", in_flight, "--rounds", 2)
        yield {"in_flight": in_flight, "rgw_mib": bench.server.resident("rgw") / MIB}


WORDS = {"write": "PUT", "read": "GET", "head": "HEAD, there", "lookup": "HEAD, not there"}


def ceph_version():
    return subprocess.run(["ceph", "--version"], capture_output=True, text=True).stdout.split()[2]


def report(told, sizes, asked, resident):
    machine = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())[1]
    lines = [
        "# What requests cost a Ceph",
        "",
        f"`bench/ceph_sizing.py --rounds {told.rounds}`; {date.today()}; Ceph {ceph_version()}, one radosgw, one OSD (BlueStore",
        f"in a sparse file, one copy); {machine}, {os.cpu_count()} cores; load average at the end {os.getloadavg()[0]:.1f}.",
        "",
        "| objects of | request | radosgw, CPU s/GiB | OSD, CPU s/GiB |",
        "|---|---|---:|---:|",
    ]
    for row in sizes:
        row = {**row, "phase": WORDS[row["phase"]]}
        lines.append("| {object_mib} MiB | {phase} | {rgw_s_per_gib:.2f} | {osd_s_per_gib:.2f} |".format(**row))
    lines += [
        "",
        "| shards of the index | request (objects of 4 KiB) | radosgw, CPU us | OSD, CPU us |",
        "|---:|---|---:|---:|",
    ]
    for row in asked:
        row = {**row, "phase": WORDS[row["phase"]]}
        lines.append("| {shards} | {phase} | {rgw_us:.0f} | {osd_us:.0f} |".format(**row))
    lines += ["", "| requests of 16 MiB in flight | memory of the radosgw afterwards, MiB |", "|---:|---:|"]
    lines += ["| {in_flight} | {rgw_mib:.0f} |".format(**row) for row in resident]
    name = told.out / f"ceph-sizing-{date.today()}"
    name.with_suffix(".md").write_text("\n".join([*lines, ""]))
    rows = {"sizes": sizes, "requests": asked, "memory": resident}
    name.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    print("\n".join(lines))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kvgate", type=Path, default=ROOT / "target/release/kvgate")
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results")
    told = parser.parse_args()
    ceph = start_ceph()
    try:
        bench = Bench(ceph, told.kvgate.resolve(), told.rounds)
        resident = list(memory(bench))
        report(told, list(by_size(bench)), list(requests(bench)), resident)
    finally:
        ceph.end()


if __name__ == "__main__":
    main()
