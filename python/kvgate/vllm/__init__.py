"""The connector for vLLM: `KvGateConnector`. The plugin (`kvgate.plugin`) tells vLLM its name.

| module      | what                                                                              |
|-------------|-----------------------------------------------------------------------------------|
| `connector` | vLLM's calls, handed to one of the two sides                                      |
| `settings`  | the keys of `kv_connector_extra_config`                                           |
| `model`     | the spaces of a model: what must be equal for KV to be interchangeable            |
| `kinds`     | the kinds of KV that a model's layers keep                                        |
| `identity`  | what pins a model's weights                                                       |
| `adapters`  | LoRA adapters by their digests                                                    |
| `gateway`   | a gateway for the node, started when none answers                                 |
| `scheduler` | which chunks are there, what is loaded into which blocks, what is stored          |
| `stores`    | which chunks are stored after a step                                              |
| `blocks`    | vLLM's blocks that copies read, held by references of kvgate's own                |
| `doubts`    | which tokens in vLLM's blocks are not known to be right                           |
| `rates`     | whether a load is quicker than computing                                          |
| `worker`    | a rank: its tensors, and the jobs that move chunks                                |
| `metadata`  | what the scheduler and the workers tell each other                                |
| `stats`     | vLLM's log line and Prometheus metrics                                            |
| `events`    | KV events for routers                                                             |
| `tier`      | below the CPU tier of vLLM's own offloading, in place of the connector            |
| `pages`     | the spaces of the pages that the tier keeps                                       |
| `guard`     | what is answered when one of vLLM's calls throws                                  |
| `versions`  | what the running vLLM can do                                                      |
"""

import logging

try:
    from vllm import __version__ as vllm_version
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.logger import init_logger
except ImportError as error:
    raise ImportError(f"kvgate.vllm needs vLLM 0.32 or newer: {error}") from error

from kvgate.plugin import register
from kvgate.vllm.versions import check

# vLLM sets up its own loggers only. kvgate's lines go to the same place, unless the program has set up another.
ours, vllms = logging.getLogger("kvgate"), logging.getLogger("vllm")
if not ours.handlers and ours.level == logging.NOTSET:
    ours.handlers, ours.propagate = list(vllms.handlers), vllms.propagate
    ours.setLevel(vllms.level)

for lacking in check(KVConnectorBase_V1, vllm_version):
    init_logger(__name__).info("kvgate: %s", lacking)

from kvgate.vllm.connector import KvGateConnector  # noqa: E402

# Where VLLM_PLUGINS leaves the plugin out. MultiConnector looks up the statistics of its parts by their names alone: without
# this `vllm serve` would end.
register()

__all__ = ["KvGateConnector"]
