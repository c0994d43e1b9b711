"""python -m kvgate.torch_check [--device cuda:0] [--copies torch] [--json]

Copies into and out of pages that PyTorch has allocated, as engines do, and compares the result with that of PyTorch's own
indexing. Prints a line for each layout. Exit status 1 if any byte is wrong.
"""

import argparse
import json
import sys

import torch

from kvgate import Copier, Space
from kvgate.tensors import describe
from kvgate.torch_copies import TorchCopies, are_needed

COPIES = ("auto", "torch")
LAYERS, HEADS, HEAD_DIM = 3, 4, 64
CHUNK_TOKENS, BLOCKS, BLOCK_TOKENS = 64, 9, 16

# Axes of one layer's tensor as an engine shows it, and their order in memory.
LAYOUTS = {
    "vllm LBHNC": ("BHNC", "BHNC"),
    "vllm LBNHC": ("BHNC", "BNHC"),
    "vllm LHBNC": ("BHNC", "HBNC"),
    "vllm before 0.32, 2BNHD": ("KBNHD", "KBNHD"),
    "vllm before 0.32, 2BHND": ("KBNHD", "KBHND"),
    "flashinfer NHD": ("BKNHD", "BKNHD"),
    "flashinfer HND": ("BKHND", "BKHND"),
    "mla": ("BNC", "BNC"),
}


def main():
    parser = argparse.ArgumentParser(prog="python -m kvgate.torch_check", description=__doc__)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--copies", choices=COPIES, default="auto", help="torch: torch's own calls on any device")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    by_torch = arguments.copies == "torch" or are_needed(device)
    results = {name: check(device, by_torch, *axes) for name, axes in LAYOUTS.items()}
    if arguments.json:
        by = "torch" if by_torch else "kvgate"
        print(json.dumps({"device": str(device), "torch": torch.__version__, "copies": by, "right": results}))
    else:
        print(f"{device}, copies by {'torch' if by_torch else 'kvgate'}")
        for name, right in results.items():
            print(f"{name:<26} {'right' if right else 'WRONG'}")
    sys.exit(0 if all(results.values()) else 1)


def check(device, by_torch, axes, order):
    """Whether a load and a store move exactly the right bytes."""
    generator = torch.Generator().manual_seed(1)
    heads = HEADS if "H" in axes else 1
    elements = HEAD_DIM if "D" in axes else 2 * HEAD_DIM
    layers = [new_tensor(device, axes, order, elements) for _ in range(LAYERS)]
    space = Space(
        json.dumps(
            {
                "model": "kvgate/torch-check",
                "revision": "1",
                "dtype": "bfloat16",
                "chunk_tokens": CHUNK_TOKENS,
                "planes": [
                    {"name": "kv", "layer": layer, "heads": heads, "row_bytes": 4 * HEAD_DIM} for layer in range(LAYERS)
                ],
            }
        )
    )
    tensors = [describe(tensor, axes, plane) for plane, tensor in enumerate(layers)]
    number = device.index or 0 if device.type == "cuda" and not by_torch else None
    copies = TorchCopies(layers) if by_torch else None
    copier = Copier(json.dumps({"tensors": tensors, "device": number}), space, copies)
    slots = torch.randperm(BLOCKS * BLOCK_TOKENS, generator=generator)[:CHUNK_TOKENS]
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None

    # [layer][head][token][K then V]
    shape = (LAYERS, heads, CHUNK_TOKENS, 2 * HEAD_DIM)
    payload = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
    expected = [tensor.clone() for tensor in layers]
    for tensor, rows in zip(expected, payload, strict=True):
        rows_of(tensor, axes)[:, slots] = rows.to(device)
    copier.load(payload.numpy().tobytes(), slots.tolist(), stream)
    right = all(torch.equal(got, must) for got, must in zip(layers, expected, strict=True))

    for tensor in layers:
        tensor.copy_(torch.randint(-(2**15), 2**15, tensor.shape, generator=generator, dtype=torch.int16).to(device))
    stored = torch.frombuffer(bytearray(copier.store(slots.tolist(), stream)), dtype=torch.int16).view(shape)
    must = torch.stack([rows_of(tensor, axes)[:, slots] for tensor in layers]).cpu()
    return right and torch.equal(stored, must)


def new_tensor(device, axes, order, elements):
    """A tensor full of a poison value, with its axes as the engine shows them."""
    sizes = {"K": 2, "B": BLOCKS, "N": BLOCK_TOKENS, "H": HEADS, "C": elements, "D": elements}
    tensor = torch.full([sizes[axis] for axis in order], -12851, dtype=torch.int16, device=device)
    return tensor.permute([order.index(axis) for axis in axes])


class rows_of:  # noqa: N801
    """A layer's rows by head and slot, for any order of its axes. PyTorch's own indexing reads and writes them."""

    def __init__(self, tensor, axes):
        self.tensor, self.axes = tensor, axes

    def view(self):
        """[head][block][token][row], without a copy where K and V are together."""
        tensor, axes = self.tensor, self.axes
        if "H" not in axes:
            tensor, axes = tensor.unsqueeze(0), "H" + axes
        last = "C" if "C" in axes else "D"
        order = ("K" if "K" in axes else "") + "HBN" + last
        return tensor.permute([axes.index(axis) for axis in order])

    def __getitem__(self, key):
        _, slots = key
        view, at = self.view(), (slots // BLOCK_TOKENS, slots % BLOCK_TOKENS)
        if "K" in self.axes:
            return torch.cat([view[0][:, at[0], at[1]], view[1][:, at[0], at[1]]], dim=-1)
        return view[:, at[0], at[1]]

    def __setitem__(self, key, rows):
        _, slots = key
        view, at = self.view(), (slots // BLOCK_TOKENS, slots % BLOCK_TOKENS)
        if "K" in self.axes:
            view[0][:, at[0], at[1]] = rows[..., :HEAD_DIM]
            view[1][:, at[0], at[1]] = rows[..., HEAD_DIM:]
        else:
            view[:, at[0], at[1]] = rows


if __name__ == "__main__":
    main()
