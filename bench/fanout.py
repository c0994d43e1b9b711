#!/usr/bin/env python3
"""kvgate's fan-out on a real Ceph: four radosgw behind one DNS name, each address capped; one of them slow; twelve of which a
node uses four; nodes that ask each other first.

    bench/fanout.py                        everything; an hour, most of it measuring
    bench/fanout.py --rounds 1 --loads 10

Installs what is missing, starts its servers on loopback, ends them, and writes fanout-DATE.md and .json.
bench/README.md says how to read them.
"""

import argparse
import datetime
import functools
import json
import math
import random
import shlex
import signal
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness import clients, plain, report, servers, tools
from harness.fleet import ADDRESSES, RGWS, Fleet, environment_of, fleet
from harness.node import Counted, Node, as_peers, running_nodes
from harness.rounds import Case
from harness.rows import Result, Row, spread
from harness.servers import Ports
from harness.workload import MIB, parse_size, show_size

# Chunks of 16 MiB, in 32 layers of 512 KiB.
CHUNK_TOKENS, CHUNK_SIZE = 128, 16 * MIB
SPACE = {
    "model": "kvgate/bench",
    "revision": "fanout",
    "chunk_tokens": CHUNK_TOKENS,
    "mha": {"layers": 32, "heads": 8, "head_dim": 128},
}
PREFIX = "kvgate-bench"
# Of the rate, when it is slow.
SLOW = 0.1
# Addresses of the name, but where a case is of all twelve. These together let through as much as the four do.
FEW = ADDRESSES[:4]
OF_TWELVE = ("twelve", "twelve, four nodes", "twelve, peers")
CASES = ("even", "four nodes", "one slow", "three alone", *OF_TWELVE)
# Programs or daemons that load at the same time.
NODES = 4
# Addresses that a node uses of the twelve, more only while these are full.
SUBSET = 4
# Prompts of each daemon, none of them another's: so S3 has to send every byte.
OWN_PROMPTS = 2
# Prompts are so many times as long there, and as many more GETs in flight: each address has as many as with four.
LONGER = 3
# The object and the seconds that plain clients read in each round.
PLAIN_KEY, PLAIN_SECONDS = "fanout-plain", 4


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rounds", type=int, default=5, help="how often each case is measured (default: 5)")
    add("--loads", type=int, default=40, help="of the prompt, in each measurement (default: 40)")
    add("--prompt-size", type=parse_size, default="128MiB", help="in chunks of 16MiB (default: 128MiB)")
    add("--part-size", type=parse_size, default="4MiB", help="bytes of one GET (default: 4MiB)")
    add("--in-flight", type=int, default=16, help="GETs under way at a time (default: 16)")
    add("--rate", type=int, default=40_000_000, help="bytes a second of an address (default: 40000000)")
    add("--kvgate", type=Path, help="the program (default: this checkout's, built)")
    add("--port-base", type=int, default=9041, help="7 ports from here on (default: 9041)")
    add("--out", type=Path, default=tools.BENCH / "results", help="folder for what is written (default: bench/results)")
    return parser.parse_args()


@dataclass(frozen=True)
class Measured:
    """One run of `kvgate bench read`."""

    case: str
    round: int
    slow: str
    mb_per_s: float
    load_p50_ms: float
    load_p99_ms: float
    loads: int
    requests: int
    retries: int
    hedges: int
    # Of the bytes, in percent.
    shares: dict[str, float]
    # As `kvgate bench --json` has them.
    endpoints: list[dict]


