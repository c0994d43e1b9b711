"""The results for people."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from harness.rows import spread

from .measure import FIRST, MEMORY, PLAIN, PLAIN_FIRST, S3, Sample

# From here on loading is to be faster.
LONG_TOKENS = 8000
# A ratio's other side.
BESIDE = {FIRST: PLAIN_FIRST, S3: PLAIN, MEMORY: PLAIN}


@dataclass(frozen=True)
class Verdict:
    what: str
    got: str
    wanted: str
    kept: bool


class Samples:
    """By case, and by who answered."""

    def __init__(self, samples: list[Sample]) -> None:
        self.all = samples
        self.found = {(one.workload, one.case, one.round, one.who): one for one in samples}

    def cases(self, workload: str) -> list[tuple[int, str]]:
        return sorted({(one.size, one.case) for one in self.all if one.workload == workload})

    def of(self, workload: str, case: str, who: str) -> list[Sample]:
        return [one for (*names, _, by), one in self.found.items() if names == [workload, case] and by == who]

    def median(self, workload: str, case: str, who: str, what: Callable[[Sample], float]) -> float:
        return statistics.median([what(one) for one in self.of(workload, case, who)])

    def ratios(self, workload: str, case: str, who: str) -> list[float]:
        """TTFT with kvgate by that of plain vLLM, of each round."""
        return [one.ttft_s / self.beside(one).ttft_s for one in self.of(workload, case, who)]

    def beside(self, one: Sample) -> Sample:
        return self.found[one.workload, one.case, one.round, BESIDE[one.who]]

    def same(self, samples: list[Sample]) -> list[bool]:
        """Whether the tokens are those of plain vLLM."""
        return [one.tokens == self.beside(one).tokens for one in samples]


def verdicts(samples: Samples) -> list[Verdict]:
    found = []
    for size, case in samples.cases("documents"):
        if size >= LONG_TOKENS:
            for who in (S3, MEMORY):
                ratio = statistics.median(samples.ratios("documents", case, who))
                found.append(Verdict(f"TTFT of {case} {who} / computed", f"{ratio:.3g}", "< 1", ratio < 1))
    answers = [one for one in samples.all if one.who in BESIDE]
    same = sum(samples.same(answers))
    found.append(
        Verdict("answers that are plain vLLM's", f"{same} of {len(answers)}", "all in float32", same == len(answers))
    )
    loads = [one for one in answers if one.who in (S3, MEMORY)]
    hits = sum(one.reused > 0 for one in loads)
    found.append(Verdict("questions of which vLLM counted hits", f"{hits} of {len(loads)}", "all", hits == len(loads)))
    return found


def markdown(title: str, facts: list[str], samples: Samples) -> str:
    lines = [f"# {title}", "", *(f"- {fact}" for fact in facts), "", "## Wanted", ""]
    lines += ["| what | got | wanted | |", "|---|---:|---|---|"]
    for verdict in verdicts(samples):
        lines.append(
            f"| {verdict.what} | {verdict.got} | {verdict.wanted} | {'kept' if verdict.kept else '**MISSED**'} |"
        )
    if samples.cases("documents"):
        lines += ["", *documents(samples)]
    for workload, heading in (("multi-turn", "Conversations"), ("rag", "Retrieved documents")):
        if samples.cases(workload):
            lines += ["", *others(samples, workload, heading)]
    return "\n".join(lines) + "\n"


def documents(samples: Samples) -> list[str]:
    lines = [
        "## Long documents",
        "",
        "Seconds to the first token, medians. Ratios are those of a round: with kvgate / plain.",
        "",
        "| tokens | reused | plain | first pass | from S3 | from memory | first pass / plain | from S3 / plain | 10 % to 90 % "
        "| from memory / plain | same tokens |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---|---:|---|",
    ]
    for size, case in samples.cases("documents"):
        names = "documents", case
        seconds = [samples.median(*names, who, lambda one: one.ttft_s) for who in (PLAIN, FIRST, S3, MEMORY)]
        low, middle, high = spread(samples.ratios(*names, S3))
        first, memory = (statistics.median(samples.ratios(*names, who)) for who in (FIRST, MEMORY))
        answers = [one for who in BESIDE for one in samples.of(*names, who)]
        cells = [f"{size:,}", f"{samples.median(*names, S3, lambda one: one.reused):,.0f}"]
        cells += [f"{second:.3f}" for second in seconds]
        cells += [f"{first:.2f}", f"**{middle:.3f}**", f"{low:.3f} to {high:.3f}", f"{memory:.3f}"]
        cells += [f"{sum(samples.same(answers))}/{len(answers)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def others(samples: Samples, workload: str, heading: str) -> list[str]:
    lines = [
        f"## {heading}",
        "",
        "| | tokens | reused | plain | from S3 | from S3 / plain | 10 % to 90 % | same tokens |",
        "|---|---:|---:|---:|---:|---:|---|---|",
    ]
    for _, case in samples.cases(workload):
        answers = samples.of(workload, case, S3)
        low, middle, high = spread(samples.ratios(workload, case, S3))
        cells = [case]
        cells += [
            f"{samples.median(workload, case, S3, what):,.0f}"
            for what in (lambda one: one.prompt_tokens, lambda one: one.reused)
        ]
        cells += [f"{samples.median(workload, case, who, lambda one: one.ttft_s):.3f}" for who in (PLAIN, S3)]
        cells += [f"**{middle:.3f}**", f"{low:.3f} to {high:.3f}", f"{sum(samples.same(answers))}/{len(answers)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines
