"""The clients that are measured: kvgate, the floor, the AWS SDK, the peers.

Each client has a `run`, which does one piece of work and tells what it did and cost: operations, bytes, seconds, and of
the client's process only, CPU seconds (user and system) and minor faults.
"""

import json
import os
import re
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from . import tools
from .servers import Server, client_environment
from .tools import FailedError
from .workload import BUCKET, GIB, KVGATE_PREFIX, PREFIX, Workload, show_size

RUN_SECONDS_MAX = 300
# How long warp measures; it knows no number of objects.
WARP_SECONDS = 2


@dataclass(frozen=True)
class Work:
    """Something that clients are compared by."""

    op: str
    part_size: int = 0

    @property
    def name(self) -> str:
        return {"read": f"GET {show_size(self.part_size)}", "write": "PUT"}.get(self.op, self.op.upper())


@dataclass(frozen=True)
class Measured:
    """The work of one run, and its cost for the client."""

    ops: int
    bytes: int
    seconds: float
    cpu_seconds: float
    minor_faults: int

    @classmethod
    def of(cls, answer: dict) -> "Measured":
        return cls(**{name: answer[name] for name in cls.__dataclass_fields__})

    @property
    def cpu_per_gib(self) -> float:
        return self.cpu_seconds / (self.bytes / GIB)

    @property
    def cpu_us_per_op(self) -> float:
        return self.cpu_seconds * 1e6 / self.ops

    @property
    def faults_per_gib(self) -> float:
        return self.minor_faults / (self.bytes / GIB)

    @property
    def gb_per_s(self) -> float:
        return self.bytes / 1e9 / self.seconds


class Program:
    """A client that is a command: started for each run, and it reports itself."""

    version: str | None = None

    def __init__(self, commands: dict[str, Callable[[Work], list]], env: dict[str, str] | None = None) -> None:
        self.commands = commands
        self.env = client_environment() | (env or {})

    def can(self, work: Work) -> bool:
        return work.op in self.commands

    def run(self, work: Work) -> Measured:
        said = self.execute(self.commands[work.op](work))
        return Measured.of(json.loads(said))

    def execute(self, command: list) -> str:
        return execute([str(word) for word in command], self.env)

    def stop(self) -> None:
        pass


def execute(command: list[str], env: dict[str, str]) -> str:
    """The command's standard output. Fails with its last words."""
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=RUN_SECONDS_MAX)
    except subprocess.TimeoutExpired as error:
        raise FailedError(f"not done after {RUN_SECONDS_MAX} s") from error
    if done.returncode != 0:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise FailedError(said[-1].strip() if said else f"status {done.returncode}")
    return done.stdout


def floor(server: Server, workload: Workload) -> Program:
    """A socket and nothing else: what no client can be better than by much."""
    program = tools.built("floor")

    def receive(work: Work) -> list:
        return [program, "receive", "--server", server.floor, *load_flags(workload, work)]

    def send(work: Work) -> list:
        return [program, "send", "--server", server.sink, *load_flags(workload, work)]

    return Program({"read": receive, "write": send} if server.floor else {})


def sdk(server: Server, workload: Workload) -> Program:
    """The AWS SDK for Rust as it comes."""
    program = tools.built("floor")
    bucket = ["--endpoint", server.endpoint, "--bucket", BUCKET]

    def get(work: Work) -> list:
        return [program, "sdk-get", *bucket, *load_flags(workload, work)]

    def head(work: Work) -> list:
        return [program, "sdk-head", *bucket, *load_flags(workload, work)]

    def put(work: Work) -> list:
        bucket = ["--endpoint", server.sink_endpoint, "--bucket", BUCKET]
        return [program, "sdk-put", *bucket, *load_flags(workload, work)]

    commands = {"read": get, "head": head} | ({"write": put} if server.sink_endpoint else {})
    client = Program(commands)
    client.version = tools.locked("aws-sdk-s3")
    return client


def tokio_rustls(server: Server, workload: Workload) -> Program:
    """tokio-rustls with nothing of kvgate around it: the floor of TLS."""
    program = tools.built("floor")
    host = (server.tls_endpoint or "").removeprefix("https://")

    def get(work: Work) -> list:
        flags = ["--host", host, "--bucket", BUCKET, "--ca-file", server.ca_file]
        return [program, "tls-get", *flags, *load_flags(workload, work)]

    client = Program({"read": get} if host else {})
    client.version = tools.locked("tokio-rustls")
    return client


