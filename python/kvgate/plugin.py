"""vLLM's plugin `kvgate`: it tells vLLM where `KvGateConnector` is, so that `kv_connector` alone names it.

vLLM calls `register` in each of its processes, by the entry point in pyproject.toml. Nothing but names is registered:
vLLM imports the connector when a configuration asks for it. VLLM_PLUGINS may leave the plugin out; then
`kv_connector_module_path` names the module.
"""

import logging

logger = logging.getLogger(__name__)

CONNECTOR = ("KvGateConnector", "kvgate.vllm", "KvGateConnector")
"""Name, module and class."""


def register():
    """May be called any number of times, and never throws: an exception would end vLLM's process, whoever asked for kvgate
    or not."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

        if CONNECTOR[0] not in KVConnectorFactory._registry:
            KVConnectorFactory.register_connector(*CONNECTOR)
    except Exception as error:
        logger.warning("kvgate: this vLLM has no place for KvGateConnector: %s", error)
