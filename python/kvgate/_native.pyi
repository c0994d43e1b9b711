from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T", covariant=True)

Sizes = tuple[int, ...]

class TorchCopies(Protocol):
    """`kvgate.torch_copies.TorchCopies`: copies on devices that kvgate has no copies of its own for. They are done when the calls
    return. Called on threads of the native side."""

    def mark(self) -> object: ...
    def load(
        self,
        address: int,
        length: int,
        parts: list[tuple[Sizes, Sizes]],
        spans: list[Sizes],
        sizes: Sizes,
        after: object,
    ) -> None: ...
    def store(
        self,
        address: int,
        length: int,
        parts: list[tuple[Sizes, Sizes]],
        spans: list[Sizes],
        sizes: Sizes,
        after: object,
    ) -> None: ...

class KvGateError(Exception):
    """The gateway can't be reached or refuses, or an argument is impossible."""

class PanicException(BaseException):
    """A bug of the extension. `except Exception` does not catch it."""

def version() -> str: ...
def main(arguments: list[str]) -> int:
    """Runs the command line. Returns its exit status."""

class Space:
    """One kind of KV of a model: what must be equal for two chunks to be interchangeable, from its JSON (docs/FORMAT.md
    section 1)."""

    def __init__(self, json: str, secret: bytes | None = None) -> None:
        """`secret`: the tenant's, 32 bytes, which keys the hashes of its chunks."""

    def another(self, json: str) -> Space:
        """Another space of the same tenant."""

    @property
    def id(self) -> str: ...
    @property
    def model_id(self) -> str:
        """The same for all kinds of a model: chunk hashes are made with it."""

    @property
    def kind(self) -> str | dict[str, int]:
        """`"full"`, `{"window": W}`, `{"chunked": C}` or `"state"`."""

    @property
    def draft(self) -> str:
        """The draft model's identity; empty for the model's own layers."""

    @property
    def chunk_tokens(self) -> int: ...
    @property
    def canonical_json(self) -> str: ...

class Prompt:
    """The chunk hashes of one prompt, which may grow. They are computed at the first call that needs them."""

    def __init__(
        self, space: Space, salt: bytes | None = None, adapter: bytes | None = None, secret: bytes | None = None
    ) -> None: ...
    def fits(self, space: Space) -> bool:
        """Whether its hashes are those of this space's chunks: a space of the same model, with chunks of the same size."""

    def extend(self, tokens: bytes | Sequence[int], extras: Sequence[tuple[int, bytes]] = ()) -> int:
        """Appends tokens, with extras at positions in the whole prompt. Returns the number of full chunks.

        `tokens`: numbers, or quicker, bytes: 4 for each token, in the machine's order.
        """

    def __len__(self) -> int:
        """The number of full chunks."""

    def hashes(self, first: int, end: int) -> bytes:
        """The hashes of these chunks, 32 bytes each."""

    def parent(self, chunk: int) -> bytes:
        """The hash of the chunk before, or the root."""

class Copier:
    """Copies between a chunk's payload and pages, for checks."""

    def __init__(self, settings: str, space: Space, copies: TorchCopies | None = None) -> None:
        """`settings`: JSON with `tensors`, described by their axes, and `device` (a GPU's number, or null). `copies`: in place of
        kvgate's own."""

    def load(self, payload: bytes, slots: Sequence[int], stream: int | None = None) -> None:
        """Writes a payload's tokens to these slots (`block * block tokens + token`); it is done when this returns."""

    def store(self, slots: Sequence[int], stream: int | None = None) -> bytes:
        """The payload of the tokens in these slots."""

class Lookups:
    """The lookups of waiting requests, for a scheduler that never waits. All calls return at once."""

    def __init__(
        self,
        socket: str,
        spaces: Sequence[Space],
        drafts: Sequence[Space],
        deadline_ms: int = 50,
        pin_ms: int = 30000,
        breaker_timeouts: int = 3,
        breaker_pause_ms: int = 10000,
        again_ms: int = 5000,
        patience_ms: int = 10000,
        at_once: int = 256,
        socket_owner: int | None = None,
        state_every: int = 0,
        lookahead: int = 0,
    ) -> None:
        """`spaces`: the kinds of KV that the engine can't go on without; `drafts`: those of a draft model. `state_every`: chunks
        between the snapshots that writers keep of a state. `lookahead`: chunks of the full kinds that must be there beyond
        the boundary."""

    def ask(self, request: str, prompt: Prompt, most: int, traceparent: str | None = None) -> None:
        """Hashes the prompt and asks which of its first `most` chunks are there, in the background, until `patience_ms`. The
        question takes the place of the request's earlier one. `traceparent`: the trace that it is a part of, as W3C has it."""

    def is_old(self, request: str) -> bool:
        """Whether to ask again although the request only waits in the queue: its answer is older than `again_ms`, or outdated."""

    def is_due(self, request: str) -> bool:
        """Whether to ask: the request has no question, or its answer is outdated, or its pins are gone. An answer that the
        request waited for counts once, at any age."""

    def answer(self, request: str) -> int | None:
        """The boundary: leading chunks after which the engine can go on, since every kind has what it needs there. None while
        the answer is open, until `deadline_ms` after the first of these calls. Then it is what is known so far: of this
        question, or of the one before while its pins hold. An answer from before that is not outdated counts at once. After
        an error: 0."""

    def full(self, request: str) -> int:
        """Leading chunks that all full kinds have, of the same answer; at least the boundary. 0 without an answer."""

    def tiers(self, request: str) -> bytes:
        """The tier of each chunk up to the boundary, in the first full kind: `m` the node's memory, `d` its disks, `s` S3."""

    def outcome(self, request: str) -> str | None:
        """The outcome of its question: `answered`, `late` (not within `deadline_ms`), `failed`, or `paused` (not asked, after
        time-outs). None while it goes on."""

    def told(self) -> tuple[list[float], bool]:
        """The seconds of each question answered since the last call, and whether the gateway is left alone now."""

    def outdate(self, request: str) -> None:
        """Marks the answer as outdated: there may be more chunks by now."""

    def forget(self, request: str) -> None:
        """Forgets the request, and ends its question."""

