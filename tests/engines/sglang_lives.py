"""Lives of a real SGLang: it is imported once, and each life is a fork of this process, which is asked line by line. SGLang starts
new interpreters for its scheduler; here these are forks, too."""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")

import cpu_hicache  # noqa: F401
import sglang
import sglang.srt.managers.detokenizer_manager
import sglang.srt.managers.scheduler
import sglang.srt.models.registry
from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
from sglang.srt.server_args import ServerArgs

PAGE = 64
LIFE_SECONDS = 240


def prompt(seed, tokens):
    numbers = random.Random(seed)
    return [numbers.randrange(4, 32000) for _ in range(tokens)]


def kvgate(socket, **extra):
    """SGLang's flags."""
    config = {
        "backend_name": "kvgate",
        "module_path": "kvgate.sglang",
        "class_name": "KvGateStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        # The tests' prompts are short.
        "prefetch_threshold": PAGE,
        "socket": str(socket),
        **extra,
    }
    return {
        "enable_hierarchical_cache": True,
        "hicache_ratio": 2.0,
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        # A CPU has no kernels to copy with.
        "hicache_io_backend": "direct",
        "hicache_mem_layout": "page_first_direct",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(config),
    }


class Life:
    """Ends with its `with`."""

    def __init__(self, model, log, storage=None, flags=None, **engine):
        """`storage`: SGLang's settings for kvgate. `flags`: more of a command line."""
        self.log = Path(log)
        settings = {
            "model_path": str(model),
            "device": "cpu",
            "attention_backend": "torch_native",
            "skip_tokenizer_init": True,
            "disable_overlap_schedule": True,
            # Others may have some of the memory; the number of tokens is what bounds it.
            "mem_fraction_static": 0.6,
            "max_total_tokens": 8192,
            "page_size": PAGE,
            # Another batch shape must not change a token.
            "dtype": "float32",
            "random_seed": 0,
            "log_level": "info",
            **(storage or {}),
            **engine,
        }
        asked, answered = os.pipe(), os.pipe()
        sys.stdout.flush()
        self.process = os.fork()
        if self.process == 0:
            # Its schedulers are in its session.
            os.setsid()
            os.close(asked[1])
            os.close(answered[0])
            with self.log.open("wb") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            run(settings, flags or [], os.fdopen(asked[0]), os.fdopen(answered[1], "w"))
        os.close(asked[0])
        os.close(answered[1])
        self.asks, self.answers = os.fdopen(asked[1], "w"), os.fdopen(answered[0])
        # One that hangs must not take the tests with it.
        self.timer = threading.Timer(LIFE_SECONDS, self.kill)
        self.timer.start()
        self.ask("started")

    def ask(self, what):
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(what), file=self.asks, flush=True)
        line = self.answers.readline()
        if not line:
            self.end()
            raise RuntimeError(f"SGLang has ended:\n{self.log.read_text(errors='replace')[-6000:]}")
        return json.loads(line)

    def generate(self, prompts):
        """The tokens, and for each prompt how many came from the storage."""
        answer = self.ask(prompts)
        return answer["tokens"], answer["stored"]

    def update_weights(self, folder):
        """Those of another folder, in the running engine."""
        self.done({"update": str(folder)})

    def flush(self):
        """SGLang's cache, on the GPU and in its host pools."""
        self.done({"flush": True})

    def done(self, what):
        """Asks until SGLang has nothing else to do: it refuses until then."""
        deadline = time.monotonic() + 60
        while not self.ask(what)["done"]:
            assert time.monotonic() < deadline, f"SGLang does not {what}"
            time.sleep(0.1)

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process, signal.SIGKILL)

    def end(self):
        self.timer.cancel()
        with contextlib.suppress(BrokenPipeError):
            self.asks.close()
        # At the end of its answers SGLang has ended its schedulers.
        self.answers.read()
        self.answers.close()
        self.kill()
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.process, 0)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()


def run(settings, flags, asks, answers):
    """The life's process."""
    forks = multiprocessing.set_start_method
    multiprocessing.set_start_method = lambda *_, **__: forks("fork", force=True)
    status = 1
    try:
        engine = sglang.Engine(**{**told(flags), **settings})
        sampling = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
        for line in asks:
            asked, said = json.loads(line), {}
            if isinstance(asked, dict):
                said["done"] = changed(engine, asked)
            elif asked != "started":
                outputs = engine.generate(input_ids=asked, sampling_params=sampling)
                details = [output["meta_info"].get("cached_tokens_details") or {} for output in outputs]
                said["tokens"] = [output["output_ids"] for output in outputs]
                said["stored"] = [of.get("storage", 0) for of in details]
            print(json.dumps(said), file=answers, flush=True)
        engine.shutdown()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def changed(engine, asked):
    """Whether SGLang has done it."""
    if "update" in asked:
        wanted = UpdateWeightFromDiskReqInput(model_path=asked["update"])
        answer = engine.loop.run_until_complete(engine.tokenizer_manager.update_weights_from_disk(wanted, None))
        return answer[0]
    return engine.flush_cache().success


def told(flags):
    """What a command line tells, as SGLang reads it."""
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    read, plain = parser.parse_args(["--model-path", "m", *flags]), parser.parse_args(["--model-path", "m"])
    return {name: value for name, value in vars(read).items() if value != getattr(plain, name)}