def shape(workload: Workload, work: Work) -> tuple[int, int, int, int]:
    """Objects, their size, the size of a part, and how often all of them are gone through."""
    match work.op:
        case "write":
            objects = max(workload.bytes // workload.put_size, workload.in_flight)
            # Once takes 0.15 s, in which a neighbour's turn weighs too much.
            return objects, workload.put_size, workload.put_size, 4
        case "head":
            rounds = max(1, workload.heads // workload.objects)
            return workload.objects, workload.object_size, workload.object_size, rounds
        case "lookup":
            return workload.heads, workload.object_size, workload.object_size, 1
    return workload.objects, workload.object_size, work.part_size, 1


def load_flags(workload: Workload, work: Work) -> list:
    objects, object_size, part_size, rounds = shape(workload, work)
    sizes = ["--object-size", object_size, "--part-size", part_size]
    in_flight = min(workload.in_flight, objects * -(-object_size // part_size))
    return ["--objects", objects, *sizes, "--in-flight", in_flight, "--rounds", rounds]


class Kvgate(Program):
    """`kvgate bench`, on objects that it wrote itself."""

    def __init__(
        self, program: Path, server: Server, workload: Workload, *, verify: bool = False, tls: bool = False
    ) -> None:
        self.program, self.server, self.workload = program, server, workload
        self.verify, self.tls = verify, tls
        self.endpoint = server.tls_endpoint if tls else server.endpoint
        commands = dict.fromkeys(["read"] if verify or tls else ["read", "head", "lookup"], self.command)
        if server.sink_endpoint and not verify and not tls:
            commands["write"] = self.command
        trust = {"KVGATE__S3__CA_FILE": str(server.ca_file)} if tls else {}
        super().__init__(commands, trust)

    def can(self, work: Work) -> bool:
        whole = work.part_size in (0, self.workload.object_size)
        return super().can(work) and (whole or not self.tls)

    def command(self, work: Work) -> list:
        objects, object_size, part_size, rounds = shape(self.workload, work)
        endpoint = self.server.sink_endpoint if work.op == "write" else self.endpoint
        flags = ["--endpoint", endpoint, "--bucket", BUCKET, "--prefix", KVGATE_PREFIX]
        flags += ["--objects", objects, "--object-size", show_size(object_size), "--part-size", show_size(part_size)]
        # The peers are warm, too.
        flags += ["-t", self.workload.in_flight, "--rounds", rounds, "--warm-up", "--json"]
        if work.op == "read" and not self.verify:
            flags.append("--no-verify")
        if work.op != "lookup":
            # Objects that are read again and again stay. The sink keeps nothing.
            flags.append("--keep")
        return [self.program, "bench", work.op, *flags]

    @property
    def version(self) -> str:
        return tools.run(self.program, "--version").split()[-1]

    def run(self, work: Work) -> Measured:
        said = self.execute(self.command(work))
        phase = next(phase for phase in json.loads(said)["phases"] if phase["phase"] == work.op)
        if phase["errors"]["count"]:
            raise FailedError(f"{phase['errors']['count']} errors, the first: {phase['errors']['first']}")
        return Measured.of(phase)

    def seed(self) -> None:
        """Writes what the others read."""
        size = show_size(self.workload.object_size)
        flags = ["--endpoint", self.server.endpoint, "--bucket", BUCKET, "--prefix", KVGATE_PREFIX, "--keep", "--json"]
        flags += ["--objects", self.workload.objects, "--object-size", size, "--part-size", size]
        execute([str(word) for word in [self.program, "bench", "write", *flags]], self.env)


class KvgatePrompt(Kvgate):
    """`kvgate bench`, on the chunks of a prompt in a protected space, or one that is not."""

    CHUNK_TOKENS, LAYERS = 128, 32

    def __init__(self, program: Path, server: Server, workload: Workload, folder: Path, protection: str) -> None:
        super().__init__(program, server, workload, verify=True)
        plane = workload.object_size // (2 * self.LAYERS * self.CHUNK_TOKENS)
        space = {
            "model": "kvgate/bench",
            "revision": "keys",
            "chunk_tokens": self.CHUNK_TOKENS,
            # Planes of K and V, of two bytes a value.
            "mha": {"layers": self.LAYERS, "heads": 8, "head_dim": plane // (8 * 2)},
        }
        if protection != "none":
            space |= {"tenant": "bench", "protection": protection}
        self.prefix = f"{KVGATE_PREFIX}-{protection}"
        self.space = folder / f"{protection}.json"
        self.space.write_text(json.dumps(space))
        key, keys = folder / "bench.key", folder / f"{protection}.toml"
        if not key.exists():
            key.write_text("5a" * 32)
            key.chmod(0o400)
        tenant = f'[[tenant]]\nname = "bench"\nprotection = "{protection}"\nkeys = ["file:{key}"]\n'
        keys.write_text(tenant if protection != "none" else "")
        keys.chmod(0o600)
        if protection != "none":
            self.env |= {"KVGATE__KEYS__FILE": str(keys)}

    def flags(self) -> list:
        tokens = self.workload.objects * self.CHUNK_TOKENS
        bucket = ["--endpoint", self.server.endpoint, "--bucket", BUCKET, "--prefix", self.prefix]
        return [*bucket, "--space", self.space, "--tokens", tokens, "--keep", "--json"]

    def can(self, work: Work) -> bool:
        return work.op == "read" and work.part_size == self.workload.object_size

    def command(self, work: Work) -> list:
        part = ["--part-size", show_size(work.part_size), "-t", self.workload.in_flight]
        return [self.program, "bench", "read", *self.flags(), *part, "--warm-up"]

    def seed(self) -> None:
        execute([str(word) for word in [self.program, "bench", "write", *self.flags()]], self.env)


def kvgate_program(given: Path | None) -> Path:
    """The one that was given, or this repository's."""
    program = given or tools.built("kvgate")
    if subprocess.run([program, "bench", "--help"], capture_output=True).returncode != 0:
        raise tools.MissingError("this kvgate has no command `bench`")
    return program


class Peer:
    """A client in bench/peers: a process that lives through all rounds and is talked to in lines of JSON."""

    def __init__(
        self, script: str, venv: str, ops: set[str], server: Server, workload: Workload, log: Path, *, whole_only=False
    ) -> None:
        self.ops, self.workload, self.whole_only, self.log = ops, workload, whole_only, log
        endpoint = server.host_style if whole_only else server.endpoint
        flags = ["--endpoint", endpoint, "--bucket", BUCKET, "--objects", workload.objects]
        flags += ["--object-size", workload.object_size, "--in-flight", workload.in_flight]
        command = [tools.python(venv), tools.BENCH / "peers" / f"{script}.py", *flags]
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=out,
                text=True,
                env=client_environment(),
                # Ctrl-C is the bench's to handle.
                start_new_session=True,
            )
        self.version = self.hear()["version"]

    def can(self, work: Work) -> bool:
        whole = work.part_size in (0, self.workload.object_size)
        return work.op in self.ops and (whole or not self.whole_only)

    def ask(self, **question) -> dict:
        try:
            self.process.stdin.write(json.dumps(question) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError as error:
            raise FailedError(self.last_words()) from error
        return self.hear()

    def hear(self) -> dict:
        # One line answers one question, so nothing waits in a buffer.
        if not select.select([self.process.stdout], [], [], RUN_SECONDS_MAX)[0]:
            self.stop()
            raise FailedError(f"no answer after {RUN_SECONDS_MAX} s")
        line = self.process.stdout.readline()
        if not line:
            raise FailedError(self.last_words())
        answer = json.loads(line)
        if "error" in answer:
            raise FailedError(answer["error"])
        return answer

    def last_words(self) -> str:
        said = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return f"it ended: {said[-1].strip() if said else 'without a word'}"

    def run(self, work: Work) -> Measured:
        size = {"part_size": work.part_size} if work.op == "read" else {"count": self.workload.heads}
        return Measured.of(self.ask(op=work.op, **size))

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()


class Command:
    """A client that does not report itself: its whole process is measured, from start to end."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def can(self, work: Work) -> bool:
        return work.op == "read"

    def measure(self, command: list, log: Path) -> Measured:
        began = time.perf_counter()
        with open(log, "wb") as out:
            child = subprocess.Popen([str(word) for word in command], stdout=out, stderr=out, env=client_environment())
        too_long = threading.Timer(RUN_SECONDS_MAX, child.kill)
        too_long.start()
        try:
            _, status, usage = os.wait4(child.pid, 0)
        except BaseException:
            child.kill()
            raise
        finally:
            too_long.cancel()
        child.returncode = os.waitstatus_to_exitcode(status)
        seconds = time.perf_counter() - began
        if child.returncode != 0:
            raise FailedError(log.read_text(errors="replace").strip()[-300:])
        cpu_seconds = usage.ru_utime + usage.ru_stime
        return Measured(self.workload.objects, self.workload.bytes, seconds, cpu_seconds, usage.ru_minflt)

    def stop(self) -> None:
        pass


class S5cmd(Command):
    """Copies objects into files in memory."""

    def __init__(self, server: Server, workload: Workload, folder: Path) -> None:
        super().__init__(workload)
        self.program = tools.python("peers").parent / "s5cmd"
        self.server, self.folder = server, folder
        self.version = tools.run(self.program, "version").strip().split("-")[0].removeprefix("v")

    def run(self, work: Work) -> Measured:
        parts = -(-self.workload.object_size // work.part_size)
        with tempfile.TemporaryDirectory(dir=self.folder) as target:
            workers = max(1, self.workload.in_flight // parts)
            command = [self.program, "--endpoint-url", self.server.endpoint, "--log", "error", "--numworkers", workers]
            copy = ["cp", "--part-size", work.part_size >> 20, "--concurrency", parts]
            source = f"s3://{BUCKET}/{PREFIX}*"
            measured = self.measure([*command, *copy, source, f"{target}/"], self.folder / "s5cmd.log")
            landed = sum(file.stat().st_size for file in Path(target).iterdir())
            if landed != self.workload.bytes:
                raise FailedError(f"{landed} bytes of {self.workload.bytes} came")
            return replace(measured, ops=measured.ops * parts)


class Warp(Command):
    """MinIO's benchmark. It keeps nothing of what it reads, and picks objects at random."""

    def __init__(self, server: Server, workload: Workload, folder: Path) -> None:
        super().__init__(workload)
        self.program = tools.warp()
        self.server, self.folder = server, folder
        said = re.search(r"\d+\.\d+\.\d+", tools.run(self.program, "--version"))
        self.version = said[0] if said else tools.WARP_VERSION

    def can(self, work: Work) -> bool:
        return super().can(work) and work.part_size == self.workload.object_size

    def run(self, work: Work) -> Measured:
        environment = client_environment()
        command = [self.program, "get", "--host", self.server.endpoint.removeprefix("http://"), "--lookup", "path"]
        command += ["--access-key", environment["AWS_ACCESS_KEY_ID"], "--region", environment["AWS_REGION"]]
        command += ["--secret-key", environment["AWS_SECRET_ACCESS_KEY"], "--bucket", BUCKET]
        # It must neither write to the bucket nor wipe it.
        command += ["--list-existing", "--noclear", "--prefix", PREFIX, "--objects", self.workload.objects]
        command += ["--concurrent", self.workload.in_flight, "--duration", f"{WARP_SECONDS}s"]
        command += ["--benchdata", self.folder / "warp", "--no-color", "--json"]
        log = self.folder / "warp.log"
        measured = self.measure(command, log)
        ops, size = warp_total(log.read_text(errors="replace"))
        return Measured(ops, size, WARP_SECONDS, measured.cpu_seconds, measured.minor_faults)


def warp_total(said: str) -> tuple[int, int]:
    """Requests and bytes of the report in what warp said."""
    report = re.search(r"^\{", said, re.MULTILINE)
    if not report:
        raise FailedError(f"no report: {said.strip()[-300:]}")
    try:
        total = json.JSONDecoder().raw_decode(said, report.start())[0]["total"]
        return int(total["total_requests"]), int(total["total_bytes"])
    except json.JSONDecodeError as error:
        raise FailedError(f"no whole report: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise FailedError(f"a report without the totals that are needed: {error}") from error
