"""The connector with a clock around each call: seconds and calls so far, in memory that the bench reads.

In the engine's processes, `kv_connector_module_path` "kvgate_timed". Each process and role has a file in the folder
KVGATE_BENCH_CLOCKS, `{role}-{pid}`, with two doubles for each name in METHODS, which is beside it as JSON.
"""

import functools
import inspect
import json
import mmap
import os
import time
from pathlib import Path

from kvgate.vllm import KvGateConnector

METHODS = [name for name, what in vars(KvGateConnector).items() if name[0] != "_" and inspect.isfunction(what)]


class TimedConnector(KvGateConnector):
    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        folder = Path(os.environ["KVGATE_BENCH_CLOCKS"])
        path = folder / f"{role.name.lower()}-{os.getpid()}"
        path.write_bytes(bytes(16 * len(METHODS)))
        with path.open("r+b") as file:
            self.clocks = memoryview(mmap.mmap(file.fileno(), 0)).cast("d")
        path.with_suffix(".json").write_text(json.dumps(METHODS))


def timed(at, method):
    @functools.wraps(method)
    def call(self, *arguments, **named):
        began = time.perf_counter()
        try:
            return method(self, *arguments, **named)
        finally:
            self.clocks[2 * at] += time.perf_counter() - began
            self.clocks[2 * at + 1] += 1

    return call


for at, name in enumerate(METHODS):
    setattr(TimedConnector, name, timed(at, getattr(KvGateConnector, name)))
