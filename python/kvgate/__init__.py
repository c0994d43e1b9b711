"""kvgate keeps the KV cache of prompts on S3 and gives it back to inference engines.

`connect()` is for any Python program: docs/PYTHON.md. `kvgate.vllm` is the connector for vLLM. The command `kvgate` is the whole
gateway: `kvgate serve`.
"""

from kvgate._native import Copier, Follower, KvGateError, Lookups, PageLookups, Prompt, Space, Worker, version
from kvgate.client import AsyncGateway, Gateway, Hit, Loaded, Stored, connect, space

__version__ = version()
__all__ = [
    "AsyncGateway",
    "Copier",
    "Follower",
    "Gateway",
    "Hit",
    "KvGateError",
    "Loaded",
    "Lookups",
    "PageLookups",
    "Prompt",
    "Space",
    "Stored",
    "Worker",
    "__version__",
    "connect",
    "space",
]
