"""The common part of the clients in this folder: flags, the meter, and the conversation with the bench.

A client runs in the virtual environment that its library is in. It says hello when it is ready, then answers each line
of JSON that asks for something, {"op": "read", "part_size": 16777216}, with one that tells what that did and cost.
It lives through all rounds, so that its connections, threads and buffers are as warm as in an engine.
"""

import argparse
import importlib.metadata
import json
import os
import resource
import sys
import time

MIB, GIB = 1 << 20, 1 << 30


def arguments() -> argparse.Namespace:
    """The flags that every client gets."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", required=True, help="URL, for path style; host:port, for virtual-host style")
    parser.add_argument("--bucket", required=True)
    parser.add_argument("--objects", type=int, required=True)
    parser.add_argument("--object-size", type=int, required=True)
    parser.add_argument("--in-flight", type=int, required=True)
    return parser.parse_args()


def name(i: int) -> str:
    """An object's key."""
    return f"obj-{i:05}"


def check(i: int, view: memoryview) -> None:
    """Every MiB of an object begins with the object's number and its own."""
    for mib in range(len(view) // MIB):
        if view[mib * MIB : mib * MIB + 8] != (i << 32 | mib).to_bytes(8, "little"):
            raise ValueError(f"object {i}, MiB {mib}: not the bytes that were stored")


def spoil(buffer: memoryview) -> None:
    """Overwrites what `check` looks at, so that it sees this read's bytes and not those of the one before."""
    for at in range(0, len(buffer) - 7, MIB):
        buffer[at : at + 8] = bytes(8)


class Meter:
    """CPU and page faults of this process between start and stop, all threads, user and system."""

    def __init__(self) -> None:
        self.usage = resource.getrusage(resource.RUSAGE_SELF)
        self.began = time.perf_counter()

    def stop(self, phase: str, ops: int, size: int) -> dict:
        """With the same names as `kvgate bench --json`."""
        seconds = time.perf_counter() - self.began
        now, before = resource.getrusage(resource.RUSAGE_SELF), self.usage
        cpu_seconds = now.ru_utime + now.ru_stime - before.ru_utime - before.ru_stime
        return {
            "phase": phase,
            "ops": ops,
            "bytes": size,
            "seconds": seconds,
            "cpu_seconds": cpu_seconds,
            "minor_faults": now.ru_minflt - before.ru_minflt,
        }


def serve(make, package: str) -> None:
    """Makes the client and does what is asked until there is nothing more to read."""
    # Libraries print to the standard output, which must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    client = make(arguments())
    print(json.dumps({"version": importlib.metadata.version(package)}), file=answers)
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(client, asked.pop("op"))(**asked)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)
    # Some libraries don't end their threads.
    os._exit(0)
