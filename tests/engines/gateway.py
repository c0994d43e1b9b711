"""`kvgate serve` as the wheel's command starts it, on an S3 server of its own whose objects stay in a folder, or on another.
And what stands between."""

import http.client
import http.server
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

CHUNK = re.compile("[0-9a-f]{64}")
KVGATE = Path(sys.executable).with_name("kvgate")


def hang(pid):
    """Stops a process. Returns when no thread of it runs any more: until then it may still answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while not is_stopped(pid):
        if time.monotonic() > deadline:
            raise RuntimeError(f"process {pid} does not stop")
        time.sleep(0.001)


def is_stopped(pid):
    try:
        stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        # A thread ended meanwhile.
        return False
    return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)


class Gateway:
    def __init__(self, folder, name="gateway", s3=None):
        """`folder`: the caller's, for the socket, the log and the objects. `s3`: arguments that name another S3 than the embedded one."""
        self.folder = Path(folder)
        self.s3 = s3 or ["--embedded", self.folder / "objects"]
        self.socket = self.folder / f"{name}.sock"
        self.arena = Path(f"/dev/shm/kvgate-test-{name}-{self.folder.name}")
        self.log = self.folder / f"{name}.log"

    def start(self):
        command = [KVGATE, "serve", *self.s3, "--socket", self.socket, "--arena-path", self.arena]
        with self.log.open("ab") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while self.pid() is None or self.call("stat", check=False).returncode:
            if time.monotonic() > deadline or process.poll() is not None:
                raise RuntimeError(self.log.read_text())
            time.sleep(0.05)
        return self

    def pid(self):
        """Of whoever listens; None: nobody. An engine's process may have started it."""
        with socket.socket(socket.AF_UNIX) as attempt:
            if attempt.connect_ex(str(self.socket)):
                return None
            return struct.unpack("iii", attempt.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]

    def call(self, *arguments, check=True):
        command = [KVGATE, *arguments, "--socket", self.socket]
        return subprocess.run(command, capture_output=True, text=True, check=check)

    def flush(self):
        self.call("flush", "--deadline", "60s")

    def objects(self):
        """Files of chunks."""
        return [path for path in (self.folder / "objects" / "kvgate").rglob("*") if CHUNK.fullmatch(path.name)]

    def kinds(self):
        """Files of chunks, by the kind of their space."""
        found = {}
        for path in self.objects():
            space = json.loads((path.parent / "space.json").read_text())
            kind = space["kind"]
            name = kind if isinstance(kind, str) else " ".join(f"{word} {span}" for word, span in kind.items())
            found.setdefault(f"draft {name}" if space["draft"] else name, []).append(path)
        return found

    def moved(self):
        """Bytes of bodies that went to and from S3."""
        return self.metric("kvgate_endpoint_moved_bytes_total")

    def metric(self, name):
        """The sum of all its series."""
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(self.socket))
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    def kill(self):
        self.stop(signal.SIGKILL)

    def stop(self, how):
        if (pid := self.pid()) is None:
            return
        os.kill(pid, how)
        deadline = time.monotonic() + 60
        while self.pid() is not None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the gateway does not end:\n{self.log.read_text()}")
            time.sleep(0.02)

    def end(self):
        self.stop(signal.SIGTERM)
        self.arena.unlink(missing_ok=True)


class Proxy:
    """See proxy.py."""

    def __init__(self, listen, target, *arguments):
        self.listen = listen
        command = [sys.executable, Path(__file__).with_name("proxy.py"), listen, target, *map(str, arguments)]
        self.process = subprocess.Popen(command)
        deadline = time.monotonic() + 10
        while not self.listens():
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError("the proxy does not listen")
            time.sleep(0.02)

    def listens(self):
        if "/" in str(self.listen):
            return Path(self.listen).exists()
        host, port = self.listen.rsplit(":", 1)
        with socket.socket() as attempt:
            return attempt.connect_ex((host, int(port))) == 0

    def end(self):
        self.process.kill()
        self.process.wait()


class Collector:
    """Of OpenTelemetry; keeps what it is sent."""

    def __init__(self):
        self.bodies = bodies = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self):
                bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def end(self):
        self.server.shutdown()
        self.server.server_close()
