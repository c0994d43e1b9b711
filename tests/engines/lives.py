"""Lives of an engine: vLLM is imported once, and each life is a fork of this process, so it takes seconds."""

import json
import os
import random
import signal
import sys
import tempfile
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
from vllm.lora.request import LoRARequest

BLOCK_TOKENS = 128
LIFE_SECONDS = 300


def prompt(seed, tokens):
    numbers = random.Random(seed)
    return [numbers.randrange(4, 32000) for _ in range(tokens)]


def life(model, prompts, kv=None, act=None, max_tokens=16, adapters=None, **engine):
    """Generates for each prompt, a dictionary as vLLM takes it. Returns the output, the tokens that kvgate had, and its
    metrics.

    `act(llm, generate)` does something else before, or instead; its answer is the result's `act`. `adapters`: name and
    folder of each prompt's LoRA adapter.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    with tempfile.TemporaryFile() as said:
        process = os.fork()
        if process == 0:
            os.close(read)
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            try:
                result = {"ok": True, **run(model, prompts, kv, act, max_tokens, adapters, engine)}
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
        result = json.loads(text) if text else {"ok": False, "error": "the engine's process died"}
        said.seek(0)
        return {**result, "said": said.read().decode(errors="replace")}


def alive(model, prompts, kv=None, **more):
    """A life that must not fail."""
    result = life(model, prompts, kv, **more)
    if not result["ok"]:
        raise AssertionError(f"{result['error']}\n{result['said'][-5000:]}")
    return result


def run(model, prompts, kv, act, max_tokens, adapters, engine):
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
    if (ranks := engine.get("tensor_parallel_size", 1) * engine.get("pipeline_parallel_size", 1)) > 1:
        # A core each: left alone, vLLM wants a NUMA node for each rank.
        cores = sorted(os.sched_getaffinity(0))
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(str(cores[rank % len(cores)]) for rank in range(ranks))
        settings["distributed_executor_backend"] = "mp"
    llm = LLM(**settings)
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    loras = None
    if adapters:
        loras = [LoRARequest(name, number + 1, str(folder)) for number, (name, folder) in enumerate(adapters)]

    def generate(prompts, loras=None):
        outputs = llm.generate(prompts, sampling, lora_request=loras, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs], outputs

    acted = act(llm, generate) if act else None
    tokens, outputs = generate(prompts, loras) if prompts else ([], [])
    # Of a histogram, how often.
    metrics = {
        metric.name: getattr(metric, "value", None) or getattr(metric, "count", 0) for metric in llm.get_metrics()
    }
    sources = {
        metric.labels["source"]: metric.value
        for metric in llm.get_metrics()
        if metric.name == "vllm:prompt_tokens_cached_by_source" and metric.value
    }
    result = {
        "tokens": tokens,
        "sources": sources,
        "cached": [output.num_cached_tokens for output in outputs],
        "external": metrics.get("vllm:external_prefix_cache_hits", 0),
        "preemptions": metrics.get("vllm:num_preemptions", 0),
        "metrics": {name: value for name, value in metrics.items() if "kvgate" in name},
        "drafts": {name: value for name, value in metrics.items() if "spec_decode" in name},
        "act": acted,
    }
    llm.llm_engine.engine_core.shutdown()
    return result


def forget(llm):
    """Empties vLLM's own cache. Before that, the blocks that stores still needed come back."""
    client = llm.llm_engine.engine_core
    while client.engine_core.scheduler.has_requests():
        client.get_output()
    if not llm.reset_prefix_cache():
        raise AssertionError("vLLM's own cache could not be reset")


def kvgate(socket, **extra):
    """vLLM's one flag."""
    return {
        "kv_connector": "KvGateConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        # A machine with two cores that runs everything at once takes longer than the default.
        "kv_connector_extra_config": {
            "socket": str(socket),
            "lookup_deadline_ms": 5000,
            "load_policy": "always",
            **extra,
        },
    }
