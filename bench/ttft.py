#!/usr/bin/env python3
"""How much sooner the first token comes when KV is loaded instead of computed: a real vLLM, restarted.

    bench/ttft.py                                         a tiny model on this machine's CPUs; half an hour
    bench/ttft.py --rounds 1 --tokens 1000,8000           some minutes
    bench/ttft.py --overhead                              what kvgate costs where nothing is reused; a quarter of an hour
    bench/ttft.py --model Qwen/Qwen3-32B --python PATH --gpus 0 --plain-gpus 1 --endpoint URL --bucket NAME

Installs what is missing unless told where vLLM is, starts its servers, ends them, and writes ttft-DATE.md, .json and
.svg, or ttft-overhead-DATE.md and .json. bench/README.md says how to read them.
"""

import argparse
import datetime
import json
import os
import random
import shlex
import signal
import sys
from dataclasses import asdict
from pathlib import Path

from harness import servers, tools
from harness.workload import parse_size
from ttft import environment, measure, overhead, plot, tables, workloads
from ttft.engines import Engine, Launcher
from ttft.gateway import Gateway

TINY_MODEL = environment.TESTS / "engines" / "tiny_model.py"
# The tokens are compared, so no batch shape may change one.
CPU_FLAGS = "--dtype float32 --block-size 128 --enforce-eager --skip-tokenizer-init --max-num-seqs 8"
# Of all at once on few cores, a gateway may not get its turn within the default of 50 ms; what is not answered is computed.
LOOKUP_DEADLINE_MS = 1000
# Requests whose calls are timed.
CALL_ROUNDS = 21
TINY = {"layers": 4, "hidden": 256, "heads": 4, "feed_forward": 512}


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="documents of each length, and so on (default: 5)")
    add("--workloads", default="documents,multi-turn,rag", help="of documents, multi-turn, rag (default: all)")
    add("--tokens", type=numbers, default="1000,2000,4000,8000,12000,16000", help="lengths of the documents")
    add("--turns", type=numbers, default="1,2,4,8", help="turns of a conversation before the restart")
    add("--turn-tokens", type=int, default=1024, help="tokens of a message (default: 1024)")
    add("--document-tokens", type=int, default=1024, help="tokens of a retrieved document (default: 1024)")
    add("--answer-tokens", type=int, default=8, help="generated for each prompt (default: 8)")
    add("--overhead", action="store_true", help="measure that instead")
    add("--overhead-prompts", type=int, default=8, help="of a run, all at once (default: 8)")
    add("--overhead-tokens", type=int, default=1000, help="of each (default: 1000)")
    add("--overhead-answers", type=int, default=64, help="tokens generated for each (default: 64)")
    add("--scheduler-tokens", type=int, default=100_000, help="of the prompt whose calls are timed (default: 100000)")
    add("--model", help="as vllm serve takes it (default: a tiny Llama for CPUs)")
    add("--tiny", default="", help=f"the tiny one's sizes (default: {','.join(f'{k}={v}' for k, v in TINY.items())})")
    add("--engine-args", default="", help="more for vllm serve, for both engines")
    add("--gpus", default="", help="CUDA_VISIBLE_DEVICES of the engine with kvgate")
    add("--plain-gpus", default="", help="and of the one without; the same GPUs need --gpu-memory-utilization")
    add("--kv-extra", type=json.loads, default={}, help="more for kv_connector_extra_config, JSON")
    add("--threads", type=int, help="the tiny one's (default: a core is left to all else)")
    add("--kv-memory", type=parse_size, default="1GiB", help="an engine's KV cache on CPUs (default: 1GiB)")
    add("--arena-size", default="4GiB", help="the node's memory for chunks (default: 4GiB)")
    for flag in ("endpoint", "bucket", "prefix", "region"):
        add(f"--{flag}", default="", help="of the S3 server (default: one inside kvgate serve, on this disk)")
    add("--python", type=Path, help="of an environment with vLLM and kvgate (default: one is made, for CPUs)")
    add("--wheel", type=Path, help="for the one that is made (default: built from this checkout)")
    add("--port-base", type=int, default=9061, help="2 ports from here on (default: 9061)")
    add("--seed", type=int, help="of all prompts (default: another one each time)")
    add("--out", type=Path, default=tools.BENCH / "results", help="folder for what is written (default: bench/results)")
    given = parser.parse_args()
    given.workloads = given.workloads.split(",")
    if unknown := set(given.workloads) - {"documents", "multi-turn", "rag"}:
        parser.error(f"--workloads: unknown: {', '.join(sorted(unknown))}; there are documents, multi-turn, rag")
    given.seed = random.randrange(1 << 32) if given.seed is None else given.seed
    given.threads = given.threads or max(1, len(os.sched_getaffinity(0)) - 1)
    given.tiny = TINY | {
        name: int(size) for name, _, size in (word.partition("=") for word in given.tiny.split(",") if word)
    }
    return given