class Follower:
    """What the node's memory and disks hold of an engine's chunks, for the engine's own KV events. All calls return at once."""

    def __init__(self, socket: str, space: Space, scheme: str, socket_owner: int | None = None) -> None:
        """`scheme`: engines with the same hash blocks alike, and understand each other's events."""

    def bind(
        self,
        hashes: bytes,
        parent: bytes | None,
        tokens: bytes,
        events: Sequence[str],
        block_size: int | None = None,
        lora_name: str = "",
        cache_salt: str = "",
    ) -> None:
        """Chunks of one prompt that follow each other, which the node has or is about to have. `hashes`: 32 bytes each;
        `parent`: the hash of the chunk before, None at the prompt's start; `tokens`: 4 bytes each, in the machine's order;
        `events`: what else to say of each chunk when it comes or leaves. `block_size`: tokens of a router's block."""

    def tell_anew(self) -> None:
        """Those that were told may have forgotten all: it is told anew, that it left at first."""

    def succeeded_by(self, scheme: str) -> Follower:
        """Another in the place of this one, which first tells that all that this one has told left."""

    def take(self, most: int) -> list[tuple[str, bool, bytes, str]]:
        """At most `most` chunks that came or left since the last call: tier (`memory`, `disk`), whether it came, tokens, event."""

class PageLookups:
    """Lookups of an engine's own pages, by hashes that it brings. All calls return at once."""

    def __init__(
        self,
        socket: str,
        spaces: Sequence[Space],
        deadline_ms: int = 50,
        pin_ms: int = 30000,
        breaker_timeouts: int = 3,
        breaker_pause_ms: int = 10000,
        at_once: int = 256,
        socket_owner: int | None = None,
    ) -> None:
        """`at_once`: questions under way; more wait, within their deadline."""

    def ask(self, number: int, space: int, hashes: bytes, is_chain: bool = False) -> None:
        """Asks in the background which pages are there, 32 bytes for each. `number`: the caller's name for the question.
        `is_chain`: the pages of a prompt in order, of which the end is looked for where the gateway does so."""

    def answers(self) -> list[tuple[int, bytes]]:
        """The questions answered since the last call, each with a byte for each page: 1 where it is there. A question that
        the gateway does not answer within `deadline_ms` is answered with zeros."""

class Loaded:
    """A load that has ended."""

    job: str
    missing: list[tuple[int, int]]
    """Chunks that are not in their pages, as (kind, index in the kind's chunks); those of drafts apart."""
    missing_drafts: int
    """Number of chunks of drafts that are not in their pages."""
    bytes: int
    """Of all its rows, of this rank."""
    seconds: float
    error: str | None
    """The reason why the first of them is missing."""

class Stored:
    """A store that has ended."""

    job: str
    there: list[tuple[int, int]]
    """Chunks that the gateway has, or gets from another rank, as (kind, index in the kind's chunks)."""
    stored: int
    """Chunks that this rank handed over."""
    refused: int
    """Chunks for which the gateway had no room."""
    bytes: int
    seconds: float
    error: str | None

