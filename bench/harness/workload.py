"""The objects that everyone reads: as many as are told, each of the same size, none like another."""

import os
import random
from dataclasses import dataclass
from pathlib import Path

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
UNITS = {"KiB": KIB, "MiB": MIB, "GiB": GIB}

# LMCache only speaks virtual-host style, and radosgw takes a host name that it does not know for the bucket's. So with
# a bucket of this name it is reached without any DNS, and everyone else, who says 127.0.0.1, finds it in the path.
BUCKET = "localhost"
# The start of the peers' objects' names; kvgate writes its own objects.
PREFIX = "obj-"
KVGATE_PREFIX = "kvgate-bench"


def parse_size(text: str) -> int:
    """16MiB as a number of bytes."""
    for unit, factor in UNITS.items():
        if text.endswith(unit):
            return int(text.removesuffix(unit)) * factor
    return int(text)


def show_size(size: int) -> str:
    """A number of bytes as people write it, in a unit that divides it."""
    for unit, factor in reversed(UNITS.items()):
        if size % factor == 0:
            return f"{size // factor}{unit}"
    return str(size)


@dataclass(frozen=True)
class Workload:
    """How many objects, how large, and how much of it at a time."""

    objects: int
    object_size: int
    in_flight: int
    # Of HEADs and lookups in one sample.
    heads: int
    # Of a PUT; as many as make up the same bytes.
    put_size: int

    @property
    def bytes(self) -> int:
        return self.objects * self.object_size

    def names(self) -> list[str]:
        return [f"{PREFIX}{i:05}" for i in range(self.objects)]

    def write(self, folder: Path) -> None:
        """Makes the objects' files. Every MiB begins with the object's number and its own, so that readers can check."""
        filler = random.Random(1).randbytes(MIB)
        for i, name in enumerate(self.names()):
            with open(folder / name, "wb") as file:
                for mib in range(-(-self.object_size // MIB)):
                    length = min(MIB, self.object_size - mib * MIB)
                    file.write(((i << 32 | mib).to_bytes(8, "little") + filler[8:])[:length])

    def link(self, folder: Path, target: Path, other_names: list[str]) -> None:
        """The same objects under other names, for who can't choose its keys."""
        target.mkdir(exist_ok=True)
        for name, other in zip(self.names(), other_names, strict=True):
            if not (target / other).exists():
                os.link(folder / name, target / other)
