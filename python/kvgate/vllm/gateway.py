"""A gateway for the node, started when none answers."""

import fcntl
import os
import shlex
import socket
import subprocess
import sys
import time

from vllm.logger import init_logger

from kvgate.daemon import warn_of_another_version

logger = init_logger(__name__)

START_SECONDS = 30
LAUNCH = """import subprocess, sys
print(subprocess.Popen(sys.argv[1:], stdout=sys.stderr, start_new_session=True).pid)"""
"""Starts the gateway as a child of no process of vLLM's, in a session of its own. vLLM ends its processes with all their
children, and a signal from a terminal goes to a whole session."""


def ensure(settings, is_told=True):
    """Starts `kvgate serve` if nothing listens at the socket and the settings allow it.

    Ranks and engines race for it, and one of them starts it. The gateway outlives the engine. An engine without a gateway
    computes everything, so only a start that was asked for and failed is an error.
    """
    if listens(settings.socket):
        if is_told:
            warn_of_another_version(settings.socket)
        return
    if not settings.serve:
        if is_told:
            logger.warning(
                "kvgate: nobody answers at %s, everything is computed until somebody does: start kvgate serve --socket %s, "
                "or set serve",
                settings.socket,
                settings.socket,
            )
        return
    os.makedirs(os.path.dirname(os.path.abspath(settings.socket)), exist_ok=True)
    # In a shared folder the name may be another user's link.
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(f"{settings.socket}.lock", flags, 0o600), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if listens(settings.socket):
            return
        command = [sys.executable, "-m", "kvgate", "serve", *shlex.split(settings.serve), "--socket", settings.socket]
        with open(settings.serve_log, "ab") as log:
            launcher = [sys.executable, "-c", LAUNCH, *command]
            started = subprocess.run(launcher, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, check=True)
        process = int(started.stdout)
        deadline = time.monotonic() + START_SECONDS
        while not listens(settings.socket):
            if not os.path.exists(f"/proc/{process}") or time.monotonic() > deadline:
                raise RuntimeError(f"{shlex.join(command)} does not answer: see {settings.serve_log}")
            time.sleep(0.05)


def listens(path):
    with socket.socket(socket.AF_UNIX) as attempt:
        attempt.settimeout(1)
        try:
            attempt.connect(path)
        except OSError:
            return False
    return True
