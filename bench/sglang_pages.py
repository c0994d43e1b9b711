#!/usr/bin/env python3
# ruff: noqa: E402
"""SGLang's host pool filled from kvgate, from SGLang's own file backend, and from NIXL's where it is installed, in the same run:
CPU seconds a GiB and GB/s, for each host layout, and the copies that a page takes.

bench/sglang_pages.py [--rounds 7] [--pages 32]     with the Python of an environment that has SGLang and the wheel

All read what they wrote: kvgate from the node's memory, the others' files from the kernel's page cache. So no disk and no S3 is
measured, only the way into the pool. kvgate's CPU seconds have the gateway's in them. `copies`: bytes that are written in user
space for a byte of the pool, counted by the backend itself for kvgate; the file backend reads each page into a tensor of its own
and copies that into the pool; NIXL reads into the pool where its pages are whole. The kernel's own copy out of its page cache
comes on top for files and NIXL, and neither verifies what it reads.

NIXL needs no GPU: `pip install nixl nixl-cu13` beside a PyTorch of CUDA 13, or nixl-cu12."""

import argparse
import hashlib
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "engines"))

import cpu_hicache  # noqa: F401
import torch
from gateway import Gateway
from sglang.srt.mem_cache.hicache_storage import HiCacheFile, PoolName
from sglang_pools import MHA_LAYOUTS, config, fill, mha, storage

# As Llama 3.1 8B: 8 MiB a page of 64 tokens.
SHAPE = {"layers": 32, "heads": 8, "head_dim": 128}
PAGE = 64


class KvGate:
    def __init__(self, pool, gateway):
        self.gateway = gateway
        self.backend = storage(gateway.socket, {PoolName.KV: pool}, revision=pool.layout)

    def store(self, keys, slots):
        return all(self.backend.batch_set_v1(keys, slots))

    def load(self, keys, slots):
        return all(self.backend.batch_get_v1(keys, slots))

    def copies(self, keys, slots, page_bytes):
        pool = self.backend.pools[PoolName.KV]
        pages = [int(slot) // PAGE for slot in slots[::PAGE]]
        deadline_ms = self.backend.settings.deadline_ms
        moved = self.backend.pages.load(pool.number, bytes.fromhex("".join(keys)), pages, deadline_ms)
        return moved.bytes / (len(keys) * page_bytes)

    def cpu(self):
        ticks = Path(f"/proc/{self.gateway.pid()}/stat").read_text().rpartition(")")[2].split()
        return time.process_time() + (int(ticks[11]) + int(ticks[12])) / os.sysconf("SC_CLK_TCK")


class File:
    """As SGLang's controller calls it, by pages."""

    def __init__(self, pool, folder):
        self.pool = pool
        self.backend = HiCacheFile(config("unused"), str(folder))
        self.backend.register_mem_pool_host(pool)

    def store(self, keys, slots):
        pages = [self.pool.get_data_page(slots[at * PAGE]) for at in range(len(keys))]
        return self.backend.batch_set(keys, pages)

    def load(self, keys, slots):
        targets = [self.pool.get_dummy_flat_data_page() for _ in keys]
        pages = self.backend.batch_get(keys, targets)
        for at, page in enumerate(pages):
            if page is None:
                return False
            self.pool.set_from_flat_data_page(slots[at * PAGE], page)
        return True

    def copies(self, keys, slots, page_bytes):
        return 2.0

    def cpu(self):
        return time.process_time()


class Nixl:
    """SGLang's backend for NIXL, with NIXL's plugin for files. In layouts whose pages are whole the kernel reads into the pool."""

    def __init__(self, pool, folder):
        from sglang.srt.mem_cache.storage.nixl.hicache_nixl import HiCacheNixl

        folder.mkdir()
        plugin = {"plugin": {"posix": {"active": True}}, "use_direct_io": False, "l3_cleaner_enabled": False}
        self.backend = HiCacheNixl(config("unused", **plugin), str(folder))
        self.backend.register_mem_pool_host(pool)

    def store(self, keys, slots):
        return all(self.backend.batch_set_v1(keys, slots))

    def load(self, keys, slots):
        return all(self.backend.batch_get_v1(keys, slots))

    def copies(self, keys, slots, page_bytes):
        return 0.0 if self.backend.is_zero_copy else 1.0

    def cpu(self):
        return time.process_time()


def measured(backend, what, keys, slots, size):
    cpu, began = backend.cpu(), time.perf_counter()
    if not getattr(backend, what)(keys, slots):
        raise RuntimeError(f"{type(backend).__name__} could not {what} all pages")
    seconds = time.perf_counter() - began
    return {"cpu_s_per_gib": (backend.cpu() - cpu) / (size / 2**30), "gb_per_s": size / seconds / 1e9}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--pages", type=int, default=32)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results")
    told = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="kvgate-bench-", dir="/dev/shm") as folder:
        gateway = Gateway(folder)
        # The pages stay in the node's memory.
        os.environ["KVGATE__ARENA__SIZE"] = f"{told.pages * 8 * 4 + 256} MiB"
        gateway.start()
        try:
            for layout in MHA_LAYOUTS:
                rows += of_layout(layout, gateway, Path(folder), told)
        finally:
            gateway.end()
    report(rows, told)


def of_layout(layout, gateway, folder, told):
    pool = mha(layout, page=PAGE, pages=told.pages, **SHAPE)
    fill(pool, 1)
    slots = torch.arange(told.pages * PAGE)
    page_bytes = pool.size_per_token * PAGE
    size = page_bytes * told.pages
    keys = [hashlib.sha256(f"{layout} {at}".encode()).hexdigest() for at in range(told.pages)]
    backends = {"kvgate": KvGate(pool, gateway), "file": File(pool, folder / f"file-{layout}")}
    if importlib.util.find_spec("nixl"):
        backends["nixl"] = Nixl(pool, folder / f"nixl-{layout}")
    for backend in backends.values():
        measured(backend, "store", keys, slots, size)
        measured(backend, "load", keys, slots, size)
    rounds = {name: [] for name in backends}
    for number in range(told.rounds):
        # Each goes first in turn.
        for name in sorted(backends, reverse=number % 2):
            rounds[name].append(measured(backends[name], "load", keys, slots, size))
    rows = []
    for name, backend in backends.items():
        middle = {key: statistics.median(one[key] for one in rounds[name]) for key in rounds[name][0]}
        rows.append({"layout": layout, "backend": name, "copies": backend.copies(keys, slots, page_bytes), **middle})
        print(rows[-1], flush=True)
    return rows


def report(rows, told):
    name = f"sglang-{date.today()}"
    machine = next(
        line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    )
    lines = [
        "# SGLang's host pool: kvgate beside SGLang's backends for files and NIXL",
        "",
        f"- `bench/sglang_pages.py --rounds {told.rounds} --pages {told.pages}`, loads, medians of {told.rounds} rounds",
        f"- {machine}, {os.cpu_count()} cores; load average at the end {os.getloadavg()[0]:.1f}",
        "- pages of 64 tokens of 32 layers with 8 heads of 128 in bfloat16: 8 MiB",
        "",
        "| layout | backend | copies a page | CPU s/GiB | GB/s |",
        "|---|---|---:|---:|---:|",
    ]
    for row in rows:
        lines.append("| {layout} | {backend} | {copies:.0f} | {cpu_s_per_gib:.2f} | {gb_per_s:.2f} |".format(**row))
    told.out.mkdir(parents=True, exist_ok=True)
    (told.out / f"{name}.md").write_text("\n".join(lines) + "\n")
    (told.out / f"{name}.json").write_text(json.dumps({"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
