"""Copies between the gateway's memory and tensors by torch's own calls, for devices that kvgate has no copies of its own for
(AMD's, Intel's, Gaudi). `kvgate._native` calls it with addresses and strides (src/engine/copy/framework.rs).

A load goes from the slot into a host buffer, pinned where torch can, then in one transfer to the device, and there by index into
the pages. A store is the same backwards. One copy at a time: the buffers are shared.

Each call of torch lets go of the interpreter, and where another thread never rests, as an engine's does that waits for a load
to end, it gets it back only after Python's switch interval: 5 ms. So that is shorter while a copy runs, and views are made once: a
plane of a whole chunk takes one call in a load and four in a store.
"""

import contextlib
import ctypes
import math
import sys
import threading
from typing import NamedTuple

import torch

WIDTHS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Rows are moved as they are, in the widest steps that fit."""
SWITCH_SECONDS = 1e-4
"""After so long a thread that computes lets a copy have the interpreter."""
COPYING = threading.Lock()
"""One copy at a time in a process: its interpreter has one switch interval."""


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
        self.host = self.there = torch.empty(0, dtype=torch.uint8)
        # Views of each part that was copied.
        self.made = {}

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
        # Not while others are held up: what the engine computes may wait for them.
        wait(after)
        with COPYING, quick_switches(), torch.inference_mode():
            host, there = self.buffers(length)
            host.copy_(memory(address, length))
            try:
                there.copy_(host, non_blocking=True)
                tokens, places = self.places(spans, sizes)
                for part in parts:
                    views = self.views(part, sizes)
                    views.pages[places] = some(views.there, tokens)
            finally:
                # After an error, too, nothing may be written once the load has ended.
                wait(self.mark())

    def store(self, address, length, parts, spans, sizes, after):
        wait(after)
        with COPYING, quick_switches(), torch.inference_mode():
            host, there = self.buffers(length)
            tokens, places = self.places(spans, sizes)
            for part in parts:
                views = self.views(part, sizes)
                put(views.there, tokens, views.pages[places])
            host.copy_(there)
            wait(self.mark())
            # The slot's other bytes are other ranks'.
            slot, own = memory(address, length), None if tokens is None else tokens.cpu()
            slots = {width: numbers(slot, width) for width in {self.views(part, sizes).width for part in parts}}
            for part in parts:
                views = self.views(part, sizes)
                put(rows_of(part, slots[views.width], sizes, views.width), own, some(views.host, own))

    def buffers(self, length):
        """On the host and on the device, as long as the slot."""
        if len(self.host) < length:
            # Neither, where there is no memory for one.
            self.host, self.there = pinned(length), torch.empty(length, dtype=torch.uint8, device=self.device)
            self.made.clear()
        return self.host[:length], self.there[:length]

    def places(self, spans, sizes):
        """The chunk's tokens, None for all of them; and of each its block and its row in the block."""
        rows = [(token + at, block, offset + at) for token, tokens, block, offset in spans for at in range(tokens)]
        tokens, *places = torch.tensor(rows, dtype=torch.int64).reshape(-1, 3).t().contiguous().to(self.device)
        return None if [row[0] for row in rows] == list(range(sizes[0])) else tokens, tuple(places)

    def views(self, part, sizes):
        made = self.made.get((part, sizes))
        if made is None:
            made = self.made[part, sizes] = self.make(part, sizes)
        return made

    def make(self, part, sizes):
        (offset, row, of_head, heads, run), (address, *strides) = part
        _, blocks, block_tokens = sizes
        base = max(start for start in self.storages if start <= address)
        width = math.gcd(8, address - base, run, offset, row, of_head, *strides)
        pages, shape = numbers(self.storages[base], width), (blocks, block_tokens, heads, run // width)
        return Views(
            width,
            strided(pages, width, shape, strides, address - base),
            *(rows_of(part, numbers(buffer, width), sizes, width) for buffer in (self.there, self.host)),
        )


class Views(NamedTuple):
    """Of one part, as numbers of `width` bytes: the pages as [block, token, head, number], and its rows in each buffer as
    [token, head, number]."""

    width: int
    pages: torch.Tensor
    there: torch.Tensor
    host: torch.Tensor


@contextlib.contextmanager
def quick_switches():
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def some(rows, tokens):
    return rows if tokens is None else rows[tokens]


def put(to, tokens, rows):
    if tokens is None:
        to.copy_(rows)
    else:
        to[tokens] = rows


def numbers(bytes_, width):
    return bytes_[: len(bytes_) // width * width].view(WIDTHS[width])


def rows_of(part, numbers, sizes, width):
    """An object's rows of a part, as [token, head, number]."""
    (offset, row, of_head, heads, run), _ = part
    return strided(numbers, width, (sizes[0], heads, run // width), (row, of_head), offset)


def strided(numbers, width, shape, strides, offset):
    """A view of numbers of `width` bytes; the innermost ones are side by side."""
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
