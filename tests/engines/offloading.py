"""vLLM's own offloading on a CPU: `pretend()`, then OffloadingConnector runs, with its tiers, its shared memory and all of its
logic.

vLLM lets it run with GPUs only (`CPUOffloadingSpec.get_worker`), and copies by streams. Here the KV cache says that it is on
a GPU, a stream is nothing, and the one function that copies blocks is memmove.
"""

import contextlib
import ctypes
from types import SimpleNamespace

import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.cpu import spec as cpu_spec
from vllm.v1.kv_offload.tiering import spec as tiering_spec


class OnGpu(torch.Tensor):
    is_cuda = True


class Nothing:
    """A stream, or an event that has happened."""

    def __init__(self, *_, **__):
        pass

    def wait_stream(self, stream):
        pass

    wait_event = record = wait_stream

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return 1.0


class Torch:
    """PyTorch with such events."""

    Event = Nothing

    def __getattr__(self, name):
        return getattr(torch, name)


class Worker(gpu_worker.CPUOffloadingWorker):
    def __init__(self, kv_caches, *arguments, **named):
        for one in kv_caches.tensors:
            one.tensor = one.tensor.as_subclass(OnGpu)
        super().__init__(kv_caches, *arguments, **named)


def copy_blocks(sources, targets, sizes, **_):
    for source, target, size in zip(sources.tolist(), targets.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(target, source, size)


def pretend():
    gpu_worker.torch = Torch()
    gpu_worker.ops = SimpleNamespace(swap_blocks_batch=copy_blocks)
    platform = SimpleNamespace(
        Stream=Nothing,
        current_stream=Nothing,
        stream=lambda stream: contextlib.nullcontext(),
        is_cuda_alike=lambda: True,
        is_rocm=lambda: False,
        is_xpu=lambda: False,
    )
    gpu_worker.current_platform = cpu_spec.current_platform = platform
    tiering_spec.CPUOffloadingWorker = Worker


def offloading(socket, cpu_bytes=64 << 20, blocks=2, **tier):
    """vLLM's one flag. `tier`: more keys of kvgate's."""
    ours = {"type": "KvGateTier", "module_path": "kvgate.vllm.tier", "socket": str(socket), "lookup_deadline_ms": 5000}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": cpu_bytes,
            "blocks_per_chunk": blocks,
            "secondary_tiers": [{**ours, **tier}],
        },
    }
