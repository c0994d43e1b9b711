"""What the keys of every engine's configuration have in common: how they are checked, and where the gateway is."""

import dataclasses
import json
import logging
import os
import stat
from typing import Protocol

from kvgate._native import Space

DEFAULT_SOCKET = "/run/kvgate/kvgate.sock"
RENAMED: dict[str, str] = {}
"""Keys by their names in the release before. Those are taken too, with a warning, until the next release."""
logger = logging.getLogger(__name__)


def socket_or_default(socket: str) -> str:
    """The gateway's socket where none is given."""
    return socket or os.environ.get("KVGATE__API__SOCKET") or DEFAULT_SOCKET


def owner_or_default(owner: int) -> int:
    """The user id whose gateway is trusted, besides root's and one's own; 0: no other one."""
    return owner or int(os.environ.get("KVGATE__API__SOCKET_OWNER") or 0)


def with_new_names(cls: type, given: dict[str, object]) -> dict[str, object]:
    """The same keys; one that has an old name has the new one, unless that is given too."""
    fields = {field.name for field in dataclasses.fields(cls)}
    taken = dict(given)
    for old, new in RENAMED.items():
        if old in given and new in fields and new not in given:
            logger.warning(
                "kvgate: the key %s is called %s now: write that, the next release refuses %s", old, new, old
            )
            taken[new] = taken.pop(old)
    return taken


def problems_of(cls: type, given: dict[str, object]) -> list[str]:
    """All that is wrong with these keys for a dataclass of texts, switches and numbers above 0."""
    fields = {field.name: field.type for field in dataclasses.fields(cls)}
    unknown = f"there are {', '.join(fields)}"
    problems = [
        f"{key!r} is the old name of {RENAMED[key]!r}, which is given too: remove the old one"
        if RENAMED.get(key) in given
        else f"unknown key {key!r}, {unknown}"
        for key in given
        if key not in fields
    ]
    for key, value in given.items():
        kind = fields.get(key)
        if not isinstance(kind, type):
            continue
        if type(value) is not kind:
            problems.append(f"{key} must be {kind.__name__}, not {value!r}")
        elif isinstance(value, int) and kind is int and value <= 0:
            problems.append(f"{key} must be more than 0, not {value}")
    return problems


class TenantSettings(Protocol):
    """What the settings of every engine say of the tenant."""

    tenant: str
    protection: str
    tenant_secret_file: str


def space_of(space: dict[str, object], settings: TenantSettings) -> Space:
    """The space as its tenant has it: protected, and with chunk hashes that its secret keys."""
    space = {**space, "tenant": settings.tenant}
    if settings.protection:
        space["protection"] = settings.protection
    return Space(json.dumps(space), tenant_secret(settings.tenant_secret_file))


def tenant_secret(file: str) -> bytes | None:
    """The secret in a tenant's file; None without one. Raises ValueError, which never says what is in the file."""
    if not file:
        return None
    try:
        with open(file, encoding="ascii") as opened:
            of = os.fstat(opened.fileno())
            text = opened.read(4096).strip()
    except OSError as error:
        raise ValueError(f"tenant_secret_file {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        text = ""
    mode = stat.S_IMODE(of.st_mode)
    if mode & 0o027:
        raise ValueError(f"tenant_secret_file {file} has the mode {mode:04o}, so others may read it: chmod 0400 it")
    if of.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"tenant_secret_file {file} is user {of.st_uid}'s, neither root's nor this process's: chown it"
        )
    if len(text) != 64 or any(digit not in "0123456789abcdefABCDEF" for digit in text):
        raise ValueError(f"tenant_secret_file {file} has no key: a key is 64 hex digits, from `openssl rand -hex 32`")
    return bytes.fromhex(text)


def tenant_problems(given: dict[str, object]) -> list[str]:
    """What is wrong with the file of a tenant's secret."""
    try:
        tenant_secret(str(given.get("tenant_secret_file", "")))
    except ValueError as error:
        return [str(error)]
    return []
