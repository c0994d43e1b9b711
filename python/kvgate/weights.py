"""Digests of folders with weights: what tells one model or adapter from another, whatever they are called."""

import contextlib
import fcntl
import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf", "*.npz", "*.tensors")
CONFIGS = ("*.json", "**/*.py")
"""Of the model, its quantization, its processor of images; and code that comes with it."""
OTHERS = (
    "added_tokens.json",
    "chat_template.json",
    "generation_config.json",
    "merges.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)
"""What these say is in the tokens already, or comes after the KV."""
READ_BYTES = 8 << 20
THREADS = 8
DIGEST = re.compile("[0-9a-f]{64}")


def files(folder):
    """Those that the KV depends on."""
    folder = Path(folder)
    found = {path for pattern in WEIGHTS for path in folder.glob(pattern)}
    if not found:
        raise FileNotFoundError(f"{folder} has no weights ({', '.join(WEIGHTS)})")
    found |= {path for pattern in CONFIGS for path in folder.glob(pattern) if path.name not in OTHERS}
    return sorted(path for path in found if path.is_file())


def stamp(folder):
    """Another one when a file was changed, without reading it."""
    return tuple((str(path.relative_to(folder)), *state(path)) for path in files(folder))


def state(path):
    status = path.stat()
    return status.st_ino, status.st_size, status.st_ctime_ns


def digest(folder, told=None):
    """Of all bytes of a folder's weights and configs, as hex. A file is read once and remembered for as long as it isn't
    changed, in ~/.cache/kvgate, for all ranks and later starts. `told` is called with the bytes of each file that was read,
    and of all files."""
    paths = files(folder)
    total = sum(path.stat().st_size for path in paths)

    def one(path):
        content = file_digest(path)
        if told is not None:
            told(path.stat().st_size, total)
        return content

    with ThreadPoolExecutor(THREADS) as pool:
        digests = list(pool.map(one, paths))
    whole = hashlib.sha256()
    for path, content in zip(paths, digests, strict=True):
        whole.update(f"{path.relative_to(folder)}\0{content}\n".encode())
    return whole.hexdigest()


def file_digest(path):
    """What is remembered, or else read: a cache that can't be used costs time, and nothing else."""
    with contextlib.ExitStack() as stack:
        remembered = None
        # No home, a full or foreign folder, a file system without locks.
        with contextlib.suppress(OSError, RuntimeError):
            remembered = stack.enter_context(cache_file(path).open("a+b"))
            # Ranks come together: one reads, the others wait for it.
            fcntl.flock(remembered, fcntl.LOCK_EX)
            remembered.seek(0)
            known = remembered.read().decode("ascii", "replace")
            if DIGEST.fullmatch(known):
                return known
        content = read_digest(path)
        if remembered is not None:
            # Half of it is no digest, so it would be read again.
            with contextlib.suppress(OSError):
                remembered.truncate(0)
                remembered.write(content.encode())
                remembered.flush()
        return content


def cache_file(path):
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvgate"
    cache.mkdir(parents=True, exist_ok=True)
    key = repr((str(path.resolve()), *state(path)))
    return cache / hashlib.sha256(key.encode()).hexdigest()


def read_digest(path):
    content = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            content.update(block)
    return content.hexdigest()
