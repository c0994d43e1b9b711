"""What `kv_connector_extra_config` may say."""

import dataclasses
import os

DEFAULT_SOCKET = "/run/kvgate/kvgate.sock"


@dataclasses.dataclass(frozen=True)
class Settings:
    socket: str = ""
    """The gateway's unix socket; without it KVGATE__API__SOCKET, then /run/kvgate/kvgate.sock."""
    chunk_tokens: int = 256
    """Tokens of a chunk; a multiple of vLLM's block size."""
    model: str = ""
    """The model's name in the space; without it the architecture's."""
    revision: str = ""
    """What pins the weights; without it the commit, or a digest of the model folder's config and weight headers."""
    tenant: str = ""
    lookup_deadline_ms: int = 50
    """After so long a chunk that nobody has told of is not there."""
    load_deadline_ms: int = 30_000
    """After so long what was not loaded is computed."""
    pin_ms: int = 30_000
    """How long chunks that were found stay in the gateway's memory."""

    @classmethod
    def read(cls, extra):
        """From vLLM's dictionary; tells all that is wrong with it."""
        fields = {field.name: field.type for field in dataclasses.fields(cls)}
        problems = [f"unknown key {key!r}, there are {', '.join(fields)}" for key in extra if key not in fields]
        for key, value in extra.items():
            if key in fields and (not isinstance(value, fields[key]) or isinstance(value, bool)):
                problems.append(f"{key} must be {fields[key].__name__}, not {value!r}")
            elif fields.get(key) is int and value <= 0:
                problems.append(f"{key} must be more than 0, not {value}")
        if problems:
            raise ValueError("kv_connector_extra_config: " + "; ".join(problems))
        settings = cls(**extra)
        socket = settings.socket or os.environ.get("KVGATE__API__SOCKET") or DEFAULT_SOCKET
        return dataclasses.replace(settings, socket=socket)
