"""Describes a PyTorch tensor of KV for kvgate, by the meaning of its axes (src/engine/copy/tensor.rs)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def describe(
    tensor: Any, axes: str, plane: int, heads: Iterable[int] | None = None, row_offset: int = 0
) -> dict[str, Any]:
    """`axes`: a letter for each dimension. `plane`: its index in the space. `heads`: the heads that it has, half-open.
    `row_offset`: bytes of the row before it."""
    size, storage = tensor.element_size(), tensor.untyped_storage()
    return {
        "address": tensor.data_ptr(),
        "bytes": storage.nbytes() - (tensor.data_ptr() - storage.data_ptr()),
        "axes": axes,
        "shape": list(tensor.shape),
        "strides": [stride * size for stride in tensor.stride()],
        "element_bytes": size,
        "planes": [plane],
        **({"heads": list(heads)} if heads else {}),
        "row_offset": row_offset,
    }
