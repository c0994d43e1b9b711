"""The storage backend for SGLang's HiCache: `KvGateStorage`, by `--hicache-storage-backend dynamic`. docs/SGLANG.md has the
lines that start it.

| module     | what                                                                            |
|------------|---------------------------------------------------------------------------------|
| `storage`  | SGLang's calls: which pages are there, loaded, stored                            |
| `settings` | the keys of `--hicache-storage-backend-extra-config`                             |
| `identity` | what pins a model's weights, and all else that its KV depends on                 |
| `pools`    | SGLang's host pools: the space of each, and where its pages lie                  |
| `guard`    | what is answered when a call throws                                              |
"""

try:
    from sglang.srt.mem_cache.hicache_storage import PoolTransferResult  # noqa: F401
except ImportError as error:
    raise ImportError(f"kvgate.sglang needs SGLang 0.5.23 or newer: {error}") from error

from kvgate.sglang.storage import KvGateStorage

__all__ = ["KvGateStorage"]