class Setup:
    """The two kinds of engine that are measured, and a node."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.given, self.folder = given, folder
        self.python = given.python or environment.python(given.wheel)
        self.flags = shlex.split(given.engine_args)
        self.model = given.model or self.tiny_model()
        self.launcher = Launcher(self.python, forked=not given.model, threads=given.threads)
        s3 = [
            f"--{name}={value}"
            for name in ("endpoint", "bucket", "prefix", "region")
            if (value := getattr(given, name))
        ]
        self.extra = self.settings() | given.kv_extra
        self.gateway = Gateway(self.python.with_name("kvgate"), folder, given.arena_size, s3)
        self.plain = self.engine("plain", 0, given.plain_gpus or given.gpus, [])

    def tiny_model(self) -> str:
        self.flags = [*shlex.split(CPU_FLAGS), "--kv-cache-memory-bytes", str(self.given.kv_memory), *self.flags]
        model = self.folder / "tiny"
        sizes = [f"{name}={size}" for name, size in self.given.tiny.items()]
        tools.run(self.python, TINY_MODEL, model, "1234", *sizes)
        return str(model)

    def engine(self, name: str, port: int, gpus: str, flags: list[str], more: dict[str, str] | None = None) -> Engine:
        devices = (more or {}) | ({"CUDA_VISIBLE_DEVICES": gpus} if gpus else {})
        flags = [*self.flags, *flags]
        return Engine(self.launcher, name, self.model, self.given.port_base + port, flags, devices, self.folder)

    def with_kvgate(self, environment: dict[str, str] | None = None) -> Engine:
        flags = ["--kv-transfer-config", json.dumps(self.transfer())]
        return self.engine("kvgate", 1, self.given.gpus, flags, environment)

    def transfer(self) -> dict:
        """vLLM's one flag."""
        connector = {"kv_connector": "KvGateConnector"}
        if self.given.overhead:
            connector = {"kv_connector": "TimedConnector", "kv_connector_module_path": "kvgate_timed"}
        return {
            **connector,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"socket": str(self.gateway.socket), **self.extra},
        }

    def settings(self) -> dict:
        """Loading is measured. So it is never left out because computing would be faster, or because an answer is late."""
        script = (
            "import dataclasses, kvgate.vllm.settings as s; print(*(f.name for f in dataclasses.fields(s.Settings)))"
        )
        known = tools.run(self.python, "-W", "ignore", "-c", script).split()
        wanted = {"load_policy": "always"}
        if not self.given.overhead:
            wanted["lookup_deadline_ms"] = LOOKUP_DEADLINE_MS
        return {name: value for name, value in wanted.items() if name in known}

    def stop(self) -> None:
        self.plain.stop()
        self.gateway.stop()
        self.launcher.stop()


