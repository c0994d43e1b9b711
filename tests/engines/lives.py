"""Lives of an engine: vLLM is imported once, and each life is a fork of this process, so it takes seconds."""

import json
import os
import random
import signal
import sys
import threading
import traceback

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    # The engine's core is in the life's own process.
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
)

import vllm.model_executor.models.llama
import vllm.v1.worker.cpu_model_runner  # noqa: F401
from vllm import LLM, SamplingParams

BLOCK_TOKENS = 128
LIFE_SECONDS = 120


def prompt(seed, tokens):
    numbers = random.Random(seed)
    return [numbers.randrange(4, 32000) for _ in range(tokens)]


def life(model, prompts, kv=None, rounds=1, max_tokens=16, **engine):
    """Generates for each prompt, a dictionary as vLLM takes it, `rounds` times. What came out of the last round, and
    the tokens that kvgate had."""
    read, write = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.close(read)
        try:
            result = {"ok": True, **run(model, prompts, kv, rounds, max_tokens, engine)}
        except BaseException as error:
            traceback.print_exc()
            result = {"ok": False, "error": f"{type(error).__name__}: {error}"}
        with os.fdopen(write, "w") as file:
            json.dump(result, file)
        os._exit(0)
    os.close(write)
    # One that hangs must not take the tests with it.
    timer = threading.Timer(LIFE_SECONDS, os.kill, (process, signal.SIGKILL))
    timer.start()
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(process, 0)
    timer.cancel()
    return json.loads(text) if text else {"ok": False, "error": "the engine's process died"}


def run(model, prompts, kv, rounds, max_tokens, engine):
    settings = {
        "model": str(model),
        "skip_tokenizer_init": True,
        # Another batch shape must not change a token.
        "dtype": "float32",
        "max_model_len": 16384,
        "enforce_eager": True,
        "enable_prefix_caching": True,
        "block_size": BLOCK_TOKENS,
        "seed": 0,
        "kv_cache_memory_bytes": 512 << 20,
        "max_num_seqs": 8,
        "disable_log_stats": False,
        **({"kv_transfer_config": kv} if kv else {}),
        **engine,
    }
    llm = LLM(**settings)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    for _ in range(rounds):
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    result = {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "external": metrics.get("vllm:external_prefix_cache_hits", 0),
    }
    llm.llm_engine.engine_core.shutdown()
    return result


def kvgate(socket, **extra):
    """vLLM's one flag."""
    return {
        "kv_connector": "KvGateConnector",
        "kv_connector_module_path": "kvgate.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # A machine with two cores that runs everything at once takes longer than the default.
        "kv_connector_extra_config": {"socket": str(socket), "lookup_deadline_ms": 5000, "load_policy": "always", **extra},
    }
