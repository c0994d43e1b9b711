#!/usr/bin/env python3
"""kvgate's landing path against the floor, the AWS SDK and the peers, on nginx and on a real Ceph.

    bench/landing.py                                      everything; minutes, after the first time's installing
    bench/landing.py --rounds 3 --servers nginx --clients floor,kvgate,sdk

Installs what is missing (a cache outside the checkout), starts its servers on loopback, ends them, and writes
landing-DATE.md, .json and .svg. bench/README.md says how to read them.
"""

import argparse
import contextlib
import datetime
import json
import random
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness import clients, report, rounds, rows, servers, tools
from harness.clients import Work
from harness.rounds import Case, Client, Samples
from harness.servers import Ports, Server
from harness.workload import BUCKET, MIB, Workload, parse_size

# The values of --clients, and the clients' names in the tables.
NAMES = {
    "floor": "floor",
    "kvgate": "kvgate",
    "before": rows.BEFORE,
    "keys": rows.KEYS["none"],
    "tokio-rustls": rows.TOKIO_RUSTLS,
    "sdk": rows.SDK,
    "boto3": "boto3",
    "awscrt": "awscrt",
    "nixl": "NIXL",
    "lmcache": "LMCache",
    "s5cmd": "s5cmd",
    "warp": "warp",
}
OURS = ("floor", "kvgate", "before", "keys", "tokio-rustls")
PEERS = [name for word, name in NAMES.items() if word not in OURS]
PUT_SIZE = 64 * MIB


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--servers", default="nginx,ceph", help="nginx, ceph (default: both)")
    words = [word for word in NAMES if word != "before"]
    add("--clients", default=",".join(words), help=f"of {', '.join(words)} (default: all)")
    add("--works", default="read,write,head,lookup", help="of read, write, head, lookup (default: all)")
    add("--rounds", type=int, default=7, help="how often everyone is measured (default: 7)")
    add("--objects", type=int, default=64, help="default: 64")
    add("--object-size", type=parse_size, default="16MiB", help="default: 16MiB")
    add("--part-sizes", default="16MiB,8MiB", help="bytes of one GET (default: 16MiB,8MiB)")
    add("--in-flight", type=int, default=16, help="GETs under way at a time (default: 16)")
    add("--heads", type=int, default=4096, help="HEADs and lookups in one sample (default: 4096)")
    add("--kvgate", type=Path, help="the program (default: this checkout's, built)")
    add("--before", type=Path, help="another kvgate, such as an earlier one, measured beside it")
    add("--port-base", type=int, default=9021, help="8 ports from here on (default: 9021)")
    add("--out", type=Path, default=tools.BENCH / "results", help="folder for what is written (default: bench/results)")
    given = parser.parse_args()
    for flag, known in (
        ("servers", ["nginx", "ceph"]),
        ("clients", list(NAMES)),
        ("works", ["read", "write", "head", "lookup"]),
    ):
        chosen = getattr(given, flag).split(",")
        if unknown := set(chosen) - set(known):
            parser.error(f"--{flag}: unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        setattr(given, flag, chosen)
    if given.before and "before" not in given.clients:
        given.clients.append("before")
    if "before" in given.clients and not given.before:
        parser.error("--clients before: which program? Give --before PROGRAM, too")
    given.part_sizes = [parse_size(size) for size in given.part_sizes.split(",")]
    return given


@dataclass
class Bench:
    """One run of the command."""

    given: argparse.Namespace
    workload: Workload
    folder: Path
    samples: Samples = field(default_factory=Samples)
    versions: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def measure(self, server: Server) -> None:
        """All clients on one server."""
        self.versions.update(server.versions)
        works = self.works(server.name)
        with contextlib.ExitStack() as stack:
            those: dict[str, Client] = {}
            for word in self.given.clients:
                name = NAMES[word]
                try:
                    made = self.make(word, server)
                except Exception as error:
                    reason = tools.reason(error)
                    tools.say(f"{name} is missing: {reason}")
                    self.missing[name] = reason
                    self.never(server.name, name, reason)
                    continue
                for client in made.values():
                    stack.callback(client.stop)
                those.update(made)
            rounds.run(server.name, those, works, self.given.rounds, self.samples)

    def works(self, server: str) -> list[Work]:
        """The works that are measured there."""
        works = [Work("read", size) for size in self.given.part_sizes if "read" in self.given.works]
        if server == "nginx":
            works += [Work(op) for op in ("write", "head", "lookup") if op in self.given.works]
        return works

    def never(self, server: str, name: str, reason: str) -> None:
        """Says why there will be no samples of this client."""
        more = {"kvgate": ["kvgate CRC64", "kvgate TLS"], rows.KEYS["none"]: list(rows.KEYS.values())}
        names = [name, *more.get(name, [])]
        for work in self.works(server):
            for each in names:
                # The reason that was noted first says more.
                self.samples.failures.setdefault(Case(server, work.name, each), reason)

    def make(self, word: str, server: Server) -> dict[str, Client]:
        """The client, ready to be measured; kvgate in several ways."""
        name, workload, log = NAMES[word], self.workload, self.folder / f"{word}.log"
        scripts: dict[str, tuple[str, set[str]]] = {
            "boto3": ("peers", {"read", "head"}),
            "awscrt": ("peers", {"read"}),
            "nixl": ("nixl", {"read"}),
            "lmcache": ("lmcache", {"read", "lookup"}),
        }
        simple: dict[str, Callable[[], Client]] = {
            "floor": lambda: clients.floor(server, workload),
            "tokio-rustls": lambda: clients.tokio_rustls(server, workload),
            "sdk": lambda: clients.sdk(server, workload),
            "s5cmd": lambda: clients.S5cmd(server, workload, self.folder),
            "warp": lambda: clients.Warp(server, workload, self.folder),
        }
        if word == "kvgate":
            return self.make_kvgate(server)
        if word == "keys":
            return self.make_keys(server)
        if word == "before":
            return self.make_before(server)
        if word in simple:
            client = simple[word]()
        else:
            venv, ops = scripts[word]
            client = clients.Peer(f"{word}_peer", venv, ops, server, workload, log, whole_only=word == "lmcache")
        if word == "lmcache":
            self.give_names(client.ask(op="names")["names"], server)
        if client.version:
            self.versions[name] = client.version
        return {name: client}

    def make_kvgate(self, server: Server) -> dict[str, Client]:
        program = clients.kvgate_program(self.given.kvgate)
        plain = clients.Kvgate(program, server, self.workload)
        self.versions["kvgate"] = plain.version
        plain.seed()
        made = {"kvgate": plain, "kvgate CRC64": clients.Kvgate(program, server, self.workload, verify=True)}
        if server.tls_endpoint:
            made["kvgate TLS"] = clients.Kvgate(program, server, self.workload, tls=True)
        return made

    def make_keys(self, server: Server) -> dict[str, Client]:
        """The same prompt, in a space of each protection."""
        program = clients.kvgate_program(self.given.kvgate)
        made: dict[str, Client] = {}
        for protection, name in rows.KEYS.items():
            client = clients.KvgatePrompt(program, server, self.workload, self.folder, protection)
            client.seed()
            made[name] = client
        return made

    def make_before(self, server: Server) -> dict[str, Client]:
        client = clients.Kvgate(clients.kvgate_program(self.given.before), server, self.workload)
        client.seed()
        return {rows.BEFORE: client}

    def give_names(self, names: list[str], server: Server) -> None:
        """The same objects, as LMCache calls them."""
        hosted = self.folder / "hosted"
        self.workload.link(self.folder / "www" / BUCKET, hosted, names)
        if server.name == "ceph":
            servers.upload(server.endpoint, hosted)

    def write(self) -> str:
        """The three files; answers the tables."""
        size = self.workload.object_size
        wanted = rows.wanted(self.given.part_sizes, size, PEERS)
        wanted.append(rows.best_peer(self.samples, size, PEERS))
        results = [rows.evaluate(row, self.samples) for row in wanted]
        title = f"landing-{datetime.date.today()}"
        command = shlex.join(["bench/landing.py", *sys.argv[1:]])
        tables = report.markdown(title, self.facts(command), results, self.samples, self.missing)
        self.given.out.mkdir(parents=True, exist_ok=True)
        raw = {
            "command": command,
            "hardware": tools.hardware(),
            "versions": self.versions,
            "workload": asdict(self.workload),
            "wanted": [{**asdict(result), "verdict": result.verdict} for result in results],
            "missing": self.missing,
            "failures": [{**asdict(case), "reason": why} for case, why in self.samples.failures.items()],
            "samples": self.samples.as_json(),
        }
        (self.given.out / f"{title}.md").write_text(tables)
        (self.given.out / f"{title}.json").write_text(json.dumps(raw, indent=1, ensure_ascii=False) + "\n")
        (self.given.out / f"{title}.svg").write_text(report.svg(title, self.samples))
        tools.say(f"written: {self.given.out / title}.md, .json, .svg")
        return tables

    def facts(self, command: str) -> list[str]:
        workload = self.workload
        return [
            tools.machine(),
            f"{workload.objects} objects of {workload.object_size >> 20} MiB, {workload.in_flight} in flight;"
            " clients and servers on the same cores, over loopback",
            f"commit {tools.commit()}; {', '.join(map(' '.join, self.versions.items()))}",
            f"`{command}`",
        ]


def main() -> int:
    given = arguments()
    # As Ctrl-C does it: the servers are ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    random.seed()
    workload = Workload(given.objects, given.object_size, given.in_flight, given.heads, PUT_SIZE)
    with servers.memory_folder() as folder:
        objects = folder / "www" / BUCKET
        objects.mkdir(parents=True)
        workload.write(objects)
        bench = Bench(given, workload, folder)
        ports = Ports(given.port_base)
        start = {
            "nginx": lambda: servers.nginx(folder, ports, workload),
            "ceph": lambda: servers.ceph(folder, ports),
        }
        for name in given.servers:
            try:
                with start[name]() as server:
                    bench.measure(server)
            except Exception as error:
                reason = tools.reason(error)
                tools.say(f"{name} is missing: {reason}")
                bench.missing[name] = reason
                for client in NAMES.values():
                    bench.never(name, client, f"{name} is missing")
            # Also if there are more servers to come: they take long.
            tables = bench.write()
    print(tables)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
