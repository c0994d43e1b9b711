"""The connector for vLLM: `KvGateConnector`, by `kv_connector_module_path = "kvgate.vllm"`.

| module      | what                                                                              |
|-------------|-----------------------------------------------------------------------------------|
| `connector` | vLLM's calls, handed to one of the two sides                                      |
| `settings`  | what `kv_connector_extra_config` may say                                          |
| `model`     | the space of a model: what must be equal for KV to be interchangeable             |
| `scheduler` | which chunks are there, what is loaded into which blocks, what is stored          |
| `worker`    | a rank: its tensors, and the jobs that move chunks                                |
| `metadata`  | what the scheduler tells the workers for a step                                   |
"""

from kvgate.vllm.connector import KvGateConnector

__all__ = ["KvGateConnector"]
