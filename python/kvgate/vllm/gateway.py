"""A gateway for the node, started when none answers."""

import fcntl
import os
import shlex
import socket
import subprocess
import sys
import time

START_SECONDS = 30


def ensure(settings):
    """Starts `kvgate serve` if nobody listens at the socket and the settings allow it; ranks and engines race for it, and
    one does. It outlives the engine. An engine without a gateway computes everything, so only a start that was asked for and
    failed is an error."""
    if not settings.serve or listens(settings.socket):
        return
    os.makedirs(os.path.dirname(os.path.abspath(settings.socket)), exist_ok=True)
    with open(f"{settings.socket}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if listens(settings.socket):
            return
        command = [sys.executable, "-m", "kvgate", "serve", *shlex.split(settings.serve), "--socket", settings.socket]
        with open(settings.serve_log, "ab") as log:
            # In a session of its own: the engine's signals are not for it. It does not inherit the lock.
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + START_SECONDS
        while not listens(settings.socket):
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
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
