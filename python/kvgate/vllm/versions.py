"""Which of the hooks that the connector needs the running vLLM has."""

REQUIRED = (
    "register_kv_caches",
    "get_finished",
    "get_transfer_results",
    "bind_gpu_block_pool",
    "get_block_ids_with_load_errors",
    "update_connector_output",
    "build_connector_worker_meta",
    "handle_preemptions",
)
"""Without these hooks answers might be wrong."""

LACKING = {
    "on_new_request": "chunks are looked up only when a request is scheduled",
    "get_kv_connector_stats": "there are no kvgate metrics",
    "take_events": "subscribers of KV events are not told what the gateway has",
    "reset_cache": "a reset does not reach kvgate",
    "unregister_kv_caches": "before sleep mode wait until the engine is idle",
}
"""Hooks that are not required, each with the loss without it."""


def check(base, version):
    """Lines that tell which hooks this vLLM lacks, and the loss. Raises ImportError if a required one is missing."""
    if missing := [name for name in REQUIRED if not hasattr(base, name)]:
        raise ImportError(f"kvgate needs vLLM 0.32 or newer: {version} has no {', '.join(missing)}")
    return [f"vLLM {version} has no {name}: {means}" for name, means in LACKING.items() if not hasattr(base, name)]
