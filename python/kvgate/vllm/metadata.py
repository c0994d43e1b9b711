"""What the scheduler tells the workers for a step, and what they tell it after one."""

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclasses.dataclass
class Load:
    """Chunks of a request into its blocks."""

    job: str
    request: str
    hashes: bytes
    first_chunk: int
    """In the prompt."""
    tokens: tuple[int, int]
    """Those that are to be written, half-open, from the first chunk's first."""
    block_table: list[int]
    """From the first chunk's first block."""


@dataclasses.dataclass
class Store:
    """Chunks of a request out of its blocks, once the step has computed them."""

    job: str
    request: str
    hashes: bytes
    parent: bytes
    block_table: list[int]
    """The chunks' blocks."""


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):
    loads: list[Load] = dataclasses.field(default_factory=list)
    stores: list[Store] = dataclasses.field(default_factory=list)
    taken_back: set[str] = dataclasses.field(default_factory=set)
    """Requests whose blocks vLLM has, or wants, back at once: what is not being copied out of them never will be."""
    finished: set[str] = dataclasses.field(default_factory=set)
    """Requests whose blocks stay until the worker has said that they are free."""
    loads_within: int | None = None
    """The step's number where something is loaded within it, which the workers tell back with what failed."""
    lost: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Loads that vLLM counts on and that never begin, by request: their blocks."""
    is_all_taken_back: bool = False
    """Of all requests."""


@dataclasses.dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Jobs that have ended, and how many ranks say so."""

    loaded: dict[str, tuple[int, float]] = dataclasses.field(default_factory=dict)
    """With the seconds that the slowest took."""
    stored: dict[str, tuple[int, set[int]]] = dataclasses.field(default_factory=dict)
    """With the chunks that are there for all of them."""
    freed: dict[str, int] = dataclasses.field(default_factory=dict)
    """Stores that need their blocks no more; they end later."""
    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    """Those with loads within them, of which all that failed is known."""
    is_off: bool = False
    """One of these ranks moves nothing any more."""

    def aggregate(self, other):
        self.is_off |= other.is_off
        for job, (ranks, seconds) in other.loaded.items():
            before, slowest = self.loaded.get(job, (0, 0.0))
            self.loaded[job] = (before + ranks, max(slowest, seconds))
        for job, (ranks, there) in other.stored.items():
            before, all_there = self.stored.get(job, (0, there))
            self.stored[job] = (before + ranks, all_there & there)
        for own, others in ((self.freed, other.freed), (self.steps, other.steps)):
            for name, ranks in others.items():
                own[name] = own.get(name, 0) + ranks
        return self

    def __bool__(self):
        return bool(self.loaded or self.stored or self.freed or self.steps or self.is_off)


def request_of(job):
    return job.rpartition("#")[0]
