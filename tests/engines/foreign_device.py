"""Brings torch's device "foreign" (foreign_device.cc), built by g++ and kept until torch or the source changes."""

import hashlib
import os
import subprocess
import sys
import types
from pathlib import Path

import torch

SOURCE = Path(__file__).with_name("foreign_device.cc")
CACHE = Path(os.environ.get("KVGATE_TEST_CACHE", Path.home() / ".cache" / "kvgate-tests")) / "foreign"


def load():
    """The device. Once in a process."""
    from torch.utils import cpp_extension

    stamp = hashlib.sha256(SOURCE.read_bytes() + Path(__file__).read_bytes() + torch.__version__.encode()).hexdigest()[
        :16
    ]
    library = CACHE / f"{stamp}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        includes = [f"-isystem{path}" for path in cpp_extension.include_paths()]
        own = CACHE / f"{stamp}.{os.getpid()}"
        parts = [f"-L{path}" for path in cpp_extension.library_paths()] + ["-lc10", "-ltorch_cpu"]
        command = ["g++", "-std=c++20", "-O0", "-fPIC", "-shared", *includes, SOURCE, *parts, "-o", own]
        subprocess.run(command, check=True, stderr=sys.stdout)
        own.rename(library)
    torch.ops.load_library(library)
    torch.utils.rename_privateuse1_backend("foreign")
    torch._register_device_module("foreign", types.ModuleType("torch.foreign"))
    return torch.device("foreign:0")
