"""What pins a model's weights, and all else that its KV depends on: SGLang's page hashes are made of tokens alone."""

import dataclasses
import hashlib
import json
import re
from functools import cached_property
from pathlib import Path

from kvgate import weights

COMMIT = "[0-9a-f]{40}"
SNAPSHOT = re.compile(rf"/models--([^/]+)/snapshots/({COMMIT})/?$")
"""Where a hub's cache keeps a commit of a repository."""
FORMATS = {
    **dict.fromkeys(("auto", "safetensors", "instanttensor", "fastsafetensors", "bitsandbytes", "layered"), ""),
    **{name: name for name in ("pt", "npcache", "mistral", "gguf")},
}
"""SGLang's load formats that read the model's folder or commit and nothing else, each with its word in the space. A format
that reads files of another kind has a word, for they may hold other weights."""
OWN_FLAGS = (
    "quantization",
    "kv_cache_dtype",
    "json_model_override_args",
    "model_impl",
    "modelopt_quant",
    "torchao_config",
    "model_loader_extra_config",
)
"""SGLang's flags that change KV."""
USUAL = (None, "", "auto", "{}")
"""Their values that change nothing."""
TEXT_BYTES_MAX = 512
"""The most bytes of a value in a space's `extra`."""


@dataclasses.dataclass(frozen=True)
class Engine:
    """The engine whose KV it is. `server`: SGLang's arguments; None outside of a server."""

    settings: object
    server: object = None
    config: object = None
    """SGLang's `ModelConfig`."""
    is_running: bool = False
    """It was started without a storage backend: nobody knows what has become of its weights since."""

    @cached_property
    def model(self):
        if not (self.settings.model or self.config):
            raise ValueError(
                "kvgate: SGLang has no arguments in this process: set model and revision in the extra config"
            )
        return self.settings.model or (getattr(self.config.hf_config, "architectures", None) or ["unknown"])[0]

    @cached_property
    def revision(self):
        if self.settings.revision:
            return self.settings.revision
        if not self.config:
            raise ValueError(
                "kvgate: SGLang has no arguments in this process: set model and revision in the extra config"
            )
        for is_given, what in (
            (self.server.load_format not in FORMATS, f"what load_format {self.server.load_format} loads"),
            (self.server.custom_weight_loader, "what custom_weight_loader loads"),
            *((True, what) for what in elsewhere(self.server, self.config)),
        ):
            if is_given:
                raise ValueError(pin_it(what, "revision"))
        return pinned(
            self.config.model_path,
            self.server.revision,
            getattr(self.config.hf_config, "_commit_hash", None),
            "revision",
        )

    @cached_property
    def draft(self):
        """The draft model, and what pins its weights; empty without one."""
        server = self.server
        if server is None or not server.speculative_algorithm:
            return ""
        if self.settings.draft_revision:
            return fitting(f"{server.speculative_algorithm} {self.settings.draft_revision}")
        path = server.speculative_draft_model_path
        if not path or path == server.model_path:
            return server.speculative_algorithm
        revision = pinned(path, server.speculative_draft_model_revision, None, "draft_revision")
        return fitting(f"{server.speculative_algorithm} {revision}")

    @cached_property
    def extra(self):
        """All else. A setting that is not set has no key: so a new setting changes no space that does without it."""
        if self.config is None:
            return {}
        server, text = self.server, self.config.hf_text_config
        keys = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")
        rope = {key: value for key in keys if (value := getattr(text, key, None)) is not None}
        extra = {"rope": json.dumps(rope, sort_keys=True, default=str), "compute": str(self.config.dtype)}
        extra |= {name: str(value) for name in OWN_FLAGS if (value := getattr(server, name, None)) not in USUAL}
        if word := FORMATS.get(server.load_format):
            extra["load_format"] = word
        if path := server.quantization_param_path:
            extra["scales"] = hashlib.sha256(Path(path).read_bytes()).hexdigest()
        if adapters := self.adapters:
            extra["adapters"] = json.dumps(adapters, sort_keys=True)
        # SGLang's hashes of such an engine are of pairs of tokens, and its target may keep more than KV of tokens.
        if (algorithm := server.speculative_algorithm) and algorithm != "NGRAM":
            extra["speculative"] = algorithm
        return {name: fitting(value) for name, value in extra.items()}

    @property
    def adapters(self):
        """Digests of the LoRA adapters that SGLang loads at its start: a hash has an adapter's name and path only. One that is
        loaded later has a new name in the hashes each time."""
        digests = {}
        for adapter in self.server.lora_paths or ():
            path = adapter if isinstance(adapter, str) else getattr(adapter, "lora_path", None) or adapter["lora_path"]
            path = path.partition("=")[2] or path
            if not Path(path).is_dir():
                raise ValueError(f"kvgate: nothing pins the LoRA adapter {path}: give --lora-paths a folder")
            digests[path] = weights.digest(path, is_deep=False)
        return digests

    @property
    def window_tokens(self):
        """Tokens of the model's window; 0: none is known."""
        return self.settings.window_tokens or (getattr(self.config, "sliding_window_size", None) or 0)

    def heads(self, own, ranks, is_window):
        """KV heads of all ranks together, of which this rank has `own`."""
        if ranks == 1 or own > 1:
            return own * ranks
        # With more ranks than heads several have the same one.
        if self.config is None:
            raise ValueError("kvgate: the model's number of KV heads is not known outside of a server")
        total = getattr(self.config.hf_text_config, "swa_num_key_value_heads", None) if is_window else None
        return min(total or self.config.get_total_num_kv_heads(), ranks)


