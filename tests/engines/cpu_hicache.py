"""Lets SGLang's HiCache run on a CPU. Imported before SGLang's modules.

SGLang pins host memory and copies between host and device by CUDA only. Here nothing is pinned, and the copies of the I/O backend
`direct` are made by PyTorch. And its attention of a CPU reads windows wrongly (see `attention`). All else is SGLang's own: its
controller, host pools, trees and threads."""

import importlib.abc
import importlib.util
import sys
import time


def streams():
    """PyTorch's streams and events of a CPU lack what SGLang calls: all work is done when a call returns."""
    import torch

    class Event:
        def __init__(self, *_, **__):
            self.at = 0.0

        def record(self, *_):
            self.at = time.perf_counter()

        def wait(self, *_):
            pass

        def synchronize(self):
            pass

        def query(self):
            return True

        def elapsed_time(self, other):
            return (other.at - self.at) * 1e3

    torch.cpu.Event = Event
    for name in ("synchronize", "wait_event", "wait_stream", "record_event"):
        if not hasattr(torch.cpu.Stream, name):
            setattr(torch.cpu.Stream, name, lambda *_, **__: None)
    if not hasattr(torch.cpu.Stream, "query"):
        torch.cpu.Stream.query = lambda _: True
    torch.Tensor.record_stream = lambda *_: None


def common(module):
    streams()
    unpinned(module)


def unpinned(module):
    for name in ("_cuda_host_register", "_cuda_host_unregister"):
        if hasattr(module, name):
            setattr(module, name, lambda *_, **__: None)


def slots(indices):
    import torch

    return indices.to("cpu", torch.long)


def by_slots(src_layers, dst_layers, src_indices, dst_indices, page_size):
    """Between layers of the same order."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[slots(dst_indices)] = source[slots(src_indices)]


def to_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    """From layers into pages that have all layers."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for number, source in enumerate(src_ptrs):
        target, layer = dst_ptrs[number // layers], number % layers
        for first in range(0, len(dst_indices), page_size):
            page = int(dst_indices[first]) // page_size
            target[page, layer] = source[slots(src_indices[first : first + page_size])]


def from_pages(src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size):
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        for first in range(0, len(src_indices), page_size):
            page = int(src_indices[first]) // page_size
            target[slots(dst_indices[first : first + page_size])] = source[page, layer_id]


def host_pool(module):
    unpinned(module)
    for name, copy in (
        ("transfer_kv_direct", by_slots),
        ("transfer_kv_all_layer_direct_lf_pf", to_pages),
        ("transfer_kv_per_layer_direct_pf_lf", from_pages),
    ):
        if getattr(module, name, None) is None:
            setattr(module, name, copy)
    for value in list(vars(module).values()):
        if isinstance(value, type) and value.__module__ == module.__name__ and "__init__" in vars(value):
            value.__init__ = never_pins(value.__init__)


def never_pins(init):
    import inspect

    takes_it = "pin_memory" in inspect.signature(init).parameters

    def without(pool, *arguments, **named):
        if takes_it:
            named["pin_memory"] = False
        init(pool, *arguments, **named)

    return without


def small(module):
    """The tests' pools have some MB, and SGLang wants 10 GB left beside them."""
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def attention(module):
    """SGLang's attention of a CPU writes the KV of layers with a window where their pool has it, and reads it by the slots of the
    other layers' pool."""
    backend = module.TorchNativeAttnBackend
    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, by_own_slots(getattr(backend, name)))


def by_own_slots(run):
    def translated(backend, query, output, k, v, slots, requests, lengths, *rest, sliding_window_size=None, **named):
        if backend.use_sliding_window_kv_pool and (sliding_window_size or -1) > -1:
            rows = slots[requests, : int(lengths.max())].long()
            slots = backend.token_to_kv_pool.translate_loc_from_full_to_swa(rows)
            requests = range(len(rows))
        named["sliding_window_size"] = sliding_window_size
        return run(backend, query, output, k, v, slots, requests, lengths, *rest, **named)

    return translated


CHANGES = {
    "sglang.srt.layers.attention.torch_native_backend": attention,
    "sglang.srt.mem_cache.pool_host.base": small,
    "sglang.srt.mem_cache.pool_host.common": common,
    **dict.fromkeys((f"sglang.srt.mem_cache.pool_host.{name}" for name in ("mha", "mla", "mamba", "dsa")), host_pool),
}


class Finder(importlib.abc.MetaPathFinder):
    """Changes these modules when they are imported."""

    def find_spec(self, name, path, target=None):
        if name not in CHANGES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        run = spec.loader.exec_module

        def run_and_change(module):
            run(module)
            CHANGES[name](module)

        spec.loader.exec_module = run_and_change
        return spec


sys.meta_path.insert(0, Finder())
