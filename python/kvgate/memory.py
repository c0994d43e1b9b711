"""Describes the KV of a call to the native side, by the meaning of its axes: numpy arrays, torch tensors on the CPU, and whatever
shares its memory by `__array_interface__` or DLPack. Nothing is copied, and neither numpy nor torch is imported for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeAlias

from kvgate._native import KvGateError
from kvgate.tensors import describe


class HasArrayInterface(Protocol):
    """Such as a numpy array."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class HasDLPack(Protocol):
    """Such as a torch tensor."""

    def __dlpack__(self) -> Any: ...
    def __dlpack_device__(self) -> Any: ...


KV: TypeAlias = "HasArrayInterface | HasDLPack | Sequence[HasArrayInterface | HasDLPack]"
"""One array with all layers, or one for each layer. See `Gateway.load_into` for its shape."""

AXES = {2: "SC", 3: "BNC", 4: "KSHD", 5: "KBNHD"}
"""Of one layer, by the number of its dimensions."""


def tensors_of(kv: KV, axes: str | None, writable: bool) -> tuple[list[dict[str, Any]], list[object]]:
    """As the native side takes them, and what must be kept for as long as it does. Raises KvGateError where it is no memory of
    this process, or must be written and can't."""
    held: list[object] = [kv]
    if isinstance(kv, (list, tuple)):
        return [tensor_of(layer, axes, [plane], writable, held) for plane, layer in enumerate(kv)], held
    return [tensor_of(kv, axes, None, writable, held)], held


def tensor_of(
    array: Any, axes: str | None, planes: list[int] | None, writable: bool, held: list[object]
) -> dict[str, Any]:
    """`planes`: its layers' places in the space; None: its axis L has all of them, in their order."""
    if hasattr(array, "data_ptr"):
        if array.device.type != "cpu":
            raise KvGateError(
                f"the tensor is on {array.device}: this API copies memory of the CPU. Give it a tensor that is there "
                "(tensor.cpu()), or use the connector of your engine, which copies on the device"
            )
        tensor = describe(array, "", 0)
    else:
        tensor = of_array_interface(array, writable, held)
    dimensions = len(tensor["shape"])
    if axes is None:
        of_layer = AXES.get(dimensions - (planes is None))
        if of_layer is None:
            raise KvGateError(
                f"kv has {dimensions} dimensions: say what they are, such as axes='LKSHD' (docs/PYTHON.md)"
            )
        axes = of_layer if planes else "L" + of_layer
    if planes is None:
        at = axes.find("L")
        planes = list(range(tensor["shape"][at])) if 0 <= at < dimensions else [0]
    return {**tensor, "axes": axes, "planes": planes}


def of_array_interface(array: Any, writable: bool, held: list[object]) -> dict[str, Any]:
    if not hasattr(array, "__array_interface__"):
        array = of_dlpack(array)
        held.append(array)
    interface = array.__array_interface__
    address, is_read_only = interface["data"]
    if is_read_only and writable:
        raise KvGateError("the array is read-only: give load_into one that can be written")
    if interface["typestr"][1] not in "biufcV":
        raise KvGateError(f"an array of {interface['typestr']} holds no KV: give one of numbers")
    size = int(interface["typestr"][2:])
    shape = list(interface["shape"])
    strides = list(interface.get("strides") or contiguous(shape, size))
    if min(strides, default=0) < 0:
        raise KvGateError("the array runs backwards along an axis: copy it (numpy.ascontiguousarray)")
    last = sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    return {
        "address": address,
        "bytes": last + size if all(shape) else 0,
        "shape": shape,
        "strides": strides,
        "element_bytes": size,
    }


def of_dlpack(array: Any) -> Any:
    """A numpy array of the same memory."""
    if not hasattr(array, "__dlpack__"):
        raise KvGateError(
            f"a {type(array).__name__} shares no memory: give a numpy array, a torch tensor, or anything with "
            "__array_interface__ or __dlpack__"
        )
    import numpy as np

    try:
        return np.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise KvGateError(f"numpy can't read this array by DLPack: {error}") from error


def contiguous(shape: list[int], size: int) -> list[int]:
    strides = []
    for count in reversed(shape):
        strides.append(size)
        size *= count
    return strides[::-1]
