"""The gateway for any Python program: which chunks of a prompt are there, into arrays and out of them.

`Gateway` waits, `AsyncGateway` is the same for asyncio. The calls run in native threads (src/engine/direct.rs), without the GIL;
each has ended when it returns, also after Ctrl-C or a cancellation.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import numbers
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Generic, Literal, TypeVar

from kvgate._native import Call, KvGateError, Prompt, Session, Space
from kvgate.memory import KV, tensors_of
from kvgate.settings import owner_or_default, socket_or_default

PATIENCE_SECONDS = 10.0
TIERS: dict[int, Literal["memory", "disk", "s3"]] = {ord("m"): "memory", ord("d"): "disk", ord("s"): "s3"}

Tokens = Sequence[int] | Prompt
"""Token ids, also of a numpy array or a torch tensor of one dimension; or a `Prompt`, which is hashed only once."""

T = TypeVar("T")
R = TypeVar("R")


def space(
    *,
    model: str,
    revision: str,
    dtype: str,
    layers: int,
    heads: int,
    head_dim: int,
    chunk_tokens: int = 256,
    tenant: str = "",
    protection: str = "none",
    secret: bytes | None = None,
    extra: Mapping[str, str] | None = None,
) -> Space:
    """The space of a model with full attention (MHA, GQA): what must be equal for two chunks to be interchangeable.

    `revision` pins the weights: a commit or a digest. `dtype`: of the KV, such as `"bfloat16"`. `heads`: KV heads. `extra`: all
    else that changes KV, such as RoPE scaling. `protection`, `secret`: of the tenant, see docs/KEYS.md. Other models:
    `Space(json)`, see docs/FORMAT.md section 1.

    Raises KvGateError with all that is wrong.
    """
    return Space(
        json.dumps(
            {
                "model": model,
                "revision": revision,
                "dtype": dtype,
                "chunk_tokens": chunk_tokens,
                "tenant": tenant,
                "protection": protection,
                "mha": {"layers": layers, "heads": heads, "head_dim": head_dim},
                "extra": dict(extra or {}),
            }
        ),
        secret,
    )


@dataclass(frozen=True)
class Hit:
    """The start of a prompt that the gateway has."""

    tokens: int
    """Leading tokens that can be loaded: whole chunks."""
    space: Space
    hashes: bytes
    """32 bytes for each chunk."""
    tiers: tuple[Literal["memory", "disk", "s3"], ...]
    """Where each chunk is."""
    complete: bool
    """False: the gateway could not tell of all chunks in time, and there may be more."""

    def first(self, tokens: int) -> Hit:
        """The hit's whole chunks within its first `tokens` tokens."""
        chunks = max(0, min(tokens, self.tokens)) // self.space.chunk_tokens
        return replace(
            self,
            tokens=chunks * self.space.chunk_tokens,
            hashes=self.hashes[: 32 * chunks],
            tiers=self.tiers[:chunks],
        )


@dataclass(frozen=True)
class Loaded:
    """The outcome of a load."""

    tokens: int
    """Leading tokens that are in the array now. Those after them are undefined: compute them."""
    reason: str | None
    """Why these are fewer than the hit's."""


@dataclass(frozen=True)
class Stored:
    """The outcome of a store."""

    tokens: int
    """Leading tokens that the gateway has now: whole chunks."""
    new_chunks: int
    """Chunks that it did not have before."""
    refused_chunks: int
    """Chunks for which it had no room in time. Store again later: chunks that are there cost nothing."""
    reason: str | None
    """Why others are not there."""


@dataclass(frozen=True)
class _Operation(Generic[R, T]):
    """A call: begins at once, and makes its result of the native one."""

    begin: Callable[[Call[R]], None]
    result: Callable[[R], T]


