"""The revision that pins a model's weights, and the settings that its KV depends on besides them."""

import hashlib
import json
import os
import re
from pathlib import Path

from kvgate import weights

COMMIT = "[0-9a-f]{40}"
SNAPSHOT = re.compile(rf"/models--[^/]+/snapshots/({COMMIT})/?$")
"""Where a hub's cache keeps a commit; vLLM takes this folder for the hub's name with HF_HUB_OFFLINE."""
FORMATS = {
    **dict.fromkeys(
        ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "bitsandbytes"), ""
    ),
    **{name: name for name in ("mistral", "pt", "npcache", "sharded_state", "runai_streamer_sharded")},
}
"""vLLM's load formats that read the model's folder or commit and nothing else, each with its word in the space. A format
that reads files of another kind has a word, for they may hold other weights."""
ENVIRONMENT = ("VLLM_HUMMING_ONLINE_QUANT_CONFIG", "VLLM_HUMMING_INPUT_QUANT_CONFIG")
"""vLLM's variables that say how weights and activations are quantized."""
TEXT_BYTES_MAX = 512
"""The most bytes of a value in a space's `extra`."""


def architecture(model_config):
    return (getattr(model_config.hf_config, "architectures", None) or ["unknown"])[0]


def revision(vllm_config):
    """The commit or digest that pins the weights. A path or a branch's name never does."""
    model_config = vllm_config.model_config
    refuse_what_nothing_pins(vllm_config)
    if Path(model_config.model).is_file():
        raise ValueError(pin_it(f"a model of a single file ({model_config.model})"))
    if not Path(model_config.model).is_dir():
        return hub_commit(model_config)
    if snapshot := SNAPSHOT.search(model_config.model):
        return snapshot[1]
    try:
        return weights.digest(model_config.model)
    except FileNotFoundError as error:
        raise ValueError(f"{error}: set revision in kv_connector_extra_config to what pins its weights") from error


def pin_it(what):
    return (
        f"nothing pins {what}: set revision in kv_connector_extra_config to a name of your own for this model, "
        "another one whenever it changes"
    )


def refuse_what_nothing_pins(vllm_config):
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    config = model_config.hf_config_path or model_config.model
    for is_given, what in (
        (load_config.load_format == "dummy", "random weights (load_format dummy)"),
        (load_config.load_format not in (*FORMATS, "dummy"), f"what load_format {load_config.load_format} loads"),
        (getattr(model_config, "model_weights", None), "weights in an object storage"),
        (callable(model_config.hf_overrides), "a function in hf_overrides"),
        (getattr(model_config, "model_class_overrides", None), "the code of model_class_overrides"),
        (config != model_config.model, f"a config from elsewhere (hf_config_path {config})"),
        *((True, what) for what in elsewhere(model_config)),
    ):
        if is_given:
            raise ValueError(pin_it(what))


def elsewhere(model_config):
    """The parts that a model takes from other repositories. Its own commit does not pin them."""
    config, code = model_config.hf_config, getattr(model_config, "code_revision", None)
    for name in ("text_model_id", "audio_model_id"):
        if other := getattr(config, name, None):
            yield f"weights from another repository ({name} {other})"
    if not getattr(model_config, "trust_remote_code", False):
        return
    is_pinned = code is not None and re.fullmatch(COMMIT, code)
    if code is not None and not is_pinned:
        yield f"code_revision {code}, which is no commit"
    for reference in references(getattr(config, "auto_map", None) or {}):
        repository, separator, _ = reference.rpartition("--")
        # For a hub's model Transformers writes its own name before each.
        if separator and repository != model_config.model and not is_pinned:
            yield f"code from another repository (auto_map {reference}, without a commit as code_revision)"


def references(auto_map):
    for value in auto_map.values():
        yield from (name for name in (value if isinstance(value, list | tuple) else [value]) if name)


def hub_commit(model_config):
    """The commit that vLLM has resolved the revision to, if the hub's library told it."""
    asked = model_config.revision
    commit = getattr(asked, "resolved", None) or asked
    if commit is None or not re.fullmatch(COMMIT, commit):
        raise ValueError(
            f"nothing pins the weights of {model_config.model}: set revision in kv_connector_extra_config to their commit"
        )
    return commit


def extra(vllm_config):
    """All else that the KV of the same weights depends on. A setting that is not set has no key: so a new setting changes
    no space that does without it."""
    model_config = vllm_config.model_config
    config = model_config.hf_text_config
    keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
    rope = {key: value for key in keys if (value := getattr(config, key, None)) is not None}
    return {
        "rope": fitting(json.dumps(rope, sort_keys=True)),
        "compute": str(model_config.dtype),
        "quantization": str(model_config.quantization or ""),
        **long_rope(model_config),
        **{name: fitting(json.dumps(value, sort_keys=True, default=str)) for name, value in flags(vllm_config)},
    }


def long_rope(model_config):
    """LongRoPE has two sets of factors. vLLM takes one of them for all requests, by the longest sequence of the engine."""
    rope = getattr(model_config.hf_text_config, "rope_parameters", None) or {}
    for one in (rope, *rope.values()):
        if isinstance(one, dict) and one.get("rope_type") == "longrope":
            is_long = built_for(model_config) > one["original_max_position_embeddings"]
            return {"longrope": "long" if is_long else "short"}
    return {}


def built_for(model_config):
    """The tokens that the model was built for. With `--max-model-len -1` vLLM lowers the length afterwards."""
    if model_config.original_max_model_len == -1:
        return model_config.get_and_verify_max_len(-1)
    return model_config.max_model_len


def flags(vllm_config):
    """The engine's flags that are set and that change KV."""
    model_config, load_config = vllm_config.model_config, vllm_config.load_config
    multimodal = model_config.multimodal_config
    for config, names in (
        (model_config, ("hf_overrides", "quantization_config", "code_revision", "disable_sliding_window")),
        # The modules that an adapter is applied to.
        (getattr(vllm_config, "lora_config", None), ("target_modules",)),
        # They are not in the identifier of an image or a video.
        (multimodal, ("mm_processor_kwargs", "media_io_kwargs", "video_pruning_rate", "mm_encoder_attn_dtype")),
    ):
        for name in names:
            value = getattr(config, name, None)
            if value and not callable(value):
                yield name, sorted(value) if name == "target_modules" else value
    # Flags that have a default: only another value counts.
    for config, name, usual in (
        (model_config, "config_format", ("auto", "hf")),
        (model_config, "model_impl", ("auto", "vllm")),
        (multimodal, "video_pruning_method", ("evs",)),
        (load_config, "ignore_patterns", (["original/**/*"], [])),
    ):
        value = getattr(config, name, None)
        if value is not None and value not in usual:
            yield name, value
    if kind := FORMATS.get(load_config.load_format):
        yield "load_format", kind
    loader = getattr(load_config, "model_loader_extra_config", None)
    if isinstance(loader, dict) and (pattern := loader.get("pattern")):
        yield "pattern", pattern
    for name in ENVIRONMENT:
        if value := os.environ.get(name):
            yield name, value


def fitting(text):
    """The text, or its digest where it is too long for a space."""
    return text if len(text.encode()) <= TEXT_BYTES_MAX else hashlib.sha256(text.encode()).hexdigest()


def items_have_digests(vllm_config):
    """Whether the identifier of an image is a digest of it. Without its two caches vLLM numbers images instead, in each
    process from 1."""
    multimodal = vllm_config.model_config.multimodal_config
    return multimodal is None or multimodal.mm_processor_cache_gb > 0 or vllm_config.cache_config.enable_prefix_caching
