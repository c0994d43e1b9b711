"""`kvgate serve`, which may die and come back: on an S3 server of its own, or on a real one."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

from harness import tools

CHUNK = re.compile("[0-9a-f]{64}")
START_SECONDS_MAX = 60
FLUSH_SECONDS_MAX = 600


class Gateway:
    def __init__(self, program: Path, folder: Path, arena_size: str, s3: list[str]) -> None:
        """`s3`: flags of a real server; without them objects stay in the folder."""
        self.program, self.folder, self.arena_size = program, folder, arena_size
        self.socket = folder / "kvgate.sock"
        self.arena = Path(f"/dev/shm/{folder.name}.arena")
        self.s3 = s3 or ["--embedded", str(folder / "objects")]
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        command = [self.program, "serve", *self.s3, "--socket", self.socket]
        command += ["--arena-path", self.arena, "--arena-size", self.arena_size]
        # Stores that come faster than S3 takes them are refused, and would be missing here.
        environment = {"KVGATE__STORE__WRITE_BEHIND": "1GiB", **os.environ}
        with open(self.folder / "gateway.log", "ab") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        end = time.monotonic() + START_SECONDS_MAX
        while True:
            try:
                self.call("stat")
                return
            except tools.MissingError as error:
                if self.process.poll() is not None or time.monotonic() > end:
                    raise tools.MissingError(f"kvgate serve does not start: {self.words() or error}") from error
            time.sleep(0.05)

    def words(self) -> str:
        return (self.folder / "gateway.log").read_text().strip()[-500:]

    def call(self, *arguments: str) -> str:
        return tools.run(self.program, *arguments, "--socket", self.socket)

    def flush(self) -> None:
        """Everything is on S3 after this."""
        self.call("flush", "--deadline", f"{FLUSH_SECONDS_MAX}s")

    def restart(self) -> None:
        """Nothing is left in the node's memory."""
        self.flush()
        self.stop(signal.SIGKILL)
        self.start()

    def objects(self) -> list[Path]:
        """Files of chunks, where the server is the embedded one."""
        return [path for path in (self.folder / "objects" / "kvgate").rglob("*") if CHUNK.fullmatch(path.name)]

    def stop(self, how: int = signal.SIGTERM) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            self.process.wait(60)
        self.socket.unlink(missing_ok=True)
        self.arena.unlink(missing_ok=True)