@dataclass
class Bench:
    """One run of the command."""

    given: argparse.Namespace
    folder: Path
    samples: list[Measured] = field(default_factory=list)
    failures: dict[Case, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    # MB/s in each round.
    plain: dict[int, float] = field(default_factory=dict)
    plain_of_twelve: dict[int, float] = field(default_factory=dict)
    # Where the daemons' prompts are.
    own_space: str = ""
    own_chunks: list[str] = field(default_factory=list)

    def measure(self, running: Fleet) -> None:
        program = clients.kvgate_program(self.given.kvgate)
        self.versions = {"kvgate": tools.run(program, "--version").split()[-1], **running.versions}
        self.write_prompt(program, running, SPACE["revision"], self.tokens(LONGER))
        self.write_prompt(program, running, "own", self.tokens(LONGER * NODES * OWN_PROMPTS))
        self.find_own(program, running)
        source = self.folder / "plain"
        source.mkdir()
        (source / PLAIN_KEY).write_bytes(bytes(self.given.part_size))
        servers.upload(f"http://{RGWS[0]}:{self.given.port_base}", source)
        for number in range(1, self.given.rounds + 1):
            # Each address has its turn.
            slow = FEW[number % len(FEW)]
            tools.say(f"round {number} of {self.given.rounds}: plain clients")
            self.plain[number] = self.read_plainly(running, "even", FEW, 4)
            self.plain_of_twelve[number] = self.read_plainly(running, "twelve", ADDRESSES, 2)
            for case in random.sample(CASES, len(CASES)):
                self.prepare(running, case, slow)
                tools.say(f"round {number} of {self.given.rounds}: {case}")
                try:
                    phase = self.phase(program, running, case)
                    self.samples.append(sample(case, number, slow, phase))
                except tools.FailedError as error:
                    tools.say(f"  {error}")
                    self.failures[Case("ceph", "loads", case)] = str(error)
                    continue
                self.show(self.samples[-1])

    def read_plainly(self, running: Fleet, case: str, addresses: list[str], connections: int) -> float:
        self.prepare(running, case)
        given = self.given
        came = plain.mb_per_s(addresses, given.port_base, PLAIN_KEY, given.part_size, PLAIN_SECONDS, connections)
        tools.say(f"  {came:.0f} MB/s of {len(addresses)} addresses")
        return came

    def prepare(self, running: Fleet, case: str, slow: str | None = None) -> None:
        addresses = ADDRESSES if case in OF_TWELVE else FEW
        rates = dict.fromkeys(addresses, self.given.rate * len(FEW) // len(addresses))
        if case == "one slow":
            rates[slow] = int(self.given.rate * SLOW)
        running.cap(rates)
        running.name([address for address in addresses if case != "three alone" or address != slow])
        # The proxies look five times a second.
        time.sleep(0.5)

    def phase(self, program: Path, running: Fleet, case: str) -> dict:
        """The loads of all nodes at the same time, as one phase."""
        environment = environment_of(running)
        if case in OF_TWELVE:
            environment["KVGATE__ENDPOINTS__SUBSET"] = str(SUBSET)
        if case == "twelve, peers":
            return self.daemons(program, environment)
        flags = ("read", "--warm-up", "--rounds", self.loads_of(case))
        nodes = NODES if case.endswith("four nodes") else 1
        tokens = self.tokens(LONGER if case in OF_TWELVE else 1)
        with ThreadPoolExecutor(nodes) as pool:
            in_flight = self.given.in_flight * (LONGER if case in OF_TWELVE else 1)
            flags = (*flags, "-t", in_flight)
            bench = functools.partial(self.bench, program, environment, SPACE["revision"], tokens, *flags)
            phases = [pool.submit(bench) for _ in range(nodes)]
            return together([phase.result() for phase in phases])

    def bench(
        self, program: Path, environment: dict[str, str], revision: str, tokens: int, phase: str, *flags: object
    ) -> dict:
        """The phase's report."""
        space = self.folder / f"{revision}.json"
        command = [program, "bench", phase, "--prefix", PREFIX, "--space", space, "--tokens", tokens, "--json"]
        command += ["--part-size", show_size(self.given.part_size), *flags]
        said = clients.execute([str(word) for word in command], environment)
        return json.loads(said)["phases"][0]

    def tokens(self, prompts: int) -> int:
        return prompts * self.given.prompt_size // CHUNK_SIZE * CHUNK_TOKENS

    def loads_of(self, case: str) -> int:
        """As many bytes in each case."""
        return max(2, self.given.loads // LONGER) if case in OF_TWELVE else self.given.loads

    def write_prompt(self, program: Path, running: Fleet, revision: str, tokens: int) -> None:
        (self.folder / f"{revision}.json").write_text(json.dumps({**SPACE, "revision": revision}))
        self.bench(program, environment_of(running), revision, tokens, "write", "--keep")

    def find_own(self, program: Path, running: Fleet) -> None:
        """The daemons' chunks, whose order does not matter: all of them are loaded."""

        def listed(*flags: str) -> dict:
            command = (program, "ls", "--json", "--prefix", PREFIX, *flags)
            return json.loads(tools.run(*command, env=environment_of(running)))

        # A bench's spaces have no description. The daemons' has more chunks.
        self.own_space = max(listed()["spaces"], key=lambda space: space["chunks"])["space"]
        self.own_chunks = [chunk["hash"] for chunk in listed("--space", self.own_space)["chunks"]]

    def daemons(self, program: Path, environment: dict[str, str]) -> dict:
        """The same with daemons that ask each other before they ask S3. What they have loaded leaves their memory at once."""
        given, prompt_size = self.given, LONGER * self.given.prompt_size
        environment |= {
            "KVGATE__S3__PREFIX": PREFIX,
            "KVGATE__S3__PART_SIZE": show_size(given.part_size),
            "KVGATE__LOAD__LAYER_PART_SIZE": show_size(given.part_size),
            "KVGATE__LOAD__IN_FLIGHT": show_size(given.part_size * given.in_flight),
            "KVGATE__LOAD__WINDOW": show_size(prompt_size),
            "KVGATE__LOAD__RESERVE": show_size(prompt_size),
            "KVGATE__STORE__WRITE_BEHIND": show_size(CHUNK_SIZE),
            "KVGATE__MEMORY__WATERMARK": "1",
        }
        with tempfile.TemporaryDirectory(dir=self.folder) as name, ExitStack() as stack:
            peers = [as_peers(Path(name), NODES, number, given.port_base + 3) for number in range(NODES)]
            running = running_nodes(program, Path(name), 2 * prompt_size, peers, environment)
            nodes = stack.enter_context(running)
            space = {**SPACE, "revision": "own"}
            for node in nodes:
                node.call("PUT", "/v1/spaces", json.dumps(space))
            pool = stack.enter_context(ThreadPoolExecutor(NODES))
            # The first loads, to learn with.
            list(pool.map(functools.partial(self.loads, nodes, 1), range(NODES)))
            before = [Counted.of(node) for node in nodes]
            loads = self.loads_of("twelve, peers")
            took = list(pool.map(functools.partial(self.loads, nodes, loads), range(NODES)))
            counted = [Counted.of(node).since(earlier) for node, earlier in zip(nodes, before, strict=True)]
            return phase_of(took, counted, prompt_size)

    def loads(self, nodes: list[Node], loads: int, number: int) -> list[float]:
        """Seconds of each load of one node: its own prompts in turn, all chunks of a prompt at the same time."""
        chunks = self.own_chunks[number::NODES]
        size = len(chunks) // OWN_PROMPTS
        seconds = []
        with ThreadPoolExecutor(size) as pool:
            for load in range(loads):
                prompt = chunks[load % OWN_PROMPTS * size :][:size]
                began = time.monotonic()
                if None in pool.map(functools.partial(nodes[number].load, self.own_space), prompt):
                    raise tools.FailedError("a daemon did not load a chunk")
                seconds.append(time.monotonic() - began)
        return seconds

    def show(self, measured: Measured) -> None:
        shares = ", ".join(f"{share:.1f} %" for share in measured.shares.values())
        tools.say(f"  {measured.mb_per_s:.0f} MB/s, p99 {measured.load_p99_ms:.0f} ms, shares {shares}")

    def of(self, case: str) -> dict[int, Measured]:
        return {measured.round: measured for measured in self.samples if measured.case == case}

    def result(self, row: Row, values: dict[int, float]) -> Result:
        if not values:
            reason = next(iter(self.failures.values()), "not a round in which all of it ran")
            return Result(row, None, None, None, 0, reason)
        low, middle, high = spread(list(values.values()))
        return Result(row, middle, low, high, len(values))

    def results(self) -> list[Result]:
        even, nodes, slow, three = (self.of(case) for case in CASES[:4])

        def row(what: str, metric: str, case: str, to: str | None = None, **limit: float) -> Row:
            return Row(what, metric, Case("ceph", "loads", case), to and Case("ceph", "loads", to), **limit)

        def ratio(of: dict[int, Measured], to: dict[int, Measured], metric: str) -> dict[int, float]:
            return {n: getattr(of[n], metric) / getattr(to[n], metric) for n in of if n in to}

        shares = {n: sorted(measured.shares.values()) for n, measured in even.items()}
        of_slow = {n: measured.shares[measured.slow] for n, measured in slow.items()}
        hedges = {n: measured.hedges * 100 / measured.requests for n, measured in slow.items()}

        def of_plain(measured: dict[int, Measured], plain: dict[int, float]) -> dict[int, float]:
            return {n: measured[n].mb_per_s / plain[n] for n in measured}

        def hedged(measured: dict[int, Measured]) -> dict[int, float]:
            return {n: one.hedges * 100 / one.requests for n, one in measured.items()}

        # One each, were nothing hedged or tried again.
        attempts = {n: one.requests / (one.requests - one.hedges - one.retries) for n, one in even.items()}
        caps = {n: rate * 1e6 / (self.given.rate * len(FEW)) for n, rate in self.plain.items()}

        def against_plain(what: str, case: str, at_least: float) -> Result:
            values = of_plain(self.of(case), self.plain_of_twelve)
            return result(row(f"{what} / plain clients", "mb_per_s", case, "twelve", at_least=at_least), values)

        result = self.result
        return [
            result(
                row("even: smallest share of an address", "share", "even", at_least=15),
                {n: share[0] for n, share in shares.items()},
            ),
            result(
                row("even: largest share of an address", "share", "even", at_most=35),
                {n: share[-1] for n, share in shares.items()},
            ),
            result(row("one slow: its share", "share", "one slow", at_most=10), of_slow),
            result(
                row(
                    "throughput, one slow / the three others alone",
                    "mb_per_s",
                    "one slow",
                    "three alone",
                    at_least=0.85,
                ),
                ratio(slow, three, "mb_per_s"),
            ),
            result(
                row("p99 of loads, one slow / even", "load_p99_ms", "one slow", "even", at_most=2),
                ratio(slow, even, "load_p99_ms"),
            ),
            result(row("one slow: hedges, of all requests", "share", "one slow", at_most=10), hedges),
            result(row("plain clients / what the caps let through", "mb_per_s", "even", "even"), caps),
            result(
                row("one load at a time / plain clients", "mb_per_s", "even", "even", at_least=0.85),
                of_plain(even, self.plain),
            ),
            result(
                row(
                    "four nodes, each with one load at a time / plain clients",
                    "mb_per_s",
                    "four nodes",
                    "even",
                    at_least=0.95,
                ),
                of_plain(nodes, self.plain),
            ),
            result(row("even: hedges, of all requests", "share", "even", at_most=3), hedged(even)),
            result(row("four nodes: hedges, of all requests", "share", "four nodes", at_most=3), hedged(nodes)),
            result(row("even: requests a part", "requests", "even", "even", at_most=1.1), attempts),
            against_plain("four of twelve addresses: one load at a time", "twelve", 0.85),
            against_plain("the same, four nodes", "twelve, four nodes", 0.95),
            against_plain("the same, four daemons that ask each other first", "twelve, peers", 0.95),
        ]

    def write(self) -> bool:
        """The two files; and the table to the standard output. Whether everything wanted was kept."""
        results = self.results()
        title = f"fanout-{datetime.date.today()}"
        command = shlex.join(["bench/fanout.py", *sys.argv[1:]])
        tables = self.markdown(title, command, results)
        raw = {
            "command": command,
            "hardware": tools.hardware(),
            "versions": self.versions,
            "wanted": [{**asdict(result), "verdict": result.verdict} for result in results],
            "failures": [{**asdict(case), "reason": why} for case, why in self.failures.items()],
            "plain_mb_per_s": self.plain,
            "plain_of_twelve_mb_per_s": self.plain_of_twelve,
            "samples": [asdict(measured) for measured in self.samples],
        }
        self.given.out.mkdir(parents=True, exist_ok=True)
        (self.given.out / f"{title}.md").write_text(tables)
        (self.given.out / f"{title}.json").write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n")
        print(tables)
        tools.say(f"written: {self.given.out / title}.md, .json")
        return not self.failures

    def markdown(self, title: str, command: str, results: list[Result]) -> str:
        given = self.given
        prompt = f"{given.loads} loads of {given.prompt_size >> 20} MiB in GETs of {given.part_size >> 20} MiB"
        facts = [
            tools.machine(),
            f"{prompt}, one load after the other, {given.in_flight} GETs in flight; {len(RGWS)} radosgw, each behind a"
            f" proxy of {given.rate / 1e6:.0f} MB/s, a slow one of {given.rate * SLOW / 1e6:.0f} MB/s, or three that have as"
            " much together; client and servers on the same cores, over loopback",
            f"of twelve addresses a node uses {SUBSET}, and more while these are busy; prompts are {LONGER} times as long"
            f" there, with as many more GETs in flight (but in daemons), and loads {LONGER} times as few; daemons load chunks that no"
            " other one has",
            f"commit {tools.commit()}; {', '.join(map(' '.join, self.versions.items()))}",
            f"`{command}`",
        ]
        lines = [f"# {title}", "", *(f"- {fact}" for fact in facts), "", *report.wanted_table(results)]
        lines += ["", "## Measured", "", "Medians over the rounds. Shares from the largest to the smallest.", ""]
        lines += [
            "| case | MB/s | load p50 | load p99 | shares of the addresses | retries | hedges | requests | rounds |"
        ]
        lines += ["|---|---:|---:|---:|---|---:|---:|---:|---:|"]
        lines += [self.measured_line(case) for case in CASES if self.of(case)]
        if self.failures:
            lines += [
                "",
                "## Failed at least once",
                "",
                *(f"- {case.client}: {why}" for case, why in self.failures.items()),
            ]
        return "\n".join(lines) + "\n"

    def measured_line(self, case: str) -> str:
        those = list(self.of(case).values())

        def middle(of: str) -> float:
            return statistics.median(getattr(measured, of) for measured in those)

        ranked = zip(*(sorted(measured.shares.values(), reverse=True) for measured in those), strict=True)
        shares = ", ".join(f"{statistics.median(rank):.1f} %" for rank in ranked)
        cells = [
            case,
            f"{middle('mb_per_s'):.0f}",
            f"{middle('load_p50_ms'):.0f} ms",
            f"{middle('load_p99_ms'):.0f} ms",
        ]
        cells += [shares, *(f"{middle(name):.0f}" for name in ("retries", "hedges", "requests")), str(len(those))]
        return f"| {' | '.join(cells)} |"


def together(phases: list[dict]) -> dict:
    """Of nodes that loaded at the same time. Their loads are alike, so the slowest one's quantiles are told."""
    slowest = max(phases, key=lambda phase: phase["seconds"])
    endpoints = {endpoint["address"]: {**endpoint} for endpoint in slowest["endpoints"]}
    for phase in phases:
        for endpoint in phase["endpoints"] if phase is not slowest else []:
            endpoints[endpoint["address"]]["requests"] += endpoint["requests"]
    total = {name: sum(phase[name] for phase in phases) for name in ("bytes", "retries", "hedges")}
    prompts = sum(phase["prompt"]["prompts"] for phase in phases)
    failed = next((phase for phase in phases if phase["errors"]["count"]), slowest)
    prompt = {**slowest["prompt"], "prompts": prompts}
    return {**slowest, **total, "prompt": prompt, "errors": failed["errors"], "endpoints": list(endpoints.values())}


def phase_of(loads: list[list[float]], counted: list[Counted], prompt_bytes: int) -> dict:
    """What daemons loaded, in the words of `kvgate bench`."""
    if not any(sum(one.peers_asked.values()) for one in counted):
        raise tools.FailedError("no daemon asked another one")
    addresses = sorted({address for one in counted for address in one.of_address})

    def total(name: str, *of: str) -> float:
        return sum(one.of_address.get(address, {}).get(name, 0) for one in counted for address in of or addresses)

    prompts = sum(map(len, loads))
    times = sorted(seconds * 1e6 for node in loads for seconds in node)
    return {
        "bytes": prompts * prompt_bytes,
        "seconds": max(map(sum, loads)),
        "retries": round(total("retries")),
        "hedges": round(total("hedges")),
        "errors": {"count": 0},
        "prompt": {
            "prompts": prompts,
            "last_chunk_us": {"p50": statistics.median(times), "p99": times[math.ceil(len(times) * 0.99) - 1]},
        },
        "endpoints": [
            {
                "address": address,
                "requests": round(total("requests", address)),
                "share_percent": 100 * total("moved_bytes", address) / total("moved_bytes"),
            }
            for address in addresses
        ],
    }


def sample(case: str, number: int, slow: str, phase: dict) -> Measured:
    if phase["errors"]["count"]:
        raise tools.FailedError(f"{phase['errors']['count']} errors, the first: {phase['errors']['first']}")
    load = phase["prompt"]["last_chunk_us"]
    endpoints = phase["endpoints"]
    return Measured(
        case=case,
        round=number,
        slow=slow,
        mb_per_s=phase["bytes"] / 1e6 / phase["seconds"],
        load_p50_ms=load["p50"] / 1e3,
        load_p99_ms=load["p99"] / 1e3,
        loads=phase["prompt"]["prompts"],
        requests=sum(endpoint["requests"] for endpoint in endpoints),
        retries=phase["retries"],
        hedges=phase["hedges"],
        shares={endpoint["address"].rsplit(":", 1)[0]: endpoint["share_percent"] for endpoint in endpoints},
        endpoints=endpoints,
    )


def main() -> int:
    given = arguments()
    # As Ctrl-C does it: the servers are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    random.seed()
    with servers.memory_folder() as folder:
        bench = Bench(given, folder)
        with fleet(folder, Ports(given.port_base)) as running:
            bench.measure(running)
    return 0 if bench.write() else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