class _Operations:
    """What both gateways can do."""

    def __init__(
        self,
        socket: str | os.PathLike[str] | None = None,
        *,
        socket_owner: int | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        """`socket`: of `kvgate serve`; without it KVGATE__API__SOCKET, then /run/kvgate/kvgate.sock. `socket_owner`: a user id
        whose gateway is trusted, besides root's and one's own; without it KVGATE__API__SOCKET_OWNER. `patience`: seconds for
        an answer, beyond the deadline of its call."""
        self.socket = socket_or_default(os.fspath(socket or ""))
        self._session = Session(self.socket, owner_or_default(socket_owner or 0) or None, _ms("patience", patience))

    def _attach(self) -> _Operation[tuple[()], None]:
        return _Operation(self._session.attach, lambda _: None)

    def _lookup(
        self, space: Space, tokens: Tokens, salt: bytes, adapter: bytes, deadline: float, pin: float, prefetch: bool
    ) -> _Operation[tuple[int, bool, bytes], Hit]:
        prompt = _prompt(space, tokens, salt, adapter)
        deadline_ms, pin_ms = _ms("deadline", deadline), _ms("pin", pin)

        def result(answer: tuple[int, bool, bytes]) -> Hit:
            chunks, complete, tiers = answer
            return Hit(
                tokens=chunks * space.chunk_tokens,
                space=space,
                hashes=prompt.hashes(0, chunks),
                tiers=tuple(TIERS[tier] for tier in tiers),
                complete=complete,
            )

        return _Operation(
            lambda call: self._session.lookup(space, prompt, deadline_ms, pin_ms, prefetch, call),
            result,
        )

    def _load_into(
        self, hit: Hit, kv: KV, slots: Sequence[int] | None, axes: str | None, deadline: float
    ) -> _Operation[tuple[int, str | None], Loaded]:
        tensors, held = tensors_of(kv, axes, writable=True)
        places, deadline_ms = _places(slots), _ms("deadline", deadline)
        return _Operation(
            lambda call: self._session.load(
                hit.space, hit.hashes, json.dumps(tensors), places, deadline_ms, held, call
            ),
            lambda answer: Loaded(answer[0] * hit.space.chunk_tokens, answer[1]),
        )

    def _store_from(
        self,
        space: Space,
        tokens: Tokens,
        kv: KV,
        salt: bytes,
        adapter: bytes,
        slots: Sequence[int] | None,
        axes: str | None,
        deadline: float,
    ) -> _Operation[tuple[int, int, int, str | None], Stored]:
        prompt = _prompt(space, tokens, salt, adapter)
        tensors, held = tensors_of(kv, axes, writable=False)
        places, deadline_ms = _places(slots), _ms("deadline", deadline)
        hashes, root = prompt.hashes(0, len(prompt)), prompt.parent(0)
        return _Operation(
            lambda call: self._session.store(space, hashes, root, json.dumps(tensors), places, deadline_ms, held, call),
            lambda answer: Stored(answer[0] * space.chunk_tokens, *answer[1:]),
        )

    def _flush(self, deadline: float) -> _Operation[tuple[()], None]:
        deadline_ms = _ms("deadline", deadline)
        return _Operation(lambda call: self._session.flush(deadline_ms, call), lambda _: None)


class Gateway(_Operations):
    """A session with the node's gateway, for programs that wait. `with kvgate.connect() as gateway:` closes it.

    Any thread may call it. A process that forks connects after that. When the gateway starts anew, the next call finds the
    new one.
    """

    def __enter__(self) -> Gateway:
        """Raises KvGateError if no gateway answers at the socket."""
        self.attach()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def attach(self) -> None:
        """Opens the session now, and not in the first load or store. Raises KvGateError if no gateway answers."""
        _wait(self._attach())

    def close(self) -> None:
        """Ends the session. Calls after this raise KvGateError."""
        self._session.close()

    def lookup(
        self,
        space: Space,
        tokens: Tokens,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        deadline: float = 1.0,
        pin: float = 10.0,
        prefetch: bool = False,
    ) -> Hit:
        """How much of the prompt's start the gateway has.

        `salt`, `adapter`: what else the KV depends on, as it was stored. `deadline`: seconds, after which chunks that nobody
        could tell of count as absent. `pin`: seconds for which chunks in the node's memory stay there, for the load.
        `prefetch`: brings the others there, in the background.

        Raises KvGateError if the gateway can't be reached or refuses.
        """
        return _wait(self._lookup(space, tokens, salt, adapter, deadline, pin, prefetch))

    def load_into(
        self, hit: Hit, kv: KV, *, slots: Sequence[int] | None = None, axes: str | None = None, deadline: float = 30.0
    ) -> Loaded:
        """Loads the hit's tokens into `kv`, which nothing else may touch meanwhile.

        Shape of `kv`, which need not be contiguous but for its last axis:

        - `[layers, 2, tokens, heads, head_dim]`, K at 0 and V at 1: token t of the prompt is at t;
        - `[layers, 2, blocks, block_tokens, heads, head_dim]`: pages. Token t is in slot `slots[t]`, which is
          `block * block_tokens + token in the block`; a negative one is left out;
        - `[layers, tokens, row]` or `[layers, blocks, block_tokens, row]` for MLA;
        - a list with one such array for each layer, without that axis;
        - any other one of which `axes` says the meaning of each dimension (docs/PYTHON.md).

        `deadline`: seconds, after which chunks that did not come are missing.

        Raises KvGateError if `kv` does not fit the space, or the gateway can't be reached. A chunk that is gone, late or damaged
        is no error: the outcome says how many tokens are there.
        """
        return _wait(self._load_into(hit, kv, slots, axes, deadline))

    def store_from(
        self,
        space: Space,
        tokens: Tokens,
        kv: KV,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        slots: Sequence[int] | None = None,
        axes: str | None = None,
        deadline: float = 10.0,
    ) -> Stored:
        """Stores the prompt's full chunks out of `kv`, which has the shape of `load_into` and may not change meanwhile.

        When it returns, the node has the chunks, and every lookup finds them. S3 gets them in the background: see `flush`.
        `deadline`: seconds. Until then chunks for which the gateway has no room wait for it: it makes room as chunks reach S3.

        Raises KvGateError as `load_into`. Chunks that found no room are no error: the outcome counts them.
        """
        return _wait(self._store_from(space, tokens, kv, salt, adapter, slots, axes, deadline))

    def flush(self, *, deadline: float = 60.0) -> None:
        """Waits until S3 has every chunk that was stored before. Raises KvGateError after `deadline` seconds, or if one was lost."""
        _wait(self._flush(deadline))


class AsyncGateway(_Operations):
    """`Gateway` for asyncio: the same methods, to be awaited. `async with kvgate.AsyncGateway() as gateway:` closes it.

    A call that is cancelled ends first: its array is not touched any more when CancelledError is raised.
    """

    async def __aenter__(self) -> AsyncGateway:
        await self.attach()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def attach(self) -> None:
        """See `Gateway.attach`."""
        await _await(self._attach())

    async def close(self) -> None:
        """See `Gateway.close`."""
        self._session.close()

    async def lookup(
        self,
        space: Space,
        tokens: Tokens,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        deadline: float = 1.0,
        pin: float = 10.0,
        prefetch: bool = False,
    ) -> Hit:
        """See `Gateway.lookup`."""
        return await _await(self._lookup(space, tokens, salt, adapter, deadline, pin, prefetch))

    async def load_into(
        self, hit: Hit, kv: KV, *, slots: Sequence[int] | None = None, axes: str | None = None, deadline: float = 30.0
    ) -> Loaded:
        """See `Gateway.load_into`."""
        return await _await(self._load_into(hit, kv, slots, axes, deadline))

    async def store_from(
        self,
        space: Space,
        tokens: Tokens,
        kv: KV,
        *,
        salt: bytes = b"",
        adapter: bytes = b"",
        slots: Sequence[int] | None = None,
        axes: str | None = None,
        deadline: float = 10.0,
    ) -> Stored:
        """See `Gateway.store_from`."""
        return await _await(self._store_from(space, tokens, kv, salt, adapter, slots, axes, deadline))

    async def flush(self, *, deadline: float = 60.0) -> None:
        """See `Gateway.flush`."""
        await _await(self._flush(deadline))


def connect(
    socket: str | os.PathLike[str] | None = None, *, socket_owner: int | None = None, patience: float = PATIENCE_SECONDS
) -> Gateway:
    """A session with the gateway of this node.

    `socket`: of `kvgate serve`; without it KVGATE__API__SOCKET, then /run/kvgate/kvgate.sock. `socket_owner`: a user id whose
    gateway is trusted, besides root's and one's own. `patience`: seconds for an answer, beyond the deadline of its call.

    Raises KvGateError if no gateway answers there.
    """
    gateway = Gateway(socket, socket_owner=socket_owner, patience=patience)
    gateway.attach()
    return gateway


def _wait(operation: _Operation[R, T]) -> T:
    ended = threading.Event()
    call: Call[R] = Call(ended.set)
    try:
        operation.begin(call)
        ended.wait()
    except BaseException:
        # Ctrl-C, also a second one: the array is the call's until it has ended.
        call.stop()
        while call.has_begun and not ended.is_set():
            with contextlib.suppress(KeyboardInterrupt):
                ended.wait()
        raise
    return operation.result(call.result())


async def _await(operation: _Operation[R, T]) -> T:
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    call: Call[R] = Call(lambda: loop.call_soon_threadsafe(ended.set))
    operation.begin(call)
    try:
        await ended.wait()
    except asyncio.CancelledError:
        call.stop()
        while not ended.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ended.wait()
        raise
    return operation.result(call.result())


def _prompt(space: Space, tokens: Tokens, salt: bytes, adapter: bytes) -> Prompt:
    if isinstance(tokens, Prompt):
        if salt or adapter:
            raise KvGateError("give salt and adapter to the Prompt")
        if not tokens.fits(space):
            raise KvGateError(
                "the prompt was made for another model, or other chunks: make a kvgate.Prompt of this space"
            )
        return tokens
    prompt = Prompt(space, salt, adapter)
    prompt.extend(_numbers(tokens))
    return prompt


def _numbers(given: Sequence[int]) -> Sequence[int]:
    """Those of an array are not numbers of Python's."""
    return given.tolist() if hasattr(given, "tolist") else given


def _places(slots: Sequence[int] | None) -> Sequence[int] | None:
    return None if slots is None else _numbers(slots)


def _ms(name: str, seconds: float) -> int:
    if not isinstance(seconds, numbers.Real) or not 0 <= seconds < 1e9:
        raise KvGateError(f"{name} is a number of seconds, not {seconds}")
    return round(seconds * 1000)
