"""Digests of folders with weights. They tell one model or adapter from another, whatever its name is."""

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path

logger = logging.getLogger(__name__)

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.tensors")
NO_MATTER = (
    ".*",
    "__pycache__",
    "*.md",
    "LICENSE*",
    "generation_config.json",
    "chat_template*",
    "tokenizer.json",
    "tokenizer.model*",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
"""Files that the KV of given tokens never depends on. Hidden files belong to a hub or to git. All other files count: remote
code, configs of all formats, files in subfolders."""
IGNORED_FOLDER = "original"
"""A subfolder of the model's folder. vLLM leaves it out, too."""
READ_BYTES = 8 << 20
THREADS = 8
DIGEST = re.compile("[0-9a-f]{64}")
TOLD_BYTES = 1 << 30
"""The digest of a folder with fewer bytes is made without a line in the log."""
TOLD_SECONDS = 30


def files(folder, is_deep=True):
    """The files that the KV depends on. `is_deep`: also in subfolders. An adapter is loaded from its own folder only."""
    folder = Path(folder)
    found = list(walk(folder, is_deep, ()))
    if is_deep:
        found = [path for path in found if path.relative_to(folder).parts[0] != IGNORED_FOLDER]
    if not any(fnmatch(path.name, pattern) for path in found for pattern in WEIGHTS):
        raise FileNotFoundError(f"{folder} has no weights ({', '.join(WEIGHTS)})")
    return sorted(found)


def walk(folder, is_deep, above):
    """Files below a folder. Follows links, as a loader does, but not back to a folder above."""
    state = folder.stat()
    here = (state.st_dev, state.st_ino)
    if here in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if any(fnmatch(entry.name, pattern) for pattern in NO_MATTER):
                continue
            if entry.is_file():
                yield Path(entry.path)
            elif is_deep and entry.is_dir():
                yield from walk(Path(entry.path), is_deep, (*above, here))


def stamp(folder, is_deep=True):
    """A value that changes when a file is changed. It is made without reading the files."""
    return tuple((str(path), *state(path)) for path in files(folder, is_deep))


def state(path):
    status = path.stat()
    return status.st_ino, status.st_size, status.st_ctime_ns


def digest(folder, is_deep=True):
    """The digest of all bytes that the KV depends on, as hex.

    A file is read once. Its digest is remembered in ~/.cache/kvgate until the file changes, for all ranks and later starts.
    """
    paths = files(folder, is_deep)
    progress = Progress(folder, sum(path.stat().st_size for path in paths))
    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(lambda path: file_digest(path, progress), paths))
    whole = hashlib.sha256()
    for path, content in zip(paths, digests, strict=True):
        name = os.fsencode(path.relative_to(folder))
        whole.update(len(name).to_bytes(8, "big") + name + content.encode())
    return whole.hexdigest()


class Progress:
    """The progress of one folder's digest, for the log: hundreds of GB take minutes."""

    def __init__(self, folder, size, now=time.monotonic):
        self.folder, self.size, self.now = folder, size, now
        self.lock = threading.Lock()
        self.done = 0
        self.told: float | None = None
        """The time of the last line in the log; None: no file had to be read so far."""

    def read(self, size):
        with self.lock:
            self.done += size
            if self.size < TOLD_BYTES:
                return
            if self.told is None:
                self.told = self.now()
                logger.info(
                    "kvgate: reading %.1f GB in %s once for their digest, which names the cache's space",
                    self.size / 1e9,
                    self.folder,
                )
            elif self.now() - self.told >= TOLD_SECONDS:
                self.told = self.now()
                logger.info("kvgate: %d %% of %s are digested", self.done * 100 // self.size, self.folder)

    def known(self, size):
        with self.lock:
            self.done += size


def file_digest(path, progress):
    """The digest of one file. Remembered digests only save time: if one can't be used, the file is read."""
    with contextlib.ExitStack() as held:
        before = state(path)
        remembered = None
        # Without a home Path.home() raises RuntimeError.
        with contextlib.suppress(OSError, RuntimeError):
            cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvgate"
            remembered = cache / hashlib.sha256(repr((str(path.resolve()), *before)).encode()).hexdigest()
            cache.mkdir(parents=True, exist_ok=True)
            # Ranks come together: one reads, the others wait for it.
            lock = held.enter_context(remembered.with_suffix(".lock").open("w"))
            fcntl.flock(lock, fcntl.LOCK_EX)
            with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
                known = remembered.read_text()
                if DIGEST.fullmatch(known):
                    progress.known(before[1])
                    return known
        content = read_digest(path, progress)
        # A file that was written to meanwhile does not belong to the state that was read before.
        if remembered is not None and state(path) == before:
            remember(remembered, content)
        return content


def remember(path, content):
    """Writes the digest to its file as a whole, or not at all."""
    new = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
    try:
        with new.open("w") as file:
            file.write(content)
        new.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            new.unlink()


def read_digest(path, progress):
    content = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            content.update(block)
            progress.read(len(block))
    return content.hexdigest()
