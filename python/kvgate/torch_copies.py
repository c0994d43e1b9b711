"""Copies between the gateway's memory and tensors by torch's own calls, for devices that kvgate has no copies of its own for
(AMD's, Intel's, Gaudi). `kvgate._native` calls it with addresses and strides (src/engine/copy/framework.rs).

A load goes from the slot into a host buffer, pinned where torch can, then in one transfer to the device, and there by index into
the pages. A store is the same backwards. One copy at a time: the buffers are shared.
"""

import ctypes
import math
import threading

import torch

WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Rows are moved as they are, in the widest steps that fit."""


def are_needed(device):
    """Whether kvgate has no copies of its own for tensors on this device. ROCm's devices are called cuda, too."""
    return device.type != "cpu" and (device.type != "cuda" or torch.version.hip is not None)


class TorchCopies:
    def __init__(self, tensors):
        """`tensors`: all KV of the rank."""
        self.device = tensors[0].device
        # Bytes of each allocation, by its address.
        self.storages = {}
        for tensor in tensors:
            storage = tensor.untyped_storage()
            everything = tensor.view(torch.uint8).as_strided((storage.nbytes(),), (1,), 0)
            self.storages[storage.data_ptr()] = everything
        self.lock = threading.Lock()
        self.host = self.there = torch.empty(0, dtype=torch.uint8)

    def mark(self):
        """The work that this thread's stream was given so far. None: a CPU, which is done with it."""
        if self.device.type == "cpu":
            return None
        event = torch.Event(device=self.device)
        event.record()
        return event

    # `parts`: of each plane (offset, bytes of a row, bytes of a head, heads, bytes of a run) in the object, and (address, strides of
    # block, token and head) in the pages. `spans`: (token, tokens, block, token in the block). `sizes`: rows of a chunk, blocks,
    # tokens of a block.

    def load(self, address, length, parts, spans, sizes, after):
        with self.lock, torch.inference_mode():
            wait(after)
            host, there = self.buffers(length)
            host.copy_(memory(address, length))
            try:
                there.copy_(host, non_blocking=True)
                tokens, *places = self.places(spans)
                for part in parts:
                    pages, rows = self.views(part, there, sizes)
                    pages[tuple(places)] = rows[:, tokens].transpose(0, 1)
            finally:
                # After an error, too, nothing may be written once the load has ended.
                wait(self.mark())

    def store(self, address, length, parts, spans, sizes, after):
        with self.lock, torch.inference_mode():
            wait(after)
            host, there = self.buffers(length)
            tokens, *places = self.places(spans)
            for part in parts:
                pages, rows = self.views(part, there, sizes)
                rows[:, tokens] = pages[tuple(places)].transpose(0, 1)
            host.copy_(there)
            wait(self.mark())
            # The slot's other bytes are other ranks'.
            slot, own = memory(address, length), tokens.cpu()
            for part in parts:
                to, stored = in_object(part, slot, sizes, 1), in_object(part, host, sizes, 1)
                if len(own) == sizes[0]:
                    to.copy_(stored)
                else:
                    to[:, own] = stored[:, own]

    def buffers(self, length):
        """On the host and on the device, as long as the slot."""
        if len(self.host) < length:
            # Neither, where there is no memory for one.
            self.host, self.there = pinned(length), torch.empty(length, dtype=torch.uint8, device=self.device)
        return self.host[:length], self.there[:length]

    def places(self, spans):
        """Of each token its row in the chunk, its block and its row in the block."""
        rows = [(token + at, block, offset + at) for token, tokens, block, offset in spans for at in range(tokens)]
        return torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).t().contiguous().to(self.device)

    def views(self, part, there, sizes):
        """The pages as [block, token, head, element], and the object's rows as [head, token, element]."""
        (offset, row, of_head, heads, run), (address, *strides) = part
        _, blocks, block_tokens = sizes
        base = max(start for start in self.storages if start <= address)
        width = math.gcd(8, address - base, run, offset, row, of_head, *strides)
        shape = (blocks, block_tokens, heads, run // width)
        pages = strided(self.storages[base], width, shape, strides, address - base)
        return pages, in_object(part, there, sizes, width)


def in_object(part, bytes_, sizes, width):
    (offset, row, of_head, heads, run), _ = part
    return strided(bytes_, width, (heads, sizes[0], run // width), (of_head, row), offset)


def strided(bytes_, width, shape, strides, offset):
    """A view of bytes as numbers of `width` bytes; the innermost ones are side by side."""
    numbers = bytes_[: len(bytes_) // width * width].view(WIDTHS[width])
    first = numbers.storage_offset() + offset // width
    return numbers.as_strided(shape, [*(stride // width for stride in strides), 1], first)


def memory(address, length):
    """The gateway's memory, which is mapped for as long as the call."""
    return torch.frombuffer((ctypes.c_uint8 * length).from_address(address), dtype=torch.uint8)


def pinned(length):
    try:
        return torch.empty(length, dtype=torch.uint8, pin_memory=True)
    except (RuntimeError, NotImplementedError):
        # The device has no such memory: its copies take longer.
        return torch.empty(length, dtype=torch.uint8)


def wait(event):
    if event is not None:
        event.synchronize()
