"""The prompts: random tokens. No two begin alike unless their docstring says so."""

import argparse
import random
from dataclasses import dataclass

# Every tokenizer has these.
TOKENS = (100, 30_000)
SYSTEM_TOKENS = 1024
QUESTION_TOKENS = 64
RETRIEVED = 4


@dataclass(frozen=True)
class Case:
    """One sample: what an engine is asked first, and what another one is asked after the restart."""

    workload: str
    name: str
    # A number that orders the cases.
    size: int
    round: int
    first: list[list[int]]
    then: list[int]
    # A conversation: each prompt follows on the one before and its answer.
    chained: bool = False


def words(*names: object, tokens: int) -> list[int]:
    """The same names, the same tokens."""
    numbers = random.Random(":".join(map(str, names)))
    return [numbers.randrange(*TOKENS) for _ in range(tokens)]


def cases(given: argparse.Namespace) -> list[Case]:
    makers = {"documents": documents, "multi-turn": conversations, "rag": retrieval}
    return [
        case
        for number in range(1, given.rounds + 1)
        for workload in given.workloads
        for case in makers[workload](given, number)
    ]


def documents(given: argparse.Namespace, number: int) -> list[Case]:
    """A long document, and the same again."""
    found = []
    for tokens in given.tokens:
        document = words(given.seed, "document", number, tokens, tokens=tokens)
        found.append(Case("documents", f"{tokens:,} tokens", tokens, number, [document], document))
    return found


def conversations(given: argparse.Namespace, number: int) -> list[Case]:
    """Turns with one engine, the next one with another: all but the new message is known."""
    found = []
    for turns in given.turns:
        messages = [
            words(given.seed, "turn", number, turns, turn, tokens=given.turn_tokens) for turn in range(turns + 1)
        ]
        name = f"turn {turns + 1}"
        found.append(Case("multi-turn", name, turns, number, messages[:-1], messages[-1], chained=True))
    return found


def retrieval(given: argparse.Namespace, number: int) -> list[Case]:
    """A system prompt, retrieved documents, a question. Only what both prompts begin with can be used again."""
    kinds = {
        "the same documents": lambda seen, others: seen,
        "half of them in front": lambda seen, others: seen[: RETRIEVED // 2] + others[RETRIEVED // 2 :],
        "the same, another order": lambda seen, others: seen[::-1],
        "other documents": lambda seen, others: others,
    }
    found = []
    for size, (name, choose) in enumerate(kinds.items()):
        key = (given.seed, "rag", number, name)
        # Of each sample its own: else the engine itself would have it after the first.
        system = words(*key, "system", tokens=SYSTEM_TOKENS)
        seen, others = (
            [words(*key, who, i, tokens=given.document_tokens) for i in range(RETRIEVED)] for who in ("seen", "other")
        )
        first, then = (
            [*system, *flat(chosen), *words(*key, question, tokens=QUESTION_TOKENS)]
            for chosen, question in ((seen, "first"), (choose(seen, others), "then"))
        )
        found.append(Case("rag", name, size, number, [first], then))
    return found


def flat(documents: list[list[int]]) -> list[int]:
    return [token for document in documents for token in document]