class Worker:
    """One rank: moves chunks between the node and the engine's pages, on threads of its own. It has one session and one mapped
    arena for all kinds of KV."""

    def __init__(self, settings: str, spaces: Sequence[Space], copies: TorchCopies | None = None) -> None:
        """`settings`: JSON with socket, attach, kinds, device, and the time limits. `kinds`: for each space `groups`, the tensors
        of each group of layers that has block tables of its own (none where this rank has no layer of it), and `is_draft`.
        The `planes` of a tensor are indices in that space. `copies`: in place of kvgate's own."""

    def load(
        self,
        job: str,
        kinds: Sequence[tuple[int, bytes, Sequence[tuple[tuple[int, int], Sequence[int]]]]],
        stream: int | None = None,
        by_layer: bool = False,
        traceparent: str | None = None,
    ) -> None:
        """Begins to load chunks into blocks. `kinds`: (kind, hashes, tables), each kind once. Its hashes are of neighbouring
        chunks; there is a table for each of its groups: the rows to be written, half-open, counted from the first chunk's
        first row, and the blocks from that row on (any numbers where no row is written). A state has one row a chunk.
        `stream`: of CUDA, whose work so far comes first."""

    def wait_layer(self, kind: int, plane: int) -> None:
        """Until this plane of the kind, in all loads by layer, is in its pages, or known not to come."""

    def wait_layers(self) -> None:
        """Waits until all loads by layer have ended."""

    def store(
        self,
        job: str,
        kinds: Sequence[tuple[int, bytes, bytes, Sequence[Sequence[int]]]],
        stream: int | None = None,
        traceparent: str | None = None,
    ) -> None:
        """Begins to store chunks out of blocks. `kinds`: (kind, hashes, parents, tables), each kind once. Every chunk has a parent,
        so the chunks need not be neighbours; there is a table for each group: the blocks of chunk after chunk."""

    def is_attached(self) -> bool | None:
        """Whether there is a session with the gateway. None: one is being made. The first load or store makes it."""

    def loaded(self) -> list[Loaded]:
        """Loads that have ended since the last call."""

    def stored(self) -> list[Stored]:
        """Stores that have ended since the last call."""

    def freed(self) -> list[str]:
        """Stores that have stopped to need their blocks since the last call. They end later."""

    def take_back(self, jobs: Sequence[str]) -> None:
        """Gives the blocks of these stores back to the engine. Copies that have not begun are never made."""

    def close(self) -> None:
        """Waits until no job is under way. The engine's memory may go after this. Copies that have not begun are never made."""

class Call(Generic[T]):
    """A call of a `Session`. It is there before it begins, and for one call."""

    has_begun: bool

    def __init__(self, done: Callable[[], object]) -> None:
        """`done` must not wait. It is called when the call has ended."""

    def stop(self) -> None:
        """Ends a load or a store early. It has ended, as always, when its `done` was called."""

    def result(self) -> T:
        """The answer of an ended call. Raises its KvGateError."""

class Session:
    """The native side of `kvgate.Gateway`. Each call begins at once, on threads of its own, and keeps `held` until it has ended.
    Its answer is the `Call`'s."""

    def __init__(self, socket: str, socket_owner: int | None, patience_ms: int) -> None: ...
    def attach(self, call: Call[tuple[()]]) -> None: ...
    def lookup(
        self,
        space: Space,
        prompt: Prompt,
        deadline_ms: int,
        pin_ms: int,
        prefetch: bool,
        call: Call[tuple[int, bool, bytes]],
    ) -> None:
        """Leading chunks that are there, whether all could be told of, and the tier of each as in `Lookups.tiers`."""

    def load(
        self,
        space: Space,
        hashes: bytes,
        tensors: str,
        slots: Sequence[int] | None,
        deadline_ms: int,
        held: object,
        call: Call[tuple[int, str | None]],
    ) -> None:
        """Leading chunks that are in the tensors, and why no more. `tensors`: JSON, described by their axes."""

    def store(
        self,
        space: Space,
        hashes: bytes,
        root: bytes,
        tensors: str,
        slots: Sequence[int] | None,
        deadline_ms: int,
        held: object,
        call: Call[tuple[int, int, int, str | None]],
    ) -> None:
        """Leading chunks that are there, new ones, refused ones, and why others are not there. `root`: the first one's parent."""

    def flush(self, deadline_ms: int, call: Call[tuple[()]]) -> None: ...
    def close(self) -> None:
        """Ends the session once the calls under way have ended."""

class Moved:
    """The outcome of a load or a store of pages."""

    done: list[bool]
    """One for each page."""
    bytes: int
    """Those that were copied."""
    seconds: float
    error: str | None
    """The first reason why a page is not done."""

class Pages:
    """The host pools of a rank, for an engine that waits for its calls. A chunk is one page of a pool. Every call ends within a
    deadline, and copies nothing after its end."""

    def __init__(self, settings: str) -> None:
        """`settings`: JSON with socket, socket_owner, attach, and the limits."""

    def add(self, space: Space, tensors: str) -> int:
        """Adds a pool of host memory, one kind of KV. `tensors`: JSON, described by their axes. A block has as many tokens as a
        chunk. Returns its number."""

    def attach(self) -> None:
        """Attaches in the background, to each life of the gateway: a store needs all ranks."""

    def lookup(self, pools: Sequence[int], hashes: bytes) -> tuple[int, int]:
        """Leading pages after which an engine can go on, as each of these pools has what it needs there; and leading pages that
        all pools of full kinds have. Raises KvGateError where the gateway can't tell."""

    def load(self, pool: int, hashes: bytes, pages: Sequence[int], deadline_ms: int) -> Moved:
        """Copies chunks into pages of the pool, by their numbers. After the first that is missing none is loaded."""

    def store(self, pool: int, hashes: bytes, parents: bytes, pages: Sequence[int], deadline_ms: int) -> Moved:
        """Hands pages over. `parents`: the hash before each, or zeros. Waits for room in the gateway, unless another store
        has just waited in vain."""
