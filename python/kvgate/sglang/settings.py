"""The keys of `--hicache-storage-backend-extra-config`. docs/SGLANG.md describes them for users."""

import dataclasses

from kvgate.settings import owner_or_default, problems_of, socket_or_default, tenant_problems, with_new_names

SGLANGS = ("backend_name", "module_path", "class_name", "interface_v1", "allocator")
"""Keys that SGLang reads itself and leaves there."""
STRATEGIES = ("prefix", "exact")
JOIN_MS = 10_000
"""Time that SGLang gives its threads to end. A call must not last longer."""


@dataclasses.dataclass(frozen=True)
class Settings:
    socket: str = ""
    """The gateway's unix socket; without it KVGATE__API__SOCKET, then /run/kvgate/kvgate.sock."""
    socket_owner: int = 0
    """A user id whose gateway is trusted, besides root's and the engine's own; without it KVGATE__API__SOCKET_OWNER."""
    model: str = ""
    """The model's name in the space; without it the architecture's."""
    revision: str = ""
    """The name that pins the weights; without it the commit, or a digest of the model's folder."""
    draft_revision: str = ""
    """The name that pins the weights of a draft model; without it its commit, or a digest of its folder."""
    tenant: str = ""
    fixed_weights: bool = False
    """The weights never change while the engine runs: a flush of SGLang's cache forgets nothing."""
    protection: str = ""
    """`signed` or `encrypted`: what the gateway's keys do for this tenant's chunks; without it, nothing."""
    tenant_secret_file: str = ""
    """A file with the tenant's secret, which keys the names of its chunks: the gateway's `secret` of this tenant."""
    instance: str = ""
    """A name that the tensor-parallel ranks of this engine share, and no other engine has; without it they agree on one."""
    window_tokens: int = 0
    """Tokens of the window of the layers that have one; without it the one of the model's configuration."""
    deadline_ms: int = 8_000
    """Time for a load or a store of up to 128 pages, with all that it waits for. Less than 10 s."""
    lookup_deadline_ms: int = 1_000
    """Time for a lookup. Pages of which the gateway does not know by then count as absent."""
    local_lookup_deadline_ms: int = 20
    """The same while S3 does not answer: the gateway's memory and disks do."""
    lookup_strategy: str = "prefix"
    """`prefix`: few requests, and pages that lie between others may be taken for present; `exact`: one for each page."""
    boundaries: int = 3
    """Prefixes that several ranks offer each other for a model with windows or states, each found by a lookup: the longest that
    all have is loaded."""
    patience_ms: int = 2_000
    """Time for any other answer of the gateway."""
    pin_ms: int = 30_000
    """Time that pages which a lookup found stay in the gateway's memory."""
    store_deadline_ms: int = 1_000
    """Time that a store waits for room in the gateway."""
    store_bytes: int = 64 << 20
    """Bytes of the pages that are handed over at a time."""
    release_pages: int = 8
    """Loaded pages whose room in the gateway is given back at a time."""
    retry_ms: int = 20
    """Time after which a store asks again, where the gateway had no room for it."""
    parents_max: int = 65_536
    """Pages of which this process remembers which one comes before."""
    breaker_timeouts: int = 3
    """Answers in a row that came too late, after which the gateway is left alone for `breaker_pause_ms`."""
    breaker_pause_ms: int = 10_000

    @classmethod
    def read(cls, extra):
        """From SGLang's dictionary. Raises ValueError with all problems at once."""
        extra = extra or {}
        own = {key: value for key, value in extra.items() if key not in SGLANGS}
        own = with_new_names(cls, own)
        problems = problems_of(cls, own) or tenant_problems(own)
        if not extra.get("interface_v1"):
            problems.append(
                'interface_v1 must be 1: else SGLang copies each page once more, and in Python. Set "interface_v1": 1'
            )
        if extra.get("lookup_strategy", STRATEGIES[0]) not in STRATEGIES:
            problems.append(f"lookup_strategy must be {' or '.join(STRATEGIES)}, not {extra['lookup_strategy']!r}")
        if not problems:
            settings = cls(**own)
            if settings.deadline_ms >= JOIN_MS:
                problems.append(f"deadline_ms must be less than {JOIN_MS}: SGLang waits no longer for its threads")
            if 3 * settings.patience_ms > settings.deadline_ms or settings.lookup_deadline_ms >= settings.patience_ms:
                problems.append("deadline_ms must be 3 times patience_ms, and patience_ms more than lookup_deadline_ms")
        if problems:
            raise ValueError("kvgate: --hicache-storage-backend-extra-config: " + "; ".join(problems))
        return dataclasses.replace(
            settings,
            socket=socket_or_default(settings.socket),
            socket_owner=owner_or_default(settings.socket_owner),
        )
