"""`kvgate serve` as the wheel's command starts it, on an S3 server of its own whose objects stay in a folder."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

CHUNK = re.compile("[0-9a-f]{64}")
KVGATE = Path(sys.executable).with_name("kvgate")


class Gateway:
    def __init__(self, folder, name="gateway"):
        self.folder = Path(folder)
        self.socket = self.folder / f"{name}.sock"
        self.arena = Path(f"/dev/shm/kvgate-test-{name}-{self.folder.name}")
        self.log = self.folder / f"{name}.log"
        self.process = None

    def start(self):
        data = self.folder / "objects"
        command = [KVGATE, "serve", "--embedded", data, "--socket", self.socket, "--arena-path", self.arena]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 30
        while not self.socket.exists() or self.call("stat", check=False).returncode:
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise RuntimeError(self.log.read_text())
            time.sleep(0.05)
        return self

    def call(self, *arguments, check=True):
        command = [KVGATE, *arguments, "--socket", self.socket]
        return subprocess.run(command, capture_output=True, text=True, check=check)

    def flush(self):
        self.call("flush", "--deadline", "60s")

    def objects(self):
        """Files of chunks."""
        return [path for path in (self.folder / "objects" / "kvgate").rglob("*") if CHUNK.fullmatch(path.name)]

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.socket.unlink(missing_ok=True)

    def end(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)
        self.arena.unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
