from collections.abc import Sequence

class KvGateError(Exception):
    """The gateway can't be reached or refuses, or what was given can't be."""

def version() -> str: ...
def main(arguments: list[str]) -> int:
    """Runs the command line; answers its exit status."""

class Space:
    """What must be equal for two chunks to be interchangeable, from its JSON (docs/FORMAT.md section 1)."""

    def __init__(self, json: str) -> None: ...
    @property
    def id(self) -> str: ...
    @property
    def chunk_tokens(self) -> int: ...
    @property
    def canonical_json(self) -> str: ...

class Prompt:
    """The chunk hashes of one prompt, which may grow. They are made when they are asked for."""

    def __init__(
        self, space: Space, salt: bytes | None = None, adapter: bytes | None = None, secret: bytes | None = None
    ) -> None: ...
    def extend(self, tokens: bytes | Sequence[int], extras: Sequence[tuple[int, bytes]] = ()) -> int:
        """`tokens`: their numbers, or quicker, their bytes: 4 each, in the machine's order. Takes tokens that follow those it has, with extras at positions in the whole prompt; how many chunks are full now."""

    def __len__(self) -> int:
        """Full chunks."""

    def hashes(self, first: int, end: int) -> bytes:
        """32 bytes for each of these chunks."""

    def parent(self, chunk: int) -> bytes:
        """The hash of the chunk before, or the root."""

class Copier:
    """Copies between a chunk's payload and pages, for checks."""

    def __init__(self, settings: str, space: Space) -> None:
        """`settings`: JSON with `tensors`, described by their axes, and `device` (a GPU's number, or null)."""

    def load(self, payload: bytes, slots: Sequence[int], stream: int | None = None) -> None:
        """Writes a payload's tokens to these slots (`block * block tokens + token`); it is done when this returns."""

    def store(self, slots: Sequence[int], stream: int | None = None) -> bytes:
        """The payload of the tokens in these slots."""

class Lookups:
    """Lookups of waiting requests, for a scheduler that never waits."""

    def __init__(
        self,
        socket: str,
        space: Space,
        deadline_ms: int = 50,
        pin_ms: int = 30000,
        breaker_timeouts: int = 3,
        breaker_pause_ms: int = 10000,
        again_ms: int = 5000,
        patience_ms: int = 10000,
        at_once: int = 256,
        socket_owner: int | None = None,
    ) -> None: ...
    def ask(self, request: str, prompt: Prompt) -> None:
        """Hashes the prompt and asks which of its chunks are there, in the background, until `patience_ms`. Takes the place of what the request has asked before."""

    def is_old(self, request: str) -> bool:
        """Whether to ask again although nobody waits for it: its answer is older than `again_ms`, or outdated."""

    def is_due(self, request: str) -> bool:
        """Whether to ask: the request has no question, or its answer is outdated, or the pins of what it found are gone. An
        answer that was waited for counts once, however old it is by then."""

    def answer(self, request: str) -> int | None:
        """Chunks of the leading run that are there; None while nobody knows, until `deadline_ms` after the first of these
        calls. Then it is what is known so far: of this question, or of the one before while its pins hold. An answer from
        before that is not outdated counts at once. After an error: 0."""

    def tiers(self, request: str) -> bytes:
        """Where each chunk of the answer is: `m` in the node's memory, `d` on its disks, `s` on S3."""

    def outcome(self, request: str) -> str | None:
        """Of its question: `answered`, `late` (not within `deadline_ms`), `failed`, or `paused` (not asked, after time-outs);
        None while it goes on."""

    def told(self) -> tuple[list[float], bool]:
        """Seconds of the questions that were answered since the last call, and whether the gateway is left alone now."""

    def outdate(self, request: str) -> None:
        """There may be more than its question could find."""

    def forget(self, request: str) -> None:
        """And ends its question."""

class Loaded:
    """A load that has ended."""

    job: str
    missing: list[int]
    """Chunks that are not in their pages."""
    bytes: int
    """Of all its tokens, of this rank."""
    seconds: float
    error: str | None
    """Why the first of them is missing."""

class Stored:
    """A store that has ended."""

    job: str
    there: list[int]
    """Chunks that the gateway has, or gets from another rank."""
    stored: int
    """Chunks that this rank handed over."""
    refused: int
    """Chunks for which the gateway had no room."""
    bytes: int
    seconds: float
    error: str | None

class Worker:
    """One rank: moves chunks between the node and the engine's pages, on threads of its own."""

    def __init__(self, settings: str, space: Space) -> None:
        """`settings`: JSON with socket, attach, tensors, device, and the time limits."""

    def load(
        self,
        job: str,
        hashes: bytes,
        first_token: int,
        tokens: tuple[int, int],
        block_table: Sequence[int],
        stream: int | None = None,
        by_layer: bool = False,
    ) -> None:
        """Begins to load chunks into blocks. `first_token`: of the first chunk, in the block table's tokens; `tokens`: those
        that are to be written, likewise, half-open; `stream`: of CUDA, whose work so far comes first."""

    def wait_layer(self, plane: int) -> None:
        """Until this plane of all loads by layer is in its pages, or known not to come."""

    def wait_layers(self) -> None:
        """Until all loads by layer have ended."""

    def store(
        self,
        job: str,
        hashes: bytes,
        parent: bytes,
        first_token: int,
        block_table: Sequence[int],
        stream: int | None = None,
    ) -> None:
        """Begins to store chunks out of blocks."""

    def is_attached(self) -> bool | None:
        """Whether there is a session with the gateway; None: one is being made. It is made by the first load or store."""

    def loaded(self) -> list[Loaded]:
        """Loads that have ended since the last call."""

    def stored(self) -> list[Stored]:
        """Stores that have ended since the last call."""

    def freed(self) -> list[str]:
        """Stores that need their blocks no more, since the last call; they end later."""

    def take_back(self, jobs: Sequence[str]) -> None:
        """The blocks of these stores are the engine's when this returns: what is not being copied yet never will be."""

    def close(self) -> None:
        """Until no job is under way: the engine's memory may go after this. What is not copied yet never is."""
