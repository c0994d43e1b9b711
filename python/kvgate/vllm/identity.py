"""What pins a model's weights, and what else its KV depends on."""

import hashlib
import json
import re
from pathlib import Path

from kvgate import weights

COMMIT = "[0-9a-f]{40}"
SNAPSHOT = re.compile(rf"/models--[^/]+/snapshots/({COMMIT})/?$")
"""Where a hub's cache keeps a commit; vLLM takes this folder for the hub's name with HF_HUB_OFFLINE."""
USUAL_WEIGHTS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "dummy")
"""All of these take the folder's safetensors where there are some; random weights have a name of the user's."""
USUAL_CONFIGS = ("auto", "hf")
TEXT_BYTES_MAX = 512
"""Of a value in a space's `extra`."""


def architecture(model_config):
    return (getattr(model_config.hf_config, "architectures", None) or ["unknown"])[0]


def revision(vllm_config):
    """What pins the weights, never a path or a branch's name."""
    model_config = vllm_config.model_config
    refuse_what_nothing_pins(vllm_config)
    refuse_code_that_nothing_pins(model_config)
    if not Path(model_config.model).is_dir():
        return hub_commit(model_config)
    if snapshot := SNAPSHOT.search(model_config.model):
        return snapshot[1]
    try:
        return weights.digest(model_config.model)
    except FileNotFoundError as error:
        raise ValueError(f"{error}: set revision in kv_connector_extra_config to what pins its weights") from error


def refuse_what_nothing_pins(vllm_config):
    model_config = vllm_config.model_config
    config = model_config.hf_config_path or model_config.model
    for is_given, what in (
        (vllm_config.load_config.load_format == "dummy", "random weights (load_format dummy)"),
        (callable(model_config.hf_overrides), "a function in hf_overrides"),
        (config != model_config.model, f"a config from elsewhere (hf_config_path {config})"),
    ):
        if is_given:
            raise ValueError(
                f"nothing pins {what}: set revision in kv_connector_extra_config to a name of your own for this model, "
                "another one whenever it changes"
            )


def refuse_code_that_nothing_pins(model_config):
    """Code of another repository than the weights' comes from its main branch, or from `code_revision`."""
    if not model_config.trust_remote_code:
        return
    code = model_config.code_revision
    is_pinned = code is not None and re.fullmatch(COMMIT, code)
    elsewhere = sorted(repositories(getattr(model_config.hf_config, "auto_map", None)))
    if (code is not None or elsewhere) and not is_pinned:
        what = f"the code of {', '.join(elsewhere)}" if elsewhere else f"code_revision {code}"
        raise ValueError(
            f"nothing pins {what}: set --code-revision to a commit, or revision in kv_connector_extra_config to a name of your "
            "own for this model, another one whenever it changes"
        )


def repositories(auto_map):
    """Of the classes that a config takes from elsewhere, as `organisation/name--module.Class`."""
    if isinstance(auto_map, dict):
        return set().union(*map(repositories, auto_map.values()))
    if isinstance(auto_map, list | tuple):
        return set().union(*map(repositories, auto_map))
    return {auto_map.partition("--")[0]} if isinstance(auto_map, str) and "--" in auto_map else set()


def hub_commit(model_config):
    """Which vLLM has resolved the asked revision to, if the hub's library told it."""
    asked = model_config.revision
    commit = getattr(asked, "resolved", None) or asked
    if commit is None or not re.fullmatch(COMMIT, commit):
        raise ValueError(
            f"nothing pins the weights of {model_config.model}: set revision in kv_connector_extra_config to their commit"
        )
    return commit


def extra(vllm_config):
    """What else the KV of the same weights depends on. What is not set has no key, so that a new one changes no other id."""
    model_config = vllm_config.model_config
    config = model_config.hf_text_config
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    rope = {key: value for key in keys if (value := getattr(config, key, None)) is not None}
    return {
        "rope": fitting(json.dumps(rope, sort_keys=True)),
        "compute": str(model_config.dtype),
        "quantization": str(model_config.quantization or ""),
        **long_rope(model_config),
        **formats(vllm_config),
        **{name: fitting(json.dumps(value, sort_keys=True, default=str)) for name, value in flags(model_config)},
    }


def long_rope(model_config):
    """Of its two sets of factors vLLM takes one for all requests, by the longest sequence that the engine may have."""
    rope = getattr(model_config.hf_text_config, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):
        if isinstance(one, dict) and one.get("rope_type") == "longrope":
            is_long = model_config.max_model_len > one["original_max_position_embeddings"]
            return {"longrope": "long" if is_long else "short"}
    return {}


def formats(vllm_config):
    """Which of a folder's weights and configs are taken: it may hold several, and code of another commit."""
    model_config, chosen = vllm_config.model_config, {}
    if (weights_format := vllm_config.load_config.load_format) not in USUAL_WEIGHTS:
        chosen["load_format"] = str(weights_format)
    if model_config.config_format not in USUAL_CONFIGS:
        chosen["config_format"] = str(model_config.config_format)
    if model_config.trust_remote_code:
        chosen["remote_code"] = model_config.code_revision or "of the model"
    return chosen


def flags(model_config):
    """The engine's flags that are set and that change KV."""
    multimodal = model_config.multimodal_config
    for config, names in (
        (model_config, ("hf_overrides", "quantization_config")),
        # Neither is in the identifier of an image or a video.
        (multimodal, ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")),
    ):
        for name in names:
            value = getattr(config, name, None)
            if value and not callable(value):
                yield name, value


def fitting(text):
    """Itself, or its digest where it is too long for a space."""
    return text if len(text.encode()) <= TEXT_BYTES_MAX else hashlib.sha256(text.encode()).hexdigest()


def items_have_digests(vllm_config):
    """Whether the identifier of an image is a digest of it. With both of its caches off vLLM counts images instead, in each
    process from 1."""
    multimodal = vllm_config.model_config.multimodal_config
    return multimodal is None or multimodal.mm_processor_cache_gb > 0 or vllm_config.cache_config.enable_prefix_caching
