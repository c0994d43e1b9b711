"""What the scheduler tells the workers for a step, and what they tell it after one."""

import dataclasses

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata


@dataclasses.dataclass
class LoadPart:
    """Chunks of one kind of KV, into blocks of each of its groups."""

    kind: int
    hashes: bytes
    first_chunk: int
    """In the prompt."""
    tables: dict[int, tuple[tuple[int, int], list[int]]]
    """By group: the tokens that are to be written, half-open, from the first chunk's first, and the blocks from there on. Of a
    state its one block."""


@dataclasses.dataclass
class Load:
    """What a request needs of each kind to go on after some of its tokens."""

    job: str
    request: str
    parts: list[LoadPart]
    traceparent: str | None = None


@dataclasses.dataclass
class StorePart:
    """Computed chunks of one kind of KV."""

    kind: int
    chunks: list[int]
    """In the prompt."""
    hashes: bytes
    parents: bytes
    """Of each chunk the hash before it."""
    tables: dict[int, list[int]]
    """By group: the blocks of one chunk after the other."""


@dataclasses.dataclass
class Store:
    """Chunks of a request out of their blocks, once the step has computed them."""

    job: str
    request: str
    parts: list[StorePart]
    traceparent: str | None = None


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):
    loads: list[Load] = dataclasses.field(default_factory=list)
    stores: list[Store] = dataclasses.field(default_factory=list)
    taken_back: set[str] = dataclasses.field(default_factory=set)
    """Stores whose blocks vLLM wants back: what is not being copied out of them never will be."""
    loads_within: int | None = None
    """The step's number where something is loaded within it, which the workers tell back with what failed."""
    lost: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """Loads that were promised to vLLM and never begin, by request, with the blocks that they were for."""
    is_all_taken_back: bool = False
    """No store is copied any more."""


@dataclasses.dataclass
class WorkerReport(KVConnectorWorkerMetadata):
    """Ended jobs, from all ranks that have ended them."""

    loaded: dict[str, tuple[int, float, bool, bool]] = dataclasses.field(default_factory=dict)
    """Ranks, the seconds that the slowest took, and whether all of the model's own KV and all of its drafts' came to all of
    them."""
    stored: dict[str, tuple[int, set[tuple[int, int]]]] = dataclasses.field(default_factory=dict)
    """Ranks, and the chunks that are there for all of them: the kind, and the place among its chunks."""
    freed: dict[str, int] = dataclasses.field(default_factory=dict)
    """Stores that need their blocks no more; they end later."""
    steps: dict[int, int] = dataclasses.field(default_factory=dict)
    """Those with loads within them, of which all that failed is known."""
    is_off: bool = False
    """One of these ranks moves nothing any more."""

    def aggregate(self, other):
        self.is_off |= other.is_off
        for job, (ranks, seconds, is_whole, has_drafts) in other.loaded.items():
            before, slowest, was_whole, had_drafts = self.loaded.get(job, (0, 0.0, True, True))
            self.loaded[job] = (
                before + ranks,
                max(slowest, seconds),
                was_whole and is_whole,
                had_drafts and has_drafts,
            )
        for job, (ranks, there) in other.stored.items():
            before, all_there = self.stored.get(job, (0, there))
            self.stored[job] = (before + ranks, all_there & there)
        for own, others in ((self.freed, other.freed), (self.steps, other.steps)):
            for name, ranks in others.items():
                own[name] = own.get(name, 0) + ranks
        return self

    def __bool__(self):
        return bool(self.loaded or self.stored or self.freed or self.steps or self.is_off)


def traceparent_of(request):
    """The trace that the request is a part of. vLLM passes it on where it traces itself (--otlp-traces-endpoint)."""
    return (getattr(request, "trace_headers", None) or {}).get("traceparent")


def request_of(job):
    return job.rpartition("#")[0]