def of_server(settings):
    """The engine of this process."""
    from sglang.srt.runtime_context import get_memory, get_server_args, process_model_config

    try:
        server = get_server_args()
    except ValueError:
        return Engine(settings)
    refuse(server)
    config = process_model_config()
    refuse_long_rope(config)
    return Engine(settings, server, config, is_running=get_memory().hicache_storage_backend is None)


def refuse(server):
    ranks, stages = getattr(server, "tp_size", 1), getattr(server, "pp_size", 1)
    nodes = getattr(server, "nnodes", 1)
    if nodes > stages or stages % nodes:
        raise ValueError(
            f"kvgate: the {ranks} tensor-parallel ranks of an engine must be on one node, and share its gateway: with --nnodes "
            f"{nodes} set --pp-size to a multiple of it, or run an engine on each node"
        )


def refuse_long_rope(config):
    """LongRoPE has two sets of factors. SGLang takes the long ones for all tokens that it computes at once, as soon as one of
    them is beyond the length that the model was first trained for. So the KV of the same tokens depends on other requests."""
    text = config.hf_text_config
    for rope in (getattr(text, "rope_scaling", None), getattr(text, "rope_parameters", None)):
        for one in (rope, *rope.values()) if isinstance(rope, dict) else ():
            if not isinstance(one, dict) or "longrope" not in (one.get("rope_type"), one.get("type")):
                continue
            tokens = one.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", text.max_position_embeddings
            )
            if config.context_len > tokens:
                raise ValueError(
                    f"kvgate can't reuse KV of LongRoPE beyond {tokens} tokens: SGLang computes a prompt's KV in another way "
                    f"while a longer one runs beside it. Set --context-length {tokens}, or run this model without kvgate"
                )


def pinned(path, asked, resolved, key):
    """The commit or digest that pins the weights. A path or a branch's name never does."""
    if snapshot := SNAPSHOT.search(str(path)):
        return snapshot[2]
    if Path(path).is_dir():
        try:
            return weights.digest(path)
        except FileNotFoundError as error:
            raise ValueError(pin_it(f"{path} ({error})", key)) from error
    for commit in (asked, resolved):
        if commit and re.fullmatch(COMMIT, commit):
            return commit
    raise ValueError(pin_it(f"the weights of {path}", key))


def pin_it(what, key):
    return (
        f"kvgate: nothing pins {what}: set {key} in --hicache-storage-backend-extra-config to the commit, or to a name of your "
        "own that changes whenever the weights do"
    )


def elsewhere(server, config):
    """The parts that a model takes from other repositories. Its own commit does not pin them."""
    if not server.trust_remote_code:
        return
    snapshot = SNAPSHOT.search(str(config.model_path))
    own = snapshot[1].replace("--", "/") if snapshot else config.model_path
    for reference in references(getattr(config.hf_config, "auto_map", None) or {}):
        repository, separator, _ = reference.rpartition("--")
        # For a hub's model Transformers writes its own name before each.
        if separator and repository != own:
            yield f"code from another repository (auto_map {reference})"


def references(auto_map):
    for value in auto_map.values():
        yield from (name for name in (value if isinstance(value, list | tuple) else [value]) if name)


def fitting(text):
    """The text, or its digest where it is too long for a space."""
    return text if len(text.encode()) <= TEXT_BYTES_MAX else hashlib.sha256(text.encode()).hexdigest()
