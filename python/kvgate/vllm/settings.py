"""What `kv_connector_extra_config` may say."""

import dataclasses
import os

DEFAULT_SOCKET = "/run/kvgate/kvgate.sock"
LOAD_POLICIES = ("auto", "always")


@dataclasses.dataclass(frozen=True)
class Settings:
    socket: str = ""
    """The gateway's unix socket; without it KVGATE__API__SOCKET, then /run/kvgate/kvgate.sock."""
    socket_owner: int = 0
    """A user id whose gateway is trusted, besides root's and the engine's own; without it KVGATE__API__SOCKET_OWNER."""
    serve: str = ""
    """Arguments of `kvgate serve`, with which a gateway is started for the node when none answers; empty: never."""
    serve_log: str = ""
    """What a gateway that was started says goes to this file; without it next to the socket."""
    chunk_tokens: int = 0
    """Tokens of a chunk, a multiple of vLLM's block sizes; without it the least such that is 256 or more, for models with states
    64 or more."""
    state_every: int = 4096
    """Tokens between the snapshots of a state (Mamba, linear attention) that are stored, of those that vLLM offers; the one at
    a prompt's end always is."""
    model: str = ""
    """The model's name in the space; without it the architecture's."""
    revision: str = ""
    """What pins the weights; without it the commit, or a digest of the model's folder."""
    draft_revision: str = ""
    """What pins the weights of a draft model (EAGLE); without it its commit, or a digest of its folder."""
    tenant: str = ""
    load_policy: str = "auto"
    """`auto`: a load that would take longer than computing is left; `always`: what is there is loaded."""
    layerwise: bool = False
    """Loads layer by layer while the step computes, instead of between steps. CUDA graphs are piecewise then."""
    allow_failed_requests: bool = False
    """kv_load_failure_policy may be `fail`: a load that fails then fails its request."""
    fixed_weights: bool = False
    """The weights never change while the engine runs: a reset, also by sleep, forgets nothing."""
    lookup_deadline_ms: int = 50
    """So long a request that could be admitted waits for its lookup, which began when the request came. Then a chunk that
    the gateway does not know of yet counts as absent."""
    lookup_again_ms: int = 5_000
    """A request at the head of the queue that has waited for so long since its lookup is looked up again. Less than
    `pin_ms`."""
    lookups_ahead: int = 16
    """So many requests are the head of the queue."""
    lookups_at_once: int = 256
    """Lookups under way, each with a connection of its own; more wait for one to end."""
    load_deadline_ms: int = 30_000
    """After so long what was not loaded is computed."""
    adapter_deadline_ms: int = 5_000
    """After so long a LoRA adapter whose files were not read is unknown: its requests reuse nothing until they were."""
    store_deadline_ms: int = 1_000
    """After so long a gateway that has made no room gets nothing: the blocks are vLLM's again."""
    patience_ms: int = 10_000
    """How long any other answer of the gateway is waited for, in the background."""
    pin_ms: int = 30_000
    """How long chunks that were found stay in the gateway's memory."""
    breaker_timeouts: int = 3
    """After so many answers in a row that did not come in time the gateway is left alone for a while."""
    breaker_pause_ms: int = 10_000

    @classmethod
    def read(cls, extra):
        """From vLLM's dictionary; tells all that is wrong with it."""
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        problems = [f"unknown key {key!r}, there are {', '.join(fields)}" for key in extra if key not in fields]
        for key, value in extra.items():
            if key not in fields:
                continue
            if type(value) is not fields[key]:
                problems.append(f"{key} must be {fields[key].__name__}, not {value!r}")
            elif fields[key] is int and value <= 0:
                problems.append(f"{key} must be more than 0, not {value}")
        if extra.get("load_policy", "auto") not in LOAD_POLICIES:
            problems.append(f"load_policy must be {' or '.join(LOAD_POLICIES)}, not {extra['load_policy']!r}")
        again, pin = (extra.get(name, getattr(cls, name)) for name in ("lookup_again_ms", "pin_ms"))
        if not problems and again >= pin:
            problems.append(f"pin_ms must be more than lookup_again_ms, which is {again}")
        if problems:
            raise ValueError("kv_connector_extra_config: " + "; ".join(problems))
        settings = cls(**extra)
        socket = settings.socket or os.environ.get("KVGATE__API__SOCKET") or DEFAULT_SOCKET
        owner = settings.socket_owner or int(os.environ.get("KVGATE__API__SOCKET_OWNER") or 0)
        log = settings.serve_log or f"{socket}.log"
        return dataclasses.replace(settings, socket=socket, socket_owner=owner, serve_log=log)
