"""The passes: store, restart, ask again; each question to a vLLM without kvgate in the same breath."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from harness import tools

from .engines import Engine
from .gateway import Gateway
from .workloads import Case, words

# The names of the columns, by the place that answered.
PLAIN_FIRST, FIRST, PLAIN, S3, MEMORY = "plain, first pass", "first pass", "plain", "from S3", "from memory"


@dataclass(frozen=True)
class Sample:
    workload: str
    case: str
    size: int
    round: int
    who: str
    prompt_tokens: int
    ttft_s: float
    # Tokens that came from kvgate.
    reused: int
    tokens: list[int]


@dataclass
class Bench:
    gateway: Gateway
    plain: Engine
    # Each call is a new engine.
    engine: Callable[[], Engine]
    cases: list[Case]
    answer_tokens: int
    samples: list[Sample] = field(default_factory=list)
    # The tokens of each conversation so far, by case.
    histories: dict[tuple, list[int]] = field(default_factory=dict)

    def run(self) -> None:
        """Three lives of an engine with kvgate, beside one without."""
        self.gateway.start()
        self.plain.start()
        self.live("the first pass: all is computed, and stored", self.first)
        self.gateway.restart()
        self.live("the engine and the node are new: from S3", self.again)
        # Chunks that the pass before loaded are still there.
        self.live("the engine is new: from the node's memory", self.once_more)

    def live(self, what: str, measure: Callable[[Engine, Case], None]) -> None:
        tools.say(what)
        engine = self.engine()
        engine.start()
        try:
            for one in (engine, self.plain):
                one.ready()
                self.warm_up(one)
            for number, case in enumerate(random.sample(self.cases, len(self.cases)), 1):
                tools.say(f"  {number} of {len(self.cases)}: {case.workload}, {case.name}")
                measure(engine, case)
            self.gateway.flush()
        finally:
            engine.stop()

    def warm_up(self, engine: Engine) -> None:
        """Nobody's first request is measured."""
        for number in range(2):
            engine.ask(words("warm-up", engine.name, number, random.random(), tokens=600), 2)

    def first(self, engine: Engine, case: Case) -> None:
        if case.workload == "documents":
            # Both compute.
            self.both(engine, case, case.first[0], FIRST, PLAIN_FIRST)
            return
        history: list[int] = []
        for message in case.first:
            history = history + message if case.chained else message
            answer = engine.ask(history, self.answer_tokens)
            history = history + answer.tokens
        self.histories[key(case)] = history if case.chained else []

    def again(self, engine: Engine, case: Case) -> None:
        self.both(engine, case, self.histories.get(key(case), []) + case.then, S3, PLAIN)

    def once_more(self, engine: Engine, case: Case) -> None:
        # Of the others more is known by now than their first pass left.
        if case.workload == "documents":
            self.one(engine, case, case.then, MEMORY)

    def both(self, engine: Engine, case: Case, prompt: list[int], who: str, plain: str) -> None:
        pair = [(engine, who), (self.plain, plain)]
        for one, name in random.sample(pair, 2):
            self.one(one, case, prompt, name)

    def one(self, engine: Engine, case: Case, prompt: list[int], who: str) -> None:
        # With a salt of its own an engine has nothing of it in its own prefix cache.
        salt = str(random.random()) if engine is self.plain else ""
        before = engine.hits()
        answer = engine.ask(prompt, self.answer_tokens, salt)
        reused = engine.hits() - before
        self.samples.append(
            Sample(
                case.workload,
                case.name,
                case.size,
                case.round,
                who,
                len(prompt),
                answer.ttft_s,
                reused,
                answer.tokens,
            )
        )
        tools.say(f"    {who}: {answer.ttft_s * 1000:.0f} ms, {reused} of {len(prompt)} tokens reused")


def key(case: Case) -> tuple:
    return case.workload, case.name, case.round
