"""What pins a model's weights, and what else its KV depends on."""

import json
import re
from pathlib import Path

from kvgate import weights

COMMIT = "[0-9a-f]{40}"
SNAPSHOT = re.compile(rf"/models--[^/]+/snapshots/({COMMIT})/?$")
"""Where a hub's cache keeps a commit; vLLM takes this folder for the hub's name with HF_HUB_OFFLINE."""


def architecture(model_config):
    return (getattr(model_config.hf_config, "architectures", None) or ["unknown"])[0]


def revision(vllm_config):
    """What pins the weights, never a path or a branch's name."""
    model_config = vllm_config.model_config
    if not Path(model_config.model).is_dir():
        return hub_commit(model_config)
    if snapshot := SNAPSHOT.search(model_config.model):
        return snapshot[1]
    try:
        return weights.digest(model_config.model)
    except FileNotFoundError as error:
        raise ValueError(f"{error}: set revision in kv_connector_extra_config to what pins its weights") from error


def hub_commit(model_config):
    """Which vLLM has resolved the asked revision to, if the hub's library told it."""
    asked = model_config.revision
    commit = getattr(asked, "resolved", None) or asked
    if commit is None or not re.fullmatch(COMMIT, commit):
        raise ValueError(
            f"nothing pins the weights of {model_config.model}: set revision in kv_connector_extra_config to their commit"
        )
    return commit


def extra(model_config):
    """What else the KV of the same weights depends on."""
    config = model_config.hf_text_config
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    rope = {key: value for key in keys if (value := getattr(config, key, None)) is not None}
    return {
        "rope": json.dumps(rope, sort_keys=True),
        "compute": str(model_config.dtype),
        "quantization": str(model_config.quantization or ""),
    }
