"""What the keys of every engine's configuration have in common: how they are checked, and where the gateway is."""

import dataclasses
import os

DEFAULT_SOCKET = "/run/kvgate/kvgate.sock"


def socket_or_default(socket: str) -> str:
    """The gateway's socket where none is given."""
    return socket or os.environ.get("KVGATE__API__SOCKET") or DEFAULT_SOCKET


def owner_or_default(owner: int) -> int:
    """The user id whose gateway is trusted, besides root's and one's own; 0: no other one."""
    return owner or int(os.environ.get("KVGATE__API__SOCKET_OWNER") or 0)


def problems_of(cls: type, given: dict[str, object]) -> list[str]:
    """All that is wrong with these keys for a dataclass of texts, switches and numbers above 0."""
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    problems = [f"unknown key {key!r}, there are {', '.join(fields)}" for key in given if key not in fields]
    for key, value in given.items():
        kind = fields.get(key)
        if not isinstance(kind, type):
            continue
        if type(value) is not kind:
            problems.append(f"{key} must be {kind.__name__}, not {value!r}")
        elif isinstance(value, int) and kind is int and value <= 0:
            problems.append(f"{key} must be more than 0, not {value}")
    return problems