def facts(given: argparse.Namespace, setup: Setup) -> dict:
    """Under which circumstances."""
    return {
        "command": shlex.join(["bench/ttft.py", *sys.argv[1:]]),
        "hardware": tools.hardware(),
        "versions": environment.versions(setup.python),
        "model": given.model or f"a Llama of random weights, {', '.join(f'{k} {v}' for k, v in given.tiny.items())}",
        "seed": given.seed,
        "engine_flags": setup.flags,
        "engine_threads": None if given.model else given.threads,
        "settings": setup.extra,
    }


def told(known: dict, given: argparse.Namespace, how: str) -> list[str]:
    """The same for people."""
    on_cpus = f"; engines compute with {known['engine_threads']} of the cores" if known["engine_threads"] else ""
    return [
        tools.machine(),
        f"{known['model']}; `{shlex.join(known['engine_flags'])}`{on_cpus}",
        f"kvgate's settings {json.dumps(known['settings'])}, the node's memory {given.arena_size}",
        f"objects on {given.endpoint or 'an S3 server inside of kvgate serve, on this disk'}",
        how,
        f"commit {tools.commit()}; {', '.join(map(' '.join, known['versions'].items()))}",
        f"`{known['command']}`",
    ]


def ttft(given: argparse.Namespace, setup: Setup) -> dict[str, str]:
    """The files' contents, by how their names end."""
    cases = workloads.cases(given)
    bench = measure.Bench(setup.gateway, setup.plain, setup.with_kvgate, cases, given.answer_tokens)
    bench.run()
    title, known = f"ttft-{datetime.date.today()}", facts(given, setup)
    how = f"{given.rounds} rounds; engines with and without kvgate asked in turn, one request at a time"
    samples = tables.Samples(bench.samples)
    raw = {
        **known,
        "wanted": [asdict(verdict) for verdict in tables.verdicts(samples)],
        "samples": [asdict(sample) for sample in bench.samples],
    }
    files = {f"{title}.md": tables.markdown(title, told(known, given, how), samples), f"{title}.json": compact(raw)}
    if samples.cases("documents"):
        files[f"{title}.svg"] = plot.svg(title, samples)
    return files


def overheads(given: argparse.Namespace, setup: Setup) -> dict[str, str]:
    sizes = given.rounds, given.overhead_prompts, given.overhead_tokens, given.overhead_answers, given.seed
    bench = overhead.Bench(setup.gateway, setup.plain, setup.with_kvgate, setup.folder, *sizes)
    bench.run()
    calls = overhead.scheduler_calls(setup.python, setup.gateway, given.scheduler_tokens, CALL_ROUNDS)
    title, known = f"ttft-overhead-{datetime.date.today()}", facts(given, setup)
    how = (
        f"{given.rounds} rounds of {given.overhead_prompts} prompts at once, each of {given.overhead_tokens} tokens with"
        f" {given.overhead_answers} generated; engines with and without kvgate in turn"
    )
    results = overhead.Results(bench.runs, calls, given.scheduler_tokens)
    raw = {
        **known,
        "wanted": [asdict(verdict) for verdict in results.verdicts()],
        "runs": [asdict(run) for run in bench.runs],
        "calls_us": calls,
    }
    return {f"{title}.md": results.markdown(title, told(known, given, how)), f"{title}.json": compact(raw)}


def compact(raw: dict) -> str:
    return json.dumps(raw, ensure_ascii=False) + "\n"


def main() -> int:
    given = arguments()
    # As Ctrl-C does it: the servers are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with servers.folder() as folder:
        setup = Setup(given, folder)
        try:
            files = overheads(given, setup) if given.overhead else ttft(given, setup)
        finally:
            setup.stop()
    given.out.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (given.out / name).write_text(text)
    print(next(iter(files.values())))
    tools.say(f"written: {', '.join(str(given.out / name) for name in files)}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except tools.MissingError as error:
        sys.exit(f"bench/ttft.py: {error}")
