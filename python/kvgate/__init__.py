"""kvgate keeps the KV cache of prompts on S3 and gives it back to inference engines.

`kvgate.vllm` is the connector for vLLM. The command `kvgate` is the whole gateway: `kvgate serve`.
"""

from kvgate._native import Copier, KvGateError, Lookups, PageLookups, Prompt, Space, Worker, version

__version__ = version()
__all__ = ["Copier", "KvGateError", "Lookups", "PageLookups", "Prompt", "Space", "Worker", "__version__"]
