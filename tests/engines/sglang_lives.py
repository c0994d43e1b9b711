"""Lives of a real SGLang: each is a process that is asked line by line."""

import contextlib
import json
import os
import random
import subprocess
import sys
import threading
from pathlib import Path

HERE = Path(__file__).parent
PAGE = 64
LIFE_SECONDS = 240


def prompt(seed, tokens):
    numbers = random.Random(seed)
    return [numbers.randrange(4, 32000) for _ in range(tokens)]


def environment(**more):
    """SGLang's processes import the folder's sitecustomize, in place of the environment's own."""
    paths = [str(HERE / "sglang_cpu"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        **more,
    }


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

    def __init__(self, model, log, storage=None, **engine):
        self.log = Path(log)
        with self.log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, HERE / "sglang_life.py"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment(),
                start_new_session=True,
            )
        # One that hangs must not take the tests with it.
        self.timer = threading.Timer(LIFE_SECONDS, self.kill)
        self.timer.start()
        self.ask({"model_path": str(model), "page_size": PAGE, "log_level": "info", **(storage or {}), **engine})

    def ask(self, what):
        try:
            print(json.dumps(what), file=self.process.stdin, flush=True)
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.kill()
            raise RuntimeError(f"SGLang has ended:\n{self.log.read_text(errors='replace')[-6000:]}")
        return json.loads(line)

    def generate(self, prompts):
        """The tokens, and for each prompt how many came from the storage."""
        answer = self.ask({"prompts": prompts})
        return answer["tokens"], answer["stored"]

    def kill(self):
        import contextlib
        import signal

        # Its schedulers are in its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.timer.cancel()
        self.kill()
        self.process.wait()
        self.process.stdout.close()
