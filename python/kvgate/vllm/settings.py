"""The keys of `kv_connector_extra_config`. docs/VLLM.md describes them for users."""

import dataclasses

from kvgate.settings import owner_or_default, problems_of, socket_or_default, tenant_problems, with_new_names

LOAD_POLICIES = ("auto", "always")
COPIES = ("auto", "torch")


@dataclasses.dataclass(frozen=True)
class SharedSettings:
    """The keys that mean the same for the connector and for the tier."""

    socket: str = ""
    """The gateway's unix socket; without it KVGATE__API__SOCKET, then /run/kvgate/kvgate.sock."""
    socket_owner: int = 0
    """A user id whose gateway is trusted, besides root's and the engine's own; without it KVGATE__API__SOCKET_OWNER."""
    serve: str = ""
    """Arguments of `kvgate serve`. A gateway is started with them when none answers on the node; empty: never."""
    serve_log: str = ""
    """The log file of a gateway that was started; without it `<socket>.log`."""
    model: str = ""
    """The model's name in the space; without it the architecture's."""
    revision: str = ""
    """The name that pins the weights; without it the commit, or a digest of the model's folder."""
    draft_revision: str = ""
    """The name that pins the weights of a draft model (EAGLE); without it its commit, or a digest of its folder."""
    tenant: str = ""
    protection: str = ""
    """`signed` or `encrypted`: what the gateway's keys do for this tenant's chunks; without it, nothing."""
    tenant_secret_file: str = ""
    """A file with the tenant's secret, which keys the names of its chunks: the gateway's `secret` of this tenant."""
    fixed_weights: bool = False
    """The weights never change while the engine runs: a reset, also by sleep, forgets nothing."""
    lookup_deadline_ms: int = 50
    """Time that a request that could be admitted waits for its lookup. The lookup began when the request came. Chunks that
    it has not answered by then count as absent."""
    lookups_at_once: int = 256
    """Lookups under way, each with a connection of its own; more wait for one to end."""
    load_deadline_ms: int = 30_000
    """Time after which chunks that were not loaded are computed."""
    store_deadline_ms: int = 1_000
    """Time for the gateway to make room for a store. Then it gets nothing, and the blocks are vLLM's again."""
    patience_ms: int = 10_000
    """Time for any other answer of the gateway, in the background."""
    pin_ms: int = 30_000
    """Time that chunks which a lookup found stay in the gateway's memory."""
    breaker_timeouts: int = 3
    """Answers in a row that came too late, after which the gateway is left alone for `breaker_pause_ms`."""
    breaker_pause_ms: int = 10_000


@dataclasses.dataclass(frozen=True)
class Settings(SharedSettings):
    chunk_tokens: int = 0
    """Tokens of a chunk; a multiple of vLLM's block sizes. Without it the least multiple that is 256 or more, or 64 or more for
    models with states."""
    state_every: int = 4096
    """Tokens between the snapshots of a state (Mamba, linear attention) that are stored. The snapshot at a prompt's end is
    always stored."""
    load_policy: str = "auto"
    """`auto`: a load that would take longer than computing is left; `always`: every chunk that is there is loaded."""
    copies: str = "auto"
    """`auto`: kvgate's own copies on CPUs and with CUDA, torch's on other devices; `torch`: torch's everywhere."""
    layerwise: bool = False
    """Loads layer by layer while the step computes, instead of between steps. CUDA graphs are piecewise then."""
    allow_failed_requests: bool = False
    """kv_load_failure_policy may be `fail`: a load that fails then fails its request."""
    lookup_again_ms: int = 5_000
    """Time after which a request at the head of the queue is looked up again. Less than `pin_ms`."""
    lookups_ahead: int = 16
    """Requests at the head of the queue that are looked up again."""
    adapter_deadline_ms: int = 5_000
    """Time after which a LoRA adapter whose files were not read is unknown. Its requests reuse nothing until they were."""

    @classmethod
    def read(cls, extra):
        """From vLLM's dictionary. Raises ValueError with all problems at once."""
        extra = with_new_names(cls, extra)
        problems = problems_of(cls, extra) or tenant_problems(extra)
        if extra.get("load_policy", "auto") not in LOAD_POLICIES:
            problems.append(f"load_policy must be {' or '.join(LOAD_POLICIES)}, not {extra['load_policy']!r}")
        if extra.get("copies", "auto") not in COPIES:
            problems.append(f"copies must be {' or '.join(COPIES)}, not {extra['copies']!r}")
        again, pin = (extra.get(name, getattr(cls, name)) for name in ("lookup_again_ms", "pin_ms"))
        if not problems and again >= pin:
            problems.append(f"pin_ms must be more than lookup_again_ms, which is {again}")
        if problems:
            raise ValueError("kv_connector_extra_config: " + "; ".join(problems))
        return with_gateway(cls(**extra))


@dataclasses.dataclass(frozen=True)
class TierSettings(SharedSettings):
    """The keys of kvgate in `secondary_tiers`."""

    adapters_by_path: bool = False
    """The path of a LoRA adapter pins its weights, on every node and at any time: vLLM's hashes have no more of it."""
    jobs_at_once: int = 256
    """Loads and stores under way. One more fails at once: what it would have loaded is computed."""
    store_share: int = 25
    """The most of vLLM's CPU tier, in percent, that stores under way may keep from being used for something else."""

    @classmethod
    def read(cls, given):
        """From the keywords of vLLM's configuration. Raises ValueError with all problems at once."""
        given = with_new_names(cls, given)
        if problems := problems_of(cls, given) or tenant_problems(given):
            raise ValueError("kvgate in secondary_tiers: " + "; ".join(problems))
        return with_gateway(cls(**given))


def with_gateway(settings):
    """With the place of the gateway where the environment or the default says it."""
    socket, owner = socket_or_default(settings.socket), owner_or_default(settings.socket_owner)
    log = settings.serve_log or f"{socket}.log"
    return dataclasses.replace(settings, socket=socket, socket_owner=owner, serve_log=log)
