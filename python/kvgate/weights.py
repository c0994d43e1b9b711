"""Digests of folders with weights: what tells one model or adapter from another, whatever they are called."""

import fcntl
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
CONFIGS = ("config.json", "adapter_config.json")
READ_BYTES = 8 << 20
THREADS = 8


def files(folder):
    """Those that the KV depends on."""
    folder = Path(folder)
    found = {path for pattern in WEIGHTS for path in folder.glob(pattern)}
    if not found:
        raise FileNotFoundError(f"{folder} has no weights ({', '.join(WEIGHTS)})")
    return sorted(found | {folder / name for name in CONFIGS if (folder / name).is_file()})


def stamp(folder):
    """Another one when a file was changed, without reading it."""
    return tuple((path.name, *state(path)) for path in files(folder))


def state(path):
    status = path.stat()
    return status.st_ino, status.st_size, status.st_ctime_ns


def digest(folder):
    """Of all bytes of a folder's weights and configs, as hex. A file is read once and remembered for as long as it isn't
    changed, in ~/.cache/kvgate, for all ranks and later starts."""
    with ThreadPoolExecutor(THREADS) as pool:
        paths = files(folder)
        digests = list(pool.map(file_digest, paths))
    whole = hashlib.sha256()
    for path, content in zip(paths, digests, strict=True):
        whole.update(f"{path.name}\0{content}\n".encode())
    return whole.hexdigest()


def file_digest(path):
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvgate"
    key = repr((str(path.resolve()), *state(path)))
    remembered = cache / hashlib.sha256(key.encode()).hexdigest()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        file = remembered.open("a+")
    except OSError:
        # It only takes longer the next time.
        return read_digest(path)
    with file:
        # Ranks come together: one reads, the others wait for it.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        if len(known := file.read()) == 64:
            return known
        content = read_digest(path)
        file.truncate(0)
        file.write(content)
        return content


def read_digest(path):
    content = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while block := file.read(READ_BYTES):
            content.update(block)
    return content.hexdigest()
