"""Which kvgate the daemon is: an engine's wheel and its daemon are to be of one version."""

import contextlib
import http.client
import logging
import socket

from kvgate._native import version

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 1
"""A daemon that hangs holds up no engine's start for longer."""


def version_at(path: str) -> str | None:
    """The version of the daemon at that socket. None where nobody answers, or not with a version, as of an older kvgate."""
    connection = http.client.HTTPConnection("kvgate", timeout=PATIENCE_SECONDS)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.settimeout(PATIENCE_SECONDS)
        connection.sock.connect(path)
        connection.request("GET", "/healthz")
        name, _, theirs = connection.getresponse().headers.get("server", "").partition("/")
        return theirs if name == "kvgate" and theirs else None
    return None


def warn_of_another_version(path: str) -> None:
    """One line where daemon and wheel differ."""
    theirs, ours = version_at(path), version()
    if theirs is not None and theirs != ours:
        logger.warning(
            "kvgate: the gateway at %s is kvgate %r, this engine has kvgate %s, and no test has run them together: install the "
            "same version on both, and start both anew",
            path,
            theirs,
            ours,
        )
