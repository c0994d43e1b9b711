"""Daemons of their own, asked by their sockets."""

import contextlib
import http.client
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .tools import FailedError

START_SECONDS_MAX = 60
LOAD_SECONDS_MAX = 120


class Node:
    """A daemon with nothing in memory. Chunks are asked for by its own API, as an engine's loads are."""

    def __init__(self, program: Path, folder: Path, number: int, arena_bytes: int, environment: dict[str, str]) -> None:
        """`environment`: all of it, with the settings of S3, of peers and so on."""
        self.socket = folder / f"{number}.sock"
        self.arena = Path(f"/dev/shm/{folder.name}-{os.getpid()}-{number}")
        self.log = folder / f"node-{number}.log"
        settings = {
            "KVGATE__API__SOCKET": str(self.socket),
            "KVGATE__ARENA__PATH": str(self.arena),
            "KVGATE__ARENA__SIZE": f"{arena_bytes}B",
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [program, "serve"],
                env={**environment, **settings},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def wait_until_ready(self) -> None:
        end = time.monotonic() + START_SECONDS_MAX
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                raise FailedError(f"a daemon does not start: {self.log.read_text().strip()[-500:]}")
            time.sleep(0.05)

    def is_ready(self) -> bool:
        try:
            return self.call("GET", "/readyz")[0] == 200
        except OSError:
            return False

    def call(self, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("localhost", timeout=LOAD_SECONDS_MAX)
        with contextlib.closing(connection), socket.socket(socket.AF_UNIX) as connection.sock:
            connection.sock.connect(str(self.socket))
            connection.request(method, path, body)
            answer = connection.getresponse()
            return answer.status, answer.read()

    def load(self, space: str, chunk: str) -> float | None:
        """Seconds of one chunk's load; None: it was not loaded. Of the answer only the header crosses the socket."""
        began = time.monotonic()
        try:
            status, _ = self.call("GET", f"/v1/chunks/{space}/{chunk}?header")
        except (OSError, http.client.HTTPException):
            return None
        return time.monotonic() - began if status == 200 else None

    def metrics(self, name: str) -> dict[str, float]:
        """Of a metric with one label: its series by the label's value."""
        _, text = self.call("GET", "/metrics")
        found = re.findall(rf'^{name}{{\w+="([^"]*)"}} (\S+)$', text.decode(), re.MULTILINE)
        return {label: float(value) for label, value in found}

    def end(self) -> None:
        # One that was stopped ends too.
        self.process.send_signal(signal.SIGCONT)
        self.process.kill()
        self.process.wait()
        self.arena.unlink(missing_ok=True)


@dataclass(frozen=True)
class Counted:
    """What a daemon counted since its start. By address: requests, retries, hedges, bytes of bodies."""

    of_address: dict[str, dict[str, float]]
    # Of chunks, by what became of it.
    peers_asked: dict[str, float]

    @classmethod
    def of(cls, node: Node) -> "Counted":
        names = ("requests", "retries", "hedges", "moved_bytes")
        series = {name: node.metrics(f"kvgate_endpoint_{name}_total") for name in names}
        addresses = series["requests"]
        of_address = {address: {name: series[name][address] for name in names} for address in addresses}
        return cls(of_address, node.metrics("kvgate_peer_asked_total"))

    def since(self, earlier: "Counted") -> "Counted":
        def less(now: dict[str, float], then: dict[str, float]) -> dict[str, float]:
            return {name: now[name] - then.get(name, 0) for name in now}

        of_address = {
            address: less(now, earlier.of_address.get(address, {})) for address, now in self.of_address.items()
        }
        return Counted(of_address, less(self.peers_asked, earlier.peers_asked))


def as_peers(folder: Path, nodes: int, number: int, port: int) -> dict[str, str]:
    """The settings of one node of a fleet whose nodes ask each other, on ports from `port` on."""
    token = folder / "token"
    token.write_text("bench\n")
    return {
        "KVGATE__PEERS__MEMBERS": ",".join(f"127.0.0.1:{port + one}" for one in range(nodes)),
        "KVGATE__PEERS__LISTEN": f"127.0.0.1:{port + number}",
        "KVGATE__PEERS__TOKEN_FILE": str(token),
    }


@contextlib.contextmanager
def running_nodes(
    program: Path, folder: Path, arena_bytes: int, settings: list[dict[str, str]], environment: dict[str, str]
) -> Iterator[list[Node]]:
    """A node for each of the settings. All start at the same time."""
    started = []
    try:
        for number, own in enumerate(settings):
            started.append(Node(program, folder, number, arena_bytes, {**environment, **own}))
        for node in started:
            node.wait_until_ready()
        yield started
    finally:
        for node in started:
            node.end()
