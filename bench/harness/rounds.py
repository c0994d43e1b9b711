"""The order of the measurements. Every round does each work once, in a new order, and each work with every client, in a new
order. The machine changes its pace within seconds, and ratios are between clients at the same work."""

import random
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Protocol

from . import tools
from .clients import Measured, Peer, Work
from .tools import FailedError


class Client(Protocol):
    """One of the measured clients, as `clients` makes them."""

    version: str | None

    def can(self, work: Work) -> bool: ...
    def run(self, work: Work) -> Measured: ...
    def stop(self) -> None: ...


@dataclass(frozen=True)
class Case:
    """The names by which a measurement is found again."""

    server: str
    work: str
    client: str


@dataclass
class Samples:
    """The results, by case and round."""

    measured: dict[Case, dict[int, Measured]] = field(default_factory=dict)
    failures: dict[Case, str] = field(default_factory=dict)

    def as_json(self) -> list[dict]:
        return [
            {**asdict(case), "round": number, **asdict(measured)}
            for case, rounds in self.measured.items()
            for number, measured in sorted(rounds.items())
        ]

    def reason(self, case: Case) -> str:
        return self.failures.get(case, "not asked for")


def run(server: str, clients: dict[str, Client], works: list[Work], rounds: int, samples: Samples) -> None:
    """Adds the samples of all clients with all that each of them can do."""
    at_work = [
        [(Case(server, work.name, name), client, work) for name, client in clients.items() if client.can(work)]
        for work in works
    ]
    # A client that lives through all rounds has its connections and buffers before the first one.
    for case, client, work in chain.from_iterable(at_work):
        if isinstance(client, Peer):
            attempt(case, client, work, samples)
    for number in range(1, rounds + 1):
        tools.say(f"{server}: round {number} of {rounds}, {sum(map(len, at_work))} measurements")
        for case, client, work in chain.from_iterable(shuffled(map(shuffled, at_work))):
            measured = attempt(case, client, work, samples)
            if measured:
                samples.measured.setdefault(case, {})[number] = measured


def shuffled(items: Iterable) -> list:
    items = list(items)
    random.shuffle(items)
    return items


def attempt(case: Case, client: Client, work: Work, samples: Samples) -> Measured | None:
    """One measurement; a failure is remembered, and what failed gets its turn in the next round all the same."""
    try:
        measured = client.run(work)
        moved = measured.bytes or work.op not in ("read", "write")
        if not measured.ops or not moved or measured.seconds <= 0:
            raise FailedError(f"{measured.ops} operations, {measured.bytes} bytes in {measured.seconds} s")
        return measured
    # Any error: the others' samples are worth more than an early end.
    except Exception as error:
        samples.failures[case] = tools.reason(error)
        tools.say(f"  {case.client}, {case.work}: {samples.failures[case]}")
        return None
